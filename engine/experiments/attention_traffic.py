r"""How many bytes of slow memory attention reads and writes, counted from the rows that its loops touch.

One head, in a machine of two levels: a slow memory that is large enough, and a fast one that holds ``sram_kib``. The
standard algorithm writes the logits, reads them, writes the weights and reads them again; it is taken at its best,
each step reading its operands once. The tiled ones never write either:

``over_keys``     the outer loop over blocks of keys: each is read once, and for each of them all queries are read, with
                  the outputs so far, which are also written again (the first FlashAttention)
``over_queries``  the outer loop over blocks of queries: each is read once, and all keys and values for each of them;
                  the output is written once (FlashAttention-2)

Backward, the standard algorithm reads and writes three matrices as large as the logits; the tiled one goes by keys.

This is a count of an algorithm, not of a chip. Caches between the two levels, several heads at once and what else has
to fit into the fast memory are left out. Nothing is computed: the arrays have a size and no storage. Numbers have
``number_bytes``; maxima, sums and log-sum-exps at least four.

Sources: dao2022, algorithms 0, 1, 3 and theorem 2; dao2023, algorithms 1 and 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine import flash
from engine.base import BaseParams, Metric, ParamsError, Plot, Problem, Result, Run, Table, choice, flag, number

MAX_TILES = 16384


@dataclass(frozen=True)
class Params(BaseParams):
    seq_len: int = number(1024, low=1, high=16384, log2=True)
    d_k: int = number(64, low=1, high=512, log2=True)
    sram_kib: int = number(192, low=16, high=1024, step=16)
    outer_loop: str = choice("over_queries", "over_keys")
    pass_taken: str = choice("forward_pass", "backward_pass")
    queries_at_once: str = choice("all", "one")
    causal: bool = flag(False)
    tiles_from: str = choice("from_sram", "fixed_tiles")
    q_tile: int = number(128, low=1, high=4096, log2=True)
    kv_tile: int = number(64, low=1, high=4096, log2=True)
    number_bytes: int = number(2, low=1, high=8, log2=True)

    def unread(self) -> frozenset[str]:
        idle = {"q_tile", "kv_tile"} if self.tiles_from == "from_sram" else {"sram_kib"}
        if self.pass_taken == "backward_pass":
            idle |= {"outer_loop"}  # always by keys
        if self.queries_at_once == "one":
            idle |= {"causal"}  # the last query sees every key
        return frozenset(idle)

    def rules(self) -> Iterator[Problem]:
        tiles = _tiles(self)
        count = -(-tiles.q_len // tiles.q_tile) * -(-tiles.kv_len // tiles.kv_tile)
        if count > MAX_TILES:
            values = {"tiles": count, "limit": MAX_TILES}
            yield Problem("rule", "seq_len", self.seq_len, rule="too_many_tiles_of_both", values=values)


METRICS = (
    Metric("tiled_bytes", "bytes"),
    Metric("standard_bytes", "bytes"),
    Metric("standard_over_tiled"),
    Metric("read_bytes", "bytes"),
    Metric("written_bytes", "bytes"),
    Metric("least_bytes", "bytes"),
    Metric("tiles"),
    Metric("tiles_computed"),
    Metric("q_rows"),
    Metric("kv_rows"),
)
PLOTS = (
    Plot("by_length", table="by_length", x="seq_len", y="moved_mib", by="algorithm", x_scale="log2", y_scale="log2"),
    Plot(
        "by_width", table="by_width", x="d_k", y="standard_over_tiled", by="loop_order", x_scale="log2", y_scale="log2"
    ),
)
BUDGET_S = 0.015

LENGTHS = (64, 128, 256, 512, 1024, 2048)
WIDTHS = (16, 32, 64, 128, 256)
TABLE_TILES = 512  # of one point of a plot; points with more are left out


def memory_bytes(params: Params) -> int:
    """Arrays have no storage; what is left is Python's own."""
    return 2**20


