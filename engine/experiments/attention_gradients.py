r"""Gradients through one head of attention by the explicit chain rule, with the scale's two effects apart.

With :math:`z = c\,q k^\top` the scale c acts twice: forward, on how saturated the softmax is and so on its Jacobian J,
and backward, as a factor:

.. math:: \frac{\partial L}{\partial z} = J\,\frac{\partial L}{\partial w}, \qquad
          \frac{\partial L}{\partial q} = c\,k^\top \frac{\partial L}{\partial z}

Without the factor c the second line is ``grad_q_unscaled``: the Jacobian's effect alone.

Inputs of N(0, 1) coordinates go through matrices of N(0, 1/d_model) entries, so q, k and v have unit variance; each has
inputs of its own, so they are independent, as the textbook assumes. The loss of a query is g·context with g of N(0, 1)
coordinates. Gradients to logits and q are those of a query's own loss, to k and v those of the sum over the queries
that read them, to the matrices those of the mean over all queries.

Source: vaswani2017, section 3.2.1 (extremely small gradients, suspected); the formulas are the chain rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import (
    SCALE_RULES,
    attention_logits,
    jacobian_norm,
    qk_product,
    row_norm,
    scale_value,
    softmax,
    softmax_gradient,
    unit_norm,
)
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.chunks import chunks, items_per_chunk, oversize, per_row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=1, high=4096, log2=True)
    kv_len: int = number(64, low=2, high=16384, log2=True)
    scale: str = choice(*SCALE_RULES)
    factor: float = number(1.0, low=0.0625, high=8, step=0.0625)
    tau: float = number(1.0, low=2**-7, high=2**7, log2=True)
    dead_below: float = number(1e-3, low=1e-9, high=0.5)
    d_v: int = number(64, low=1, high=256, log2=True)
    d_model: int = number(256, low=16, high=1024, log2=True)
    batch: int = number(16, low=1, high=64, log2=True)
    q_len: int = number(64, low=1, high=512, log2=True)

    def unread(self) -> frozenset[str]:
        reads = {"factor": {"factor"}, "learnable_tau": {"tau"}, "cosine": {"tau"}}
        return frozenset({"factor", "tau"} - reads.get(self.scale, set()))

    def rules(self) -> Iterator[Problem]:
        wider = "d_k" if self.d_k >= self.d_model else "d_model"
        yield from oversize(q_len=self.q_len, kv_len=self.kv_len, width=getattr(self, wider), width_name=wider)


METRICS = (
    Metric("grad_q_norm_median"),
    Metric("grad_q_unscaled_median"),
    Metric("grad_W_q_norm"),
    Metric("grad_logits_norm_median"),
    Metric("grad_logits_norm_mean"),
    Metric("scale_value"),
    Metric("grad_q_norm_mean"),
    Metric("grad_q_norm_p10"),
    Metric("grad_q_norm_p90"),
    Metric("grad_q_spread"),
    Metric("grad_k_norm_mean"),
    Metric("grad_k_norm_median"),
    Metric("grad_v_norm_mean"),
    Metric("grad_W_k_norm"),
    Metric("grad_W_v_norm"),
    Metric("dead_share"),
    Metric("top_decile_share"),
)
PLOTS = (
    Plot("effects", table="effects", mark="point", x="scale", y="grad_norm", by="gradient", y_scale="log10"),
    Plot("grad_q", table="grad_q", x="row_share", y="grad_q_norm", by="scale", y_scale="log10"),
)
BUDGET_S = 0.015

COMPARED = ("none", "inv_sqrt_d_k", "inv_d_k")  # drawn beside the chosen rule
DRAWN_FLOOR = 1e-12  # smaller norms are drawn here, else one dead row would flatten the rest of the plot
ROW_SHARES = np.linspace(0.01, 0.99, 50)


def memory_bytes(params: Params) -> int:
    """The matrices with gradients, one chunk of activations with gradients, a dozen arrays of logits, float64 rows."""
    numbers, logits = _item(params)
    items = items_per_chunk(params.batch, numbers=numbers, logits=logits)
    matrices = params.d_model * (2 * params.d_k + params.d_v)
    rows = 8 * params.batch * (16 * params.q_len + 4 * params.kv_len)
    return 4 * (4 * matrices + items * (4 * numbers + 12 * logits)) + rows


def run(params: Params, run: Run) -> Result:
    """Draw a layer and its inputs; go forward and back under each rule.

    Shapes: x_q (items, q_len, d_model), x_k and x_v (items, kv_len, d_model), logits and weights (items, q_len,
    kv_len), chunk by chunk; W_q and W_k (d_model, d_k), W_v (d_model, d_v).
    """
    import torch

    numbers, logits_of_item = _item(params)
    items = items_per_chunk(params.batch, numbers=numbers, logits=logits_of_item)
    rules = tuple(dict.fromkeys((*COMPARED, params.scale)))
    rows: dict[str, dict[str, list[np.ndarray]]] = {
        rule: {"grad_logits": [], "grad_q_unscaled": [], "grad_q": [], "jacobian": []} for rule in rules
    }
    grad_k_norms, grad_v_norms = [], []
    W_q, W_k, W_v = (run.randn(params.d_model, width) / params.d_model**0.5 for width in _widths(params))
    grad_W_q, grad_W_k, grad_W_v = (torch.zeros_like(W) for W in (W_q, W_k, W_v))

    for start, n in chunks(params.batch, items):
        x_q = run.randn(n, params.q_len, params.d_model)
        x_k, x_v = run.randn(n, params.kv_len, params.d_model), run.randn(n, params.kv_len, params.d_model)
        grad_context = run.randn(n, params.q_len, params.d_v)
        q, k, v = x_q @ W_q, x_k @ W_k, x_v @ W_v
        qk, grad_weights = qk_product(q, k), grad_context @ v.transpose(-1, -2)
        for i, rule in enumerate(rules):
            run.progress((start + n * i / len(rules)) / params.batch)
            scale = scale_value(rule, params.d_k, factor=params.factor, tau=params.tau)
            weights = softmax(attention_logits(q, k, rule, tau=params.tau) if rule == "cosine" else qk * scale)
            grad_logits = softmax_gradient(weights, grad_weights)
            # of a saturated row all is tiny, and its squares would underflow: its largest entry is taken out first
            largest = grad_logits.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(q.dtype).smallest_normal)
            grad_qk_q = _product_gradient(grad_logits / largest, q, k, rule)
            rows[rule]["grad_logits"].append(per_row(row_norm(grad_logits)))
            rows[rule]["grad_q_unscaled"].append(per_row(grad_qk_q.norm(dim=-1)) * per_row(largest))
            rows[rule]["grad_q"].append(scale * rows[rule]["grad_q_unscaled"][-1])
            rows[rule]["jacobian"].append(per_row(jacobian_norm(weights)))
            if rule == params.scale:
                grad_q = grad_qk_q * (scale * largest)
                grad_k = _product_gradient(grad_logits.transpose(-1, -2), k, q, rule) * scale
                grad_v = weights.transpose(-1, -2) @ grad_context
                grad_k_norms.append(per_row(row_norm(grad_k)))
                grad_v_norms.append(per_row(row_norm(grad_v)))
                grad_W_q += _matrix_gradient(x_q, grad_q)
                grad_W_k += _matrix_gradient(x_k, grad_k)
                grad_W_v += _matrix_gradient(x_v, grad_v)

    joined = {rule: {name: np.concatenate(parts) for name, parts in of.items()} for rule, of in rows.items()}
    chosen = joined[params.scale]
    grad_k_norm, grad_v_norm = np.concatenate(grad_k_norms), np.concatenate(grad_v_norms)
    p10, p90 = np.quantile(chosen["grad_q"], [0.1, 0.9])
    n_queries = params.batch * params.q_len
    metrics = {
        "grad_q_norm_median": float(np.median(chosen["grad_q"])),
        "grad_q_unscaled_median": float(np.median(chosen["grad_q_unscaled"])),
        "grad_W_q_norm": float(row_norm(grad_W_q.flatten())) / n_queries,
        "grad_logits_norm_median": float(np.median(chosen["grad_logits"])),
        "grad_logits_norm_mean": float(chosen["grad_logits"].mean()),
        "scale_value": scale_value(params.scale, params.d_k, factor=params.factor, tau=params.tau),
        "grad_q_norm_mean": float(chosen["grad_q"].mean()),
        "grad_q_norm_p10": float(p10),
        "grad_q_norm_p90": float(p90),
        # rows whose every other weight is 0 have no gradient at all: the ratio ends at the smallest number of the dtype
        "grad_q_spread": float(p90 / max(p10, torch.finfo(run.dtype).smallest_normal)),
        "grad_k_norm_mean": float(grad_k_norm.mean()),
        "grad_k_norm_median": float(np.median(grad_k_norm)),
        "grad_v_norm_mean": float(grad_v_norm.mean()),
        "grad_W_k_norm": float(row_norm(grad_W_k.flatten())) / n_queries,
        "grad_W_v_norm": float(row_norm(grad_W_v.flatten())) / n_queries,
        "dead_share": float((chosen["jacobian"] < params.dead_below).mean()),
        "top_decile_share": _top_decile_share(chosen["grad_logits"]),
    }
    return Result(metrics, {"effects": _effects(joined), "grad_q": _quantiles(joined)})


def _widths(params: Params) -> tuple[int, int, int]:
    return params.d_k, params.d_k, params.d_v


def _item(params: Params) -> tuple[int, int]:
    """Numbers of the inputs and activations, and logits, of one item of the batch."""
    inputs = (params.q_len + 2 * params.kv_len) * params.d_model
    activations = (params.q_len + params.kv_len) * (params.d_k + params.d_v)
    return inputs + activations, params.q_len * params.kv_len


def _product_gradient(grad_logits: torch.Tensor, q: torch.Tensor, k: torch.Tensor, rule: str) -> torch.Tensor:
    r"""Gradient to q of the products q·k (of the cosines under ``cosine``), without the scale's factor.

    For a cosine, what lies along q drops out and the rest is divided by its length:
    :math:`(I - \hat q\hat q^\top)\,\hat k^\top g\,/\,|q|`. With the axes of ``grad_logits`` swapped it serves k, too.

    Shapes: grad_logits (..., q_len, kv_len), q (..., q_len, d_k), k (..., kv_len, d_k); returns (..., q_len, d_k).
    """
    if rule != "cosine":
        return grad_logits @ k
    direction = unit_norm(q)
    grad = grad_logits @ unit_norm(k)
    along = (grad * direction).sum(dim=-1, keepdim=True)
    return (grad - along * direction) / q.norm(dim=-1, keepdim=True)


def _matrix_gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Gradient to W of x W, summed over all rows. Shapes: (n, len, d_model), (n, len, width) to (d_model, width)."""
    return x.flatten(0, 1).T @ grad.flatten(0, 1)


