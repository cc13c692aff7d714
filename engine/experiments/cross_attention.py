r"""Cross-attention between two sequences: which orders, padding and tokens its outputs depend on, and miswired calls.

A source is read by an encoder (one bidirectional layer of one head, width ``d_source``); a target of width ``d_model``
reads the encoder's outputs:

.. math:: \mathrm{out} = \mathrm{softmax}\big(X W_q\,(M W_k)^\top/\sqrt{d_k}\big)\,M W_v\,W_o,\quad M=\mathrm{enc}(S)

so the lengths of X and S are free of each other, and W_k and W_v take another width. In exact arithmetic a permutation
P of the rows of M changes nothing, as it permutes keys and values alike; a permutation of X permutes the outputs; and
each output is made of its own query alone. Positions that are added to the source tokens before the encoder stay with
the rows of M; rotary positions of q and k count places of two sequences that have no common origin.

``cross_wiring`` takes q, k or v from elsewhere: ``keys_from_target`` with values from the source runs where both are as
long; ``roles_swapped`` asks with the source and reads the target.

The sequences that keys and values come from are also padded, all with one vector, and the outputs of the tokens are
compared with those without padding; the encoder hides its padding. ``cross_mask``: ``padding_mask`` hides padding;
``causal`` stands in its place and lets query i see keys up to i, as ``is_causal=True`` does.

Errors are largest differences of any coordinate, in units of the root mean square of the outputs.

Source: vaswani2017, section 3.2.3; lee2019, abstract (attention on sets).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention, attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.encodings import sinusoidal
from engine.maps import weight_map
from engine.masks import keep_causal, keep_padding
from engine.positions import rotary_angles, rotate

if TYPE_CHECKING:
    import torch

CROSS_POSITIONS = ("no_positions", "added_to_source", "rope_on_queries", "rope_on_both")
REORDERED = ("encoder_outputs", "source_tokens")
ORIGINS = {  # of q, k and v
    "queries_from_target": ("target", "source", "source"),
    "keys_from_target": ("target", "target", "source"),
    "roles_swapped": ("source", "target", "target"),
}


@dataclass(frozen=True)
class Params(BaseParams):
    q_len: int = number(8, low=2, high=256, log2=True)
    kv_len: int = number(8, low=2, high=256, log2=True)
    cross_wiring: str = choice(*ORIGINS)
    cross_positions: str = choice(*CROSS_POSITIONS)
    cross_mask: str = choice("padding_mask", "no_mask", "causal")
    padding_len: int = number(4, low=1, high=64)
    padding_side: str = choice("padding_right", "padding_left")
    d_model: int = number(32, low=16, high=256, log2=True)
    d_source: int = number(48, low=8, high=256)
    n_heads: int = number(4, low=1, high=8, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % (2 * self.n_heads):  # rotary positions turn pairs of coordinates
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_of_even_width", values={"d_model": self.d_model})
        if self.cross_wiring == "keys_from_target" and self.q_len != self.kv_len:
            values = {"q_len": self.q_len, "kv_len": self.kv_len}
            yield Problem("rule", "kv_len", self.kv_len, rule="keys_beside_values", values=values)


METRICS = (
    Metric("encoder_order_error"),
    Metric("source_order_error"),
    Metric("target_order_error"),
    Metric("earlier_output_change"),
    Metric("padding_error"),
    Metric("padding_weight_share"),
    Metric("keys_seen_min"),
    Metric("output_rows"),
)
PLOTS = (
    Plot(
        "orders",
        table="orders",
        x="cross_positions",
        y="reversal_change",
        by="reordered",
        mark="point",
        y_scale="log10",
    ),
    Plot("weights", table="weights", mark="heat", x="key_position", y="query_position", value="attention_weight"),
)
BUDGET_S = 0.02

DRAWN_FLOOR = 1e-17  # an error of exactly 0 is drawn here
N_SHOWN = 48  # queries and keys of the map


def memory_bytes(params: Params) -> int:
    """The matrices twice, one of them in the making; of two calls everything, with the steps of a softmax."""
    width, longest = max(params.d_model, params.d_source), max(params.q_len, params.kv_len) + params.padding_len
    matrices = 10 * width * width
    call = 16 * longest * width + 6 * (params.n_heads + 1) * longest * longest
    return 4 * (matrices + 2 * call) + 2**18


def run(params: Params, run: Run) -> Result:
    """One call as it should be, and again with one thing changed: an order, a token, padding.

    ``encoder_order_error``, ``source_order_error``: the encoder's outputs in reverse order, or the tokens before it.
    ``keys_seen_min``: how many tokens, padding aside, the query that sees the fewest puts weight on in the padded call.

    Shapes: target (q_len, d_model), source (kv_len, d_source); out (rows of the queries, d_model).
    """
    import torch

    drawn = _draw(params, run)
    passes = 6 + len(CROSS_POSITIONS) * len(REORDERED)
    done = iter(range(passes))
    encoded: dict[tuple[bool, bool], torch.Tensor] = {}

    def memory_of(reverse: bool, positions: str) -> torch.Tensor:
        """The encoder's outputs; rotary positions are not its own."""
        key = reverse, positions == "added_to_source"
        if key not in encoded:
            encoded[key] = _encode(drawn.source.flip(0) if reverse else drawn.source, drawn, positions)
        return encoded[key]

    def outputs(
        target: torch.Tensor, positions: str = params.cross_positions, *, reverse: bool = False, turn: bool = False
    ) -> torch.Tensor:
        """Without padding. ``reverse``: the source's tokens in reverse order, ``turn``: the encoder's outputs."""
        run.progress(next(done) / passes)
        memory = memory_of(reverse, positions)
        memory = memory.flip(0) if turn else memory
        keep = None
        if params.cross_mask == "causal":
            rows, keys = _lengths(params, memory, target)
            keep = keep_causal(rows, keys, alignment="top_left", device=memory.device)
        return _call(params, drawn, memory, target, keep, positions).out

    plain = outputs(drawn.target)
    unit = plain.square().mean().sqrt()

    def turned(positions: str, reordered: str) -> torch.Tensor:
        """With the source in reverse order; the outputs put back where they follow it."""
        turn = reordered == "encoder_outputs"
        found = outputs(drawn.target, positions, reverse=not turn, turn=turn)
        return found.flip(0) if params.cross_wiring == "roles_swapped" else found

    orders = {}
    for positions in CROSS_POSITIONS:
        still = plain if positions == params.cross_positions else outputs(drawn.target, positions)
        for reordered in REORDERED:
            orders[positions, reordered] = _apart(turned(positions, reordered), still, still.square().mean().sqrt())
    target_turned = outputs(drawn.target.flip(0))
    if params.cross_wiring != "roles_swapped":
        target_turned = target_turned.flip(0)
    other_last = torch.cat((drawn.target[:-1], drawn.other_token))
    replaced = outputs(other_last)
    others = slice(None) if params.cross_wiring == "roles_swapped" else slice(-1)  # whose query was not replaced

    padded, real_rows, real_keys = _padded_call(params, drawn)
    unmasked = plain
    if params.cross_mask == "causal":
        memory = memory_of(False, params.cross_positions)
        unmasked = _call(params, drawn, memory, drawn.target, None, params.cross_positions).out
    weights = padded.weights[:, real_rows]
    metrics = {
        "encoder_order_error": orders[params.cross_positions, "encoder_outputs"],
        "source_order_error": orders[params.cross_positions, "source_tokens"],
        "target_order_error": _apart(target_turned, plain, unit),
        "earlier_output_change": _apart(replaced[others], plain[others], unit),
        "padding_error": _apart(padded.out[real_rows], unmasked, unmasked.square().mean().sqrt()),
        "padding_weight_share": float(weights[..., ~real_keys].sum(-1).mean()),
        "keys_seen_min": float((weights[..., real_keys] > 0).sum(-1).min()),
        "output_rows": float(plain.shape[0]),
    }
    return Result(metrics, {"orders": _orders(orders), "weights": weight_map(weights[0], N_SHOWN)})


