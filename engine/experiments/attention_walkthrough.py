r"""One call of multi-head attention, every tensor on its way, and what each of the usual slips breaks.

Queries come from a sequence x, keys and values from the same one (self-attention) or from another (cross-attention).
The steps are those of engine/attention.py: project, split into heads, multiply, scale, mask, softmax, average the
values, join the heads, multiply by W_o. Switches put the softmax on the other axis, the mask behind the softmax, add
dropout, a sink logit or rotary positions. What is then measured:

- the sums of the rows (over keys) and of the columns (over queries) of the weights;
- the largest difference of the contexts from PyTorch's own ``scaled_dot_product_attention`` on the same q, k and v;
- how far the earlier outputs move when the last token of x is replaced by another: a causal layer must not move;
- how far outputs move, beyond changing places, when the order of the keys (in self-attention: of all tokens) is
  reversed: attention by itself does not know the order;
- how far outputs move when all four matrices are replaced and only the products :math:`W_q W_k^\top` and
  :math:`W_v W_o` of each head stay: :math:`W_q R,\ W_k R,\ W_v S,\ S W_o`, where R and S are reflections;
- how many coordinates of the contexts lie outside the range of the values, and of the outputs outside the range of the
  values that went through W_o.

Changes of the outputs are the largest ones, in units of the outputs' root mean square. Inputs are N(0, 1), matrices
have variance one over their number of rows, so that q, k and v have about variance 1.

Source: vaswani2017, sections 3.2.1 to 3.2.3; elhage2021, Observations about Attention Heads (the two products);
slot-attention-code (over queries, then over keys); gpt-oss-code, ``sdpa`` (the sink, a learned logit there).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, mask_logits, scale_value, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.maps import weight_map
from engine.positions import rotary_angles, rotate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    keys_from: str = choice("same_sequence", "other_sequence")
    q_len: int = number(16, low=2, high=1024, log2=True)
    kv_len: int = number(16, low=1, high=1024, log2=True)  # read only where keys come from another sequence
    n_heads: int = number(4, low=1, high=16, log2=True)
    d_model: int = number(64, low=1, high=1024, log2=True)
    d_k: int = number(16, low=1, high=256, log2=True)
    d_v: int = number(16, low=1, high=256, log2=True)
    causal: bool = flag(False)
    mask_position: str = choice("before", "after", "after_renormalized")
    softmax_over: str = choice("keys", "queries", "queries_then_keys")
    scale: str = choice("inv_sqrt_d_k", "none")
    dropout: float = number(0.0, low=0, high=0.9, step=0.1)
    sink: bool = flag(False)
    rope: bool = flag(False)
    stored_as: str = choice("bfloat16", "float16", "float32")  # for the sizes; the call runs in the dtype of the run
    batch: int = number(2, low=1, high=64, log2=True)

    def unread(self) -> frozenset[str]:
        same, masked = self.keys_from == "same_sequence", self.causal
        return frozenset({"kv_len"} if same else ()) | frozenset(() if masked else {"mask_position"})

    def rules(self) -> Iterator[Problem]:
        if self.causal and self.keys_from == "other_sequence":
            yield Problem("rule", "causal", self.causal, rule="causal_needs_one_sequence")
        if self.rope and self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="rope_needs_pairs")
        logits = _n_logits(self)
        if logits > MAX_LOGITS:
            values = {"product": logits, "limit": MAX_LOGITS}
            yield Problem("rule", "q_len", self.q_len, rule="too_many_weights_of_a_call", values=values)
        products = _n_products(self)
        if products > MAX_PRODUCTS:
            values = {"product": products, "limit": MAX_PRODUCTS}
            yield Problem("rule", "d_model", self.d_model, rule="too_many_products", values=values)


METRICS = (
    Metric("row_sum_max"),
    Metric("column_sum_max"),
    Metric("earlier_output_change"),
    Metric("sdpa_difference"),
    Metric("row_sum_min"),
    Metric("column_sum_min"),
    Metric("first_column_sum"),
    Metric("order_difference"),
    Metric("refactored_difference"),
    Metric("context_outside_share"),
    Metric("out_outside_share"),
    Metric("weights_bytes", "bytes"),
    Metric("context_bytes", "bytes"),
    Metric("out_bytes", "bytes"),
)
PLOTS = (
    Plot("weights", table="weights", mark="heat", x="key_position", y="query_position", value="attention_weight"),
    Plot("sums", table="sums", mark="point", x="position", y="weight_sum", by="summed_over"),
    Plot("context", table="context", mark="point", x="coordinate", y="context", low="value_min", high="value_max"),
    Plot("out", table="out", mark="point", x="coordinate", y="out", low="mapped_min", high="mapped_max"),
    Plot("tensors", table="tensors", mark="bar", x="tensor", y="stored_bytes", y_unit="bytes"),
)
BUDGET_S = 0.01

MAX_LOGITS = 2**20  # of a call; it is made four times
MAX_PRODUCTS = 2**28  # multiplications in the four projections of a call: some 30 ms
N_SHOWN = 48  # queries and keys of the map
N_COORDINATES = 64  # coordinates of the plots
AXES = ("axis_1", "axis_2", "axis_3", "axis_4")


def memory_bytes(params: Params) -> int:
    """The matrices twice, one of them in the making; of two calls everything, and the steps of a softmax."""
    kv_len, joined = _kv_len(params), params.n_heads * (params.d_k + params.d_v)
    matrices = 2 * params.d_model * joined
    call = params.batch * (params.q_len + kv_len) * (2 * params.d_model + 2 * joined)
    return 4 * (3 * matrices + 3 * call + 14 * _n_logits(params)) + 2**18


def run(params: Params, run: Run) -> Result:
    """Make the call, make it again with one thing changed, three times, and compare.

    Shapes: x (batch, q_len, d_model), keys and values from (batch, kv_len, d_model); a head's matrices are columns of
    W_q, W_k (d_model, n_heads * d_k) and W_v (d_model, n_heads * d_v), and rows of W_o (n_heads * d_v, d_model).
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    kv_len, same = _kv_len(params), params.keys_from == "same_sequence"
    x = run.randn(params.batch, params.q_len, params.d_model)
    x_kv = x if same else run.randn(params.batch, kv_len, params.d_model)
    matrices = _draw_matrices(params, run)
    other_token = run.randn(params.batch, 1, params.d_model)
    mirrors = run.randn(params.n_heads, params.d_k), run.randn(params.n_heads, params.d_v)
    kept = None
    if params.dropout:
        kept = run.rand(params.batch, params.n_heads, params.q_len, kv_len) >= params.dropout
    run.progress(0.3)

    call = _attend(params, x, x_kv, matrices, kept)
    scale = scale_value(params.scale, params.d_k)
    reference = scaled_dot_product_attention(call.q, call.k, call.v, is_causal=params.causal, scale=scale)
    run.progress(0.5)
    replaced = torch.cat((x[:, :-1], other_token), dim=1)
    after_replacing = _attend(params, replaced, replaced if same else x_kv, matrices, kept).out
    run.progress(0.65)
    backwards = x_kv.flip(1)
    after_reversing = _attend(params, backwards if same else x, backwards, matrices, kept).out
    if same:
        after_reversing = after_reversing.flip(1)
    run.progress(0.8)
    after_refactoring = _attend(params, x, x_kv, _refactored(params, matrices, *mirrors), kept).out
    run.progress(0.95)

    size = call.out.square().mean().sqrt().clamp_min(torch.finfo(call.out.dtype).tiny)  # 0 where all was dropped
    rows, columns = call.weights.sum(dim=-1), call.weights.sum(dim=-2)  # (batch, n_heads, q_len), (..., kv_len)
    mapped = _join(call.v) @ matrices.W_o  # what the layer would return if all heads looked at one token
    tensors = {
        "x": x,
        **({} if same else {"x_kv": x_kv}),
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "logits": call.logits,
        "weights": call.weights,
        "context": call.context,
        "joined": call.joined,
        "out": call.out,
    }
    sizes = {name: _stored_bytes(tensor, params.stored_as) for name, tensor in tensors.items()}
    metrics = {
        "row_sum_max": rows.max(),
        "column_sum_max": columns.max(),
        "earlier_output_change": (after_replacing - call.out)[:, :-1].abs().max() / size,
        "sdpa_difference": (call.context - reference).abs().max(),
        "row_sum_min": rows.min(),
        "column_sum_min": columns.min(),
        "first_column_sum": columns[..., 0].mean(),
        "order_difference": (after_reversing - call.out).abs().max() / size,
        "refactored_difference": (after_refactoring - call.out).abs().max() / size,
        "context_outside_share": _outside_share(call.context, call.v),
        "out_outside_share": _outside_share(call.out, mapped),
        "weights_bytes": sizes["weights"],
        "context_bytes": sizes["context"],
        "out_bytes": sizes["out"],
    }
    tables = {
        "weights": weight_map(call.weights[0, 0], N_SHOWN),
        "sums": _sums(rows[0, 0], columns[0, 0]),
        "context": _range("context", call.context[0, 0, -1], "value", call.v[0, 0]),
        "out": _range("out", call.out[0, -1], "mapped", mapped[0]),
        "tensors": _sizes(tensors, sizes),
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _kv_len(params: Params) -> int:
    return params.q_len if params.keys_from == "same_sequence" else params.kv_len


def _n_logits(params: Params) -> int:
    return params.batch * params.n_heads * params.q_len * _kv_len(params)


def _n_products(params: Params) -> int:
    tokens = params.batch * (params.q_len + _kv_len(params))
    return tokens * params.d_model * params.n_heads * (params.d_k + params.d_v)


class _Matrices(NamedTuple):
    W_q: torch.Tensor
    W_k: torch.Tensor
    W_v: torch.Tensor
    W_o: torch.Tensor


class _Call(NamedTuple):
    """The tensors of a call, in the order in which they are made."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    context: torch.Tensor
    joined: torch.Tensor
    out: torch.Tensor


def _draw_matrices(params: Params, run: Run) -> _Matrices:
    drawn = []
    for rows, columns in (
        (params.d_model, params.n_heads * params.d_k),
        (params.d_model, params.n_heads * params.d_k),
        (params.d_model, params.n_heads * params.d_v),
        (params.n_heads * params.d_v, params.d_model),
    ):
        drawn.append(run.randn(rows, columns) * rows**-0.5)
        run.progress(0.05 * len(drawn))
    return _Matrices(*drawn)


def _attend(
    params: Params, x: torch.Tensor, x_kv: torch.Tensor, matrices: _Matrices, kept: torch.Tensor | None
) -> _Call:
    """One call. Shapes: x (batch, q_len, d_model), x_kv (batch, kv_len, d_model); out as x."""
    import torch

    q, k, v = (
        _split(tokens @ W, params.n_heads)
        for tokens, W in ((x, matrices.W_q), (x_kv, matrices.W_k), (x_kv, matrices.W_v))
    )
    if params.rope:
        places = torch.arange(max(x.shape[1], x_kv.shape[1]), device=x.device)
        angles = rotary_angles(places, params.d_k)
        q, k = rotate(q, angles[: x.shape[1]]), rotate(k, angles[: x_kv.shape[1]])
    logits = attention_logits(q, k, params.scale)
    weights = _weights(params, logits, kept)
    means = context(weights, v)
    joined = _join(means)
    return _Call(q, k, v, logits, weights, means, joined, joined @ matrices.W_o)


def _split(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    """(batch, seq_len, n_heads * d) to (batch, n_heads, seq_len, d)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def _join(x: torch.Tensor) -> torch.Tensor:
    """(batch, n_heads, seq_len, d) to (batch, seq_len, n_heads * d)."""
    return x.transpose(1, 2).flatten(-2)


def _weights(params: Params, logits: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Mask, softmax and dropout as the switches say."""
    import torch

    keep = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if params.causal and params.mask_position == "before":
        logits = mask_logits(logits, keep)
    if params.softmax_over == "keys":
        weights = _softmax(logits, params.sink)
    else:
        weights = _softmax(logits.transpose(-2, -1), params.sink).transpose(-2, -1)
    if params.softmax_over == "queries_then_keys":
        weights = _renormalized(weights)
    if params.causal and params.mask_position != "before":
        weights = weights * keep
        if params.mask_position == "after_renormalized":
            weights = _renormalized(weights)
    return weights if kept is None else weights * kept / (1 - params.dropout)


def _softmax(logits: torch.Tensor, sink: bool) -> torch.Tensor:
    """Over the last axis; with a sink one more logit, 0, takes its share and is then left out."""
    import torch

    if not sink:
        return softmax(logits)
    return softmax(torch.cat((logits, torch.zeros_like(logits[..., :1])), dim=-1))[..., :-1]


def _renormalized(weights: torch.Tensor) -> torch.Tensor:
    """Rows divided by their sums; a row whose weights have all underflowed stays 0."""
    import torch

    return weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _refactored(params: Params, matrices: _Matrices, qk_mirrors: torch.Tensor, vo_mirrors: torch.Tensor) -> _Matrices:
    """Other matrices with the same products W_q W_kᵀ and W_v W_o in each head. Shapes: mirrors (n_heads, d)."""
    n = params.n_heads
    return _Matrices(
        _mirrored(matrices.W_q.unflatten(-1, (n, -1)), qk_mirrors).flatten(-2),
        _mirrored(matrices.W_k.unflatten(-1, (n, -1)), qk_mirrors).flatten(-2),
        _mirrored(matrices.W_v.unflatten(-1, (n, -1)), vo_mirrors).flatten(-2),
        _mirrored(matrices.W_o.T.unflatten(-1, (n, -1)), vo_mirrors).flatten(-2).T,
    )


def _mirrored(x: torch.Tensor, mirrors: torch.Tensor) -> torch.Tensor:
    """Each head's vectors reflected at the plane across its mirror: orthogonal, and its own inverse.

    Shapes: x (..., n_heads, d), mirrors (n_heads, d).
    """
    unit = mirrors / mirrors.norm(dim=-1, keepdim=True)
    return x - 2 * (x * unit).sum(dim=-1, keepdim=True) * unit


def _outside_share(means: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Share of the coordinates of ``means`` outside the range of ``points``, whose tokens are the last axis but one."""
    import torch

    rounding = 64 * torch.finfo(means.dtype).eps * points.abs().max()  # of a mean over at most 1024 values
    low, high = points.amin(dim=-2, keepdim=True) - rounding, points.amax(dim=-2, keepdim=True) + rounding
    return ((means < low) | (means > high)).to(means.dtype).mean()


def _stored_bytes(tensor: torch.Tensor, stored_as: str) -> int:
    """Bytes of a tensor of this shape in a number format, counted from a tensor without storage."""
    import torch

    return int(torch.empty(tensor.shape, dtype=getattr(torch, stored_as), device="meta").nbytes)


def _sums(rows: torch.Tensor, columns: torch.Tensor) -> Table:
    rows, columns = (sums[:N_SHOWN] for sums in (rows, columns))
    return {
        "summed_over": np.repeat(["rows", "columns"], [len(rows), len(columns)]),
        "position": np.concatenate([np.arange(len(rows)), np.arange(len(columns))]),
        "weight_sum": np.concatenate([rows.cpu().double().numpy(), columns.cpu().double().numpy()]),
    }


def _range(name: str, mean: torch.Tensor, range_name: str, points: torch.Tensor) -> Table:
    """A token's vector beside the range, coordinate by coordinate. Shapes: mean (d,), points (kv_len, d)."""
    columns = {name: mean, f"{range_name}_min": points.amin(dim=0), f"{range_name}_max": points.amax(dim=0)}
    shown = {column: values[:N_COORDINATES].cpu().double().numpy() for column, values in columns.items()}
    return {"coordinate": np.arange(len(shown[name]))} | shown


def _sizes(tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> Table:
    """Shape and bytes of each tensor; 0 for an axis that it does not have."""
    shapes = np.array([[*t.shape, *[0] * (len(AXES) - t.ndim)] for t in tensors.values()])
    axes = {name: shapes[:, i] for i, name in enumerate(AXES)}
    return {"tensor": np.array(list(tensors)), **axes, "stored_bytes": np.array(list(sizes.values()))}
