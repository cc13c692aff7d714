r"""Rotary angles in a number format: what position, frequency and product lose, and what the logit makes of it.

An angle :math:`t\,\theta_j` grows with the position t, and so does the spacing of the numbers of a format: a bfloat16
angle near 4000 is rounded to a multiple of 16, more than two full turns. The fast pairs (small j) suffer, the slow ones
do not. bfloat16 also has no 4001 among its numbers; several positions become one. A frequency rounded by itself
leaves q·k a function of the distance alone; it is another frequency, though, and its error grows with the distance.

Another rounding stands apart: cos and sin, and the rotated q and k, kept in ``stored_in``. It does not grow with t.

The reference is float64 throughout, for the same q and k; cos and sin are taken of the rounded angle in float64, so
that the formats differ in nothing else. ``position_scaling`` divides the positions first, as position interpolation
does. Errors of angles are unreduced; a pair counts as off by what is left of its error beside full turns.

Sources: Wang et al. 2024 (arXiv:2411.13476), abstract; https://github.com/EleutherAI/gpt-neox/issues/1003.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.positions import BASE, rotate
from engine.rotary import ROUNDED, exact_angles, rounded_angles

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
FLOAT16_MAX = 65504


@dataclass(frozen=True)
class Params(BaseParams):
    position: int = number(4001, low=1, high=2**20, log2=True)
    low_dtype: str = choice(*DTYPES)
    rounded: str = choice(*ROUNDED)
    stored_in: str = choice("float64", "float32", "bfloat16", "float16")
    key_distance: int = number(7, low=1, high=4096, log2=True)
    d_k: int = number(64, low=2, high=256, log2=True)
    base: float = number(BASE, low=10, high=10_000_000)
    position_scaling: float = number(1.0, low=1, high=64, step=1)
    n_pairs: int = number(256, low=2, high=4096, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="width_is_even")
        if self.key_distance > self.position:
            yield Problem("rule", "key_distance", self.key_distance, rule="key_before_query")
        if _beyond(self, self.low_dtype, self.position):
            yield Problem("rule", "position", self.position, rule="beyond_float16", values={"limit": FLOAT16_MAX})


METRICS = (
    Metric("angle_error_max"),
    Metric("pairs_off_by_one"),
    Metric("pairs_off_by_tenth"),
    Metric("logits_error"),
    Metric("vector_error"),
    Metric("position_error"),
    Metric("distinct_positions"),
)
PLOTS = (
    Plot(
        "by_position",
        table="by_position",
        x="position",
        y="logits_error",
        by="number_format",
        x_scale="log2",
        y_scale="log10",
    ),
    Plot("by_pair", table="by_pair", x="pair", y="angle_error", by="number_format", y_scale="log10"),
)
BUDGET_S = 0.05

N_PLACES = 16  # neighbouring positions over which errors are averaged: one alone may be a number of the format
CURVE_PAIRS = 32  # drawn pairs behind each point of the curve
POSITIONS = tuple(round(1.37 * 2**power) for power in range(5, 20))
SMALLEST = 1e-9  # an error below this, also none at all, is drawn here


def memory_bytes(params: Params) -> int:
    """q and k rotated exactly and as stored, their temporaries, and all positions up to this one in two formats."""
    return 8 * 24 * max(params.n_pairs, CURVE_PAIRS * len(POSITIONS)) * params.d_k + 24 * params.position


def run(params: Params, run: Run) -> Result:
    """Errors at one position, and the error of a logit along the positions for each format.

    ``logits_error``: root mean square over the drawn pairs, at the position and the 15 before it, in units of √d_k, the
    size of their logits before the scale. Shapes: q, k (n_pairs, d_k).
    """
    import torch

    q, k = (run.randn(params.n_pairs, params.d_k).cpu().double() for _ in range(2))
    run.progress(0.1)
    position = torch.tensor([params.position], dtype=torch.float64)
    dtype = getattr(torch, params.low_dtype)
    errors = _angle_errors(params, params.low_dtype)
    off = (torch.remainder(errors + math.pi, 2 * math.pi) - math.pi).abs()
    logits_error, vector_error = _errors(params, q, k, position, params.low_dtype)
    run.progress(0.4)
    scaled = position / params.position_scaling
    every = (torch.arange(params.position + 1, dtype=torch.float64) / params.position_scaling).to(dtype)
    metrics = {
        "angle_error_max": errors.abs().max().item(),
        "pairs_off_by_one": float((off > 1).sum().item()),
        "pairs_off_by_tenth": float((off > 0.1).sum().item()),
        "logits_error": logits_error.item(),
        "vector_error": vector_error.item(),
        "position_error": (scaled.to(dtype).cpu().double() - scaled).abs().item() * params.position_scaling,
        "distinct_positions": float((every[1:] != every[:-1]).sum().item() + 1),
    }
    return Result(metrics, {"by_position": _by_position(params, run, q, k), "by_pair": _by_pair(params)})


def _angle_errors(params: Params, name: str) -> torch.Tensor:
    """Rounded minus exact angle of each pair at the position. Shapes: (d_k / 2,)."""
    import torch

    position = torch.tensor([params.position / params.position_scaling], dtype=torch.float64)
    rounded = rounded_angles(position, params.d_k, params.base, getattr(torch, name), params.rounded)
    return (rounded - exact_angles(position, params.d_k, params.base))[0]


def _errors(
    params: Params, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors of the logits and of the rotated q at each position, where pair i of q and k stands i mod 16 before it.

    Shapes: q, k (n_pairs, d_k), positions (n,) in float64; returns (n,) twice.
    """
    import torch

    stored, dtype = getattr(torch, params.stored_in), getattr(torch, name)
    places = (positions[:, None] - torch.arange(len(q)) % N_PLACES).clamp_min(params.key_distance)  # (n, n_pairs)
    exact, kept = [], []
    for x, at in ((q, places), (k, places - params.key_distance)):
        at = at / params.position_scaling
        x = x.to(stored)  # the reference takes the same numbers
        rounded = rounded_angles(at, params.d_k, params.base, dtype, params.rounded)
        kept.append(rotate(x, rounded).cpu().double())  # (n, n_pairs, d_k)
        exact.append(rotate(x.cpu().double(), exact_angles(at, params.d_k, params.base)))
    logits, reference = ((one * other).sum(dim=-1) for one, other in (kept, exact))
    vectors = (kept[0] - exact[0]).square().sum(dim=(1, 2)) / exact[0].square().sum(dim=(1, 2))
    return (logits - reference).square().mean(dim=-1).sqrt() / math.sqrt(params.d_k), vectors.sqrt()


