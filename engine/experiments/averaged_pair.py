r"""What can be read out of an average of two tokens: by a linear map into two slots, and by a search through all pairs.

One head puts the share ``first_weight`` of its weight on token a and the rest on token b, except for a ``leak`` that
goes to six others in equal parts. With the value vectors of the tokens (random unit vectors) its context is

.. math:: c=(1-\ell)\,\big(w\,v_a+(1-w)\,v_b\big)+\tfrac{\ell}{6}\textstyle\sum_{o}v_o

*Slots*: the linear map that loses least writes :math:`v_a` into one slot and :math:`v_b` into another. *Search*: the
ordered pair whose average :math:`w\,v_a+(1-w)\,v_b` lies nearest to the context is taken; w is known. The average is a
superposition: both tokens are in it, and where their weights differ, their order is, too. A linear map gives each of
its numbers the same mixture of both, so it can't tell one from the other.

Source: vaswani2017, section 3.2.2 (a single head averages).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import context, unit_norm
from engine.base import BaseParams, Metric, Plot, Result, Run, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    first_weight: float = number(0.6, low=0.5, high=1, step=0.05)
    d_v: int = number(32, low=1, high=128, log2=True)
    n_tokens: int = number(64, low=4, high=128, log2=True)
    leak: float = number(0.05, low=0, high=0.9, step=0.05)
    n_averages: int = number(128, low=32, high=512, log2=True)


METRICS = (
    Metric("ordered_pair_share"),
    Metric("pair_share"),
    Metric("slots_lost_share"),
)
PLOTS = (Plot("readers", table="by_first_weight", x="first_weight", y="share", by="reader"),)
BUDGET_S = 0.05

N_OTHERS = 6  # tokens that the leak goes to
FIRST_WEIGHTS = np.linspace(0.5, 1, 11)
TABLE_PAIRS = 32  # pairs behind each point of the table
FITTED_PER_DIMENSION = 32  # pairs that the linear map is fitted to: on others it then loses by 1/32 more
RIDGE = 1e-6  # beside second moments of 1 / d_v: for values that span fewer dimensions than they have
CHUNK_PAIRS = 32  # contexts that are searched for at once


def memory_bytes(params: Params) -> int:
    """The values of all pairs under their rows, twice over, and the distances of a chunk of contexts."""
    pairs = params.n_averages + FITTED_PER_DIMENSION * params.d_v
    values = pairs * (2 + N_OTHERS) * (params.d_v + 3)
    return 4 * (values + 12 * pairs * params.d_v + 4 * CHUNK_PAIRS * params.n_tokens**2)


def run(params: Params, run: Run) -> Result:
    """Average pairs of different tokens, and read the averages in both ways; the table at eleven first weights.

    ``ordered_pair_share``: contexts for which the search finds both tokens, and which is first; ``pair_share``: both in
    either order. ``slots_lost_share``: squared error of the linear map over the squared length of the slots, for pairs
    that it was not fitted to.

    Shapes: values (n_tokens, d_v); v (2 + N_OTHERS, pair, d_v), the pair first.
    """
    values = unit_norm(run.randn(params.n_tokens, params.d_v))
    pairs, v = _draw(params, run, values, params.n_averages)
    _, fitted = _draw(params, run, values, FITTED_PER_DIMENSION * params.d_v)

    rows: dict[str, list[float]] = {"search_ordered": [], "search_pair": [], "slots": []}
    for i, weight in enumerate(FIRST_WEIGHTS.tolist()):
        run.progress(i / (len(FIRST_WEIGHTS) + 1))
        ordered, either = _search(
            run, weight, values, pairs[:TABLE_PAIRS], _contexts(params, weight, v[:, :TABLE_PAIRS])
        )
        rows["search_ordered"].append(ordered)
        rows["search_pair"].append(either)
        rows["slots"].append(1 - _slots_lost(params, weight, v, fitted))
    run.progress(len(FIRST_WEIGHTS) / (len(FIRST_WEIGHTS) + 1))
    ordered, either = _search(run, params.first_weight, values, pairs, _contexts(params, params.first_weight, v))
    metrics = {
        "ordered_pair_share": ordered,
        "pair_share": either,
        "slots_lost_share": _slots_lost(params, params.first_weight, v, fitted),
    }
    table = {
        "first_weight": np.tile(FIRST_WEIGHTS, len(rows)),
        "reader": np.repeat(list(rows), len(FIRST_WEIGHTS)),
        "share": np.concatenate([np.array(shares) for shares in rows.values()]),
    }
    return Result(metrics, {"by_first_weight": table})


def _draw(params: Params, run: Run, values: torch.Tensor, n_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of different tokens, and the values that a row sees. Shapes: (n_pairs, 2), (2 + N_OTHERS, n_pairs, d_v)."""
    import torch

    drawn = run.rand(n_pairs, 2 + N_OTHERS)
    first = (drawn[:, :1] * params.n_tokens).long()
    second = (first + 1 + (drawn[:, 1:2] * (params.n_tokens - 1)).long()) % params.n_tokens
    others = (drawn[:, 2:] * params.n_tokens).long()
    pairs = torch.cat((first, second), dim=-1)
    return pairs, values[torch.cat((pairs, others), dim=-1).T]


