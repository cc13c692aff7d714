r"""How concentrated the attention weights are, and what is left of the softmax Jacobian, under the scale rules.

Queries and keys have independent N(0, 1) coordinates, so the logits of a row are spread by scale · √d_k. Concentration
sets in where that spread passes :math:`\sqrt{2\ln n}` for n keys: it depends on n as well as on d_k.

The norms are right as long as the weights are: in float32 down to 1e-38, where the second logit is 87 below the first.

Source: vaswani2017, section 3.2.1 (why the scale); the threshold is the freezing point of the random energy model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.attention import (
    SCALE_RULES,
    attention_logits,
    entropy_nats,
    jacobian_norm,
    qk_product,
    row_norm,
    scale_value,
    softmax,
)
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.chunks import chunks, items_per_chunk, oversize, per_row


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=1, high=4096, log2=True)
    kv_len: int = number(64, low=2, high=16384, log2=True)
    scale: str = choice(*SCALE_RULES)
    factor: float = number(1.0, low=0.0625, high=8, step=0.0625)
    tau: float = number(1.0, low=2**-7, high=2**7, log2=True)
    dead_below: float = number(1e-3, low=1e-9, high=0.5)
    batch: int = number(16, low=1, high=64, log2=True)
    q_len: int = number(64, low=1, high=512, log2=True)

    def unread(self) -> frozenset[str]:
        reads = {"factor": {"factor"}, "learnable_tau": {"tau"}, "cosine": {"tau"}}
        return frozenset({"factor", "tau"} - reads.get(self.scale, set()))

    def rules(self) -> Iterator[Problem]:
        yield from oversize(q_len=self.q_len, kv_len=self.kv_len, width=self.d_k)


METRICS = (
    Metric("weight_max_mean"),
    Metric("jacobian_norm_median"),
    Metric("dead_share"),
    Metric("jacobian_norm_mean"),
    Metric("jacobian_norm_p10"),
    Metric("weight_max_median"),
    Metric("saturated_share"),
    Metric("entropy_share"),
    Metric("entropy_nats", "nats"),
    Metric("logits_std"),
    Metric("threshold_std"),
)
PLOTS = (
    Plot("weight_by_rank", table="weight_by_rank", x="rank", y="weight_mean", by="scale", x_scale="log2"),
    Plot("jacobian", table="jacobian", x="row_share", y="jacobian_norm", by="scale", y_scale="log10"),
)
BUDGET_S = 0.015

COMPARED = ("none", "inv_sqrt_d_k", "inv_d_k")  # drawn beside the chosen rule
SATURATED = 0.9  # a row counts as saturated when its largest weight is above
DRAWN_FLOOR = 1e-12  # smaller norms are drawn here, else one dead row would flatten the rest of the plot
ROW_SHARES = np.linspace(0.01, 0.99, 50)


def memory_bytes(params: Params) -> int:
    """One chunk: q and k with their copies, a dozen arrays of logits; a few float64 numbers a row and rule."""
    numbers, logits = _item(params)
    items = items_per_chunk(params.batch, numbers=numbers, logits=logits)
    rows = 8 * (16 * params.batch * params.q_len + 8 * params.kv_len)
    return 4 * items * (4 * numbers + 12 * logits) + rows


def run(params: Params, run: Run) -> Result:
    """Draw q and k, and describe the rows of weights that each rule makes of the same products.

    Shapes: q (items, q_len, d_k), k (items, kv_len, d_k), logits and weights (items, q_len, kv_len), chunk by chunk.
    """
    numbers, logits_of_item = _item(params)
    items = items_per_chunk(params.batch, numbers=numbers, logits=logits_of_item)
    rules = tuple(dict.fromkeys((*COMPARED, params.scale)))
    norms: dict[str, list[np.ndarray]] = {rule: [] for rule in rules}
    by_rank = {rule: np.zeros(params.kv_len) for rule in rules}
    entropies, maxima, lengths = [], [], []

    for start, n in chunks(params.batch, items):
        q, k = run.randn(n, params.q_len, params.d_k), run.randn(n, params.kv_len, params.d_k)
        qk = qk_product(q, k)
        for i, rule in enumerate(rules):
            run.progress((start + n * i / len(rules)) / params.batch)
            if rule == "cosine":
                logits = attention_logits(q, k, rule, tau=params.tau)
            else:
                logits = qk * scale_value(rule, params.d_k, factor=params.factor, tau=params.tau)
            weights = softmax(logits)
            norms[rule].append(per_row(jacobian_norm(weights)))
            # numpy sorts twenty times faster than torch does on a CPU, and elsewhere the copy is small
            by_rank[rule] += np.sort(weights.float().cpu().numpy(), axis=-1).sum(axis=(0, 1), dtype=np.float64)[::-1]
            if rule == params.scale:
                entropies.append(per_row(entropy_nats(weights)))
                maxima.append(per_row(weights.amax(dim=-1)))
                lengths.append(per_row(row_norm(logits)))

    entropy, weight_max, norm = np.concatenate(entropies), np.concatenate(maxima), np.concatenate(norms[params.scale])
    metrics = {
        "weight_max_mean": float(weight_max.mean()),
        "jacobian_norm_median": float(np.median(norm)),
        "dead_share": float((norm < params.dead_below).mean()),
        "jacobian_norm_mean": float(norm.mean()),
        "jacobian_norm_p10": float(np.quantile(norm, 0.1)),
        "weight_max_median": float(np.median(weight_max)),
        "saturated_share": float((weight_max > SATURATED).mean()),
        "entropy_share": float(entropy.mean() / math.log(params.kv_len)),
        "entropy_nats": float(entropy.mean()),
        "logits_std": math.sqrt((np.concatenate(lengths) ** 2).mean() / params.kv_len),  # around 0, their mean
        "threshold_std": math.sqrt(2 * math.log(params.kv_len)),
    }
    n_rows = params.batch * params.q_len
    tables = {
        "weight_by_rank": _weight_by_rank({rule: total / n_rows for rule, total in by_rank.items()}),
        "jacobian": _quantiles({rule: np.concatenate(parts) for rule, parts in norms.items()}),
    }
    return Result(metrics, tables)


def _item(params: Params) -> tuple[int, int]:
    """Random numbers and logits of one item of the batch."""
    return (params.q_len + params.kv_len) * params.d_k, params.q_len * params.kv_len


def _weight_by_rank(mean_weights: dict[str, np.ndarray]) -> Table:
    """Mean weight of the largest, second, ... key of a row, at some fifty ranks."""
    n = len(next(iter(mean_weights.values())))
    ranks = np.unique(np.geomspace(1, n, 50).round().astype(int))
    return {
        "scale": np.repeat(list(mean_weights), len(ranks)),
        "rank": np.tile(ranks, len(mean_weights)),
        "weight_mean": np.concatenate([w[ranks - 1] for w in mean_weights.values()]).astype(np.float32),
    }


def _quantiles(norms: dict[str, np.ndarray]) -> Table:
    """The norm below which a given share of the rows lies."""
    drawn = [np.quantile(rows, ROW_SHARES).clip(DRAWN_FLOOR) for rows in norms.values()]
    return {
        "scale": np.repeat(list(norms), len(ROW_SHARES)),
        "row_share": np.tile(ROW_SHARES, len(norms)).astype(np.float32),
        "jacobian_norm": np.concatenate(drawn).astype(np.float32),
    }