def run(params: Params, run: Run) -> Result:
    """Bytes of the chosen tiled loops, of the standard algorithm, and the least that any has to move.

    ``least_bytes``: each input read and each result written once. ``q_rows`` and ``kv_rows``: of a tile.
    """
    run.progress(0.0)
    tiled = _tiled(params)
    run.progress(0.2)
    standard = _standard(params)
    run.progress(0.4)
    tiles = _tiles(params)
    metrics = {
        "tiled_bytes": tiled.bytes,
        "standard_bytes": standard.bytes,
        "standard_over_tiled": standard.bytes / tiled.bytes,
        "read_bytes": tiled.read_bytes,
        "written_bytes": tiled.written_bytes,
        "least_bytes": _least(params),
        "tiles": len(tiles.queries) * len(tiles.keys),
        "tiles_computed": tiles.visible(),
        "q_rows": min(tiles.q_tile, tiles.q_len),
        "kv_rows": min(tiles.kv_tile, tiles.kv_len),
    }
    run.progress(0.6)
    by_length = _by_length(params)
    run.progress(0.8)
    tables = {"by_length": by_length, "by_width": _by_width(params)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _q_len(params: Params) -> int:
    return 1 if params.queries_at_once == "one" else params.seq_len


def _by_keys(params: Params) -> bool:
    return params.pass_taken == "backward_pass" or params.outer_loop == "over_keys"


def _tiles(params: Params) -> flash.Tiles:
    q_len, causal = _q_len(params), params.causal
    if params.tiles_from == "fixed_tiles":
        return flash.Tiles(q_len, params.seq_len, params.q_tile, params.kv_tile, causal)
    fast_numbers = params.sram_kib * 1024 / params.number_bytes
    by_keys, by_queries = flash.sram_tiles(q_len, params.seq_len, params.d_k, fast_numbers, causal=causal)
    return by_keys if _by_keys(params) else by_queries


def _memory(params: Params) -> flash.SlowMemory:
    return flash.shapes_only(_q_len(params), params.seq_len, params.d_k, params.number_bytes)


def _tiled(params: Params) -> flash.SlowMemory:
    memory, tiles = _memory(params), _tiles(params)
    if params.pass_taken == "backward_pass":
        flash.row_terms(memory, tiles)
        flash.backward_tiled(memory, tiles)
    elif params.outer_loop == "over_keys":
        flash.by_keys(memory, tiles)
    else:
        flash.by_queries(memory, tiles)
    return memory


def _standard(params: Params) -> flash.SlowMemory:
    memory = _memory(params)
    backward = params.pass_taken == "backward_pass"
    flash.standard(memory, flash.STANDARD_BACKWARD if backward else flash.STANDARD_FORWARD)
    return memory


def _least(params: Params) -> int:
    """Inputs and results of the pass, each once."""
    names = "q k v do dq dk dv" if params.pass_taken == "backward_pass" else "q k v o"
    arrays = _memory(params).arrays
    return sum(arrays[name].nbytes for name in names.split())


def _orders(params: Params) -> tuple[str, ...]:
    return ("over_keys",) if params.pass_taken == "backward_pass" else ("over_queries", "over_keys")


def _other(params: Params, **changes: object) -> Params | None:
    """The parameters with changes, where they make few enough tiles for a point of a plot, or change nothing."""
    with contextlib.suppress(ParamsError):
        other = replace(params, **changes)  # type: ignore[arg-type]
        tiles = _tiles(other)
        itself = all(value == getattr(params, name) for name, value in changes.items() if name not in params.unread())
        if itself or len(tiles.queries) * len(tiles.keys) <= TABLE_TILES:
            return other
    return None


def _by_length(params: Params) -> Table:
    """Bytes of sequences of other lengths, the standard algorithm, both orders of the loops, and the least."""
    rows = []
    for seq_len in sorted({*LENGTHS, params.seq_len}):
        for order in _orders(params):
            if other := _other(params, seq_len=seq_len, outer_loop=order):
                rows.append((seq_len, order, _tiled(other).bytes))
                rows += [
                    (seq_len, "standard_algorithm", _standard(other).bytes),
                    (seq_len, "least_possible", _least(other)),
                ]
    lengths, algorithms, moved = zip(*dict.fromkeys(rows), strict=True)
    return {
        "seq_len": np.array(lengths),
        "moved_mib": np.array(moved) / 2**20,
        "algorithm": np.array(algorithms),
    }


def _by_width(params: Params) -> Table:
    """How many times the bytes of the tiled loops the standard algorithm moves, in heads of other widths."""
    rows = []
    for order in _orders(params):
        for d_k in sorted({*WIDTHS, params.d_k}):
            if other := _other(params, d_k=d_k, outer_loop=order):
                rows.append((d_k, order, _standard(other).bytes / _tiled(other).bytes))
    widths, orders, ratios = zip(*rows, strict=True)
    return {
        "d_k": np.array(widths),
        "standard_over_tiled": np.array(ratios),
        "loop_order": np.array(orders),
    }
