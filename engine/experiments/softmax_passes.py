r"""How often a softmax goes to slow memory, counted while it runs.

The rows lie in a memory that counts every number that is read from it and written to it; a cache in front of it holds
the pieces used last. The ways:

``naive``   exponentials of the logits themselves: one pass for the sum, one for the weights; overflows
``safe``    one pass for the maximum, one for the sum, one for the weights
``online``  maximum and sum in one pass, one for the weights
``fused``   maximum, sum and the weighted sum of the values in one pass: no weight is ever written

Where the weights themselves are wanted, nothing can be fused. Where a weighted sum of values is wanted, the other three
write their weights and read them once more. Reads of the values and the output are the same for all and not counted.

Exponentials are counted too: the factors that rescale are on top of one for each logit and pass.

Source: online-softmax-code (passes of the first three).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.attention import softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.tiled import absorb, empty_state, finish, finite_or_zero, next_reference, tile_slices

if TYPE_CHECKING:
    import torch

WAYS = ("naive", "safe", "online", "fused")
MAX_PIECES = 256


@dataclass(frozen=True)
class Params(BaseParams):
    way: str = choice("online", "naive", "safe", "fused")
    produced: str = choice("weighted_sum", "weights")
    kv_len: int = number(2048, low=1, high=16384, log2=True)
    tile_len: int = number(256, low=1, high=16384, log2=True)
    cache_numbers: int = number(1024, low=0, high=65536, step=1024)
    logits_std: float = number(2.0, low=0, high=64, step=0.5)
    logits_mean: float = number(0.0, low=-400, high=400, step=50)

    def rules(self) -> Iterator[Problem]:
        if self.way == "fused" and self.produced == "weights":
            yield Problem("rule", "way", self.way, rule="fused_writes_no_weights")
        pieces = -(-self.kv_len // self.tile_len)
        if pieces > MAX_PIECES:
            values = {"tiles": pieces, "limit": MAX_PIECES}
            yield Problem("rule", "tile_len", self.tile_len, rule="too_many_tiles", values=values)


METRICS = (
    Metric("reads_per_logit"),
    Metric("accesses_per_logit"),
    Metric("exps_per_logit"),
    Metric("output_error"),
    Metric("undefined_rows"),
    Metric("safe_over_way"),
)
PLOTS = (
    Plot("accesses", table="accesses", mark="bar", x="way", y="per_logit", by="access"),
    Plot("by_length", table="by_length", x="kv_len", y="accesses_per_logit", by="way", x_scale="log2"),
)
BUDGET_S = 0.02

D_V = 8
LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def memory_bytes(params: Params) -> int:
    """Logits, weights and values of the longest row, with what one pass holds of them."""
    return 8 * (8 + 4 * D_V) * max(params.kv_len, LENGTHS[-1]) + 2**18


class _Memory:
    """Named rows in slow memory, read and written piece by piece through a cache of the pieces used last.

    A piece is fetched only where it is not in the cache; what is written goes through to memory and stays in the cache.
    """

    def __init__(self, cache_numbers: int) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        self.cache: OrderedDict[tuple[str, int], int] = OrderedDict()
        self.cache_numbers = cache_numbers
        self.cached = self.reads = self.writes = 0

    def read(self, name: str, keys: slice) -> torch.Tensor:
        piece = self.rows[name][keys]
        if (name, keys.start) not in self.cache:
            self.reads += piece.numel()
        self._keep(name, keys, piece.numel())
        return piece

    def write(self, name: str, keys: slice, piece: torch.Tensor) -> None:
        self.rows[name][keys] = piece
        self.writes += piece.numel()
        self._keep(name, keys, piece.numel())

    def _keep(self, name: str, keys: slice, size: int) -> None:
        self.cached += size - self.cache.pop((name, keys.start), 0)
        self.cache[name, keys.start] = size
        while self.cached > self.cache_numbers:
            self.cached -= self.cache.popitem(last=False)[1]


@contextmanager
def _count_exps() -> Iterator[list[int]]:
    """How many exponentials are taken inside the ``with`` block, by the numbers that come out."""
    import torch
    from torch.overrides import TorchFunctionMode

    counted = [0]

    class Counter(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.Tensor.exp:
                counted[0] += out.numel()
            return out

    with Counter():
        yield counted


def run(params: Params, run: Run) -> Result:
    """One row by each way; the metrics are those of the chosen one, per logit of the row.

    ``safe_over_way``: accesses of the safe softmax by those of the chosen way. ``undefined_rows``: 1 if the output has
    a number that is not finite, whose error then counts as 1.

    Shapes: logits (kv_len,), v (kv_len, d_v).
    """

    logits = params.logits_std * run.randn(max(params.kv_len, LENGTHS[-1])) + params.logits_mean
    v = run.randn(len(logits), D_V)
    ways = [way for way in WAYS if way != "fused" or params.produced == "weighted_sum"]
    run.progress(0.1)
    found, exps = {}, {}
    for way in ways:
        with _count_exps() as counted:
            found[way] = _go(way, logits[: params.kv_len], v[: params.kv_len], params)
        exps[way] = counted[0]
    run.progress(0.5)

    n = params.kv_len
    out, memory = found[params.way]
    exact_logits, exact_v = logits[:n].cpu().double(), v[:n].cpu().double()
    weights = softmax(exact_logits)
    reference = weights @ exact_v if params.produced == "weighted_sum" else weights
    out = out.cpu().double()
    defined = bool(out.isfinite().all())
    metrics = {
        "reads_per_logit": memory.reads / n,
        "accesses_per_logit": (memory.reads + memory.writes) / n,
        "exps_per_logit": exps[params.way] / n,
        "output_error": (out - reference).norm() / reference.norm() if defined else 1.0,
        "undefined_rows": not defined,
        "safe_over_way": _accesses(found["safe"][1]) / _accesses(memory),
    }
    table: dict[str, list[object]] = {"way": [], "per_logit": [], "access": []}
    for way in ways:
        counts = found[way][1]
        for access, count in (("read", counts.reads), ("written", counts.writes), ("exponential", exps[way])):
            for column, value in zip(table, (way, count / n, access), strict=True):
                table[column].append(value)
    lengths = [
        (way, size, _accesses(_go(way, logits[:size], v[:size], params)[1]) / size)
        for size in LENGTHS
        if -(-size // params.tile_len) <= MAX_PIECES
        for way in ways
    ]
    run.progress(0.95)
    columns = zip(*lengths, strict=True)
    tables = {
        "accesses": {name: np.array(values) for name, values in table.items()},
        "by_length": dict(zip(("way", "kv_len", "accesses_per_logit"), map(np.array, columns), strict=True)),
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _accesses(memory: _Memory) -> int:
    return memory.reads + memory.writes


def _go(way: str, logits: torch.Tensor, v: torch.Tensor, params: Params) -> tuple[torch.Tensor, _Memory]:
    """The weights, or the weighted sum of the values, and the memory with its counts."""
    memory = _Memory(params.cache_numbers)
    memory.rows = {"logits": logits, "weights": logits.new_empty(len(logits))}
    slices = tile_slices(len(logits), params.tile_len)
    if way == "fused":
        return _fused(memory, slices, v), memory
    m, total = {"naive": _naive, "safe": _safe, "online": _online}[way](memory, slices)
    for keys in slices:
        memory.write("weights", keys, (memory.read("logits", keys) - m).exp() / total)
    if params.produced == "weights":
        return memory.rows["weights"], memory
    out = v.new_zeros(v.shape[-1])
    for keys in slices:
        out = out + memory.read("weights", keys) @ v[keys]
    return out, memory


def _naive(memory: _Memory, slices: list[slice]) -> tuple[float | torch.Tensor, torch.Tensor]:
    return 0.0, sum(memory.read("logits", keys).exp().sum() for keys in slices)


def _safe(memory: _Memory, slices: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    m = torch.stack([memory.read("logits", keys).amax() for keys in slices]).amax()
    return m, sum((memory.read("logits", keys) - m).exp().sum() for keys in slices)


def _online(memory: _Memory, slices: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = memory.rows["logits"]
    m, total = logits.new_tensor(-math.inf), logits.new_zeros(())
    for keys in slices:
        tile = memory.read("logits", keys)
        before, m = m, next_reference(m, tile.amax())
        base = finite_or_zero(m)
        total = total * (before - base).exp() + (tile - base).exp().sum()
    return m, total


def _fused(memory: _Memory, slices: list[slice], v: torch.Tensor) -> torch.Tensor:
    state = empty_state(memory.rows["logits"][None, :0], v)
    for keys in slices:
        tile = memory.read("logits", keys)
        state = absorb(state, tile[None], v[keys])
    return finish(state)[0][0]
