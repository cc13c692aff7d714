"""A KV cache in blocks: a pool of them, block tables, reference counts, copy on write; and allocators of whole regions.

A sequence's tokens lie in blocks of ``block_size`` slots that may be anywhere in the pool; its table says in which, in
order. A block can be in several tables. :class:`Paging` keeps the tables and the counts, :class:`PagedCache` the
keys and values as well. :class:`FirstFit` and :class:`Buddy` hand out contiguous regions instead.

Source: kwon2023, sections 4.1 to 4.4 (blocks, tables, copy on write), section 5.2 (fork, append, free), sections 3.1
and 6.5 (a buddy allocator under the systems it compares with).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.tiled import absorb, empty_state, finish

if TYPE_CHECKING:
    import torch


class PoolFull(RuntimeError):
    """There are fewer free blocks than are asked for."""


@dataclass
class BlockTable:
    """Blocks of one sequence, in the order of its tokens, and how many tokens are in them."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class Copied(NamedTuple):
    """A block whose tokens have to be copied before the next write."""

    source: int
    target: int
    tokens: int


class Paging:
    """Block tables over a pool of ``n_blocks``.

    ``references``: in how many tables a block is; 0 for a free one. ``copy_on_write`` off is a mistake to be shown:
    sequences then write into blocks that others read.
    """

    def __init__(self, n_blocks: int, block_size: int, *, copy_on_write: bool = True) -> None:
        self.block_size = block_size
        self.copy_on_write = copy_on_write
        self.references = [0] * n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))  # a stack: the block that was given back last is taken first

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, n_tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-n_tokens // self.block_size)

    def grow(self, table: BlockTable, n_tokens: int = 1) -> Copied | None:
        """Room for more tokens behind those of a table, and what has to be copied before they are written, if anything.

        A full block is never written again, so only the last one can be shared and written to.

        Raises: PoolFull, and nothing has changed then.
        """
        filled = table.length % self.block_size
        shared = bool(filled) and self.copy_on_write and self.references[table.blocks[-1]] > 1
        more = self.blocks_for(table.length + n_tokens) - len(table.blocks)
        if more + shared > len(self._free):
            raise PoolFull(f"pool: got a wish for {more + shared} blocks, has {len(self._free)}")
        copied = None
        if shared:
            source, target = table.blocks[-1], self._take()
            self._release(source)
            table.blocks[-1] = target
            copied = Copied(source, target, filled)
        table.blocks += [self._take() for _ in range(more)]
        table.length += n_tokens
        return copied

    def fork(self, table: BlockTable) -> BlockTable:
        """Another sequence with the same tokens: all blocks are shared, none is copied."""
        return self._share(table.blocks, table.length)

    def full_prefix(self, table: BlockTable, n_tokens: int) -> BlockTable:
        """Another sequence that shares the blocks which the first ``n_tokens`` fill, and not the one they end in."""
        n_blocks = min(n_tokens, table.length) // self.block_size
        return self._share(table.blocks[:n_blocks], n_blocks * self.block_size)

    def free(self, table: BlockTable) -> None:
        """Let go of a sequence's blocks; those that no other table has return to the pool."""
        for block in table.blocks:
            self._release(block)
        table.blocks, table.length = [], 0

    def _share(self, blocks: list[int], length: int) -> BlockTable:
        for block in blocks:
            self.references[block] += 1
        return BlockTable(list(blocks), length)

    def _take(self) -> int:
        block = self._free.pop()
        self.references[block] = 1
        return block

    def _release(self, block: int) -> None:
        self.references[block] -= 1
        if not self.references[block]:
            self._free.append(block)


