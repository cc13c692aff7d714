r"""Prefill and decode of a small decoder timed on this device, under its roofline, and a published model put beside.

A random stack (engine/decoding.py) reads prompts in one pass each, and takes decode steps behind a cache for several
batches. Before each pass memory is written, so that no weight waits in a cache of the processor, as none does in a
model of real size. Both rates of the roofline are measured here (engine/ceilings.py).

Operations are those of the products, all scores included; bytes are the weights and the cache that a pass leaves
behind, each read once. Activations are left out, and so is what every call costs however little it computes: points
stay below the roofline for both reasons, the more the smaller the model. ``model_...`` is the least time of a published
model in this number format at these rates (engine/passes.py), whether or not it would fit here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine import ceilings, timing
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.decoding import KVCache, StackSizes, count_pass, draw_layers, extend
from engine.model_shapes import PLAIN_SHAPES, SHAPES
from engine.passes import pass_time_s, pass_work


@dataclass(frozen=True)
class Params(BaseParams):
    prompt_len: int = number(64, low=1, high=512, log2=True)
    batch: int = number(16, low=1, high=64, log2=True)
    n_layers: int = number(2, low=1, high=8)
    d_model: int = number(256, low=64, high=1024, log2=True)
    model: str = choice("llama_3_8b", *(name for name in PLAIN_SHAPES if name != "llama_3_8b"))

    def rules(self) -> Iterator[Problem]:
        work = max(self.batch, self.prompt_len) * self.n_layers * self.d_model**2
        if work > MAX_WORK:
            values = {"work": work, "limit": MAX_WORK}
            yield Problem("rule", "prompt_len", self.prompt_len, rule="too_slow_to_time", values=values)


METRICS = (
    Metric("first_token_s", "s", measured=True),
    Metric("step_s", "s", measured=True),
    Metric("prompt_token_share", measured=True),
    Metric("batch_gain", measured=True),
    Metric("step_stretch", measured=True),
    Metric("step_flop_per_prompt_token"),
    Metric("model_first_token_s", "s", measured=True),
    Metric("model_step_s", "s", measured=True),
    Metric("ridge_flop_per_byte", "flop/byte", measured=True),
    Metric("copy_bytes_per_s", "bytes/s", measured=True),
    Metric("matmul_flop_per_s", "flop/s", measured=True),
)
PLOTS = (
    Plot(
        "roofline",
        table="points",
        x="flop_per_byte",
        y="flop_per_s",
        by="pass_part",
        theory="roofline_flop_per_s",
        mark="point",
        x_scale="log10",
        y_scale="log10",
        x_unit="flop/byte",
        y_unit="flop/s",
        one_law=True,
        measured=("flop_per_byte", "flop_per_s", "roofline_flop_per_s"),  # x: the ridge is one of the points
    ),
    Plot(
        "by_tokens",
        table="by_tokens",
        x="tokens_in_pass",
        y="measured_pass_ms",
        by="phase",
        theory="least_pass_ms",
        x_scale="log2",
        y_scale="log10",
        measured=("measured_pass_ms", "least_pass_ms"),
    ),
)
BUDGET_S = 0.3  # once the ceilings are known; they take half a second, once a process

MAX_WORK = 2**26  # a pass of which takes some 30 ms on one core
HEAD_WIDTH = 64
BATCHES, PROMPTS = (1, 4), (16,)
ROUNDS, REPEATS_A_ROUND = 2, 2
MODEL_SERIES = {"prefill": "model_prefill", "decode": "model_decode"}


class _Timed(NamedTuple):
    phase: str
    tokens: int
    seconds: float
    flop: int
    bytes: int

    def least_s(self, roof: ceilings.Ceilings) -> float:
        return ceilings.least_s(self.flop, self.bytes, roof)


def memory_bytes(params: Params) -> int:
    """Of the ceilings, which come first; or weights, caches, the activations of a pass, and what is displaced."""
    tokens = max(params.batch * (params.prompt_len + 1), params.prompt_len)
    weights = params.n_layers * 12 * params.d_model**2
    caches = 4 * params.n_layers * tokens * params.d_model
    scores = 4 * (params.d_model // HEAD_WIDTH) * max(params.prompt_len, params.batch) * params.prompt_len
    activations = 24 * max(params.prompt_len, params.batch) * params.d_model
    repeated = 4 * params.batch * (params.prompt_len + 1) * params.d_model
    small = timing.DISPLACED_BYTES + 4 * (2 * weights + caches + scores + activations + repeated)
    return max(ceilings.MEMORY_BYTES, small) + 2**20


def run(params: Params, run: Run) -> Result:
    """Times are the fastest of four, in two rounds.

    ``prompt_token_share``          time of a token of the prompt over that of a step at batch 1
    ``batch_gain``                  tokens a second at the chosen batch over those at batch 1
    ``step_stretch``                time of a step at the chosen batch over that at batch 1
    ``step_flop_per_prompt_token``  operations of a step at batch 1 over those of a token of the prompt

    Shapes: tokens (batch, seq_len, d_model).
    """
    run.progress(0.0)
    roof = ceilings.known_ceilings(run.device, run.dtype, lambda: run.progress(0.0))
    n_heads = params.d_model // HEAD_WIDTH
    sizes = StackSizes(params.n_layers, n_heads, n_heads, params.d_model)

    varied = functools.partial(timing.varied, device=run.device, dtype=run.dtype)
    layers = draw_layers(sizes, varied)
    weight_bytes = sum(matrix.nbytes for layer in layers for matrix in layer.values())
    passes = [("prefill", n) for n in sorted({*(n for n in PROMPTS if n < params.prompt_len), params.prompt_len})]
    passes += [("decode", n) for n in sorted({*(n for n in BATCHES if n < params.batch), params.batch, 1})]

    def prepared(phase: str, n: int) -> tuple[Callable[[], None], int, int]:
        """The pass, its operations, and the bytes of weights and cache."""
        batch, before, new = (1, 0, n) if phase == "prefill" else (n, params.prompt_len, 1)
        cache = KVCache(params.n_layers, room=before + new)
        if before:
            past = varied(batch, n_heads, before, sizes.d_k)
            for layer in range(params.n_layers):
                cache.append(layer, past, past)
        tokens = varied(batch, new, params.d_model)

        def work() -> None:
            cache.truncate(before)
            extend(layers, tokens, cache, n_heads=n_heads)

        work()
        cache_bytes = sum(t.nbytes for layer in range(params.n_layers) for t in cache.stored(layer))
        return work, count_pass(sizes, batch, new, before + new).flop, weight_bytes + cache_bytes

    works = {key: prepared(*key) for key in passes}
    seconds = timing.least_times_s(
        {key: work for key, (work, _, _) in works.items()},
        run.device,
        lambda done: run.progress(0.1 + 0.9 * done),
        rounds=ROUNDS,
        repeats=REPEATS_A_ROUND,
        before=timing.displacer(run.device),
    )
    found = {key: _Timed(*key, seconds[key], flop, moved) for key, (_, flop, moved) in works.items()}
    prefill, step, alone = found["prefill", params.prompt_len], found["decode", params.batch], found["decode", 1]
    model = {phase: _model(params, run, roof, phase) for phase in ("prefill", "decode")}
    metrics = {
        "first_token_s": prefill.seconds,
        "step_s": step.seconds,
        "prompt_token_share": prefill.seconds / params.prompt_len / alone.seconds,
        "batch_gain": params.batch * alone.seconds / step.seconds,
        "step_stretch": step.seconds / alone.seconds,
        "step_flop_per_prompt_token": alone.flop / (prefill.flop / params.prompt_len),
        "model_first_token_s": model["prefill"].seconds,
        "model_step_s": model["decode"].seconds,
        "ridge_flop_per_byte": ceilings.ridge_flop_per_byte(roof),
        "copy_bytes_per_s": roof.copy_bytes_per_s,
        "matmul_flop_per_s": roof.matmul_flop_per_s,
    }
    by_tokens = {
        "tokens_in_pass": np.array([one.tokens for one in found.values()]),
        "phase": np.array([one.phase for one in found.values()]),
        "measured_pass_ms": np.array([1e3 * one.seconds for one in found.values()]),
        "least_pass_ms": np.array([1e3 * one.least_s(roof) for one in found.values()]),
    }
    points = [(one.phase, one.flop / one.bytes, one.flop / one.seconds) for one in (*found.values(), *model.values())]
    return Result(metrics, {"points": ceilings.under_roofline("pass_part", points, roof), "by_tokens": by_tokens})


def _model(params: Params, run: Run, roof: ceilings.Ceilings, phase: str) -> _Timed:
    """The least time of a published model: the prompt of one sequence, or a step of the batch behind it."""
    batch, q_len = (1, params.prompt_len) if phase == "prefill" else (params.batch, 1)
    works = pass_work(
        SHAPES[params.model],
        batch=batch,
        q_len=q_len,
        kv_len=params.prompt_len + (phase == "decode"),
        weight_dtype=run.dtype,
        cache_dtype=run.dtype,
        activation_dtype=run.dtype,
    )
    least = pass_time_s(works, roof.matmul_flop_per_s, roof.copy_bytes_per_s)
    counts = sum(work.flop for work in works), sum(work.bytes for work in works)
    return _Timed(MODEL_SERIES[phase], batch * q_len, least, *counts)
