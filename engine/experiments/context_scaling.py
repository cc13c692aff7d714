r"""What becomes of RoPE's frequencies when a model is run beyond its trained length, under each way to scale them.

Trained at ``trained_len``, run at ``length_ratio`` times as many positions, with frequencies made for
``context_factor`` times as many. A pair of coordinates that makes less than a turn within the trained length has seen a
part of the circle only; where the new frequencies carry it farther, its angles are new to the model
(``unseen_turns``). The other pairs have been all around the circle: of them each angle was seen, though not each
combination with the angles of other pairs.

Slower frequencies pay with what tells neighbours apart: the vector of all pairs moves less from one position to the
next (``neighbour_distance_ratio``).

``stale_logits_change`` is about frequencies that change while a text grows (*dynamic* scaling, factor max(1,
length/trained_len)) when keys are kept as they were rotated: a query at the last position meets keys each rotated with
the factor of its own time, and the logits are compared with those of keys that are all rotated anew.

Everything is computed in float64 on the CPU. Sources: see ``engine/context.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.context import (
    FAST_TURNS,
    LARGER_BASE,
    METHODS,
    SLOW_TURNS,
    attention_factor,
    frequencies,
    scaled_frequencies,
)
from engine.positions import BASE, rotate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    method: str = choice("ntk_aware", *(method for method in METHODS if method != "ntk_aware"))
    context_factor: float = number(8.0, low=1, high=128)
    length_ratio: float = number(8.0, low=1, high=128)
    trained_len: int = number(4096, low=16, high=131072, log2=True)
    d_k: int = number(128, low=4, high=256, log2=True)
    base: float = number(BASE, low=10, high=10_000_000)
    slow_turns: float = number(SLOW_TURNS, low=0.1, high=64)
    fast_turns: float = number(FAST_TURNS, low=0.2, high=128)
    larger_base: float = number(LARGER_BASE, low=10, high=100_000_000)

    def rules(self) -> Iterator[Problem]:
        if self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="width_is_even")
        if self.slow_turns >= self.fast_turns:
            values = {"fast_turns": self.fast_turns}
            yield Problem("rule", "slow_turns", self.slow_turns, rule="slow_turns_below_fast", values=values)


METRICS = (
    Metric("pairs_beyond"),
    Metric("reach_max"),
    Metric("neighbour_distance_ratio"),
    Metric("slow_pairs"),
    Metric("unseen_turns_max"),
    Metric("fastest_frequency_ratio"),
    Metric("middle_frequency_ratio"),
    Metric("slowest_frequency_ratio"),
    Metric("unchanged_pairs"),
    Metric("divided_pairs"),
    Metric("blended_pairs"),
    Metric("logits_factor"),
    Metric("stale_logits_change"),
)
PLOTS = (
    Plot("frequency_ratio", table="pairs", x="pair", y="frequency_ratio", by="method"),
    Plot("unseen_turns", table="pairs", x="pair", y="unseen_turns", by="method"),
    Plot("by_distance", table="by_distance", x="token_distance", y="cosine", by="method", x_scale="log2"),
)
BUDGET_S = 0.03

N_POINTS = 65  # distances on the chart
N_KEYS = 64  # cached keys, evenly spaced over the text
SHOWN = ("unscaled", "interpolation", "ntk_aware", "yarn", "larger_base")
ROUNDING = 1e-9  # a frequency that is the same number, computed in another way


def memory_bytes(params: Params) -> int:
    """Angles and rotated keys of every cached key, and those of the distances on the chart for each method."""
    return 8 * params.d_k * (12 * N_KEYS + 6 * N_POINTS + 40) + 2**15


def run(params: Params, run: Run) -> Result:
    """Measure the chosen method, and draw all of them.

    ``pairs_beyond``: pairs below one turn that go farther than in training; ``reach_max``: how many times farther, at
    most. Shapes: frequencies (d_k / 2,).
    """
    theta = frequencies(params.d_k, params.base)
    scaled = _scaled(params, params.method, params.context_factor)
    slow = theta * params.trained_len < 2 * math.pi
    reach = scaled / theta * params.length_ratio
    run.progress(0.2)
    kept, divided = (((scaled / theta - ratio).abs() < ROUNDING) for ratio in (1, 1 / params.context_factor))
    q, k = run.randn(params.d_k).cpu().double(), run.randn(N_KEYS, params.d_k).cpu().double()
    q_scaled, k_scaled = (x * attention_factor(params.method, params.context_factor) for x in (q, k))
    metrics = {
        "pairs_beyond": (slow & (reach > 1 + ROUNDING)).sum(),
        "reach_max": reach[slow].amax() if slow.any() else reach.new_zeros(()),
        "neighbour_distance_ratio": _neighbour_distance(scaled) / _neighbour_distance(theta),
        "slow_pairs": slow.sum(),
        "unseen_turns_max": _unseen_turns(params, theta, scaled).amax(),
        "fastest_frequency_ratio": scaled[0] / theta[0],
        "middle_frequency_ratio": scaled[params.d_k // 4] / theta[params.d_k // 4],
        "slowest_frequency_ratio": scaled[-1] / theta[-1],
        "unchanged_pairs": kept.sum(),
        "divided_pairs": (divided & ~kept).sum(),
        "blended_pairs": (~divided & ~kept).sum(),
        "logits_factor": (k_scaled @ q_scaled).norm() / (k @ q).norm(),
        "stale_logits_change": _stale_logits_change(params, q, k),
    }
    run.progress(0.5)
    shown = _shown(params)
    tables = {"pairs": _pairs_table(params, theta, shown), "by_distance": _by_distance_table(params, shown)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _scaled(params: Params, method: str, factor: float | torch.Tensor) -> torch.Tensor:
    return scaled_frequencies(
        method,
        params.d_k,
        params.base,
        factor,
        params.trained_len,
        slow_turns=params.slow_turns,
        fast_turns=params.fast_turns,
        larger_base=params.larger_base,
    )


def _neighbour_distance(theta: torch.Tensor) -> torch.Tensor:
    """How far the unit vectors of all pairs move together from one position to the next: the root of squared chords."""
    return (2 * (theta / 2).sin()).norm()


def _unseen_turns(params: Params, theta: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    """The share of its circle that each pair visits in the longer text and has not in training. Shapes: as scaled."""
    trained, tested = theta * params.trained_len, scaled * params.trained_len * params.length_ratio
    full = 2 * math.pi
    return ((tested.clamp(max=full) - trained.clamp(max=full)) / full).clamp(min=0)


def _stale_logits_change(params: Params, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Root mean square of what old rotations of the keys change in the logits, over that of the logits."""
    import torch

    length = round(params.trained_len * params.length_ratio)
    positions = (torch.arange(N_KEYS, dtype=torch.float64) * length / N_KEYS).floor()[:, None]
    now = _scaled(params, params.method, length / params.trained_len)
    then = _scaled(params, params.method, ((positions + 1) / params.trained_len).clamp(min=1))
    q_now = rotate(q, (length - 1) * now)
    fresh, stale = (rotate(k, positions * theta) @ q_now for theta in (now, then))
    return (stale - fresh).norm() / fresh.norm()