class _Drawn(NamedTuple):
    source: torch.Tensor
    target: torch.Tensor
    other_token: torch.Tensor
    source_padding: torch.Tensor
    target_padding: torch.Tensor
    encoder: tuple[torch.Tensor, ...]
    matrices: tuple[torch.Tensor, ...]


class _Call(NamedTuple):
    weights: torch.Tensor
    out: torch.Tensor


def _draw(params: Params, run: Run) -> _Drawn:
    """Tokens N(0, 1), one padding vector for each sequence, matrices N(0, 1/fan_in)."""
    widths = {"target": params.d_model, "source": params.d_source}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return run.randn(rows, columns) * rows**-0.5

    return _Drawn(
        source=run.randn(params.kv_len, params.d_source),
        target=run.randn(params.q_len, params.d_model),
        other_token=run.randn(1, params.d_model),
        source_padding=run.randn(1, params.d_source),
        target_padding=run.randn(1, params.d_model),
        encoder=tuple(matrix(params.d_source, params.d_source) for _ in range(4)),
        matrices=(
            *(matrix(widths[origin], params.d_model) for origin in ORIGINS[params.cross_wiring]),
            matrix(params.d_model, params.d_model),
        ),
    )


def _encode(source: torch.Tensor, drawn: _Drawn, positions: str, keep: torch.Tensor | None = None) -> torch.Tensor:
    """One bidirectional layer. Shapes: source (kv_len, d_source), returned in the same shape; keep (1, kv_len)."""
    import torch

    if positions == "added_to_source":
        width = source.shape[-1]
        places = torch.arange(source.shape[0], device=source.device)
        source = source + sinusoidal(places, width + width % 2)[:, :width].to(source.dtype)
    W_q, W_k, W_v, W_o = drawn.encoder
    return source + attention(source @ W_q, source @ W_k, source @ W_v, keep=keep) @ W_o


