r"""A small model trained in six ways of keeping numbers: what a master copy, a loss scale and rounding are for.

Associative recall with one layer of attention (engine/training.py), the same start and the same batches for all:

``all_float32``          passes and weights in float32
``mixed_bfloat16``       passes in bfloat16, weights kept in float32 (the master copy) and cast where they are used
``bfloat16_nearest``     the same passes; after each step the weights are rounded to bfloat16, to nearest
``bfloat16_stochastic``  the same, rounded up or down at random so that the mean is right
``mixed_float16``        passes in float16, weights kept in float32, no loss scale
``scaled_float16``       the same with a dynamic loss scale S: where a gradient is not finite the step is skipped and S
                         is halved; after ``growth_interval`` steps without that, S is doubled

The loss, from the class logits on, and Adam's moments are float32 everywhere. The loss is divided by ``micro_batches``,
and the gradients, in float32, are multiplied by it again: what a device sees of a mean over all tokens of a step, when
as many micro-batches add up to it (here all of them alike). In exact arithmetic that changes nothing, nor does S.

The learning rate falls along half a cosine to 0, as usual; the steps of its end are the smallest.

Source: micikevicius2018, abstract (master copy and loss scaling).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import scale_value
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, number
from engine.rounding import round_stochastically, round_to_nearest
from engine.training import (
    BATCH,
    D_MODEL,
    DRAW_STEPS,
    N_ANSWERS,
    Pass,
    Sequences,
    Sizes,
    draw_sequences,
    draw_weights,
    forward,
    losses,
    stream,
)

if TYPE_CHECKING:
    import torch

TRAINS = True
WAYS = (
    "all_float32",
    "mixed_bfloat16",
    "bfloat16_nearest",
    "bfloat16_stochastic",
    "mixed_float16",
    "scaled_float16",
)


@dataclass(frozen=True)
class Params(BaseParams):
    learning_rate: float = number(0.001, low=0.00001, high=0.1)
    micro_batches: int = number(2**16, low=1, high=2**24, log2=True)
    start_scale_log2: int = number(16, low=0, high=30)
    growth_interval: int = number(50, low=5, high=2000, step=5)
    kv_len: int = number(8, low=2, high=16, log2=True)
    d_k: int = number(16, low=4, high=64, log2=True)
    steps: int = number(400, low=10, high=4000, step=10)
    n_seeds: int = number(3, low=1, high=10)


METRICS = (
    *(Metric(f"loss_mean_{way}", "nats") for way in WAYS),
    *(Metric(f"accuracy_mean_{way}") for way in WAYS),
    Metric("skipped_steps_mean"),
    Metric("loss_scale_end_log2"),
)
PLOTS = (
    Plot("loss", "curves", "step", "loss_mean", by="variant", low="loss_low", high="loss_high", y_unit="nats"),
    Plot("loss_scale", "scales", "step", "loss_scale", y_scale="log10"),
)
BUDGET_S = 10.0

N_EVALUATION = 256
N_RECORDS = 25  # points of a curve after the one at step 0
EPSILON = 1e-8


def memory_bytes(params: Params) -> int:
    """Weights with gradients and moments of all ways, one way's activations, the batches."""
    sizes = Sizes(params.d_k, params.kv_len)
    slots = max(BATCH, N_EVALUATION) * params.kv_len
    pairs = sizes.n_cues * N_ANSWERS
    activations = 8 * (slots + pairs) * D_MODEL
    drawn = 4 * (DRAW_STEPS * BATCH + N_EVALUATION) * params.kv_len
    return 4 * params.n_seeds * (6 * len(WAYS) * sizes.n_weights + 3 * activations + 2 * drawn) + 2**19


