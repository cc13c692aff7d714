r"""What a generation costs with a KV cache and without: operations, score entries and bytes, step by step.

A prompt of P tokens is read and G new ones come out. The pass over the prompt gives the first of them; each other one
takes a step, and the last is never fed back. So there are G passes: over P, then, with a cache, over one token each
time; without, over P + 1, P + 2, ... P + G - 1 tokens.

``without_cache``: ``every_row`` runs the whole stack for every token of each pass; ``needed_rows`` only what the last
output depends on: in the last layer the other tokens need a key and a value there and nothing else, in those before it
everything. The pass over the prompt is treated alike in both.

Operations are those of the matrix products, a multiply-add counting two, counted while they run on shapes
(engine/decoding.py), without norms, softmax, embeddings and the product with the vocabulary; nothing is saved on masked
pairs. Bytes are those of tensors in 16 bits: weights, and keys and values that the steps behind the
prompt read and write. A cache that grows makes a longer tensor for each token and copies everything into it; one that
is laid out before gets the new token alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.decoding import KVCache, PassBill, StackSizes, count_pass


@dataclass(frozen=True)
class Params(BaseParams):
    prompt_len: int = number(16, low=1, high=2**17, log2=True)
    new_tokens: int = number(24, low=1, high=256)
    without_cache: str = choice("every_row", "needed_rows")
    cache_layout: str = choice("preallocated", "growing")
    n_layers: int = number(4, low=1, high=128)
    n_heads: int = number(8, low=1, high=128, log2=True)
    n_kv_heads: int = number(8, low=1, high=128, log2=True)
    d_model: int = number(512, low=64, high=16384, log2=True)
    batch: int = number(1, low=1, high=1024, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": self.d_model})
        if self.n_heads % self.n_kv_heads:
            yield Problem(
                "rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values={"n_heads": self.n_heads}
            )


METRICS = (
    Metric("cache_saves_factor"),
    Metric("last_step_saves_factor"),
    Metric("flop_with_cache", "flop"),
    Metric("flop_without_cache", "flop"),
    Metric("score_entries_with_cache"),
    Metric("score_entries_without_cache"),
    Metric("tokens_passed_with_cache"),
    Metric("tokens_passed_without_cache"),
    Metric("cache_bytes", "bytes"),
    Metric("cache_read_bytes", "bytes"),
    Metric("cache_written_bytes", "bytes"),
    Metric("weight_bytes", "bytes"),
    Metric("last_step_flop_per_byte", "flop/byte"),
)
PLOTS = (
    Plot("by_step", table="by_step", x="new_token", y="step_flop", by="decoding", y_scale="log10", y_unit="flop"),
    Plot("so_far", table="by_step", x="new_token", y="flop_so_far", by="decoding", y_scale="log10", y_unit="flop"),
    Plot("bytes", table="bytes", x="new_token", y="step_bytes", by="bytes_of", y_scale="log10", y_unit="bytes"),
)
BUDGET_S = 0.05

REPORT_EVERY = 16  # passes between two reports of progress


def memory_bytes(params: Params) -> int:
    """Python's own, a small row of the tables for each new token, and two numbers of each token, copied at most."""
    return 2**20 + 2**10 * params.new_tokens + 16 * (params.prompt_len + params.new_tokens)


