r"""Attention as loops over tiles between a slow memory and a small fast one, both passes, with what they touch.

One head. The loops name what they read and write, and :class:`SlowMemory` counts the bytes of exactly these rows. With
torch tensors in the memory the loops also compute; with arrays that have no storage they only count, which is enough
for sizes that nobody would compute here. What happens between a read and a write happens in the fast memory and is
free.

``standard``        each step reads its operands once and writes its result, the logits and the weights among them
``by_keys``         the forward pass of FlashAttention: the outer loop over keys, the output read and written each time
``by_queries``      that of FlashAttention-2: the outer loop over queries, the output written once
``backward_tiled``  that of FlashAttention-2: the outer loop over keys; the weights are computed again from the
                    log-sum-exp, and the row term of the softmax gradient is rowsum(dO∘O), which needs no row of weights

Sources: dao2022, algorithms 0, 1 and 3; dao2023, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.tiled import State, absorb, empty_state, finish, tile_slices
from engine.watching import watching

if TYPE_CHECKING:
    import torch

ALL = slice(None)
STATISTIC_BYTES = 4  # maxima, sums and log-sum-exps are float32 beside 16-bit matrices


class SlowMemory:
    """Matrices and vectors by name; counts the bytes that are read from it and written to it."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays: dict[str, Any] = arrays
        self.read_bytes = self.written_bytes = 0
        self.touched: set[str] = set()

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def computes(self) -> bool:
        """Whether there are numbers in it, or only shapes."""
        return not isinstance(self.arrays["q"], np.ndarray)

    def read(self, name: str, rows: slice = ALL) -> Any:
        piece = self.arrays[name][rows]
        self.read_bytes += piece.nbytes
        self.touched.add(name)
        return piece

    def write(self, name: str, rows: slice = ALL, piece: Any = None) -> None:
        target = self.arrays[name][rows]
        self.written_bytes += target.nbytes
        if piece is not None and self.computes:
            target.copy_(piece)


def without_storage(*shape: int, number_bytes: int) -> np.ndarray:
    """An array of that shape and size of number that holds nothing: every place of it is the same one."""
    return np.broadcast_to(np.empty((), f"V{number_bytes}"), shape)


def shapes_only(q_len: int, kv_len: int, width: int, number_bytes: int) -> SlowMemory:
    """All that the loops below may touch, without any storage."""
    matrix, vector = number_bytes, max(number_bytes, STATISTIC_BYTES)
    rows = {name: without_storage(q_len, width, number_bytes=matrix) for name in ("q", "o", "do", "dq")}
    keys = {name: without_storage(kv_len, width, number_bytes=matrix) for name in ("k", "v", "dk", "dv")}
    square = {name: without_storage(q_len, kv_len, number_bytes=matrix) for name in ("s", "p", "dp", "ds")}
    statistics = {name: without_storage(q_len, number_bytes=vector) for name in ("m", "l", "lse", "row_term")}
    return SlowMemory(**rows, **keys, **square, **statistics)