def run(params: Params, run: Run) -> Result:
    """Train all six on the same batches, and measure them 25 times on the way, on fixed sequences, in float32.

    ``loss_low`` and ``loss_high`` are the lowest and highest seed. ``skipped_steps_mean``: steps of the scaled one that
    were skipped, mean over the seeds.
    """
    first_seed = run.generator.initial_seed()
    seeds = [first_seed + i for i in range(params.n_seeds)]
    models = {way: _Models(params, run, seeds, way) for way in WAYS}
    batches = _batches(params, run, seeds)
    evaluation = _for_models(run, [draw_sequences(stream(s, "evaluation"), params.kv_len, N_EVALUATION) for s in seeds])
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    records: dict[int, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    scales: dict[int, float] = {}
    latest: Result | None = None
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1), latest)
        if step in due:
            records[step] = _measured(models, evaluation, run, step / (params.steps + 1), latest)
            scales[step] = models["scaled_float16"].scale.log2().mean().item()
            latest = _result(records, scales, models["scaled_float16"], step / params.steps)
        if step < params.steps:
            batch = next(batches)
            rate = params.learning_rate * (1 + math.cos(math.pi * step / params.steps)) / 2
            for place, model in enumerate(models.values()):
                run.progress((step + place / len(WAYS)) / (params.steps + 1), latest)
                model.train(batch, rate)
    assert latest is not None
    return latest


# --------------------------------------------------------------------------------------------------------------------
# One way


