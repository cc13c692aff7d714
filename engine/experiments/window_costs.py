r"""What windows save in a published stack: the bytes of the KV cache, and the operations of reading a prompt.

A layer with a window of :math:`W` keeps the keys and values of the last :math:`W` tokens and lets a query meet no more
than :math:`W` keys; a global layer keeps all tokens and meets all earlier ones. Models mix them, so a stack is a sum
over its layers. Three stacks of the same sizes are compared: the chosen one, all layers global, all with the window.

The cache is counted in bytes of tensors of the full size without storage (engine/model_shapes.py), in bfloat16, one
sequence, one layer of each kind. Operations are counted while products of such tensors run: those of the projections
and the FFN for all tokens, and those of q·k and weights·v for one pair of query and key, times the pairs, which are
counted query by query. Without the unembedding, the norms and the softmax. A kernel works on tiles and computes a
few pairs more, see mask_tiles.

Sources: those of engine/model_shapes.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.model_shapes import SHAPES, ModelShape, cached, weights
from engine.operations import count_operations


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("gemma_3_27b", "gemma_2_9b", "mistral_7b", "llama_3_8b")
    layer_mix: str = choice("as_published", "set_here")
    window: int = number(4096, low=1, high=2**17, log2=True)
    global_every: int = number(6, low=0, high=12)
    seq_len: int = number(32768, low=1, high=2**20, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset({"window", "global_every"} if self.layer_mix == "as_published" else set())

    def rules(self) -> Iterator[Problem]:
        if self.layer_mix == "as_published" and not SHAPES[self.model].window:
            yield Problem("rule", "layer_mix", self.layer_mix, rule="model_without_window", values={})


METRICS = (
    Metric("cache_share_of_global"),
    Metric("global_layers_cache_share"),
    Metric("mixed_cache_bytes", "bytes"),
    Metric("attention_flop_share"),
    Metric("windows_prefill_flop_share"),
    Metric("attention_part_of_prefill"),
)
PLOTS = (
    Plot(
        "cache_by_length",
        table="by_length",
        x="seq_len",
        y="cache_gib",
        by="window_layers",
        x_scale="log2",
        y_scale="log10",
    ),
    Plot(
        "prefill_by_length",
        table="by_length",
        x="seq_len",
        y="attention_flop_part",
        by="window_layers",
        x_scale="log2",
    ),
)
BUDGET_S = 0.1

GIB = 2**30
LENGTHS = tuple(2**n for n in range(10, 20, 2))
QUERIES_AT_ONCE = 2**16
MIXES = ("all_global", "mixed_layers", "all_windows")


def memory_bytes(params: Params) -> int:
    """The keys that each query of a chunk meets; other tensors have no storage."""
    return 4 * 8 * QUERIES_AT_ONCE + 2**20


def run(params: Params, run: Run) -> Result:
    """The bill of the chosen stack, and of the same stack without and with nothing but windows.

    ``cache_share_of_global`` and ``attention_flop_share``: cache and attention products over those of the stack whose
    layers are all global; ``windows_prefill_flop_share``: all products, of projections and FFN too.
    ``global_layers_cache_share``: what part of the chosen stack's cache its global layers hold.
    ``attention_part_of_prefill``: of all its products.
    """
    run.progress(0.0)
    shape = _shape(params)
    n_global = shape.n_layers - shape.n_layers_of_window()
    mixed, whole = _bill(shape, n_global, params.seq_len), _bill(shape, shape.n_layers, params.seq_len)
    metrics = {
        "cache_share_of_global": mixed.cache_bytes / whole.cache_bytes,
        "global_layers_cache_share": n_global * _layer_bytes(shape, params.seq_len, 0) / mixed.cache_bytes,
        "mixed_cache_bytes": mixed.cache_bytes,
        "attention_flop_share": mixed.attention_flop / whole.attention_flop,
        "windows_prefill_flop_share": mixed.flop / whole.flop,
        "attention_part_of_prefill": mixed.attention_flop / mixed.flop,
    }
    run.progress(0.3)
    return Result({name: float(value) for name, value in metrics.items()}, {"by_length": _by_length(shape, run)})


@dataclass(frozen=True)
class _Bill:
    cache_bytes: int
    attention_flop: int
    matrix_flop: int

    @property
    def flop(self) -> int:
        return self.attention_flop + self.matrix_flop


def _shape(params: Params) -> ModelShape:
    """The sizes of the model, with its own layers or those that were asked for."""
    shape = SHAPES[params.model]
    if params.layer_mix == "as_published":
        return shape
    period = params.global_every or 1
    kinds = tuple(not (params.global_every and n == period - 1) for n in range(period))
    return dataclasses.replace(shape, window=params.window, layers_of_window=kinds)


def _bill(shape: ModelShape, n_global: int, seq_len: int) -> _Bill:
    """A stack with so many global layers, the others with the window."""
    n_window = shape.n_layers - n_global
    pair_flop = _pair_flop(shape.n_heads, shape.d_k)
    return _Bill(
        n_global * _layer_bytes(shape, seq_len, 0) + n_window * _layer_bytes(shape, seq_len, shape.window),
        pair_flop * (n_global * _pairs(seq_len, seq_len) + n_window * _pairs(seq_len, shape.window)),
        seq_len * _matrix_flop(shape),
    )


def _layer_bytes(shape: ModelShape, seq_len: int, window: int) -> int:
    """Bytes that one layer keeps of a sequence; a window of 0 keeps all."""
    import torch

    x = torch.empty(1, seq_len, shape.d_model, dtype=torch.bfloat16, device="meta")
    return sum(t.untyped_storage().nbytes() for t in cached(shape, x, window=window))


@functools.lru_cache(maxsize=256)
def _pairs(seq_len: int, window: int) -> int:
    """Pairs of a query and a key that it sees, counted query by query."""
    import torch

    total = 0
    for start in range(0, seq_len, QUERIES_AT_ONCE):
        at = torch.arange(start, min(start + QUERIES_AT_ONCE, seq_len))
        first = (at - window + 1).clamp_min(0)
        total += int((at - first + 1).sum())
    return total


@functools.lru_cache(maxsize=64)
def _pair_flop(n_heads: int, d_k: int) -> int:
    """Operations of all heads for one query and one key."""
    import torch

    q, k, v = (torch.empty(n_heads, 1, d_k, device="meta") for _ in range(3))
    with count_operations() as counted:
        torch.bmm(torch.bmm(q, k.mT), v)
    return int(counted.products)


@functools.lru_cache(maxsize=64)
def _matrix_flop(shape: ModelShape) -> int:
    """Operations of the projections and the FFN of all layers for one token."""
    import torch

    total = 0
    for name, count, tensor in weights(shape, torch.bfloat16):
        if not name.startswith("W_") and name != "ffn":
            continue
        matrices = tensor.flatten(0, -2)  # the three of the FFN one above the other: each takes or gives d_model
        x = torch.empty(1, matrices.shape[1], dtype=torch.bfloat16, device="meta")
        with count_operations() as counted:
            torch.mm(x, matrices.mT)
        total += count * counted.products
    return total


def _by_length(shape: ModelShape, run: Run) -> Table:
    n_global = {
        "all_global": shape.n_layers,
        "mixed_layers": shape.n_layers - shape.n_layers_of_window(),
        "all_windows": 0,
    }
    bills = []
    for mix in MIXES:
        for seq_len in LENGTHS:
            run.progress(0.5)
            bills.append(_bill(shape, n_global[mix], seq_len))
    return {
        "seq_len": np.tile(LENGTHS, len(MIXES)),
        "window_layers": np.repeat(MIXES, len(LENGTHS)),
        "cache_gib": np.array([bill.cache_bytes for bill in bills]) / GIB,
        "attention_flop_part": np.array([bill.attention_flop / bill.flop for bill in bills]),
    }
