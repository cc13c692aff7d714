r"""What a model learns when it may look at the token it is asked for: small transformers trained under five masks.

The tokens follow a rule with noise: with probability ``rule_share`` a token is the one two places before it, plus 3,
modulo 8; else it is drawn at random. What the past says of the next token is exactly that, so the *floor* for a model
that sees only the past is the loss of the rule itself. A loss below the floor is not a better model, it is a leak.

The models share initialization and batches; the mask is all that differs:

``causal``         -inf above the diagonal
``no_mask``        nothing hidden
``one_ahead``      the diagonal off by one: position t sees t + 1, which is its target
``times_zero``     logits above the diagonal multiplied by 0 before the softmax
``after_softmax``  weights above the diagonal multiplied by 0 after it

The *loss* is that of training, all positions of new sequences in one pass. The *generation loss* gives each position
only what generation would: the tokens up to it, with the model's own mask on them.

Source: vaswani2017, section 3.2.3; transformers-48745 (the same, by accident).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import context, mask_logits, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, number
from engine.masks import keep_causal, keep_named
from engine.noisy_rule import N_TOKENS, draw_tokens, floor_nats
from engine.side_by_side import bare_layer_norm, times, token_losses
from engine.training import Adam

if TYPE_CHECKING:
    import torch

TRAINS = True
VARIANTS = ("causal", "no_mask", "one_ahead", "times_zero", "after_softmax")
D_MODEL = 32
BATCH = 32
N_EVALUATION = 128  # sequences, the same for all models and for the floor
N_RECORDS = 12  # points of a curve after the one at step 0


@dataclass(frozen=True)
class Params(BaseParams):
    steps: int = number(400, low=10, high=2000, step=10)
    seq_len: int = number(16, low=4, high=32)
    rule_share: float = number(0.8, low=0.0, high=1.0, step=0.05)
    n_layers: int = number(1, low=1, high=3)
    learning_rate: float = number(0.01, low=0.0001, high=0.1)


METRICS = (
    Metric("floor_nats", "nats"),
    *(Metric(f"{name}_nats_{variant}", "nats") for variant in VARIANTS for name in ("loss", "generation_loss")),
)
PLOTS = (
    Plot("loss", table="curves", x="step", y="loss_nats", by="mask", theory="floor_nats", y_unit="nats", one_law=True),
    Plot(
        "generation_loss",
        table="curves",
        x="step",
        y="generation_loss_nats",
        by="mask",
        theory="floor_nats",
        y_unit="nats",
        one_law=True,
    ),
)
BUDGET_S = 5.0

_Weights = dict[str, "torch.Tensor"]


def memory_bytes(params: Params) -> int:
    """Weights with gradients and moments, a step's activations, and the evaluation in one pass."""
    per_layer = 4 * D_MODEL**2
    weights = 6 * len(VARIANTS) * (params.n_layers * per_layer + (2 * N_TOKENS + params.seq_len) * D_MODEL)
    a_sequence = params.n_layers * params.seq_len * (9 * D_MODEL + 6 * params.seq_len)
    sequences = 2 * BATCH + N_EVALUATION
    return 4 * (weights + len(VARIANTS) * sequences * a_sequence) + 32 * sequences * params.seq_len + 2**20


def run(params: Params, run: Run) -> Result:
    """Train the five side by side; a record of both losses 12 times on the way, before the step it names.

    ``floor_nats``: the loss, on the sequences that all are measured on, of whoever knows the rule. A model that sees
    only the past does no better, but for luck on a few sequences.

    Shapes: every tensor of weights has a leading axis ``model``, one for each mask.
    """

    weights = _draw_weights(params, run)
    optimizer = Adam(list(weights.values()), params.learning_rate)
    masks = _Masks(params.seq_len, run.device)
    evaluation = draw_tokens(run, N_EVALUATION, params.seq_len + 1, params.rule_share)
    floor = floor_nats(evaluation, params.rule_share)
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    records: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    latest: Result | None = None
    for step in range(params.steps + 1):
        done = step / (params.steps + 1)
        run.progress(done, latest)
        if step in due:
            records[step] = _measure(weights, evaluation, masks, partial(run.progress, done, latest))
            latest = _result(records, floor, step / params.steps)
        if step < params.steps:
            tokens = draw_tokens(run, BATCH, params.seq_len + 1, params.rule_share)
            for weight in weights.values():
                weight.grad = None
            token_losses(_forward(weights, tokens[:, :-1], masks), tokens[:, 1:]).mean(dim=(1, 2)).sum().backward()
            optimizer.step()
    assert latest is not None
    return latest