def _beyond(params: Params, name: str, position: int) -> bool:
    """Whether a format has no number as large as the position."""
    return name == "float16" and position / params.position_scaling > FLOAT16_MAX


def _by_position(params: Params, run: Run, q: torch.Tensor, k: torch.Tensor) -> Table:
    """The error of the logits along the positions, as far as a format has numbers; few drawn pairs are enough here."""
    import torch

    columns: dict[str, list[np.ndarray]] = {"position": [], "number_format": [], "logits_error": []}
    for name in DTYPES:
        run.progress(0.7)
        there = [at for at in POSITIONS if at >= params.key_distance + N_PLACES and not _beyond(params, name, at)]
        errors = _errors(params, q[:CURVE_PAIRS], k[:CURVE_PAIRS], torch.tensor(there, dtype=torch.float64), name)[0]
        columns["position"].append(np.array(there))
        columns["number_format"].append(np.full(len(there), name))
        columns["logits_error"].append(errors.clamp_min(SMALLEST).numpy().astype(np.float32))
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def _by_pair(params: Params) -> Table:
    """The error of the angle of every pair at the position, for each format that has it."""
    names = [name for name in DTYPES if not _beyond(params, name, params.position)]
    errors = [_angle_errors(params, name).abs().clamp_min(SMALLEST).numpy() for name in names]
    return {
        "pair": np.tile(np.arange(params.d_k // 2), len(names)),
        "number_format": np.repeat(names, params.d_k // 2),
        "angle_error": np.concatenate(errors).astype(np.float32),
    }
