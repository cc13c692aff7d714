r"""How much work a mask saves: the share of the pairs it keeps, and the tiles a kernel that skips has to compute.

A dense kernel computes every logit and then hides some: a mask saves it nothing. A kernel that works on tiles of
queries by keys leaves out the tiles without a single kept pair. Tiles on the border count in full, so it computes
more than the kept pairs, the more so the larger the tiles.

Counted, not derived: the pairs and tiles of the mask itself, and the operations of two computations of the same
output, one over all keys and one over the tiles that hold a kept pair.

Sources: pytorch-code, ``BlockMask``; flash-attention-code, ``compute_attn_1rowblock``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, context, mask_logits, qk_product, scale_value, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.chunks import oversize
from engine.masks import keep_named, kept_in_tiles
from engine.operations import count_operations

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    q_len: int = number(256, low=1, high=4096, log2=True)
    kv_len: int = number(256, low=1, high=4096, log2=True)
    mask: str = choice("causal", "window", "documents", "prefix", "no_mask")
    corner: str = choice("bottom_right", "top_left")
    tile: int = number(32, low=1, high=512, log2=True)
    prefix_tokens: int = number(64, low=1, high=4096, log2=True)
    window: int = number(64, low=1, high=4096, log2=True)
    document_len: int = number(64, low=1, high=4096, log2=True)
    d_k: int = number(64, low=1, high=256, log2=True)

    def unread(self) -> frozenset[str]:
        of_masks = {"prefix": "prefix_tokens", "window": "window", "documents": "document_len"}
        idle = {field for mask, field in of_masks.items() if mask != self.mask}
        return frozenset(idle | ({"corner"} if self.mask == "no_mask" or self.q_len == self.kv_len else set()))

    def rules(self) -> Iterator[Problem]:
        yield from oversize(q_len=self.q_len, kv_len=self.kv_len, width=self.d_k)


METRICS = (
    Metric("kept_share"),
    Metric("tiles_kept_share"),
    Metric("flops_share"),
    Metric("kept_pairs"),
    Metric("tiles"),
    Metric("tiles_kept"),
    Metric("tiles_full"),
    Metric("empty_rows"),
    Metric("dense_flops", "flop"),
    Metric("skipping_flops", "flop"),
    Metric("output_difference"),
    Metric("hidden_weight_mean"),
)
PLOTS = (
    Plot("tiles", table="tiles", mark="heat", x="key_tile", y="query_tile", value="kept_share"),
    Plot("by_length", table="by_length", x="seq_len", y="computed_share", by="counted", x_scale="log2"),
)
BUDGET_S = 0.1

MAP_CELLS = 32  # a side of the map: longer sequences are drawn with larger tiles
LENGTHS = (16, 32, 64, 128, 256, 512)


def memory_bytes(params: Params) -> int:
    """The mask with its tile counts, all logits with their temporaries, and q, k, v with the outputs."""
    pairs = max(params.q_len * params.kv_len, LENGTHS[-1] ** 2)
    return 48 * pairs + 4 * 8 * params.d_k * (params.q_len + params.kv_len)


def run(params: Params, run: Run) -> Result:
    """One head of random q, k and v under the mask, dense and by tiles, with the operations of their products.

    ``tiles_kept``: tiles with at least one kept pair; ``tiles_full``: those of which all pairs are kept, which need no
    mask. ``empty_rows``: queries without any key; their context is zero. ``output_difference``: the largest between
    the two computations. ``hidden_weight_mean``: how much of its weight a query would put on the keys that the mask
    hides, if it did not, on average.

    Shapes: q (q_len, d_k); k, v (kv_len, d_k).
    """
    import torch

    keep = _keep(params, params.q_len, params.kv_len, run.device)
    in_tiles, sizes = kept_in_tiles(keep, params.tile), kept_in_tiles(torch.ones_like(keep), params.tile)
    q = run.randn(params.q_len, params.d_k)
    k, v = run.randn(params.kv_len, params.d_k), run.randn(params.kv_len, params.d_k)
    run.progress(0.1)
    (dense,), dense_flops = _attend([(q, k, v, keep)])
    hidden = (softmax(attention_logits(q, k)) * ~keep).sum(dim=-1)
    run.progress(0.3)

    rows, blocks = [], []
    for row, kept in enumerate((in_tiles > 0).tolist()):
        if any(kept):  # the kept tiles of a row stand next to one another under each of these masks
            first, count = kept.index(True), sum(kept)
            queries = slice(row * params.tile, (row + 1) * params.tile)
            keys = slice(first * params.tile, (first + count) * params.tile)
            rows.append(queries)
            blocks.append((q[queries], k[keys], v[keys], keep[queries, keys]))
    run.progress(0.5)
    mixed, skipping_flops = _attend(blocks)
    skipping = torch.zeros_like(dense)  # rows of tiles without any key stay zero
    for queries, out in zip(rows, mixed, strict=True):
        skipping[queries] = out
    run.progress(0.9)

    kept_pairs, tiles_kept = keep.sum().item(), (in_tiles > 0).sum().item()
    metrics = {
        "kept_share": kept_pairs / keep.numel(),
        "tiles_kept_share": tiles_kept / in_tiles.numel(),
        "flops_share": skipping_flops / dense_flops,
        "kept_pairs": kept_pairs,
        "tiles": in_tiles.numel(),
        "tiles_kept": tiles_kept,
        "tiles_full": (in_tiles == sizes).sum(),
        "empty_rows": (~keep.any(dim=-1)).sum(),
        "dense_flops": dense_flops,
        "skipping_flops": skipping_flops,
        "output_difference": (skipping - dense).abs().max(),
        "hidden_weight_mean": hidden.mean(),
    }
    tables = {"tiles": _map(params, keep), "by_length": _by_length(params, run)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _keep(params: Params, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    return keep_named(
        params.mask,
        q_len,
        kv_len,
        prefix_len=params.prefix_tokens,
        window=params.window,
        document_len=params.document_len,
        alignment=params.corner,
        device=device,
    )


def _attend(blocks: list[tuple[torch.Tensor, ...]]) -> tuple[list[torch.Tensor], int]:
    """Masked attention of each block of q, k, v and keep, zero where a row sees nothing, and the operations of all
    products. Shapes: as attention.
    """
    with count_operations() as counted:
        qk = [qk_product(q, k) for q, k, _, _ in blocks]
    weights = []
    for product, (q, _, _, keep) in zip(qk, blocks, strict=True):
        full = keep.any(dim=-1, keepdim=True)
        logits = product * scale_value("inv_sqrt_d_k", q.shape[-1])
        weights.append(softmax(mask_logits(logits, keep | ~full)) * full)
    with count_operations() as counted_too:
        mixed = [context(w, v) for w, (_, _, v, _) in zip(weights, blocks, strict=True)]
    return mixed, counted.products + counted_too.products


def _map(params: Params, keep: torch.Tensor) -> Table:
    """The share of kept pairs in each tile, in at most MAP_CELLS tiles a side."""
    import torch

    tile = max(params.tile, -(-max(keep.shape) // MAP_CELLS))
    share = kept_in_tiles(keep, tile) / kept_in_tiles(torch.ones_like(keep), tile)
    rows, columns = share.shape
    return {
        "query_tile": np.repeat(np.arange(rows), columns),
        "key_tile": np.tile(np.arange(columns), rows),
        "kept_share": share.flatten().cpu().numpy().astype(np.float32),
    }


def _by_length(params: Params, run: Run) -> Table:
    """Square masks of growing length: the share of pairs kept, and of tiles that hold one."""
    seq_len, computed, counted = [], [], []
    for n in LENGTHS:
        run.progress(0.95)
        keep = _keep(params, n, n, run.device)
        in_tiles = kept_in_tiles(keep, min(params.tile, n))
        shares = {
            "dense": 1.0,
            "skipped_tiles": ((in_tiles > 0).sum() / in_tiles.numel()).item(),
            "kept_pairs": (keep.sum() / keep.numel()).item(),
        }
        for name, share in shares.items():
            seq_len.append(n)
            computed.append(share)
            counted.append(name)
    return {"seq_len": np.array(seq_len), "computed_share": np.array(computed), "counted": np.array(counted)}