def _contexts(params: Params, weight: float, v: torch.Tensor) -> torch.Tensor:
    """What the head reads under the row with this first weight. Shapes: (n_pairs, d_v)."""
    import torch

    pair = [(1 - params.leak) * weight, (1 - params.leak) * (1 - weight)]
    row = torch.tensor([*pair, *[params.leak / N_OTHERS] * N_OTHERS], device=v.device, dtype=v.dtype)
    return context(row[None], v.flatten(1)).view_as(v[0])  # one row for all pairs, whose values stand side by side


def _search(
    run: Run, weight: float, values: torch.Tensor, pairs: torch.Tensor, contexts: torch.Tensor
) -> tuple[float, float]:
    """Shares of the contexts whose nearest average is that of their own pair: in its order, and in either order."""
    n_tokens = len(values)
    between = weight * (1 - weight) * (values @ values.mT)
    between.fill_diagonal_(math.inf)  # a pair has two tokens
    ordered = either = 0
    for start in range(0, len(pairs), CHUNK_PAIRS):
        run.check_stop()
        own = pairs[start : start + CHUNK_PAIRS]
        near = contexts[start : start + CHUNK_PAIRS] @ values.mT
        # half the squared distance, without what is the same for all pairs, as value vectors have length 1
        distance = between - weight * near[:, :, None] - (1 - weight) * near[:, None]
        best = distance.flatten(1).argmin(dim=-1)
        found = (best // n_tokens == own[:, 0]) & (best % n_tokens == own[:, 1])
        swapped = (best // n_tokens == own[:, 1]) & (best % n_tokens == own[:, 0])
        ordered += int(found.sum())
        either += int((found | swapped).sum())
    return ordered / len(pairs), either / len(pairs)


def _slots_lost(params: Params, weight: float, v: torch.Tensor, fitted: torch.Tensor) -> float:
    """What the linear map of least squared error loses of the slots. Shapes: v, fitted (2 + N_OTHERS, pair, d_v)."""
    import torch

    read, wanted = _contexts(params, weight, fitted), torch.cat((fitted[0], fitted[1]), dim=-1)
    ridge = RIDGE * len(read) * torch.eye(params.d_v, device=read.device, dtype=read.dtype)
    slots = torch.linalg.solve(read.T @ read + ridge, read.T @ wanted)  # (d_v, 2 · d_v)
    out, own = _contexts(params, weight, v) @ slots, torch.cat((v[0], v[1]), dim=-1)
    return float((out - own).square().sum() / own.square().sum())
