r"""How much weight the best head can put on the tokens it wants, with tied, merely symmetric, and separate projections.

Every token wants one other token:

``cycle``  the next one, and the last one wants the first: who is wanted does not want back
``chain``  the previous one; the first token wants nobody and is not counted
``pairs``  its partner, and is wanted by it

The vectors of the tokens are free, as if each had a code of its own, and are searched by gradient for the largest mean
of ln(weight on the wanted token). ``tied``: k_i = q_i; ``symmetric``: k_i = q_i with the second half of the coordinates
negated; ``separate``: both free. No vector is longer than :math:`\sqrt{logit\_limit}`, so no logit is larger than
``logit_limit``; with ``equal_lengths`` all are as long as that. What is found is a lower bound of what can be had.

An upper bound, for symmetric logits without a causal mask. Around a cycle the product of the weights is that of the
weights against it: :math:`\prod_i e^{s_{i,i+1}}/Z_i=\prod_i e^{s_{i+1,i}}/Z_{i+1}`. Two weights of a row are at most
1 together, so both products are at most :math:`2^{-n}`, and the geometric mean of the wanted weights is at most 1/2.
Where tokens see themselves and the logits are tied, :math:`s_{ij}\le(s_{ii}+s_{jj})/2` makes the product on the
diagonal at least as large as that of the cycle: three in a row, at most 1/3. In pairs nothing goes against a lookup
but the diagonal: 1/2, for tied ones that see themselves.

In a chain of tied tokens that see themselves the same inequality telescopes, causal mask or not:
:math:`\sum_{i\ge2}(s_{i,i-1}-s_{ii})\le(s_{11}-s_{nn})/2`, at most half the limit, and 0 for equal lengths. With G for
geometric means over these rows, G(wanted) ≤ r G(self), where r = exp(logit_limit / 2(n - 1)) or 1; and
G(wanted) + G(self) ≤ 1. So G(wanted) ≤ r / (1 + r): the limit has to grow at least in proportion to the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import mask_logits, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.masks import keep_causal

if TYPE_CHECKING:
    import torch

PROJECTIONS = ("tied", "separate", "symmetric")


@dataclass(frozen=True)
class Params(BaseParams):
    projections: str = choice(*PROJECTIONS)
    wanted: str = choice("cycle", "chain", "pairs")
    mask: str = choice("no_mask", "no_self", "causal", "strict")
    equal_lengths: bool = flag(False)
    seq_len: int = number(8, low=4, high=32, step=2)
    d_k: int = number(8, low=2, high=64, log2=True)
    logit_limit: float = number(16.0, low=1, high=1024, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.mask in ("causal", "strict") and self.wanted != "chain":
            yield Problem("rule", "mask", self.mask, rule="wanted_is_hidden", values={"wanted": self.wanted})
        if self.seq_len % 2 and self.wanted == "pairs":
            yield Problem("rule", "seq_len", self.seq_len, rule="pairs_need_even_length")


METRICS = (
    Metric("wanted_weight"),
    Metric("reverse_weight"),
    Metric("self_weight_mean"),
    Metric("wanted_weight_min"),
    Metric("wanted_weight_bound"),
)
PLOTS = (
    Plot("found", table="map", mark="heat", x="key_position", y="query_position", value="attention_weight"),
    Plot(
        "by_limit",
        table="by_limit",
        x="logit_limit",
        y="wanted_weight",
        by="projections",
        theory="wanted_weight_bound",
        x_scale="log2",
    ),
)
BUDGET_S = 0.05

LIMITS = (2.0, 16.0, 64.0, 256.0)  # of the curve, beside the chosen one
N_STARTS = 2  # random ones, of which the best is kept
STEPS, STEP_SIZE = 50, 0.15  # of Adam, the latter in parts of the longest vector, falling to 0
EPSILON = 1e-9


class _Task(NamedTuple):
    """Shapes: wanted (seq_len,), the key each query wants; counted (seq_len,), 1 for those that want one; keep and
    targets (seq_len, seq_len), the latter one-hot rows, 0 where nobody is wanted."""

    wanted: torch.Tensor
    counted: torch.Tensor
    keep: torch.Tensor
    targets: torch.Tensor


def memory_bytes(params: Params) -> int:
    """Vectors with gradients and moments, and the logits and weights, of every limit, kind and start; float64."""
    searches = len(PROJECTIONS) * (len(LIMITS) + 1) * N_STARTS
    vectors = 2 * searches * params.seq_len * params.d_k
    return 8 * (12 * vectors + 8 * searches * params.seq_len**2) + 2**18


def run(params: Params, run: Run) -> Result:
    """Search all kinds at several limits at once, from the same starts; measure the chosen one.

    ``wanted_weight``: geometric mean of the weights on the wanted tokens, of the best start; ``reverse_weight``: the
    same of the weights on the token that wants this one (in a chain: on the next one). ``wanted_weight_min``: the worst
    row. Float64 on the CPU, whatever the run's dtype.
    """
    task = _task(params)
    limits = sorted({params.logit_limit, *LIMITS})
    logits = _search(params, run, task, limits)  # (kind, limit, start, seq_len, seq_len)
    run.progress(0.95)
    weights = softmax(mask_logits(logits, task.keep))
    on_wanted = _geometric_mean(_taken(weights, task.wanted), task.counted)  # (kind, limit, start)
    best = on_wanted.amax(dim=-1)
    kind, at = PROJECTIONS.index(params.projections), limits.index(params.logit_limit)
    if params.equal_lengths:
        found = weights[kind, at, on_wanted[kind, at].argmax()]
    else:  # shorter vectors are allowed as well: what a search within a smaller limit has found counts
        best = best.cummax(dim=-1).values
        found = weights[kind, : at + 1].flatten(0, 1)[on_wanted[kind, : at + 1].argmax()]
    metrics = {
        "wanted_weight": best[kind, at].item(),
        "reverse_weight": _reverse_weight(found, task),
        "self_weight_mean": found.diagonal().mean().item(),
        "wanted_weight_min": _taken(found, task.wanted)[task.counted > 0].min().item(),
        "wanted_weight_bound": _bound(params, params.projections, params.logit_limit),
    }
    queries, keys = np.indices(found.shape)
    tables: dict[str, Table] = {
        "map": {
            "query_position": queries.ravel(),
            "key_position": keys.ravel(),
            "attention_weight": found.numpy().ravel().astype(np.float32),
        },
        "by_limit": {
            "logit_limit": np.tile(limits, len(PROJECTIONS)),
            "projections": np.repeat(PROJECTIONS, len(limits)),
            "wanted_weight": np.array(best.flatten().numpy()),
            "wanted_weight_bound": np.array([_bound(params, name, limit) for name in PROJECTIONS for limit in limits]),
        },
    }
    return Result(metrics, tables)


def _task(params: Params) -> _Task:
    import torch
    from torch.nn.functional import one_hot

    n = params.seq_len
    at = torch.arange(n)
    wanted = {"cycle": (at + 1) % n, "chain": (at - 1).clamp_min(0), "pairs": at ^ 1}[params.wanted]
    keep = keep_causal(n) if params.mask in ("causal", "strict") else torch.ones(n, n, dtype=torch.bool)
    if params.mask in ("no_self", "strict"):
        keep = keep & ~torch.eye(n, dtype=torch.bool)
    counted = (wanted != at).cpu().double()
    if params.mask == "strict":
        keep[0, 0] = True  # the first token has nothing else
    return _Task(wanted, counted, keep, one_hot(wanted, n) * counted[:, None])


def _bound(params: Params, projections: str, logit_limit: float) -> float:
    """No such head puts more on the wanted tokens, in the geometric mean."""
    if projections == "separate":
        return 1.0
    sees_itself = params.mask in ("no_mask", "causal")
    diagonal_counts = sees_itself and projections == "tied"
    if params.wanted == "cycle":
        return 1 / 3 if diagonal_counts else 1 / 2
    if params.wanted == "pairs":
        return 1 / 2 if diagonal_counts else 1.0
    if not diagonal_counts:
        return 1.0
    gain = 0.0 if params.equal_lengths else logit_limit / (2 * (params.seq_len - 1))
    return 1 / (1 + math.exp(-gain))


def _search(params: Params, run: Run, task: _Task, limits: list[float]) -> torch.Tensor:
    """The logits that the search ends with. Shapes: (kind, limit, start, seq_len, seq_len)."""
    import torch

    shape = (2, 1, 1, N_STARTS, params.seq_len, params.d_k)
    vectors = run.randn(*shape).cpu().double().repeat(1, len(PROJECTIONS), len(limits), 1, 1, 1)
    longest = torch.tensor(limits, dtype=torch.float64).sqrt().view(-1, 1, 1, 1)
    signs = torch.ones(len(PROJECTIONS), 1, 1, 1, params.d_k, dtype=torch.float64)
    signs[PROJECTIONS.index("symmetric"), ..., params.d_k // 2 :] = -1
    shared = torch.tensor([name != "separate" for name in PROJECTIONS]).view(-1, 1, 1, 1, 1)
    vectors[1] = torch.where(shared, vectors[0] * signs, vectors[1])
    follow = signs * shared
    vectors = vectors / vectors.norm(dim=-1, keepdim=True) * longest * (1.0 if params.equal_lengths else 0.5)

    first, second = torch.zeros_like(vectors), torch.zeros_like(vectors)
    for step in range(1, STEPS + 1):
        run.progress(0.95 * (step - 1) / STEPS)
        q, k = vectors
        by_logits = _gradient(qk_product(q, k), task)
        gradient = torch.stack((by_logits @ k, by_logits.mT @ q))
        gradient = gradient + gradient.flip(0) * follow  # where k follows q each has the other's part, too
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.1)
        size = STEP_SIZE * (1 - (step - 1) / STEPS) / math.sqrt(1 - 0.9**step)  # both averages start at 0
        vectors = vectors + first / (second.sqrt() + EPSILON) * (size * longest)
        shrink = longest / (vectors.square().sum(dim=-1, keepdim=True).sqrt() + EPSILON)
        vectors = vectors * (shrink if params.equal_lengths else shrink.clamp_max(1.0))
    return qk_product(vectors[0], vectors[1])


def _gradient(logits: torch.Tensor, task: _Task) -> torch.Tensor:
    """Of the sum of ln(weight on the wanted token) with respect to the logits: one-hot minus weights, row by row."""
    return task.targets - softmax(mask_logits(logits, task.keep)) * task.counted[:, None]


def _taken(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The weight of each row on its key. Shapes: weights (..., seq_len, seq_len), keys (seq_len,); (..., seq_len)."""
    return weights.gather(-1, keys[:, None].expand(*weights.shape[:-1], 1))[..., 0]


def _geometric_mean(taken: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Over the rows that count. Shapes: (..., seq_len) to (...,)."""
    import torch

    return ((taken.clamp_min(torch.finfo(taken.dtype).tiny).log() * counted).sum(dim=-1) / counted.sum()).exp()


def _reverse_weight(weights: torch.Tensor, task: _Task) -> float:
    """Geometric mean of what the wanted tokens put on those that want them. Shapes: weights (seq_len, seq_len)."""
    rows = task.counted > 0
    back = weights[task.wanted[rows], rows.nonzero()[:, 0]]
    return float(_geometric_mean(back, back.new_ones(len(back))))
