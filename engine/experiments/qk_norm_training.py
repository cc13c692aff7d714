r"""Learning rates against ways to hold the logits of attention down, learned: loss, entropy and largest logit.

The task is associative recall: ``kv_len`` slots, each with a cue and one of eight answers, and a query that repeats a
cue; only attention can solve it (``engine/training.py``). A one-layer model with one head is trained by Adam at
``n_rates`` learning rates, each four times the next lower one, in six forms that differ in their logits:

``inv_sqrt_d_k``       q·k / √d_k
``qk_norm``            (γ_q ⊙ rms(q)) · (γ_k ⊙ rms(k)) / √d_k, gains for each channel learned, 1 at the start
``qk_norm_fixed``      the same with the gains left at 1
``cosine_learned``     s cos(q, k), s = exp(a) learned instead of 1/√d_k; √d_k at the start, as the two above
``softcap``            c tanh(q·k / (c √d_k)), c the ``logit_threshold``
``qk_clip``            as the first, but after a step in whose batch the largest logit S was above the threshold, W_q
                       and W_k are multiplied by √(threshold / S)

Forms with the same seed and rate begin with the same weights and see the same batches. All models train side by side on
an axis ``model``, each as it would alone.

Sources: henry2020, abstract (l2 norm and learned scale); wortsman2023, section 3.1.1 (the norm against the learning
rate); kimi2025, section 2.1 (the clip).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import entropy_nats, qk_product, softmax, unit_norm
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, number
from engine.norms import norm_statistics, normalize
from engine.side_by_side import look_up
from engine.training import (
    BATCH,
    D_MODEL,
    DRAW_STEPS,
    N_ANSWERS,
    Adam,
    Sequences,
    Sizes,
    draw_sequences,
    draw_weights,
    stream,
)

if TYPE_CHECKING:
    import torch

TRAINS = True
FORMS = ("inv_sqrt_d_k", "qk_norm", "qk_norm_fixed", "cosine_learned", "softcap", "qk_clip")
RATE_STEP = 4  # from one learning rate to the next
N_EVALUATION = 128  # sequences of each seed: a mean loss of 2 nats has a standard error of some 0.1
N_RECORDS = 16  # points of a curve after the one at step 0
LAST_RECORDS = 4  # a loss at the end is the mean of so many, for at high rates it jumps
MOST_SLOTS = 4096  # models times slots: some 0.2 s a step


@dataclass(frozen=True)
class Params(BaseParams):
    learning_rate: float = number(0.048, low=0.0001, high=0.256)
    n_rates: int = number(3, low=1, high=4)
    d_k: int = number(16, low=2, high=64, log2=True)
    kv_len: int = number(8, low=2, high=32, log2=True)
    logit_threshold: float = number(10.0, low=1, high=100)
    steps: int = number(200, low=10, high=2000, step=10)
    n_seeds: int = number(3, low=1, high=8)

    def rules(self) -> Iterator[Problem]:
        slots = self.kv_len * self.n_rates * self.n_seeds * len(FORMS)
        if slots > MOST_SLOTS:
            yield Problem("rule", "n_seeds", self.n_seeds, rule="too_many_slots_trained", values={"limit": MOST_SLOTS})


METRICS = (
    *(Metric(f"loss_nats_{form}", "nats") for form in FORMS),
    *(Metric(f"loss_worst_nats_{form}", "nats") for form in FORMS),
    *(Metric(f"loss_best_nats_{form}", "nats") for form in FORMS),
    *(Metric(f"logits_peak_{form}") for form in FORMS),
    *(Metric(f"logits_peak_lowest_{form}") for form in FORMS),
    *(Metric(f"entropy_share_{form}") for form in FORMS),
    *(Metric(f"match_weight_{form}") for form in FORMS),
    *(Metric(f"product_abs_max_{form}") for form in FORMS),
)
PLOTS = (
    Plot(
        "loss_by_rate",
        "by_rate",
        "learning_rate",
        "loss_nats",
        by="form",
        low="loss_low",
        high="loss_high",
        x_scale="log2",
        y_unit="nats",
    ),
    Plot("largest_by_rate", "by_rate", "learning_rate", "logits_abs_max", by="form", x_scale="log2", y_scale="log10"),
    Plot("loss", "curves", "step", "loss_nats", by="form", low="loss_low", high="loss_high", y_unit="nats"),
    Plot("largest_logit", "curves", "step", "logits_abs_max", by="form", y_scale="log10"),
    Plot("entropy", "curves", "step", "entropy_share", by="form"),
)
BUDGET_S = 10.0

_Weights = dict[str, "torch.Tensor"]


class _Pass(NamedTuple):
    """Shapes: loss (model,), logits (model, batch, kv_len), weights (model, batch, kv_len)."""

    loss: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor


class _Record(NamedTuple):
    """All models at one step, on the sequences that are kept for it. Shapes: (form, rate, seed) each."""

    loss: np.ndarray
    largest: np.ndarray
    entropy_share: np.ndarray
    match_weight: np.ndarray
    product: np.ndarray


def memory_bytes(params: Params) -> int:
    """Weights with gradients and moments, a step's activations, and an evaluation, of all models."""
    models = len(FORMS) * params.n_rates * params.n_seeds
    pairs = 2 * params.kv_len * N_ANSWERS
    weights = (2 * params.kv_len + 2 * N_ANSWERS + 1 + 2 * D_MODEL + 2 * params.d_k + 2) * D_MODEL
    slots = 3 * BATCH * params.kv_len + 2 * N_EVALUATION * params.kv_len
    activations = 8 * pairs * (D_MODEL + params.d_k) + slots * (D_MODEL + params.d_k + 8)
    return 8 * models * (6 * weights + activations) + 2**20


