r"""Stacks of several depths trained with and without their residual path, several seeds side by side, drawn on the way.

Sequences follow a rule: a token is the one two places before it, plus 3, modulo 8; the first two are drawn at random.
To name the next token a model has to look two places back, which one layer of causal attention can do. Deeper stacks
could do the same and hand the answer on, if training finds out how.

Three wirings of the same layers, from the same start and on the same batches:

``plain_stack``   x ← f(x)
``skip_stack``    x ← x + f(x)
``scaled_stack``  x ← x + f(x), W_o and W_down divided by √(2 n_layers) at the start

Each is trained at depths 1, 2, 4, ... up to ``n_layers``, all with Adam and without warm-up. A last LayerNorm stands in
front of the unembedding. Who knows the rule has a loss of ln 8 at the first two predictions and 0 at all others: the
loss is that of the others alone.

Source: he2015, abstract (residual networks gain from depth).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.masks import keep_causal
from engine.residual_stream import Wiring, draw_stack, walk
from engine.side_by_side import times
from engine.training import Adam, stream

if TYPE_CHECKING:
    import torch

TRAINS = True
STACKS = ("plain_stack", "skip_stack", "scaled_stack")
SKIP_NORMS = {"normed_input": "pre_norm", "unnormed": "bare", "normed_output": "output_norm"}
N_TOKENS, STEP, BACK = 8, 3, 2  # the rule: STEP more than the token BACK places before
D_MODEL, D_FF = 32, 64
BATCH, SEQ_LEN = 16, 12
N_EVALUATION = 64  # sequences
N_RECORDS = 10  # points of a curve after the one at step 0
MAX_WORK = 40_000  # steps · layers of all depths · seeds


@dataclass(frozen=True)
class Params(BaseParams):
    n_layers: int = number(8, low=1, high=16, log2=True)
    skip_norm: str = choice(*SKIP_NORMS)
    learning_rate: float = number(0.003, low=0.0001, high=0.1)
    steps: int = number(120, low=10, high=2000, step=10)
    n_seeds: int = number(2, low=1, high=5)

    def rules(self) -> Iterator[Problem]:
        work = self.steps * sum(_depths(self.n_layers)) * self.n_seeds
        if work > MAX_WORK:
            values = {"product": work, "limit": MAX_WORK}
            yield Problem("rule", "steps", self.steps, rule="skip_training_too_long", values=values)


METRICS = (
    *(Metric(f"deepest_loss_{stack}", "nats") for stack in STACKS),
    *(Metric(f"shallowest_loss_{stack}", "nats") for stack in STACKS),
    *(Metric(f"deepest_worst_loss_{stack}", "nats") for stack in STACKS),
    *(Metric(f"deepest_best_loss_{stack}", "nats") for stack in STACKS),
    Metric("start_spread_plain_stack"),
    Metric("start_spread_skip_stack"),
)
PLOTS = (
    Plot(
        "loss",
        table="curves",
        x="step",
        y="loss_mean",
        by="skip_wiring",
        facet="depth_of_stack",
        low="loss_low",
        high="loss_high",
        y_unit="nats",
    ),
    Plot("by_depth", table="by_depth", x="n_layers", y="loss_mean", by="skip_wiring", x_scale="log2", y_unit="nats"),
)
BUDGET_S = 10.0

_Weights = dict[str, "torch.Tensor"]


def memory_bytes(params: Params) -> int:
    """Of every depth the weights with gradients and moments; of the deepest, a step's graph."""
    models = len(STACKS) * params.n_seeds
    layers = sum(_depths(params.n_layers))
    weights = layers * (4 * D_MODEL**2 + 2 * D_MODEL * D_FF) + 6 * (2 * N_TOKENS + SEQ_LEN) * D_MODEL
    tokens = max(BATCH, N_EVALUATION) * SEQ_LEN
    graph = params.n_layers * tokens * (24 * D_MODEL + 6 * D_FF + 6 * SEQ_LEN)
    return 8 * models * (5 * weights + graph) + 2**21


