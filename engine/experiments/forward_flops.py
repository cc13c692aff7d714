r"""What a decoder computes for one token, counted part by part, beside the estimates that go by :math:`2N`.

A token meets every weight of a matrix once, with one multiplication and one addition: two operations. The table of
token vectors is only read; the unembedding is a product like any other. Attention multiplies activations with each
other, :math:`4\,n\,h\,d_k` operations a token and layer when every query meets all :math:`n` keys, and no parameter
count shows them. A mask over dense products saves none of them; a kernel that leaves out tiles saves nearly half.

Nothing is computed but shapes: one block and the unembedding run on tensors without storage, and the blocks are alike.
Operations are those of the matrix products, a multiply-add counting two; all others are counted apart.

Sources: nanogpt-456 (the two counts of attention), pytorch-code, ``sdpa_flop`` (a counter that ignores the mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import context, qk_product
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.operations import Operations, count_operations
from engine.transformer_block import (
    DecoderSizes,
    block_shapes,
    feed_forward,
    merge,
    mix,
    outer_shapes,
    project,
    unembed,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    n_layers: int = number(32, low=1, high=128)
    d_model: int = number(4096, low=64, high=16384, step=64)
    n_heads: int = number(32, low=1, high=128)
    n_kv_heads: int = number(32, low=1, high=128)
    d_k: int = number(128, low=8, high=256, step=8)
    d_ff: int = number(11008, low=64, high=65536, step=64)
    ffn: str = choice("gated", "plain")
    n_experts: int = number(1, low=1, high=256, log2=True)
    active_experts: int = number(1, low=1, high=16)
    vocabulary: int = number(32000, low=256, high=262144)
    tied_embedding: bool = flag(False)
    tokens_counted: str = choice("sequence", "decode")
    seq_len: int = number(4096, low=128, high=131072, log2=True)
    attention_kernel: str = choice("dense", "skipping")
    tile: int = number(128, low=16, high=1024, log2=True)

    def unread(self) -> frozenset[str]:
        if self.tokens_counted == "decode":  # one query, whose keys are all in its past
            return frozenset({"attention_kernel", "tile"})
        return frozenset() if self.attention_kernel == "skipping" else frozenset({"tile"})

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            values: dict[str, object] = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.active_experts > self.n_experts:
            values = {"n_experts": self.n_experts}
            yield Problem("rule", "active_experts", self.active_experts, rule="active_within_experts", values=values)
        tokens = 1 if self.tokens_counted == "decode" else self.seq_len
        dealt = tokens * self.active_experts
        if dealt % min(self.n_experts, dealt):
            values = {"dealt": dealt}
            yield Problem("rule", "n_experts", self.n_experts, rule="experts_divide_tokens", values=values)
        if "tile" not in self.unread() and self.seq_len > MOST_TILES * self.tile:
            values = {"seq_len": self.seq_len, "limit": MOST_TILES}
            yield Problem("rule", "tile", self.tile, rule="too_many_tile_rows", values=values)


METRICS = (
    Metric("forward_flop_per_token", "flop"),
    Metric("two_n_ratio"),
    Metric("two_n_to_linear"),
    Metric("attention_to_linear"),
    Metric("model_parameters"),
    Metric("projection_flop_per_token", "flop"),
    Metric("attention_flop_per_token", "flop"),
    Metric("ffn_flop_per_token", "flop"),
    Metric("head_flop_per_token", "flop"),
    Metric("flop_per_block_weight"),
    Metric("two_n_blocks_ratio"),
    Metric("two_n_attention_ratio"),
    Metric("head_share"),
    Metric("embedding_share"),
    Metric("linear_crossover_tokens"),
    Metric("ffn_crossover_tokens"),
    Metric("counter_attention_flop_per_token", "flop"),
    Metric("other_operations_share"),
    Metric("other_bytes_share"),
)
PLOTS = (
    Plot(
        "by_length",
        table="by_length",
        x="seq_len",
        y="gflop_per_token",
        by="part",
        x_scale="log2",
        y_scale="log10",
    ),
    Plot("estimates", table="estimates", x="seq_len", y="estimate_ratio", by="estimate", x_scale="log2"),
)
BUDGET_S = 0.1

MOST_TILES = 128  # rows of tiles that are worked on one after another
TABLE_TILES = 16  # the same at each length of the table
LENGTHS = tuple(2**n for n in range(9, 18))


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**21


def run(params: Params, run: Run) -> Result:
    """Count one block and the unembedding, then attention alone at every length of the table.

    Per token: over a sequence, the mean of its tokens; in decode, the one that is added with ``seq_len`` keys in all.
    ``two_n_ratio``: 2 × all parameters, relative to the count; ``two_n_to_linear``: relative to the products with
    weights alone; ``two_n_blocks_ratio``: the matrices of the blocks alone; ``two_n_attention_ratio``: every matrix
    that a token passes, and 4 · layers · tokens · heads · d_k on top. ``linear_crossover_tokens``: where attention, by
    the kernel that is chosen, costs as much as all products with weights, between whole tiles by proportion;
    ``ffn_crossover_tokens``: as much as the feed-forward network. ``counter_attention_flop_per_token``: what PyTorch's
    counter says of a fused causal kernel. The shares of other operations and bytes are of eager dense code, forward, in
    which each step is an operation of its own.
    """
    sizes = DecoderSizes(
        n_layers=params.n_layers,
        d_model=params.d_model,
        n_heads=params.n_heads,
        n_kv_heads=params.n_kv_heads,
        d_k=params.d_k,
        d_ff=params.d_ff,
        vocabulary=params.vocabulary,
        gated=params.ffn == "gated",
        tied=params.tied_embedding,
        n_experts=params.n_experts,
        active_experts=params.active_experts,
    )
    parts = _parts(params, sizes)
    run.progress(0.3)
    tokens = 1 if params.tokens_counted == "decode" else params.seq_len
    per_token = {name: counted.products / tokens for name, counted in parts.items()}
    attention = _attention_flop_per_token(params, sizes, params.seq_len, params.tile)
    linear = per_token["projections"] + per_token["ffn"] + per_token["head"]
    forward = linear + attention

    def numbers(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        return {name: _empty(shape).numel() for name, shape in shapes.items()}

    in_block, outside = numbers(block_shapes(sizes)), numbers(outer_shapes(sizes))
    matrices = {name: count for name, count in in_block.items() if name.startswith("W_")}
    used = matrices | {n: matrices[n] * sizes.active_experts / sizes.n_experts for n in matrices if n in OF_EXPERTS}
    block_weights, used_weights = params.n_layers * sum(matrices.values()), params.n_layers * sum(used.values())
    model_parameters = params.n_layers * sum(in_block.values()) + sum(outside.values())
    unembedding = outside.get("unembedding", outside["embedding"])

    lengths = {n: _attention_flop_per_token(params, sizes, n, max(params.tile, n // TABLE_TILES)) for n in LENGTHS}
    run.progress(0.9)
    own = params.n_layers * 4 * params.n_heads * params.d_k  # of the estimate, for each key

    def estimates(n: int, counted: float) -> dict[str, float]:
        return {
            "two_n": 2 * model_parameters / counted,
            "two_n_blocks": 2 * block_weights / counted,
            "two_n_attention": (2 * (used_weights + unembedding) + own * n) / counted,
        }

    first, second = (_attention_flop_per_token(params, sizes, n * params.tile, params.tile) for n in (1, 2))

    def crossing(flop: float) -> float:
        """Tokens at which attention costs that much: after a first tile in full, half as fast if tiles are skipped."""
        within = min(1, flop / first)
        return params.tile * (within + max(0.0, flop - first) / (second - first))

    here = estimates(params.seq_len, forward)
    eager = [*parts.values()]  # one block and the unembedding
    products, total = sum(c.products for c in eager), sum(c.total for c in eager)
    product_bytes, other_bytes = sum(c.product_bytes for c in eager), sum(c.other_bytes for c in eager)
    metrics = {
        "forward_flop_per_token": forward,
        "two_n_ratio": here["two_n"],
        "two_n_to_linear": 2 * model_parameters / linear,
        "attention_to_linear": attention / linear,
        "model_parameters": model_parameters,
        "projection_flop_per_token": per_token["projections"],
        "attention_flop_per_token": attention,
        "ffn_flop_per_token": per_token["ffn"],
        "head_flop_per_token": per_token["head"],
        "flop_per_block_weight": (per_token["projections"] + per_token["ffn"]) / block_weights,
        "two_n_blocks_ratio": here["two_n_blocks"],
        "two_n_attention_ratio": here["two_n_attention"],
        "head_share": per_token["head"] / forward,
        "embedding_share": (outside["embedding"] + outside.get("unembedding", 0)) / model_parameters,
        "linear_crossover_tokens": crossing(linear),
        "ffn_crossover_tokens": crossing(per_token["ffn"]),
        "counter_attention_flop_per_token": _counter_attention_flop_per_token(params, sizes),
        "other_operations_share": 1 - products / total,
        "other_bytes_share": other_bytes / (product_bytes + other_bytes),
    }
    by_part = {
        "attention_products": np.array([*lengths.values()]),
        "ffn_products": np.full(len(LENGTHS), per_token["ffn"]),
        "projection_products": np.full(len(LENGTHS), per_token["projections"]),
        "head_products": np.full(len(LENGTHS), per_token["head"]),
    }
    ratios = {n: estimates(n, linear + flop) for n, flop in lengths.items()}
    tables: dict[str, Table] = {
        "by_length": {
            "seq_len": np.tile(LENGTHS, len(by_part)),
            "part": np.repeat([*by_part], len(LENGTHS)),
            "gflop_per_token": np.concatenate([*by_part.values()]) / 1e9,
        },
        "estimates": {
            "seq_len": np.repeat(LENGTHS, len(here)),
            "estimate": np.tile([*here], len(LENGTHS)),
            "estimate_ratio": np.array([ratio for of_length in ratios.values() for ratio in of_length.values()]),
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


OF_EXPERTS = ("W_up", "W_gate", "W_down")


def _empty(shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.empty(shape, device="meta", dtype=torch.bfloat16)


def _lengths(params: Params, seq_len: int) -> tuple[int, int]:
    """Queries and keys."""
    return (1 if params.tokens_counted == "decode" else seq_len), seq_len


def _heads(params: Params, sizes: DecoderSizes, seq_len: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one layer without storage. Shapes: as in transformer_block.project."""
    q_len, kv_len = _lengths(params, seq_len)
    q = _empty((1, sizes.n_heads, q_len, sizes.d_k))
    k, v = (_empty((1, sizes.n_kv_heads, kv_len, sizes.d_k)) for _ in range(2))
    return q, k, v