def run(params: Params, run: Run) -> Result:
    r"""Train all, and measure all 17 times on the way on sequences of their own.

    The metrics are of the highest rate: ``loss`` is the mean over the last four records and the seeds, ``worst`` and
    ``best`` those of the worst and the best seed; ``logits_peak`` is the largest \|logit\| of all records and seeds,
    ``lowest`` that of the seed in which it is lowest. ``entropy_share`` (of ln kv_len) and ``match_weight``, the mean
    weight on the slot that is asked for, are those of the last record, as is ``product_abs_max``, the largest
    \|q·k\|/√d_k of q and k as the projections give them, before any norm or cap.
    """
    import torch

    first_seed = run.generator.initial_seed()
    seeds = [first_seed + i for i in range(params.n_seeds)]
    rates = [params.learning_rate / RATE_STEP**i for i in range(params.n_rates)]
    weights = _draw_weights(params, run, seeds)
    like = weights["W_q"]
    of_models = torch.tensor(rates, device=like.device, dtype=like.dtype).repeat_interleave(len(seeds))
    optimizer = Adam(list(weights.values()), of_models.repeat(len(FORMS)))
    batches = _batches(params, run, seeds)
    evaluation = _for_models(
        params, run, [draw_sequences(stream(s, "evaluation"), params.kv_len, N_EVALUATION) for s in seeds]
    )
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    records: dict[int, _Record] = {}
    latest: Result | None = None
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1), latest)
        if step in due:
            with torch.no_grad():
                records[step] = _measure(params, weights, evaluation)
            latest = _result(params, rates, records, step / params.steps)
        if step < params.steps:
            for weight in weights.values():
                weight.grad = None
            passed = _forward(params, weights, next(batches))
            passed.loss.sum().backward()
            optimizer.step()
            _clip(params, weights, passed.logits)
    assert latest is not None
    return latest


# --------------------------------------------------------------------------------------------------------------------
# What is drawn


def _draw_weights(params: Params, run: Run, seeds: list[int]) -> _Weights:
    """The weights of all models at step 0; the seeds run fastest, then the rates, then the forms."""
    import torch

    dtype = torch.float64 if run.dtype == torch.float64 else torch.float32  # lower ones would round the updates away
    drawn = [draw_weights(stream(seed, "init"), Sizes(params.d_k, params.kv_len), "unit") for seed in seeds]
    for of_seed in drawn:
        for name in ("W_q", "W_k", "W_v"):
            of_seed[name] = of_seed[name][0]  # the only head
        of_seed["gain_q"] = of_seed["gain_k"] = torch.ones(1, params.d_k)
        of_seed["log_scale"] = torch.full((1, 1), math.log(params.d_k) / 2)
    repeats = len(FORMS) * params.n_rates
    weights = {}
    for name, first in drawn[0].items():
        stacked = torch.stack([of_seed[name] for of_seed in drawn]).to(run.device, dtype)
        weights[name] = stacked.repeat(repeats, *[1] * first.dim()).requires_grad_()
    return weights


