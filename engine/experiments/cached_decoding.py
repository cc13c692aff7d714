r"""Decoding with a KV cache against computing everything anew at each step: where they agree, and what breaks it.

A prompt is read in one pass; then new tokens come, ``tokens_per_step`` at a time. Each step is done with the cache, and
by a fresh pass over all tokens so far, whose last rows are what the step ought to give. ``decoded``:

``correctly``          the new tokens alone, at the positions where the cache ends, each seeing all before it and itself
``positions_restart``  the new tokens of each step stand at position 0, 1, ...
``one_position_late``  they stand one position too far, as when the length of the cache is counted twice by one
``top_left_mask``      the triangle of their mask begins at the first key
``no_mask``            no mask: a token also sees those that come with it in the same step
``empty_slots_seen``   the cache has room for all tokens, zeros at first, and the empty slots are not masked
``queries_replaced``   all rows of the attention are computed, those of earlier tokens with noise for their queries
``keys_replaced``      noise for the keys of the earlier tokens
``values_replaced``    noise for their values

The stack is random (engine/decoding.py), with rotary positions. Numbers of 64 bits are computed on the CPU, for not
every accelerator has them, others on the device of the run.

``by_operation`` compares single operations of the first layer: given the same numbers, the row of the last token
computed alone, as a step with a cache does, and together with all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention, attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.decoding import Attend, KVCache, Mask, StackSizes, draw_layers, extend, norm
from engine.masks import keep_causal

if TYPE_CHECKING:
    import torch

WAYS = (
    "correctly",
    "positions_restart",
    "one_position_late",
    "top_left_mask",
    "no_mask",
    "empty_slots_seen",
    "queries_replaced",
    "keys_replaced",
    "values_replaced",
)


@dataclass(frozen=True)
class Params(BaseParams):
    decoded: str = choice(*WAYS)
    number_format: str = choice("float64", "float32", "bfloat16")
    prompt_len: int = number(8, low=0, high=64)
    new_tokens: int = number(4, low=1, high=64)
    tokens_per_step: int = number(2, low=1, high=64)
    n_layers: int = number(2, low=1, high=6)
    n_heads: int = number(4, low=1, high=16, log2=True)
    n_kv_heads: int = number(2, low=1, high=16, log2=True)
    d_model: int = number(64, low=16, high=256, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % (2 * self.n_heads):  # rotary positions turn pairs of coordinates
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_of_even_width", values={"d_model": self.d_model})
        if self.n_heads % self.n_kv_heads:
            yield Problem(
                "rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values={"n_heads": self.n_heads}
            )
        if self.tokens_per_step > self.new_tokens:
            values = {"new_tokens": self.new_tokens}
            yield Problem("rule", "tokens_per_step", self.tokens_per_step, rule="step_within_new", values=values)


METRICS = (
    Metric("largest_error"),
    Metric("last_step_error"),
    Metric("cache_error"),
    Metric("bits_differ_share"),
)
PLOTS = (
    Plot("by_way", table="by_way", x="decoded", y="drawn_error", mark="bar", y_scale="log10"),
    Plot("by_step", table="by_step", x="position", y="drawn_error", by="decoded", mark="point", y_scale="log10"),
    Plot("by_operation", table="by_operation", x="operation", y="bits_differ_share", mark="bar"),
)
BUDGET_S = 0.1

DRAWN_FLOOR = 1e-17  # where an error of exactly 0 is drawn and bars begin: below rounding in float64


def memory_bytes(params: Params) -> int:
    """Float64: weights, caches and activations of two passes, their logits, and the noise."""
    tokens = params.prompt_len + params.new_tokens
    weights = 2 * params.n_layers * 12 * params.d_model**2
    caches = (2 * len(WAYS) + 6) * params.n_layers * tokens * params.d_model
    activations = 40 * tokens * params.d_model + 12 * params.n_heads * tokens**2
    return 8 * (weights + caches + activations)


def run(params: Params, run: Run) -> Result:
    """Decode in all ways, and compare each step with the pass over all tokens so far.

    ``largest_error``: of all tokens that were decoded, root mean square of the difference of a token's output over
    that of its own; ``last_step_error``: of the last token. ``cache_error``: of the stored keys and values of the last
    layer at the end, against those of one pass. ``bits_differ_share``: of the numbers of all decoded outputs.

    Shapes: tokens (seq_len, d_model).
    """
    import torch

    dtype = getattr(torch, params.number_format)
    device = torch.device("cpu") if params.number_format == "float64" else run.device

    def normal(*shape: int) -> torch.Tensor:
        return run.randn(*shape).to(device).to(dtype)

    sizes = StackSizes(params.n_layers, params.n_heads, params.n_kv_heads, params.d_model)
    layers = draw_layers(sizes, normal)
    length = params.prompt_len + params.new_tokens
    tokens = normal(length, params.d_model)
    noise = [[normal(params.n_heads, length, sizes.d_k) for _ in range(params.n_layers)] for _ in "qkv"]

    wanted = []
    for start, end in _steps(params):
        full = KVCache(params.n_layers)
        wanted.append(extend(layers, tokens[:end], full, n_heads=params.n_heads)[start:])
        run.progress(0.3 * end / length)
    prompt = KVCache(params.n_layers)
    if params.prompt_len:
        extend(layers, tokens[: params.prompt_len], prompt, n_heads=params.n_heads)
    errors = {}
    for done, way in enumerate(WAYS):
        run.progress(0.3 + 0.6 * done / len(WAYS))
        outputs, cache = _decode(params, way, layers, tokens, prompt, noise, run, 0.3 + 0.6 * done / len(WAYS))
        errors[way] = torch.cat([_relative(out, want) for out, want in zip(outputs, wanted, strict=True)])
        if way == params.decoded:
            cache_error = _cache_error(cache, full)
            same = torch.cat([(out == want).flatten() for out, want in zip(outputs, wanted, strict=True)])
    chosen = errors[params.decoded]
    metrics = {
        "largest_error": chosen.max(),
        "last_step_error": chosen[-1],
        "cache_error": cache_error,
        "bits_differ_share": 1 - same.float().mean(),
    }
    tables = _tables(params, errors) | {"by_operation": _by_operation(params, layers[0], tokens)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _steps(params: Params) -> list[tuple[int, int]]:
    """Where each step behind the prompt begins and ends; the last may be shorter."""
    length = params.prompt_len + params.new_tokens
    starts = range(params.prompt_len, length, params.tokens_per_step)
    return [(start, min(length, start + params.tokens_per_step)) for start in starts]


class _RoomyCache(KVCache):
    """One that can show its empty slots as well."""

    empty_shown = False

    def stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.empty_shown:
            return super().stored(layer)
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        return keys, values


def _decode(
    params: Params,
    way: str,
    layers: list[dict[str, torch.Tensor]],
    tokens: torch.Tensor,
    prompt: KVCache,
    noise: list[list[torch.Tensor]],
    run: Run,
    fraction: float,
) -> tuple[list[torch.Tensor], KVCache]:
    """Outputs of each step, and the cache at the end. The pass over the prompt is right, and the same, in every way."""
    import torch

    cache = _RoomyCache(params.n_layers, room=len(tokens))
    if len(prompt):
        for layer in range(params.n_layers):
            cache.append(layer, *prompt.stored(layer))
    outputs = []
    for start, end in _steps(params):
        run.progress(fraction)
        shift = {"positions_restart": -start, "one_position_late": 1}.get(way, 0)
        cache.empty_shown = way == "empty_slots_seen"
        outputs.append(
            extend(
                layers,
                tokens[start:end],
                cache,
                n_heads=params.n_heads,
                mask=_mask(way, len(tokens), tokens.device),
                positions=torch.arange(start, end, device=tokens.device) + shift,
                attend=_attend(way, start, noise),
            )
        )
    cache.empty_shown = False
    return outputs, cache


def _mask(way: str, room: int, device: torch.device) -> Mask:
    import torch

    def keep(q_len: int, kv_len: int) -> torch.Tensor | None:
        if way == "no_mask":
            return None
        corner = "top_left" if way == "top_left_mask" else "bottom_right"
        causal = keep_causal(q_len, kv_len, alignment=corner, device=device)
        if way != "empty_slots_seen":
            return causal
        return torch.cat((causal, causal.new_ones(q_len, room - kv_len)), dim=-1)

    return keep


def _attend(way: str, past: int, noise: list[list[torch.Tensor]]) -> Attend | None:
    """Attention with noise in place of what belongs to the ``past`` tokens that were there before the step."""
    import torch

    if not way.endswith("_replaced"):
        return None
    replaced = noise[("queries_replaced", "keys_replaced", "values_replaced").index(way)]

    def attend(
        layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        earlier = replaced[layer][:, :past]
        if way == "keys_replaced":
            return attention(q, torch.cat((earlier, keys[:, past:]), dim=1), values, keep=keep)
        if way == "values_replaced":
            return attention(q, keys, torch.cat((earlier, values[:, past:]), dim=1), keep=keep)
        rows = attention(torch.cat((earlier, q), dim=1), keys, values, keep=keep_causal(keys.shape[1], device=q.device))
        return rows[:, past:]

    return attend


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Root mean square of the difference of each row over that of the row, at least in float32."""
    import torch

    high = torch.promote_types(got.dtype, torch.float32)
    got, wanted = got.to(high), wanted.to(high)
    return (got - wanted).square().mean(dim=-1).sqrt() / wanted.square().mean(dim=-1).sqrt()