def _parts(params: Params, sizes: DecoderSizes) -> dict[str, Operations]:
    """Everything counted in all layers and the unembedding, for a sequence or the one token of a decode step."""
    import torch

    weights = {name: _empty(shape) for name, shape in block_shapes(sizes).items()}
    outer = {name: _empty(shape) for name, shape in outer_shapes(sizes).items()}
    q_len, kv_len = _lengths(params, params.seq_len)
    x = _empty((1, q_len, sizes.d_model))
    q, k, v = _heads(params, sizes, params.seq_len)
    keep = None if q_len == 1 else torch.empty(q_len, kv_len, device="meta", dtype=torch.bool)
    work: dict[str, Callable[[], object]] = {
        "projections": lambda: merge(weights, project(weights, sizes, x)[0], x),
        "attention": lambda: mix(q, k, v, keep),
        "ffn": lambda: feed_forward(weights, sizes, x),
        "head": lambda: unembed(outer, x),
    }
    found = {}
    for name, part in work.items():
        with count_operations() as counted:
            part()
        found[name] = counted if name == "head" else _times(counted, sizes.n_layers)
    return found


def _times(counted: Operations, times: int) -> Operations:
    return Operations(*(times * getattr(counted, name) for name in Operations.__dataclass_fields__))


def _attention_flop_per_token(params: Params, sizes: DecoderSizes, seq_len: int, tile: int) -> float:
    """Of both products in all layers. A kernel that skips takes the queries by tiles, each with the keys up to its end.

    Shapes: q (1, n_heads, q_len, d_k), the heads of a group as rows of one product with their keys.
    """
    q, k, v = _heads(params, sizes, seq_len)
    q_len, kv_len = q.shape[2], k.shape[2]
    rows = q.unflatten(1, (sizes.n_kv_heads, -1))  # (1, n_kv_heads, group, q_len, d_k)
    skips = params.attention_kernel == "skipping" and params.tokens_counted == "sequence"
    starts = range(0, q_len, tile) if skips else range(1)
    with count_operations() as counted:
        for start in starts:
            queries = rows[..., start : start + tile, :] if skips else rows
            keys = slice(0, min(start + tile, kv_len) if skips else kv_len)
            logits = qk_product(queries.flatten(2, 3), k[:, :, keys])
            context(logits, v[:, :, keys])  # softmax keeps the shape and multiplies no matrices: it is left out
    return float(sizes.n_layers * counted.products / q_len)


def _counter_attention_flop_per_token(params: Params, sizes: DecoderSizes) -> float:
    """What PyTorch's counter says of its fused kernel, told to be causal."""
    import torch

    q, k, v = _heads(params, sizes, params.seq_len)
    with count_operations() as counted:
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return float(sizes.n_layers * counted.products / q.shape[2])