def run(params: Params, run: Run) -> Result:
    """Train all depths and wirings in turns of one step, and measure them 10 times on the way, on fixed sequences.

    ``deepest_loss``, ``shallowest_loss``: mean over the seeds, at the last measurement, at ``n_layers`` and at one
    layer; ``worst`` and ``best`` of the seeds. ``start_spread``: at the start, how much the tokens differ behind the
    deepest stack, as a share of their size, mean over the seeds.

    Shapes: every tensor of weights has a leading axis ``model``, the seeds of the first wiring, of the second, ...
    """
    from torch import no_grad

    first = run.generator.initial_seed()
    seeds = [first + i for i in range(params.n_seeds)]
    depths = _depths(params.n_layers)
    models = {depth: _draw_weights(seeds, depth, run) for depth in depths}
    optimizers = {depth: Adam(list(weights.values()), params.learning_rate) for depth, weights in models.items()}
    streams = [stream(seed, "train") for seed in seeds]
    evaluation = _draw_tokens([stream(seed, "evaluation") for seed in seeds], N_EVALUATION, run)
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    wiring = Wiring(SKIP_NORMS[params.skip_norm])
    records: dict[int, np.ndarray] = {}
    latest: Result | None = None
    spread = np.zeros(len(STACKS))
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1), latest)
        if step in due:
            losses = []
            for depth, weights in models.items():
                run.progress(step / (params.steps + 1), latest)
                with no_grad():
                    losses.append(_losses(weights, evaluation, wiring).cpu().double().numpy())
                    if step == 0 and depth == depths[-1]:
                        spread = _spread(weights, evaluation, wiring)
            records[step] = np.array(losses).reshape(len(depths), len(STACKS), -1)
            latest = _result(records, spread, depths, step / params.steps)
        if step < params.steps:
            tokens = _draw_tokens(streams, BATCH, run)
            for depth, weights in models.items():
                run.progress(step / (params.steps + 1), latest)
                for weight in weights.values():
                    weight.grad = None
                _losses(weights, tokens, wiring).sum().backward()
                optimizers[depth].step()
    assert latest is not None
    return latest


def _depths(n_layers: int) -> list[int]:
    """1, 2, 4, ... and the deepest."""
    return sorted({2**i for i in range(n_layers.bit_length()) if 2**i < n_layers} | {n_layers})


def _draw_tokens(streams: list[torch.Generator], batch: int, run: Run) -> torch.Tensor:
    """Sequences one token longer than a model reads. Shapes: (model, batch, SEQ_LEN + 1), int64: the seeds, thrice."""
    import torch

    starts = torch.stack([torch.randint(N_TOKENS, (batch, BACK), generator=g) for g in streams])
    columns = [starts[..., i] for i in range(BACK)]
    for t in range(BACK, SEQ_LEN + 1):
        columns.append((columns[t - BACK] + STEP) % N_TOKENS)
    return torch.stack(columns, dim=-1).repeat(len(STACKS), 1, 1).to(run.device)


def _draw_weights(seeds: list[int], depth: int, run: Run) -> _Weights:
    """The same numbers for all wirings of a seed. Embeddings N(0, 1), matrices of variance 1/fan_in."""
    import torch

    of_seeds = []
    for seed in seeds:
        generator = stream(seed, "init")

        def randn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(run.device, run.dtype)

        outer = {
            "tokens": randn(N_TOKENS, D_MODEL),
            "positions": randn(SEQ_LEN, D_MODEL),
            "unembedding": randn(D_MODEL, N_TOKENS) / math.sqrt(D_MODEL),
        }
        of_seeds.append(outer | draw_stack(randn, depth, D_MODEL, D_FF))
    weights = {}
    for name in of_seeds[0]:
        alike = torch.stack([of_seed[name] for of_seed in of_seeds])
        scale = (2 * depth) ** -0.5 if name in ("W_o", "W_down") else 1.0
        weights[name] = torch.cat((alike, alike, scale * alike)).requires_grad_()
    return weights


