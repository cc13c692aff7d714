r"""Which query head reads which KV head: what equals MHA, what a wrong mapping breaks, and what copies the keys.

A layer of MHA whose W_k and W_v are equal within each group computes what the layer that shares them computes:
PyTorch's own ``MultiheadAttention`` in float64 is given the repeated matrices and is the reference. Shared heads are
read in the ``trained_as`` layout, and a second time in the ``read_as`` layout, as by code that repeats them in another
order. ``relabelled`` gives that code the query heads in its own order: rows of W_q and columns of W_o change places.

Then the k and v of the layer are read in several ways, and the bytes counted that each way writes only to repeat them.

``repeat_interleave``  k and v written out for every query head
``expand_reshape``     a view that shows them often, and a reshape that merges the two axes
``broadcast_matmul``   an axis of one for the group, and ``@`` broadcasts
``grouped_rows``       the queries of a group are rows of one product
``sdpa_enable_gqa``    PyTorch's fused attention on the CPU, given fewer KV heads

Source: pytorch-code, ``scaled_dot_product_attention`` (adjacent heads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention, context, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.grouped_heads import LAYOUTS, count_copies, grouped_attention, kv_head_of
from engine.masks import keep_causal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    n_heads: int = number(8, low=1, high=32, log2=True)
    n_kv_heads: int = number(2, low=1, high=32, log2=True)
    trained_as: str = choice(*LAYOUTS)
    read_as: str = choice("strided", "adjacent")
    d_k: int = number(16, low=4, high=32, log2=True)
    seq_len: int = number(32, low=2, high=128, log2=True)
    computed_in: str = choice("float64", "float32", "bfloat16")

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            values = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)


METRICS = (
    Metric("shared_error"),
    Metric("mapping_error"),
    Metric("heads_misread_share"),
    Metric("relabelled_error"),
    Metric("enable_gqa_error"),
    Metric("repeat_copies_factor"),
    Metric("broadcast_copies_factor"),
    Metric("grouped_copies_factor"),
    Metric("enable_gqa_copies_factor"),
)
PLOTS = (
    Plot("mapping", table="mapping", x="query_head", y="kv_head", value="read_in", mark="heat"),
    Plot("copies", table="copies", x="kv_way", y="copied_factor", mark="bar"),
    Plot("head_errors", table="head_errors", x="query_head_number", y="head_error", mark="point", by="head_layout"),
)
BUDGET_S = 0.05

WAYS = ("repeat_interleave", "expand_reshape", "broadcast_matmul", "grouped_rows", "sdpa_enable_gqa")
N_TEXTS = 2


def memory_bytes(params: Params) -> int:
    """Matrices with their repeated forms, activations and logits, in float64."""
    d_model = params.n_heads * params.d_k
    logits = N_TEXTS * params.n_heads * params.seq_len**2
    return 8 * (16 * d_model**2 + 24 * N_TEXTS * params.seq_len * d_model + 8 * logits) + 2**18


class _Layer(NamedTuple):
    """Shapes: W_q (n_heads, d_k, d_model), W_k, W_v (n_kv_heads, d_k, d_model), W_o (d_model, n_heads, d_k)."""

    W_q: torch.Tensor
    W_k: torch.Tensor
    W_v: torch.Tensor
    W_o: torch.Tensor


def run(params: Params, run: Run) -> Result:
    """Errors are norms of differences from the reference over its own norm, at the output of the layer.

    ``heads_misread_share``  query heads whose KV head differs between the two layouts
    ``..._copies_factor``    bytes written to repeat k and v, over the bytes of k and v

    All on the CPU, for not every device has float64, and PyTorch's attention takes another way elsewhere.

    Shapes: x (N_TEXTS, seq_len, d_model).
    """
    import torch

    dtype = getattr(torch, params.computed_in)
    x = run.randn(N_TEXTS, params.seq_len, params.n_heads * params.d_k).cpu().to(dtype)
    layer = _draw(params, run, dtype)
    run.progress(0.2)
    wanted, heads = _reference(params, layer, x)
    run.progress(0.4)
    right, wrong = params.trained_as, params.read_as
    got = {}
    for done, layout in enumerate((right, wrong)):
        got[layout] = _shared(layer, x, layout)
        run.progress(0.5 + 0.1 * done)  # bfloat16 is slow where the processor has no instructions for it
    relabelled, _ = _shared(_relabel(params, layer, right, wrong), x, wrong)
    run.progress(0.7)
    q, k, v = (each.contiguous() for each in _project(layer, x))
    copied = {way: _copied(way, q, k, v) / (k.nbytes + v.nbytes) for way in WAYS}
    fused = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    reads = {layout: kv_head_of(params.n_heads, params.n_kv_heads, layout) for layout in LAYOUTS}
    adjacent, _ = _reference(params, layer, x, "adjacent")
    misread = [a != b for a, b in zip(reads[right], reads[wrong], strict=True)]
    metrics = {
        "shared_error": _relative_error(got[right][0], wanted),
        "mapping_error": _relative_error(got[wrong][0], wanted),
        "heads_misread_share": sum(misread) / len(misread),
        "relabelled_error": _relative_error(relabelled, wanted),
        "enable_gqa_error": _relative_error(_merge(layer, fused), adjacent),
        "repeat_copies_factor": copied["repeat_interleave"],
        "broadcast_copies_factor": copied["broadcast_matmul"],
        "grouped_copies_factor": copied["grouped_rows"],
        "enable_gqa_copies_factor": copied["sdpa_enable_gqa"],
    }
    shown = dict.fromkeys((right, wrong))
    errors = [_head_errors(got[layout][1], heads) for layout in shown]
    tables = {
        "mapping": _mapping(params, reads[right], reads[wrong]),
        "copies": {"kv_way": np.array(WAYS), "copied_factor": np.array([copied[way] for way in WAYS])},
        "head_errors": {
            "query_head_number": np.tile(np.arange(params.n_heads), len(shown)),
            "head_layout": np.repeat([*shown], params.n_heads),
            "head_error": np.concatenate(errors),
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _mapping(params: Params, right: list[int], wrong: list[int]) -> dict[str, np.ndarray]:
    """A cell for each pair of heads: 2 where both layouts read it, 1 where only the trained one does, -1 the other."""
    queries = np.repeat(np.arange(params.n_heads), params.n_kv_heads)
    keys = np.tile(np.arange(params.n_kv_heads), params.n_heads)
    trained, read = (np.array(layout)[queries] == keys for layout in (right, wrong))
    return {
        "query_head": queries,
        "kv_head": keys,
        "read_in": np.where(trained & read, 2.0, trained * 1.0 - read * 1.0),
    }


# --------------------------------------------------------------------------------------------------------------------
# The layer


def _draw(params: Params, run: Run, dtype: torch.dtype) -> _Layer:
    d_model = params.n_heads * params.d_k

    def normal(*shape: int) -> torch.Tensor:
        return (run.randn(*shape).cpu() / math.sqrt(d_model)).to(dtype)

    n_kv_heads = params.n_kv_heads
    W_q, W_k, W_v = (normal(n, params.d_k, d_model) for n in (params.n_heads, n_kv_heads, n_kv_heads))
    return _Layer(W_q, W_k, W_v, normal(d_model, params.n_heads, params.d_k))


def _project(layer: _Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes: q (batch, n_heads, seq_len, d_k), k and v (batch, n_kv_heads, seq_len, d_k)."""
    q, k, v = (x[:, None] @ W.mT for W in (layer.W_q, layer.W_k, layer.W_v))
    return q, k, v