def _call(
    params: Params,
    drawn: _Drawn,
    memory: torch.Tensor,
    target: torch.Tensor,
    keep: torch.Tensor | None,
    positions: str,
) -> _Call:
    """Shapes: memory (kv_len, d_source), target (q_len, d_model), keep broadcastable to (rows, keys)."""
    import torch

    *projections, W_o = drawn.matrices
    sequences = {"target": target, "source": memory}
    q, k, v = (
        (sequences[origin] @ W).unflatten(-1, (params.n_heads, -1)).transpose(0, 1)  # (n_heads, seq_len, d_k)
        for origin, W in zip(ORIGINS[params.cross_wiring], projections, strict=True)
    )
    if positions in ("rope_on_queries", "rope_on_both"):
        places = torch.arange(max(q.shape[1], k.shape[1]), device=q.device)
        angles = rotary_angles(places, q.shape[-1])
        q = rotate(q, angles[: q.shape[1]])
        k = rotate(k, angles[: k.shape[1]]) if positions == "rope_on_both" else k
    logits = attention_logits(q, k)
    weights = softmax(logits if keep is None else mask_logits(logits, keep))
    return _Call(weights, context(weights, v).transpose(0, 1).flatten(-2) @ W_o)


def _lengths(params: Params, memory: torch.Tensor, target: torch.Tensor) -> tuple[int, int]:
    """Numbers of queries and of keys."""
    lengths = {"target": target.shape[0], "source": memory.shape[0]}
    of_q, of_k, _ = ORIGINS[params.cross_wiring]
    return lengths[of_q], lengths[of_k]


def _padded_call(params: Params, drawn: _Drawn) -> tuple[_Call, torch.Tensor, torch.Tensor]:
    """The call with padding on the sequences of keys and values; which queries and which keys are tokens.

    Shapes: bool (rows,) and (keys,).
    """
    import torch

    def pad(tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        more = padding.expand(params.padding_len, -1)
        return torch.cat((tokens, more) if params.padding_side == "padding_right" else (more, tokens))

    def tokens_of(sequence: torch.Tensor, length: int) -> torch.Tensor:
        if sequence.shape[0] == length:  # without padding
            return torch.ones(length, dtype=torch.bool, device=sequence.device)
        return keep_padding(
            [length], sequence.shape[0], side=params.padding_side.removeprefix("padding_"), device=sequence.device
        )[0, 0]

    of_q, of_k, of_v = ORIGINS[params.cross_wiring]
    source, target = drawn.source, drawn.target
    if "source" in (of_k, of_v):
        source = pad(source, drawn.source_padding)
    if "target" in (of_k, of_v):
        target = pad(target, drawn.target_padding)
    real = {"source": tokens_of(source, params.kv_len), "target": tokens_of(target, params.q_len)}
    keep = None
    if params.cross_mask == "padding_mask":
        keep = real[of_k][None]
    elif params.cross_mask == "causal":
        rows, keys = _lengths(params, source, target)
        keep = keep_causal(rows, keys, alignment="top_left", device=source.device)
    memory = _encode(source, drawn, params.cross_positions, real["source"][None])
    return _call(params, drawn, memory, target, keep, params.cross_positions), real[of_q], real[of_k]


def _apart(outputs: torch.Tensor, others: torch.Tensor, unit: torch.Tensor) -> float:
    """The largest difference of any coordinate."""
    return float((outputs - others).abs().max() / unit)


def _orders(orders: dict[tuple[str, str], float]) -> Table:
    return {
        "cross_positions": np.array([positions for positions, _ in orders]),
        "reordered": np.array([reordered for _, reordered in orders]),
        "reversal_change": np.array(list(orders.values())).clip(DRAWN_FLOOR),
    }
