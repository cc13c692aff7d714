r"""The largest logit that a norm on q and k with gains for each channel allows, with and without rotary positions.

q̂ and k̂ have root mean square 1. With gains and positions at a ``distance`` m the logit is
(γ_q ⊙ q̂)ᵀ R_m (γ_k ⊙ k̂) / √d_k, R_m turning pair j by m·base^(-2j/d_k). Over all directions of q̂ and k̂ its supremum is
√d_k times the largest singular value of diag(γ_q) R_m diag(γ_k), which is measured here at every distance, beside

``channel_bound``  √d_k · max over channels of \|γ_q γ_k\|: exact at distance 0, too small elsewhere
``pair_bound``     √d_k · max over pairs of (largest \|γ_q\| of the pair · largest \|γ_k\| of the pair): a turn mixes
                   the two channels of a pair and nothing else
``global_bound``   √d_k · max \|γ_q\| · max \|γ_k\|: right, but larger than it has to be

Gains are 1 + ``channel_gain_std`` · ε for each channel (``channel``), for each pair (``pair``) or one number
(``one_number``). ``crossed`` is the worst case for the first of these bounds: with s = 1 + ``channel_gain_std``, q has
gain s in the first channel of every pair and 1/s in the second, k the other way round, so that every product is 1.
RoPE before the norm is another function than behind it when the two gains of a pair differ.

Sources: su2021, section 3.2.2; qwen3-code, ``Qwen3Attention``; llama4-code, ``Llama4TextAttention.forward``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.norms import norm_statistics, normalize
from engine.positions import rotate
from engine.rotary import exact_angles

if TYPE_CHECKING:
    import torch

N_VECTORS = 64
DISTANCES = (*range(16), *range(16, 64, 4), *range(64, 257, 16))
EPSILON = 1e-6


@dataclass(frozen=True)
class Params(BaseParams):
    gains_differ_by: str = choice("crossed", "channel", "pair", "one_number")
    channel_gain_std: float = number(0.5, low=0, high=2, step=0.1)
    rope_distance: int = number(16, low=0, high=4096)
    base: float = number(10000.0, low=1, high=1e7)
    d_k: int = number(64, low=2, high=256, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="rope_needs_pairs")


METRICS = (
    Metric("largest_logit"),
    Metric("largest_logit_any_distance"),
    Metric("channel_bound"),
    Metric("pair_bound"),
    Metric("global_bound"),
    Metric("rope_order_difference"),
    Metric("random_logit_max"),
)
PLOTS = (
    Plot("largest_by_distance", table="by_distance", x="rope_distance", y="largest_or_bound", by="bound"),
    Plot("gains", table="by_channel", mark="point", x="channel", y="channel_gain", by="vector"),
)
BUDGET_S = 0.05


def memory_bytes(params: Params) -> int:
    """The rotated matrices of all distances and what their singular values take, and the random vectors."""
    return 8 * (6 * 2 * params.d_k * len(DISTANCES) + 16 * N_VECTORS * params.d_k + 4 * params.d_k**2) + 2**20


def run(params: Params, run: Run) -> Result:
    """``largest_logit`` is the supremum at ``rope_distance``, ``largest_logit_any_distance`` that over all angles.

    ``rope_order_difference``: the largest difference in the logits of random q and k at ``rope_distance`` between norm
    and gains before RoPE and behind it. ``random_logit_max``: the largest of these logits, norm and gains before RoPE.
    """
    import torch

    gain_q, gain_k = _gains(params, run), _gains(params, run)
    if params.gains_differ_by == "crossed":
        gain_k = 1 / gain_k
    q, k = run.randn(N_VECTORS, params.d_k), run.randn(N_VECTORS, params.d_k)
    root = math.sqrt(params.d_k)
    here = _turned_gains(params, gain_q, gain_k, torch.tensor([params.rope_distance]))
    halves = torch.tensor([i * math.pi / 2 for i in range(2)], dtype=torch.float64)[:, None]
    extremes = _pair_suprema(gain_q, gain_k, halves.expand(-1, params.d_k // 2))
    channel_q, channel_k = gain_q.abs(), gain_k.abs()
    pair_q, pair_k = (x.unflatten(0, (2, -1)).amax(dim=0) for x in (channel_q, channel_k))
    precise = torch.promote_types(run.dtype, torch.float32)
    angles = exact_angles(torch.tensor([params.rope_distance]), params.d_k, params.base).to(precise).to(run.device)
    here_q, here_k = (gain.to(run.dtype).to(run.device) for gain in (gain_q, gain_k))
    logits = {order: _logits(order, q, k, here_q, here_k, angles) for order in ("norm_first", "rope_first")}
    metrics = {
        "largest_logit": root * here.max().item(),
        "largest_logit_any_distance": root * extremes.max().item(),
        "channel_bound": root * (channel_q * channel_k).max().item(),
        "pair_bound": root * (pair_q * pair_k).max().item(),
        "global_bound": root * (channel_q.max() * channel_k.max()).item(),
        "rope_order_difference": (logits["norm_first"] - logits["rope_first"]).abs().max().item(),
        "random_logit_max": logits["norm_first"].abs().max().item(),
    }

    run.progress(0.5)
    by_distance = root * _turned_gains(params, gain_q, gain_k, torch.tensor(DISTANCES)).amax(dim=-1).numpy()
    bounds = ("largest_logit", "channel_bound", "pair_bound", "global_bound")
    columns = [by_distance, *(np.full(len(DISTANCES), metrics[name]) for name in bounds[1:])]
    distances: Table = {
        "rope_distance": np.tile(DISTANCES, len(bounds)),
        "bound": np.repeat(bounds, len(DISTANCES)),
        "largest_or_bound": np.concatenate(columns),
    }
    channels: Table = {
        "channel": np.tile(np.arange(params.d_k), 2),
        "vector": np.repeat(["q", "k"], params.d_k),
        "channel_gain": np.concatenate([gain_q.numpy(), gain_k.numpy()]),
    }
    return Result(metrics, {"by_distance": distances, "by_channel": channels})


def _gains(params: Params, run: Run) -> torch.Tensor:
    """One gain for each channel, float64 on the CPU. Pairs are the channels j and j + d_k/2. Shapes: (d_k,)."""
    import torch

    if params.gains_differ_by == "crossed":
        first = torch.full((params.d_k // 2,), 1 + params.channel_gain_std, dtype=torch.float64)
        return torch.cat((first, 1 / first))
    drawn = run.randn(params.d_k).cpu().double()
    if params.gains_differ_by == "pair":
        drawn = drawn[: params.d_k // 2].repeat(2)
    if params.gains_differ_by == "one_number":
        drawn = drawn[:1].expand(params.d_k)
    return 1 + params.channel_gain_std * drawn


def _turned_gains(params: Params, gain_q: torch.Tensor, gain_k: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """Largest singular value of each pair's block at each distance. Shapes: (distance, d_k / 2)."""
    return _pair_suprema(gain_q, gain_k, exact_angles(distances, params.d_k, params.base))


