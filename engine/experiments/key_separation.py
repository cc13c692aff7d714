r"""How long q and k have to be so that a query gets the keys it wants, by the width of the head: and whether it can.

There are ``kv_len`` keys; each query wants ``n_wanted`` of them, in equal parts, and nothing of the others. All keys
have one length and all queries have one, so that with coordinates of root mean square s the logits are

.. math:: \frac{q\cdot k}{\sqrt{d_k}}=s^2\sqrt{d_k}\,\cos(q,k)

Width decides how far apart the cosines of wanted and unwanted keys can be, and length (s) makes up for what is missing.

*Random* keys point in independent directions. A query is the shortest vector with the same product with each of its
keys; for a single one, that key's own direction.

*On a curve* the j-th key stands at the angle :math:`t_j=2\pi j/n`: its coordinates are :math:`\cos ft_j,\ \sin ft_j`
for f = 1, 2, ... up to d_k / 2. In two dimensions this is a circle. The query for a set M of m keys is the one with

.. math:: q\cdot k_j=c-\prod_{a\in M}\big(1-\cos(t_j-t_a)\big)

which is largest on M and nowhere else. The product is a sum of cosines and sines of up to m times the angle, so this
needs d_k of at least 2m. (In a wide head the shortest vector may do better; of the two the one with the larger gap is
taken. In a head that is too narrow it is all there is.) No placement does with less for all sets of up to m keys: by
Radon's theorem any d_k + 2 keys fall into two sets whose hulls have a point in common. The product of q with that point
is a weighted mean of its products with either set, so the smaller set, at most d_k/2 + 1 keys, can't come before all
others.

Everything is computed in float64 on the CPU, apart from the rounding of q and k to ``qk_dtype`` for
``top_share_rounded``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import softmax, unit_norm
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=2, high=256, log2=True)
    kv_len: int = number(64, low=16, high=4096, log2=True)
    keys: str = choice("random", "curve")
    n_wanted: int = number(1, low=1, high=4)
    coordinate_size: float = number(1.0, low=0.25, high=64, step=0.25)
    weight_to_reach: float = number(0.9, low=0.5, high=0.99, step=0.01)
    qk_dtype: str = choice("bfloat16", "float16", "float32")

    def rules(self) -> Iterator[Problem]:
        if self.keys == "curve" and self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="curve_has_pairs")


METRICS = (
    Metric("coordinate_needed_median"),
    Metric("coordinate_needed_max"),
    Metric("wanted_weight_mean"),
    Metric("top_share"),
    Metric("top_share_rounded"),
    Metric("logit_needed_median"),
    Metric("logit_needed_max"),
    Metric("worst_cosine_gap"),
)
PLOTS = (
    Plot(
        "needed",
        table="needed",
        x="d_k",
        y="coordinate_needed_median",
        by="keys",
        theory="usual_size",
        one_law=True,
        x_scale="log2",
        y_scale="log2",
    ),
    Plot("row", table="row", x="key_offset", y="logits"),
)
BUDGET_S = 0.1

N_QUERIES = 64
MOST = 2.0**24  # logits above are not tried: a query that never gets there counts as this
LEAST = 2.0**-4  # a logit at which the weights of 16 keys are still nearly equal
BISECTIONS = 21  # of the 28 powers of two between the two: to 1e-5 of a logit
TIE = 1e-13  # a smaller gap between cosines is rounding
TABLE_WIDTHS = (2, 4, 8, 16, 32, 64, 128)
TABLE_QUERIES = 5  # behind each point of the table
SHOWN = 32  # keys on either side of the first wanted one


def memory_bytes(params: Params) -> int:
    """Keys with their copies, and some rows of logits for all queries, in float64."""
    keys = params.kv_len * TABLE_WIDTHS[-1]
    rows = max(N_QUERIES, 2 * len(TABLE_WIDTHS) * TABLE_QUERIES) * params.kv_len
    return 8 * (6 * keys + (6 + 3 * params.n_wanted) * rows + 8 * N_QUERIES * TABLE_WIDTHS[-1])


def run(params: Params, run: Run) -> Result:
    """Place the keys, find 64 queries, and measure how long both have to be; the table does so for other widths.

    ``coordinate_needed``: root mean square of the coordinates at which a query gives its keys ``weight_to_reach``
    together, and ``logit_needed`` the largest logit that goes with it, :math:`|q||k|/\\sqrt{d_k}`.
    ``wanted_weight_mean``: the weight they get at ``coordinate_size``. ``top_share``: queries whose keys all have
    larger products than all other keys, whatever the length; ``top_share_rounded``: those for which this holds after q
    and k are rounded. ``worst_cosine_gap``: by how much the cosine of the weakest wanted key is above that of the
    strongest other one, in the worst query.

    Shapes: k (kv_len, d_k), wanted (query, n_wanted), q (query, d_k), cosines (query, kv_len).
    """
    import torch

    wanted = _draw_wanted(run, N_QUERIES, params.kv_len, params.n_wanted)
    k = _place(run, params.keys, params.d_k, params.kv_len)
    q = _queries(params.keys, k, wanted)
    run.progress(0.1)
    cosines = q @ k.mT
    gap = _gap(cosines, wanted)
    dtype = getattr(torch, params.qk_dtype)
    rounded = _gap(q.to(dtype).to(q.dtype) @ k.to(dtype).to(k.dtype).mT, wanted)
    needed = _logit_needed(params, run, cosines, wanted)
    run.progress(0.3)
    logits = params.coordinate_size**2 * math.sqrt(params.d_k) * cosines
    metrics = {
        "coordinate_needed_median": math.sqrt(needed.median().item() / math.sqrt(params.d_k)),
        "coordinate_needed_max": math.sqrt(needed.max().item() / math.sqrt(params.d_k)),
        "wanted_weight_mean": softmax(logits).gather(-1, wanted).sum(dim=-1).mean().item(),
        "top_share": (gap > TIE).sum().item() / N_QUERIES,
        "top_share_rounded": (rounded > TIE).sum().item() / N_QUERIES,
        "logit_needed_median": needed.median().item(),
        "logit_needed_max": needed.max().item(),
        "worst_cosine_gap": gap.min().item(),
    }
    row = _row_table(params, logits[0], wanted[0])
    return Result(metrics, {"needed": _needed_table(params, run), "row": row})


def _draw_wanted(run: Run, n_queries: int, kv_len: int, n_wanted: int) -> torch.Tensor:
    """Different keys for each query. Shapes: returns (query, n_wanted), whole numbers."""
    return run.rand(n_queries, kv_len).cpu().argsort(dim=-1)[:, :n_wanted]


def _place(run: Run, keys: str, d_k: int, kv_len: int) -> torch.Tensor:
    """Keys of length 1. Shapes: returns (kv_len, d_k)."""
    import torch

    if keys == "random":
        return unit_norm(run.randn(kv_len, d_k).cpu().double())
    angles = 2 * math.pi * torch.arange(kv_len, dtype=torch.float64)[:, None] / kv_len
    angles = angles * torch.arange(1, d_k // 2 + 1)
    return unit_norm(torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(-2))


def _queries(keys: str, k: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Queries of length 1, or 0 where none has equal products with its keys: on the curve the better of two ways.

    Shapes: k (kv_len, d_k), wanted (query, n_wanted); returns (query, d_k).
    """
    import torch
    from torch.nn.functional import normalize

    (kv_len, d_k), n_wanted = k.shape, wanted.shape[-1]
    own = k[wanted]  # (query, n_wanted, d_k)
    shortest = normalize((torch.linalg.pinv(own @ own.mT, hermitian=True) @ own).sum(dim=1), dim=-1)
    if keys == "random" or d_k < 2 * n_wanted:
        return shortest
    turns = (torch.arange(kv_len, dtype=k.dtype) - wanted[..., None]) / kv_len  # (query, n_wanted, kv_len)
    product = (1 - (2 * math.pi * turns).cos()).prod(dim=1)
    # the first 2m coordinates of k are the sines and cosines that the product consists of: these are its coefficients
    factors = torch.zeros_like(shortest)
    factors[:, : 2 * n_wanted] = -normalize(product @ k[:, : 2 * n_wanted], dim=-1)
    better = _gap(factors @ k.mT, wanted) > _gap(shortest @ k.mT, wanted)
    return factors.where(better[:, None], shortest)


