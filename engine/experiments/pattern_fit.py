r"""How near a head of width d_k can come to given weights: q and k are fitted to them directly, for several widths.

The pattern P has a row of weights for each of ``kv_len`` queries. A head makes weights by a softmax of
:math:`QK^\top/\sqrt{d_k}`, so its logits have rank at most d_k. A softmax forgets a constant in each row, so a P
without zeros is within reach exactly if :math:`\log P`, each row less its own mean, has rank at most d_k; that rank is
at most kv_len - 1, whatever P. A P with zeros is never reached, but a head may come as near as one likes, with longer
and longer q and k, if it can put the wanted keys of each row on top with equal logits (``key_separation``).

* *soft*: softmax of independent normal logits. Every entry counts, and log P has full rank.
* *one_key*: each query wants one key, and each key is wanted once (a permutation).
* *pairs*: each query wants two random keys in equal parts.
* *blocks*: the sequence is cut into four parts, and each query wants all keys of its own part in equal parts.

The fit is gradient descent (Adam) on the mean KL divergence :math:`\sum_j P_{ij}\ln(P_{ij}/W_{ij})` from random q and k
with coordinates of variance 1. It finds a head, not the best one: what it reaches, a head of that width can do.

Beside it stands what a matrix of rank d_k can do when it is to equal P itself, without a softmax:
``svd_missed_share`` is the share of the squared entries of P outside its d_k largest singular values, which is the
least for any matrix of that rank (Eckart and Young).

Source: bhojanapalli2020, theorem 1 (any positive pattern, for a width of kv_len).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.training import Adam

if TYPE_CHECKING:
    import torch

TRAINS = True


@dataclass(frozen=True)
class Params(BaseParams):
    target_pattern: str = choice("one_key", "two_keys", "blocks", "soft")
    d_k: int = number(4, low=1, high=64, log2=True)
    kv_len: int = number(32, low=8, high=64, step=4)
    target_logits_std: float = number(1.0, low=0.25, high=4, step=0.25)
    learning_rate: float = number(0.05, low=0.001, high=1)
    steps: int = number(300, low=10, high=3000, step=10)

    def rules(self) -> Iterator[Problem]:
        if self.d_k > self.kv_len:
            yield Problem("rule", "d_k", self.d_k, rule="width_within_keys", values={"kv_len": self.kv_len})

    def unread(self) -> frozenset[str]:
        return frozenset() if self.target_pattern == "soft" else frozenset({"target_logits_std"})


METRICS = (
    Metric("kl_share"),
    Metric("kl_nats", "nats"),
    Metric("overlap_mean"),
    Metric("top_key_share"),
    Metric("svd_missed_share"),
    Metric("logits_abs_max"),
    Metric("coordinate_size_mean"),
)
PLOTS = (
    Plot("by_width", table="by_width", x="d_k", y="missed_share", by="approximation", x_scale="log2"),
    Plot("curves", table="curves", x="step", y="kl_share", by="d_k", y_scale="log10"),
)
BUDGET_S = 1.0

N_BLOCKS = 4
N_RECORDS = 25  # points of a curve after the one at step 0
DRAWN_FLOOR = 1e-9  # smaller shares are drawn here: a logarithmic axis has no 0


def memory_bytes(params: Params) -> int:
    """q and k of all widths with gradients and moments, and the logits forward and back."""
    widths = len(_widths(params))
    vectors = 2 * widths * params.kv_len * max(_widths(params))
    return 4 * (9 * vectors + 12 * widths * params.kv_len**2) + 8 * 8 * params.kv_len**2


def run(params: Params, run: Run) -> Result:
    """Fit heads of all widths side by side, each by itself, and measure the one of width d_k.

    ``kl_share``: the KL divergence that is left, over that of equal weights. ``overlap_mean``: what the head's weights
    have in common with the pattern, the sum of the smaller of both for each key; for ``one_key`` that is the weight of
    the key. ``top_key_share``: queries whose largest weight is on a key that is largest in the pattern as well.
    ``coordinate_size_mean``: root mean square of the coordinates of q and k at the end; 1 at the start.

    Shapes: P (kv_len, kv_len), q, k (width, kv_len, d_max), logits (width, kv_len, kv_len).
    """
    import torch

    pattern, widths = _pattern(params, run), _widths(params)
    dtype = torch.float64 if run.dtype == torch.float64 else torch.float32  # lower ones would round the updates away
    read = torch.arange(max(widths)) < torch.tensor(widths)[:, None, None]  # the coordinates that a width has
    read = read.to(run.device, dtype)
    q, k = (
        (read * run.randn(params.kv_len, max(widths)).to(dtype)).requires_grad_() for _ in range(2)
    )  # coordinates that start at 0 in both stay there: their gradients are products with 0
    scale = torch.tensor([1 / math.sqrt(width) for width in widths], device=run.device, dtype=dtype)[:, None, None]
    target = pattern.to(run.device, dtype)
    negative_entropy = torch.special.xlogy(target, target).sum()
    equal_weights_kl = negative_entropy.item() / params.kv_len + math.log(params.kv_len)

    optimizer = Adam([q, k], params.learning_rate)
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    records: dict[int, np.ndarray] = {}
    latest: Result | None = None
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1), latest)
        logits = qk_product(q, k) * scale
        kl = (negative_entropy - (target * logits.log_softmax(dim=-1)).sum(dim=(1, 2))) / params.kv_len
        if step in due:
            records[step] = kl.detach().cpu().double().numpy() / equal_weights_kl
            measured = [x.detach().cpu().double() for x in (q, k, logits)]
            latest = _result(params, pattern, records, equal_weights_kl, *measured)
        if step < params.steps:
            q.grad = k.grad = None
            kl.sum().backward()
            optimizer.step()
    assert latest is not None
    return latest


def _widths(params: Params) -> list[int]:
    """Widths that are fitted: powers of two, the largest one that is ever needed, and the chosen one."""
    powers = {2**n for n in range(7) if 2**n < params.kv_len}
    return sorted(powers | {params.kv_len - 1, params.d_k})


def _pattern(params: Params, run: Run) -> torch.Tensor:
    """The weights to come near to, in float64 on the CPU. Shapes: (kv_len, kv_len)."""
    import torch

    n = params.kv_len
    drawn = run.randn(n, n).cpu().double()
    if params.target_pattern == "soft":
        return softmax(params.target_logits_std * drawn)
    if params.target_pattern == "one_key":
        return torch.eye(n, dtype=drawn.dtype)[drawn[0].argsort()]
    if params.target_pattern == "two_keys":
        return torch.zeros_like(drawn).scatter(-1, drawn.argsort(dim=-1)[:, :2], 0.5)
    block = torch.arange(n) * N_BLOCKS // n
    same = (block[:, None] == block).to(drawn.dtype)
    return same / same.sum(dim=-1, keepdim=True)


def _result(
    params: Params,
    pattern: torch.Tensor,
    records: dict[int, np.ndarray],
    equal_weights_kl: float,
    q: torch.Tensor,
    k: torch.Tensor,
    logits: torch.Tensor,
) -> Result:
    import torch

    widths, (steps, shares) = _widths(params), (list(records), np.array(list(records.values())))
    chosen = widths.index(params.d_k)
    weights = softmax(logits[chosen])
    largest = pattern.gather(-1, weights.argmax(dim=-1, keepdim=True))[:, 0]
    squares = torch.linalg.svdvals(pattern).square()
    missed = [(squares[width:].sum() / squares.sum()).item() for width in widths]
    coordinates = torch.cat((q[chosen], k[chosen]))[:, : params.d_k]
    metrics = {
        "kl_share": float(shares[-1, chosen]),
        "kl_nats": float(shares[-1, chosen] * equal_weights_kl),
        "overlap_mean": weights.minimum(pattern).sum(dim=-1).mean().item(),
        "top_key_share": (largest == pattern.amax(dim=-1)).sum().item() / params.kv_len,
        "svd_missed_share": missed[chosen],
        "logits_abs_max": logits[chosen].abs().max().item(),
        "coordinate_size_mean": coordinates.square().mean().sqrt().item(),
    }
    by_width = {
        "approximation": np.repeat(["fitted_head", "low_rank_weights"], len(widths)),
        "d_k": np.tile(widths, 2),
        "missed_share": np.concatenate((shares[-1], missed)),
    }
    curves = {
        "d_k": np.repeat(widths, len(steps)),
        "step": np.tile(steps, len(widths)),
        "kl_share": np.maximum(shares.T.flatten(), DRAWN_FLOOR),
    }
    return Result(metrics, {"by_width": by_width, "curves": curves}, steps[-1] / params.steps)
