r"""The KV cache of published models in bytes, what it leaves for a batch, and what other ways of estimating it give.

The inputs of one attention layer of each kind go through its projections, at full size on tensors without storage; what
the layer has to keep for later queries is counted in bytes, for as many layers as the model has of that kind. Integers
need something to be read back by: a few tokens are really quantized, with a scale in float16 for each group along the
width and a zero point where that is asked for, and give the bytes of a number. For models with k and v

.. math:: 2\cdot n_{layers}\cdot n_{kv\,heads}\cdot d_k\cdot n_{tokens}\cdot batch\cdot bytes

``model_cache_bytes`` and ``model_bytes`` are those of one GPU of ``n_gpus`` in tensor parallelism, which all work on
the same ``batch``; ``max_batch`` is what fits on each of them. ``memory_gib`` times ``usable_share`` is what weights
and cache may take together; activations and the runtime live on the rest; weights have 16 bits. Nothing here is rounded
to blocks, padded or allocated ahead: cache_growth shows that.

Sources: deepseek-v3-code, ``MLA`` with ``attn_impl`` (the latent, or expanded k and v); llama-cpp-code, ``block_q8_0``
and ``block_q4_0`` (a scale for each 32 numbers); transformers-code, ``StaticSlidingWindowLayer``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, flag, number
from engine.model_shapes import SHAPES, ModelShape, cached, weights

if TYPE_CHECKING:
    import torch

INTEGER_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("llama_3_8b", *(name for name in SHAPES if name != "llama_3_8b"))
    seq_len: int = number(4096, low=1, high=2**20, log2=True)
    batch: int = number(1, low=1, high=1024, log2=True)
    cache_dtype: str = choice("bfloat16", "float32", "float8", "int8", "int4")
    group_size: int = number(32, low=16, high=64, log2=True)
    zero_point: bool = flag(False)
    window_kept: bool = flag(True)
    n_gpus: int = number(1, low=1, high=64, log2=True)
    memory_gib: int = number(80, low=8, high=1024)
    usable_share: float = number(0.9, low=0.1, high=1.0, step=0.05)

    def rules(self) -> Iterator[Problem]:
        shape = SHAPES[self.model]
        if shape.n_heads % self.n_gpus:
            values = {"n_heads": shape.n_heads}
            yield Problem("rule", "n_gpus", self.n_gpus, rule="gpus_divide_heads", values=values)
        if not shape.kv_rank and shape.n_kv_heads % self.n_gpus and self.n_gpus % shape.n_kv_heads:
            values = {"n_kv_heads": shape.n_kv_heads}
            yield Problem("rule", "n_gpus", self.n_gpus, rule="gpus_share_kv_heads", values=values)

    def unread(self) -> frozenset[str]:
        unread = set() if self.cache_dtype in INTEGER_BITS else {"group_size", "zero_point"}
        return frozenset(unread)


METRICS = (
    Metric("model_cache_bytes", "bytes"),
    Metric("kv_cache_bytes_per_token", "bytes"),
    Metric("max_batch"),
    Metric("model_bytes", "bytes"),
    Metric("tokens_equal_weights"),
    Metric("kv_copies"),
    Metric("kv_stored_bits"),
    Metric("query_heads_cache_bytes", "bytes"),
    Metric("hidden_size_cache_bytes", "bytes"),
    Metric("split_width_cache_bytes", "bytes"),
)
PLOTS = (
    Plot(
        "memory",
        table="by_batch",
        x="batch",
        y="gib_on_gpu",
        by="memory_part",
        theory="usable_gib",
        one_law=True,
        x_scale="log2",
        y_scale="log10",
    ),
    Plot("rules", table="by_rule", x="size_rule", y="rule_gib", mark="bar"),
    Plot(
        "lengths",
        table="by_length",
        x="seq_len",
        y="sequence_gib",
        by="model",
        x_scale="log2",
        y_scale="log10",
    ),
)
BUDGET_S = 0.1

GIB = 2**30
BATCHES = tuple(2**n for n in range(11))
LENGTHS = (1024, 4096, 16384, 65536, 262144)
DRAWN_MODELS = ("llama_2_7b", "llama_3_8b", "llama_3_70b", "mistral_7b", "gemma_3_27b", "deepseek_v3")


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**20


def run(params: Params, run: Run) -> Result:
    """Count the cache of ``batch`` sequences of ``seq_len``, and set it against the weights and the memory of a GPU.

    ``max_batch``            sequences of ``seq_len`` that fit beside the weights
    ``tokens_equal_weights`` cached tokens that take as much as the weights, at the mean of this length
    ``kv_copies``            how often the cache is held in all GPUs together
    ``kv_stored_bits``       bits for each number of the cache, scales included
    ``query_heads_...``      k and v of every query head, as they stand after they were repeated or expanded
    ``hidden_size_...``      a key and a value of the width of the model
    ``split_width_...``      KV heads of the width of the model over its heads, whatever the real head width is
    """
    run.progress(0.0)
    shape = SHAPES[params.model]
    one, several = _cache_bytes(params, shape, 1), _cache_bytes(params, shape, params.batch)
    alone = _cache_bytes(params, shape, params.batch, n_gpus=1)
    per_token = several / (params.batch * params.seq_len)
    model_bytes = sum(count * tensor.nbytes for _, count, tensor in weights(shape, _dtype("bfloat16"), params.n_gpus))
    usable = params.usable_share * params.memory_gib * GIB
    numbers = _cache_bytes(dataclasses.replace(params, cache_dtype="float8"), shape, params.batch)  # a byte each
    rules = {
        "cached": alone,
        "query_heads": _cache_bytes(params, _expanded(shape), params.batch, n_gpus=1),
        "hidden_size": _cache_bytes(params, _plain(shape, 1, shape.d_model), params.batch, n_gpus=1),
        "split_width": _cache_bytes(
            params, _plain(shape, shape.n_kv_heads, shape.d_model // shape.n_heads), params.batch, n_gpus=1
        ),
    }
    metrics = {
        "model_cache_bytes": float(several),
        "kv_cache_bytes_per_token": per_token,
        "max_batch": float(max(0, (usable - model_bytes) // one)),
        "model_bytes": float(model_bytes),
        "tokens_equal_weights": model_bytes / per_token,
        "kv_copies": params.n_gpus * several / alone,
        "kv_stored_bits": 8 * several / numbers,
        "query_heads_cache_bytes": float(rules["query_heads"]),
        "hidden_size_cache_bytes": float(rules["hidden_size"]),
        "split_width_cache_bytes": float(rules["split_width"]),
    }
    by_rule = {"size_rule": np.array(list(rules)), "rule_gib": np.array(list(rules.values())) / GIB}
    run.progress(0.3)
    by_batch = _by_batch(params, shape, model_bytes, usable)
    run.progress(0.6)
    return Result(metrics, {"by_batch": by_batch, "by_rule": by_rule, "by_length": _by_length(params)})


def _by_batch(params: Params, shape: ModelShape, model_bytes: int, usable: float) -> dict[str, np.ndarray]:
    caches = np.array([_cache_bytes(params, shape, batch) for batch in BATCHES], dtype=np.float64)
    parts = {
        "model_weights": np.full(len(BATCHES), float(model_bytes)),
        "kv_cache": caches,
        "both": model_bytes + caches,
    }
    return {
        "batch": np.tile(BATCHES, len(parts)),
        "memory_part": np.repeat(list(parts), len(BATCHES)),
        "gib_on_gpu": np.concatenate(list(parts.values())) / GIB,
        "usable_gib": np.full(len(parts) * len(BATCHES), usable / GIB),
    }


def _by_length(params: Params) -> dict[str, np.ndarray]:
    """One sequence on one GPU, of some models and the chosen one, in the chosen dtype."""
    names = list(dict.fromkeys((*DRAWN_MODELS, params.model)))
    rows = []
    for name in names:
        for seq_len in LENGTHS:
            at_length = dataclasses.replace(params, model=name, seq_len=seq_len, n_gpus=1)
            rows.append(_cache_bytes(at_length, SHAPES[name], 1))
    return {
        "seq_len": np.tile(LENGTHS, len(names)),
        "model": np.repeat(names, len(LENGTHS)),
        "sequence_gib": np.array(rows) / GIB,
    }


def _expanded(shape: ModelShape) -> ModelShape:
    """Every query head with a key and a value of its own; from a latent, those that it expands to."""
    return dataclasses.replace(shape, kv_rank=0, n_kv_heads=shape.n_heads)


def _plain(shape: ModelShape, n_kv_heads: int, d_k: int) -> ModelShape:
    """k and v of other heads, without a latent."""
    return dataclasses.replace(shape, kv_rank=0, d_rope=0, n_kv_heads=n_kv_heads, d_k=d_k)


def _cache_bytes(params: Params, shape: ModelShape, batch: int, n_gpus: int | None = None) -> int:
    """Bytes on one GPU of what the layers keep: one layer of each kind, times the layers of that kind."""
    n_gpus = n_gpus or params.n_gpus
    n_window = shape.n_layers_of_window() if params.window_kept else 0
    whole = (shape.n_layers - n_window) * _layer_bytes(params, shape, batch, n_gpus, 0)
    return whole + (n_window and n_window * _layer_bytes(params, shape, batch, n_gpus, shape.window))


def _layer_bytes(params: Params, shape: ModelShape, batch: int, n_gpus: int, window: int) -> int:
    """Shapes: x (batch, seq_len, d_model)."""
    import torch

    bits = INTEGER_BITS.get(params.cache_dtype)
    dtype = _dtype("float8" if bits else params.cache_dtype)  # one byte a number, corrected below
    x = torch.empty(batch, params.seq_len, shape.d_model, dtype=dtype, device="meta")
    kept = cached(shape, x, n_gpus, window=window)
    stored = [t.untyped_storage().nbytes() for t in kept]
    if bits:
        groups = (bits, params.group_size, params.zero_point)
        return sum(n * _quantized_bytes(t.shape[-1], *groups) // t.shape[-1] for n, t in zip(stored, kept, strict=True))
    return sum(stored)


@functools.cache
def _quantized_bytes(width: int, bits: int, group_size: int, zero_point: bool) -> int:
    """Bytes of one vector of ``width`` when it is quantized. Which numbers they are does not matter."""
    import torch

    return sum(t.nbytes for t in _quantize(torch.linspace(-1, 1, width), bits, group_size, zero_point))


def _quantize(x: torch.Tensor, bits: int, group_size: int, zero_point: bool) -> tuple[torch.Tensor, ...]:
    """x as integers of 4 or 8 bits, with a scale in float16 for each group of its coordinates, and a zero point.

    Shapes: x (width,); integers (width · bits / 8,) as bytes, scales and zero points (width / group_size,).
    """
    import torch

    groups = x.unflatten(-1, (-1, math.gcd(group_size, x.shape[-1])))  # an estimated width need not be a multiple
    largest = groups.amax(-1, keepdim=True) if zero_point else groups.abs().amax(-1, keepdim=True)
    smallest = groups.amin(-1, keepdim=True) if zero_point else -largest
    scale = (largest - smallest) / (2**bits - 1)
    integers = ((groups - smallest) / scale).round().to(torch.uint8).flatten(-2)
    if bits == 4:
        integers = integers[..., 0::2] | integers[..., 1::2] << 4  # two to a byte
    side = (scale.squeeze(-1).to(torch.float16), smallest.squeeze(-1).to(torch.float16))
    return (integers, *(side if zero_point else side[:1]))


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = {
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float8": torch.float8_e4m3fn,
    }[name]
    return dtype
