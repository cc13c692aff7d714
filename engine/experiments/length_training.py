r"""Tiny causal transformers trained at one length and tested beyond it: a table, sinusoids, RoPE, ALiBi, no positions.

All have one layer, the same initialization and the same batches of ``trained_len`` tokens; how positions enter is all
that differs. The tasks ask for different things of them:

``copy_back``     name the token three places before: wants one exact offset
``last_marker``   name the last marked token, at or before this place; one in eight is marked: wants recency
``needle``        name the only marked token, which may stand anywhere before: wants content, at any distance

They are tested at 1 to 32 times the trained length, at the last eight positions of each sequence. The model with RoPE
is also tested with the frequencies of ``engine/context.py``, made for ``context_factor`` times the trained length: as
it is, or after ``tune_steps`` more steps at that length, with the loss on the last positions only.

The learned table has rows for every tested position, of which training has touched the first ``trained_len``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.context import SLOW_TURNS, attention_factor, frequencies, scaled_frequencies
from engine.encodings import alibi_bias, sinusoidal
from engine.positions import rotate
from engine.side_by_side import bare_layer_norm, times, token_losses
from engine.training import Adam

if TYPE_CHECKING:
    import torch

TRAINS = True
TRAINED = ("rope", "alibi", "no_positions", "sinusoidal", "learned_table")  # side by side, in this order
SCALED = {"rope_interpolation": "interpolation", "rope_ntk_aware": "ntk_aware", "rope_yarn": "yarn"}
VARIANTS = (*TRAINED, *SCALED)
RATIOS = {"trained_len": 1, "double": 2, "fourfold": 4, "eightfold": 8, "sixteenfold": 16, "thirtytwofold": 32}
N_TOKENS = 8  # chance is one in eight
OFFSET = 3
MARKED_SHARE = 1 / 8
D_MODEL = 32
BATCH = 16
TUNE_BATCH = 8
N_SCORED = 8  # positions at the end of a sequence
N_EVALUATION = 64  # sequences; the accuracy over 64 x 8 positions has a standard error of at most 0.03
TUNED_POSITIONS = 16  # the last ones, on which the tuning takes its loss
CHUNK = 16  # sequences evaluated together


@dataclass(frozen=True)
class Params(BaseParams):
    task: str = choice("copy_back", "last_marker", "needle")
    steps: int = number(300, low=10, high=2000, step=10)
    tune_steps: int = number(0, low=0, high=400, step=10)
    context_factor: float = number(8.0, low=1, high=32)
    trained_len: int = number(32, low=16, high=64, log2=True)
    n_heads: int = number(2, low=1, high=4, log2=True)
    base: float = number(100.0, low=10, high=1_000_000)
    fast_turns: float = number(4.0, low=1.5, high=32)
    learning_rate: float = number(0.01, low=0.0001, high=0.1)

    def rules(self) -> Iterator[Problem]:
        if D_MODEL % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": D_MODEL})


METRICS = tuple(
    Metric(f"accuracy_{variant}_{name}")
    for name in ("eightfold", "double", "trained_len", "thirtytwofold")
    for variant in VARIANTS
)
PLOTS = (
    Plot("accuracy", table="lengths", x="seq_len", y="accuracy", by="positions", x_scale="log2"),
    Plot("training", table="training", x="step", y="loss_nats", by="positions", y_unit="nats"),
)
BUDGET_S = 8.0

_Weights = dict[str, "torch.Tensor"]


class _Sequences(NamedTuple):
    """Shapes: tokens, targets, known (batch, n); known where the target can be told from what stands before."""

    tokens: torch.Tensor
    targets: torch.Tensor
    known: torch.Tensor


def memory_bytes(params: Params) -> int:
    """Weights with gradients and moments, a step's activations, and a chunk of the evaluation at the longest."""
    n, longest = params.trained_len, max(RATIOS.values()) * params.trained_len
    tuned = min(round(params.context_factor * n), longest)
    weights = 6 * len(TRAINED) * (4 * D_MODEL**2 + 3 * N_TOKENS * D_MODEL) + 8 * longest * D_MODEL
    step = len(TRAINED) * BATCH * n * (14 * D_MODEL + 6 * params.n_heads * n)
    tune = 4 * TUNE_BATCH * tuned * (14 * D_MODEL + 6 * params.n_heads * TUNED_POSITIONS) if params.tune_steps else 0
    evaluation = CHUNK * longest * (12 * D_MODEL + 4 * params.n_heads * N_SCORED)
    return 4 * (weights + max(step, tune, evaluation)) + 40 * N_EVALUATION * longest + 2**21


