r"""A number put into a format and read again: how far formats reach, and how finely they tell numbers apart.

A format with e exponent bits and p bits of fraction holds :math:`\pm 1.f \cdot 2^k`. Its exponents decide the range,
its fraction the resolution: neighbours in :math:`[2^k, 2^{k+1})` are :math:`2^{k-p}` apart, so rounding to nearest is
off by at most :math:`2^{-p-1}` of the number. Below the smallest normal number the distance stays, and the relative
error grows; what is at most half the smallest positive number becomes 0, and what lies beyond the largest one becomes
infinite, or the largest one where the format has no infinity.

``times_log2`` multiplies by a power of two before the number is stored, and divides behind: what a loss scale does.
The conversion is PyTorch's own, on the CPU: not every accelerator has the 8-bit formats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number

if TYPE_CHECKING:
    import torch

FORMATS = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
DRAWN = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Params(BaseParams):
    given_value: float = number(1e-8, low=1e-12, high=1e6)
    stored_format: str = choice(*FORMATS)
    times_log2: int = number(0, low=0, high=24)
    n_drawn_values: int = number(64, low=8, high=1024, log2=True)


METRICS = (
    Metric("stored_value"),
    Metric("stored_error"),
    Metric("spacing_there"),
    Metric("spacing_at_one"),
    Metric("largest_number"),
    Metric("smallest_normal"),
    Metric("smallest_positive"),
    Metric("octaves"),
    Metric("becomes_infinite"),
)
PLOTS = (
    Plot(
        "errors",
        table="errors",
        x="magnitude",
        y="rounding_error",
        by="stored_format",
        x_scale="log10",
        y_scale="log10",
    ),
)
BUDGET_S = 0.01

EXPONENTS = range(-32, 25)  # of the chart; bfloat16 goes on to both sides


def memory_bytes(params: Params) -> int:
    """The drawn numbers of every power of two, in float64 with some temporaries."""
    return 8 * 12 * len(EXPONENTS) * params.n_drawn_values + 2**16


def run(params: Params, run: Run) -> Result:
    """One value in one format, and the root mean square of the relative error of random numbers along the magnitudes.

    ``octaves``: powers of two from the smallest positive number to the largest. A value that becomes infinite keeps the
    format's largest number as ``stored_value``, so that it can be drawn; ``becomes_infinite`` is 1 then.
    """
    import torch

    dtype = getattr(torch, params.stored_format)
    value = torch.tensor([params.given_value], dtype=torch.float64)
    stored = _through(value, params.times_log2, dtype)
    limits = torch.finfo(dtype)
    infinite = not bool(stored.isfinite())
    kept = limits.max * 2.0**-params.times_log2 if infinite else stored.item()
    run.progress(0.2)
    smallest = limits.smallest_normal * limits.eps
    scaled = min(params.given_value * 2.0**params.times_log2, limits.max)
    exponent = math.frexp(max(scaled, limits.smallest_normal))[1] - 1
    metrics = {
        "stored_value": kept,
        "stored_error": abs(kept - params.given_value) / params.given_value,
        "spacing_there": limits.eps * 2.0 ** (exponent - params.times_log2),
        "spacing_at_one": limits.eps,
        "largest_number": limits.max,
        "smallest_normal": limits.smallest_normal,
        "smallest_positive": _smallest(dtype, smallest),
        "octaves": float(math.floor(math.log2(limits.max)) - round(math.log2(smallest))),
        "becomes_infinite": float(infinite),
    }
    return Result(metrics, {"errors": _errors(params, run)})


def _through(x: torch.Tensor, times_log2: int, dtype: torch.dtype) -> torch.Tensor:
    """x times a power of two, stored in the format, read, and divided again. float64 on the CPU throughout."""
    return (x * 2.0**times_log2).float().to(dtype).cpu().double() * 2.0**-times_log2


def _smallest(dtype: torch.dtype, expected: float) -> float:
    """The smallest positive number, found by storing: 0 where the device would flush it."""
    import torch

    return float(torch.tensor([expected]).to(dtype).float().item())


def _errors(params: Params, run: Run) -> Table:
    """Relative error along the magnitudes, as far as a format has numbers; 0 for a number counts as an error of 1."""
    import torch

    powers = 2.0 ** torch.tensor(list(EXPONENTS), dtype=torch.float64)
    x = powers[:, None] * (1 + run.rand(len(powers), params.n_drawn_values).cpu().double())
    columns: dict[str, list[np.ndarray]] = {"magnitude": [], "stored_format": [], "rounding_error": []}
    for name in DRAWN:
        dtype = getattr(torch, name)
        kept = (x * 2.0**params.times_log2 <= torch.finfo(dtype).max).all(dim=1)
        relative = (_through(x, params.times_log2, dtype) - x) / x
        error = relative[kept].square().mean(dim=1).sqrt()
        columns["magnitude"].append(powers[kept].numpy())
        columns["stored_format"].append(np.full(int(kept.sum()), name))
        columns["rounding_error"].append(error.numpy())
    return {name: np.concatenate(parts) for name, parts in columns.items()}
