r"""Move a text to other positions and read it with the same layers: which encodings notice, and in which layer.

What depends on distances alone gives every layer the logits it had, if *all* distances stay. Six encodings side by
side, under five moves:

``all_ids``        every position id is raised by the shift
``all_but_first``  every id but that of the first token, as when a first token keeps its place before what is moved
``text_before``    other tokens are put in front, and the ids count on: the later tokens see more of them
``cache_kept``     k and v of all but the last token were cached at the shifted ids; the last one comes with the id that
                   the length of the cache says
``cache_turned``   the same, and cached rotary keys are turned back by the shift first

A bias is looked up when a query meets the cache, by the places in it, so nothing in its keys is to be turned. What was
added to a token is in its k, its v and in all that later layers made of them.

The stack is random, as before training: pre-norm blocks with matrices N(0, 1/fan_in), tokens N(0, 1), sinusoids and a
learned table of the same root mean square, T5's biases N(0, 1) and the same in all layers. It is computed on the CPU in
the number format asked for, float64 unless changed, for the law is exact and not every accelerator has float64. Angles
are exact in float64 and otherwise computed in float32.

Sources: vaswani2017, section 3.5; su2021-roformer, section 3.2.2; press2022 (ALiBi); t5-code,
``_relative_position_bucket``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.encodings import alibi_bias, from_table, sinusoidal
from engine.masks import keep_causal, keep_window
from engine.positions import BASE, rotate
from engine.rotary import exact_angles, rounded_angles

if TYPE_CHECKING:
    import torch

ENCODINGS = ("learned_table", "sinusoidal", "no_positions", "relative_bias", "alibi", "rope")
MOVES = ("all_ids", "all_but_first", "text_before", "cache_kept", "cache_turned")


@dataclass(frozen=True)
class Params(BaseParams):
    positions: str = choice("rope", "learned_table", "sinusoidal", "relative_bias", "alibi", "no_positions")
    move: str = choice(*MOVES)
    position_shift: int = number(500, low=1, high=16384, log2=True)
    n_before: int = number(16, low=1, high=64)
    window: int = number(64, low=1, high=64)
    number_format: str = choice("float64", "float32", "bfloat16")
    n_layers: int = number(2, low=1, high=6)
    seq_len: int = number(16, low=4, high=64)
    d_model: int = number(32, low=16, high=128, log2=True)
    n_heads: int = number(2, low=1, high=8, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % (2 * self.n_heads):  # rotary positions turn pairs of coordinates
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_of_even_width", values={"d_model": self.d_model})


METRICS = (
    Metric("output_change"),
    Metric("logits_change_first"),
    Metric("logits_change_last"),
    Metric("last_output_change"),
)
PLOTS = (
    Plot(
        "by_positions",
        table="by_positions",
        x="positions",
        y="last_output_change",
        by="move",
        mark="bar",
        y_scale="log10",
    ),
    Plot("by_layer", table="by_layer", x="positions", y="logits_change", by="layer", mark="bar", y_scale="log10"),
    Plot(
        "by_shift",
        table="by_shift",
        x="position_shift",
        y="output_change",
        by="positions",
        x_scale="log2",
        y_scale="log10",
    ),
)
BUDGET_S = 0.1

SHIFTS = (1, 64, 512, 4096)
DRAWN_FLOOR = 0.05  # of the spacing of numbers at 1: where a change of exactly 0 is drawn and bars begin
FFN_FACTOR = 4
BUCKETS = 32
MAX_DISTANCE = 128


class _Model(NamedTuple):
    layers: list[dict[str, torch.Tensor]]
    table: torch.Tensor  # (n_positions, d_model)
    biases: torch.Tensor  # (BUCKETS, n_heads)
    n_heads: int
    window: int


class _Seen(NamedTuple):
    """What one pass computes, for each of ENCODINGS and each vector of ids (batch)."""

    logits: torch.Tensor  # (n_layers, n_encodings, batch, n_heads, q_len, kv_len)
    outputs: torch.Tensor  # (n_encodings, batch, q_len, d_model)
    keys: list[torch.Tensor]  # of each layer, as a cache holds them: (n_encodings, batch, n_heads, kv_len, d_k)
    values: list[torch.Tensor]


class _Change(NamedTuple):
    """What a move changes, for each of ENCODINGS."""

    logits: torch.Tensor  # (n_layers, n_encodings)
    outputs: torch.Tensor  # (n_encodings,)
    last: torch.Tensor


def memory_bytes(params: Params) -> int:
    """Float64: weights, the table, and of all encodings and moves the logits and activations of every layer."""
    tokens, passes = params.n_before + params.seq_len, len(ENCODINGS) * (3 + len(SHIFTS))
    weights = params.n_layers * (4 + 2 * FFN_FACTOR) * params.d_model**2
    table = 3 * (max(params.position_shift, *SHIFTS) + tokens) * params.d_model
    logits = (2 * params.n_layers + 6) * passes * params.n_heads * tokens**2
    activations = (4 * params.n_layers + 4 * FFN_FACTOR + 12) * passes * tokens * params.d_model
    return 8 * (weights + table + logits + activations) + 2**16


def run(params: Params, run: Run) -> Result:
    """The same tokens with the same layers before and after the move.

    ``output_change``: root mean square of the difference over that of the outputs, for all tokens, under the moves of a
    cache for the last one, which alone is computed anew. ``logits_change_*``: the same over the standard deviation of
    the logits, for the visible pairs of the text itself.
    """
    tokens, before, model = _draw(params, run)
    run.progress(0.1)
    shifts, changes = _try_moves(params, run, tokens, before, model)
    chosen, encoding = changes[params.move], ENCODINGS.index(params.positions)
    metrics = {
        "output_change": chosen.outputs[encoding],
        "logits_change_first": chosen.logits[0, encoding],
        "logits_change_last": chosen.logits[-1, encoding],
        "last_output_change": chosen.last[encoding],
    }
    return Result({name: float(value) for name, value in metrics.items()}, _tables(params, shifts, changes))


def _draw(params: Params, run: Run) -> tuple[torch.Tensor, torch.Tensor, _Model]:
    """Tokens of the text and of what is put in front of it, and the model, in the number format of the run."""
    import torch

    dtype = getattr(torch, params.number_format)

    def normal(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().to(dtype)

    tokens, before = normal(params.seq_len, params.d_model), normal(params.n_before, params.d_model)
    layers = []
    for _ in range(params.n_layers):
        shapes = dict.fromkeys(("W_q", "W_k", "W_v", "W_o"), (params.d_model, params.d_model))
        shapes["W_up"] = (params.d_model, FFN_FACTOR * params.d_model)
        shapes["W_down"] = (FFN_FACTOR * params.d_model, params.d_model)
        layers.append({name: normal(*shape) / shape[0] ** 0.5 for name, shape in shapes.items()})
    biases = normal(BUCKETS, params.n_heads)
    n_positions = max(params.position_shift, *SHIFTS) + params.n_before + params.seq_len
    table = normal(n_positions, params.d_model) / 2**0.5  # the root mean square of sinusoids
    return tokens, before, _Model(layers, table, biases, params.n_heads, params.window)


def _try_moves(
    params: Params, run: Run, tokens: torch.Tensor, before: torch.Tensor, model: _Model
) -> tuple[torch.Tensor, dict[str, _Change]]:
    """The change of the outputs at each of SHIFTS, (n_shifts, n_encodings), and what each move changes."""
    import torch

    order, shift = torch.arange(params.seq_len), params.position_shift
    ids = torch.stack((order, order + shift, order + shift * (order > 0), *(order + s for s in SHIFTS)))
    seen = _read(model, tokens, ids)
    run.progress(0.5)

    # the cache that was filled at the shifted ids, without its last token, as it is and with its keys turned back
    keys, values = ([x[:, 1, :, :-1] for x in cached] for cached in (seen.keys, seen.values))
    d_k = keys[0].shape[-1]
    back = torch.zeros(len(ENCODINGS), 1, params.seq_len - 1, d_k // 2, dtype=torch.float64)  # the same for all heads
    back[ENCODINGS.index("rope")] = _angles(torch.full((params.seq_len - 1,), -shift), d_k, tokens.dtype)
    past = [torch.stack((k, rotate(k, back)), dim=1) for k in keys], [torch.stack((v, v), dim=1) for v in values]
    decoded = _read(model, tokens[-1:], order[-1:].expand(2, -1), past)
    run.progress(0.6)
    behind = _read(model, torch.cat((before, tokens)), torch.arange(params.n_before + params.seq_len)[None])

    visible = _keep(model, params.seq_len, params.seq_len)
    logits, outputs = seen.logits[:, :, 0], seen.outputs[:, 0]
    moved = {
        "all_ids": (seen.logits[:, :, 1], seen.outputs[:, 1]),
        "all_but_first": (seen.logits[:, :, 2], seen.outputs[:, 2]),
        "text_before": (behind.logits[:, :, 0, :, -params.seq_len :, -params.seq_len :], behind.outputs[:, 0]),
        "cache_kept": (decoded.logits[:, :, 0], decoded.outputs[:, 0]),
        "cache_turned": (decoded.logits[:, :, 1], decoded.outputs[:, 1]),
    }
    changes = {}
    for name, (new_logits, new_outputs) in moved.items():
        q_len = new_logits.shape[-2]  # of the queries that it computes: all, or the last one
        new_outputs = new_outputs[:, -q_len:]
        changes[name] = _Change(
            _compare_logits(logits, new_logits, visible),
            _compare(outputs[:, -q_len:], new_outputs),
            _compare(outputs[:, -1:], new_outputs[:, -1:]),
        )
    return torch.stack([_compare(outputs, seen.outputs[:, 3 + i]) for i in range(len(SHIFTS))]), changes


def _compare(still: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """The size of the difference over that of ``still``. Shapes: (n_encodings, q_len, d_model) to (n_encodings,)."""
    apart, still = (moved - still).cpu().double(), still.cpu().double()
    return (apart.square().sum(dim=(-2, -1)) / still.square().sum(dim=(-2, -1))).sqrt()


def _compare_logits(still: torch.Tensor, moved: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Root mean square of the difference over the standard deviation of the logits of the text, for visible pairs.

    Shapes: still (..., n_heads, seq_len, seq_len), moved (..., n_heads, q_len, seq_len); returns (...).
    """
    q_len = moved.shape[-2]
    size = still[..., visible].cpu().double().std(dim=(-2, -1))
    apart = (moved - still[..., -q_len:, :])[..., visible[-q_len:]].cpu().double()
    return apart.square().mean(dim=(-2, -1)).sqrt() / size


