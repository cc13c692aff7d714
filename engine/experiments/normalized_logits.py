r"""Norms in attention: LayerNorm on a row of logits, a norm on q and k, and cosine similarity with a temperature.

A LayerNorm over the logits of a query is a positive affine map: it keeps their order, and takes away how sharp the
query wanted to be. A norm on q and k divides every logit by lengths: it may change the order, and it bounds the
logits.

``none``               q·k
``inv_sqrt_d_k``       q·k / √d_k
``layer_norm_logits``  g ⊙ LN(q·k) over the keys, with a gain g_j = ``gain`` (1 + ``gain_std`` ε_j) for each position
``qk_norm``            ``gain``·rms(q) · ``gain``·rms(k) / √d_k, rms(x) of root mean square 1
``cosine``             cos(q, k)

``tau`` divides the logits under every rule; ``gain`` is that of the norm, so the rules without a learned gain don't
see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, entropy_nats, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number

if TYPE_CHECKING:
    import torch

NORMS = ("none", "inv_sqrt_d_k", "layer_norm_logits", "qk_norm", "cosine")


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=1, high=512, log2=True)
    kv_len: int = number(64, low=2, high=1024, log2=True)
    norm: str = choice("layer_norm_logits", "qk_norm", "cosine", "none", "inv_sqrt_d_k")
    q_std: float = number(1.0, low=0.015625, high=64, log2=True)
    tau: float = number(1.0, low=0.01, high=16)
    gain: float = number(1.0, low=0.0625, high=16, log2=True)
    gain_std: float = number(0.0, low=0, high=2, step=0.1)
    batch: int = number(8, low=1, high=64, log2=True)


METRICS = (
    Metric("order_kept_share"),
    Metric("top_key_kept_share"),
    Metric("logits_std"),
    Metric("logits_abs_max"),
    Metric("logits_bound"),
    Metric("weight_max_mean"),
    Metric("weight_max_bound"),
    Metric("match_weight"),
    Metric("entropy_nats", "nats"),
    Metric("entropy_share"),
)
PLOTS = (
    Plot("sharpness", table="by_spread", x="q_std", y="weight_max_mean", by="norm", x_scale="log2"),
    Plot("ranks", table="by_rank", x="rank", y="weight_mean", by="norm", x_scale="log2"),
)
BUDGET_S = 0.05

Q_LEN = 64
TABLE_ROWS = 128  # queries behind the tables, which show all norms
SPREADS = tuple(2.0**power for power in range(-5, 6))
TOP_RANKS = 64


def memory_bytes(params: Params) -> int:
    """One item of the batch, q, k and logits with their temporaries, and the rows behind the tables, in float64."""
    item = 6 * TABLE_ROWS * params.d_k + 8 * params.kv_len * params.d_k + 12 * Q_LEN * params.kv_len
    return 8 * (item + 3 * TABLE_ROWS * params.kv_len)


def run(params: Params, run: Run) -> Result:
    """Logits of ``batch`` times 64 queries under the chosen norm, and all norms side by side in the tables.

    ``order_kept_share``: share of the queries whose keys stand in the order of q·k; ``top_key_kept_share``: whose first
    key is the same. ``logits_bound``: the largest |logit| that vectors of these lengths can make, whatever their
    directions (of a LayerNormed row: whatever its numbers).
    ``weight_max_bound``: the largest weight under that bound, one key aligned and all others opposed;
    ``match_weight``: one key aligned and all others orthogonal.

    Shapes: q (q_len, d_k), k (kv_len, d_k), one pair for each item of the batch.
    """
    position_gain = params.gain * (1 + params.gain_std * run.randn(params.kv_len))
    kept = top_kept = total = square = abs_max = longest = weight_max = entropy = 0.0
    for item in range(params.batch):
        run.progress(item / params.batch)
        q, k = params.q_std * run.randn(Q_LEN, params.d_k), run.randn(params.kv_len, params.d_k)
        logits = _normalized(params, params.norm, q, k, position_gain)
        weights, logits = softmax(logits).cpu().double(), logits.cpu().double()
        order = qk_product(q, k).cpu().argsort(dim=-1)
        top_kept += (logits.gather(-1, order[:, -1:]) == logits.amax(dim=-1, keepdim=True)).sum().item()
        kept += (logits.gather(-1, order).diff(dim=-1) >= 0).all(dim=-1).sum().item()
        total += logits.sum().item()
        square += logits.square().sum().item()
        abs_max = max(abs_max, logits.abs().max().item())
        longest = max(longest, (q.norm(dim=-1).max() * k.norm(dim=-1).max()).item())
        weight_max += weights.amax(dim=-1).sum().item()
        entropy += entropy_nats(weights).sum().item()

    n_rows = params.batch * Q_LEN
    mean = total / (n_rows * params.kv_len)
    opposed, orthogonal = _extreme_rows(params, longest, position_gain)
    metrics = {
        "order_kept_share": kept / n_rows,
        "top_key_kept_share": top_kept / n_rows,
        "logits_std": math.sqrt(max(0.0, square / (n_rows * params.kv_len) - mean**2)),
        "logits_abs_max": abs_max,
        "logits_bound": opposed.abs().max().item(),
        "weight_max_mean": weight_max / n_rows,
        "weight_max_bound": softmax(opposed).max().item(),
        "match_weight": softmax(orthogonal).max().item(),
        "entropy_nats": entropy / n_rows,
        "entropy_share": entropy / n_rows / math.log(params.kv_len),
    }
    return Result(metrics, _tables(params, run, position_gain))


def _normalized(
    params: Params, norm: str, q: torch.Tensor, k: torch.Tensor, position_gain: torch.Tensor
) -> torch.Tensor:
    """Logits under one norm. Shapes: q (..., q_len, d_k), k (..., kv_len, d_k), position_gain (kv_len,)."""
    from torch.nn.functional import layer_norm, rms_norm

    if norm == "cosine":
        return attention_logits(q, k, "cosine", tau=params.tau)
    if norm == "layer_norm_logits":
        return layer_norm(qk_product(q, k), position_gain.shape) * position_gain / params.tau
    if norm == "qk_norm":
        q, k = (params.gain * rms_norm(x, (params.d_k,)) for x in (q, k))
    return attention_logits(q, k, "none" if norm == "none" else "inv_sqrt_d_k") / params.tau


def _extreme_rows(params: Params, longest: float, position_gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most extreme logits that a query can have: its match first, all other keys opposed, or orthogonal.

    ``longest`` is the largest product of a query's and a key's length. A LayerNormed row knows no directions: its
    extreme is one number apart from all others, at the position of the largest gain. Shapes: (kv_len,) each, float64.
    """
    import torch
    from torch.nn.functional import layer_norm

    match = torch.zeros(params.kv_len, dtype=torch.float64)
    if params.norm == "layer_norm_logits":
        gain = position_gain.cpu().double()
        match[gain.abs().argmax()] = 1e6  # large, so that LayerNorm's epsilon is nothing beside it
        row = layer_norm(match, match.shape) * gain / params.tau
        return row, row
    match[0] = {
        "none": longest,
        "inv_sqrt_d_k": longest / math.sqrt(params.d_k),
        "qk_norm": params.gain**2 * math.sqrt(params.d_k),
        "cosine": 1.0,
    }[params.norm] / params.tau
    return torch.where(match > 0, match, -match[0]), match


def _tables(params: Params, run: Run, position_gain: torch.Tensor) -> dict[str, Table]:
    """All norms on the same queries: largest weight against the spread of q, and mean weight by rank at this spread."""
    n_items = TABLE_ROWS // Q_LEN
    q, k = run.randn(n_items, Q_LEN, params.d_k), run.randn(n_items, params.kv_len, params.d_k)
    spreads, ranks = [], []
    for norm in NORMS:
        for q_std in SPREADS:
            run.progress(1.0)
            weights = softmax(_normalized(params, norm, q_std * q, k, position_gain))
            spreads.append((q_std, norm, weights.amax(dim=-1).cpu().double().mean().item()))
        weights = softmax(_normalized(params, norm, params.q_std * q, k, position_gain))
        top = weights.topk(min(TOP_RANKS, params.kv_len), dim=-1).values.cpu().double().mean(dim=(0, 1))
        ranks += [(rank + 1, norm, weight) for rank, weight in enumerate(top.tolist())]
    return {
        "by_spread": _table(("q_std", "norm", "weight_max_mean"), spreads),
        "by_rank": _table(("rank", "norm", "weight_mean"), ranks),
    }


def _table(names: tuple[str, ...], rows: Sequence[tuple[float, str, float]]) -> Table:
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}
