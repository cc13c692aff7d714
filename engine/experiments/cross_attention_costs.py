r"""What a decoder pays for reading a source: by cross-attention, with its keys cached or not, or as a prefix.

A decoder of ``n_layers`` layers (self-attention and FFN) reads a prompt in one pass and writes new tokens one by one.

Cross-attention: ``n_cross_layers`` of its layers have a further sub-layer with W_q, W_k, W_v and W_o of its own, where
W_k and W_v take the source's width, and with ``cross_ffn`` a further FFN. Keys and values of the source are made
once (``made_once``), by ``n_cross_layers`` pairs of products, or again in every pass (``made_each_pass``).

Prefix: one matrix brings the source to the decoder's width, and its tokens stand in front of the prompt in all layers.

What made the source's vectors, the encoder, is the same in both and is left out.

Operations are those of the matrix products, a multiply-add counting two, counted while they run on shapes, without
norms, softmax and the product with the vocabulary; nothing is saved on masked pairs. Bytes are those of tensors in 16
bits. With ``n_beams`` each beam has its own text; ``one_for_all_beams`` holds keys and values of the source once,
``one_a_beam`` once for each beam. A step reads what is held: a kernel that reads shared keys once is assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.decoding import StackSizes, count_pass
from engine.operations import count_operations


@dataclass(frozen=True)
class Params(BaseParams):
    source_len: int = number(1024, low=1, high=2**17, log2=True)
    prompt_len: int = number(16, low=1, high=2**17, log2=True)
    new_tokens: int = number(64, low=2, high=256)
    cross_kv: str = choice("made_once", "made_each_pass")
    n_layers: int = number(8, low=1, high=128)
    n_cross_layers: int = number(8, low=1, high=128)
    cross_ffn: bool = flag(False)
    n_heads: int = number(8, low=1, high=128, log2=True)
    n_kv_heads: int = number(8, low=1, high=128, log2=True)
    d_model: int = number(512, low=64, high=16384, log2=True)
    d_source: int = number(512, low=8, high=16384)
    n_beams: int = number(1, low=1, high=64)
    beam_layout: str = choice("one_for_all_beams", "one_a_beam")

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": self.d_model})
        if self.n_heads % self.n_kv_heads:
            yield Problem(
                "rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values={"n_heads": self.n_heads}
            )
        if self.n_cross_layers > self.n_layers:
            yield Problem(
                "rule",
                "n_cross_layers",
                self.n_cross_layers,
                rule="cross_among_layers",
                values={"n_layers": self.n_layers},
            )

    def unread(self) -> frozenset[str]:
        return frozenset({"beam_layout"}) if self.n_beams == 1 else frozenset()


METRICS = (
    Metric("recomputing_flop_ratio"),
    Metric("cross_cache_bytes", "bytes"),
    Metric("self_cache_bytes", "bytes"),
    Metric("source_cache_ratio"),
    Metric("first_pass_flop_ratio"),
    Metric("last_step_flop_ratio"),
    Metric("cross_read_share"),
    Metric("cross_kv_flop", "flop"),
    Metric("steps_flop", "flop"),
    Metric("prefix_cache_bytes", "bytes"),
    Metric("added_parameters"),
    Metric("prefix_added_parameters"),
    Metric("decoder_weight_bytes", "bytes"),
)
PLOTS = (
    Plot("step_flop", table="by_step", x="new_token", y="step_flop", by="reading", y_scale="log10", y_unit="flop"),
    Plot("step_bytes", table="bytes", x="new_token", y="step_bytes", by="bytes_of", y_scale="log10", y_unit="bytes"),
    Plot(
        "first_pass",
        table="by_source",
        x="source_len",
        y="first_pass_flop",
        by="reading",
        x_scale="log2",
        y_scale="log10",
        y_unit="flop",
    ),
)
BUDGET_S = 0.05

REPORT_EVERY = 16  # passes between two reports of progress
N_LENGTHS = 9  # of the source, each twice the one before


def memory_bytes(params: Params) -> int:
    """Python's own, and rows of the tables for each new token."""
    return 2**20 + 2**11 * params.new_tokens


