r"""How logits answer to weights that grow: unbounded, under norms on q and k, and under a cap.

Tokens x with a root mean square of 1 (as a norm in front of attention leaves them) pass W_q and W_k, both multiplied by
``qk_weight_gain``, and give logits under one of

``inv_sqrt_d_k``    q·k / √d_k
``qk_norm``         (gain·rms(q)) · (gain·rms(k)) / √d_k, rms(x) of root mean square 1
``qk_layer_norm``   the same with LayerNorm, which also takes off the mean
``cosine_learned``  s cos(q, k), with s = gain²·√d_k: what training begins with, before it moves s
``softcap``         c tanh(q·k / (c √d_k)), c the ``logit_threshold``

Queries may differ in length by nature (``length_spread``): without a norm a long query is a sharp one.

Sources: henry2020, abstract (cosine with a learned scale); flash-attention-1025 (the cap).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, entropy_nats, softmax, unit_norm
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.norms import norm_statistics, normalize

if TYPE_CHECKING:
    import torch

LOGIT_RULES = ("inv_sqrt_d_k", "qk_norm", "qk_layer_norm", "cosine_learned", "softcap")
DRAWN_RULES = ("inv_sqrt_d_k", "qk_norm", "qk_layer_norm", "softcap")  # the cosine's line would lie on that of qk_norm
QK_WEIGHT_GAINS = tuple(2.0**power for power in range(-3, 6))
D_MODEL = 128
Q_LEN = 64
EPSILON = 1e-6  # of the norm; q·q / d_k is some 1


@dataclass(frozen=True)
class Params(BaseParams):
    logit_rule: str = choice(*LOGIT_RULES)
    qk_weight_gain: float = number(4.0, low=0.125, high=128, log2=True)
    gain: float = number(1.0, low=0.0625, high=16, log2=True)
    logit_threshold: float = number(10.0, low=1, high=100)
    length_spread: float = number(0.5, low=0, high=2, step=0.1)
    d_k: int = number(64, low=2, high=512, log2=True)
    kv_len: int = number(64, low=2, high=1024, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset()  # the table shows all rules, so every parameter is read


METRICS = (
    Metric("logits_abs_max"),
    Metric("entropy_share"),
    Metric("weight_max_mean"),
    Metric("logits_std"),
    Metric("length_entropy_correlation"),
    Metric("difference_from_cosine"),
)
PLOTS = (
    Plot(
        "largest",
        table="by_qk_weight_gain",
        x="qk_weight_gain",
        y="logits_abs_max",
        by="logit_rule",
        x_scale="log2",
        y_scale="log10",
    ),
    Plot("entropy", table="by_qk_weight_gain", x="qk_weight_gain", y="entropy_share", by="logit_rule", x_scale="log2"),
    Plot("lengths", table="by_query", mark="point", x="q_length", y="entropy_share", by="logit_rule", x_scale="log2"),
)
BUDGET_S = 0.05


def memory_bytes(params: Params) -> int:
    """Tokens, weights, q and k, and the logits of one rule with their temporaries, in float64."""
    rows = Q_LEN + params.kv_len
    return 8 * (2 * D_MODEL * (rows + params.d_k) + 6 * rows * params.d_k + 10 * Q_LEN * params.kv_len) + 2**20


def run(params: Params, run: Run) -> Result:
    """64 queries against ``kv_len`` keys, all pairs.

    ``length_entropy_correlation``: of the logarithm of a query's length with the entropy of its row, over the queries.
    ``difference_from_cosine``: the largest difference from gain²·√d_k·cos(q, k).

    Shapes: q (q_len, d_k), k (kv_len, d_k).
    """
    import torch

    x_q, x_k = (_rms(run.randn(n, D_MODEL)) for n in (Q_LEN, params.kv_len))
    W_q, W_k = (run.randn(D_MODEL, params.d_k) / math.sqrt(D_MODEL) for _ in range(2))
    lengths = (params.length_spread * run.randn(Q_LEN, 1)).exp()
    q, k = lengths * (x_q @ W_q), x_k @ W_k
    at_gain = params.qk_weight_gain * q, params.qk_weight_gain * k

    logits = _logits(params, params.logit_rule, *at_gain)
    weights = softmax(logits)
    cosine = attention_logits(*at_gain, "cosine", tau=1 / (params.gain**2 * math.sqrt(params.d_k)))
    entropy = entropy_nats(weights).cpu().double().numpy()
    log_length = at_gain[0].norm(dim=-1).log().cpu().double().numpy()
    metrics = {
        "logits_abs_max": logits.abs().max().item(),
        "entropy_share": float(entropy.mean()) / math.log(params.kv_len),
        "weight_max_mean": weights.amax(dim=-1).cpu().double().mean().item(),
        "logits_std": logits.cpu().double().std().item(),
        "length_entropy_correlation": _correlation(log_length, entropy),
        "difference_from_cosine": (logits - cosine).abs().max().item(),
    }

    rows = []
    for rule in DRAWN_RULES:
        for qk_weight_gain in QK_WEIGHT_GAINS:
            run.progress(1.0)
            drawn = _logits(params, rule, qk_weight_gain * q, qk_weight_gain * k)
            share = entropy_nats(softmax(drawn)).cpu().double().mean().item() / math.log(params.kv_len)
            rows.append((qk_weight_gain, rule, drawn.abs().max().item(), share))
    names = ("qk_weight_gain", "logit_rule", "logits_abs_max", "entropy_share")
    by_qk_weight_gain: Table = {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}
    shown = ("inv_sqrt_d_k", "qk_norm")
    shares = [entropy_nats(softmax(_logits(params, rule, *at_gain))) / math.log(params.kv_len) for rule in shown]
    by_query: Table = {
        "q_length": np.tile(np.exp(log_length), len(shown)),
        "logit_rule": np.repeat(shown, Q_LEN),
        "entropy_share": torch.cat(shares).cpu().double().numpy(),
    }
    return Result(metrics, {"by_qk_weight_gain": by_qk_weight_gain, "by_query": by_query})


def _logits(params: Params, rule: str, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Shapes: q (q_len, d_k), k (kv_len, d_k); returns (q_len, kv_len)."""
    if rule == "cosine_learned":
        scale = params.gain**2 * math.sqrt(params.d_k)
        return unit_norm(q) @ unit_norm(k).mT * scale
    if rule == "qk_norm":
        q, k = params.gain * _rms(q), params.gain * _rms(k)
    if rule == "qk_layer_norm":
        q, k = (params.gain * normalize(x, norm_statistics(x, "layer_norm"), EPSILON) for x in (q, k))
    logits = attention_logits(q, k)
    return params.logit_threshold * (logits / params.logit_threshold).tanh() if rule == "softcap" else logits


def _rms(x: torch.Tensor) -> torch.Tensor:
    return normalize(x, norm_statistics(x, "rms_norm"), EPSILON)


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's; 0 where one of them does not vary, up to rounding."""
    if x.std() < 1e-6 or y.std() < 1e-6:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
