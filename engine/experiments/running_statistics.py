r"""BatchNorm's two functions: with the statistics of the batch in training, with running ones in evaluation.

Batches arrive one by one, each numbers with a true mean and standard deviation; running statistics follow,
:math:`r\leftarrow(1-m)r+m\,b`, from PyTorch's start 0 and 1. The tokens of a text have a share :math:`\rho` of their
variance in common, so the mean of a batch of B texts of n tokens spreads, in units of the standard deviation, by

.. math:: v=\frac{\rho}{B}+\frac{1-\rho}{Bn}

and not by 1/(Bn). A running mean spreads by :math:`\frac{m}{2-m}v`, keeps :math:`(1-m)^k` of its start after k batches,
and lies :math:`\frac{1-m}{m}` steps behind a mean that moves by the same step with every batch.

Sources: ioffe2015, section 3.1; ioffe2017, abstract; wang2022, abstract; shen2020, abstract; pytorch-code,
``BatchNorm1d``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, number
from engine.norms import NormStatistics, norm_statistics, normalize, update_running

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    batch: int = number(8, low=1, high=64, log2=True)
    seq_len: int = number(16, low=1, high=256, log2=True)
    text_share: float = number(0.2, low=0, high=1, step=0.05)
    norm_momentum: float = number(0.1, low=0.001, high=1)
    norm_updates: int = number(80, low=1, high=1000)
    mean_drift: float = number(0.0, low=0, high=0.5, step=0.01)
    d_model: int = number(32, low=4, high=256, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.batch * self.seq_len < 2:
            yield Problem("rule", "seq_len", self.seq_len, rule="variance_needs_two_tokens", values={})
        numbers = self.batch * self.seq_len * self.d_model * (self.norm_updates + 2 * TESTS)
        if numbers > MAX_NUMBERS:
            values, now = {"numbers": numbers, "limit": MAX_NUMBERS}, self.norm_updates
            yield Problem("rule", "norm_updates", now, rule="too_many_numbers_to_normalize", values=values)


METRICS = (
    Metric("mode_gap_rms"),
    Metric("training_noise_rms"),
    Metric("evaluation_error_rms"),
    Metric("batch_mean_std"),
    Metric("theory_batch_mean_std"),
    Metric("tokens_in_batch"),
    Metric("independent_tokens"),
    Metric("running_mean_error"),
    Metric("theory_running_mean_error"),
    Metric("training_output_abs_max"),
)
PLOTS = (
    Plot("means", table="means", x="batches_seen", y="feature_mean", by="mean_of"),
    Plot("distances", table="distances", x="batches_seen", y="output_distance_rms", by="outputs_compared"),
)
BUDGET_S = 0.05

MEAN, STD = 2.0, 3.0  # of the numbers; the running statistics start at 0 and 1
TESTS = 12  # batches that are put through both modes: one at each recorded place, and as many more at the end
MAX_NUMBERS = 2**24
REPORT_EVERY = 2**20  # numbers between two reports, some 30 ms
OUTPUTS = ("training_and_evaluation", "training_and_true", "evaluation_and_true")


def memory_bytes(params: Params) -> int:
    """One batch with its temporaries, and a row for each update."""
    return 4 * 16 * params.batch * params.seq_len * params.d_model + 48 * params.norm_updates * (params.d_model + 50)


def run(params: Params, run: Run) -> Result:
    """Update the running statistics batch by batch; put fresh batches through both modes and through the true moments.

    ``mode_gap_rms``: root mean square of the difference of the outputs in training and in evaluation, of fresh batches
    after the last update; ``training_noise_rms``, ``evaluation_error_rms``: of each to the outputs under the true mean
    and variance. ``batch_mean_std``: of the mean of a batch about the true mean, in standard deviations of the numbers;
    ``independent_tokens``: how many independent tokens would give this spread, one over its square.
    ``running_mean_error``: root mean square over features of the running mean less the true one, at the end;
    ``theory_running_mean_error`` with its start, its lag and its spread. ``training_output_abs_max``: the largest
    |output| in training.

    Shapes: x (batch, seq_len, d_model).
    """
    import torch

    batches = _Batches(params, run)
    fixed = torch.zeros(1, 1, params.d_model, device=run.device, dtype=run.dtype)
    running = NormStatistics(fixed, torch.ones_like(fixed))
    places = sorted({max(1, round(params.norm_updates * k / TESTS)) for k in range(1, TESTS + 1)})
    per_update = params.batch * params.seq_len * params.d_model
    of_batches, of_running = [], []  # means; kept on the device until the end
    rows: list[tuple[int, tuple[float, float, float]]] = []
    for seen in range(1, params.norm_updates + 1):
        if (seen - 1) * per_update // REPORT_EVERY != (seen - 2) * per_update // REPORT_EVERY:
            run.progress(0.8 * (seen - 1) / params.norm_updates)
        found = norm_statistics(batches.draw(seen), "batch_norm", unbiased=True)
        running = update_running(running, found, params.norm_momentum)
        of_batches.append(found.mean)
        of_running.append(running.mean)
        if seen in places:
            rows.append((seen, _distances(batches.draw(seen), running, batches.true(seen))[0]))

    last = params.norm_updates
    true = batches.true(last)
    true_means = torch.cat([batches.true(seen).mean for seen in range(1, last + 1)]).cpu().double()
    found_means, running_means = torch.cat(of_batches).cpu().double(), torch.cat(of_running).cpu().double()
    spread = ((found_means - true_means) / STD).square().mean().item()
    off = (running_means[-1] - true_means[-1]) / STD
    ends, largest = [], 0.0
    for test in range(TESTS):
        run.progress(0.8 + 0.2 * test / TESTS)
        distances, abs_max = _distances(batches.draw(last), running, true)
        ends.append(distances)
        largest = max(largest, abs_max)
    gap, noise, error = np.sqrt(np.square(ends).mean(axis=0))
    metrics = {
        "mode_gap_rms": gap,
        "training_noise_rms": noise,
        "evaluation_error_rms": error,
        "batch_mean_std": math.sqrt(spread),
        "theory_batch_mean_std": math.sqrt(_spread(params)),
        "tokens_in_batch": params.batch * params.seq_len,
        "independent_tokens": 1 / spread,
        "running_mean_error": off.square().mean().sqrt(),
        "theory_running_mean_error": _running_error(params),
        "training_output_abs_max": largest,
    }
    trace = torch.cat((found_means, running_means, true_means), dim=1)[..., 0]
    tables = {"means": _means(trace.numpy()), "distances": _rows(rows)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


class _Batches:
    """Numbers whose true mean moves by ``mean_drift`` standard deviations a batch; tokens of a text resemble."""

    def __init__(self, params: Params, run: Run) -> None:
        self._params, self._run = params, run

    def true(self, step: int) -> NormStatistics:
        """Shapes: (1, 1, d_model)."""
        import torch

        ones = torch.ones(1, 1, self._params.d_model, device=self._run.device, dtype=self._run.dtype)
        return NormStatistics((MEAN + STD * self._params.mean_drift * step) * ones, STD**2 * ones)

    def draw(self, step: int) -> torch.Tensor:
        """Shapes: (batch, seq_len, d_model)."""
        p = self._params
        common, own = self._run.randn(p.batch, 1, p.d_model), self._run.randn(p.batch, p.seq_len, p.d_model)
        return self.true(step).mean + STD * (p.text_share**0.5 * common + (1 - p.text_share) ** 0.5 * own)


def _distances(
    x: torch.Tensor, running: NormStatistics, true: NormStatistics
) -> tuple[tuple[float, float, float], float]:
    """Root mean squares between the outputs of OUTPUTS, and the largest |output| in training."""
    training, evaluation, ideal = (
        normalize(x, statistics) for statistics in (norm_statistics(x, "batch_norm"), running, true)
    )
    pairs = ((training, evaluation), (training, ideal), (evaluation, ideal))
    sizes = tuple((a - b).cpu().double().square().mean().sqrt().item() for a, b in pairs)
    return (sizes[0], sizes[1], sizes[2]), training.abs().max().item()


def _spread(params: Params) -> float:
    """Variance of the mean of a batch, in variances of the numbers."""
    return params.text_share / params.batch + (1 - params.text_share) / (params.batch * params.seq_len)


def _running_error(params: Params) -> float:
    """Root of the expected square of the running mean's error: what is left of the start, the lag, and the spread."""
    m, k, drift = params.norm_momentum, params.norm_updates, params.mean_drift
    left = (1 - m) ** k
    lag = drift * ((1 - m) / m * (1 - left) - k * left)  # of the batches' means, whose weights add up to 1 - left
    behind = left * (MEAN / STD + drift * k) + lag
    return math.sqrt(behind**2 + m / (2 - m) * (1 - left**2) * _spread(params))


def _means(trace: np.ndarray) -> Table:
    """The mean of one feature, after at most 200 batches, evenly chosen. Shapes: trace (norm_updates, 3)."""
    chosen = np.unique(np.linspace(0, len(trace) - 1, min(len(trace), 200)).round().astype(int))
    names = ("this_batch", "running_average", "true_value")
    return {
        "batches_seen": np.repeat(chosen + 1, len(names)),
        "mean_of": np.tile(names, len(chosen)),
        "feature_mean": trace[chosen].ravel(),
    }


def _rows(rows: list[tuple[int, tuple[float, float, float]]]) -> Table:
    return {
        "batches_seen": np.repeat([seen for seen, _ in rows], len(OUTPUTS)),
        "outputs_compared": np.tile(OUTPUTS, len(rows)),
        "output_distance_rms": np.array([sizes for _, sizes in rows]).ravel(),
    }
