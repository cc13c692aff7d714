r"""Decoding behind an encoder: what the two caches of a layer hold, what they are made of, and caches that went wrong.

A decoder layer reads its own text by causal self-attention and a source by cross-attention:

.. math::
   x \mathrel{+}= \mathrm{self}(\mathrm{LN}\,x),\quad x \mathrel{+}= \mathrm{cross}(\mathrm{LN}\,x, M),\quad
   x \mathrel{+}= \mathrm{FFN}(\mathrm{LN}\,x)

Keys and values of cross-attention are made of M alone, by matrices of each layer: they are made once and stay. Those of
self-attention are made of x, which from the second layer on has read M.

``cross_caching`` decodes in other ways, and each output is compared with that of one pass over all tokens:

``appended``       the same keys and values of the source are appended again in each step, as those of a token are
``other_source``   keys and values of the source are those of the source before
``text_of_other``  keys and values of the prompt are those computed beside another source

The decoder is random, as before training. Bytes are those of tensors in 16 bits. Errors are largest differences of any
coordinate, in units of the root mean square of the outputs.

Source: vaswani2017, sections 3.1 and 3.2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.decoding import KVCache, StackSizes, draw_layers, norm, project
from engine.masks import keep_causal
from engine.positions import rotary_angles

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    cross_caching: str = choice("correctly", "appended", "other_source", "text_of_other")
    source_len: int = number(16, low=1, high=512, log2=True)
    prompt_len: int = number(4, low=1, high=64)
    new_tokens: int = number(6, low=2, high=64)
    n_layers: int = number(2, low=1, high=6)
    d_model: int = number(32, low=16, high=128, log2=True)
    n_heads: int = number(4, low=1, high=8, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % (2 * self.n_heads):  # rotary positions turn pairs of coordinates
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_of_even_width", values={"d_model": self.d_model})


METRICS = (
    Metric("decoded_error"),
    Metric("cross_held_bytes", "bytes"),
    Metric("self_held_bytes", "bytes"),
    Metric("self_layers_changed_by_source"),
    Metric("first_step_cross_bytes", "bytes"),
)
PLOTS = (
    Plot("held", table="held", x="new_token", y="held_cache_bytes", by="bytes_of", y_scale="log2", y_unit="bytes"),
    Plot("errors", table="errors", x="new_token", y="decoded_error", y_scale="log10"),
)
BUDGET_S = 0.05

DRAWN_FLOOR = 1e-17  # an error of exactly 0 is drawn here
CHANGED = 1e-3  # of the largest number of a tensor: far above rounding, far below a change of the vectors


def memory_bytes(params: Params) -> int:
    """The layers; both caches, the source's once a step where it is appended; one pass over all tokens."""
    tokens = params.prompt_len + params.new_tokens
    steps = params.new_tokens if params.cross_caching == "appended" else 1
    layers = params.n_layers * 16 * params.d_model**2
    caches = 2 * params.n_layers * params.d_model * (4 * params.source_len * (steps + 1) + 6 * tokens)
    passed = 24 * (tokens + params.source_len) * params.d_model
    logits = 6 * params.n_heads * tokens * (tokens + params.source_len * steps)
    return 4 * (layers + caches + passed + logits) + 2**19


