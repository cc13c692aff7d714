r"""Two lookups at once, learned: by one head of the whole width, by several narrow ones, and by heads that start alike.

A sequence has ``kv_len`` slots, each the sum of the embeddings of a cue and of one of eight answers. A query names two
cues, and which is first; the model has to name the answer of the first cue in its first output and that of the second
cue in its second one. Behind the heads everything is linear:

    x = LN(cue + answer),  k = W_k x,  v = W_v x,  q = W_q LN(first + second),  class logits = W_o [head 1; head 2; ...]

With ``n_lookups`` 1 both cues are the same. All variants have matrices of the same size, drawn with variance
1/d_model: ``one_head`` and ``several_heads`` start from the same numbers, cut into heads or not, and ``same_start``
repeats those of the first head, moved by ``own_share`` towards each head's own. They see the same batches.

Heads that start alike, W_v and W_o included, get the same gradients, as nothing tells them apart: they stay alike, and
together are one head of a part of the width. Drawing them at random breaks this symmetry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, number
from engine.training import BATCH, D_MODEL, DRAW_STEPS, N_ANSWERS, Adam, stream

if TYPE_CHECKING:
    import torch

TRAINS = True


@dataclass(frozen=True)
class Params(BaseParams):
    n_heads: int = number(2, low=2, high=8, log2=True)
    kv_len: int = number(8, low=2, high=32, log2=True)
    n_lookups: int = number(2, low=1, high=2)
    own_share: float = number(0.0, low=0, high=1, step=0.05)
    learning_rate: float = number(0.003, low=0.0001, high=0.1)
    steps: int = number(400, low=10, high=4000, step=10)
    n_seeds: int = number(3, low=1, high=10)

    def rules(self) -> Iterator[Problem]:
        if D_MODEL % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": D_MODEL})


N_TARGETS = 2
N_EVALUATION = 256  # sequences: a share of them has a standard error of at most 0.031
N_RECORDS = 25  # points of a curve after the one at step 0
VARIANTS = ("one_head", "several_heads", "same_start")

METRICS = (
    *(Metric(f"accuracy_mean_{variant}") for variant in VARIANTS),
    *(Metric(f"accuracy_{suffix}_{variant}") for variant in VARIANTS for suffix in ("min", "max")),
    Metric("row_cosine_start_several_heads"),
    Metric("row_cosine_several_heads"),
    Metric("row_difference_same_start"),
)
PLOTS = (
    Plot("accuracy", "curves", "step", "accuracy_mean", by="variant", low="accuracy_low", high="accuracy_high"),
    Plot("loss", "curves", "step", "loss_mean", by="variant", low="loss_low", high="loss_high", y_unit="nats"),
    Plot("row_cosine", "cosines", "step", "row_cosine", by="variant"),
)
BUDGET_S = 10.0


class _Sequences(NamedTuple):
    """Shapes: answers (model, batch, kv_len), asked (model, batch, 2): the slots that are asked for, in order."""

    answers: torch.Tensor
    asked: torch.Tensor


def memory_bytes(params: Params) -> int:
    """Weights with gradients and moments, one variant's activations at a step and at a measurement, the batches."""
    models = params.n_seeds
    weights = (4 * D_MODEL + 3 * params.kv_len + N_ANSWERS + 2 * N_ANSWERS) * D_MODEL
    slots = max(BATCH, N_EVALUATION) * params.kv_len
    activations = slots * (N_ANSWERS * params.kv_len + 6 * D_MODEL + 4 * params.n_heads)
    drawn = 2 * (DRAW_STEPS * BATCH + N_EVALUATION) * (params.kv_len + 4)
    return 8 * models * (3 * 5 * weights + 4 * activations) + 8 * models * drawn


def run(params: Params, run: Run) -> Result:
    """Train the three variants on the same batches, and measure all of them 25 times on the way, on fixed sequences.

    ``accuracy``: share of the queries of which both answers are right; guessing gives 1/64. ``row_cosine``: cosine of
    the rows of weights of two heads for the same query, mean over queries and pairs of heads.
    ``row_difference_same_start``: the largest difference between two heads' weights at the end. ``low`` and ``high``
    are the lowest and highest seed.
    """
    first_seed = run.generator.initial_seed()
    seeds = [first_seed + i for i in range(params.n_seeds)]
    variants = _draw_variants(params, run, seeds)
    optimizers = {name: Adam(list(weights.values()), params.learning_rate) for name, weights in variants.items()}
    batches = _batches(params, run, seeds)
    evaluation = _for_models(run, [_draw(params, stream(seed, "evaluation"), N_EVALUATION) for seed in seeds])
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    records: dict[int, dict[str, _Record]] = {}
    latest: Result | None = None
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1), latest)
        if step in due:
            records[step] = {name: _measure(weights, evaluation) for name, weights in variants.items()}
            latest = _result(records, step / params.steps)
        if step < params.steps:
            batch = next(batches)
            for name, weights in variants.items():
                for weight in weights.values():
                    weight.grad = None
                class_logits, _ = _forward(weights, batch)
                _losses(class_logits, batch).sum().backward()
                optimizers[name].step()
    assert latest is not None
    return latest