def _out(weights: _Weights, tokens: torch.Tensor, wiring: Wiring) -> torch.Tensor:
    """The stream behind the last layer. Shapes: tokens (model, batch, n); returns (model, batch, n, D_MODEL)."""
    from torch.nn.functional import one_hot

    x = times(one_hot(tokens, N_TOKENS).to(weights["tokens"].dtype), weights["tokens"])
    x = x + weights["positions"][:, None]
    carried = x.new_tensor((0.0, 1.0, 1.0)).repeat_interleave(len(x) // len(STACKS)).view(-1, 1, 1, 1)
    layers = {name: w for name, w in weights.items() if name.startswith("W_")}
    for step in walk(layers, x, wiring, keep=keep_causal(SEQ_LEN, device=x.device), carried=carried):
        x = step.stream
    return x


def _losses(weights: _Weights, tokens: torch.Tensor, wiring: Wiring) -> torch.Tensor:
    """Mean cross-entropy of each model where the rule decides, in nats. Shapes: (model,)."""
    from torch.nn.functional import cross_entropy, layer_norm

    x = layer_norm(_out(weights, tokens[..., :-1], wiring), (D_MODEL,))
    token_logits = times(x, weights["unembedding"])[:, :, BACK - 1 :]
    targets = tokens[..., BACK:]
    loss = cross_entropy(token_logits.flatten(0, 2), targets.flatten(), reduction="none")
    return loss.view(targets.shape).mean(dim=(1, 2))


def _spread(weights: _Weights, tokens: torch.Tensor, wiring: Wiring) -> np.ndarray:
    """How much the tokens of a sequence differ behind the stack. Shapes: (stack,)."""
    x = _out(weights, tokens[..., :-1], wiring).cpu().double()
    apart = (x - x.mean(dim=2, keepdim=True)).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    return np.array(apart.view(len(STACKS), -1).mean(dim=1).numpy())


def _result(records: dict[int, np.ndarray], spread: np.ndarray, depths: list[int], done: float) -> Result:
    """Metrics and curves of what is recorded so far. Shapes: a record (depth, stack, seed)."""
    last = list(records.values())[-1]
    metrics = {}
    for i, stack in enumerate(STACKS):
        metrics[f"deepest_loss_{stack}"] = last[-1, i].mean()
        metrics[f"shallowest_loss_{stack}"] = last[0, i].mean()
        metrics[f"deepest_worst_loss_{stack}"] = last[-1, i].max()
        metrics[f"deepest_best_loss_{stack}"] = last[-1, i].min()
    metrics["start_spread_plain_stack"], metrics["start_spread_skip_stack"] = spread[0], spread[1]
    of_all = np.stack(list(records.values()))  # (record, depth, stack, seed)
    steps, n_depths = list(records), len(depths)
    curves: Table = {
        "step": np.repeat(steps, n_depths * len(STACKS)),
        "depth_of_stack": np.tile(np.repeat(depths, len(STACKS)), len(steps)),
        "skip_wiring": np.tile(STACKS, len(steps) * n_depths),
        "loss_mean": of_all.mean(axis=3).ravel(),
        "loss_low": of_all.min(axis=3).ravel(),
        "loss_high": of_all.max(axis=3).ravel(),
    }
    by_depth: Table = {
        "n_layers": np.repeat(depths, len(STACKS)),
        "skip_wiring": np.tile(STACKS, n_depths),
        "loss_mean": last.mean(axis=2).ravel(),
    }
    ordered = {m.name: float(metrics[m.name]) for m in METRICS}
    return Result(ordered, {"curves": curves, "by_depth": by_depth}, done)
