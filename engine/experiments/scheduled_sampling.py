r"""Training on prefixes that the model writes itself: small transformers under four shares of own tokens.

The tokens follow a rule with noise: with probability ``rule_share`` a token is the one two places before it, plus 3,
modulo 8; else it is drawn at random. Teacher forcing puts the tokens of the data before every target. Scheduled
sampling puts, for some of them, tokens that the model has drawn behind the prefix so far; the targets stay those of the
data. Here the share of own tokens is constant, so that each curve shows what its share leads to; in the method it
grows in the course of training. Gradients do not pass through what is drawn.

Own tokens come

``one_after_another``  each drawn behind a prefix that holds the own tokens before it: a pass for each place
``from_one_pass``      all drawn in one pass over the tokens of the data, and put in together

The models share initialization, batches and the random numbers of their draws; the share is all that differs. The
*floor* is the loss of whoever knows the rule and sees the tokens of the data. A target behind an own token is no longer
what the rule makes of that token, so what is learned is a mixture of the law of the data and of a flatter one.

Sources: bengio2015, abstract (the method); huszar2015, abstract (its objective is improper); mihaylova2019, abstract
(two passes for transformers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.masks import keep_causal
from engine.noisy_rule import N_TOKENS, draw_tokens, floor_nats, follows
from engine.side_by_side import bare_layer_norm, times, token_losses
from engine.speculative import choose
from engine.training import Adam

if TYPE_CHECKING:
    import torch

TRAINS = True
SHARES = (0.0, 0.25, 0.5, 1.0)  # of own tokens
NAMES = ("own_0", "own_25", "own_50", "own_100")
D_MODEL = 32
BATCH = 32
N_EVALUATION = 128  # sequences, the same for all models and for the floor
N_WRITTEN = 128  # sequences that each model writes by itself at the end
N_RECORDS = 12  # points of a curve after the one at step 0


@dataclass(frozen=True)
class Params(BaseParams):
    own_tokens_come: str = choice("one_after_another", "from_one_pass")
    steps: int = number(300, low=10, high=1000, step=10)
    seq_len: int = number(8, low=4, high=16)
    rule_share: float = number(0.8, low=0.0, high=1.0, step=0.05)
    learning_rate: float = number(0.01, low=0.0001, high=0.1)


METRICS = (
    Metric("floor_nats", "nats"),
    *(Metric(f"data_prefix_loss_nats_{name}", "nats") for name in NAMES),
    Metric("rule_kept_in_data"),
    *(Metric(f"rule_kept_{name}") for name in NAMES),
    Metric("dependent_passes_per_step"),
)
PLOTS = (
    Plot(
        "loss",
        table="curves",
        x="step",
        y="data_prefix_loss_nats",
        by="own_tokens",
        theory="floor_nats",
        y_unit="nats",
        one_law=True,
    ),
    Plot("written", table="written", x="own_tokens", y="rule_kept", theory="rule_kept_in_data", mark="bar"),
)
BUDGET_S = 5.0

_Weights = dict[str, "torch.Tensor"]


def memory_bytes(params: Params) -> int:
    """Weights with gradients and moments, a step's activations, and the evaluation in one pass."""
    weights = 6 * len(SHARES) * (4 * D_MODEL**2 + (2 * N_TOKENS + params.seq_len) * D_MODEL)
    a_sequence = params.seq_len * (12 * D_MODEL + 6 * params.seq_len + 6 * N_TOKENS)
    sequences = 2 * BATCH + N_EVALUATION + N_WRITTEN
    return 4 * (weights + len(SHARES) * sequences * a_sequence) + 32 * sequences * params.seq_len + 2**20


def run(params: Params, run: Run) -> Result:
    """Train the four side by side; a record of the loss 12 times on the way, before the step it names.

    ``data_prefix_loss_nats``: on new sequences, behind the tokens of the data. ``rule_kept``: share of the tokens that
    a model writes by itself, behind the first two of a sequence of the data, that are what the rule says.
    ``dependent_passes_per_step``: passes of a step of training that had to wait for one another, that of the loss
    among them; the way back not counted.

    Shapes: every tensor of weights has a leading axis ``model``, one for each share.
    """
    models = _Models(params, run)
    optimizer = Adam(list(models.weights.values()), params.learning_rate)
    evaluation = draw_tokens(run, N_EVALUATION, params.seq_len + 1, params.rule_share)
    floor = floor_nats(evaluation, params.rule_share)
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    losses: dict[int, np.ndarray] = {}
    latest: Result | None = None
    passes = 0
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1), latest)
        if step in due:
            losses[step] = models.evaluate(evaluation)
            latest = _result(params, losses, floor, {}, passes, step / params.steps)
        if step < params.steps:
            tokens = draw_tokens(run, BATCH, params.seq_len + 1, params.rule_share)
            before = models.n_passes
            read = models.mix(params, run, tokens[:, :-1])
            for weight in models.weights.values():
                weight.grad = None
            token_losses(models.forward(read), tokens[:, 1:]).mean(dim=(1, 2)).sum().backward()
            passes = models.n_passes - before
            optimizer.step()
    written = models.write(run, draw_tokens(run, N_WRITTEN, params.seq_len + 1, params.rule_share)[:, :2])
    kept = {name: _rule_kept(tokens) for name, tokens in zip(NAMES, written, strict=True)}
    kept["in_data"] = _rule_kept(evaluation)
    return _result(params, losses, floor, kept, passes, 1.0)


