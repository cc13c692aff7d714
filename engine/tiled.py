r"""Softmax-weighted means over keys that arrive tile by tile: what is kept of the tiles seen, and how it is merged.

Of any set of keys three things a row are enough: a reference :math:`m`, the total :math:`l=\sum_j e^{z_j-m}` and the
vector :math:`o=\sum_j e^{z_j-m}v_j`. The weighted mean is :math:`o/l`, the log-sum-exp of the logits
:math:`m+\ln l`. The same set can be written with any reference; the largest logit is the one with which no exponential
exceeds 1. Two states are merged by writing both with one reference and adding.

The set without a key is (-inf, 0, 0). Written plainly its merge with itself is :math:`e^{-\infty-(-\infty)}`, NaN, and
so is a tile whose keys are all masked: 0 is subtracted there in place of -inf.

Sources: online-softmax-code (the sum); flash-attention-code, ``scale_apply_exp2`` (the guard) and ``update_row_max``
(the slack).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class State(NamedTuple):
    """What is kept of the keys seen so far: m, l and o of the papers.

    Shapes: reference and total (..., q_len), weighted (..., q_len, d_v).
    """

    reference: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor


def tile_slices(kv_len: int, tile_len: int) -> list[slice]:
    """The keys of each tile; the last one may be shorter."""
    return [slice(start, min(start + tile_len, kv_len)) for start in range(0, kv_len, tile_len)]


def empty_state(logits: torch.Tensor, v: torch.Tensor) -> State:
    """The state before the first key, for the rows of ``logits``.

    Shapes: logits (..., q_len, any), v (..., any, d_v).
    """
    zero = logits.new_zeros(logits.shape[:-1])
    return State(zero - math.inf, zero, logits.new_zeros((*zero.shape, v.shape[-1])))


def finite_or_zero(m: torch.Tensor) -> torch.Tensor:
    """What to subtract from logits: m, and 0 where it is -inf, since -inf - (-inf) would be NaN."""
    return m.masked_fill(m == -math.inf, 0)


def next_reference(m: torch.Tensor, largest: torch.Tensor, slack: float = 0.0) -> torch.Tensor:
    """The reference after a tile with this largest logit: the new maximum, or m where that is at most ``slack`` higher.

    With a slack no exponential exceeds e to the slack, in place of 1. A row that has seen no key always moves.
    """
    higher = m.maximum(largest)
    return m.where(higher - m <= slack, higher)


def absorb(state: State, logits: torch.Tensor, v: torch.Tensor, slack: float = 0.0) -> State:
    """The state with the keys of one tile added: the recurrence of a kernel that goes through the tiles in turn.

    Shapes: logits (..., q_len, tile_len), v (..., tile_len, d_v).
    """
    m = next_reference(state.reference, logits.amax(dim=-1), slack)
    base = finite_or_zero(m)
    factor = (state.reference - base).exp()
    powers = (logits - base[..., None]).exp()
    return State(m, state.total * factor + powers.sum(dim=-1), state.weighted * factor[..., None] + powers @ v)


def merge(one: State, other: State) -> State:
    """The state of the keys of both; up to rounding the order and the grouping of merges do not matter."""
    m = one.reference.maximum(other.reference)
    base = finite_or_zero(m)
    a, b = (one.reference - base).exp(), (other.reference - base).exp()
    return State(m, one.total * a + other.total * b, one.weighted * a[..., None] + other.weighted * b[..., None])


def finish(state: State) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted mean and the log-sum-exp of each row; 0 and -inf for a row without a key.

    Shapes: (..., q_len, d_v) and (..., q_len).
    """
    divisor = state.total.masked_fill(state.total == 0, 1)
    return state.weighted / divisor[..., None], state.reference + state.total.log()


def merge_means(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted means of disjoint sets of keys, stacked in front, merged by their log-sum-exps.

    Shapes: out (n_sets, ..., d_v), lse (n_sets, ...); returns (..., d_v) and (...).
    """
    top = lse.amax(dim=0)
    powers = (lse - finite_or_zero(top)).exp()
    total = powers.sum(dim=0)
    shares = powers / total.masked_fill(total == 0, 1)
    return (shares[..., None] * out).sum(dim=0), top + total.log()