def with_numbers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> SlowMemory:
    """Inputs of a head, with room for all results of the tiled passes but the gradient of the output.

    Shapes: q (q_len, d_k), k (kv_len, d_k), v (kv_len, d_v).
    """
    results = {"o": q.new_zeros(len(q), v.shape[-1])}
    results |= {name: q.new_zeros(len(q)) for name in ("l", "lse", "row_term")}
    results |= {"m": q.new_full((len(q),), -math.inf)}
    results |= {name: x.new_zeros(x.shape) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    return SlowMemory(q=q, k=k, v=v, **results)


@dataclass(frozen=True)
class Tiles:
    """How queries and keys are cut. Under a causal mask the last query sees all keys, the one before it one less."""

    q_len: int
    kv_len: int
    q_tile: int
    kv_tile: int
    causal: bool = False

    @property
    def queries(self) -> list[slice]:
        return tile_slices(self.q_len, self.q_tile)

    @property
    def keys(self) -> list[slice]:
        return tile_slices(self.kv_len, self.kv_tile)

    def hidden(self, queries: slice, keys: slice) -> bool:
        """Whether no query of the tile sees any of its keys."""
        return self.causal and keys.start > queries.stop - 1 + self.kv_len - self.q_len

    def visible(self) -> int:
        """How many tiles have to be computed."""
        return sum(not self.hidden(queries, keys) for queries in self.queries for keys in self.keys)

    def logits(self, q: torch.Tensor, k: torch.Tensor, queries: slice, keys: slice) -> torch.Tensor:
        """Scaled and masked logits of a tile; only a tile on the border of the mask needs one."""
        import torch

        logits = q @ k.mT * q.shape[-1] ** -0.5
        last_seen = queries.start + self.kv_len - self.q_len
        if self.causal and keys.stop - 1 > last_seen:
            rows = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
            columns = torch.arange(keys.start, keys.stop, device=q.device)
            logits = logits.masked_fill(columns > rows + self.kv_len - self.q_len, -math.inf)
        return logits


def sram_tiles(
    q_len: int, kv_len: int, width: int, fast_numbers: float, *, causal: bool = False
) -> tuple[Tiles, Tiles]:
    """Tiles as dao2022 cuts them for a fast memory of that many numbers: for the loops by keys, and by queries.

    A quarter of the memory holds a block of keys. The other side of a tile is at most d in the loop by keys, so that a
    tile of logits is no larger than a quarter as well; the loop by queries has the two sides exchanged.
    """
    wide = max(1, math.ceil(fast_numbers / (4 * width)))
    narrow = min(wide, width)
    return Tiles(q_len, kv_len, narrow, wide, causal), Tiles(q_len, kv_len, wide, narrow, causal)


# --------------------------------------------------------------------------------------------------------------------
# What is read and written


# What each step of the standard algorithm reads, and what it writes: algorithms 0 and 3 of dao2022.
STANDARD_FORWARD = ((("q", "k"), "s"), (("s",), "p"), (("p", "v"), "o"))
STANDARD_BACKWARD = (
    *((("p", "do"), "dv"), (("do", "v"), "dp"), (("p", "dp"), "ds")),
    *((("ds", "k"), "dq"), (("ds", "q"), "dk")),
)


def standard(memory: SlowMemory, steps: tuple[tuple[tuple[str, ...], str], ...]) -> None:
    """Only counted: engine/attention.py computes it, and autograd its gradients."""
    for operands, result in steps:
        for name in operands:
            memory.read(name)
        memory.write(result)


def by_keys(memory: SlowMemory, tiles: Tiles) -> None:
    """Algorithm 1 of dao2022. The memory begins with o = 0, l = 0, m = -inf, which is written too.

    What lies in the slow memory between two visits is normalized, as in the paper.
    """
    for name in ("o", "l", "m"):
        memory.write(name)
    for keys in tiles.keys:
        k, v = memory.read("k", keys), memory.read("v", keys)
        for queries in tiles.queries:
            if tiles.hidden(queries, keys):
                continue
            q, o, l, m = (memory.read(name, queries) for name in ("q", "o", "l", "m"))  # noqa: E741  # the paper's names
            if memory.computes:
                logits = tiles.logits(q, k, queries, keys)
                state = absorb(State(m, l, o * l[:, None]), logits, v)
                o, l, m = finish(state)[0], state.total, state.reference  # noqa: E741
            for name, piece in (("o", o), ("l", l), ("m", m)):
                memory.write(name, queries, piece)


def by_queries(memory: SlowMemory, tiles: Tiles) -> None:
    """Algorithm 1 of dao2023."""
    for queries in tiles.queries:
        q = memory.read("q", queries)
        state = empty_state(q[:, :1], memory.arrays["v"]) if memory.computes else None
        for keys in tiles.keys:
            if tiles.hidden(queries, keys):
                continue
            k, v = memory.read("k", keys), memory.read("v", keys)
            if state is not None:
                state = absorb(state, tiles.logits(q, k, queries, keys), v)
        o, lse = finish(state) if state is not None else (None, None)
        memory.write("o", queries, o)
        memory.write("lse", queries, lse)


def row_terms(memory: SlowMemory, tiles: Tiles) -> None:
    """The pass before the loop of algorithm 2 of dao2023: rowsum(dO∘O), what the softmax gradient subtracts."""
    for queries in tiles.queries:
        o, do = memory.read("o", queries), memory.read("do", queries)
        memory.write("row_term", queries, (o * do).sum(dim=-1) if memory.computes else None)


def backward_tiled(memory: SlowMemory, tiles: Tiles) -> None:
    """The loop of algorithm 2 of dao2023, after :func:`row_terms`; dq begins as 0, which is written too.

    o is not read here, though the paper lists it: with the row terms at hand nothing needs it.
    """
    memory.write("dq")
    for keys in tiles.keys:
        k, v = memory.read("k", keys), memory.read("v", keys)
        dk = dv = 0.0
        for queries in tiles.queries:
            if tiles.hidden(queries, keys):
                continue
            q, do, dq, lse, row_term = (memory.read(name, queries) for name in ("q", "do", "dq", "lse", "row_term"))
            if not memory.computes:
                memory.write("dq", queries)
                continue
            weights = (tiles.logits(q, k, queries, keys) - lse[:, None]).exp()  # no maximum, no division
            dv = dv + weights.mT @ do
            ds = weights * (do @ v.mT - row_term[:, None]) * q.shape[-1] ** -0.5
            memory.write("dq", queries, dq + ds @ k)
            dk = dk + ds.mT @ q
        memory.write("dk", keys, dk if memory.computes else None)
        memory.write("dv", keys, dv if memory.computes else None)


# --------------------------------------------------------------------------------------------------------------------
# What is computed and kept


@dataclass
class Work:
    """Counts so far: operations of matrix products (a multiply-add is two), and exponentials taken."""

    product_flop: int = 0
    exps: int = 0


@contextmanager
def count_work() -> Iterator[Work]:
    """Count products and exponentials inside the ``with`` block, those of a backward pass of autograd too."""
    from torch.utils.flop_counter import flop_registry

    counted = Work()

    def seen(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        packet = func.overloadpacket
        if packet in flop_registry:
            counted.product_flop += flop_registry[packet](*args, **kwargs, out_val=out)
        elif packet.__name__ in ("exp", "_softmax"):
            counted.exps += out.numel()

    with watching(seen):
        yield counted


@dataclass
class Kept:
    """``bytes``: what autograd holds for the backward pass, each piece of memory once."""

    bytes: int = 0


@contextmanager
def count_kept() -> Iterator[Kept]:
    """Watch what operations inside the ``with`` block save for their backward pass."""
    from torch.autograd.graph import saved_tensors_hooks

    kept, seen = Kept(), set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if (storage.data_ptr(), storage.nbytes()) not in seen:
            seen.add((storage.data_ptr(), storage.nbytes()))
            kept.bytes += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept
