r"""The logit of one q and one k at all pairs of positions: RoPE makes it depend on the distance alone.

With the pairs of coordinates as complex numbers, q at position m and k at position n are multiplied by
:math:`e^{\mathrm i m\theta_j}` and :math:`e^{\mathrm i n\theta_j}`, and so

.. math:: \langle R_m q, R_n k\rangle = \mathrm{Re}\sum_j q_j \bar k_j\, e^{\mathrm i(m-n)\theta_j}

The matrix of these logits is constant along its diagonals. How it runs with the distance is up to q and k: equal ones
start high and fall, independent ones of mean 0 neither fall nor rise on average, and a key turned on purpose peaks at
any distance that one wants. With :math:`h_j = q_j\bar k_j` and :math:`S_j(r) = \sum_{i<j} e^{\mathrm i r\theta_i}`,
|logit| is at most ``plain_bound`` :math:`\sum_j|h_j|`, and also at most ``decay_bound``
:math:`\max_j|h_{j+1}-h_j|\,\sum_j|S_j(r)|`, the one that falls with the distance.

Positions that are *added* (sinusoids of the same frequencies, added to q and k) leave terms that depend on m and on n.

Everything is computed in float64 on the CPU: what rounding does to it is another experiment's subject (rope_precision).

Sources: Su et al. 2021, RoFormer (arXiv:2104.09864), sections 3.2.2 and 3.4.3; Barbero et al. 2024 (arXiv:2410.06205),
section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import qk_product
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.positions import BASE
from engine.rotary import complex_pairs, exact_angles, turn

if TYPE_CHECKING:
    import torch

SHOWN = ("random_qk", "equal_qk", "all_ones", "peak_at_distance")  # the curves that are always drawn


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=2, high=256, log2=True)
    base: float = number(BASE, low=10, high=10_000_000)
    vectors: str = choice(*SHOWN, "one_pair")
    pair: int = number(0, low=0, high=127)
    peak_distance: int = number(100, low=1, high=4096, log2=True)
    encoding: str = choice("rotate_qk", "add_to_qk")
    pairing: str = choice("half_split", "interleaved", "mixed_pairing")
    far_distance: int = number(256, low=1, high=16384, log2=True)
    seq_len: int = number(24, low=2, high=64)
    n_pairs: int = number(256, low=2, high=8192, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset(() if self.vectors == "one_pair" else {"pair"})

    def rules(self) -> Iterator[Problem]:
        if self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="width_is_even")
        elif self.vectors == "one_pair" and self.pair >= self.d_k // 2:
            yield Problem("rule", "pair", self.pair, rule="pair_within_head", values={"n": self.d_k // 2})


METRICS = (
    Metric("diagonal_spread"),
    Metric("matrix_spread"),
    Metric("norm_change"),
    Metric("complex_difference"),
    Metric("zero_distance_change"),
    Metric("cosine_near_mean"),
    Metric("cosine_far_mean"),
    Metric("cosine_near_rms"),
    Metric("cosine_far_rms"),
    Metric("peak_found"),
    Metric("decay_bound_far_share"),
    Metric("decay_bound_over_plain_min"),
    Metric("slow_pairs"),
)
PLOTS = (
    Plot("matrix", table="matrix", mark="heat", x="key_position", y="query_position", value="logit"),
    Plot("by_distance", table="by_distance", x="token_distance", y="cosine", by="vectors"),
    Plot("bounds", table="bounds", x="token_distance", y="logit_bound", by="series", y_scale="log10"),
    Plot("wavelengths", table="wavelengths", x="pair", y="wavelength", theory="far_distance", y_scale="log10"),
)
BUDGET_S = 0.05

N_POINTS = 65  # distances on the charts


def memory_bytes(params: Params) -> int:
    """Drawn q and k with their turned copies, one q at all distances, and the partial sums on the chart, in float64."""
    drawn = 8 * params.n_pairs * params.d_k
    by_distance = 6 * (params.far_distance + N_POINTS + params.seq_len) * params.d_k
    return 8 * (drawn + by_distance + 4 * N_POINTS * params.d_k + 8 * params.seq_len**2)


def run(params: Params, run: Run) -> Result:
    """The matrix of the first pair of q and k, and means over all drawn pairs at distance 0 and far_distance.

    Shapes: q, k (n_pairs, d_k); the matrix (seq_len, seq_len).
    """
    import torch

    drawn = run.randn(params.n_pairs, params.d_k).cpu().double(), run.randn(params.n_pairs, params.d_k).cpu().double()
    run.progress(0.1)
    q, k = _vectors(params, params.vectors, *drawn)
    lengths = q.norm(dim=-1) * k.norm(dim=-1)  # (n_pairs,)

    positions = torch.arange(params.seq_len)
    turned_q, turned_k = _at(params, q[0], positions, "q"), _at(params, k[0], positions, "k")  # (seq_len, d_k)
    matrix = qk_product(turned_q, turned_k)
    diagonal = positions[:, None] - positions + params.seq_len - 1  # numbers the diagonals from 0
    highest, lowest = (_by_diagonal(matrix, diagonal, reduce) for reduce in ("amax", "amin"))
    by_distance = _relative_logits(params, q[0], k[0], torch.arange(1 - params.seq_len, params.seq_len))
    relative = by_distance[diagonal]
    norms = turned_q.norm(dim=-1) / q[0].norm()
    run.progress(0.3)

    near, far = (_cosines(params, q, k, distance) for distance in (0, params.far_distance))
    run.progress(0.5)
    distances = torch.arange(params.far_distance + 1)
    logits = _at(params, q[0], distances, "q") @ _at(params, k[0], distances[:1], "k")[0]
    run.progress(0.7)

    shown = torch.linspace(0, params.far_distance, N_POINTS).round().long().unique()
    partial = _partial_sums(params, shown)  # (n,)
    h = complex_pairs(q[0], _pairing(params, "q")) * complex_pairs(k[0], _pairing(params, "k")).conj()
    steps = torch.cat((h[1:], torch.zeros_like(h[:1]))) - h  # h ends in 0
    decay, plain = steps.abs().max() * partial, h.abs().sum()
    wavelengths = 2 * math.pi / exact_angles(torch.ones(()), params.d_k, params.base)
    metrics = {
        "diagonal_spread": ((highest - lowest).max() / lengths[0]).item(),
        "matrix_spread": ((matrix.max() - matrix.min()) / lengths[0]).item(),
        "norm_change": (norms - 1).abs().max().item(),
        "complex_difference": ((matrix - relative).abs().max() / lengths[0]).item(),
        "zero_distance_change": ((matrix.diagonal() - q[0] @ k[0]).abs().max() / lengths[0]).item(),
        "cosine_near_mean": near.mean().item(),
        "cosine_far_mean": far.mean().item(),
        "cosine_near_rms": near.square().mean().sqrt().item(),
        "cosine_far_rms": far.square().mean().sqrt().item(),
        "peak_found": float(logits.argmax().item()),
        "decay_bound_far_share": (partial[-1] / partial[0]).item(),
        "decay_bound_over_plain_min": (decay.min() / plain).item(),
        "slow_pairs": float((wavelengths > params.far_distance).sum().item()),
    }
    tables = {
        "matrix": _matrix_table(matrix),
        "by_distance": _by_distance(params, *drawn, shown),
        "bounds": _bounds_table(shown, decay, plain, logits[shown].abs()),
        "wavelengths": {
            "pair": np.arange(params.d_k // 2),
            "wavelength": wavelengths.numpy(),
            "far_distance": np.full(params.d_k // 2, float(params.far_distance)),
        },
    }
    return Result(metrics, tables)


def _vectors(params: Params, kind: str, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of one kind, made of independent normal ones. Shapes: (n_pairs, d_k) each."""
    import torch

    if kind == "equal_qk":
        return q, q
    if kind == "all_ones":
        return torch.ones_like(q), torch.ones_like(k)
    if kind == "peak_at_distance":
        # a key that stands `peak_distance` before the query is turned that much less: give it that lead
        angles = exact_angles(torch.tensor(params.peak_distance), params.d_k, params.base)
        return q, turn(q, angles, _pairing(params, "k"))
    if kind == "one_pair":
        only = torch.zeros(params.d_k // 2, dtype=q.dtype)
        only[params.pair] = 1
        return tuple(x * _both(only, _pairing(params, name)) for x, name in ((q, "q"), (k, "k")))
    return q, k


def _both(by_pair: torch.Tensor, pairing: str) -> torch.Tensor:
    """A number for each pair given to both of its coordinates. Shapes: (d_k / 2,) to (d_k,)."""
    return by_pair.repeat(2) if pairing == "half_split" else by_pair.repeat_interleave(2)


def _pairing(params: Params, name: str) -> str:
    """How the coordinates of q or of k are paired; mixed pairing, a bug, pairs the two in different ways."""
    if params.pairing == "mixed_pairing":
        return "half_split" if name == "q" else "interleaved"
    return params.pairing


def _at(params: Params, x: torch.Tensor, positions: torch.Tensor, name: str) -> torch.Tensor:
    """q or k at every position. Shapes: x (..., d_k) against positions (n,); returns (n, d_k)."""
    import torch

    angles = exact_angles(positions, params.d_k, params.base)
    if params.encoding == "add_to_qk":
        return x + torch.cat((angles.sin(), angles.cos()), dim=-1)
    return turn(x, angles, _pairing(params, name))


def _relative_logits(params: Params, q: torch.Tensor, k: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """The complex form, from the distances alone. Shapes: q, k (d_k,), distances (n,); returns (n,)."""
    import torch

    h = complex_pairs(q, _pairing(params, "q")) * complex_pairs(k, _pairing(params, "k")).conj()
    angles = exact_angles(distances, params.d_k, params.base)
    return (h * torch.polar(torch.ones_like(angles), angles)).real.sum(dim=-1)


def _cosines(params: Params, q: torch.Tensor, k: torch.Tensor, distance: int) -> torch.Tensor:
    """Logits of all drawn pairs at one distance, over the lengths of q and k. Shapes: (n_pairs, d_k) to (n_pairs,)."""
    import torch

    at_query, at_key = torch.tensor([distance]), torch.tensor([0])
    logits = (_at(params, q, at_query, "q") * _at(params, k, at_key, "k")).sum(dim=-1)
    return logits / (q.norm(dim=-1) * k.norm(dim=-1))


def _by_diagonal(matrix: torch.Tensor, diagonal: torch.Tensor, reduce: str) -> torch.Tensor:
    """The largest or smallest number of each diagonal. Shapes: (seq_len, seq_len) twice; (2 seq_len - 1,)."""
    empty = matrix.new_zeros(2 * len(matrix) - 1)
    return empty.scatter_reduce(0, diagonal.flatten(), matrix.flatten(), reduce, include_self=False)


def _partial_sums(params: Params, distances: torch.Tensor) -> torch.Tensor:
    """The sum over j of |S_j| at each distance. Shapes: (n,) to (n,)."""
    import torch

    angles = exact_angles(distances, params.d_k, params.base)
    return torch.polar(torch.ones_like(angles), angles).cumsum(dim=-1).abs().sum(dim=-1)


def _matrix_table(matrix: torch.Tensor) -> Table:
    seq_len = len(matrix)
    names = np.arange(seq_len)
    return {
        "query_position": names.repeat(seq_len),
        "key_position": np.tile(names, seq_len),
        "logit": matrix.flatten().numpy().astype(np.float32),
    }


def _by_distance(params: Params, q: torch.Tensor, k: torch.Tensor, distances: torch.Tensor) -> Table:
    """Logit over the lengths of q and k at growing distances, for the first drawn pair made into each kind."""
    import torch

    peak = min(params.peak_distance, params.far_distance)
    around = torch.tensor([peak - 2, peak - 1, peak, peak + 1, peak + 2]).clamp(0, params.far_distance)
    distances = torch.cat((distances, around)).unique()
    columns: dict[str, list[np.ndarray]] = {"vectors": [], "token_distance": [], "cosine": []}
    for kind in SHOWN:
        one_q, one_k = (x[0] for x in _vectors(params, kind, q[:1], k[:1]))
        logits = _at(params, one_q, distances, "q") @ _at(params, one_k, distances[:1] * 0, "k")[0]
        columns["vectors"].append(np.full(len(distances), kind))
        columns["token_distance"].append(distances.numpy())
        columns["cosine"].append((logits / (one_q.norm() * one_k.norm())).numpy().astype(np.float32))
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def _bounds_table(distances: torch.Tensor, decay: torch.Tensor, plain: torch.Tensor, logits: torch.Tensor) -> Table:
    """Both bounds, and the |logit| that they bound; one below a thousandth of the plain bound is drawn there."""
    series = {
        "decay_bound": decay,
        "plain_bound": plain.expand_as(decay),
        "abs_logit": logits.maximum(plain / 1000),
    }
    return {
        "series": np.repeat(list(series), len(distances)),
        "token_distance": np.tile(distances.numpy(), len(series)),
        "logit_bound": np.concatenate([values.numpy() for values in series.values()]).astype(np.float32),
    }
