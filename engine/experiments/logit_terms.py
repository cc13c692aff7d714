r"""The four terms of a logit when positions are added, and the two ways on which they reach what a head reads.

With token x and position p in one vector the logit is bilinear in their sum,

.. math:: (x_m+p_m)W_qW_k^\top(x_n+p_n)^\top = x_m A x_n^\top + x_m A p_n^\top + p_m A x_n^\top + p_m A p_n^\top

with :math:`A = W_q W_k^\top`. Softmax sees differences within a row only, so of each term what counts is what differs
from its mean over the keys. Then all positions are moved by the same distance, and once only the weights and once only
the values get to know it. Rotary positions have one term and no part in the values.

``random``          W_q and W_k drawn independently
``keeps_rotation``  each turns and stretches the pair (sine, cosine) of every frequency: A commutes with the rotations
                    that move sinusoids, so the last term keeps seeing distances alone
``identity``        no projections: the encoding as it is added

All keys are visible. Tokens are N(0, 1) without a norm, positions scaled to the root mean square asked for. Computed in
float64 on the CPU, for part of it is exact and not every accelerator has float64.

Sources: vaswani2017, section 3.5; ke2021, abstract (mixed correlations); su2021-roformer, section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, softmax
from engine.base import BaseParams, Metric, Plot, Result, Run, choice, number
from engine.encodings import from_table, sinusoidal
from engine.positions import rotate
from engine.rotary import exact_angles

if TYPE_CHECKING:
    import torch

TERMS = ("token_token", "token_position", "position_token", "position_position")


@dataclass(frozen=True)
class Params(BaseParams):
    positions: str = choice("sinusoidal", "learned_table", "rope")
    qk_matrices: str = choice("random", "keeps_rotation", "identity")
    position_rms: float = number(1.0, low=0.125, high=4, log2=True)
    position_shift: int = number(500, low=1, high=16384, log2=True)
    seq_len: int = number(24, low=4, high=64)
    d_model: int = number(64, low=8, high=128, log2=True)
    batch: int = number(8, low=1, high=64, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset({"position_rms"} if self.positions == "rope" else ())


METRICS = (
    Metric("logits_change"),
    Metric("position_terms_share"),
    Metric("position_position_share"),
    Metric("position_position_change"),
    Metric("cross_terms_change"),
    Metric("context_change_weights"),
    Metric("context_change_values"),
    Metric("value_position_share"),
    Metric("context_position_share"),
)
PLOTS = (
    Plot("shares", table="by_term", x="term", y="term_share", by="counted", mark="bar"),
    Plot("changes", table="changes", x="term", y="logits_change", mark="bar"),
    Plot("by_rms", table="by_rms", x="position_rms", y="term_share", by="term", x_scale="log2"),
)
BUDGET_S = 0.05

RMS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)


class _Heads(NamedTuple):
    """``batch`` heads, each with a text of its own; a position vector for each place, before and after the move."""

    x: torch.Tensor  # (batch, seq_len, d_model)
    W_q: torch.Tensor  # (batch, d_model, d_model): the heads are as wide as the model
    W_k: torch.Tensor
    W_v: torch.Tensor
    still: torch.Tensor  # (seq_len, d_model)
    moved: torch.Tensor


def memory_bytes(params: Params) -> int:
    """Tokens, projections, the table, and logits and projected vectors of a dozen passes, in float64."""
    vectors = 40 * params.batch * params.seq_len * params.d_model
    table = 3 * (params.position_shift + params.seq_len) * params.d_model
    return 8 * (vectors + table + 60 * params.batch * params.seq_len**2 + 6 * params.batch * params.d_model**2) + 2**16


def run(params: Params, run: Run) -> Result:
    """Terms at the places from 0 on, and the same tokens at the places moved.

    ``*_share`` of terms: mean square over that of all four terms together. ``*_change``: root mean square of the
    difference over that of the whole logits, or of the context. Both after the mean of each row was taken away.
    ``value_position_share``, ``context_position_share``: the part of p in the values, and in their average.
    """
    import torch

    heads = _draw(params, run)
    run.progress(0.2)
    terms, moved = _terms(params, heads, heads.still, 0), _terms(params, heads, heads.moved, params.position_shift)
    raw, seen = terms.square().mean(dim=(1, 2, 3)), _centred(terms).square().mean(dim=(1, 2, 3))
    size = _centred(terms.sum(dim=0)).square().mean().sqrt()
    apart = _centred(moved - terms)
    changes = apart.square().mean(dim=(1, 2, 3)).sqrt() / size
    run.progress(0.4)

    weights, new_weights = softmax(terms.sum(dim=0)), softmax(moved.sum(dim=0))
    added = params.positions != "rope"
    token_values = heads.x @ heads.W_v
    place_values = heads.still @ heads.W_v * added
    new_place_values = heads.moved @ heads.W_v * added
    read = context(weights, token_values + place_values)
    read_tokens, read_places = context(weights, token_values), context(weights, place_values)
    metrics = {
        "logits_change": _rms(apart.sum(dim=0)) / size,
        "position_terms_share": seen[1:].sum() / seen.sum(),
        "position_position_share": seen[3] / seen.sum(),
        "position_position_change": changes[3],
        "cross_terms_change": _rms(apart[1] + apart[2]) / size,
        "context_change_weights": _rms(context(new_weights - weights, token_values + place_values)) / _rms(read),
        "context_change_values": _rms(context(weights, new_place_values - place_values)) / _rms(read),
        "value_position_share": _part(place_values, token_values),
        "context_position_share": _part(read_places, read_tokens),
    }
    run.progress(0.6)
    by_rms = [_shares(params, heads, rms) for rms in RMS]
    tables = {
        "by_term": {
            "term": np.tile(TERMS, 2),
            "counted": np.repeat(("whole_term", "within_row"), len(TERMS)),
            "term_share": torch.cat((raw / raw.sum(), seen / seen.sum())).numpy(),
        },
        "changes": {"term": np.array(TERMS), "logits_change": changes.numpy()},
        "by_rms": {
            "position_rms": np.repeat(RMS, len(TERMS)),
            "term": np.tile(TERMS, len(RMS)),
            "term_share": torch.cat(by_rms).numpy(),
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _draw(params: Params, run: Run) -> _Heads:
    """Tokens, projections that keep their variance, and positions of the size asked for."""
    import torch

    def normal(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double()

    batch, d_model = params.batch, params.d_model
    x = normal(batch, params.seq_len, d_model)
    W_q, W_k = (_projections(params.qk_matrices, normal(batch, d_model, d_model)) for _ in range(2))
    W_v = normal(batch, d_model, d_model) / d_model**0.5
    order = torch.arange(params.seq_len)
    if params.positions == "learned_table":
        table = normal(params.position_shift + params.seq_len, d_model)
        still, moved = from_table(table, order), from_table(table, order + params.position_shift)
    else:  # the square of a sine and of its cosine is a half on average
        still, moved = (sinusoidal((order + s).cpu().double(), d_model) * 2**0.5 for s in (0, params.position_shift))
    return _Heads(x, W_q, W_k, W_v, params.position_rms * still, params.position_rms * moved)


def _projections(kind: str, drawn: torch.Tensor) -> torch.Tensor:
    """Projections of one kind from normal numbers. Shapes: (batch, d_model, d_model) both."""
    import torch

    batch, d_model = drawn.shape[:2]
    if kind == "random":
        return drawn / d_model**0.5
    if kind == "identity":
        return torch.eye(d_model, dtype=drawn.dtype).expand(batch, -1, -1)
    a, b = drawn[:, 0, 0::2] / 2**0.5, drawn[:, 0, 1::2] / 2**0.5  # (batch, d_model / 2): a + ib for each frequency
    turned = torch.stack((torch.stack((a, b), dim=-1), torch.stack((-b, a), dim=-1)), dim=-2)
    blocks = torch.zeros_like(drawn).unflatten(1, (-1, 2)).unflatten(3, (-1, 2))  # (batch, pair, 2, pair, 2)
    pairs = torch.arange(d_model // 2)
    blocks[:, pairs, :, pairs, :] = turned.transpose(0, 1)
    return blocks.flatten(3).flatten(1, 2)


def _terms(params: Params, heads: _Heads, p: torch.Tensor, shift: int) -> torch.Tensor:
    """The scaled terms in the order of TERMS; rotary positions have all in the first.

    Shapes: p (seq_len, d_model); returns (4, batch, seq_len, seq_len).
    """
    import torch

    q, k = heads.x @ heads.W_q, heads.x @ heads.W_k
    if params.positions == "rope":
        angles = exact_angles(torch.arange(params.seq_len) + shift, params.d_model)
        only = attention_logits(rotate(q, angles), rotate(k, angles))
        return torch.stack((only, *[torch.zeros_like(only)] * 3))
    place_q, place_k = p @ heads.W_q, p @ heads.W_k
    return torch.stack([attention_logits(a, b) for a, b in ((q, k), (q, place_k), (place_q, k), (place_q, place_k))])


def _shares(params: Params, heads: _Heads, rms: float) -> torch.Tensor:
    """Shares within the rows with positions of another size. Shapes: returns (4,)."""
    terms = _centred(_terms(params, heads, heads.still * (rms / params.position_rms), 0))
    squares = terms.square().mean(dim=(1, 2, 3))
    return squares / squares.sum()


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Without the mean of each row, which softmax does not see."""
    return logits - logits.mean(dim=-1, keepdim=True)


def _rms(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean().sqrt()


def _part(places: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean square of the part of the positions over that of both parts."""
    return places.square().mean() / (places.square().mean() + tokens.square().mean())
