r"""Which stored keys and values are still right after something has happened to the text, layer by layer.

A text was read, its keys and values are stored. Then

``append_token``   the next token comes, and nothing else
``edit_token``     one token of the text is replaced, and the next one comes
``insert_token``   one token is put in between; those behind it stand one position further on
``drop_first``     the first token is taken away; the others stand one position earlier

and the keys and values that a fresh pass over the new text makes are compared with those that are stored for the same
tokens. In the first layer they depend on the token and its position alone. In each later one they depend on all that
the token could see in the layers below: under a causal mask on nothing behind it.

``recomputed``: what is computed anew before the next token is read: ``nothing``, the edited token alone (in every
layer, a token that came in between is new anyhow), or everything from the change on.

The stack is random (engine/decoding.py), with rotary positions, on the CPU in float64, for what is exact and what is
rounding must be told apart and not every accelerator has float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.decoding import KVCache, Mask, StackSizes, draw_layers, extend
from engine.masks import keep_named

if TYPE_CHECKING:
    import torch

EVENTS = ("append_token", "edit_token", "insert_token", "drop_first")


@dataclass(frozen=True)
class Params(BaseParams):
    event: str = choice(*EVENTS)
    mask: str = choice("causal", "no_mask", "prefix", "window")
    changed_at: int = number(5, low=0, high=63)
    recomputed: str = choice("nothing", "changed_token", "from_change_on")
    seq_len: int = number(16, low=2, high=64)
    prefix_tokens: int = number(6, low=1, high=64)
    window: int = number(3, low=1, high=64)
    n_layers: int = number(3, low=1, high=12)
    n_heads: int = number(4, low=1, high=16, log2=True)
    d_model: int = number(64, low=16, high=256, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % (2 * self.n_heads):  # rotary positions turn pairs of coordinates
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_of_even_width", values={"d_model": self.d_model})
        if self.changed_at >= self.seq_len:
            yield Problem("rule", "changed_at", self.changed_at, rule="within_text", values={"seq_len": self.seq_len})

    def unread(self) -> frozenset[str]:
        idle = {"window"} if self.mask != "window" else set()
        if self.mask != "prefix":
            idle.add("prefix_tokens")
        if self.event == "append_token":
            idle.add("recomputed")
        return frozenset(idle)


METRICS = (
    Metric("next_output_error"),
    Metric("stale_keys_first_layer"),
    Metric("stale_values_first_layer"),
    Metric("stale_tokens_last_layer"),
    Metric("stored_tokens"),
    Metric("recomputed_tokens"),
)
PLOTS = (
    Plot("stale", table="stale", mark="heat", x="position", y="layer", value="kv_change"),
    Plot("by_event", table="by_event", x="event", y="stale_share", by="layer", mark="bar"),
)
BUDGET_S = 0.05

STALE = 1e-9  # of the size of a key or value: far above rounding in float64, far below any change that is meant


def memory_bytes(params: Params) -> int:
    """Float64: weights, and the activations, logits, keys and values of a pass for each event and one before."""
    tokens = params.seq_len + 2
    weights = params.n_layers * 12 * params.d_model**2
    passes = 1 + len(EVENTS)
    kept = 2 * passes * params.n_layers * tokens * params.d_model
    activations = 24 * tokens * params.d_model + 8 * params.n_heads * tokens**2
    return 8 * (2 * weights + kept + activations)


def run(params: Params, run: Run) -> Result:
    """Compare what is stored with what a fresh pass would store, and read the next token with the one and the other.

    ``stale_keys_first_layer`` and the like: stored tokens whose key, or value, differs by more than rounding; in the
    last layer the key or the value. ``next_output_error``: root mean square of the difference of the next token's
    output from that of the fresh pass, over that of the outputs.

    Shapes: tokens (seq_len, d_model); stored keys and values (n_heads, seq_len, d_k) a layer.
    """
    sizes = StackSizes(params.n_layers, params.n_heads, params.n_heads, params.d_model)

    def normal(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double()

    layers = draw_layers(sizes, normal)
    text, other, next_token = (normal(n, params.d_model) for n in (params.seq_len, 1, 1))
    _, before = _read(params, layers, text)
    run.progress(0.2)

    shares = {}
    for done, event in enumerate(EVENTS):
        new_text, kept = _after(params, event, text, other, next_token)
        outputs, fresh = _read(params, layers, new_text)
        changes = _changes(before, fresh, kept)
        shares[event] = [float((np.maximum(k, v) > STALE).mean()) for k, v in changes]
        if event == params.event:
            chosen = new_text, kept, outputs, fresh, changes
        run.progress(0.2 + 0.6 * (done + 1) / len(EVENTS))

    new_text, kept, outputs, fresh, changes = chosen
    anew = _recomputed(params, kept)
    error = _next_output(params, layers, new_text, _mixed(before, fresh, kept, anew)) - outputs[-1:]
    (first_keys, first_values), (last_keys, last_values) = changes[0], changes[-1]
    metrics = {
        "next_output_error": error.square().mean().sqrt() / outputs.square().mean().sqrt(),
        "stale_keys_first_layer": (first_keys > STALE).sum(),
        "stale_values_first_layer": (first_values > STALE).sum(),
        "stale_tokens_last_layer": (np.maximum(last_keys, last_values) > STALE).sum(),
        "stored_tokens": len(kept),
        "recomputed_tokens": len(anew),
    }
    return Result({name: float(value) for name, value in metrics.items()}, _tables(kept, changes, shares))


def _read(params: Params, layers: list[dict[str, torch.Tensor]], text: torch.Tensor) -> tuple[torch.Tensor, KVCache]:
    """Outputs of one pass, and what it stores."""
    cache = KVCache(params.n_layers)
    return extend(layers, text, cache, n_heads=params.n_heads, mask=_mask(params)), cache


def _mask(params: Params) -> Mask:
    return lambda q_len, kv_len: keep_named(
        params.mask, q_len, kv_len, prefix_len=params.prefix_tokens, window=params.window
    )


def _after(
    params: Params, event: str, text: torch.Tensor, other: torch.Tensor, next_token: torch.Tensor
) -> tuple[torch.Tensor, dict[int, int]]:
    """The text after the event, the next token at its end, and where in it each stored token stands: new to old."""
    import torch

    at, same = params.changed_at, range(params.seq_len)
    if event == "append_token":
        return torch.cat((text, next_token)), {i: i for i in same}
    if event == "edit_token":
        return torch.cat((text[:at], other, text[at + 1 :], next_token)), {i: i for i in same}
    if event == "insert_token":
        return torch.cat((text[:at], other, text[at:], next_token)), {i + (i >= at): i for i in same}
    return torch.cat((text[1:], next_token)), {i - 1: i for i in same if i}


def _changes(before: KVCache, fresh: KVCache, kept: dict[int, int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """By how much the stored key and value of each kept token are off, of its size, in each layer."""

    def change(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
        old, new = old[:, list(kept.values())], new[:, list(kept)]
        off = (old - new).square().mean(dim=(0, 2)).sqrt() / new.square().mean(dim=(0, 2)).sqrt()
        return np.asarray(off.numpy())

    return [
        (
            change(before.stored(layer)[0], fresh.stored(layer)[0]),
            change(before.stored(layer)[1], fresh.stored(layer)[1]),
        )
        for layer in range(len(before.keys))
    ]


def _recomputed(params: Params, kept: dict[int, int]) -> set[int]:
    """The kept tokens, by their new place, whose keys and values are computed anew."""
    if params.event == "append_token" or params.recomputed == "nothing":
        return set()
    start = 0 if params.event == "drop_first" else params.changed_at
    if params.recomputed == "from_change_on":
        return {i for i in kept if i >= start}
    return {start} if params.event == "edit_token" else set()


def _mixed(before: KVCache, fresh: KVCache, kept: dict[int, int], anew: set[int]) -> KVCache:
    """A cache for all tokens but the next: stored ones where they are kept, fresh ones where they are not."""
    cache = KVCache(len(before.keys))
    length = len(fresh) - 1
    for layer in range(len(before.keys)):
        rows = [x[:, :length].clone() for x in fresh.stored(layer)]
        for new, old in kept.items():
            if new not in anew:
                for row, stored in zip(rows, before.stored(layer), strict=True):
                    row[:, new] = stored[:, old]
        cache.append(layer, *rows)
    return cache


def _next_output(
    params: Params, layers: list[dict[str, torch.Tensor]], new_text: torch.Tensor, cache: KVCache
) -> torch.Tensor:
    return extend(layers, new_text[-1:], cache, n_heads=params.n_heads, mask=_mask(params))


def _tables(
    kept: dict[int, int], changes: list[tuple[np.ndarray, np.ndarray]], shares: dict[str, list[float]]
) -> dict[str, Table]:
    n_layers = len(changes)
    return {
        "stale": {
            "position": np.tile(list(kept), n_layers),
            "layer": np.repeat(np.arange(n_layers), len(kept)),
            "kv_change": np.concatenate([np.maximum(k, v) for k, v in changes]),
        },
        "by_event": {
            "event": np.repeat(list(shares), n_layers),
            "layer": np.tile(np.arange(n_layers), len(shares)),
            "stale_share": np.concatenate([np.array(x) for x in shares.values()]),
        },
    }