def _shown(params: Params) -> dict[str, torch.Tensor]:
    """The frequencies of the methods on the charts: of the usual ones, and of the chosen one."""
    methods = [*SHOWN, *(() if params.method in SHOWN else (params.method,))]
    return {method: _scaled(params, method, params.context_factor) for method in methods}


def _pairs_table(params: Params, theta: torch.Tensor, shown: dict[str, torch.Tensor]) -> Table:
    import torch

    scaled = torch.stack(list(shown.values()))  # (method, d_k / 2)
    return {
        "method": np.repeat(list(shown), len(theta)),
        "pair": np.tile(np.arange(len(theta)), len(shown)),
        "frequency_ratio": (scaled / theta).flatten().numpy().astype(np.float32),
        "unseen_turns": _unseen_turns(params, theta, scaled).flatten().numpy().astype(np.float32),
    }


def _by_distance_table(params: Params, shown: dict[str, torch.Tensor]) -> Table:
    """The logit of q and k with all coordinates 1 over their lengths: the mean of the cosines of all pairs."""
    import torch

    farthest = params.trained_len * params.length_ratio
    distances = torch.logspace(0, math.log2(farthest), N_POINTS, base=2, dtype=torch.float64).round().unique()
    cosines = (distances[:, None] * torch.stack(list(shown.values()))[:, None]).cos().mean(dim=-1)
    return {
        "method": np.repeat(list(shown), len(distances)),
        "token_distance": np.tile(distances.numpy(), len(shown)),
        "cosine": cosines.flatten().numpy().astype(np.float32),
    }