def run(params: Params, run: Run) -> Result:
    """Counts of all layers and beams. Ratios are prefix over cross-attention, or recomputed over cached.

    ``steps_flop``: of all steps behind the first pass, with ``cross_kv`` as chosen. ``cross_read_share``: of what the
    last step reads from the caches, the part that belongs to the source.
    """
    sizes = StackSizes(params.n_layers, params.n_heads, params.n_kv_heads, params.d_model)
    first_cross = _first_pass_by_cross(params, sizes, params.source_len)
    first_prefix = _first_pass_as_prefix(params, sizes, params.source_len)
    steps: dict[str, list[int]] = {"cross_cached": [], "cross_recomputed": [], "source_as_prefix": []}
    for step in range(1, params.new_tokens):
        if step % REPORT_EVERY == 1:
            run.progress(0.7 * step / params.new_tokens)
        text_len = params.prompt_len + step
        own = count_pass(sizes, params.n_beams, 1, text_len).flop
        asking = _asking_flop(params, sizes, params.n_beams, 1, params.source_len)
        steps["cross_cached"].append(own + asking)
        steps["cross_recomputed"].append(own + asking + _source_flop(params, sizes, params.source_len))
        steps["source_as_prefix"].append(count_pass(sizes, params.n_beams, 1, params.source_len + text_len).flop)
    chosen = "cross_cached" if params.cross_kv == "made_once" else "cross_recomputed"

    held = _held_bytes(params, sizes)
    cross_matrices = _cross_matrices(params, sizes)
    metrics = {
        "recomputing_flop_ratio": sum(steps["cross_recomputed"]) / sum(steps["cross_cached"]),
        "cross_cache_bytes": held.cross,
        "self_cache_bytes": held.text[-1],
        "source_cache_ratio": held.prefix / held.cross,
        "first_pass_flop_ratio": first_prefix / first_cross,
        "last_step_flop_ratio": steps["source_as_prefix"][-1] / steps[chosen][-1],
        "cross_read_share": held.cross / (held.cross + held.text[-1]),
        "cross_kv_flop": _source_flop(params, sizes, params.source_len),
        "steps_flop": sum(steps[chosen]),
        "prefix_cache_bytes": held.prefix + held.text[-1],
        "added_parameters": params.n_cross_layers * _numbers(cross_matrices),
        "prefix_added_parameters": _numbers([(params.d_source, params.d_model)]),
        "decoder_weight_bytes": 2
        * (
            params.n_layers * _numbers(list(sizes.shapes().values())) + params.n_cross_layers * _numbers(cross_matrices)
        ),
    }
    run.progress(0.8)
    tables = {
        "by_step": _by_step(steps),
        "bytes": _bytes_table(held, int(metrics["decoder_weight_bytes"]) - _unread_bytes(params, sizes)),
        "by_source": _by_source(params, sizes, run),
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


# --------------------------------------------------------------------------------------------------------------------
# Operations


def _first_pass_by_cross(params: Params, sizes: StackSizes, source_len: int) -> int:
    """The pass over the prompt, with the keys and values of the source made in it."""
    own = count_pass(sizes, 1, params.prompt_len, params.prompt_len).flop
    return own + _asking_flop(params, sizes, 1, params.prompt_len, source_len) + _source_flop(params, sizes, source_len)


def _first_pass_as_prefix(params: Params, sizes: StackSizes, source_len: int) -> int:
    """The pass over source and prompt, and the product that brings the source to the decoder's width."""
    length = source_len + params.prompt_len
    return count_pass(sizes, 1, length, length).flop + _product_flop(source_len, params.d_source, params.d_model)


def _source_flop(params: Params, sizes: StackSizes, source_len: int) -> int:
    """Keys and values of the source in all layers that read it; beams share them."""
    kv_width = sizes.n_kv_heads * sizes.d_k
    return params.n_cross_layers * 2 * _product_flop(source_len, params.d_source, kv_width)


def _asking_flop(params: Params, sizes: StackSizes, batch: int, rows: int, source_len: int) -> int:
    """Everything else in the sub-layers that read the source: q, both products with it, W_o, the further FFN."""
    widths = [shape for name, shape in sizes.shapes().items() if name in ("W_q", "W_o")]
    if params.cross_ffn:
        widths += [shape for name, shape in sizes.shapes().items() if name in ("W_up", "W_down")]
    linear = sum(_product_flop(batch * rows, width_in, width_out) for width_out, width_in in widths)
    return params.n_cross_layers * (linear + _reading_flop(batch * sizes.n_heads, rows, sizes.d_k, source_len))


@functools.lru_cache(maxsize=4096)
def _product_flop(rows: int, width_in: int, width_out: int) -> int:
    """Of a linear layer on that many tokens."""
    import torch

    x, matrix = (torch.empty(shape, device="meta") for shape in ((rows, width_in), (width_in, width_out)))
    with count_operations() as counted:
        torch.mm(x, matrix)
    return counted.products


@functools.lru_cache(maxsize=4096)
def _reading_flop(heads: int, rows: int, d_k: int, source_len: int) -> int:
    """q·k and weights · v of that many heads; those that share a key read the same one: as many products."""
    import torch

    q, k, v = (
        torch.empty(heads, *shape, device="meta") for shape in ((rows, d_k), (d_k, source_len), (source_len, d_k))
    )
    with count_operations() as counted:
        torch.bmm(torch.bmm(q, k), v)
    return counted.products


# --------------------------------------------------------------------------------------------------------------------
# Bytes and parameters


class _Held(NamedTuple):
    cross: int
    prefix: int
    text: list[int]


def _held_bytes(params: Params, sizes: StackSizes) -> _Held:
    """Keys and values in 16 bits: of the source in either way, of the text (prompt and new tokens) at each step."""
    import torch

    def layer(sequences: int, length: int) -> torch.Tensor:
        return torch.empty(2, sequences, sizes.n_kv_heads, length, sizes.d_k, dtype=torch.float16, device="meta")

    copies = params.n_beams if params.beam_layout == "one_a_beam" else 1
    source = layer(copies, params.source_len).nbytes
    text = [layer(params.n_beams, params.prompt_len + step).nbytes for step in range(1, params.new_tokens)]
    return _Held(
        cross=params.n_cross_layers * source,
        prefix=params.n_layers * source,
        text=[params.n_layers * n for n in text],
    )


def _cross_matrices(params: Params, sizes: StackSizes) -> list[tuple[int, int]]:
    """Shapes of the matrices of one further sub-layer."""
    shapes, kv_width = sizes.shapes(), sizes.n_kv_heads * sizes.d_k
    matrices = [shapes["W_q"], (kv_width, params.d_source), (kv_width, params.d_source), shapes["W_o"]]
    return matrices + ([shapes["W_up"], shapes["W_down"]] if params.cross_ffn else [])


def _unread_bytes(params: Params, sizes: StackSizes) -> int:
    """W_k and W_v of the source, which a step behind the first pass has no use for where keys and values are held."""
    made = [(sizes.n_kv_heads * sizes.d_k, params.d_source)] * 2 if params.cross_kv == "made_once" else []
    return 2 * params.n_cross_layers * _numbers(made)


def _numbers(shapes: list[tuple[int, int]]) -> int:
    import torch

    return sum(torch.empty(shape, device="meta").numel() for shape in shapes)


# --------------------------------------------------------------------------------------------------------------------
# Tables


def _by_step(steps: dict[str, list[int]]) -> Table:
    n = len(next(iter(steps.values())))
    return {
        "new_token": np.tile(np.arange(2, n + 2), len(steps)),  # the pass over the prompt gives the first
        "reading": np.repeat(list(steps), n),
        "step_flop": np.concatenate([np.array(flop, dtype=float) for flop in steps.values()]),
    }


def _bytes_table(held: _Held, weights: int) -> Table:
    text = np.array(held.text, dtype=float)
    series = {
        "cross_cache": np.full(len(text), float(held.cross)),
        "self_cache": text,
        "weights": np.full(len(text), float(weights)),
    }
    return {
        "new_token": np.tile(np.arange(2, len(text) + 2), len(series)),
        "bytes_of": np.repeat(list(series), len(text)),
        "step_bytes": np.concatenate(list(series.values())),
    }


def _by_source(params: Params, sizes: StackSizes, run: Run) -> Table:
    lengths = [max(1, params.source_len >> shift) for shift in reversed(range(N_LENGTHS))]
    lengths = sorted(set(lengths))
    found: dict[str, list[float]] = {"cross_cached": [], "source_as_prefix": []}
    for done, length in enumerate(lengths):
        run.progress(0.8 + 0.2 * done / len(lengths))
        found["cross_cached"].append(float(_first_pass_by_cross(params, sizes, length)))
        found["source_as_prefix"].append(float(_first_pass_as_prefix(params, sizes, length)))
    return {
        "source_len": np.tile(np.array(lengths), len(found)),
        "reading": np.repeat(list(found), len(lengths)),
        "first_pass_flop": np.concatenate([np.array(flop) for flop in found.values()]),
    }
