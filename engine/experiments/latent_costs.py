r"""What latent attention caches, reads and computes in a decode step, at the sizes of DeepSeek-V2 and V3.

One layer and one sequence, on one of ``n_gpus`` in tensor parallelism: its heads are divided, the latent is not. The
last ``q_len`` of ``kv_len`` tokens are queries, and there is no mask. Everything runs on tensors without storage; the
operations of the matrix products are counted while they run, two for a multiply-add. Three ways to the same output:

- ``absorbed``: W_UK is multiplied to the queries, all heads read the latent and the rotary key as one key of
  ``kv_rank + d_rope`` numbers, and the latent as value; W_UV comes behind.
- ``expanded``: k and v of every head are computed from the cached latents first.
- ``expanded_cached``: k and v of every head stand in the cache.

The projections of the new tokens, which all three need, are left out.

Sources: deepseek2024, sections 2.1.2 to 2.1.4, 3.2.3 (six bits a number) and abstract; vllm-mla, the comment at the top
(``forward_mha`` and ``forward_mqa``); flashmla-deep-dive, "A Theoretical Analysis of the MLA Algorithm" (operations a
byte); deepseek-67b-config (the model that DeepSeek-V2 was compared with).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.attention import context, qk_product
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.model_shapes import SHAPES, ModelShape, cached, kv_heads_on_one
from engine.operations import count_operations

COMPARED = {name: SHAPES[name] for name in ("llama_3_70b", "llama_3_8b", "llama_2_7b")} | {
    "deepseek_67b": ModelShape("deepseek-67b-config", 95, 8192, 64, 8, 128, 22016, 102400)
}


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("deepseek_v3", "deepseek_v2")
    compared_with: str = choice(*COMPARED)
    q_len: int = number(1, low=1, high=65536, log2=True)
    kv_len: int = number(4096, low=1, high=2**20, log2=True)
    n_gpus: int = number(1, low=1, high=32, log2=True)
    latent_bits: int = number(16, low=4, high=16)

    def rules(self) -> Iterator[Problem]:
        if self.q_len > self.kv_len:
            yield Problem("rule", "q_len", self.q_len, rule="queries_among_tokens", values={"kv_len": self.kv_len})
        other = COMPARED[self.compared_with]
        if other.n_heads % self.n_gpus or SHAPES[self.model].n_heads % self.n_gpus:
            values = {"n_heads": other.n_heads}
            yield Problem("rule", "n_gpus", self.n_gpus, rule="gpus_divide_heads", values=values)


METRICS = (
    Metric("latent_numbers"),
    Metric("absorbed_over_expanded"),
    Metric("latent_flop_per_cache_byte", "flop/byte"),
    Metric("compared_numbers"),
    Metric("own_mha_numbers"),
    Metric("expanded_numbers"),
    Metric("cache_saved"),
    Metric("absorbed_flop", "flop"),
    Metric("expanded_flop", "flop"),
    Metric("expanded_cached_flop", "flop"),
    Metric("compared_flop_per_cache_byte", "flop/byte"),
    Metric("separate_weights"),
    Metric("merged_weights"),
)
PLOTS = (
    Plot("numbers", table="by_cache", x="kept", y="cached_numbers", mark="bar"),
    Plot("queries", table="by_q_len", x="q_len", y="flop_per_query", by="way", x_scale="log2", y_scale="log10"),
    Plot("gpus", table="by_gpus", x="n_gpus", y="cached_numbers", by="model", x_scale="log2", y_scale="log2"),
    Plot("intensity", table="by_gpus", x="n_gpus", y="flop_per_cache_byte", by="model", x_scale="log2", y_scale="log2"),
)
BUDGET_S = 0.1

BYTES = 2  # of a cached number in bfloat16, where operations are set against bytes
GPU_COUNTS = (1, 2, 4, 8, 16)
WAYS = ("absorbed", "expanded", "expanded_cached")


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**20


def run(params: Params, run: Run) -> Result:
    """Numbers a token and layer that one GPU caches, and the operations of a step in the three ways.

    ``absorbed_over_expanded``   operations on the latents, relative to expanding them first
    ``..._flop_per_cache_byte``  operations of the attention products for each byte of the cache in 16 bits
    ``own_mha_numbers``          k and v of ``d_k`` for every head, without rotary dimensions
    ``cache_saved``              of the whole model on one GPU, ``latent_bits`` a number against 16
    ``merged_weights``           W_UQ · W_UK and W_UV · W_O of all heads, multiplied out; ``separate``: left as they are
    """
    run.progress(0.0)
    shape, other = SHAPES[params.model], COMPARED[params.compared_with]
    plain = dataclasses.replace(shape, kv_rank=0, d_rope=0)
    kept = {
        "own_mha": _numbers(plain, params.n_gpus),
        "expanded": _numbers(dataclasses.replace(shape, kv_rank=0), params.n_gpus),
        "compared": _numbers(other, params.n_gpus),
        "latent": _numbers(shape, params.n_gpus),
    }
    heads = shape.n_heads // params.n_gpus
    flop = {way: float(_flop(shape, way, heads, params.q_len, params.kv_len)) for way in WAYS}
    separate, merged = _weights(shape)
    run.progress(0.3)
    whole_other, whole = (m.n_layers * _numbers(m, 1) for m in (other, shape))
    metrics = {
        "latent_numbers": float(kept["latent"]),
        "absorbed_over_expanded": flop["absorbed"] / flop["expanded"],
        "latent_flop_per_cache_byte": _intensity(shape, params.n_gpus, params.q_len, params.kv_len),
        "compared_numbers": float(kept["compared"]),
        "own_mha_numbers": float(kept["own_mha"]),
        "expanded_numbers": float(kept["expanded"]),
        "cache_saved": 1 - whole * params.latent_bits / (whole_other * 16),
        "absorbed_flop": flop["absorbed"],
        "expanded_flop": flop["expanded"],
        "expanded_cached_flop": flop["expanded_cached"],
        "compared_flop_per_cache_byte": _intensity(other, params.n_gpus, params.q_len, params.kv_len),
        "separate_weights": float(separate),
        "merged_weights": float(merged),
    }
    by_q_len = _by_q_len(params, shape, heads)
    run.progress(0.7)
    tables = {
        "by_cache": {"kept": np.array(list(kept)), "cached_numbers": np.array(list(kept.values()))},
        "by_q_len": by_q_len,
        "by_gpus": _by_gpus(params, {params.model: shape, params.compared_with: other}),
    }
    return Result({metric.name: metrics[metric.name] for metric in METRICS}, tables)


def _numbers(shape: ModelShape, n_gpus: int) -> int:
    """What one layer caches of a token on one GPU."""
    import torch

    x = torch.empty(1, 1, shape.d_model, dtype=torch.bfloat16, device="meta")
    return sum(t.numel() for t in cached(shape, x, n_gpus))


def _flop(shape: ModelShape, way: str, n_heads: int, q_len: int, kv_len: int) -> int:
    """Operations of the matrix products; ``latent`` are those of the absorbed form with the cached tokens alone.

    Shapes: q (n_heads, q_len, d_k), q_rope (n_heads, q_len, d_rope), latent (kv_len, kv_rank), k_rope (kv_len, d_rope).
    """
    import torch

    empty = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    d_k, d_rope, rank = shape.d_k, shape.d_rope, shape.kv_rank
    q, q_rope = empty(n_heads, q_len, d_k), empty(n_heads, q_len, d_rope)
    latent, k_rope = empty(kv_len, rank), empty(kv_len, d_rope)
    W_uk, W_uv = empty(n_heads, d_k, rank), empty(n_heads, d_k, rank)
    q_latent = empty(n_heads, q_len, rank)
    k, v = empty(n_heads, kv_len, d_k), empty(n_heads, kv_len, d_k)
    with count_operations() as counted:
        if way == "absorbed":
            q_latent = q @ W_uk
        if way == "expanded":
            k, v = latent @ W_uk.mT, latent @ W_uv.mT
        if way in ("absorbed", "latent"):
            q, k, v = q_latent, latent, latent
        out = context(qk_product(q, k) + qk_product(q_rope, k_rope), v)
        if way == "absorbed":
            out = out @ W_uv.mT
    return counted.products


def _intensity(shape: ModelShape, n_gpus: int, q_len: int, kv_len: int) -> float:
    """Operations of the attention products of a GPU's heads for each byte of its cache."""
    import torch

    if shape.kv_rank:
        flop = _flop(shape, "latent", shape.n_heads // n_gpus, q_len, kv_len)
    else:
        n_kv_heads = kv_heads_on_one(shape, n_gpus)
        queries = shape.n_heads // n_gpus // n_kv_heads * q_len  # all that read one key head
        q = torch.empty(n_kv_heads, queries, shape.d_k, dtype=torch.bfloat16, device="meta")
        k = torch.empty(n_kv_heads, kv_len, shape.d_k, dtype=torch.bfloat16, device="meta")
        with count_operations() as counted:
            context(qk_product(q, k), k)
        flop = counted.products
    return flop / (kv_len * _numbers(shape, n_gpus) * BYTES)


def _weights(shape: ModelShape) -> tuple[int, int]:
    """Numbers of W_UQ, W_UK, W_UV and W_O of the content dimensions, and of the two products of each head."""
    import torch

    empty = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    W_uq = empty(shape.n_heads, shape.d_k, shape.q_rank)
    W_uk, W_uv = (empty(shape.n_heads, shape.d_k, shape.kv_rank) for _ in range(2))
    W_o = empty(shape.n_heads, shape.d_model, shape.d_k)
    separate = sum(W.numel() for W in (W_uq, W_uk, W_uv, W_o))
    return separate, (W_uk.mT @ W_uq).numel() + (W_o @ W_uv).numel()


def _by_q_len(params: Params, shape: ModelShape, heads: int) -> Table:
    """Operations a query, with 1, 8, 64, ... of the cached tokens as queries."""
    counts = sorted({8**n for n in range(6) if 8**n <= params.kv_len} | {params.q_len})
    ways = ("absorbed", "expanded")
    rows = [_flop(shape, way, heads, q_len, params.kv_len) / q_len for way in ways for q_len in counts]
    return {
        "q_len": np.tile(counts, len(ways)),
        "way": np.repeat(ways, len(counts)),
        "flop_per_query": np.array(rows),
    }


def _by_gpus(params: Params, shapes: dict[str, ModelShape]) -> Table:
    rows = [(name, n_gpus) for name in shapes for n_gpus in GPU_COUNTS]
    return {
        "model": np.array([name for name, _ in rows]),
        "n_gpus": np.array([n_gpus for _, n_gpus in rows]),
        "cached_numbers": np.array([_numbers(shapes[name], n_gpus) for name, n_gpus in rows]),
        "flop_per_cache_byte": np.array(
            [_intensity(shapes[name], n_gpus, params.q_len, params.kv_len) for name, n_gpus in rows]
        ),
    }