# --------------------------------------------------------------------------------------------------------------------
# The models


class _Masks:
    """What each model does to the logits of a sequence of any length up to seq_len."""

    def __init__(self, seq_len: int, device: torch.device) -> None:
        import torch

        # the models that hide by -inf, each with its own mask; the other two see all logits
        hides = [keep_named(v if v in ("causal", "one_ahead") else "no_mask", seq_len, device=device) for v in VARIANTS]
        self.keep = torch.stack(hides)[:, None]  # (model, 1, seq_len, seq_len)
        self.past = keep_causal(seq_len, device=device)
        every = torch.ones(len(VARIANTS), 1, seq_len, seq_len, dtype=torch.bool, device=device)
        self.before, self.after = every.clone(), every
        self.before[VARIANTS.index("times_zero")] = self.past
        self.after[VARIANTS.index("after_softmax")] = self.past

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Shapes: (model, batch, n, n), in and out."""
        n = logits.shape[-1]
        keep, before, after = (mask[..., :n, :n] for mask in (self.keep, self.before, self.after))
        return softmax(mask_logits(logits * before, keep)) * after


def _draw_weights(params: Params, run: Run) -> _Weights:
    """The same weights for every mask. Embeddings N(0, 1), matrices of variance 1/d_model."""
    n = params.n_layers
    drawn = {
        "tokens": run.randn(N_TOKENS, D_MODEL),
        "positions": run.randn(params.seq_len, D_MODEL),
        "layers": run.randn(n, 4, D_MODEL, D_MODEL) / math.sqrt(D_MODEL),
        "unembedding": run.randn(N_TOKENS, D_MODEL) / math.sqrt(D_MODEL),
    }
    copies = {name: w.repeat(len(VARIANTS), *[1] * w.dim()) for name, w in drawn.items()}
    return {name: w.requires_grad_() for name, w in copies.items()}


def _forward(weights: _Weights, tokens: torch.Tensor, masks: _Masks) -> torch.Tensor:
    """Token logits of every model. Shapes: tokens (batch, n); returns (model, batch, n, N_TOKENS)."""
    x = weights["tokens"][:, tokens] + weights["positions"][:, None, : tokens.shape[-1]]
    for layer in weights["layers"].unbind(dim=1):
        W_q, W_k, W_v, W_o = layer.unbind(dim=1)
        h = bare_layer_norm(x)
        rows = masks.weights(qk_product(times(h, W_q), times(h, W_k)) / math.sqrt(D_MODEL))
        x = x + times(context(rows, times(h, W_v)), W_o)
    return times(bare_layer_norm(x), weights["unembedding"].mT)


def _measure(
    weights: _Weights, tokens: torch.Tensor, masks: _Masks, progress: Callable[[], None]
) -> tuple[np.ndarray, np.ndarray]:
    """The loss in one pass over the sequences, and with only the prefix given. Shapes: (model,) each."""
    import torch

    read, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        one_pass = token_losses(_forward(weights, read, masks), targets).mean(dim=(1, 2))
        generated = torch.zeros_like(one_pass)
        for n in range(1, read.shape[1] + 1):
            progress()
            last = _forward(weights, read[:, :n], masks)[:, :, -1:]
            generated += token_losses(last, targets[:, n - 1 : n]).mean(dim=(1, 2)) / read.shape[1]
    return one_pass.cpu().double().numpy(), generated.cpu().double().numpy()


def _result(records: dict[int, tuple[np.ndarray, np.ndarray]], floor: float, done: float) -> Result:
    """Metrics and curves of what is recorded so far."""
    loss, generation = (np.stack([record[i] for record in records.values()]) for i in (0, 1))  # (record, model)
    metrics = {"floor_nats": floor}
    for i, variant in enumerate(VARIANTS):
        metrics[f"loss_nats_{variant}"] = float(loss[-1, i])
        metrics[f"generation_loss_nats_{variant}"] = float(generation[-1, i])
    steps = np.array(list(records))
    table: Table = {
        "step": np.repeat(steps, len(VARIANTS)),
        "mask": np.tile(np.array(VARIANTS), len(steps)),
        "loss_nats": loss.ravel().astype(np.float32),
        "generation_loss_nats": generation.ravel().astype(np.float32),
        "floor_nats": np.full(loss.size, floor),
    }
    return Result(metrics, {"curves": table}, done)
