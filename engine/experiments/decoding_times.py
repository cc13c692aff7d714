r"""How long one decoding step takes on this device, with a KV cache and without, as the text grows.

At each length the next token is read twice: behind a cache that holds all tokens before it, and by a pass over all of
them. The same stack (engine/decoding.py), of plain numbers, in the number format of the run; without a cache nothing is
stored, yet keys and values are computed, as they must be.

``step_flop_ratio`` is how many times the operations of the cached step the pass takes, counted on shapes. The times
fall by less where a step is bound by reading the weights, or by the calls themselves, and not by operations.

``prefill_share``: the pass over the text that leaves a cache behind, relative to the one that does not.

Each time is the fastest of several: whatever else the machine does can only add to one, and a short piece of work that
is interrupted once takes many times as long. What takes little is repeated more often.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine import timing
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, number
from engine.decoding import KVCache, StackSizes, count_pass, draw_layers, extend


@dataclass(frozen=True)
class Params(BaseParams):
    seq_len: int = number(128, low=16, high=512, log2=True)
    n_layers: int = number(2, low=1, high=8)
    n_heads: int = number(4, low=1, high=16, log2=True)
    d_model: int = number(128, low=64, high=1024, log2=True)
    batch: int = number(1, low=1, high=16, log2=True)

    def rules(self) -> Iterator[Problem]:
        work = self.batch * self.seq_len * self.n_layers * (self.d_model**2 + self.seq_len * self.d_model // 6)
        if work > MAX_WORK:
            values = {"work": work, "limit": MAX_WORK}
            yield Problem("rule", "seq_len", self.seq_len, rule="too_long_a_pass", values=values)


METRICS = (
    Metric("step_time_ratio", measured=True),
    Metric("step_flop_ratio"),
    Metric("cached_step_time_s", "s", measured=True),
    Metric("full_pass_time_s", "s", measured=True),
    Metric("prefill_share", measured=True),
)
PLOTS = (
    Plot(
        "by_length",
        table="by_length",
        x="seq_len",
        y="step_time_s",
        by="decoding",
        x_scale="log2",
        y_scale="log10",
        y_unit="s",
        measured=("step_time_s",),
    ),
)
BUDGET_S = 0.3

MOST_REPEATS, FEWEST_REPEATS = 7, 2
REPEATED_TOKENS = 512  # a pass is repeated until it has read so many

MAX_WORK = 2**25  # a pass of which takes some 30 ms on one core


def memory_bytes(params: Params) -> int:
    """Float32: weights, twice the cache, and the activations and logits of one pass."""
    rows = params.batch * params.seq_len
    weights = params.n_layers * 12 * params.d_model**2
    activations = (4 * params.n_layers + 24) * rows * params.d_model + 6 * params.n_heads * rows * params.seq_len
    return 4 * (2 * weights + activations) + 2**20


def run(params: Params, run: Run) -> Result:
    """Times of the step that reads token ``seq_len``, and of shorter texts for the curve.

    Shapes: tokens (batch, seq_len, d_model).
    """
    sizes = StackSizes(params.n_layers, params.n_heads, params.n_heads, params.d_model)

    varied = functools.partial(timing.varied, device=run.device, dtype=run.dtype)
    layers = draw_layers(sizes, varied)
    tokens = varied(params.batch, params.seq_len, params.d_model)
    lengths = [2**n for n in range(3, 10) if 2**n < params.seq_len] + [params.seq_len]
    cached, full = [], []
    cache = KVCache(params.n_layers, room=params.seq_len)
    prefill_s = 0.0
    for done, length in enumerate(lengths):
        fraction = done / len(lengths)
        extend(layers, tokens[:, len(cache) : length - 1], cache, n_heads=params.n_heads)

        def step(length: int = length) -> None:
            cache.truncate(length - 1)
            extend(layers, tokens[:, length - 1 : length], cache, n_heads=params.n_heads)

        def whole(length: int = length) -> None:
            extend(layers, tokens[:, :length], _Nothing(params.n_layers), n_heads=params.n_heads)

        def report(fraction: float = fraction) -> None:
            run.progress(fraction)

        cached.append(min(timing.times_s(step, run.device, report, repeats=MOST_REPEATS)))
        repeats = max(FEWEST_REPEATS, min(MOST_REPEATS, REPEATED_TOKENS // length))
        full.append(min(timing.times_s(whole, run.device, report, repeats=repeats)))
        if length == params.seq_len:

            def prefill(length: int = length) -> None:
                extend(layers, tokens[:, :length], KVCache(params.n_layers, room=length), n_heads=params.n_heads)

            prefill_s = min(timing.times_s(prefill, run.device, report, repeats=repeats))
    bill = count_pass(sizes, params.batch, params.seq_len, params.seq_len)
    metrics = {
        "step_time_ratio": full[-1] / cached[-1],
        "step_flop_ratio": bill.flop / count_pass(sizes, params.batch, 1, params.seq_len).flop,
        "cached_step_time_s": cached[-1],
        "full_pass_time_s": full[-1],
        "prefill_share": prefill_s / full[-1],
    }
    table = {
        "seq_len": np.tile(lengths, 2),
        "decoding": np.repeat(["with_cache", "without_cache"], len(lengths)),
        "step_time_s": np.array(cached + full),
    }
    return Result(metrics, {"by_length": table})


class _Nothing(KVCache):
    """A cache that keeps nothing: keys and values serve their pass and are gone."""

    def append(self, layer, k, v):  # type: ignore[no-untyped-def]
        return k, v
