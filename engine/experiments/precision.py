r"""Attention weights in 16 bits against float64: overflow, rounding, underflow; where the scale and the softmax stand.

q and k are rounded to the number format first, as activations are; the reference takes these numbers and goes on in
float64, so what is measured is the error of the computation. Every step is stored in the format, as in eager code; the
product itself is summed by the device in its own way (float32 on current hardware).

``scale_position`` is ``after`` for (q kᵀ) · c and ``before`` for (q · c) kᵀ. ``softmax_in`` is ``low`` when each step
of the softmax is rounded to the format, ``full`` when it runs in float32 and only the weights are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import qk_product, scale_value, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.chunks import CHUNK_LOGITS, chunks, oversize

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(128, low=1, high=4096, log2=True)
    kv_len: int = number(256, low=2, high=16384, log2=True)
    q_len: int = number(64, low=1, high=1024, log2=True)
    q_std: float = number(1.0, low=0.05, high=64, step=0.05)
    k_std: float = number(1.0, low=0.05, high=64, step=0.05)
    low_dtype: str = choice(*DTYPES)
    scale: str = choice("inv_sqrt_d_k", "none", "inv_d_k")
    scale_position: str = choice("after", "before")
    softmax_in: str = choice("low", "full")

    def unread(self) -> frozenset[str]:
        return frozenset({"scale_position"} if self.scale == "none" else ())

    def rules(self) -> Iterator[Problem]:
        yield from oversize(q_len=self.q_len, kv_len=self.kv_len, width=self.d_k)


METRICS = (
    Metric("logits_abs_max"),
    Metric("spacing_at_max"),
    Metric("weights_error_mean"),
    Metric("weights_error_relative_max"),
    Metric("logits_error_max"),
    Metric("overflow_count"),
    Metric("overflow_share"),
    Metric("lost_row_share"),
    Metric("zero_weight_share"),
    Metric("naive_exp_overflow_share"),
    Metric("qk_abs_max"),
    Metric("dtype_max"),
)
PLOTS = (
    Plot("weights_error", table="weights_error", x="row_share", y="weights_error", by="dtype", y_scale="log10"),
    Plot("spacing", table="spacing", x="logits_abs", y="spacing", by="dtype", x_scale="log2", y_scale="log10"),
)
BUDGET_S = 0.015

ROW_SHARES = np.linspace(0.01, 0.99, 50)


def memory_bytes(params: Params) -> int:
    """q and k as drawn, in the format, in float64 and laid out for the product; a dozen arrays of a chunk's logits."""
    rows = _rows_per_chunk(params)
    return 8 * (5 * (params.q_len + params.kv_len) * params.d_k + 12 * rows * params.kv_len + 8 * params.q_len)