def _gap(cosines: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The least cosine of a wanted key minus the largest of the others. Shapes: (query, kv_len) to (query,)."""
    others = cosines.scatter(-1, wanted, -math.inf)
    return cosines.gather(-1, wanted).amin(dim=-1) - others.amax(dim=-1)


def _logit_needed(params: Params, run: Run, cosines: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The smallest factor of the cosines that gives the wanted keys their weight. Shapes: returns (query,)."""
    low = cosines.new_full((len(cosines), 1), math.log2(LEAST))
    high = cosines.new_full((len(cosines), 1), math.log2(MOST))
    for _ in range(BISECTIONS):
        run.check_stop()
        middle = (low + high) / 2
        reached = softmax(2**middle * cosines).gather(-1, wanted).sum(dim=-1, keepdim=True) >= params.weight_to_reach
        low, high = low.where(reached, middle), high.where(~reached, middle)
    return (2**high).flatten()


def _needed_table(params: Params, run: Run) -> Table:
    """The median over some queries for both kinds of keys at several widths; where it is out of reach there is no row.

    Its keys and queries are drawn apart from those of the metrics.
    """
    import torch

    wanted = _draw_wanted(run, TABLE_QUERIES, params.kv_len, params.n_wanted)
    points, cosines = [], []
    for done, d_k in enumerate(TABLE_WIDTHS):
        run.progress(0.4 + 0.05 * done)
        for keys in ("random", "curve"):
            k = _place(run, keys, d_k, params.kv_len)
            points.append((keys, d_k))
            cosines.append(_queries(keys, k, wanted) @ k.mT)
    needed = _logit_needed(params, run, torch.cat(cosines), wanted.repeat(len(points), 1))
    sizes = [math.sqrt(x / math.sqrt(d_k)) for (_, d_k), x in zip(points, _medians(needed, len(points)), strict=True)]
    drawn = [(*point, size) for point, size in zip(points, sizes, strict=True) if size**2 * point[1] ** 0.5 < MOST / 2]
    return {
        "keys": np.array([keys for keys, _, _ in drawn]),
        "d_k": np.array([d_k for _, d_k, _ in drawn]),
        "coordinate_needed_median": np.array([size for _, _, size in drawn]),
        "usual_size": np.ones(len(drawn)),
    }


def _medians(needed: torch.Tensor, n: int) -> list[float]:
    found: list[float] = needed.view(n, -1).median(dim=-1).values.tolist()
    return found


def _row_table(params: Params, logits: torch.Tensor, wanted: torch.Tensor) -> Table:
    """The logits of one query around its first key, the largest of the row being 0. Shapes: (kv_len,), (n_wanted,)."""
    import torch

    offsets = torch.arange(-min(SHOWN, params.kv_len // 2), min(SHOWN, params.kv_len // 2))
    shown = logits[(wanted[0] + offsets) % params.kv_len] - logits.max()
    return {"key_offset": offsets.numpy(), "logits": shown.numpy()}