# --------------------------------------------------------------------------------------------------------------------
# What is drawn


def _draw_variants(params: Params, run: Run, seeds: list[int]) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of the variants at step 0, those of all seeds side by side.

    Shapes: E_cue, E_first, E_second (model, kv_len, d_model), E_answer (model, N_ANSWERS, d_model), W_q, W_k, W_v
    (model, n_heads, d_k, d_model), W_o (model, n_heads, 2 · N_ANSWERS, d_v).
    """
    import torch

    dtype = torch.float64 if run.dtype == torch.float64 else torch.float32  # lower ones would round the updates away
    drawn = []
    for seed in seeds:
        generator = stream(seed, "init")
        rows = {"E_cue": params.kv_len, "E_first": params.kv_len, "E_second": params.kv_len, "E_answer": N_ANSWERS}
        sizes = rows | {"W_q": D_MODEL, "W_k": D_MODEL, "W_v": D_MODEL, "W_o": N_TARGETS * N_ANSWERS}
        drawn.append({name: torch.randn(size, D_MODEL, generator=generator) for name, size in sizes.items()})
    whole = {name: torch.stack([weights[name] for weights in drawn]).to(run.device, dtype) for name in drawn[0]}
    variants = {
        "one_head": _cut(whole, 1),
        "several_heads": _cut(whole, params.n_heads),
        "same_start": _cut(whole, params.n_heads),
    }
    for name, weight in variants["same_start"].items():
        if name.startswith("W_"):
            variants["same_start"][name] = weight[:, :1].lerp(weight, params.own_share)
    for weights in variants.values():
        for weight in weights.values():
            weight.requires_grad_()
    return variants


def _cut(whole: dict[str, torch.Tensor], n_heads: int) -> dict[str, torch.Tensor]:
    """Matrices of variance 1/d_model, cut into heads: W_q, W_k and W_v by rows, W_o by columns."""
    cut = {}
    for name, weight in whole.items():
        if name in ("W_q", "W_k", "W_v"):
            weight = weight.unflatten(1, (n_heads, -1))
        elif name == "W_o":
            weight = weight.unflatten(2, (n_heads, -1)).transpose(1, 2)
        cut[name] = weight / math.sqrt(D_MODEL) if name.startswith("W_") else weight.clone()
    return cut


def _draw(params: Params, generator: torch.Generator, *shape: int) -> _Sequences:
    """Uniform answers, and the slots that are asked for. A slot's number is its cue: nothing else tells its place."""
    import torch

    answers = torch.randint(N_ANSWERS, (*shape, params.kv_len), generator=generator)
    order = torch.rand(*shape, params.kv_len, generator=generator).argsort(dim=-1)
    return _Sequences(answers, torch.stack((order[..., 0], order[..., params.n_lookups - 1]), dim=-1))


def _for_models(run: Run, drawn: list[_Sequences]) -> _Sequences:
    import torch

    return _Sequences(*(torch.stack(parts).to(run.device) for parts in zip(*drawn, strict=True)))


def _batches(params: Params, run: Run, seeds: list[int]) -> Iterator[_Sequences]:
    """One batch for each seed, step after step."""
    streams = [stream(seed, "train") for seed in seeds]
    while True:
        block = _for_models(run, [_draw(params, g, DRAW_STEPS, BATCH) for g in streams])
        for step in range(DRAW_STEPS):
            yield _Sequences(*(part[:, step] for part in block))


# --------------------------------------------------------------------------------------------------------------------
# The model