def run(params: Params, run: Run) -> Result:
    """Train the five side by side, then measure them and the scaled copies of the one with RoPE at all lengths.

    Guessing gives an accuracy of 1/8. Shapes: every tensor of weights has a leading axis ``model``.
    """
    weights = _draw_weights(params, run)
    share = params.steps / (params.steps + params.tune_steps + 40)  # of the progress; measuring counts as 40 steps
    losses = _train(params, run, weights, TRAINED, params.trained_len, params.steps, 0.0, share)
    models = {name: (weights, i) for i, name in enumerate(TRAINED)}
    if params.tune_steps:
        names = ("rope", *SCALED)
        tuned = {name: w[:1].detach().repeat(len(names), *[1] * (w.dim() - 1)) for name, w in weights.items()}
        tuned = {name: w.requires_grad_() for name, w in tuned.items()}
        length = round(params.context_factor * params.trained_len)
        end = (params.steps + params.tune_steps) / (params.steps + params.tune_steps + 40)
        _train(params, run, tuned, names, length, params.tune_steps, share, end)
        models |= {name: (tuned, i) for i, name in enumerate(names)}
    else:
        end = share
        models |= dict.fromkeys(SCALED, (weights, 0))
    accuracy: dict[tuple[str, str], float] = {}
    for place, (length_name, ratio) in enumerate(RATIOS.items()):
        sequences = _draw(params, run, N_EVALUATION, ratio * params.trained_len)
        for i, variant in enumerate(VARIANTS):
            run.progress(end + (1 - end) * (place + i / len(VARIANTS)) / len(RATIOS))
            own, index = models[variant]
            one = {name: w[index : index + 1] for name, w in own.items()}
            accuracy[variant, length_name] = _accuracy(params, run, one, variant, sequences)
    return _result(params, accuracy, losses)


# --------------------------------------------------------------------------------------------------------------------
# What is drawn


def _draw(params: Params, run: Run, batch: int, n: int) -> _Sequences:
    """Sequences of one task. A marked token is another token: its number plus N_TOKENS."""
    import torch

    drawn = torch.randint(N_TOKENS, (batch, n), generator=run.generator)
    places = torch.arange(n)
    if params.task == "copy_back":
        parts = drawn, drawn.roll(OFFSET, dims=1), (places >= OFFSET).expand(batch, n)
    elif params.task == "last_marker":
        marked = torch.rand(batch, n, generator=run.generator) < MARKED_SHARE
        last = torch.where(marked, places, -1).cummax(dim=1).values
        parts = drawn + N_TOKENS * marked, drawn.gather(1, last.clamp(min=0)), last >= 0
    else:
        needle = torch.randint(n - N_SCORED, (batch, 1), generator=run.generator)
        marked = places == needle
        parts = drawn + N_TOKENS * marked, drawn.gather(1, needle).expand(batch, n), places >= needle
    return _Sequences(*(part.to(run.device) for part in parts))


def _draw_weights(params: Params, run: Run) -> _Weights:
    """The same weights for every model. Embeddings and table N(0, 1), matrices of variance 1/d_model."""
    rows = max(RATIOS.values()) * params.trained_len
    drawn = {
        "tokens": run.randn(2 * N_TOKENS, D_MODEL),
        "layer": run.randn(4, D_MODEL, D_MODEL) / math.sqrt(D_MODEL),
        "unembedding": run.randn(N_TOKENS, D_MODEL) / math.sqrt(D_MODEL),
        "table": run.randn(rows, D_MODEL),
    }
    copies = {name: w.to(_dtype(run)).repeat(len(TRAINED), *[1] * w.dim()) for name, w in drawn.items()}
    return {name: w.requires_grad_() for name, w in copies.items()}


# --------------------------------------------------------------------------------------------------------------------
# The model


class _Positions:
    """How positions enter each of some models, for sequences of n tokens of which the last ones ask.

    Shapes: angles (model, 1, 1, n, d_k / 2), bias (model, 1, n_heads, asking, n), added (model, 1, n, d_model), gain
    (model, 1, 1, 1, 1), keep (asking, n).
    """

    def __init__(self, params: Params, run: Run, names: tuple[str, ...], n: int, asking: int) -> None:
        import torch

        places, dtype = torch.arange(n), _dtype(run)
        angles = torch.stack([_frequencies(params, name) for name in names])[:, None, None, None]
        self.angles = (places.cpu().double()[:, None] * angles).to(run.device, dtype)
        bias = alibi_bias(params.n_heads, places[n - asking :], places)
        of_alibi = torch.tensor([name == "alibi" for name in names])[:, None, None, None, None]
        self.bias = (of_alibi * bias).to(run.device, dtype)
        self.keep = (places <= places[n - asking :, None]).to(run.device)
        of_sinusoidal = torch.tensor([name == "sinusoidal" for name in names])[:, None, None, None]
        self.added = (of_sinusoidal * sinusoidal(places.cpu().double(), D_MODEL)).to(run.device, dtype)
        gains = [attention_factor(SCALED.get(name, "unscaled"), params.context_factor) ** 2 for name in names]
        self.gain = torch.tensor(gains)[:, None, None, None, None].to(run.device, dtype)
        self.of_table = torch.tensor([name == "learned_table" for name in names])[:, None, None, None].to(run.device)
        self.asking = asking


def _dtype(run: Run) -> torch.dtype:
    """float32 at least: lower ones would round the updates away."""
    import torch

    return torch.float64 if run.dtype == torch.float64 else torch.float32