def _top_decile_share(norms: np.ndarray) -> float:
    """Share of the sum of squares that the largest tenth of the rows carries (at least one row)."""
    squares = np.sort(norms**2)[::-1]
    return float(squares[: max(1, len(squares) // 10)].sum() / squares.sum())


def _effects(joined: dict[str, dict[str, np.ndarray]]) -> Table:
    """Median norms, before and after the scale's own factor."""
    names = ("grad_logits", "grad_q_unscaled", "grad_q")
    medians = [np.median(of[name]) for of in joined.values() for name in names]
    return {
        "scale": np.repeat(list(joined), len(names)),
        "gradient": np.tile(names, len(joined)),
        "grad_norm": np.maximum(medians, DRAWN_FLOOR).astype(np.float32),
    }


def _quantiles(joined: dict[str, dict[str, np.ndarray]]) -> Table:
    """The norm of the gradient to q below which a given share of the queries lies."""
    drawn = [np.quantile(of["grad_q"], ROW_SHARES).clip(DRAWN_FLOOR) for of in joined.values()]
    return {
        "scale": np.repeat(list(joined), len(ROW_SHARES)),
        "row_share": np.tile(ROW_SHARES, len(joined)).astype(np.float32),
        "grad_q_norm": np.concatenate(drawn).astype(np.float32),
    }
