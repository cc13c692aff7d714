r"""Time and memory of attention on this device, by the length of the sequence, beside the layers that are linear in it.

Three ways of the same result, without a mask: whole rows, each step of engine/attention.py with its matrix of n × n
numbers; blocks of queries, whose rows of logits are all that is held at once; and PyTorch's own call, which fuses the
steps where it can. Beside them one product with each matrix of a layer of that width: 12 d² weights, four of d × d and
two of 4d × d.

The growth when the length doubles is the local power of n: 2 for linear work, 4 for quadratic, and near 1 where a fixed
cost of starting operations hides both. Times are of this device at this moment. Memory is counted from the tensors that
live at once (engine/live_memory.py), beside q, k and v; buffers inside a kernel are not seen.

Source: rabe2021, section 2 (blocks of queries need no square in memory).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import timing
from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, number
from engine.live_memory import count_live
from engine.operations import count_operations

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    seq_len: int = number(512, low=32, high=2048, log2=True)
    n_heads: int = number(1, low=1, high=16, log2=True)
    d_k: int = number(64, low=8, high=128, log2=True)
    q_tile: int = number(64, low=8, high=1024, log2=True)

    def rules(self) -> Iterator[Problem]:
        logits, limit = self.n_heads * self.seq_len**2, MAX_LOGITS * WIDTH // max(WIDTH, self.d_k)
        if logits > limit:
            values: dict[str, object] = {"logits": logits, "limit": limit, "d_k": self.d_k}
            yield Problem("rule", "seq_len", self.seq_len, rule="too_many_logits_to_time", values=values)
        products = 12 * (self.n_heads * self.d_k) ** 2 * self.seq_len
        if products > MAX_PRODUCTS:
            values = {"products": products, "limit": MAX_PRODUCTS}
            yield Problem("rule", "seq_len", self.seq_len, rule="too_many_weight_products_to_time", values=values)


METRICS = (
    Metric("whole_rows_growth", measured=True),
    Metric("fused_call_growth", measured=True),
    Metric("whole_rows_over_flop", measured=True),
    Metric("fused_call_over_flop", measured=True),
    Metric("attention_to_weights_flop"),
    Metric("whole_rows_s", "s", measured=True),
    Metric("fused_call_s", "s", measured=True),
    Metric("weight_products_s", "s", measured=True),
    Metric("whole_rows_live_bytes", "bytes"),
    Metric("query_blocks_live_bytes", "bytes"),
    Metric("fused_call_live_bytes", "bytes"),
    Metric("ways_difference"),
)
PLOTS = (
    Plot(
        "times",
        table="by_length",
        x="seq_len",
        y="time_ms",
        by="way",
        x_scale="log2",
        y_scale="log10",
        measured=("time_ms",),
    ),
    Plot(
        "growth",
        table="growth",
        x="seq_len",
        y="time_growth",
        by="way",
        x_scale="log2",
        measured=("time_growth",),
    ),
    Plot("live", table="live", x="seq_len", y="live_kib", by="way", x_scale="log2", y_scale="log2"),
)
BUDGET_S = 0.1

MAX_LOGITS, WIDTH = 2**22, 64  # of one call, in heads of that width, fewer in wider ones
MAX_PRODUCTS = 2**32  # of one token sequence with all weights: 0.1 s on one core
SHORTEST, POINTS = 16, 6  # lengths of the charts: the chosen one and its halves
ROUNDS, IN_A_ROUND = 3, 2  # all lengths in turn, so that a busy moment of the machine does not fall on one of them
WAYS = ("whole_rows", "query_blocks", "fused_call")
WEIGHTS = "timed_weight_products"


def memory_bytes(params: Params) -> int:
    """Inputs and outputs, four matrices of logits, and the weights with their results, at all lengths."""
    logits, width = params.n_heads * params.seq_len**2, params.n_heads * params.d_k
    return 4 * (4 * logits + 24 * params.seq_len * width + 30 * width**2) + 2**20


def run(params: Params, run: Run) -> Result:
    """All ways at the chosen length and its halves; each time is the least of several.

    ``..._growth``                 time at the chosen length over that at half of it
    ``attention_to_weights_flop``  both products of attention over the products with weights, counted
    ``..._over_flop``              the same ratio of times, over that of operations: above 1 attention takes longer than
                                   its operations say
    ``..._live_bytes``             the most tensors that live at once, with the output, beside q, k and v
    ``ways_difference``          the largest between whole rows and the two others

    Shapes: q, k, v (n_heads, n, d_k); x (n, n_heads · d_k).
    """
    lengths = _lengths(params)
    works: dict[tuple[str, int], Callable[[], object]] = {}
    live: dict[tuple[str, int], int] = {}
    for n in lengths:
        q, k, v = (timing.varied(params.n_heads, n, params.d_k, device=run.device) for _ in range(3))
        for way in WAYS:
            run.progress(0.0)
            works[way, n] = work = _attend(way, q, k, v, params.q_tile)
            with count_live(q, k, v) as counted:
                work()
            live[way, n] = counted.peak
        works[WEIGHTS, n] = _weights(params, run, n)
    times = timing.least_times_s(works, run.device, run.progress, rounds=ROUNDS, repeats=IN_A_ROUND)
    n, half = params.seq_len, params.seq_len // 2
    flop = _flop(works["whole_rows", n]) / _flop(works[WEIGHTS, n])
    whole, blocks, fused = (_attend(way, q, k, v, params.q_tile)() for way in WAYS)
    metrics = {
        "whole_rows_growth": times["whole_rows", n] / times["whole_rows", half],
        "fused_call_growth": times["fused_call", n] / times["fused_call", half],
        "whole_rows_over_flop": times["whole_rows", n] / times[WEIGHTS, n] / flop,
        "fused_call_over_flop": times["fused_call", n] / times[WEIGHTS, n] / flop,
        "attention_to_weights_flop": flop,
        "whole_rows_s": times["whole_rows", n],
        "fused_call_s": times["fused_call", n],
        "weight_products_s": times[WEIGHTS, n],
        "whole_rows_live_bytes": live["whole_rows", n],
        "query_blocks_live_bytes": live["query_blocks", n],
        "fused_call_live_bytes": live["fused_call", n],
        "ways_difference": max((whole - blocks).abs().max(), (whole - fused).abs().max()),
    }
    tables = {"by_length": _by_length(times), "growth": _growth(times, lengths), "live": _live(live)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _lengths(params: Params) -> list[int]:
    """Rising; the half of the chosen length is among them."""
    halves = [params.seq_len // 2**n for n in range(POINTS)]
    return [n for n in reversed(halves) if n >= SHORTEST]


def _attend(way: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_tile: int) -> Callable[[], torch.Tensor]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def query_blocks() -> torch.Tensor:
        out = torch.empty_like(q)
        for start in range(0, q.shape[-2], q_tile):
            rows = slice(start, start + q_tile)
            out[:, rows] = attention(q[:, rows], k, v)
        return out

    if way == "whole_rows":
        return lambda: attention(q, k, v)
    if way == "query_blocks":
        return query_blocks
    return lambda: scaled_dot_product_attention(q[None], k[None], v[None])[0]


def _weights(params: Params, run: Run, n: int) -> Callable[[], list[torch.Tensor]]:
    """A product with each matrix of a layer: those of q, k, v and the output, and the two of a plain FFN."""
    d = params.n_heads * params.d_k
    shapes = ((n, d), (n, 4 * d), (d, d), (4 * d, d))
    x, hidden, square, up = (timing.varied(*shape, device=run.device) for shape in shapes)
    return lambda: [*(x @ square for _ in range(4)), x @ up.mT, hidden @ up]


def _flop(work: Callable[[], object]) -> int:
    with count_operations() as counted:
        work()
    return counted.products


def _by_length(times: dict[tuple[str, int], float]) -> Table:
    ways, lengths = zip(*times, strict=True)
    return {
        "seq_len": np.array(lengths),
        "way": np.array(ways),
        "time_ms": 1e3 * np.array([*times.values()]),
    }


def _growth(times: dict[tuple[str, int], float], lengths: list[int]) -> Table:
    """Time at each length over that at the one before."""
    pairs = [(way, short, n) for way in (*WAYS, WEIGHTS) for short, n in itertools.pairwise(lengths)]
    return {
        "seq_len": np.array([n for _, _, n in pairs]),
        "way": np.array([way for way, _, _ in pairs]),
        "time_growth": np.array([times[way, n] / times[way, short] for way, short, n in pairs]),
    }


def _live(live: dict[tuple[str, int], int]) -> Table:
    ways, lengths = zip(*live, strict=True)
    return {"seq_len": np.array(lengths), "way": np.array(ways), "live_kib": np.array([*live.values()]) / 1024}
