r"""What a conversation can keep from turn to turn: rows of keys and values computed, by who may see what.

Each turn brings the user's tokens, and an answer is decoded behind them, one token at a time. How much of what was
computed before is still right when the next turn comes depends on the mask:

``causal``             every token sees what is before it
``first_turn_prefix``  the tokens of the first turn see each other both ways; all that follows is causal
``history_prefix``     all that came before the answer that is being written, the user's new tokens included, sees each
                       other both ways: what an encoder over the history does, or a prefix LM that is given it as prefix

At every turn a fresh pass under the mask of that turn is compared with the rows that are stored. A row (a token's keys
and values in all layers) that differs by more than rounding has to be computed again; tokens that are new have to be
computed anyway.

The stack is random (engine/decoding.py), with rotary positions, on the CPU in float64, for what is exact and what is
rounding must be told apart and not every accelerator has float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.decoding import KVCache, Mask, StackSizes, draw_layers, extend
from engine.masks import keep_prefix

if TYPE_CHECKING:
    import torch

HISTORY_MASKS = ("causal", "first_turn_prefix", "history_prefix")


@dataclass(frozen=True)
class Params(BaseParams):
    history_mask: str = choice(*HISTORY_MASKS)
    n_turns: int = number(4, low=1, high=12)
    turn_len: int = number(8, low=1, high=32)
    answer_len: int = number(8, low=1, high=32)
    n_layers: int = number(2, low=1, high=6)
    d_model: int = number(32, low=16, high=128, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % (2 * N_HEADS):  # rotary positions turn pairs of coordinates
            yield Problem("rule", "d_model", self.d_model, rule="width_of_two_even_heads")
        tokens = self.n_turns * (self.turn_len + self.answer_len)
        if tokens > MAX_TOKENS:
            values = {"tokens": tokens, "limit": MAX_TOKENS}
            yield Problem("rule", "n_turns", self.n_turns, rule="too_long_a_conversation", values=values)


METRICS = (
    Metric("computed_rows"),
    Metric("conversation_tokens"),
    Metric("rows_per_token"),
    Metric("last_turn_stale"),
    Metric("last_turn_stored"),
    Metric("last_turn_change"),
)
PLOTS = (
    Plot("turns", table="turns", x="turn", y="rows_so_far", by="history_mask"),
    Plot("stale", table="turns", mark="bar", x="turn", y="stale_rows", by="history_mask"),
    Plot("changes", table="turns", x="turn", y="kv_change", by="history_mask"),
)
BUDGET_S = 0.05

MAX_TOKENS = 256
N_HEADS = 2
STALE = 1e-9  # of the size of a key or value: far above rounding in float64, far below any change that is meant


def memory_bytes(params: Params) -> int:
    """Float64: weights, and keys, values, activations and logits of two passes."""
    tokens = params.n_turns * (params.turn_len + params.answer_len)
    weights = 2 * params.n_layers * 12 * params.d_model**2
    kept = 8 * params.n_layers * tokens * params.d_model
    return 8 * (weights + kept + 32 * tokens * params.d_model + 10 * N_HEADS * tokens**2)


def run(params: Params, run: Run) -> Result:
    """Go through the turns under each mask, and count rows that are new and rows that are stale.

    ``last_turn_stale``, ``last_turn_stored``: of the rows that were stored when the last turn came, those that it makes
    stale, and all of them; ``last_turn_change``: by how much a stored key or value changes at most, of its size (1e-15
    is rounding). ``rows_per_token``: rows computed for each token of the conversation.

    Shapes: text (tokens, d_model); stored keys and values (n_heads, tokens, d_k) a layer.
    """
    sizes = StackSizes(params.n_layers, N_HEADS, N_HEADS, params.d_model)

    def normal(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double()

    layers = draw_layers(sizes, normal)
    length = params.turn_len + params.answer_len
    tokens = params.n_turns * length
    text = normal(tokens, params.d_model)
    found: dict[str, list[np.ndarray]] = {}
    for number_of_mask, name in enumerate(HISTORY_MASKS):
        stored: KVCache | None = None
        found[name] = []
        for turn in range(params.n_turns):
            asked = turn * length + params.turn_len  # tokens when the answer begins
            prefix = {"causal": 0, "first_turn_prefix": params.turn_len, "history_prefix": asked}[name]
            cache = KVCache(params.n_layers)
            # the answer is causal behind the prefix, so one pass stores what its steps would (kv-cache-what shows it)
            extend(layers, text[: asked + params.answer_len], cache, n_heads=N_HEADS, mask=_mask(prefix))
            found[name].append(np.zeros(0) if stored is None else _changes(stored, cache))
            stored = cache
            run.progress((number_of_mask + (turn + 1) / params.n_turns) / len(HISTORY_MASKS))

    stale = {name: np.array([(changes > STALE).sum() for changes in turns]) for name, turns in found.items()}
    computed = {name: np.cumsum(length + rows) for name, rows in stale.items()}
    last = found[params.history_mask][-1]
    metrics = {
        "computed_rows": float(computed[params.history_mask][-1]),
        "conversation_tokens": float(tokens),
        "rows_per_token": float(computed[params.history_mask][-1] / tokens),
        "last_turn_stale": float(stale[params.history_mask][-1]),
        "last_turn_stored": float(len(last)),
        "last_turn_change": float(last.max(initial=0.0)),
    }
    table = {
        "history_mask": np.repeat(HISTORY_MASKS, params.n_turns),
        "turn": np.tile(np.arange(1, params.n_turns + 1), len(HISTORY_MASKS)),
        "rows_so_far": np.concatenate([computed[name] for name in HISTORY_MASKS]),
        "stale_rows": np.concatenate([stale[name] for name in HISTORY_MASKS]),
        "kv_change": np.array([changes.max(initial=0.0) for name in HISTORY_MASKS for changes in found[name]]),
    }
    return Result(metrics, {"turns": table})


def _mask(prefix: int) -> Mask:
    return lambda q_len, kv_len: keep_prefix(q_len, kv_len, prefix_len=prefix)


def _changes(stored: KVCache, fresh: KVCache) -> np.ndarray:
    """By how much the stored key or value of each token is off, of its size, in the layer where it is most."""
    changes = np.zeros(len(stored))
    for layer in range(len(stored.keys)):
        for old, new in zip(stored.stored(layer), fresh.stored(layer), strict=True):
            new = new[:, : len(stored)]
            off = (old - new).square().mean(dim=(0, 2)).sqrt() / new.square().mean(dim=(0, 2)).sqrt()
            changes = np.maximum(changes, off.numpy())
    return changes