def _pair_suprema(gain_q: torch.Tensor, gain_k: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """diag(γ_q) R diag(γ_k) is made of one block of 2 x 2 for each pair: the largest singular value of each.

    Shapes: gains (d_k,), angles (..., d_k / 2); returns (..., d_k / 2).
    """
    import torch

    (q_first, q_second), (k_first, k_second) = gain_q.chunk(2), gain_k.chunk(2)
    cos, sin = angles.cos(), angles.sin()
    top = torch.stack((q_first * cos * k_first, -q_first * sin * k_second), dim=-1)
    bottom = torch.stack((q_second * sin * k_first, q_second * cos * k_second), dim=-1)
    return torch.linalg.svdvals(torch.stack((top, bottom), dim=-2))[..., 0]


def _logits(
    order: str, q: torch.Tensor, k: torch.Tensor, gain_q: torch.Tensor, gain_k: torch.Tensor, angles: torch.Tensor
) -> torch.Tensor:
    """q at position 0, k at the distance; norm and gains before or behind the turn. Shapes: (vectors, vectors)."""
    if order == "norm_first":
        q, k = gain_q * _rms(q), rotate(gain_k * _rms(k), angles)
    else:
        q, k = gain_q * _rms(q), gain_k * _rms(rotate(k, angles))
    return q @ k.mT / math.sqrt(q.shape[-1])


def _rms(x: torch.Tensor) -> torch.Tensor:
    return normalize(x, norm_statistics(x, "rms_norm"), EPSILON)
