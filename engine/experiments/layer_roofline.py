r"""Where every operation of one pass of a published model stands under a roofline: all its layers, and the head.

A pass takes new tokens of each of ``batch`` sequences: all of them (prefill), or the last ``tokens_per_step`` (decode).
Each operation is one kernel: it reads its inputs and writes its output once. Operations are counted while it runs on
tensors of full size without storage, bytes are those of the tensors. At :math:`I` operations a byte it reaches at best
:math:`\min(P,\ I\,B)`; both rates are given, as a data sheet states them. Kernels run one after the other.

``fused_attention``  logits stay on the chip: q, keys and values are read, the context written; pairs that the causal
                     mask hides are not computed (the operations of one pair are counted, and then the pairs). The query
                     heads of a group and all new tokens of a sequence share one reading of its keys
``stored_logits``    three kernels: q·k writes all logits, the softmax reads them and writes the weights, the weighted
                     sum reads those

``shared_prefix_len``: so many first tokens are the same in all sequences, and a kernel reads them once for all queries;
what each query sees of the rest is added by a second kernel, from partial outputs that go through memory.

``inside_kernels``: norms, the gate's activation and the residual are computed by the kernels beside them. All
operations count alike, though those outside products do not run on matrix units. Rotations, the lookup of the input and
sampling are left out, and whatever still lies in a cache of the device is read again.

Sources: h100-sheet (the default rates, without sparsity); juravsky2024 (a shared prefix apart from the rest).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import context, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.intensity import Kernel, bound_flop_per_s, counted_kernel, joined
from engine.model_shapes import PLAIN_SHAPES, SHAPES, ModelShape, weights
from engine.operations import count_operations
from engine.transformer_block import norm

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("llama_3_8b", *(name for name in PLAIN_SHAPES if name != "llama_3_8b"))
    phase: str = choice("decode", "prefill")
    batch: int = number(32, low=1, high=1024, log2=True)
    seq_len: int = number(1024, low=1, high=131072, log2=True)
    n_kv_heads: int = number(8, low=1, high=64, log2=True)
    tokens_per_step: int = number(1, low=1, high=4096, log2=True)
    shared_prefix_len: int = number(0, low=0, high=65536, step=256)
    logits_path: str = choice("fused_attention", "stored_logits")
    elementwise_path: str = choice("separate_kernels", "inside_kernels")
    weight_dtype: str = choice("bfloat16", "float8")
    cache_dtype: str = choice("bfloat16", "float8")
    matmul_tflop_per_s: float = number(989.0, low=0.1, high=5000)
    memory_gb_per_s: float = number(3350.0, low=10, high=20000)

    def rules(self) -> Iterator[Problem]:
        n_heads = SHAPES[self.model].n_heads
        if n_heads % self.n_kv_heads:
            values = {"n_heads": n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.phase == "decode" and self.tokens_per_step > self.seq_len:
            values = {"seq_len": self.seq_len}
            yield Problem("rule", "tokens_per_step", self.tokens_per_step, rule="new_within_sequence", values=values)
        elif self.phase == "decode" and self.shared_prefix_len > self.seq_len - self.tokens_per_step:
            values = {"room": self.seq_len - self.tokens_per_step}
            yield Problem("rule", "shared_prefix_len", self.shared_prefix_len, rule="prefix_is_cached", values=values)

    def unread(self) -> frozenset[str]:
        alone = {"shared_prefix_len"} if self.batch == 1 or self.logits_path == "stored_logits" else set()
        return frozenset({"shared_prefix_len", "tokens_per_step"} if self.phase == "prefill" else alone)


METRICS = (
    Metric("linear_flop_per_byte", "flop/byte"),
    Metric("attention_core_flop_per_byte", "flop/byte"),
    Metric("given_ridge_flop_per_byte", "flop/byte"),
    Metric("attention_peak_share"),
    Metric("elementwise_flop_per_byte", "flop/byte"),
    Metric("stored_qk_flop_per_byte", "flop/byte"),
    Metric("pass_flop_per_byte", "flop/byte"),
    Metric("kernels_bound_ms"),
    Metric("averaged_over_kernels"),
    Metric("memory_bound_time_share"),
    Metric("attention_time_share"),
    Metric("elementwise_time_share"),
    Metric("elementwise_flop_share"),
    Metric("attention_moved_bytes", "bytes"),
    Metric("kernels_flop", "flop"),
)
PLOTS = (
    Plot(
        "under_roof",
        table="kernels",
        x="kernel_flop_per_byte",
        y="bound_tflop_per_s",
        by="kernel_group",
        theory="roof_tflop_per_s",
        mark="point",
        x_scale="log10",
        y_scale="log10",
        x_unit="flop/byte",
        one_law=True,
    ),
    Plot(
        "by_batch",
        table="by_batch",
        x="batch",
        y="kernel_flop_per_byte",
        by="kernel_name",
        theory="given_ridge_flop_per_byte",
        x_scale="log2",
        y_scale="log10",
        y_unit="flop/byte",
        one_law=True,
    ),
    Plot("shares", table="shares", x="kernel_name", y="share_of_pass", by="share_of", mark="bar"),
)
BUDGET_S = 0.05

BATCHES = tuple(2**n for n in range(0, 11, 2))
LINEAR_KERNELS = ("qkv_kernel", "output_kernel", "up_gate_kernel", "down_kernel")
ATTENTION_KERNELS = ("attention_core", "prefix_kernel", "qk_kernel", "softmax_kernel", "sum_kernel", "merge_kernel")
SMALL_KERNELS = ("norm_kernel", "residual_kernel", "activation_kernel")
DRAWN_BY_BATCH = ("up_gate_kernel", "attention_core", "norm_kernel")


def memory_bytes(params: Params) -> int:
    """Tensors have no storage, but for the numbers of keys that the queries of a pass see."""
    return 2**20 + 24 * params.seq_len


def run(params: Params, run: Run) -> Result:
    """Counts and bounds of the kernels of the chosen pass.

    ``linear_flop_per_byte``   of the products with W_q, W_k, W_v, W_o and the FFN, as one sum
    ``attention_peak_share``   of the operations a second, where the roofline lets attention be
    ``stored_qk_flop_per_byte``  of q·k alone if it writes its logits, whether or not it does here
    ``averaged_over_kernels``  the time by the operations and bytes of the whole pass, as if all were one kernel, over
                               that of its kernels one after the other
    ``memory_bound_time_share``  of the time, in kernels that move for longer than they compute
    """
    P, B = params.matmul_tflop_per_s * 1e12, params.memory_gb_per_s * 1e9
    run.progress(0.0)
    kernels = _pass(params, params.batch)
    separate = _pass(dataclasses.replace(params, elementwise_path="separate_kernels"), params.batch)
    qk = _with_logits(_shape(params), "qk_kernel", params.batch, _q_len(params), params.seq_len, params.cache_dtype)
    whole = joined("whole_pass", kernels)
    attention = joined("attention", [one for one in kernels if one.name in ATTENTION_KERNELS])
    elementwise = joined("elementwise", [one for one in separate if one.name in SMALL_KERNELS])
    time_s = sum(one.time_s(P, B) for one in kernels)
    waiting_s = sum(one.time_s(P, B) for one in kernels if one.flop_per_byte < P / B)
    elementwise_s = sum(one.time_s(P, B) for one in kernels if one.name in SMALL_KERNELS)
    metrics = {
        "linear_flop_per_byte": joined("linear", [one for one in kernels if one.name in LINEAR_KERNELS]).flop_per_byte,
        "attention_core_flop_per_byte": attention.flop_per_byte,
        "given_ridge_flop_per_byte": P / B,
        "attention_peak_share": attention.flop
        / sum(k.time_s(P, B) for k in kernels if k.name in ATTENTION_KERNELS)
        / P,
        "elementwise_flop_per_byte": elementwise.flop_per_byte,
        "stored_qk_flop_per_byte": qk.flop_per_byte,
        "pass_flop_per_byte": whole.flop_per_byte,
        "kernels_bound_ms": 1e3 * time_s,
        "averaged_over_kernels": whole.time_s(P, B) / time_s,
        "memory_bound_time_share": waiting_s / time_s,
        "attention_time_share": sum(one.time_s(P, B) for one in kernels if one.name in ATTENTION_KERNELS) / time_s,
        "elementwise_time_share": elementwise_s / time_s,
        "elementwise_flop_share": elementwise.flop / joined("all", separate).flop,
        "attention_moved_bytes": attention.bytes,
        "kernels_flop": whole.flop,
    }
    run.progress(0.4)
    tables = {"kernels": _points(kernels, P, B), "shares": _shares(kernels, P, B)}
    tables["by_batch"] = _by_batch(params, P, B)
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _pass(params: Params, batch: int) -> tuple[Kernel, ...]:
    """The kernels of the chosen pass at some batch, one after the other."""
    separate = params.elementwise_path == "separate_kernels"
    linear = _linear(_shape(params), batch * _q_len(params), batch, params.weight_dtype, separate)
    return linear + _attention(params, batch)


def _attention(params: Params, batch: int) -> tuple[Kernel, ...]:
    of_pass = _shape(params), batch, _q_len(params), params.seq_len
    if params.logits_path == "stored_logits":
        return _stored(*of_pass, params.cache_dtype)
    prefix = 0 if batch == 1 or "shared_prefix_len" in params.unread() else params.shared_prefix_len
    return _fused(*of_pass, prefix, params.cache_dtype)


def _shape(params: Params) -> ModelShape:
    return dataclasses.replace(SHAPES[params.model], n_kv_heads=params.n_kv_heads)


def _q_len(params: Params) -> int:
    return params.seq_len if params.phase == "prefill" else params.tokens_per_step


def _linear(shape: ModelShape, rows: int, last_rows: int, weight_dtype: str, separate: bool) -> tuple[Kernel, ...]:
    """All kernels but attention, for ``rows`` tokens, ``last_rows`` of which are asked for logits. Biases left out."""
    names = (*LINEAR_KERNELS, "head_kernel", *(SMALL_KERNELS if separate else ()))
    return tuple(_one(shape, name, last_rows if name == "head_kernel" else rows, weight_dtype) for name in names)


@functools.lru_cache(maxsize=4096)
def _one(shape: ModelShape, name: str, rows: int, weight_dtype: str) -> Kernel:
    """That kernel in all its layers. Shapes: the stream (rows, d_model), a matrix (out, in)."""
    import torch
    from torch.nn.functional import silu

    layers, W = shape.n_layers, _weights(shape, weight_dtype)

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device="meta")

    stream, hidden = empty(rows, shape.d_model), empty(rows, shape.d_ff)
    if name == "norm_kernel":
        gain = empty(shape.d_model)
        norms = shape.norms_per_layer * layers + 1
        return counted_kernel(name, [stream, gain], lambda: norm(stream, gain), times=norms)
    if name == "residual_kernel":
        return counted_kernel(name, [stream, stream], lambda: stream + stream, times=2 * layers)
    if name == "activation_kernel":
        return counted_kernel(name, [hidden, hidden], lambda: silu(hidden) * hidden, times=layers)
    up, gate, down = W["ffn"]
    x, read, times = {
        "qkv_kernel": (stream, [W["W_q"], W["W_k"], W["W_v"]], layers),
        "output_kernel": (empty(rows, W["W_o"].shape[1]), [W["W_o"]], layers),
        "up_gate_kernel": (stream, [up, gate], layers),
        "down_kernel": (hidden, [down.mT], layers),
        "head_kernel": (stream, [W["embedding" if shape.tied_embedding else "output"]], 1),
    }[name]
    matrix = empty(sum(len(one) for one in read), x.shape[1])  # in the format that it is multiplied in
    return counted_kernel(name, [x, *read], lambda: x @ matrix.mT, times=times)


@functools.lru_cache(maxsize=64)
def _weights(shape: ModelShape, dtype: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, _, tensor in weights(shape, _dtype(dtype))}


@functools.lru_cache(maxsize=512)
def _fused(shape: ModelShape, batch: int, q_len: int, kv_len: int, prefix: int, cache_dtype: str) -> tuple[Kernel, ...]:
    """Attention that keeps its logits on the chip, over the pairs that a causal mask leaves.

    Shapes: q and the context (batch, n_heads, q_len, d_k), a cache (batch, n_kv_heads, tokens, d_k).
    """
    import torch

    layers = shape.n_layers

    def rows(dtype: torch.dtype, width: int = shape.d_k) -> torch.Tensor:
        return torch.empty(batch, shape.n_heads, q_len, width, dtype=dtype, device="meta")

    def cache(sequences: int, tokens: int) -> torch.Tensor:  # a key and a value of each token
        sizes = sequences, shape.n_kv_heads, tokens, 2 * shape.d_k
        return torch.empty(sizes, dtype=_dtype(cache_dtype), device="meta")

    pair = _pair(shape.d_k)
    seen = int(torch.arange(kv_len - q_len + 1, kv_len + 1).sum())  # keys of one sequence's queries, all together
    q = rows(torch.bfloat16)
    if not prefix:
        flop = batch * shape.n_heads * seen * pair
        moved = 2 * q.nbytes + cache(batch, kv_len).nbytes
        return (Kernel("attention_core", layers * flop, 0, layers * moved, layers),)
    partial, partial_sum = rows(torch.float32), rows(torch.float32, 1)  # the logarithm of the softmax's denominator
    parts = (
        ("prefix_kernel", batch * q_len * prefix, cache(1, prefix)),
        ("attention_core", batch * (seen - q_len * prefix), cache(batch, kv_len - prefix)),
    )
    attended = tuple(
        Kernel(
            name,
            layers * shape.n_heads * pairs * pair,
            0,
            layers * (q.nbytes + kept.nbytes + partial.nbytes + partial_sum.nbytes),
            layers,
        )
        for name, pairs, kept in parts
    )
    merged = counted_kernel(
        "merge_kernel",
        2 * [partial, partial_sum],
        lambda: (partial + (partial - partial) * (partial_sum - partial_sum).sigmoid()).to(q.dtype),
        times=layers,
    )
    return (*attended, merged)


@functools.cache
def _pair(d_k: int) -> int:
    """Operations of a query with one key and its value, counted."""
    import torch

    q = torch.empty(1, 1, d_k, device="meta")
    with count_operations() as counted:
        torch.bmm(torch.bmm(q, q.mT), q)
    return counted.products


def _stored(shape: ModelShape, batch: int, q_len: int, kv_len: int, cache_dtype: str) -> tuple[Kernel, ...]:
    """Attention by three kernels that pass logits and weights on through memory; masked pairs are computed too."""
    names = ("qk_kernel", "softmax_kernel", "sum_kernel")
    return tuple(_with_logits(shape, name, batch, q_len, kv_len, cache_dtype) for name in names)


@functools.lru_cache(maxsize=1024)
def _with_logits(shape: ModelShape, name: str, batch: int, q_len: int, kv_len: int, cache_dtype: str) -> Kernel:
    """Shapes: the heads of a group are rows of one product with their keys, (batch, n_kv_heads, group · q_len, d_k)."""
    import torch

    rows = shape.n_heads // shape.n_kv_heads * q_len
    q = torch.empty(batch, shape.n_kv_heads, rows, shape.d_k, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, shape.n_kv_heads, kv_len, shape.d_k, dtype=torch.bfloat16, device="meta")
    kept = torch.empty(k.shape, dtype=_dtype(cache_dtype), device="meta")
    logits = torch.empty(*q.shape[:-1], kv_len, dtype=torch.bfloat16, device="meta")
    read, work = {
        "qk_kernel": ([q, kept], lambda: qk_product(q, k)),
        "softmax_kernel": ([logits], lambda: softmax(logits)),
        "sum_kernel": ([logits, kept], lambda: context(logits, k)),
    }[name]
    return counted_kernel(name, read, work, times=shape.n_layers)


def _points(kernels: tuple[Kernel, ...], P: float, B: float) -> Table:
    """A row for each kernel, and three for the roofline: its corner, and ends beyond all points."""
    rows = [(one.name, one.flop_per_byte) for one in kernels]
    marks = sorted([P / B, *(intensity for _, intensity in rows)])
    rows += [("roofline", intensity) for intensity in (marks[0] / 2, P / B, marks[-1] * 2)]
    roof = np.array([bound_flop_per_s(intensity, P, B) for _, intensity in rows]) / 1e12
    return {
        "kernel_name": np.array([name for name, _ in rows]),
        "kernel_group": np.array([_group(name) for name, _ in rows]),
        "kernel_flop_per_byte": np.array([intensity for _, intensity in rows]),
        "bound_tflop_per_s": roof,
        "roof_tflop_per_s": roof,
    }


def _group(name: str) -> str:
    if name in ATTENTION_KERNELS:
        return "attention_kernels"
    return name if name == "roofline" else "small_kernels" if name in SMALL_KERNELS else "weight_products"


def _shares(kernels: tuple[Kernel, ...], P: float, B: float) -> Table:
    """What each kernel has of the operations, the bytes and the time."""
    columns = {
        "share_of_flop": [float(one.flop) for one in kernels],
        "share_of_bytes": [float(one.bytes) for one in kernels],
        "share_of_time": [one.time_s(P, B) for one in kernels],
    }
    return {
        "kernel_name": np.tile([one.name for one in kernels], len(columns)),
        "share_of": np.repeat(list(columns), len(kernels)),
        "share_of_pass": np.concatenate([np.array(values) / sum(values) for values in columns.values()]),
    }


def _by_batch(params: Params, P: float, B: float) -> Table:
    """Operations a byte of a matrix of weights, of attention and of a norm, by batch."""
    batches = sorted({*BATCHES, params.batch})
    rows = []
    for batch in batches:
        tokens = batch * _q_len(params)
        matrix, small = (
            _one(_shape(params), name, tokens, params.weight_dtype) for name in ("up_gate_kernel", "norm_kernel")
        )
        kernels = (matrix, joined("attention", _attention(params, batch)), small)
        rows.append([one.flop_per_byte for one in kernels])
    return {
        "batch": np.tile(batches, len(DRAWN_BY_BATCH)),
        "kernel_name": np.repeat(DRAWN_BY_BATCH, len(batches)),
        "kernel_flop_per_byte": np.array(rows).T.flatten(),
        "given_ridge_flop_per_byte": np.full(len(DRAWN_BY_BATCH) * len(batches), P / B),
    }


def _dtype(name: str) -> torch.dtype:
    import torch

    return {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}[name]