def _for_models(params: Params, run: Run, drawn: list[Sequences]) -> Sequences:
    """Those of each seed, repeated for its rates and forms. Shapes: (model, batch, ...)."""
    import torch

    repeats = len(FORMS) * params.n_rates
    parts = (torch.stack(part).to(run.device) for part in zip(*drawn, strict=True))
    return Sequences(*(part.repeat(repeats, *[1] * (part.dim() - 1)) for part in parts))


def _batches(params: Params, run: Run, seeds: list[int]) -> Iterator[Sequences]:
    streams = [stream(seed, "train") for seed in seeds]
    while True:
        drawn = [draw_sequences(g, params.kv_len, DRAW_STEPS, BATCH) for g in streams]
        for step in range(DRAW_STEPS):
            yield _for_models(params, run, [Sequences(*(part[step] for part in d)) for d in drawn])


# --------------------------------------------------------------------------------------------------------------------
# The model


def _forward(params: Params, weights: _Weights, sequences: Sequences) -> _Pass:
    """Every model on its own sequences.

    q, k and v are computed once for each cue and for each pair of a cue and an answer, then looked up: a batch shows
    each of them several times.
    """
    from torch.nn.functional import cross_entropy, layer_norm

    residual, pairs, q = _residual(weights), _pairs(weights), _queries(weights)
    k, v = pairs @ weights["W_k"].mT, pairs @ weights["W_v"].mT
    slots = sequences.cues * N_ANSWERS + sequences.answers  # (model, batch, kv_len)
    all_logits = _logits(params, weights, q, k)  # (model, cue, pair): every query with every key
    logits = look_up(all_logits, sequences.query).gather(-1, slots)
    rows = softmax(logits)
    context = (rows[..., None, :] @ look_up(v, slots))[..., 0, :]
    out = layer_norm(look_up(residual, sequences.query) + context @ weights["W_o"].mT, (D_MODEL,))
    class_logits = out @ weights["W_u"].mT
    loss = cross_entropy(class_logits.mT, sequences.target, reduction="none").mean(dim=-1)
    return _Pass(loss, logits, rows)


def _residual(weights: _Weights) -> torch.Tensor:
    """What the query token brings, for each cue. Shapes: (model, cue, d_model)."""
    return weights["E_cue"] + weights["e_query"][:, None]


def _queries(weights: _Weights) -> torch.Tensor:
    """Shapes: (model, cue, d_k)."""
    from torch.nn.functional import layer_norm

    return layer_norm(_residual(weights), (D_MODEL,)) @ weights["W_q"].mT


def _pairs(weights: _Weights) -> torch.Tensor:
    """The token of each cue with each answer, normalized. Shapes: (model, pair, d_model)."""
    from torch.nn.functional import layer_norm

    return layer_norm(weights["E_cue"][:, :, None] + weights["E_answer"][:, None], (D_MODEL,)).flatten(1, 2)