def run(params: Params, run: Run) -> Result:
    """Draw q and k once, and compute the weights from them in each format; the metrics are of the chosen one.

    Shapes: q (q_len, d_k), k (kv_len, d_k); logits and weights (rows, kv_len), chunk by chunk of queries.
    """
    import torch

    q = run.randn(params.q_len, params.d_k) * params.q_std
    k = run.randn(params.kv_len, params.d_k) * params.k_std
    found: dict[str, list[dict[str, np.ndarray]]] = {dtype: [] for dtype in DTYPES}
    for start, n in chunks(params.q_len, _rows_per_chunk(params)):
        for i, dtype in enumerate(DTYPES):
            run.progress((start + n * i / len(DTYPES)) / params.q_len)
            found[dtype].append(_rows_of(q[start : start + n], k, params, getattr(torch, dtype)))
    rows = {
        dtype: {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for dtype, parts in found.items()
    }

    mine, limits = rows[params.low_dtype], torch.finfo(getattr(torch, params.low_dtype))
    n_logits = params.q_len * params.kv_len
    kept = mine["overflows"] == 0
    metrics = {
        "logits_abs_max": float(mine["logits_abs_max"].max()),
        "spacing_at_max": _spacing(min(float(mine["logits_abs_max"].max()), limits.max), limits),
        "weights_error_mean": float(mine["weights_error"].mean()),
        "weights_error_relative_max": float(mine["weights_error_relative"].max()),
        "logits_error_max": float(mine["logits_error_max"].max()),
        "overflow_count": float(mine["overflows"].sum()),
        "overflow_share": float(mine["overflows"].sum()) / n_logits,
        "lost_row_share": float(1 - kept.mean()),
        "zero_weight_share": float(mine["zeros"].sum()) / n_logits,
        "naive_exp_overflow_share": float(mine["naive_exp_overflows"].mean()),
        "qk_abs_max": float(mine["qk_abs_max"].max()),
        "dtype_max": limits.max,
    }
    errors = {dtype: of["weights_error"] for dtype, of in rows.items()}
    return Result(metrics, {"weights_error": _quantiles(errors), "spacing": _spacings()})


def _rows_per_chunk(params: Params) -> int:
    return max(1, min(params.q_len, CHUNK_LOGITS // params.kv_len))


def _rows_of(q: torch.Tensor, k: torch.Tensor, params: Params, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """What is measured on each row. A row with an overflow has no weights: it counts as wholly wrong (error 1).

    Shapes: q (rows, d_k), k (kv_len, d_k); returns (rows,) each.
    """
    import torch

    scale = scale_value(params.scale, params.d_k)
    before, after = (scale, 1.0) if params.scale_position == "before" else (1.0, scale)
    q_low, k_low = q.to(dtype), k.to(dtype)
    logits = qk_product(q_low * before, k_low) * after
    weights = softmax(logits) if params.softmax_in == "low" else softmax(logits.float()).to(dtype)
    naive = (logits if params.softmax_in == "low" else logits.float()).exp().sum(dim=-1)

    q_exact, k_exact = q_low.cpu().double(), k_low.cpu().double()  # not every device has float64
    qk_exact = qk_product(q_exact, k_exact)
    logits_exact = qk_exact * scale
    weights_exact = softmax(logits_exact)

    logits, weights, naive = logits.cpu().double(), weights.cpu().double(), naive.cpu()
    overflow = ~logits.isfinite()
    lost = overflow.any(dim=-1)
    error = (logits - logits_exact).abs().masked_fill(overflow, 0)  # of the logits that there are
    difference = (weights - weights_exact).abs()
    # weights below the smallest normal number lose digits one by one until they are 0: that is counted in zeros
    resolved = weights_exact >= torch.finfo(dtype).smallest_normal
    relative = (difference / weights_exact).where(resolved, 0)
    return {
        "logits_abs_max": logits_exact.abs().amax(dim=-1).numpy(),
        "qk_abs_max": (qk_exact * before).abs().amax(dim=-1).numpy(),
        "overflows": overflow.sum(dim=-1).numpy(),
        "logits_error_max": error.amax(dim=-1).numpy(),
        "weights_error": (difference.sum(dim=-1) / 2).where(~lost, 1).numpy(),
        "weights_error_relative": relative.amax(dim=-1).where(~lost, 1).numpy(),
        "zeros": (weights == 0).sum(dim=-1).numpy(),
        "naive_exp_overflows": (~naive.isfinite()).numpy(),
    }


def _spacing(magnitude: float, limits: torch.finfo) -> float:
    """Distance from a number of this magnitude to the next larger one."""
    exponent = math.frexp(max(magnitude, limits.smallest_normal))[1] - 1
    return float(limits.eps * 2.0**exponent)


def _quantiles(errors: dict[str, np.ndarray]) -> Table:
    """The error (half the sum of |weight differences|) below which a given share of the rows lies."""
    parts = []
    for dtype, rows in errors.items():
        values = np.quantile(rows, ROW_SHARES)
        drawn = values > 0  # a logarithmic axis has no 0
        parts.append((np.full(drawn.sum(), dtype), ROW_SHARES[drawn], values[drawn]))
    dtypes, shares, values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"dtype": dtypes, "row_share": shares.astype(np.float32), "weights_error": values.astype(np.float32)}


def _spacings() -> Table:
    """Distance between neighbouring numbers, at the magnitudes from 1/8 to 2048."""
    import torch

    magnitudes = 2.0 ** np.arange(-3, 12)
    spacings = [_spacing(m, torch.finfo(getattr(torch, dtype))) for dtype in DTYPES for m in magnitudes]
    return {
        "dtype": np.repeat(DTYPES, len(magnitudes)),
        "logits_abs": np.tile(magnitudes, len(DTYPES)).astype(np.float32),
        "spacing": np.array(spacings, dtype=np.float32),
    }