def run(params: Params, run: Run) -> Result:
    """Decode token by token behind both caches, and compare with one pass.

    ``self_layers_changed_by_source``: layers whose keys of the text change with the source, counted in two passes.

    Shapes: text (prompt_len + new_tokens - 1, d_model), source (source_len, d_model).
    """
    layers = _draw_layers(params, run)
    tokens = params.prompt_len + params.new_tokens - 1  # the last new token is not fed back
    text = run.randn(tokens, params.d_model)
    source, other_source = (run.randn(params.source_len, params.d_model) for _ in range(2))
    run.progress(0.1)

    whole, whole_self, whole_cross = _pass_over(params, layers, text, source)
    _, self_beside_other, cross_of_other = _pass_over(params, layers, text, other_source)
    run.progress(0.3)

    read = cross_of_other if params.cross_caching == "other_source" else whole_cross
    if params.cross_caching == "text_of_other":
        texts = self_beside_other
        texts.truncate(params.prompt_len)
    else:
        texts = KVCache(params.n_layers)
        _extend(params, layers, text[: params.prompt_len], texts, read)
    unit = whole.square().mean().sqrt()
    crosses, rows, errors = read, [], []
    for step in range(1, params.new_tokens):
        run.progress(0.3 + 0.7 * step / params.new_tokens)
        place = params.prompt_len + step - 1
        if params.cross_caching == "appended":
            crosses = _appended(crosses, read)
        out = _extend(params, layers, text[place : place + 1], texts, crosses)
        errors.append(float((out[0] - whole[place]).abs().max() / unit))
        rows.append((step + 1, _held(params, crosses), _held(params, texts)))
    metrics = {
        "decoded_error": max(errors),
        "cross_held_bytes": rows[-1][1],
        "self_held_bytes": rows[-1][2],
        "self_layers_changed_by_source": _layers_changed(params, whole_self, self_beside_other),
        "first_step_cross_bytes": rows[0][1],
    }
    tables = {"held": _held_table(rows), "errors": _error_table(rows, errors)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _draw_layers(params: Params, run: Run) -> list[dict[str, torch.Tensor]]:
    """Self-attention and FFN as in engine/decoding.py, and four matrices that read the source."""
    sizes = StackSizes(params.n_layers, params.n_heads, params.n_heads, params.d_model)
    width = params.d_model
    crosses = [
        {f"cross_{name}": run.randn(width, width) / width**0.5 for name in ("W_q", "W_k", "W_v", "W_o")}
        for _ in range(params.n_layers)
    ]
    return [own | cross for own, cross in zip(draw_layers(sizes, run.randn), crosses, strict=True)]


def _heads(params: Params, x: torch.Tensor) -> torch.Tensor:
    """(seq_len, d_model) to (n_heads, seq_len, d_k)."""
    return x.unflatten(-1, (params.n_heads, -1)).transpose(0, 1)


def _pass_over(
    params: Params, layers: list[dict[str, torch.Tensor]], text: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, KVCache, KVCache]:
    """Outputs of all tokens at once, and both caches behind it."""
    texts, crosses = KVCache(params.n_layers), KVCache(params.n_layers)
    for index, layer in enumerate(layers):
        crosses.append(
            index,
            _heads(params, source @ layer["cross_W_k"].mT),
            _heads(params, source @ layer["cross_W_v"].mT),
        )
    return _extend(params, layers, text, texts, crosses), texts, crosses


def _extend(
    params: Params, layers: list[dict[str, torch.Tensor]], x: torch.Tensor, texts: KVCache, crosses: KVCache
) -> torch.Tensor:
    """Outputs of new tokens behind those in ``texts``, which holds them as well afterwards. Shapes: x (n, d_model)."""
    import torch
    from torch.nn.functional import gelu

    first = len(texts)
    places = torch.arange(first, first + x.shape[0], device=x.device)
    angles = rotary_angles(places, params.d_model // params.n_heads)
    keep = keep_causal(x.shape[0], first + x.shape[0], device=x.device) if x.shape[0] > 1 else None  # one sees all
    for index, layer in enumerate(layers):
        q, k, v = project(layer, x, angles, params.n_heads)
        context = attention(q, *texts.append(index, k, v), keep=keep)
        x = x + context.transpose(0, 1).flatten(-2) @ layer["W_o"].mT
        q = _heads(params, norm(x) @ layer["cross_W_q"].mT)
        context = attention(q, *crosses.stored(index))  # no causal mask: the whole source is there
        x = x + context.transpose(0, 1).flatten(-2) @ layer["cross_W_o"].mT
        x = x + gelu(norm(x) @ layer["W_up"].mT) @ layer["W_down"].mT
    return x


def _appended(held: KVCache, more: KVCache) -> KVCache:
    """A cache with the keys and values of both."""
    both = KVCache(len(held.keys))
    for index in range(len(held.keys)):
        both.append(index, *held.stored(index))
        both.append(index, *more.stored(index))
    return both


def _held(params: Params, cache: KVCache) -> int:
    """Bytes of the keys and values of all layers, in 16 bits."""
    import torch

    held = (x for index in range(params.n_layers) for x in cache.stored(index))
    return sum(torch.empty(x.shape, dtype=torch.float16, device="meta").nbytes for x in held)


def _layers_changed(params: Params, cache: KVCache, other: KVCache) -> int:
    changed = 0
    for index in range(params.n_layers):
        (keys, _), (others, _) = cache.stored(index), other.stored(index)
        changed += bool((keys - others).abs().max() > CHANGED * keys.abs().max())
    return changed


def _held_table(rows: list[tuple[int, int, int]]) -> Table:
    steps, cross, own = (list(column) for column in zip(*rows, strict=True))
    return {
        "new_token": np.array(steps * 2),
        "held_cache_bytes": np.array(cross + own, dtype=float),
        "bytes_of": np.repeat(["cross_cache", "self_cache"], len(steps)),
    }


def _error_table(rows: list[tuple[int, int, int]], errors: list[float]) -> Table:
    return {
        "new_token": np.array([row[0] for row in rows]),
        "decoded_error": np.array(errors).clip(DRAWN_FLOOR),
    }