def _frequencies(params: Params, name: str) -> torch.Tensor:
    """The frequencies of a model's rotation, 0 where it has none. Shapes: (d_k / 2,)."""
    d_k = D_MODEL // params.n_heads
    if name in SCALED:
        turns = {"slow_turns": SLOW_TURNS, "fast_turns": params.fast_turns}
        return scaled_frequencies(SCALED[name], d_k, params.base, params.context_factor, params.trained_len, **turns)
    theta = frequencies(d_k, params.base)
    return theta if name == "rope" else 0 * theta


def _forward(weights: _Weights, tokens: torch.Tensor, positions: _Positions) -> torch.Tensor:
    """Logits over the tokens at the last positions. Shapes: (batch, n) to (model, batch, asking, N_TOKENS)."""
    n, asking = tokens.shape[1], positions.asking
    x = weights["tokens"][:, tokens] + positions.added + positions.of_table * weights["table"][:, None, :n]
    W_q, W_k, W_v, W_o = weights["layer"].unbind(dim=1)
    h, n_heads = bare_layer_norm(x), positions.bias.shape[2]
    q = rotate(_heads(h[:, :, n - asking :], W_q, n_heads), positions.angles[..., n - asking :, :])
    k = rotate(_heads(h, W_k, n_heads), positions.angles)
    logits = positions.gain * attention_logits(q, k) + positions.bias
    rows = softmax(mask_logits(logits, positions.keep))
    heads = context(rows, _heads(h, W_v, n_heads)).transpose(2, 3).flatten(3)
    out = x[:, :, n - asking :] + times(heads, W_o)
    return bare_layer_norm(out) @ weights["unembedding"].mT[:, None]


def _heads(h: torch.Tensor, W: torch.Tensor, n_heads: int) -> torch.Tensor:
    """h @ W of each model, cut into heads: (model, batch, n, d_model) to (model, batch, n_heads, n, d_k)."""
    return times(h, W).unflatten(-1, (n_heads, -1)).transpose(2, 3)


def _losses(logits: torch.Tensor, sequences: _Sequences) -> torch.Tensor:
    """Mean cross-entropy in nats where the target is known. Shapes: (model, batch, asking, N_TOKENS) to (model,)."""
    asking = logits.shape[2]
    targets, known = sequences.targets[:, -asking:], sequences.known[:, -asking:]
    return (token_losses(logits, targets) * known).sum(dim=(1, 2)) / known.sum()


# --------------------------------------------------------------------------------------------------------------------
# Training and measuring


def _train(
    params: Params,
    run: Run,
    weights: _Weights,
    names: tuple[str, ...],
    n: int,
    steps: int,
    start: float,
    end: float,
) -> dict[int, np.ndarray]:
    """Adam on new sequences of n tokens; the losses on the way, by step. Tuning takes smaller batches."""
    tunes = names != TRAINED
    optimizer = Adam(list(weights.values()), params.learning_rate)
    positions = _Positions(params, run, names, n, TUNED_POSITIONS if tunes else n)
    losses: dict[int, np.ndarray] = {}
    every = max(1, steps // 25)
    for step in range(steps):
        run.progress(start + (end - start) * step / steps)
        sequences = _draw(params, run, TUNE_BATCH if tunes else BATCH, n)
        for weight in weights.values():
            weight.grad = None
        loss = _losses(_forward(weights, sequences.tokens, positions), sequences)
        loss.sum().backward()
        optimizer.step()
        if step % every == 0 or step == steps - 1:
            losses[step] = loss.detach().cpu().double().numpy()
    return losses


def _accuracy(params: Params, run: Run, weights: _Weights, name: str, sequences: _Sequences) -> float:
    """Share of the last positions at which the largest logit is that of the target, where it can be known."""
    import torch

    positions = _Positions(params, run, (name,), sequences.tokens.shape[1], N_SCORED)
    with torch.no_grad():
        found = [_forward(weights, tokens, positions)[0].argmax(dim=-1) for tokens in sequences.tokens.split(CHUNK)]
    known = sequences.known[:, -N_SCORED:]
    right = (torch.cat(found) == sequences.targets[:, -N_SCORED:]) & known
    return float(right.sum().item() / known.sum().item())


def _result(params: Params, accuracy: dict[tuple[str, str], float], losses: dict[int, np.ndarray]) -> Result:
    metrics = {m.name: accuracy[_split(m.name)] for m in METRICS}
    lengths: Table = {
        "seq_len": np.repeat([ratio * params.trained_len for ratio in RATIOS.values()], len(VARIANTS)),
        "positions": np.tile(VARIANTS, len(RATIOS)),
        "accuracy": np.array([accuracy[variant, name] for name in RATIOS for variant in VARIANTS]),
    }
    training: Table = {
        "step": np.repeat(list(losses), len(TRAINED)),
        "positions": np.tile(TRAINED, len(losses)),
        "loss_nats": np.concatenate(list(losses.values())).astype(np.float32),
    }
    return Result(metrics, {"lengths": lengths, "training": training})


def _split(metric: str) -> tuple[str, str]:
    """The variant and the length in a metric's name."""
    name = next(name for name in RATIOS if metric.endswith(f"_{name}"))
    return metric.removeprefix("accuracy_").removesuffix(f"_{name}"), name