def _cache_error(cache: KVCache, full: KVCache) -> torch.Tensor:
    last = len(cache.keys) - 1
    pairs = zip(cache.stored(last), full.stored(last), strict=True)
    errors = [_relative(got.flatten()[None], wanted.flatten()[None]) for got, wanted in pairs]
    return max(errors)


def _by_operation(params: Params, layer: dict[str, torch.Tensor], tokens: torch.Tensor) -> Table:
    """Of single operations, the share of the numbers of the last row whose bits depend on the rows beside it."""
    keep = keep_causal(len(tokens), device=tokens.device)
    normed = norm(tokens)
    q, k, v = (
        (normed @ layer[name].mT).unflatten(-1, (-1, params.d_model // params.n_heads)).transpose(0, 1)
        for name in ("W_q", "W_k", "W_v")
    )
    q, k, v = q[:1], k[:1], v[:1]  # of the first head
    logits = attention_logits(q, k)
    weights = softmax(mask_logits(logits, keep))
    up = normed @ layer["W_up"].mT
    pairs = {
        "layer_norm": (normed[-1:], norm(tokens[-1:])),
        "projection": (up[-1:], normed[-1:] @ layer["W_up"].mT),
        "qk": (logits[:, -1:], attention_logits(q[:, -1:], k)),
        "softmax": (weights[:, -1:], softmax(logits[:, -1:])),
        "weights_v": (context(weights, v)[:, -1:], context(weights[:, -1:], v)),
    }
    return {
        "operation": np.array(list(pairs)),
        "bits_differ_share": np.array([float((a != b).float().mean()) for a, b in pairs.values()]),
    }


def _tables(params: Params, errors: dict[str, torch.Tensor]) -> dict[str, Table]:
    drawn = {way: np.maximum(error.cpu().double().numpy(), DRAWN_FLOOR) for way, error in errors.items()}
    shown = list(dict.fromkeys(("correctly", params.decoded)))
    positions = np.arange(params.prompt_len, params.prompt_len + params.new_tokens)
    return {
        "by_step": {
            "position": np.tile(positions, len(shown)),
            "decoded": np.repeat(shown, len(positions)),
            "drawn_error": np.concatenate([drawn[way] for way in shown]),
        },
        "by_way": {"decoded": np.array(list(drawn)), "drawn_error": np.array([x.max() for x in drawn.values()])},
    }