class PagedCache:
    """Keys and values of one layer in the blocks of a :class:`Paging`.

    Shapes: keys (n_blocks, n_kv_heads, block_size, d_k), values (n_blocks, n_kv_heads, block_size, d_v).
    """

    def __init__(self, paging: Paging, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.paging, self.keys, self.values = paging, keys, values

    def append(self, table: BlockTable, k: torch.Tensor, v: torch.Tensor) -> Copied | None:
        """Store new tokens behind those of a table. Shapes: k (n_kv_heads, n_tokens, d_k), v (n_kv_heads, n_tokens,
        d_v). Returns what was copied for it, if anything.

        Raises: PoolFull.
        """
        import torch

        start, n_tokens = table.length, k.shape[-2]
        copied = self.paging.grow(table, n_tokens)
        if copied:
            for stored in (self.keys, self.values):
                stored[copied.target, :, : copied.tokens] = stored[copied.source, :, : copied.tokens]
        places = torch.arange(start, start + n_tokens)
        blocks = torch.tensor(table.blocks)[places // self.paging.block_size].to(k.device)
        offsets = (places % self.paging.block_size).to(k.device)
        self.keys[blocks, :, offsets] = k.transpose(0, 1)
        self.values[blocks, :, offsets] = v.transpose(0, 1)
        return copied

    def walk(self, table: BlockTable) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each block in turn, the filled slots alone: views, nothing is copied."""
        left = table.length
        for block in table.blocks:
            filled = min(left, self.paging.block_size)
            yield self.keys[block, :, :filled], self.values[block, :, :filled]
            left -= filled

    def gather(self, table: BlockTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as one contiguous copy. Shapes: (n_kv_heads, length, d_k), (n_kv_heads, length, d_v)."""
        import torch

        blocks = torch.tensor(table.blocks, dtype=torch.long).to(self.keys.device)
        whole = (stored[blocks].transpose(0, 1).flatten(1, 2) for stored in (self.keys, self.values))
        keys, values = (x[:, : table.length] for x in whole)
        return keys, values


def paged_attention(q: torch.Tensor, cache: PagedCache, table: BlockTable) -> torch.Tensor:
    """Attention of queries that see all tokens of a table, block by block, without a contiguous copy.

    Shapes: q (n_kv_heads, q_len, d_k); returns (n_kv_heads, q_len, d_v).
    """
    state = empty_state(q, cache.values[0])
    for keys, values in cache.walk(table):
        state = absorb(state, q @ keys.mT * q.shape[-1] ** -0.5, values)
    return finish(state)[0]


# --------------------------------------------------------------------------------------------------------------------
# Contiguous regions


class FirstFit:
    """Contiguous regions of any size, each in the first gap that holds it; gaps that touch become one."""

    def __init__(self, n_slots: int) -> None:
        self._gaps = [(0, n_slots)]  # start and end, in order
        self._taken: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        return sum(end - start for start, end in self._gaps)

    def room_for(self, n_slots: int) -> int:
        """Slots that a region for so many takes."""
        return n_slots

    def take(self, n_slots: int) -> int | None:
        """Where the region begins; None if no gap holds it."""
        for number, (start, end) in enumerate(self._gaps):
            if end - start >= n_slots:
                self._gaps[number : number + 1] = [(start + n_slots, end)] if end - start > n_slots else []
                self._taken[start] = n_slots
                return start
        return None

    def give_back(self, start: int) -> None:
        end = start + self._taken.pop(start)
        number = bisect.bisect(self._gaps, (start, end))
        first = number - 1 if number and self._gaps[number - 1][1] == start else number
        last = number + 1 if number < len(self._gaps) and self._gaps[number][0] == end else number
        touching = self._gaps[first:last]
        self._gaps[first:last] = [(min([start, *(gap[0] for gap in touching)]), max([end, *(g[1] for g in touching)]))]


class Buddy:
    """Contiguous regions whose sizes are powers of two, made by halving; two free halves of one region rejoin.

    The pool is a power of two.
    """

    def __init__(self, n_slots: int) -> None:
        self._gaps: dict[int, set[int]] = {n_slots: {0}}  # starts of the free regions of each size
        self._taken: dict[int, int] = {}

    @property
    def free_slots(self) -> int:
        return sum(size * len(starts) for size, starts in self._gaps.items())

    def room_for(self, n_slots: int) -> int:
        """Slots that a region for so many takes: the next power of two."""
        return 1 << (n_slots - 1).bit_length()

    def take(self, n_slots: int) -> int | None:
        """Where the region begins; None if no free one is large enough."""
        wanted = self.room_for(n_slots)
        size = min((s for s, starts in self._gaps.items() if starts and s >= wanted), default=None)
        if size is None:
            return None
        start = min(self._gaps[size])
        self._gaps[size].remove(start)
        while size > wanted:
            size //= 2
            self._gaps.setdefault(size, set()).add(start + size)
        self._taken[start] = size
        return start

    def give_back(self, start: int) -> None:
        size = self._taken.pop(start)
        while (start ^ size) in self._gaps.get(size, ()):  # its other half is free as well
            self._gaps[size].remove(start ^ size)
            start, size = min(start, start ^ size), 2 * size
        self._gaps.setdefault(size, set()).add(start)
