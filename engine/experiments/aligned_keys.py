r"""One key that matches its query among keys that do not: which scale lets it win, whatever the width.

Each query has a target key of its own whose coordinates have correlation :math:`\rho` with the query's; the other keys
are independent of it. The target's q·k then grows as :math:`\rho d_k`, the others' as :math:`\sqrt{d_k}`: 1/√d_k keeps
the independent ones the same at every width, c/d_k the aligned one.

Source: the README of microsoft/mup (8/d_k, equal to 1/√d_k at d_k = 64); trained q and k are aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.attention import entropy_nats, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.chunks import chunks, items_per_chunk, oversize, per_row

RULES = ("inv_sqrt_d_k", "inv_d_k", "base_over_d", "log_n")


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=1, high=4096, log2=True)
    kv_len: int = number(64, low=2, high=16384, log2=True)
    alignment: float = number(0.3, low=0, high=1, step=0.05)
    scale: str = choice(*RULES)
    batch: int = number(16, low=1, high=64, log2=True)
    q_len: int = number(64, low=1, high=512, log2=True)

    def rules(self) -> Iterator[Problem]:
        yield from oversize(q_len=self.q_len, kv_len=self.kv_len, width=self.d_k)


METRICS = (
    Metric("target_logit_mean"),
    Metric("other_logits_std"),
    Metric("target_weight_mean"),
    Metric("target_weight_median"),
    Metric("entropy_nats", "nats"),
    Metric("entropy_share"),
)
PLOTS = (Plot("target_weight", table="target_weight", x="alignment", y="target_weight_mean", by="scale"),)
BUDGET_S = 0.015

ALIGNMENTS = np.linspace(0, 1, 21)


def memory_bytes(params: Params) -> int:
    """One chunk: q, targets and other keys with a copy, half a dozen arrays of logits; float64 rows and curves."""
    numbers, logits = _item(params)
    items = items_per_chunk(params.batch, numbers=numbers, logits=logits)
    rows = 8 * params.q_len * (8 * params.batch + 5 * len(ALIGNMENTS) * items)
    return 4 * items * (3 * numbers + 6 * logits) + rows


def run(params: Params, run: Run) -> Result:
    """Draw queries, their targets and the other keys, which all queries of an item share.

    Shapes: q and targets (items, q_len, d_k), others (items, kv_len - 1, d_k), logits and weights (items, q_len,
    kv_len) with the target first, chunk by chunk.
    """
    import torch

    numbers, logits_of_item = _item(params)
    scale, along = _scale(params.scale, params), params.alignment
    across = math.sqrt(1 - along**2)
    found: dict[str, list[np.ndarray]] = {name: [] for name in ("target_logit", "target_weight", "entropy", "squares")}
    curves: dict[str, list[np.ndarray]] = {rule: [] for rule in RULES}
    for start, n in chunks(params.batch, items_per_chunk(params.batch, numbers=numbers, logits=logits_of_item)):
        q, noise = run.randn(n, params.q_len, params.d_k), run.randn(n, params.q_len, params.d_k)
        others = run.randn(n, params.kv_len - 1, params.d_k)
        run.progress((start + n / 2) / params.batch)

        target = along * q + across * noise
        qk = torch.cat([(q * target).sum(dim=-1, keepdim=True), qk_product(q, others)], dim=-1)
        logits = qk * scale
        weights = softmax(logits)
        found["target_logit"].append(per_row(logits[..., 0]))
        found["target_weight"].append(per_row(weights[..., 0]))
        found["entropy"].append(per_row(entropy_nats(weights)))
        found["squares"].append(per_row(logits[..., 1:].float().square().mean(dim=-1)))

        # the same draws at every alignment: only the target's logit changes, the others' sum of exponentials stays
        q_squared, q_noise = (q * q).sum(dim=-1), (q * noise).sum(dim=-1)
        for rule in RULES:
            c = _scale(rule, params)
            log_sum_others = per_row((qk[..., 1:] * c).logsumexp(dim=-1))
            target_logits = c * (
                np.outer(ALIGNMENTS, per_row(q_squared)) + np.outer(np.sqrt(1 - ALIGNMENTS**2), per_row(q_noise))
            )
            curves[rule].append((1 / (1 + np.exp(log_sum_others - target_logits))).sum(axis=1))
    rows = {name: np.concatenate(parts) for name, parts in found.items()}

    metrics = {
        "target_logit_mean": float(rows["target_logit"].mean()),
        "other_logits_std": math.sqrt(rows["squares"].mean()),  # around 0, their mean
        "target_weight_mean": float(rows["target_weight"].mean()),
        "target_weight_median": float(np.median(rows["target_weight"])),
        "entropy_nats": float(rows["entropy"].mean()),
        "entropy_share": float(rows["entropy"].mean() / math.log(params.kv_len)),
    }
    means = [sum(parts) / (params.batch * params.q_len) for parts in curves.values()]
    table = {
        "scale": np.repeat(RULES, len(ALIGNMENTS)),
        "alignment": np.tile(ALIGNMENTS, len(RULES)).astype(np.float32),
        "target_weight_mean": np.concatenate(means).astype(np.float32),
    }
    return Result(metrics, {"target_weight": table})


def _item(params: Params) -> tuple[int, int]:
    """Random numbers and logits of one item of the batch."""
    return (2 * params.q_len + params.kv_len) * params.d_k, params.q_len * params.kv_len


def _scale(rule: str, params: Params) -> float:
    """The number that multiplies q·k."""
    return {
        "inv_sqrt_d_k": 1 / math.sqrt(params.d_k),
        "inv_d_k": 1 / params.d_k,
        "base_over_d": 8 / params.d_k,
        "log_n": math.log(params.kv_len) / math.sqrt(params.d_k),
    }[rule]
