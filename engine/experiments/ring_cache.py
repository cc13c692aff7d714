r"""Decoding with a ring of slots against windowed attention over the whole text: which use of the ring is exact.

Layers with a window of :math:`W` need the last :math:`W` keys and no others. Token t goes into slot
:math:`t \bmod n_{slots}`; the text is fed ``tokens_per_step`` at a time, and each output is compared with that of one
pass over the whole text under the window's mask. ``ring_use``:

``write_first``       the new tokens are written, then attention reads the slots, masked by the positions stored there
``read_first``        attention reads the slots and the new tokens beside them, then they are written
``turned_on_read``    as ``write_first``, keys cached unturned and turned by their age in the ring when they are read
``filled_slots_seen`` as ``write_first``, with every filled slot visible
``last_slot_reused``  a ring that is full puts each new token into its last slot
``slot_as_position``  queries and keys are turned by the number of the slot
``position_stuck``    queries and keys are turned by the position, but by no more than that of the last slot

``rejected_drafts``: behind each step so many drafts are read, written, and taken back, as when all are rejected.

A stack of random layers with RoPE, in float64 on the CPU: not every accelerator has float64, and exact must be told
from nearly so.

Sources: mistral-code, README (the rolling buffer); transformers-code, ``DynamicSlidingWindowLayer`` (``read_first``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.decoding import StackSizes, draw_layers, finish, project
from engine.masks import keep_window
from engine.positions import rotate
from engine.rotary import exact_angles
from engine.windows import EMPTY, RingCache, Stored, keep_at

if TYPE_CHECKING:
    import torch

RING_USES = (
    "write_first",
    "read_first",
    "turned_on_read",
    "filled_slots_seen",
    "last_slot_reused",
    "slot_as_position",
    "position_stuck",
)


@dataclass(frozen=True)
class Params(BaseParams):
    ring_use: str = choice(*RING_USES)
    window: int = number(6, low=1, high=64, log2=True)
    extra_slots: int = number(0, low=-8, high=64)
    tokens_per_step: int = number(1, low=1, high=64)
    rejected_drafts: int = number(0, low=0, high=8)
    seq_len: int = number(20, low=2, high=64)
    n_layers: int = number(2, low=1, high=4)

    def rules(self) -> Iterator[Problem]:
        if self.window + self.extra_slots < 1:
            values = {"window": self.window}
            yield Problem("rule", "extra_slots", self.extra_slots, rule="ring_has_a_slot", values=values)


METRICS = (
    Metric("largest_error"),
    Metric("last_token_error"),
    Metric("tokens_before_error"),
    Metric("ring_cache_bytes", "bytes"),
    Metric("whole_cache_bytes", "bytes"),
    Metric("ring_tokens_written"),
)
PLOTS = (
    Plot("by_token", table="by_token", x="position", y="drawn_error", by="ring_use", mark="point", y_scale="log10"),
    Plot("slots", table="slots", mark="heat", x="position", y="slot", value="tokens_old"),
)
BUDGET_S = 0.1

D_MODEL, N_HEADS = 32, 2
D_K = D_MODEL // N_HEADS
WRONG = 1e-9  # a token's error above it is no rounding: that of float64 stays far below
DRAWN_FLOOR = 1e-17  # where an error of exactly 0 is drawn


def memory_bytes(params: Params) -> int:
    """Float64: weights, the caches, and the logits and activations of the pass over the whole text."""
    slots = params.window + params.extra_slots
    weights = 2 * params.n_layers * 12 * D_MODEL**2
    caches = 8 * params.n_layers * (slots + params.seq_len) * D_MODEL
    logits = 12 * N_HEADS * params.seq_len * (params.seq_len + slots + params.tokens_per_step)
    return 8 * (weights + caches + logits + 60 * params.seq_len * D_MODEL) + 2**16


def run(params: Params, run: Run) -> Result:
    """The same text by one windowed pass and through the ring, and what stands in the slots of the first layer.

    ``largest_error``: of all tokens, root mean square of the difference of an output over that of its own;
    ``last_token_error``: of the last one. ``tokens_before_error``: how many tokens come out right before the first
    wrong one. ``ring_cache_bytes`` and ``whole_cache_bytes``: of the keys and values of all layers, in the ring and of
    all tokens. ``ring_tokens_written``: of each layer, drafts too.
    """
    run.progress(0.0)
    layers = draw_layers(
        StackSizes(params.n_layers, N_HEADS, N_HEADS, D_MODEL), lambda *shape: run.randn(*shape).cpu().double()
    )
    text = run.randn(params.seq_len, D_MODEL).cpu().double()
    drafts = run.randn(params.seq_len, D_MODEL).cpu().double()
    wanted, whole_bytes = _whole_pass(params, layers, text)
    run.progress(0.1)
    outputs, slots, ring = _through_ring(params, run, layers, text, drafts)
    difference = (outputs - wanted).square().mean(dim=-1).sqrt() / wanted.square().mean(dim=-1).sqrt()
    errors = difference.numpy()
    wrong = np.flatnonzero(errors > WRONG)
    metrics = {
        "largest_error": float(errors.max()),
        "last_token_error": float(errors[-1]),
        "tokens_before_error": float(wrong[0] if len(wrong) else len(errors)),
        "ring_cache_bytes": float(ring.nbytes),
        "whole_cache_bytes": float(whole_bytes),
        "ring_tokens_written": float(ring.tokens_written),
    }
    by_token = {
        "position": np.arange(len(errors)),
        "drawn_error": np.maximum(errors, DRAWN_FLOOR),
        "ring_use": np.repeat([params.ring_use], len(errors)),
    }
    return Result(metrics, {"by_token": by_token, "slots": slots})


def _whole_pass(params: Params, layers: list[dict[str, torch.Tensor]], text: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Outputs of one pass under the window's mask, and the bytes of all keys and values. Shapes: (seq_len, d_model)."""
    import torch

    keep = keep_window(len(text), window=params.window)
    angles = exact_angles(torch.arange(len(text)), D_K)
    n_bytes, x = 0, text
    for layer in layers:
        q, k, v = project(layer, x, angles, N_HEADS)
        x = finish(layer, x, attention(q, k, v, keep=keep))
        n_bytes += k.nbytes + v.nbytes
    return x, n_bytes


