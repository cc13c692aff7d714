r"""Spread of q·k against d_k, with the textbook's assumptions as switches.

For independent coordinates with means :math:`\mu`, standard deviations :math:`\sigma` and correlation :math:`\rho`
between :math:`q_i` and :math:`k_i`, the mean is :math:`d_k(\mu_q\mu_k + \rho\sigma_q\sigma_k)`; for Gaussian
coordinates the variance is

.. math:: d_k[\sigma_q^2\sigma_k^2(1+\rho^2) + \sigma_q^2\mu_k^2 + \sigma_k^2\mu_q^2 + 2\rho\sigma_q\sigma_k\mu_q\mu_k]

Source: vaswani2017, section 3.2.1, footnote 4 (the case of zero means and no correlation).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import scale_value
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=1, high=4096, log2=True)
    scale: str = choice("none", "inv_sqrt_d_k", "inv_d_k", "inv_log_d_k")
    distribution: str = choice("normal", "uniform", "heavy_tail")
    q_mean: float = number(0.0, low=-4, high=4, step=0.1)
    k_mean: float = number(0.0, low=-4, high=4, step=0.1)
    q_std: float = number(1.0, low=0.05, high=4, step=0.05)
    k_std: float = number(1.0, low=0.05, high=4, step=0.05)
    qk_correlation: float = number(0.0, low=-1, high=1, step=0.05)
    n_pairs: int = number(4096, low=256, high=131072, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.scale == "inv_log_d_k" and self.d_k < 2:
            yield Problem("rule", "d_k", self.d_k, rule="log_needs_two")
        if self.distribution != "normal" and self.qk_correlation:
            # a mixture of two uniform or heavy-tailed draws is neither uniform nor heavy-tailed
            yield Problem("rule", "qk_correlation", self.qk_correlation, rule="correlation_needs_normal")


METRICS = (
    Metric("logits_mean"),
    Metric("logits_variance"),
    Metric("logits_std"),
    Metric("logits_abs_max"),
    Metric("theory_mean"),
    Metric("theory_std"),
)
PLOTS = (Plot("histogram", table="histogram", mark="line", x="logits", y="density", theory="theory_density"),)
BUDGET_S = 0.05

CHUNK_NUMBERS = 2**20  # random numbers of one chunk: 4 MB a tensor, some 20 ms


def memory_bytes(params: Params) -> int:
    """A chunk of q and k with its temporaries beside the chunk before it, and all logits in float64."""
    numbers = params.d_k * min(_rows_per_chunk(params), params.n_pairs)
    return 4 * 8 * numbers + 8 * 4 * params.n_pairs


def run(params: Params, run: Run) -> Result:
    """Draw n_pairs independent (q, k) pairs and describe their scaled products.

    Shapes: q, k (rows, d_k) chunk by chunk; logits (n_pairs,).
    """
    import torch

    scale = 1 / math.log(params.d_k) if params.scale == "inv_log_d_k" else scale_value(params.scale, params.d_k)
    rows = _rows_per_chunk(params)
    chunks = []
    for start in range(0, params.n_pairs, rows):
        q, k = _draw(params, run, min(rows, params.n_pairs - start))
        chunks.append((q * k).sum(dim=-1) * scale)  # (rows,)
        run.progress(start / params.n_pairs)
    logits = torch.cat(chunks).cpu().double()

    theory_mean, theory_std = (scale * value for value in _theory(params))
    metrics = {
        "logits_mean": logits.mean().item(),
        "logits_variance": logits.var().item(),
        "logits_std": logits.std().item(),
        "logits_abs_max": logits.abs().max().item(),
        "theory_mean": theory_mean,
        "theory_std": theory_std,
    }
    return Result(metrics, {"histogram": _histogram(logits.numpy(), theory_mean, theory_std)})


def _rows_per_chunk(params: Params) -> int:
    return max(1, CHUNK_NUMBERS // params.d_k)


def _draw(params: Params, run: Run, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates of unit variance, then correlated, spread and moved as asked. Shapes: (rows, d_k) each."""
    q, k = _unit(params.distribution, run, rows, params.d_k), _unit(params.distribution, run, rows, params.d_k)
    if params.qk_correlation:
        rho = params.qk_correlation
        k = rho * q + math.sqrt(1 - rho * rho) * k
    return params.q_mean + params.q_std * q, params.k_mean + params.k_std * k


def _unit(distribution: str, run: Run, rows: int, d_k: int) -> torch.Tensor:
    """Zero mean, unit variance: normal, uniform on ±√3, or Laplace (excess kurtosis 3) for the heavy tail."""
    if distribution == "normal":
        return run.randn(rows, d_k)
    if distribution == "uniform":
        return (run.rand(rows, d_k) - 0.5) * math.sqrt(12)
    uniform = run.rand(rows, d_k) - 0.5
    return -uniform.sign() * (1 - 2 * uniform.abs()).clamp_min(1e-7).log() / math.sqrt(2)


def _theory(params: Params) -> tuple[float, float]:
    """Mean and standard deviation of q·k from the formulas of the docstring."""
    mq, mk, sq, sk, rho = params.q_mean, params.k_mean, params.q_std, params.k_std, params.qk_correlation
    mean = params.d_k * (mq * mk + rho * sq * sk)
    per_coordinate = (sq * sk) ** 2 * (1 + rho**2) + (sq * mk) ** 2 + (sk * mq) ** 2 + 2 * rho * sq * sk * mq * mk
    return mean, math.sqrt(params.d_k * per_coordinate)


def _histogram(logits: np.ndarray, mean: float, std: float) -> dict[str, np.ndarray]:
    """Density in 41 bins over ±5 theoretical standard deviations, with the normal density beside it."""
    edges = mean + std * np.linspace(-5, 5, 42)
    centre = (edges[1:] + edges[:-1]) / 2
    density = np.histogram(logits, bins=edges)[0] / (len(logits) * (edges[1] - edges[0]))
    normal = np.exp(-(((centre - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
    return {
        "logits": centre.astype(np.float32),
        "density": density.astype(np.float32),
        "theory_density": normal.astype(np.float32),
    }
