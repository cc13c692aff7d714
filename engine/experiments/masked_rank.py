r"""Rank, determinant and conditioning of one head's attention weights under each mask, and what becomes of them.

Under a causal mask the weights A are lower triangular, and softmax makes every entry that is kept positive: so
:math:`\det A=\prod_t A_{tt}>0`, and A has full rank in exact arithmetic. That says nothing about the size of the
determinant, about the singular values, or about what a layer makes of A. So for the same queries and keys

* the singular values under every mask, their condition number, and how many of them float32 could tell from 0;
* the context A V, which has no more than d_v of them, whatever A has;
* A + I, the weights with the token's own vector beside them, as a residual stream has it (with W_v W_o = 1);
* the product of the weights of several layers with nothing between them, each with queries and keys of its own.

``qk_size`` 0 makes all logits equal: the weights of a causal head are then 1/t in row t, whatever the tokens are.

A determinant of triangular weights is the product of their diagonal, which is exact to rounding where a factorization
with pivots would not be. Everything is computed in float64 on the CPU: in float32 rounding fills a matrix up at 1e-7 of
its largest value.

Sources: viswanath1998, abstract (condition numbers of random triangular matrices); wu2024, abstract (masked layers on
top of one another).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.masks import keep_named

if TYPE_CHECKING:
    import torch

COMPARED = ("causal", "prefix", "no_mask")  # drawn for the same queries and keys


@dataclass(frozen=True)
class Params(BaseParams):
    mask: str = choice("causal", "no_mask", "prefix", "strict")
    seq_len: int = number(64, low=2, high=512, log2=True)
    d_k: int = number(4, low=1, high=256, log2=True)
    qk_size: float = number(1.0, low=0, high=4, step=0.125)
    n_layers: int = number(1, low=1, high=32)
    d_v: int = number(16, low=1, high=256, log2=True)
    prefix_tokens: int = number(32, low=1, high=512)

    def rules(self) -> Iterator[Problem]:
        if self.n_layers * self.seq_len**3 > MAX_PRODUCTS:
            values = {"product": self.n_layers * self.seq_len**3, "limit": MAX_PRODUCTS}
            yield Problem("rule", "n_layers", self.n_layers, rule="too_many_weight_products", values=values)


METRICS = (
    Metric("log10_determinant"),
    Metric("condition_number"),
    Metric("float32_rank"),
    Metric("weights_rank"),
    Metric("weights_strong"),
    Metric("context_rank"),
    Metric("residual_rank"),
    Metric("residual_condition"),
    Metric("own_weight_mean"),
)
PLOTS = (
    Plot("weights", table="weights", x="singular_index", y="singular_share", by="mask", y_scale="log10"),
    Plot("context", table="context", x="singular_index", y="singular_share", by="mask", y_scale="log10"),
)
BUDGET_S = 0.05

MAX_PRODUCTS = 2**28  # of the matrix products of all layers: some 0.2 s under four masks on one core
STRONG = 0.01  # a singular value counts as strong when it is above this share of the largest
FLOOR = 1e-18  # smaller shares of the largest singular value are rounding, and stand as this
SINGULAR = -1e4  # log10 of a determinant that is exactly 0
DRAWN = 128  # singular values that are drawn, at most


def memory_bytes(params: Params) -> int:
    """Queries, keys, values, and a dozen square matrices for each mask, in float64."""
    return 8 * (params.seq_len * (4 * params.d_k + 6 * params.d_v) + 50 * params.seq_len**2) + 2**16


def run(params: Params, run: Run) -> Result:
    """Draw the queries and keys of each layer, make the weights under every mask, and count singular values.

    ``float32_rank``, ``weights_rank``: singular values above seq_len times the rounding unit of float32, and of
    float64, of the largest (numpy's ``matrix_rank`` does the second). ``weights_strong``: above STRONG of the largest.
    ``condition_number``: largest singular value over smallest; above 1e16 it says no more than that, for the
    smallest is rounding then, and it ends at 1e18. ``residual_rank``, ``residual_condition``: of A + I.
    ``own_weight_mean``: the weight that a token has on itself. ``log10_determinant``: of the absolute value, of all
    layers; SINGULAR for 0.

    Shapes: q, k (seq_len, d_k), v (seq_len, d_v), weights (seq_len, seq_len).
    """
    import torch

    n = params.seq_len
    masks = tuple(dict.fromkeys((*COMPARED, params.mask)))
    keeps = {mask: keep_named(mask, n, prefix_len=min(params.prefix_tokens, n)) for mask in masks}
    products: dict[str, torch.Tensor] = {}
    log10_determinant, own_weights = 0.0, []
    for layer in range(params.n_layers):
        q, k = (params.qk_size * run.randn(n, params.d_k).cpu().double() for _ in range(2))
        logits = attention_logits(q, k)
        for mask, keep in keeps.items():
            weights = _weights(logits, keep)
            products[mask] = weights if layer == 0 else weights @ products[mask]
            if mask == params.mask:
                log10_determinant += _log10_determinant(weights)
                own_weights.append(weights.diagonal().mean().item())
            run.progress(0.5 * layer / params.n_layers)
    v = run.randn(n, params.d_v).cpu().double()

    weights_values, context_values = {}, {}
    for done, (mask, weights) in enumerate(products.items()):
        weights_values[mask] = torch.linalg.svdvals(weights)
        run.progress(0.5 + 0.1 * done)
        context_values[mask] = torch.linalg.svdvals(context(weights, v))
    residual = torch.linalg.svdvals(products[params.mask] + torch.eye(n, dtype=v.dtype))
    chosen = weights_values[params.mask]
    metrics = {
        "log10_determinant": max(log10_determinant, SINGULAR),
        "condition_number": _condition(chosen),
        "float32_rank": _above(chosen, n * torch.finfo(torch.float32).eps),
        "weights_rank": _above(chosen, n * torch.finfo(torch.float64).eps),
        "weights_strong": _above(chosen, STRONG),
        "context_rank": _above(context_values[params.mask], max(n, params.d_v) * torch.finfo(torch.float64).eps),
        "residual_rank": _above(residual, n * torch.finfo(torch.float64).eps),
        "residual_condition": _condition(residual),
        "own_weight_mean": sum(own_weights) / len(own_weights),
    }
    return Result(metrics, {"weights": _spectra(weights_values), "context": _spectra(context_values)})


def _weights(logits: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Softmax over what is kept; a row without any key is all zeros, as in PyTorch's fused attention."""
    full = keep.any(dim=-1, keepdim=True)
    return softmax(mask_logits(logits, keep | ~full)) * full


def _log10_determinant(weights: torch.Tensor) -> float:
    """log10 of the absolute value of the determinant."""
    import torch

    if not weights.triu(1).any():
        return float(weights.diagonal().log10().sum())
    return float(torch.linalg.slogdet(weights).logabsdet) / math.log(10)


def _condition(singular: torch.Tensor) -> float:
    return float(1 / _shares(singular)[-1])


def _shares(singular: torch.Tensor) -> torch.Tensor:
    """Singular values as shares of the largest; those of 0 are at the floor, as what is rounded to 0."""
    return (singular / singular[0].clamp_min(FLOOR**2)).clamp_min(FLOOR)


def _above(singular: torch.Tensor, share: float) -> float:
    return float((singular > share * singular[0]).sum())


def _spectra(values: dict[str, torch.Tensor]) -> Table:
    """Singular values as shares of the largest, at no more than DRAWN places."""
    n = len(next(iter(values.values())))
    places = np.unique(np.linspace(1, n, min(n, DRAWN)).round().astype(int))
    return {
        "mask": np.repeat(list(values), len(places)),
        "singular_index": np.tile(places, len(values)),
        "singular_share": np.concatenate([_shares(s).numpy()[places - 1] for s in values.values()]),
    }
