r"""Attention over a KV cache in blocks that lie anywhere in a pool: its result, the slots it wastes, what it reads.

The blocks of the sequences of a batch lie mixed in the pool, and slots that they did not write hold what earlier
requests left there. A query of each then attends to its own tokens:

``block_walk``        block after block of its table, the filled slots alone, merged as an online softmax
``pool_order``        the same blocks in the order in which they lie in the pool
``gathered``          a contiguous copy of the blocks first, then attention over that
``whole_last_block``  all slots of the last block, though it may not be full
``block_means``       a softmax in each block by itself, and the plain mean of the results

The reference is attention over the same keys and values in one piece, all in float64 on the CPU. Keys are cached as
they will be used, positions included, and the query comes after all of them: no mask is needed.

Source: kwon2023, section 4.1 (attention block by block).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.paging import BlockTable, PagedCache, Paging, paged_attention

if TYPE_CHECKING:
    import torch

WAYS = ("block_walk", "pool_order", "gathered", "whole_last_block", "block_means")
BLOCK_SIZES = tuple(2**n for n in range(9))
MAX_NUMBERS = 2**21
MAX_BLOCKS = 2**13
ROUNDS = 4  # in which the sequences of the batch grow by turns
N_READ = 4  # sequences whose keys and values are stored and read; of the others there are tables alone
ERROR_FLOOR = 1e-17


@dataclass(frozen=True)
class Params(BaseParams):
    paged_read: str = choice(*WAYS)
    block_size: int = number(16, low=1, high=256, log2=True)
    batch: int = number(8, low=1, high=256, log2=True)
    longest_sequence: int = number(256, low=1, high=8192, log2=True)
    n_kv_heads: int = number(2, low=1, high=8, log2=True)
    d_k: int = number(16, low=1, high=128, log2=True)

    def rules(self) -> Iterator[Problem]:
        slots = self.batch * (self.longest_sequence + self.block_size)
        if slots * self.n_kv_heads * self.d_k > MAX_NUMBERS:
            values = {"product": slots * self.n_kv_heads * self.d_k, "limit": MAX_NUMBERS}
            yield Problem(
                "rule", "longest_sequence", self.longest_sequence, rule="too_large_a_block_pool", values=values
            )
        if slots // self.block_size > MAX_BLOCKS:
            values = {"blocks": slots // self.block_size, "limit": MAX_BLOCKS}
            yield Problem("rule", "block_size", self.block_size, rule="too_many_cache_blocks", values=values)


METRICS = (
    Metric("output_error"),
    Metric("empty_slot_share"),
    Metric("slot_accesses_per_token"),
    Metric("most_empty_slots"),
    Metric("table_entries"),
    Metric("tokens_in_blocks"),
)
PLOTS = (
    Plot(
        "waste", table="by_block_size", x="block_size", y="empty_slot_share", theory="half_block_share", x_scale="log2"
    ),
    Plot("entries", table="by_block_size", x="block_size", y="table_entries", x_scale="log2", y_scale="log10"),
    Plot("ways", table="ways", x="paged_read", y="output_error", mark="bar", y_scale="log10"),
)
BUDGET_S = 0.04


def memory_bytes(params: Params) -> int:
    """Keys and values in the pool, in one piece and gathered, in float64, and as they were drawn."""
    slots = params.batch * (params.longest_sequence + params.block_size) + 2 * params.block_size
    return 2**20 + 2 * params.n_kv_heads * params.d_k * slots * (3 * 8 + 4) + 2**8 * (slots // params.block_size)


def run(params: Params, run: Run) -> Result:
    """Every way on the same blocks; the metrics are those of the chosen one.

    ``output_error``: distance of an output from the reference by the reference's length, on average over heads and the
    first sequences. ``empty_slot_share``: slots without a token over all that are held; ``most_empty_slots``: of one
    sequence.
    ``slot_accesses_per_token``: slots of keys that are read or written for each token that is attended to.

    Shapes: keys and values (n_kv_heads, tokens, d_k), q (n_kv_heads, 1, d_k).
    """
    lengths = (1 + (run.rand(params.batch).cpu().double() * params.longest_sequence).long()).tolist()
    paging = Paging(sum(-(-n // params.block_size) for n in lengths), params.block_size)
    _shuffle(paging, run)
    tables = [BlockTable() for _ in lengths]

    def drawn(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double()

    blocks = (len(paging.references), params.n_kv_heads, params.block_size, params.d_k)
    cache = _CountedCache(paging, drawn(*blocks), drawn(*blocks))
    read = min(N_READ, len(lengths))
    whole = []
    for done in range(read):
        run.progress(0.2 * done / read)
        whole.append([drawn(params.n_kv_heads, lengths[done], params.d_k) for _ in range(2)])
    for turn in range(ROUNDS):
        run.progress(0.2 + 0.2 * turn / ROUNDS)
        for sequence, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            new = slice(length * turn // ROUNDS, length * (turn + 1) // ROUNDS)
            if new.stop == new.start:
                continue
            if sequence < read:
                cache.append(table, *(x[:, new] for x in whole[sequence]))
            else:
                paging.grow(table, new.stop - new.start)

    errors: dict[str, list[float]] = {way: [] for way in WAYS}
    accesses = 0
    for done, (table, (keys, values)) in enumerate(zip(tables, whole, strict=False)):
        q = drawn(params.n_kv_heads, 1, params.d_k)
        reference = attention(q, keys, values)
        for way in WAYS:
            run.progress(0.4 + 0.6 * done / read)
            cache.touched = 0
            out = READERS[way](q, cache, table)
            distance = (out - reference).norm(dim=-1) / reference.norm(dim=-1)
            errors[way].append(float(distance.mean()))
            accesses += cache.touched if way == params.paged_read else 0
    return Result(_metrics(params, tables, errors, accesses / sum(lengths[:read])), _tables(lengths, errors))


def _shuffle(paging: Paging, run: Run) -> None:
    """Take all blocks and give them back in a random order, as requests that came and went would have."""
    tables = [BlockTable() for _ in paging.references]
    for table in tables:
        paging.grow(table)
    for place in run.rand(len(tables)).cpu().argsort().tolist():
        paging.free(tables[place])


# --------------------------------------------------------------------------------------------------------------------
# Ways to read


class _CountedCache(PagedCache):
    """Counts the slots of keys that are read or written, in the same pass that gives the output."""

    touched = 0

    def walk(self, table: BlockTable) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for keys, values in super().walk(table):
            self.touched += keys.shape[-2]
            yield keys, values


def _walked(q: torch.Tensor, cache: _CountedCache, table: BlockTable) -> torch.Tensor:
    return paged_attention(q, cache, table)


def _in_pool_order(q: torch.Tensor, cache: _CountedCache, table: BlockTable) -> torch.Tensor:
    """The last block, which may not be full, stays the last: its place in the pool is not what says how full it is."""
    sorted_blocks = [*sorted(table.blocks[:-1]), table.blocks[-1]]
    return _walked(q, cache, BlockTable(sorted_blocks, table.length))


def _gathered(q: torch.Tensor, cache: _CountedCache, table: BlockTable) -> torch.Tensor:
    """Each slot of the blocks is read and written, then each token read."""
    keys, values = cache.gather(table)
    copied = len(table.blocks) * cache.paging.block_size
    cache.touched += 2 * copied + keys.shape[-2]
    return attention(q, keys, values)


def _with_whole_last_block(q: torch.Tensor, cache: _CountedCache, table: BlockTable) -> torch.Tensor:
    return _walked(q, cache, BlockTable(table.blocks, len(table.blocks) * cache.paging.block_size))


def _mean_of_blocks(q: torch.Tensor, cache: _CountedCache, table: BlockTable) -> torch.Tensor:
    outs = [attention(q, keys, values) for keys, values in cache.walk(table)]
    return sum(outs[1:], outs[0]) / len(outs)


READERS: dict[str, Callable[[torch.Tensor, _CountedCache, BlockTable], torch.Tensor]] = {
    "block_walk": _walked,
    "pool_order": _in_pool_order,
    "gathered": _gathered,
    "whole_last_block": _with_whole_last_block,
    "block_means": _mean_of_blocks,
}


def _metrics(
    params: Params, tables: list[BlockTable], errors: dict[str, list[float]], accesses: float
) -> dict[str, float]:
    empty = [len(table.blocks) * params.block_size - table.length for table in tables]
    tokens = sum(table.length for table in tables)
    return {
        "output_error": float(np.mean(errors[params.paged_read])),
        "empty_slot_share": sum(empty) / (sum(empty) + tokens),
        "slot_accesses_per_token": accesses,
        "most_empty_slots": float(max(empty)),
        "table_entries": float(sum(len(table.blocks) for table in tables)),
        "tokens_in_blocks": float(tokens),
    }


def _tables(lengths: list[int], errors: dict[str, list[float]]) -> dict[str, Table]:
    """The same sequences in blocks of other sizes; ``half_block_share`` is the law of half a block for each."""
    entries, mean = [], float(np.mean(lengths))
    for size in BLOCK_SIZES:
        paging = Paging(sum(-(-n // size) for n in lengths), size)
        tables = [BlockTable() for _ in lengths]
        for table, length in zip(tables, lengths, strict=True):
            paging.grow(table, length)
        entries.append(sum(len(table.blocks) for table in tables))
    sizes = np.array(BLOCK_SIZES)
    return {
        "by_block_size": {
            "block_size": sizes,
            "empty_slot_share": 1 - sum(lengths) / (np.array(entries) * sizes),
            "half_block_share": (sizes - 1) / 2 / (mean + (sizes - 1) / 2),
            "table_entries": np.array(entries),
        },
        "ways": {
            "paged_read": np.array(WAYS),
            "output_error": np.array([max(np.mean(errors[way]), ERROR_FLOOR) for way in WAYS]),
        },
    }