def _keep(model: _Model, q_len: int, kv_len: int) -> torch.Tensor:
    """The causal mask, and within it the window, if that is shorter than the text."""
    return keep_window(q_len, kv_len, window=model.window) if model.window < kv_len else keep_causal(q_len, kv_len)


def _angles(ids: torch.Tensor, d_k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rotary angles, exact or as float32 computes them. Shapes: ids (..., q_len); returns (..., q_len, d_k / 2)."""
    import torch

    if dtype == torch.float64:
        return exact_angles(ids, d_k)
    return rounded_angles(ids, d_k, BASE, torch.float32)


def _vectors(model: _Model, ids: torch.Tensor) -> torch.Tensor:
    """What each encoding adds to the tokens. Shapes: ids (batch, q_len); (n_encodings, batch, q_len, d_model)."""
    import torch

    table = model.table
    vectors = torch.zeros(len(ENCODINGS), *ids.shape, table.shape[-1], dtype=table.dtype)
    places = ids.flatten().cpu().double() if table.dtype == torch.float64 else ids.flatten()
    vectors[ENCODINGS.index("learned_table")] = from_table(table, ids.flatten()).view_as(vectors[0])
    vectors[ENCODINGS.index("sinusoidal")] = sinusoidal(places, table.shape[-1]).view_as(vectors[0])
    return vectors


def _biases(model: _Model, ids: torch.Tensor, kv_ids: torch.Tensor) -> torch.Tensor:
    """What each encoding adds to the logits.

    Shapes: ids (batch, q_len), kv_ids (batch, kv_len); returns (n_encodings, batch, n_heads, q_len, kv_len).
    """
    import torch

    biases = torch.zeros(
        len(ENCODINGS), len(ids), model.n_heads, ids.shape[1], kv_ids.shape[1], dtype=model.table.dtype
    )
    buckets = _buckets(ids[:, :, None] - kv_ids[:, None, :])
    biases[ENCODINGS.index("relative_bias")] = model.biases[buckets].permute(0, 3, 1, 2)
    by_distance = [alibi_bias(model.n_heads, q, kv) for q, kv in zip(ids, kv_ids, strict=True)]
    biases[ENCODINGS.index("alibi")] = torch.stack(by_distance)
    return biases


def _buckets(distance: torch.Tensor) -> torch.Tensor:
    """Which learned scalar a distance back in the text gets in a decoder of T5.

    Half of the buckets hold one distance each, the others ranges that widen with the logarithm; all distances from
    MAX_DISTANCE on share the last one, keys behind their query the first. Shapes: query minus key, int64; the same.
    """
    distance = distance.clamp_min(0)
    exact = BUCKETS // 2
    ratio = (distance.clamp_min(exact).float() / exact).log() / math.log(MAX_DISTANCE / exact)
    wide = exact + (ratio * (BUCKETS - exact)).long()
    return distance.where(distance < exact, wide.clamp_max(BUCKETS - 1))


def _read(
    model: _Model,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    past: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None,
) -> _Seen:
    """The stack under all encodings: a vector added to each token, an angle for its q and k, a bias for each pair.

    An encoding that has no vector, angle or bias has 0 there, which changes nothing, to the last bit.

    Shapes: tokens (q_len, d_model), ids (batch, q_len), past k and v of each layer as in :class:`_Seen`.
    """
    import torch
    from torch.nn.functional import gelu, layer_norm

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (model.n_heads, -1)).transpose(-3, -2)  # (..., n_heads, q_len, d_k)

    d_k = tokens.shape[-1] // model.n_heads
    angles = torch.zeros(len(ENCODINGS), len(ids), 1, ids.shape[1], d_k // 2, dtype=torch.float64)
    angles[ENCODINGS.index("rope"), :, 0] = _angles(ids, d_k, tokens.dtype)
    # a query that meets a cache looks biases up by the places in it
    kv_ids = torch.arange(past[0][0].shape[-2] + 1).expand(len(ids), -1) if past else ids
    biases, keep = _biases(model, ids, kv_ids), _keep(model, ids.shape[1], kv_ids.shape[1])
    x = tokens + _vectors(model, ids)
    logits, keys, values = [], [], []
    for depth, layer in enumerate(model.layers):
        normed = layer_norm(x, x.shape[-1:])
        q, k, v = (heads(normed @ layer[name]) for name in ("W_q", "W_k", "W_v"))
        q, k = rotate(q, angles), rotate(k, angles)
        if past:
            k, v = torch.cat((past[0][depth], k), dim=-2), torch.cat((past[1][depth], v), dim=-2)
        z = attention_logits(q, k) + biases
        x = x + context(softmax(mask_logits(z, keep)), v).transpose(-3, -2).flatten(-2) @ layer["W_o"]
        x = x + gelu(layer_norm(x, x.shape[-1:]) @ layer["W_up"]) @ layer["W_down"]
        logits.append(z)
        keys.append(k)
        values.append(v)
    return _Seen(torch.stack(logits), x, keys, values)


def _tables(params: Params, shifts: torch.Tensor, changes: dict[str, _Change]) -> dict[str, Table]:
    """Every encoding under every move, in every layer under the chosen one, and at every shift of all ids."""
    import torch

    floor = DRAWN_FLOOR * torch.finfo(getattr(torch, params.number_format)).eps
    by_layer, last = changes[params.move].logits.T, torch.stack([change.last for change in changes.values()])
    return {
        "by_positions": {
            "positions": np.tile(ENCODINGS, len(MOVES)),
            "move": np.repeat(MOVES, len(ENCODINGS)),
            "last_output_change": last.flatten().numpy().clip(floor),
        },
        "by_layer": {
            "positions": np.repeat(ENCODINGS, params.n_layers),
            "layer": np.tile(np.arange(params.n_layers), len(ENCODINGS)),
            "logits_change": by_layer.flatten().numpy().clip(floor),
        },
        "by_shift": {
            "positions": np.tile(ENCODINGS, len(SHIFTS)),
            "position_shift": np.repeat(SHIFTS, len(ENCODINGS)),
            "output_change": shifts.flatten().numpy().clip(floor),
        },
    }