def run(params: Params, run: Run) -> Result:
    """Counts of all passes, of the whole batch and all layers; ``tokens_passed`` alone is of one sequence.

    ``score_entries``: numbers of the matrices q·k. ``cache_bytes``: keys and values at the end.
    ``last_step_flop_per_byte``: operations of the last step for each byte that it has to read at least, the weights and
    the cache.
    """
    import torch

    sizes = StackSizes(params.n_layers, params.n_heads, params.n_kv_heads, params.d_model)
    needed = 1 if params.without_cache == "needed_rows" else None
    with_cache, without = [], []
    for step in range(params.new_tokens):
        if step % REPORT_EVERY == 0:
            run.progress(0.9 * step / params.new_tokens)
        kv_len = params.prompt_len + step
        full = count_pass(sizes, params.batch, kv_len, kv_len, last_rows=needed)
        without.append((kv_len, full))
        with_cache.append((1, count_pass(sizes, params.batch, 1, kv_len)) if step else (kv_len, full))
    read, written, held = _cache_bytes(params, sizes)
    weights = params.n_layers * sum(
        torch.empty(shape, dtype=torch.float16, device="meta").nbytes for shape in sizes.shapes().values()
    )
    totals = {name: _total(passes) for name, passes in (("with", with_cache), ("without", without))}
    last = with_cache[-1][1].flop
    metrics = {
        "cache_saves_factor": totals["without"]["flop"] / totals["with"]["flop"],
        "last_step_saves_factor": without[-1][1].flop / last,
        "flop_with_cache": totals["with"]["flop"],
        "flop_without_cache": totals["without"]["flop"],
        "score_entries_with_cache": totals["with"]["entries"],
        "score_entries_without_cache": totals["without"]["entries"],
        "tokens_passed_with_cache": totals["with"]["tokens"],
        "tokens_passed_without_cache": totals["without"]["tokens"],
        "cache_bytes": held,
        "cache_read_bytes": sum(read),
        "cache_written_bytes": sum(written),
        "weight_bytes": weights,
        "last_step_flop_per_byte": last / (weights + held),
    }
    tables = {"by_step": _by_step(with_cache, without), "bytes": _bytes_table(read, written, weights)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _total(passes: list[tuple[int, PassBill]]) -> dict[str, int]:
    return {
        "tokens": sum(tokens for tokens, _ in passes),
        "flop": sum(bill.flop for _, bill in passes),
        "entries": sum(bill.score_entries for _, bill in passes),
    }


def _cache_bytes(params: Params, sizes: StackSizes) -> tuple[list[int], list[int], int]:
    """Bytes of keys and values that each pass behind the prompt reads and writes, and those that are held at the end.

    The numbers of a token are alike: a cache is filled with one of a key and one of a value, which stand for those of
    all coordinates, KV heads, sequences and layers.
    """
    import torch

    alike = sizes.d_k * params.n_kv_heads * params.batch * params.n_layers

    def new(tokens: int) -> torch.Tensor:
        return torch.zeros(1, tokens, 1, dtype=torch.float16)

    room = params.prompt_len + params.new_tokens - 1 if params.cache_layout == "preallocated" else None
    cache = KVCache(1, room)
    stored = cache.append(0, new(params.prompt_len), new(params.prompt_len))
    read, written = [], []
    for _ in range(params.new_tokens - 1):
        before = cache.written_bytes
        stored = cache.append(0, new(1), new(1))
        written.append(alike * (cache.written_bytes - before))
        read.append(alike * sum(x.nbytes for x in stored))
    return read, written, alike * sum(x.nbytes for x in stored)


def _by_step(with_cache: list[tuple[int, PassBill]], without: list[tuple[int, PassBill]]) -> Table:
    passes = {"with_cache": with_cache, "without_cache": without}
    flop = {name: np.array([float(bill.flop) for _, bill in bills]) for name, bills in passes.items()}
    return {
        "new_token": np.tile(np.arange(1, len(without) + 1), 2),
        "decoding": np.repeat(list(passes), len(without)),
        "step_flop": np.concatenate(list(flop.values())),
        "flop_so_far": np.concatenate([x.cumsum() for x in flop.values()]),
    }


def _bytes_table(read: list[int], written: list[int], weights: int) -> Table:
    """A row for each pass; that over the prompt reads the weights alone."""
    rows = [(1, "weights", weights)]
    for step, (from_cache, to_cache) in enumerate(zip(read, written, strict=True), start=2):
        rows += [(step, "weights", weights), (step, "cache_read", from_cache), (step, "cache_written", to_cache)]
    return {
        "new_token": np.array([row[0] for row in rows]),
        "bytes_of": np.array([row[1] for row in rows]),
        "step_bytes": np.array([float(row[2]) for row in rows]),
    }
