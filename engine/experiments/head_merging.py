r"""What a layer of MHA loses when its heads are merged into fewer KV heads, before anything is trained again.

The layer is drawn: heads of a family have W_k and W_v in common but for their own share, :math:`W_h = \sqrt{a}\,F +
\sqrt{1-a}\,O_h` with likeness :math:`a`; queries and outputs are each head's own. A group then gets one k and one v:
the ``mean`` of its heads, its ``first`` head, or ``random`` ones. The error is that of the layer's output under a
causal mask, without positions.

``turned``   every head's basis is turned, W_q and W_k by one orthogonal matrix and W_v and W_o by another. q·k and the
             output stay what they were, and the mean of the matrices does not: a basis is nobody's choice
``aligned``  each head is turned back onto the first of its group before they are pooled (orthogonal Procrustes)

RoPE would allow only turns within its planes, the same for W_q and W_k; W_v and W_o may be turned in any case.

Sources: ainslie2023, sections 2.1 and 3.3 (pooling); jin2024, abstract (heads aligned before they are merged).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.grouped_heads import LAYOUTS, kv_head_of
from engine.masks import keep_causal

if TYPE_CHECKING:
    import torch

POOLINGS = ("mean", "first", "random")


@dataclass(frozen=True)
class Params(BaseParams):
    n_heads: int = number(8, low=2, high=16, log2=True)
    n_kv_heads: int = number(2, low=1, high=16, log2=True)
    n_families: int = number(2, low=1, high=16, log2=True)
    likeness: float = number(0.75, low=0.0, high=1.0, step=0.05)
    family_layout: str = choice(*LAYOUTS)
    grouping: str = choice("adjacent", "strided", "most_alike")
    pooling: str = choice("pooled_mean", "pooled_first", "pooled_random")
    turned: bool = flag(False)
    aligned: bool = flag(False)
    d_k: int = number(16, low=4, high=32, log2=True)
    seq_len: int = number(48, low=2, high=96)

    def rules(self) -> Iterator[Problem]:
        values = {"n_heads": self.n_heads}
        if self.n_heads % self.n_kv_heads:
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.n_heads % self.n_families:
            yield Problem("rule", "n_families", self.n_families, rule="families_divide_heads", values=values)

    def unread(self) -> frozenset[str]:
        return frozenset({"family_layout"} if self.n_families in (1, self.n_heads) else ())


METRICS = (
    Metric("merged_output_error"),
    Metric("merged_logits_error"),
    Metric("merged_weights_error"),
    Metric("turning_error"),
    Metric("grouped_with_family_share"),
)
PLOTS = (
    Plot("by_kv_heads", table="by_kv_heads", x="n_kv_heads", y="output_error", by="pooling", x_scale="log2"),
    Plot("likeness", table="pairs", x="head_number", y="other_head", value="head_likeness", mark="heat"),
)
BUDGET_S = 0.1

LOGITS_GAIN = 2.0  # on W_q: rows of weights that are neither even nor one-hot


def memory_bytes(params: Params) -> int:
    """Matrices with their turned, pooled and repeated forms, and the logits of a few layers, in float64."""
    d_model = params.n_heads * params.d_k
    return 8 * (40 * d_model**2 + 12 * params.n_heads * params.seq_len * (params.seq_len + params.d_k)) + 2**18


class _Layer(NamedTuple):
    """Shapes: W_q, W_k, W_v (n_heads, d_k, d_model), W_o (n_heads, d_k, d_model), its transpose."""

    W_q: torch.Tensor
    W_k: torch.Tensor
    W_v: torch.Tensor
    W_o: torch.Tensor


def run(params: Params, run: Run) -> Result:
    """Errors relative to the layer before it was merged; for every number of KV heads and way of pooling in the table.

    ``grouped_with_family_share``: pairs of heads in one group that are of one family. All on the CPU in float64.

    Shapes: x (seq_len, d_model).
    """
    import torch

    d_model = params.n_heads * params.d_k
    x = run.randn(params.seq_len, d_model).cpu().double()
    family = kv_head_of(params.n_heads, params.n_families, params.family_layout)
    drawn = _draw(params, run, family)
    spare = tuple(run.randn(params.n_heads, params.d_k, d_model).cpu().double() / math.sqrt(d_model) for _ in range(2))
    turns = [_orthogonal(run, params.n_heads, params.d_k) for _ in range(2)]
    logits, out = _forward(drawn, x)
    layer = _turn(drawn, *turns) if params.turned else drawn
    turned_out = _forward(_turn(drawn, *turns), x)[1]
    run.progress(0.3)
    alike = _likeness(layer, params.aligned)

    rows: list[tuple[int, str, float]] = []
    chosen: dict[str, float] = {}
    counts = [n for n in range(1, params.n_heads + 1) if params.n_heads % n == 0]
    for done, n_kv_heads in enumerate(counts):
        run.progress(0.3 + 0.7 * done / len(counts))
        groups = _groups(params.n_heads, n_kv_heads, params.grouping, alike)
        ready = _align(layer, groups) if params.aligned else layer
        for pooling in POOLINGS:
            merged = _merge(ready, groups, pooling, spare)
            got_logits, got = _forward(merged, x)
            error = _relative(got, out)
            rows.append((n_kv_heads, f"pooled_{pooling}", error))
            if n_kv_heads == params.n_kv_heads and params.pooling == f"pooled_{pooling}":
                past = keep_causal(params.seq_len)
                chosen = {
                    "merged_output_error": error,
                    "merged_logits_error": _relative(got_logits[:, past], logits[:, past]),
                    "merged_weights_error": _relative(
                        torch.cat((merged.W_k, merged.W_v)), torch.cat((ready.W_k, ready.W_v))
                    ),
                    "grouped_with_family_share": _with_family(groups, family),
                }
    metrics = chosen | {"turning_error": _relative(turned_out, out)}
    n_kv, poolings, errors = zip(*rows, strict=True)
    n = params.n_heads
    tables: dict[str, Table] = {
        "by_kv_heads": {
            "n_kv_heads": np.array(n_kv),
            "pooling": np.array(poolings),
            "output_error": np.array(errors),
        },
        "pairs": {
            "head_number": np.repeat(np.arange(n), n),
            "other_head": np.tile(np.arange(n), n),
            "head_likeness": np.asarray(alike.flatten()),
        },
    }
    return Result({m.name: float(metrics[m.name]) for m in METRICS}, tables)


def _draw(params: Params, run: Run, family: list[int]) -> _Layer:
    d_model = params.n_heads * params.d_k

    def normal(n: int) -> torch.Tensor:
        return run.randn(n, params.d_k, d_model).cpu().double() / math.sqrt(d_model)

    common, own = math.sqrt(params.likeness), math.sqrt(1 - params.likeness)
    W_k, W_v = (common * normal(params.n_families)[family] + own * normal(params.n_heads) for _ in range(2))
    return _Layer(LOGITS_GAIN * normal(params.n_heads), W_k, W_v, normal(params.n_heads))


def _forward(layer: _Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n_heads, seq_len, seq_len), not masked, and the output (seq_len, d_model)."""
    q, k, v = (x @ W.mT for W in layer[:3])
    logits = attention_logits(q, k)
    mixed = context(softmax(mask_logits(logits, keep_causal(len(x)))), v)
    return logits, (mixed @ layer.W_o).sum(dim=0)


