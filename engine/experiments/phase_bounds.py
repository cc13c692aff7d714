r"""How long a pass of a published model takes at the least: over a prompt (prefill) or over new tokens (decode).

Operations and bytes are counted on tensors of full size without storage (engine/passes.py); the two rates are given,
as a data sheet states them. An operation takes :math:`\max(\text{FLOP}/P,\ \text{bytes}/B)`, and operations run one
after the other, so a pass takes the sum. Below it no kernel comes, all stay above: this is a bound, not a forecast.

A pass of T tokens does some 2T operations for each weight that it reads. In prefill T is the length of the prompts, in
decode the batch. Keys and values are read once for each sequence, in decode for a single query a head.

``tokens_per_step`` above 1 in decode: a draft that is checked, or a piece of a prompt behind its cached beginning.
Logits are made for the last token of a sequence. Queueing, starts of kernels and communication are left out.

Sources: h100-sheet (the default rates: half of the 1979 TFLOP/s that are stated with sparsity, and 3350 GB/s).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.model_shapes import PLAIN_SHAPES, SHAPES, weights
from engine.passes import ATTENTION, LINEAR, Work, linear_work, pass_time_s, pass_work

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("llama_3_8b", *(name for name in PLAIN_SHAPES if name != "llama_3_8b"))
    phase: str = choice("decode", "prefill")
    batch: int = number(1, low=1, high=1024, log2=True)
    seq_len: int = number(1024, low=1, high=131072, log2=True)
    tokens_per_step: int = number(1, low=1, high=4096, log2=True)
    weight_dtype: str = choice("bfloat16", "float8")
    cache_dtype: str = choice("bfloat16", "float8")
    matmul_tflop_per_s: float = number(989.0, low=0.1, high=5000)
    memory_gb_per_s: float = number(3350.0, low=10, high=20000)

    def rules(self) -> Iterator[Problem]:
        if self.phase == "decode" and self.tokens_per_step > self.seq_len:
            yield Problem(
                "rule",
                "tokens_per_step",
                self.tokens_per_step,
                rule="new_within_sequence",
                values={"seq_len": self.seq_len},
            )


METRICS = (
    Metric("pass_bound_ms"),
    Metric("memory_over_compute"),
    Metric("tokens_per_s"),
    Metric("compute_bound_share"),
    Metric("linear_memory_over_compute"),
    Metric("attention_memory_over_compute"),
    Metric("compute_bound_from_tokens"),
    Metric("weight_read_bytes", "bytes"),
    Metric("cache_moved_bytes", "bytes"),
    Metric("activation_bytes", "bytes"),
    Metric("tokens_equal_reads"),
    Metric("flop_per_token", "flop"),
    Metric("linear_flop", "flop"),
    Metric("attention_flop", "flop"),
    Metric("pass_over_two_n"),
    Metric("held_bytes", "bytes"),
)
PLOTS = (
    Plot(
        "intensity",
        table="by_tokens",
        x="tokens_in_pass",
        y="flop_per_byte",
        by="pass_part",
        theory="turning_flop_per_byte",
        x_scale="log2",
        y_scale="log10",
        y_unit="flop/byte",
        one_law=True,
    ),
    Plot("step", table="by_batch", x="batch", y="part_time_ms", by="pass_part", x_scale="log2", y_scale="log10"),
    Plot("throughput", table="throughput", x="batch", y="tokens_per_s", by="kv_len", x_scale="log2", y_scale="log10"),
    Plot(
        "first_token",
        table="by_prompt",
        x="prompt_len",
        y="first_pass_ms",
        by="estimate",
        x_scale="log2",
        y_scale="log10",
    ),
)
BUDGET_S = 0.05

BATCHES = tuple(2**n for n in range(0, 11, 2))
LENGTHS = (512, 8192, 131072)
PROMPTS = (1, 8, 64, 128, 256, 512, 1024, 4096, 16384, 131072)
SEARCHED = 2**20  # tokens up to which a turning point is looked for


def memory_bytes(params: Params) -> int:
    """Tensors have no storage, but for the numbers of keys that the queries of a pass see."""
    return 2**20 + 24 * max(PROMPTS[-1], params.seq_len)


def run(params: Params, run: Run) -> Result:
    """Counts and the least time of the chosen pass, and both phases around it for the charts.

    ``memory_over_compute``        time to move all bytes over time to do all operations, each at its rate
    ``compute_bound_share``        of the time, spent in operations that are bound by computing
    ``compute_bound_from_tokens``  of one prompt, from which on its linear layers take longer to compute than to move;
                                   the end of the search where there are none
    ``tokens_equal_reads``         cached tokens, of all sequences, whose keys and values are as many bytes as the
                                   weights of a step
    ``pass_over_two_n``            the time over that of 2N operations a token, N all parameters
    ``held_bytes``                 all weights and the cache behind the pass: what has to fit
    """
    P, B = params.matmul_tflop_per_s * 1e12, params.memory_gb_per_s * 1e9
    run.progress(0.0)
    works = _works(params)
    q_len = params.seq_len if params.phase == "prefill" else params.tokens_per_step
    tokens = params.batch * q_len
    time_s = pass_time_s(works, P, B)
    linear, attention = ([work for work in works if work.part == part] for part in (LINEAR, ATTENTION))
    flop = sum(work.flop for work in works)
    counts = [(n_layers, tensor) for _, n_layers, tensor in weights(SHAPES[params.model], _dtype(params.weight_dtype))]
    written = sum(work.cache_bytes for work in _works(params, phase="prefill", batch=1, seq_len=1))
    per_token = written / 2  # one pass over one token writes its key and value, and reads them
    weight_bytes = sum(work.weight_bytes for work in works)
    metrics = {
        "pass_bound_ms": 1e3 * time_s,
        "memory_over_compute": _memory_over_compute(works, P, B),
        "tokens_per_s": tokens / time_s,
        "compute_bound_share": sum(w.time_s(P, B) for w in works if w.compute_s(P) > w.memory_s(B)) / time_s,
        "linear_memory_over_compute": _memory_over_compute(linear, P, B),
        "attention_memory_over_compute": _memory_over_compute(attention, P, B),
        "compute_bound_from_tokens": _turning_tokens(params, P, B),
        "weight_read_bytes": weight_bytes,
        "cache_moved_bytes": sum(work.cache_bytes for work in works),
        "activation_bytes": sum(work.activation_bytes for work in works),
        "tokens_equal_reads": weight_bytes / per_token,
        "flop_per_token": flop / tokens,
        "linear_flop": sum(work.flop for work in linear),
        "attention_flop": sum(work.flop for work in attention),
        "pass_over_two_n": time_s / (2 * sum(n * tensor.numel() for n, tensor in counts) * tokens / P),
        "held_bytes": sum(n * tensor.nbytes for n, tensor in counts) + params.batch * params.seq_len * per_token,
    }
    run.progress(0.3)
    tables = {"by_tokens": _by_tokens(params, P, B), "by_batch": _by_batch(params, P, B)}
    run.progress(0.7)
    tables |= {"throughput": _throughput(params, P, B), "by_prompt": _by_prompt(params, P, B)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _works(
    params: Params, *, phase: str | None = None, batch: int | None = None, seq_len: int | None = None
) -> list[Work]:
    """Of the chosen pass, or with one of its settings changed."""
    seq_len = seq_len or params.seq_len
    q_len = seq_len if (phase or params.phase) == "prefill" else min(params.tokens_per_step, seq_len)
    return pass_work(
        SHAPES[params.model],
        batch=batch or params.batch,
        q_len=q_len,
        kv_len=seq_len,
        weight_dtype=_dtype(params.weight_dtype),
        cache_dtype=_dtype(params.cache_dtype),
        activation_dtype=_dtype("bfloat16"),
    )


def _memory_over_compute(works: Sequence[Work], P: float, B: float) -> float:
    return sum(work.memory_s(B) for work in works) / sum(work.compute_s(P) for work in works)


def _turning_tokens(params: Params, P: float, B: float) -> int:
    """By halving: with more tokens the operations grow faster than the bytes."""
    shape, dtypes = SHAPES[params.model], (_dtype(params.weight_dtype), _dtype("bfloat16"))
    low, high = 0, SEARCHED
    while high - low > 1:
        middle = (low + high) // 2
        if _memory_over_compute(linear_work(shape, middle, 1, *dtypes), P, B) > 1:
            low = middle
        else:
            high = middle
    return high


def _by_tokens(params: Params, P: float, B: float) -> Table:
    """Operations for each byte: of a prefill by the length of its prompt, of a decode step and its parts by batch."""
    rows = []
    for length in sorted({*PROMPTS, params.seq_len}):
        rows.append(("prefill_pass", length, _works(params, phase="prefill", batch=1, seq_len=length)))
    for batch in sorted({*BATCHES, params.batch}):
        works, tokens = _works(params, phase="decode", batch=batch), batch * min(params.tokens_per_step, params.seq_len)
        rows.append(("decode_pass", tokens, works))
        rows += [(part, tokens, [work for work in works if work.part == part]) for part in (LINEAR, ATTENTION)]
    return {
        "pass_part": np.array([name for name, _, _ in rows]),
        "tokens_in_pass": np.array([tokens for _, tokens, _ in rows]),
        "flop_per_byte": np.array([sum(w.flop for w in works) / sum(w.bytes for w in works) for _, _, works in rows]),
        "turning_flop_per_byte": np.full(len(rows), P / B),
    }


def _by_batch(params: Params, P: float, B: float) -> Table:
    """Milliseconds of a decode step of the chosen length, and of its parts."""
    batches = sorted({*BATCHES, params.batch})
    parts = (LINEAR, ATTENTION)
    times = []
    for batch in batches:
        works = _works(params, phase="decode", batch=batch)
        times.append([pass_time_s([w for w in works if w.part == part], P, B) for part in parts])
    by_part = 1e3 * np.array([*zip(*times, strict=True), [sum(pair) for pair in times]])
    return {
        "batch": np.tile(batches, 3),
        "pass_part": np.repeat([*parts, "decode_pass"], len(batches)),
        "part_time_ms": by_part.flatten(),
    }


def _throughput(params: Params, P: float, B: float) -> Table:
    """Tokens a second of decode steps, by batch, for a short, a middling and a long context and the chosen one."""
    batches, lengths = sorted({*BATCHES, params.batch}), sorted({*LENGTHS, params.seq_len})
    rows = []
    for length in lengths:
        for batch in batches:
            works = _works(params, phase="decode", batch=batch, seq_len=length)
            rows.append(batch * min(params.tokens_per_step, length) / pass_time_s(works, P, B))
    return {
        "batch": np.tile(batches, len(lengths)),
        "kv_len": np.repeat(lengths, len(batches)),
        "tokens_per_s": np.array(rows),
    }


def _by_prompt(params: Params, P: float, B: float) -> Table:
    """The least time of a prefill, beside its bytes alone, its operations alone, and 2N operations a token."""
    shape, dtype = SHAPES[params.model], _dtype(params.weight_dtype)
    n_parameters = sum(n * tensor.numel() for _, n, tensor in weights(shape, dtype))
    lengths = sorted({*PROMPTS, params.seq_len})
    rows = []
    for length in lengths:
        works = _works(params, phase="prefill", batch=1, seq_len=length)
        moved, computed = sum(work.memory_s(B) for work in works), sum(work.compute_s(P) for work in works)
        rows.append((pass_time_s(works, P, B), moved, computed, 2 * n_parameters * length / P))
    return {
        "prompt_len": np.tile(lengths, 4),
        "estimate": np.repeat(["least_time", "bytes_alone", "operations_alone", "two_n_rule"], len(lengths)),
        "first_pass_ms": 1e3 * np.array([*zip(*rows, strict=True)]).flatten(),
    }


def _dtype(name: str) -> torch.dtype:
    import torch

    return {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}[name]