def _through_ring(
    params: Params, run: Run, layers: list[dict[str, torch.Tensor]], text: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, Table, RingCache]:
    """Outputs of all steps, the ages of what the slots hold behind each, and the ring."""
    import torch

    cache = RingCache(params.n_layers, params.window + params.extra_slots)
    outputs, ages = [], []
    for start in range(0, len(text), params.tokens_per_step):
        run.progress(0.1 + 0.9 * start / len(text))
        end = min(start + params.tokens_per_step, len(text))
        outputs.append(_step(params, layers, cache, text[start:end], start))
        held = cache.stored(0)
        assert held is not None
        ages.append((end - 1, held.positions.clone()))
        if params.rejected_drafts:
            _step(params, layers, cache, drafts[: params.rejected_drafts], end)
            cache.forget_from(end)
    return torch.cat(outputs), _slot_table(ages), cache


def _step(
    params: Params, layers: list[dict[str, torch.Tensor]], cache: RingCache, x: torch.Tensor, start: int
) -> torch.Tensor:
    """Outputs of new tokens that begin at position ``start``. Shapes: x (n_tokens, d_model), returned so."""
    import torch

    positions = torch.arange(start, start + len(x))
    slots = positions.clamp_max(cache.n_slots - 1) if params.ring_use == "last_slot_reused" else None
    angles = exact_angles(_turned_by(params, positions, cache.n_slots), D_K)
    for place, layer in enumerate(layers):
        q, k, v = project(layer, x, angles, N_HEADS)
        beside = _beside(cache.stored(place), Stored(k, v, positions))
        cache.write(place, k, v, positions, slots)
        seen = beside if params.ring_use == "read_first" else cache.stored(place)
        assert seen is not None
        keys = seen.keys
        if params.ring_use == "turned_on_read":
            oldest = seen.positions[seen.positions != EMPTY].min()
            q, keys = (rotate(x, exact_angles(at - oldest, D_K)) for x, at in ((q, positions), (keys, seen.positions)))
        keep = keep_at(positions, seen.positions, params.window)
        if params.ring_use == "filled_slots_seen":
            keep = (seen.positions != EMPTY).expand_as(keep)
        some = keep.any(dim=-1, keepdim=True)  # a row all of whose keys were overwritten reads nothing
        x = finish(layer, x, attention(q, keys, seen.values, keep=keep | ~some) * some)
    return x


def _turned_by(params: Params, positions: torch.Tensor, n_slots: int) -> torch.Tensor:
    """The positions by which new queries and keys are turned before the keys are cached."""
    if params.ring_use == "turned_on_read":
        return positions * 0
    if params.ring_use == "slot_as_position":
        return positions % n_slots
    if params.ring_use == "position_stuck":
        return positions.clamp_max(n_slots - 1)
    return positions


def _beside(held: Stored | None, new: Stored) -> Stored:
    """What the ring holds and the new tokens behind it, in a tensor of its own."""
    import torch

    if held is None:
        return new
    keys, values = (torch.cat(pair, dim=-2) for pair in zip(held[:2], new[:2], strict=True))
    return Stored(keys, values, torch.cat((held.positions, new.positions)))


def _slot_table(ages: list[tuple[int, torch.Tensor]]) -> Table:
    """Behind each step, how many tokens ago the token in each filled slot came."""
    cells = [
        (last, slot, last - position)
        for last, positions in ages
        for slot, position in enumerate(positions.tolist())
        if position != EMPTY
    ]
    at, slot, old = zip(*cells, strict=True)
    return {"position": np.array(at), "slot": np.array(slot), "tokens_old": np.array(old, dtype=np.float64)}