def _merge(layer: _Layer, mixed: torch.Tensor) -> torch.Tensor:
    return mixed.transpose(1, 2).flatten(2) @ layer.W_o.flatten(1).mT


def _shared(layer: _Layer, x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the layer whose heads share k and v, and the context of every head."""
    q, k, v = _project(layer, x)
    mixed = grouped_attention(q, k, v, keep=keep_causal(x.shape[1]), layout=layout)
    return _merge(layer, mixed), mixed


def _reference(
    params: Params, layer: _Layer, x: torch.Tensor, layout: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's MHA in float64 with a k and a v of its own for each head, equal within groups; and eager contexts."""
    import torch

    reads = kv_head_of(params.n_heads, params.n_kv_heads, layout or params.trained_as)
    W_q, W_k, W_v, W_o = (W.cpu().double() for W in layer)
    module = torch.nn.utils.skip_init(  # its own initialization would take numbers from the global generator
        torch.nn.MultiheadAttention, x.shape[2], params.n_heads, bias=False, batch_first=True, dtype=torch.float64
    )
    hidden = ~keep_causal(x.shape[1])
    x = x.cpu().double()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat([W_q, W_k[reads], W_v[reads]]).flatten(0, 1))
        module.out_proj.weight.copy_(W_o.flatten(1))
        out, _ = module(x, x, x, attn_mask=hidden, need_weights=False)
    q, k, v = (x[:, None] @ W.mT for W in (W_q, W_k[reads], W_v[reads]))
    return out, attention(q, k, v, keep=~hidden)


def _relabel(params: Params, layer: _Layer, trained: str, read: str) -> _Layer:
    """Query heads in an order in which the layout ``read`` gives each the KV head that ``trained`` gave it."""
    sizes = params.n_heads, params.n_kv_heads
    order = np.argsort(kv_head_of(*sizes, trained), kind="stable")  # the query heads of KV head 0, of 1, ...
    places = np.argsort(kv_head_of(*sizes, read), kind="stable")  # the places that read KV head 0, 1, ...
    new = np.empty_like(order)
    new[places] = order
    return layer._replace(W_q=layer.W_q[new.tolist()], W_o=layer.W_o[:, new.tolist()])


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    from torch.linalg import vector_norm

    return float(vector_norm(got.cpu().double() - wanted) / vector_norm(wanted))


def _head_errors(got: torch.Tensor, wanted: torch.Tensor) -> np.ndarray:
    """Of each head's context. Shapes: (batch, n_heads, seq_len, d_k) each; returns (n_heads,)."""
    difference = got.cpu().double() - wanted
    return np.asarray((difference.square().mean((0, 2, 3)) / wanted.square().mean((0, 2, 3))).sqrt())


# --------------------------------------------------------------------------------------------------------------------
# Ways of reading k and v


def _copied(way: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Bytes that attention of this way writes to repeat k and v. Shapes: as :func:`_project`."""
    import torch

    group = q.shape[1] // k.shape[1]

    def repeated(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(group, dim=1)

    def expanded(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None].expand(-1, -1, group, -1, -1).reshape(x.shape[0], -1, *x.shape[2:])

    def eager(k: torch.Tensor, v: torch.Tensor) -> object:
        return context(softmax(qk_product(q, k)), v)

    def broadcast() -> object:
        grouped = q.unflatten(1, (-1, group))
        return context(softmax(qk_product(grouped, k[:, :, None])), v[:, :, None])

    ways: dict[str, Callable[[], object]] = {
        "repeat_interleave": lambda: eager(repeated(k), repeated(v)),
        "expand_reshape": lambda: eager(expanded(k), expanded(v)),
        "broadcast_matmul": broadcast,
        "grouped_rows": lambda: grouped_attention(q, k, v),
        "sdpa_enable_gqa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }
    with count_copies() as counted:
        ways[way]()
    return counted.written
