r"""Attention in tiles, forward and backward, beside the plain one: the same numbers, other work, another memory.

The tiled forward pass keeps of each row an output and a log-sum-exp :math:`L`. The backward pass computes the weights
again, :math:`P=e^{S-L}`, and needs no row of them for the gradient of the softmax:

.. math:: dS = P\circ(dP - D),\qquad D_i=\sum_j P_{ij}\,dP_{ij}=dO_i\cdot O_i

The plain one holds the whole matrix of weights and leaves its gradient to autograd. Both are compared with the plain
one in float64. In 16 bits the plain one stores its logits and weights in them; the tiled one takes the same inputs and
stores only its output in them, since a tile never leaves the fast memory (here float32; tensor cores would round the
weights once more).

Slips of the backward pass: ``no_row_term`` leaves D out; ``max_for_lse`` saves the row maximum in place of L.

Counted while it runs: operations of the products, exponentials, and the bytes that are held for the backward pass.

Sources: dao2022, appendix B; dao2023, algorithms 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import flash
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.chunks import oversize

if TYPE_CHECKING:
    import torch

MAX_TILES = 256


@dataclass(frozen=True)
class Params(BaseParams):
    seq_len: int = number(256, low=1, high=1024, log2=True)
    d_k: int = number(32, low=1, high=256, log2=True)
    q_tile: int = number(64, low=1, high=1024, log2=True)
    kv_tile: int = number(64, low=1, high=1024, log2=True)
    causal: bool = flag(False)
    outer_loop: str = choice("over_queries", "over_keys")
    results_in: str = choice("float64", "float32", "bfloat16")
    backward_slip: str = choice("no_slip", "no_row_term", "max_for_lse")

    def rules(self) -> Iterator[Problem]:
        yield from oversize(q_len=self.seq_len, kv_len=self.seq_len, width=self.d_k)
        tiles = -(-self.seq_len // self.q_tile) * -(-self.seq_len // self.kv_tile)
        if tiles > MAX_TILES:
            values = {"tiles": tiles, "limit": MAX_TILES}
            yield Problem("rule", "kv_tile", self.kv_tile, rule="too_many_tiles_of_both", values=values)


METRICS = (
    Metric("output_error"),
    Metric("gradient_error"),
    Metric("training_flop", "flop"),
    Metric("plain_output_error"),
    Metric("plain_gradient_error"),
    Metric("unequal_share"),
    Metric("tiles"),
    Metric("tiles_computed"),
    Metric("forward_flop", "flop"),
    Metric("plain_forward_flop", "flop"),
    Metric("plain_training_flop", "flop"),
    Metric("exps"),
    Metric("plain_exps"),
    Metric("forward_moved_bytes", "bytes"),
    Metric("kept_bytes", "bytes"),
    Metric("plain_kept_bytes", "bytes"),
)
PLOTS = (
    Plot("work", table="work", mark="bar", x="work_item", y="relative_to_plain", by="attention_way"),
    Plot("kept", table="by_length", x="seq_len", y="kept_kib", by="attention_way", x_scale="log2", y_scale="log2"),
    Plot(
        "errors", table="errors", mark="bar", x="result_part", y="error_of_result", by="attention_way", y_scale="log10"
    ),
)
BUDGET_S = 0.015

LENGTHS = (16, 32, 64, 128, 256)
ERROR_FLOOR = 1e-17  # drawn where there is no error at all
PARTS = ("output", "dq", "dk", "dv")


def memory_bytes(params: Params) -> int:
    """Two plain passes with their gradients, one of them in float64, inputs and results of both ways, and a tile."""
    longest = max(params.seq_len, LENGTHS[-1])
    return 8 * (10 * longest**2 + 40 * longest * params.d_k) + 2**18


def run(params: Params, run: Run) -> Result:
    """One head forward and backward by both ways, from the same gradient of the output.

    Errors: distance from the plain attention in float64, by its length; of the gradients the largest of three.
    ``training_flop``: of the products of both passes. ``unequal_share``: of the numbers of the two outputs, how many
    are not the same to the last bit. ``forward_moved_bytes``: what the loops of the tiled forward pass read and wrote.
    ``kept_bytes``: what the forward pass leaves behind for the backward pass.

    Shapes: q, k, v and the gradient of the output (seq_len, d_k).
    """
    q, k, v, do = (_in_format(run.randn(params.seq_len, params.d_k), params.results_in) for _ in range(4))
    run.progress(0.05)
    exact = _plain([x.cpu().double() for x in (q, k, v, do)], params.causal)
    run.progress(0.3)
    plain = _plain([q, k, v, do], params.causal)
    run.progress(0.5)
    tiles = flash.Tiles(params.seq_len, params.seq_len, params.q_tile, params.kv_tile, params.causal)
    tiled = _tiled(q, k, v, do, tiles, params, run)

    errors = {way: _errors(one, exact) for way, one in (("in_tiles", tiled), ("whole_rows", plain))}
    metrics = {
        "output_error": errors["in_tiles"]["output"],
        "gradient_error": max(errors["in_tiles"][part] for part in PARTS[1:]),
        "training_flop": tiled.training_flop,
        "plain_output_error": errors["whole_rows"]["output"],
        "plain_gradient_error": max(errors["whole_rows"][part] for part in PARTS[1:]),
        "unequal_share": (tiled.results["output"] != plain.results["output"]).cpu().double().mean(),
        "tiles": len(tiles.queries) * len(tiles.keys),
        "tiles_computed": tiles.visible(),
        "forward_flop": tiled.forward_flop,
        "plain_forward_flop": plain.forward_flop,
        "plain_training_flop": plain.training_flop,
        "exps": tiled.exps,
        "plain_exps": plain.exps,
        "forward_moved_bytes": tiled.forward_moved_bytes,
        "kept_bytes": tiled.kept_bytes,
        "plain_kept_bytes": plain.kept_bytes,
    }
    run.progress(0.9)
    tables = {"work": _work(tiled, plain), "by_length": _by_length(q, params), "errors": _error_table(errors)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


@dataclass
class _Done:
    """Results of one way, by name, and what they took."""

    results: dict[str, torch.Tensor]
    forward_flop: int
    training_flop: int
    exps: int
    kept_bytes: int
    forward_moved_bytes: int = 0  # of tiles only


def _in_format(x: torch.Tensor, results_in: str) -> torch.Tensor:
    """Float64 on the CPU, for not every device has it; the other formats where the run is."""
    import torch

    return x.cpu().double() if results_in == "float64" else x.to(getattr(torch, results_in))


def _plain(inputs: list[torch.Tensor], causal: bool) -> _Done:
    """Attention with whole rows, and its gradients by autograd. Inputs: q, k, v and the gradient of the output."""
    import torch

    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    with flash.count_work() as work:
        with flash.count_kept() as kept:
            logits = q @ k.mT * q.shape[-1] ** -0.5
            if causal:
                seen = torch.ones(logits.shape, dtype=torch.bool, device=q.device).tril()
                logits = logits.masked_fill(~seen, -math.inf)
            out = logits.softmax(dim=-1) @ v
        forward_flop = work.product_flop
        gradients = torch.autograd.grad(out, (q, k, v), inputs[3])
    results = dict(zip(PARTS, (out.detach(), *gradients), strict=True))
    return _Done(results, forward_flop, work.product_flop, work.exps, kept.bytes)


def _tiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, tiles: flash.Tiles, params: Params, run: Run
) -> _Done:
    """Both passes in tiles. 16-bit inputs are worked on in float32, and every result is rounded once, at its end."""
    import torch

    dtype = torch.promote_types(q.dtype, torch.float32)
    memory = flash.with_numbers(*(x.to(dtype) for x in (q, k, v)))
    arrays = memory.arrays
    row_maxima = _row_maxima(q, k, tiles, dtype) if params.backward_slip == "max_for_lse" else None
    with flash.count_work() as work:
        if params.outer_loop == "over_queries":
            flash.by_queries(memory, tiles)
        else:
            flash.by_keys(memory, tiles)
            arrays["lse"] = arrays["m"] + arrays["l"].log()
        forward_flop = work.product_flop
        run.progress(0.65)
        out, arrays["do"] = arrays["o"].to(q.dtype), do.to(dtype)
        arrays["o"] = out.to(dtype)
        backward = flash.SlowMemory(**arrays)
        flash.row_terms(backward, tiles)
        if params.backward_slip == "no_row_term":
            arrays["row_term"].zero_()
        elif row_maxima is not None:
            arrays["lse"].copy_(row_maxima)
        flash.backward_tiled(backward, tiles)
    results = {"output": out} | {part: arrays[part].to(q.dtype) for part in PARTS[1:]}
    held = {"q": q, "k": k, "v": v, "o": out, "lse": arrays["lse"]}
    kept = sum(array.nbytes for name, array in held.items() if name in backward.touched)
    return _Done(results, forward_flop, work.product_flop, work.exps, kept, memory.bytes)


def _row_maxima(q: torch.Tensor, k: torch.Tensor, tiles: flash.Tiles, dtype: torch.dtype) -> torch.Tensor:
    whole = slice(0, len(q))
    return tiles.logits(q.to(dtype), k.to(dtype), whole, whole).amax(dim=-1)


def _errors(found: _Done, exact: _Done) -> dict[str, float]:
    """Distance of each result from the exact one, by its length."""
    errors = {}
    for part in PARTS:
        right = exact.results[part]
        errors[part] = float((found.results[part].cpu().double() - right).norm() / right.norm().clamp_min(1e-30))
    return errors


def _work(tiled: _Done, plain: _Done) -> Table:
    """What each way takes, by what the plain one takes."""
    items = {
        "forward_products": (tiled.forward_flop, plain.forward_flop),
        "backward_products": (tiled.training_flop - tiled.forward_flop, plain.training_flop - plain.forward_flop),
        "exponentials": (tiled.exps, plain.exps),
        "kept_memory": (tiled.kept_bytes, plain.kept_bytes),
    }
    return {
        "work_item": np.repeat(list(items), 2),
        "relative_to_plain": np.array([x / right for left, right in items.values() for x in (left, right)]),
        "attention_way": np.array(["in_tiles", "whole_rows"] * len(items)),
    }


def _by_length(q: torch.Tensor, params: Params) -> Table:
    """What is held for the backward pass of sequences of other lengths, one plain forward pass each."""
    lengths, kept, ways = [], [], []
    for seq_len in LENGTHS:
        zeros = q.new_zeros(seq_len, params.d_k).requires_grad_()
        with flash.count_kept() as plain:
            _ = (zeros @ zeros.mT).softmax(dim=-1) @ zeros
        memory = flash.shapes_only(seq_len, seq_len, params.d_k, q.element_size())
        flash.row_terms(memory, tiles := flash.Tiles(seq_len, seq_len, seq_len, seq_len))
        flash.backward_tiled(memory, tiles)
        tiled = sum(memory.arrays[name].nbytes for name in ("q", "k", "v", "o", "lse") if name in memory.touched)
        for way, count in (("whole_rows", plain.bytes), ("in_tiles", tiled)):
            lengths.append(seq_len)
            kept.append(count / 1024)
            ways.append(way)
    return {"seq_len": np.array(lengths), "kept_kib": np.array(kept), "attention_way": np.array(ways)}


def _error_table(errors: dict[str, dict[str, float]]) -> Table:
    return {
        "result_part": np.tile(list(PARTS), len(errors)),
        "error_of_result": np.array([max(e[part], ERROR_FLOOR) for e in errors.values() for part in PARTS]),
        "attention_way": np.repeat(list(errors), len(PARTS)),
    }