def _logits(params: Params, weights: _Weights, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The logits of each form. Shapes: q (model, q_len, d_k), k (model, kv_len, d_k); (model, q_len, kv_len)."""
    import torch

    n = len(q) // len(FORMS)
    logits = []
    for form, q_form, k_form in zip(FORMS, q.split(n), k.split(n), strict=True):
        of_form = slice(FORMS.index(form) * n, (FORMS.index(form) + 1) * n)
        scale: float | torch.Tensor = 1 / math.sqrt(params.d_k)
        if form in ("qk_norm", "qk_norm_fixed"):
            q_form, k_form = (normalize(x, norm_statistics(x, "rms_norm")) for x in (q_form, k_form))
        if form == "qk_norm":
            q_form, k_form = q_form * weights["gain_q"][of_form], k_form * weights["gain_k"][of_form]
        if form == "cosine_learned":
            q_form, k_form = unit_norm(q_form), unit_norm(k_form)
            scale = weights["log_scale"][of_form].exp()
        of_models = q_form @ k_form.mT * scale
        if form == "softcap":
            of_models = params.logit_threshold * (of_models / params.logit_threshold).tanh()
        logits.append(of_models)
    return torch.cat(logits)


def _clip(params: Params, weights: _Weights, logits: torch.Tensor) -> None:
    """Shrink W_q and W_k of those models of the form ``qk_clip`` whose step had a logit above the threshold."""
    import torch

    n = len(logits) // len(FORMS)
    of_form = slice(FORMS.index("qk_clip") * n, (FORMS.index("qk_clip") + 1) * n)
    with torch.no_grad():
        largest = (
            logits[of_form].amax(dim=(1, 2)).clamp_min(1e-6)
        )  # a batch whose logits are all negative is not clipped
        factor = (params.logit_threshold / largest).clamp(max=1).sqrt()[:, None, None]
        for name in ("W_q", "W_k"):
            weights[name][of_form] *= factor


# --------------------------------------------------------------------------------------------------------------------
# What is measured


def _measure(params: Params, weights: _Weights, sequences: Sequences) -> _Record:
    passed = _forward(params, weights, sequences)
    q, pairs = _queries(weights), _pairs(weights)
    product = qk_product(q, pairs @ weights["W_k"].mT).abs().amax(dim=(1, 2)) / math.sqrt(params.d_k)
    is_match = sequences.cues == sequences.query[..., None]
    measured = (
        passed.loss,
        passed.logits.abs().amax(dim=(1, 2)),
        entropy_nats(passed.weights).mean(dim=-1) / math.log(params.kv_len),
        (passed.weights * is_match).sum(dim=-1).mean(dim=-1),
        product,
    )
    shape = (len(FORMS), params.n_rates, params.n_seeds)
    return _Record(*(values.cpu().double().numpy().reshape(shape) for values in measured))


def _result(params: Params, rates: list[float], records: dict[int, _Record], done: float) -> Result:
    """Metrics, curves of the highest rate, and the ends of all rates, of what is recorded so far."""
    steps, all_records = list(records), list(records.values())
    last = all_records[-1]
    end = np.mean([record.loss for record in all_records[-LAST_RECORDS:]], axis=0)  # (form, rate, seed)
    largest = np.max([record.largest for record in all_records], axis=0)
    metrics: dict[str, float] = {}
    for i, form in enumerate(FORMS):
        metrics[f"loss_nats_{form}"] = end[i, 0].mean()
        metrics[f"loss_worst_nats_{form}"] = end[i, 0].max()
        metrics[f"loss_best_nats_{form}"] = end[i, 0].min()
        metrics[f"logits_peak_{form}"] = largest[i, 0].max()
        metrics[f"logits_peak_lowest_{form}"] = largest[i, 0].min()
        metrics[f"entropy_share_{form}"] = last.entropy_share[i, 0].mean()
        metrics[f"match_weight_{form}"] = last.match_weight[i, 0].mean()
        metrics[f"product_abs_max_{form}"] = last.product[i, 0].max()
    n_forms = len(FORMS)
    by_rate: Table = {
        "learning_rate": np.tile(rates, n_forms),
        "form": np.repeat(FORMS, len(rates)),
        "loss_nats": end.mean(axis=2).ravel(),
        "loss_low": end.min(axis=2).ravel(),
        "loss_high": end.max(axis=2).ravel(),
        "logits_abs_max": largest.max(axis=2).ravel(),
    }
    curves: Table = {
        "step": np.repeat(steps, n_forms),
        "form": np.tile(FORMS, len(steps)),
        "loss_nats": np.array([record.loss[i, 0].mean() for record in all_records for i in range(n_forms)]),
        "loss_low": np.array([record.loss[i, 0].min() for record in all_records for i in range(n_forms)]),
        "loss_high": np.array([record.loss[i, 0].max() for record in all_records for i in range(n_forms)]),
        "logits_abs_max": np.array([record.largest[i, 0].max() for record in all_records for i in range(n_forms)]),
        "entropy_share": np.array(
            [record.entropy_share[i, 0].mean() for record in all_records for i in range(n_forms)]
        ),
    }
    in_order = {metric.name: float(metrics[metric.name]) for metric in METRICS}
    return Result(in_order, {"by_rate": by_rate, "curves": curves}, done)