def _forward(weights: dict[str, torch.Tensor], sequences: _Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Class logits of both outputs, and the heads' weights.

    Shapes: (model, batch, 2, N_ANSWERS), (model, n_heads, batch, kv_len).
    """
    from torch.nn.functional import layer_norm, one_hot

    dtype, kv_len = weights["E_cue"].dtype, weights["E_cue"].shape[1]
    answers = one_hot(sequences.answers, N_ANSWERS).to(dtype) @ weights["E_answer"][:, None]
    x = layer_norm(weights["E_cue"][:, None] + answers, (D_MODEL,))[:, None]  # (model, 1, batch, kv_len, d_model)
    asked = one_hot(sequences.asked, kv_len).to(dtype)
    query = asked[:, :, 0] @ weights["E_first"] + asked[:, :, 1] @ weights["E_second"]
    x_q = layer_norm(query, (D_MODEL,))[:, None, :, None]  # (model, 1, batch, 1, d_model)

    q, k, v = (y @ weights[name][:, :, None].mT for y, name in ((x_q, "W_q"), (x, "W_k"), (x, "W_v")))
    rows = softmax(attention_logits(q, k))  # (model, n_heads, batch, 1, kv_len)
    heads = context(rows, v)[..., 0, :]  # (model, n_heads, batch, d_v)
    class_logits = (heads @ weights["W_o"].mT).sum(dim=1)  # as the product of all heads side by side with all of W_o
    return class_logits.unflatten(-1, (N_TARGETS, N_ANSWERS)), rows[..., 0, :]


def _wanted(sequences: _Sequences) -> torch.Tensor:
    """The answers in the slots that are asked for. Shapes: (model, batch, 2)."""
    return sequences.answers.gather(-1, sequences.asked)


def _losses(class_logits: torch.Tensor, sequences: _Sequences) -> torch.Tensor:
    """Mean cross-entropy of each model, in nats. Shapes: (model,)."""
    from torch.nn.functional import cross_entropy

    loss = cross_entropy(class_logits.flatten(0, 2), _wanted(sequences).flatten(), reduction="none")
    return loss.view(class_logits.shape[:3]).mean(dim=(1, 2))


# --------------------------------------------------------------------------------------------------------------------
# What is measured


class _Record(NamedTuple):
    """One variant at one step. Shapes: (model,) each; zeros for the rows of a head that is alone."""

    accuracy: np.ndarray
    loss: np.ndarray
    row_cosine: np.ndarray
    row_difference: np.ndarray


def _measure(weights: dict[str, torch.Tensor], sequences: _Sequences) -> _Record:
    import torch
    from torch.nn.functional import normalize

    with torch.no_grad():
        class_logits, rows = _forward(weights, sequences)
        accuracy = (class_logits.argmax(dim=-1) == _wanted(sequences)).all(dim=-1).to(rows.dtype).mean(dim=-1)
        loss = _losses(class_logits, sequences)
        by_query = rows.transpose(1, 2)  # (model, batch, n_heads, kv_len)
        n_heads = by_query.shape[2]
        unit = normalize(by_query, dim=-1)
        cosines = (unit @ unit.mT).sum(dim=(2, 3)) - n_heads  # without those of a row with itself
        cosine = cosines.mean(dim=-1) / max(1, n_heads * (n_heads - 1))
        difference = (by_query.amax(dim=2) - by_query.amin(dim=2)).amax(dim=(1, 2))
    return _Record(*(values.cpu().double().numpy() for values in (accuracy, loss, cosine, difference)))


def _result(records: dict[int, dict[str, _Record]], done: float) -> Result:
    """Metrics and curves of what is recorded so far."""
    steps, last = list(records), list(records.values())[-1]
    first = next(iter(records.values()))
    metrics = {f"accuracy_mean_{variant}": last[variant].accuracy.mean() for variant in VARIANTS}
    for variant in VARIANTS:
        metrics[f"accuracy_min_{variant}"] = last[variant].accuracy.min()
        metrics[f"accuracy_max_{variant}"] = last[variant].accuracy.max()
    metrics["row_cosine_start_several_heads"] = first["several_heads"].row_cosine.mean()
    metrics["row_cosine_several_heads"] = last["several_heads"].row_cosine.mean()
    metrics["row_difference_same_start"] = last["same_start"].row_difference.max()

    curves: Table = {"step": np.repeat(steps, len(VARIANTS)), "variant": np.tile(VARIANTS, len(steps))}
    for name in ("accuracy", "loss"):
        of_seeds = np.array([getattr(record[v], name) for record in records.values() for v in VARIANTS])
        curves[f"{name}_mean"] = of_seeds.mean(axis=1)
        curves[f"{name}_low"], curves[f"{name}_high"] = of_seeds.min(axis=1), of_seeds.max(axis=1)
    several = VARIANTS[1:]
    cosines: Table = {
        "step": np.repeat(steps, len(several)),
        "variant": np.tile(several, len(steps)),
        "row_cosine": np.array([record[v].row_cosine.mean() for record in records.values() for v in several]),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"curves": curves, "cosines": cosines}, done)