def _turn(layer: _Layer, qk: torch.Tensor, vo: torch.Tensor) -> _Layer:
    """Every head in another basis. Shapes: qk, vo (n_heads, d_k, d_k), orthogonal."""
    return _Layer(qk @ layer.W_q, qk @ layer.W_k, vo @ layer.W_v, vo @ layer.W_o)


def _orthogonal(run: Run, n: int, width: int) -> torch.Tensor:
    from torch.linalg import qr

    q, r = qr(run.randn(n, width, width).cpu().double())
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]


# --------------------------------------------------------------------------------------------------------------------
# Grouping and merging


def _likeness(layer: _Layer, aligned: bool) -> torch.Tensor:
    """Cosine of the k and v matrices of each pair of heads; ``aligned``: at the turn that makes it largest.

    Shapes: (n_heads, n_heads).
    """
    from torch.linalg import svdvals

    total, size = 0.0, 0.0
    for W in (layer.W_k, layer.W_v):
        rows = W.flatten(0, 1)
        products = (rows @ rows.mT).unflatten(0, W.shape[:2]).unflatten(2, W.shape[:2]).transpose(1, 2)
        same = svdvals(products).sum(dim=-1) if aligned else products.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        total = total + same
        size = size + W.square().sum(dim=(1, 2))
    norms = size.sqrt()  # type: ignore[attr-defined]  # a tensor after the first sum
    return total / (norms[:, None] * norms)


def _groups(n_heads: int, n_kv_heads: int, grouping: str, alike: torch.Tensor) -> list[list[int]]:
    """The heads of each group, as many in each; ``most_alike``: the first head left, and those most like it."""
    if grouping != "most_alike":
        reads = kv_head_of(n_heads, n_kv_heads, grouping)
        return [[head for head in range(n_heads) if reads[head] == group] for group in range(n_kv_heads)]
    left, groups = list(range(n_heads)), []
    while left:
        nearest = sorted(left[1:], key=lambda head: -float(alike[left[0], head]))
        groups.append([left[0], *nearest[: n_heads // n_kv_heads - 1]])
        left = [head for head in left if head not in groups[-1]]
    return groups


def _align(layer: _Layer, groups: list[list[int]]) -> _Layer:
    """Each head turned onto the first of its group, as near as a turn can bring it."""
    import torch
    from torch.linalg import svd

    first = torch.empty(layer.W_k.shape[0], dtype=torch.long)
    for group in groups:
        first[group] = group[0]
    turns = []
    for W in (layer.W_k, layer.W_v):
        u, _, vh = svd(W[first] @ W.mT)
        turns.append(u @ vh)
    return _turn(layer, *turns)


def _merge(layer: _Layer, groups: list[list[int]], pooling: str, spare: tuple[torch.Tensor, ...]) -> _Layer:
    """One k and one v for each group, repeated for its heads."""
    merged = {"W_k": layer.W_k.clone(), "W_v": layer.W_v.clone()}
    for (name, W), new in zip(merged.items(), spare, strict=True):
        source = getattr(layer, name)
        for number_of_group, group in enumerate(groups):
            pooled = {"mean": source[group].mean(dim=0), "first": source[group[0]], "random": new[number_of_group]}
            W[group] = pooled[pooling]
    return layer._replace(**merged)


def _with_family(groups: list[list[int]], family: list[int]) -> float:
    """Share of the pairs within groups that are of one family; 1 where every head is alone."""
    pairs = [(a, b) for group in groups for a in group for b in group if a < b]
    return sum(family[a] == family[b] for a, b in pairs) / len(pairs) if pairs else 1.0


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    from torch.linalg import vector_norm

    return float(vector_norm(got - wanted) / vector_norm(wanted))
