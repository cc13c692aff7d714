"""What a cache takes while it grows, beside the bytes of the tokens in it: copies, spare room, padding and blocks.

A batch of prompts is decoded for ``n_steps``; nothing is computed, the tensors of the cache are allocated at full size
without storage, and the bytes of all that are held at the same time are added up whenever one is made or let go.

``cat``          each step makes a new tensor that is one token longer, as ``torch.cat`` does. The old
                 one goes at once, or, ``keep_old``, at the end of the step: so where the caller still refers to it
``preallocate``  room for ``room_len`` tokens of every sequence at the start
``doubling``     room for twice as many tokens whenever it is full; old and new exist together while it is copied. The
                 old one goes at once, or, ``keep_old``, at the end of the step
``paged_blocks`` each sequence has blocks of ``block_size`` tokens and takes one more when the last is full

The first three hold a rectangle, so every sequence takes as much as the longest. Blocks do not, and need a kernel that
reads through a table. Prompts are drawn evenly between 1 and ``prompt_len`` tokens, or, not ``ragged``, all have
``prompt_len``.

Sources: transformers-code, ``DynamicLayer`` and ``StaticLayer``; transformers-30536 (the copy that is kept); kwon2023,
abstract (blocks).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, flag, number

if TYPE_CHECKING:
    import torch

STRATEGIES = ("cat", "preallocate", "doubling", "paged_blocks")


@dataclass(frozen=True)
class Params(BaseParams):
    strategy: str = choice(*STRATEGIES)
    batch: int = number(8, low=1, high=64, log2=True)
    prompt_len: int = number(512, low=1, high=131072, log2=True)
    ragged: bool = flag(True)
    n_steps: int = number(64, low=1, high=512, log2=True)
    room_len: int = number(2048, low=2, high=262144, log2=True)
    block_size: int = number(16, low=1, high=256, log2=True)
    n_layers: int = number(8, low=1, high=128, log2=True)
    keep_old: bool = flag(False)

    def rules(self) -> Iterator[Problem]:
        if self.prompt_len + self.n_steps > self.room_len:
            values = {"needed": self.prompt_len + self.n_steps}
            yield Problem("rule", "room_len", self.room_len, rule="room_holds_all_tokens", values=values)


METRICS = (
    Metric("peak_over_needed"),
    Metric("allocated_over_needed"),
    Metric("copied_over_needed"),
    Metric("peak_over_allocated"),
    Metric("peak_bytes", "bytes"),
    Metric("allocated_bytes", "bytes"),
    Metric("needed_bytes", "bytes"),
)
PLOTS = (
    Plot(
        "held",
        table="by_step",
        x="step",
        y="held_mib",
        by="strategy",
        theory="needed_mib",
        one_law=True,
    ),
    Plot("overhead", table="by_strategy", x="strategy", y="over_needed", by="moment", mark="bar"),
)
BUDGET_S = 0.1

MIB = 2**20
N_KV_HEADS, D_K = 8, 128  # of Llama 3; every ratio is the same for any others


@dataclass
class _Held:
    """Bytes of the tensors that exist, and the most that existed together since the last look."""

    now: int = 0
    most: int = 0
    copied: int = 0
    steps: list[int] = field(default_factory=list)  # the most in each step

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        self.now += tensor.untyped_storage().nbytes()
        self.most = max(self.most, self.now)
        return tensor

    def drop(self, tensor: torch.Tensor) -> None:
        self.now -= tensor.untyped_storage().nbytes()

    def end_step(self) -> None:
        self.steps.append(self.most)
        self.most = self.now


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**20


def run(params: Params, run: Run) -> Result:
    """Decode with each strategy; the metrics are those of the chosen one.

    ``needed``   bytes of the tokens that are in the cache at the end, each sequence by itself
    ``peak``     the most that is held at the same time, in any step
    ``copied``   bytes of cached tokens that growing copied from one tensor to another, in all steps
    """
    drawn = (1 + run.rand(params.batch).cpu().float() * params.prompt_len).long().clamp(max=params.prompt_len)
    lengths = drawn.tolist() if params.ragged else [params.prompt_len] * params.batch
    held = {}
    for done, strategy in enumerate(STRATEGIES):
        report = functools.partial(run.progress, done / len(STRATEGIES))
        report()
        if strategy == "paged_blocks":
            held[strategy] = _blocks(params, lengths)
        else:
            held[strategy] = _rectangle(params, lengths, strategy, report)
    needed = [_needed(params, lengths, step) for step in range(params.n_steps + 1)]
    chosen = held[params.strategy]
    peaks = {strategy: max(held[strategy].steps) for strategy in STRATEGIES}
    metrics = {
        "peak_over_needed": peaks[params.strategy] / needed[-1],
        "allocated_over_needed": chosen.now / needed[-1],
        "copied_over_needed": chosen.copied / needed[-1],
        "peak_over_allocated": peaks[params.strategy] / chosen.now,
        "peak_bytes": float(peaks[params.strategy]),
        "allocated_bytes": float(chosen.now),
        "needed_bytes": float(needed[-1]),
    }
    by_step = {
        "step": np.tile(np.arange(params.n_steps + 1), len(STRATEGIES)),
        "strategy": np.repeat(STRATEGIES, params.n_steps + 1),
        "held_mib": np.concatenate([held[s].steps for s in STRATEGIES]) / MIB,
        "needed_mib": np.tile(needed, len(STRATEGIES)) / MIB,
    }
    over = [(peaks[s] / needed[-1], held[s].now / needed[-1]) for s in STRATEGIES]
    by_strategy = {
        "strategy": np.repeat(STRATEGIES, 2),
        "moment": np.tile(["at_the_peak", "at_the_end"], len(STRATEGIES)),
        "over_needed": np.array(over).flatten(),
    }
    return Result(metrics, {"by_step": by_step, "by_strategy": by_strategy})


def _empty(*sizes: int) -> torch.Tensor:
    import torch

    return torch.empty(*sizes, dtype=torch.bfloat16, device="meta")


def _needed(params: Params, lengths: list[int], step: int) -> int:
    """Bytes of k and v of all tokens after ``step`` steps."""
    return int(_empty(params.n_layers, 2, N_KV_HEADS, sum(lengths) + step * len(lengths), D_K).nbytes)


def _rectangle(params: Params, lengths: list[int], strategy: str, report: Callable[[], None]) -> _Held:
    """One tensor for k and v of each layer; its room is that of the longest sequence, or more.

    Shapes: cache (2, batch, n_kv_heads, room, d_k).
    """
    held, longest = _Held(), max(lengths)
    room = params.room_len if strategy == "preallocate" else longest
    caches = [held.take(_empty(2, params.batch, N_KV_HEADS, room, D_K)) for _ in range(params.n_layers)]
    held.end_step()
    for n_tokens in range(longest, longest + params.n_steps):
        report()
        old = []
        for layer, cache in enumerate(caches):
            if cache.shape[-2] > n_tokens:
                continue
            room = n_tokens + 1 if strategy == "cat" else 2 * n_tokens
            caches[layer] = held.take(_empty(2, params.batch, N_KV_HEADS, room, D_K))
            held.copied += cache.nbytes
            if params.keep_old:
                old.append(cache)
            else:
                held.drop(cache)
        for cache in old:
            held.drop(cache)
        held.end_step()
    return held


def _blocks(params: Params, lengths: list[int]) -> _Held:
    """Blocks of every sequence, each with k and v of all layers; the prompts' in one piece, as in a pool."""
    held = _Held()
    block = _empty(1, params.n_layers, 2, N_KV_HEADS, params.block_size, D_K)
    counts = [math.ceil(length / params.block_size) for length in lengths]
    held.take(_empty(sum(counts), *block.shape[1:]))
    held.end_step()
    for step in range(params.n_steps):
        for sequence, length in enumerate(lengths):
            if length + step == counts[sequence] * params.block_size:  # the last one is full
                held.take(_empty(*block.shape))
                counts[sequence] += 1
        held.end_step()
    return held
