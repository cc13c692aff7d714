r"""The rank of what one head computes: of its logits, of its weights, and of the map from its values to the output.

With x the tokens (one a row) the logits of a head are :math:`x W_q W_k^\top x^\top/\sqrt{d_k}`. Their rank is at most
d_k, and never above that of x. RoPE turns each q and k by itself, so the product is still one of vectors of d_k
numbers, though the rank of x bounds it no longer; a bias that is added to the logits is not, and may have any rank. The
bias of ALiBi is linear in both positions where only earlier keys are seen, and has rank 2 there; by the distance on
both sides it has full rank, and drawn for each distance as well.

Softmax is an exponential entry by entry, which keeps no rank: the weights usually have full rank, although most of
their singular values are small. Weights times values have rank d_v at most again, one head writes with the matrix
:math:`W_v W_o` of rank d_v, and the sum over the heads is bounded by :math:`h\,d_v` and by d_model.

Heads that share keys (n_kv_heads below n_heads) keep a rank of d_k each, but all their rows of logits together are
products with the same keys. ``all_logits_rank`` is that of the logits of all heads, put below one another.

A rank is the number of singular values above max(shape) · 2.2e-16 of the largest, as in numpy's ``matrix_rank``.
Everything is computed in float64 on the CPU: in float32 rounding fills a matrix up at 1e-7 of its largest value.

Sources: bhojanapalli2020, section 2 (the rank of a head's logits); press2022 (ALiBi).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, context, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.positions import BASE
from engine.rotary import exact_angles, turn

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(16, low=1, high=256, log2=True)
    seq_len: int = number(96, low=2, high=384, step=2)
    d_model: int = number(64, low=1, high=512, log2=True)
    positions: str = choice("no_positions", "rope", "alibi_one_side", "alibi_both_sides", "distance_bias")
    qk_size: float = number(1.0, low=0.125, high=4, step=0.125)
    d_v: int = number(16, low=1, high=256, log2=True)
    n_heads: int = number(4, low=1, high=16, log2=True)
    n_kv_heads: int = number(4, low=1, high=16, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            values = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.positions == "rope" and self.d_k % 2:
            yield Problem("rule", "d_k", self.d_k, rule="width_is_even")
        if self.n_heads * max(self.d_k, self.d_v) * self.d_model > MAX_NUMBERS:
            product = self.n_heads * max(self.d_k, self.d_v) * self.d_model
            values = {"product": product, "limit": MAX_NUMBERS}
            yield Problem("rule", "n_heads", self.n_heads, rule="too_large_projections", values=values)


METRICS = (
    Metric("logits_rank"),
    Metric("weights_rank"),
    Metric("weights_strong"),
    Metric("all_logits_rank"),
    Metric("value_map_rank"),
    Metric("context_rank"),
    Metric("layer_out_rank"),
    Metric("x_rank"),
)
PLOTS = (Plot("spectrum", table="spectrum", x="singular_index", y="singular_share", by="matrix", y_scale="log10"),)
BUDGET_S = 0.1

MAX_NUMBERS = 2**19  # of the widest projection of all heads
STRONG = 0.01  # a singular value counts as strong when it is above this share of the largest
SLOPE = 0.25  # of the biases of ALiBi: the second steepest of eight heads
DRAWN_FLOOR = 1e-18  # smaller shares, which are rounding, are drawn here: a logarithmic axis has no 0


def memory_bytes(params: Params) -> int:
    """Tokens, projections and what they make of the tokens for all heads, square matrices of each, in float64."""
    tokens = params.seq_len * (params.d_model * 3 + params.n_heads * (4 * params.d_k + 3 * params.d_v))
    matrices = params.n_heads * params.d_model * (4 * params.d_k + 6 * params.d_v) + 4 * params.d_model**2
    squares = (4 * params.n_heads + 12) * params.seq_len**2
    return 8 * (tokens + matrices + squares)


def run(params: Params, run: Run) -> Result:
    """Draw tokens and one layer, and count the singular values of what its first head and all its heads compute.

    Shapes: x (seq_len, d_model), q (n_heads, seq_len, d_k), k and v the same with their own head, logits and weights
    (n_heads, seq_len, seq_len), W_q, W_k, W_v (heads, d_k or d_v, d_model), W_o (n_heads, d_model, d_v).
    """
    import torch

    group = params.n_heads // params.n_kv_heads
    x = run.randn(params.seq_len, params.d_model).cpu().double()
    W_q, W_k, W_v = (
        run.randn(heads, width, params.d_model).cpu().double() / math.sqrt(params.d_model)
        for heads, width in (
            (params.n_heads, params.d_k),
            (params.n_kv_heads, params.d_k),
            (params.n_kv_heads, params.d_v),
        )
    )
    W_o = run.randn(params.n_heads, params.d_model, params.d_v).cpu().double()
    bias = _bias(params, run)
    run.progress(0.1)

    positions = torch.arange(params.seq_len)
    q, k, v = x @ W_q.mT, (x @ W_k.mT).repeat_interleave(group, 0), (x @ W_v.mT).repeat_interleave(group, 0)
    q, k = params.qk_size * q, params.qk_size * k
    if params.positions == "rope":
        angles = exact_angles(positions, params.d_k, BASE)
        q, k = turn(q, angles, "half_split"), turn(k, angles, "half_split")
    logits = attention_logits(q, k) + bias
    weights = softmax(logits)
    heads = context(weights, v)
    out = (heads @ W_o.mT).sum(dim=0)

    found = {}
    for done, (name, matrix) in enumerate(
        {
            "logits": logits[0],
            "weights": weights[0],
            "all_logits": logits.flatten(0, 1),
            "value_map": W_o[0] @ W_v[0],
            "context": heads[0],
            "layer_out": out,
            "x": x,
        }.items()
    ):
        run.progress(0.2 + 0.1 * done)
        found[name] = (torch.linalg.svdvals(matrix), max(matrix.shape))
    metrics = {f"{name}_rank": float(_rank(*values)) for name, values in found.items()}
    strong = found["weights"][0]
    metrics["weights_strong"] = float((strong > STRONG * strong[0]).sum())
    shown = {name: found[name][0] for name in ("logits", "weights")}
    table = {
        "matrix": np.repeat(list(shown), params.seq_len),
        "singular_index": np.tile(np.arange(1, params.seq_len + 1), len(shown)),
        "singular_share": np.concatenate([(s / s[0]).clamp_min(DRAWN_FLOOR).numpy() for s in shown.values()]),
    }
    return Result({metric.name: metrics[metric.name] for metric in METRICS}, {"spectrum": table})


def _bias(params: Params, run: Run) -> torch.Tensor:
    """What is added to the scaled logits for each pair of positions, the same for all heads. Shapes: (n, n)."""
    import torch

    lead = torch.arange(params.seq_len)[:, None] - torch.arange(params.seq_len)  # of the query over the key
    drawn = run.randn(2 * params.seq_len - 1).cpu().double()  # one number for each distance, signed
    if params.positions == "alibi_one_side":  # what stands where a causal mask lets see; the mask hides the rest
        return -SLOPE * lead.to(drawn.dtype)
    if params.positions == "alibi_both_sides":
        return -SLOPE * lead.abs().to(drawn.dtype)
    if params.positions == "distance_bias":
        return drawn[lead + params.seq_len - 1]
    return torch.zeros(params.seq_len, params.seq_len, dtype=drawn.dtype)


def _rank(singular: torch.Tensor, longer: int) -> int:
    import torch

    return int((singular > longer * torch.finfo(singular.dtype).eps * singular[0]).sum())
