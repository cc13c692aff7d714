r"""Softmax of [a, a, 2a]: the largest weight as a grows, its slope, and where a number format stops telling it from 1.

The weight of 2a is :math:`w = 1/(1 + 2e^{-a})` and its slope :math:`\partial w/\partial a = w\,(1 - w)`. Multiplying
the logits sharpens the weights; adding a shift to all of them changes nothing in exact arithmetic, and costs digits in
a number format. Nothing here is random.

With p digits after the binary point of 1, the sum :math:`1 + 2e^{-a}` rounds to 1 from :math:`a = (p + 2)\ln 2` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import softmax, softmax_gradient
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number

if TYPE_CHECKING:
    import torch

DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Params(BaseParams):
    a: float = number(2.0, low=0, high=100, step=0.5)
    shift: float = number(0.0, low=0, high=1000, step=1)
    number_format: str = choice(*DTYPES)  # not `dtype`: that is the run's own


METRICS = (
    Metric("weight_max"),
    Metric("weight_max_derivative"),
    Metric("one_from"),
    Metric("one_minus_weight"),
)
PLOTS = (
    Plot("near", table="near", x="a", y="weight_max", theory="theory_weight_max"),
    Plot("slope", table="near", x="a", y="weight_max_derivative", theory="theory_derivative"),
    Plot("far", table="far", x="a", y="weight_max", theory="theory_weight_max"),
    Plot("distance", table="distance", x="a", y="distance", by="dtype", theory="theory_distance", y_scale="log10"),
)
BUDGET_S = 0.01

SEARCH = np.arange(0, 100 * 256 + 1) / 256  # values of a among which one_from is looked for


def memory_bytes(params: Params) -> int:
    """The search's logits, weights and temporaries in float64."""
    return 8 * 3 * len(SEARCH) * 8


def run(params: Params, run: Run) -> Result:
    """Evaluate the softmax in the chosen number format, and exactly enough in float64.

    Shapes: logits and weights (points, 3).
    """
    at = np.array([params.a])
    weights, slopes = _evaluate(at, params.shift, params.number_format, run)
    metrics = {
        "weight_max": float(weights[0, 2]),
        "weight_max_derivative": float(slopes[0]),
        "one_from": _one_from(params, run),
        "one_minus_weight": float(_exact(at)[0]),
    }
    tables = {
        "near": _curve(np.linspace(0, 10, 101), params, run),
        "far": _curve(np.linspace(0, 100, 101), params, run),
        "distance": _distance(np.linspace(0.5, 50, 100), params, run),
    }
    return Result(metrics, tables)


def _evaluate(a: np.ndarray, shift: float, dtype: str, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Weights (points, 3) and the slope of the last one (points,), every step rounded to ``dtype``.

    The slope is the Jacobian times the logits' own slopes [1, 1, 2]; as it is symmetric, softmax_gradient gives that.
    """
    import torch

    device = torch.device("cpu") if dtype == "float64" else run.device  # not every device has float64
    exact = torch.from_numpy(a[:, None] * np.array([1.0, 1.0, 2.0]) + shift)
    weights = softmax(exact.to(getattr(torch, dtype)).to(device))
    slopes = softmax_gradient(weights, weights.new_tensor([1.0, 1.0, 2.0]).expand_as(weights))[:, 2]
    return _numpy(weights), _numpy(slopes)


def _numpy(x: torch.Tensor) -> np.ndarray:
    values: np.ndarray = x.cpu().double().numpy()
    return values


def _exact(a: np.ndarray) -> np.ndarray:
    """1 - w in float64 from its own formula: no difference of numbers near 1."""
    rest: np.ndarray = 2 * np.exp(-a) / (1 + 2 * np.exp(-a))
    return rest


def _one_from(params: Params, run: Run) -> float:
    """The smallest a of the search from which on the weight is 1 in the number format."""
    weights, _ = _evaluate(SEARCH, params.shift, params.number_format, run)
    below = np.flatnonzero(weights[:, 2] < 1)
    return float(SEARCH[min(below[-1] + 1, len(SEARCH) - 1)])


def _curve(a: np.ndarray, params: Params, run: Run) -> Table:
    """Weight and slope over a, beside the formulas."""
    weights, slopes = _evaluate(a, params.shift, params.number_format, run)
    rest = _exact(a)
    columns = {
        "a": a,
        "weight_max": weights[:, 2],
        "theory_weight_max": 1 / (1 + 2 * np.exp(-a)),
        "weight_max_derivative": slopes,
        "theory_derivative": rest * (1 - rest),
    }
    return {name: values.astype(np.float32) for name, values in columns.items()}


def _distance(a: np.ndarray, params: Params, run: Run) -> Table:
    """1 - w as each number format tells it, as long as it tells a difference at all."""
    parts = []
    for dtype in DTYPES:
        weights, _ = _evaluate(a, params.shift, dtype, run)
        told = weights[:, 2] < 1
        parts.append((np.full(told.sum(), dtype), a[told], 1 - weights[told, 2], _exact(a[told])))
    dtypes, points, distances, theory = (np.concatenate(column) for column in zip(*parts, strict=True))
    columns = {"a": points, "distance": distances, "theory_distance": theory}
    return {"dtype": dtypes} | {name: values.astype(np.float32) for name, values in columns.items()}