def _rule_kept(tokens: torch.Tensor) -> float:
    return float(follows(tokens).cpu().double().mean())


# --------------------------------------------------------------------------------------------------------------------
# The models


class _Models:
    """One layer of causal attention over token and position vectors, once for each share."""

    def __init__(self, params: Params, run: Run) -> None:
        """The same weights for every share. Embeddings N(0, 1), matrices of variance 1/d_model."""
        import torch

        drawn = {
            "tokens": run.randn(N_TOKENS, D_MODEL),
            "positions": run.randn(params.seq_len, D_MODEL),
            "layer": run.randn(4, D_MODEL, D_MODEL) / math.sqrt(D_MODEL),
            "unembedding": run.randn(N_TOKENS, D_MODEL) / math.sqrt(D_MODEL),
        }
        copies = {name: w.repeat(len(SHARES), *[1] * w.dim()) for name, w in drawn.items()}
        self.weights = {name: w.requires_grad_() for name, w in copies.items()}
        self.shares = torch.tensor(SHARES, device=run.device)[:, None, None]
        self.keep = keep_causal(params.seq_len, device=run.device)
        self.n_passes = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token logits. Shapes: tokens (model, batch, n); returns (model, batch, n, N_TOKENS)."""
        import torch
        from torch.nn.functional import one_hot

        self.n_passes += 1
        n = tokens.shape[-1]
        marks = one_hot(tokens, N_TOKENS).to(self.weights["tokens"].dtype)
        x = times(marks, self.weights["tokens"]) + self.weights["positions"][:, None, :n]
        W_q, W_k, W_v, W_o = torch.unbind(self.weights["layer"], dim=1)
        h = bare_layer_norm(x)
        x = x + times(attention(times(h, W_q), times(h, W_k), times(h, W_v), keep=self.keep[:n, :n]), W_o)
        return times(bare_layer_norm(x), self.weights["unembedding"].mT)

    def mix(self, params: Params, run: Run, tokens: torch.Tensor) -> torch.Tensor:
        """What each model reads: tokens of the data, and its own in their place by a coin for each place but the first.

        Shapes: tokens (batch, n); returns (model, batch, n).
        """
        import torch

        batch, n = tokens.shape
        own_here = torch.rand(batch, n, generator=run.generator).to(run.device) < self.shares
        u = run.rand(batch, n)
        read = tokens.repeat(len(SHARES), 1, 1)
        with torch.no_grad():
            if params.own_tokens_come == "from_one_pass":
                drawn = choose(self.forward(read).softmax(dim=-1), u.expand(read.shape))
                own = torch.cat((tokens[None, :, :1].expand(len(SHARES), -1, -1), drawn[..., :-1]), dim=-1)
                own_here[..., 0] = False
                return torch.where(own_here, own, read)
            for t in range(1, n):
                p = self.forward(read[..., :t])[..., -1, :].softmax(dim=-1)
                own = choose(p, u[:, t - 1].expand(read.shape[:2]))
                read[..., t] = torch.where(own_here[..., t], own, read[..., t])
        return read

    def write(self, run: Run, first: torch.Tensor) -> torch.Tensor:
        """Sequences that each model writes by itself behind the first two tokens. Shapes: (batch, 2) to
        (model, batch, seq_len + 1).
        """
        import torch

        tokens = first.repeat(len(SHARES), 1, 1)
        with torch.no_grad():
            while tokens.shape[-1] <= self.keep.shape[0]:
                run.progress(1.0)
                p = self.forward(tokens)[..., -1, :].softmax(dim=-1)
                next_token = choose(p, run.rand(len(first)).expand(tokens.shape[:2]))
                tokens = torch.cat((tokens, next_token[..., None]), dim=-1)
        return tokens

    def evaluate(self, tokens: torch.Tensor) -> np.ndarray:
        """The loss behind the tokens of the data. Shapes: (batch, n + 1) to (model,)."""
        import torch

        with torch.no_grad():
            logits = self.forward(tokens[:, :-1].expand(len(SHARES), -1, -1))
            return np.asarray(token_losses(logits, tokens[:, 1:]).mean(dim=(1, 2)).cpu().double())


def _result(
    params: Params, losses: dict[int, np.ndarray], floor: float, kept: dict[str, float], passes: int, done: float
) -> Result:
    """Metrics and curves of what is recorded so far; before the end nothing has been written yet."""
    latest = next(reversed(losses.values()))
    metrics = {"floor_nats": floor}
    metrics |= {f"data_prefix_loss_nats_{name}": float(loss) for name, loss in zip(NAMES, latest, strict=True)}
    metrics |= {f"rule_kept_{name}": kept[name] for name in ("in_data", *NAMES) if kept}
    metrics["dependent_passes_per_step"] = float(passes)
    steps = np.array(list(losses))
    curves: Table = {
        "step": np.repeat(steps, len(SHARES)),
        "own_tokens": np.tile(np.array(NAMES), len(steps)),
        "data_prefix_loss_nats": np.concatenate(list(losses.values())).astype(np.float32),
        "floor_nats": np.full(len(steps) * len(SHARES), floor),
    }
    if not kept:
        return Result(metrics, {"curves": curves}, done)
    written: Table = {
        "own_tokens": np.array(NAMES),
        "rule_kept": np.array([kept[name] for name in NAMES]),
        "rule_kept_in_data": np.full(len(NAMES), kept["in_data"]),
    }
    return Result(metrics, {"curves": curves, "written": written}, done)