class _Models:
    """The models of all seeds in one way of keeping numbers, with Adam and a loss scale for each of them."""

    def __init__(self, params: Params, run: Run, seeds: list[int], way: str) -> None:
        import torch

        self.params, self.way = params, way
        self.passes_in = {
            "all_float32": torch.float32,
            "mixed_float16": torch.float16,
            "scaled_float16": torch.float16,
        }.get(way, torch.bfloat16)
        sizes = Sizes(params.d_k, params.kv_len)
        drawn = [draw_weights(stream(seed, "init"), sizes, "unit") for seed in seeds]
        self.weights = {name: torch.stack([w[name] for w in drawn]).to(run.device) for name in drawn[0]}
        self.chances = torch.Generator().manual_seed(seeds[0])
        self._keep()
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        starts = 2.0**params.start_scale_log2 if way == "scaled_float16" else 1.0
        self.scale = torch.full((len(seeds),), starts, device=run.device)
        self.updates, self.in_a_row, self.skipped = (torch.zeros_like(self.scale) for _ in range(3))

    def train(self, batch: Sequences, learning_rate: float) -> None:
        """One step: pass, gradients in float32 divided by the scale, Adam where all of them are finite."""
        import torch

        for weight in self.weights.values():
            weight.requires_grad_()
        loss = losses(_passed(self.params, self.weights, batch, self.passes_in), batch.target)
        shared = (loss * self.scale / self.params.micro_batches).sum()
        gradients = torch.autograd.grad(shared, list(self.weights.values()))
        self.weights = {name: weight.detach() for name, weight in self.weights.items()}
        factor = self.params.micro_batches / self.scale
        found = {name: g * _along(factor, g) for name, g in zip(self.weights, gradients, strict=True)}
        finite = torch.stack([g.flatten(1).isfinite().all(dim=1) for g in found.values()]).all(dim=0)
        if self.way != "scaled_float16":  # nobody looks
            finite = torch.ones_like(finite)
        self.updates = self.updates + finite
        for name, g in found.items():
            self._update(name, g, finite, learning_rate)
        self._keep()
        self._rescale(finite)

    def _update(self, name: str, g: torch.Tensor, finite: torch.Tensor, learning_rate: float) -> None:
        """Adam for the models whose gradients are finite; the others stay as they are, moments too."""
        import torch

        there = _along(finite, g)
        self.first[name] = torch.where(there, 0.9 * self.first[name] + 0.1 * g, self.first[name])
        self.second[name] = torch.where(there, 0.999 * self.second[name] + 0.001 * g * g, self.second[name])
        updates = self.updates.clamp_min(1)
        first = self.first[name] / _along(1 - 0.9**updates, g)
        second = self.second[name] / _along(1 - 0.999**updates, g)
        step = learning_rate * first / (second.sqrt() + EPSILON)
        self.weights[name] = self.weights[name] - torch.where(there, step, torch.zeros_like(step))

    def _keep(self) -> None:
        """Round the weights as they are kept from one step to the next."""
        import torch

        if self.way == "bfloat16_nearest":
            self.weights = {name: round_to_nearest(w, torch.bfloat16) for name, w in self.weights.items()}
        elif self.way == "bfloat16_stochastic":
            for name, w in self.weights.items():
                chance = torch.rand(w.shape, generator=self.chances).to(w.device)
                self.weights[name] = round_stochastically(w, chance, torch.bfloat16)

    def _rescale(self, finite: torch.Tensor) -> None:
        """The rule of a dynamic loss scale, for each model by itself."""
        import torch

        if self.way != "scaled_float16":
            return
        self.skipped = self.skipped + ~finite
        self.in_a_row = torch.where(finite, self.in_a_row + 1, torch.zeros_like(self.in_a_row))
        grows = self.in_a_row >= self.params.growth_interval
        self.in_a_row = torch.where(grows, torch.zeros_like(self.in_a_row), self.in_a_row)
        self.scale = torch.where(finite, torch.where(grows, 2 * self.scale, self.scale), self.scale / 2)

    def measure(self, sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
        """Loss and accuracy of each model with its weights as they are kept, in float32. Shapes: (model,) each."""
        import torch

        with torch.no_grad():
            found = _passed(self.params, self.weights, sequences, torch.float32)
            right = (found.class_logits.argmax(dim=-1) == sequences.target).float().mean(dim=-1)
            loss = losses(found, sequences.target)
        return loss.cpu().double().numpy(), right.cpu().double().numpy()


def _passed(params: Params, weights: dict[str, torch.Tensor], sequences: Sequences, dtype: torch.dtype) -> Pass:
    """A forward pass in a format, with class logits in float32: the gradients of the weights come out in float32."""
    import torch

    scale = torch.full(
        (len(sequences.target), 1), scale_value("inv_sqrt_d_k", params.d_k), device=weights["W_q"].device
    )
    found = forward({name: weight.to(dtype) for name, weight in weights.items()}, sequences, scale.to(dtype))
    return found._replace(class_logits=found.class_logits.float())


def _along(per_model: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One number a model, shaped to be multiplied with a weight of all models."""
    return per_model.view(-1, *[1] * (like.dim() - 1))


def _measured(
    models: dict[str, _Models], evaluation: Sequences, run: Run, done: float, latest: Result | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Loss and accuracy of all ways; the six take long enough together to look for a stop between them."""
    found = {}
    for way, model in models.items():
        run.progress(done, latest)
        found[way] = model.measure(evaluation)
    return found


def _for_models(run: Run, drawn: list[Sequences]) -> Sequences:
    import torch

    return Sequences(*(torch.stack(parts).to(run.device) for parts in zip(*drawn, strict=True)))


def _batches(params: Params, run: Run, seeds: list[int]) -> Iterator[Sequences]:
    """One batch for each seed, step after step."""
    streams = [stream(seed, "train") for seed in seeds]
    while True:
        block = _for_models(run, [draw_sequences(g, params.kv_len, DRAW_STEPS, BATCH) for g in streams])
        for step in range(DRAW_STEPS):
            yield Sequences(*(part[:, step] for part in block))


def _result(records, scales, scaled: _Models, done: float) -> Result:  # type: ignore[no-untyped-def]
    """Metrics and curves of what is recorded so far."""
    steps, last = list(records), list(records.values())[-1]
    metrics = {f"loss_mean_{way}": last[way][0].mean() for way in WAYS}
    metrics |= {f"accuracy_mean_{way}": last[way][1].mean() for way in WAYS}
    metrics["skipped_steps_mean"] = scaled.skipped.mean().item()
    metrics["loss_scale_end_log2"] = scaled.scale.log2().mean().item()
    curves: Table = {"step": np.repeat(steps, len(WAYS)), "variant": np.tile(WAYS, len(steps))}
    of_seeds = np.array([record[way][0] for record in records.values() for way in WAYS])
    curves["loss_mean"] = of_seeds.mean(axis=1)
    curves["loss_low"], curves["loss_high"] = of_seeds.min(axis=1), of_seeds.max(axis=1)
    scale: Table = {"step": np.array(list(scales)), "loss_scale": 2.0 ** np.array(list(scales.values()))}
    return Result({name: float(value) for name, value in metrics.items()}, {"curves": curves, "scales": scale}, done)
