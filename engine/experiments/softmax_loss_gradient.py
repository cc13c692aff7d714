r"""One saturated row of softmax, seen from a loss on top of it and from inside attention.

Every gradient to the logits is the same Jacobian times what comes from above, :math:`J g` with
:math:`J = \mathrm{diag}(w) - ww^\top`:

``cross_entropy``   :math:`g = -y/w`, and J g = w - y: the loss grows as steep as the softmax grows flat
``squared_error``   :math:`g = 2(w - y)`, of the squared error on the weights themselves
``softmax_twice``   :math:`g = \mathrm{softmax}(w) - y`, of a cross-entropy that is given w in place of the logits
``attention``       :math:`g_j = v_j\cdot\partial L/\partial c` for the context :math:`c = \sum_j w_j v_j`

y is the label, one-hot. The row has one logit ``gap`` above all others, which are equal; the label is another one
(wrong) or that one (right). Values are of N(0, 1) coordinates and the gradient to the context has the length
``upstream_std``. So that is the standard deviation of every g, and the root mean square of J g is the Frobenius norm of
J times it.

These are computed in float64. Beside them PyTorch's autograd does the same cross-entropy in a chosen number format in
three ways: fused (``cross_entropy``), as ``-log(softmax)``, and as ``-log(softmax + epsilon)``. Where 1/w overflows,
w being the label's weight, the second one's gradient is not a number.

Source: goodfellow2016, section 6.2.2.3 (which losses undo the saturation); dao2022, appendix B.2 (attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import jacobian_norm, row_norm, softmax, softmax_gradient
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.chunks import chunks, per_row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    gap: float = number(10.0, low=0, high=128, step=0.5)
    kv_len: int = number(16, low=2, high=256, log2=True)
    label: str = choice("wrong", "right")
    number_format: str = choice("float32", "float64", "float16", "bfloat16")  # not `dtype`: that is the run's own
    log_epsilon: float = number(1e-8, low=1e-12, high=1e-2)
    upstream_std: float = number(1.0, low=2**-4, high=2**10, log2=True)
    n_rows: int = number(1024, low=64, high=8192, log2=True)


METRICS = (
    Metric("grad_cross_entropy_norm"),
    Metric("grad_squared_error_norm"),
    Metric("grad_attention_rms"),
    Metric("grad_softmax_twice_norm"),
    Metric("grad_values_norm"),
    Metric("jacobian_norm"),
    Metric("upstream_cross_entropy_max"),
    Metric("weight_max"),
    Metric("grad_fused_norm"),
    Metric("grad_log_norm"),
    Metric("grad_epsilon_norm"),
    Metric("log_grad_until"),
    Metric("log_loss_until"),
    Metric("fused_grad_until"),
)
PLOTS = (
    Plot("upstream", table="upstream", x="gap", y="logits_gradient", by="upstream", y_scale="log10"),
    Plot("formats", table="formats", x="gap", y="logits_gradient", by="cross_entropy"),
)
BUDGET_S = 0.02

D_V = 8
CURVE_ROWS = 64
CURVE_GAPS = np.arange(0.0, 40.5, 0.5)
FORMAT_GAPS = np.arange(0.0, 128.5, 0.5)
SEARCH_END = 768  # beyond the 709.8 at which 1/w overflows in float64
COARSE_STEP, SEARCH_STEP = 8, 1 / 8
CHUNK_NUMBERS = 2**19  # of the values: some 10 ms


def memory_bytes(params: Params) -> int:
    """One chunk of values with gradients, the curves' rows, those of the formats with their graph, a number a row."""
    chunk = max(CHUNK_NUMBERS, params.kv_len * D_V)
    curves = len(CURVE_GAPS) * CURVE_ROWS * params.kv_len
    return 8 * (5 * chunk + 8 * curves + 12 * len(FORMAT_GAPS) * params.kv_len + 8 * params.n_rows) + 2**18


def run(params: Params, run: Run) -> Result:
    """Gradients at one gap, their curves over the gap, and how far the formats carry.

    ``upstream_cross_entropy_max``: the largest entry of -y/w. ``grad_values_norm``: gradient to all values of the row.
    A gradient that is not a number counts as 0: its step has to be thrown away.

    Shapes: logits and weights (kv_len,); values (n, kv_len, D_V) and gradients to the context (n, D_V), in chunks.
    """
    weights = softmax(_logits(np.array([params.gap]), params.kv_len))[0]
    upstream = _upstream(weights, params.label)
    norms = {name: float(row_norm(softmax_gradient(weights, g))) for name, g in upstream.items()}
    attention, values = _attention(weights, params, run)
    at_gap = _in_format(np.array([params.gap]), params, run)
    until = _until(params, run)
    metrics = {
        "grad_cross_entropy_norm": norms["cross_entropy"],
        "grad_squared_error_norm": norms["squared_error"],
        "grad_attention_rms": math.sqrt((attention**2).mean()),
        "grad_softmax_twice_norm": norms["softmax_twice"],
        "grad_values_norm": float(values.mean()),
        "jacobian_norm": float(jacobian_norm(weights)),
        "upstream_cross_entropy_max": float(upstream["cross_entropy"].abs().max()),
        "weight_max": float(weights.max()),
        "grad_fused_norm": float(at_gap["fused"][0]),
        "grad_log_norm": float(at_gap["log_softmax"][0]),
        "grad_epsilon_norm": float(at_gap["log_epsilon"][0]),
        **until,
    }
    return Result(metrics, {"upstream": _curves(params, run), "formats": _formats(params, run)})


def _logits(gaps: np.ndarray, kv_len: int) -> torch.Tensor:
    """Rows with one logit above the others. Shapes: (rows,) to (rows, kv_len), float64 on the CPU."""
    import torch

    logits = torch.zeros(len(gaps), kv_len, dtype=torch.float64)
    logits[:, 0] = torch.from_numpy(gaps)
    return logits


def _upstream(weights: torch.Tensor, label: str) -> dict[str, torch.Tensor]:
    """Gradients to the weights from three losses, whose first key is the one with the large logit.

    Shapes: (..., kv_len) to the same.
    """
    import torch

    key = 0 if label == "right" else 1
    y = torch.zeros_like(weights)
    y[..., key] = 1
    error = weights - y
    if label == "right":  # 1 - weight as a sum, else nothing is left of it from a gap of 37 on
        error[..., 0] = -weights[..., 1:].sum(dim=-1)
    return {
        "cross_entropy": -y / weights,
        "squared_error": 2 * error,
        "softmax_twice": softmax(weights) - y,
    }


def _attention(weights: torch.Tensor, params: Params, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Norms of the gradients to the logits and to the values, for values drawn n_rows times.

    The latter by autograd; the former by the chain rule, as autograd loses it in rounding where the weights saturate.
    """
    import torch

    to_logits, to_values = [], []
    at_once = max(1, CHUNK_NUMBERS // (params.kv_len * D_V))
    for start, n in chunks(params.n_rows, at_once):
        run.progress(0.4 * start / params.n_rows)
        v = run.randn(n, params.kv_len, D_V).cpu().double().requires_grad_()
        grad_context = run.randn(n, D_V).cpu().double()
        grad_context = params.upstream_std * grad_context / grad_context.norm(dim=-1, keepdim=True)
        context = (weights[:, None] * v).sum(dim=1)
        (grad_v,) = torch.autograd.grad((context * grad_context).sum(), v)
        grad_weights = (v.detach() * grad_context[:, None]).sum(dim=-1)
        to_logits.append(per_row(row_norm(softmax_gradient(weights.expand(n, -1), grad_weights))))
        to_values.append(per_row(row_norm(grad_v.flatten(1))))
    return np.concatenate(to_logits), np.concatenate(to_values)


def _cross_entropy(gaps: np.ndarray, way: str, params: Params, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Losses and gradients in the number format, by PyTorch's autograd. Shapes: (rows,) to (rows,), (rows, kv_len)."""
    import torch
    from torch.nn.functional import cross_entropy

    # not every device has float64
    device = torch.device("cpu") if params.number_format == "float64" else run.device
    logits = _logits(gaps, params.kv_len).to(getattr(torch, params.number_format)).to(device).requires_grad_()
    key = 0 if params.label == "right" else 1
    if way == "fused":
        losses = cross_entropy(logits, torch.full((len(gaps),), key, device=device), reduction="none")
    else:
        epsilon = params.log_epsilon if way == "log_epsilon" else 0.0
        losses = -torch.log(torch.softmax(logits, dim=-1)[:, key] + epsilon)
    (gradients,) = torch.autograd.grad(losses.sum(), logits)
    return losses.detach().cpu().double().numpy(), gradients.cpu().double().numpy()


WAYS = ("fused", "log_softmax", "log_epsilon")


def _in_format(gaps: np.ndarray, params: Params, run: Run) -> dict[str, np.ndarray]:
    """Norms of the three ways' gradients, 0 where one is not a number. Shapes: (rows,) to (rows,) each."""
    norms = {}
    for way in WAYS:
        _, gradients = _cross_entropy(gaps, way, params, run)
        found = np.sqrt((gradients**2).sum(axis=-1))
        norms[way] = np.where(np.isfinite(found), found, 0.0)
    return norms


def _until(params: Params, run: Run) -> dict[str, float]:
    """The largest gap up to which losses and gradients are numbers; looked for up to SEARCH_END."""

    def finite(gaps: np.ndarray, way: str, of: str) -> np.ndarray:
        losses, gradients = _cross_entropy(gaps, way, params, run)
        found = losses[:, None] if of == "losses" else gradients
        numbers: np.ndarray = np.isfinite(found).all(axis=-1)
        return numbers

    ends = {}
    looked_for = {
        "log_grad_until": ("log_softmax", "gradients"),
        "log_loss_until": ("log_softmax", "losses"),
        "fused_grad_until": ("fused", "gradients"),
    }
    for name, asked in looked_for.items():
        run.progress(0.5)
        end = 0.0
        for step, reach in ((COARSE_STEP, SEARCH_END), (SEARCH_STEP, COARSE_STEP)):  # weights only fall with the gap
            grid = np.arange(end, min(end + reach, SEARCH_END) + step, step)
            lost = np.flatnonzero(~finite(grid, *asked))
            end = float(grid[lost[0] - 1] if len(lost) else grid[-1])
            if end >= SEARCH_END:
                break
        ends[name] = end
    return ends


def _curves(params: Params, run: Run) -> Table:
    """Norms over the gap; of attention the root mean square over a few rows."""
    run.progress(0.8)
    weights = softmax(_logits(CURVE_GAPS, params.kv_len))
    curves = {
        name: row_norm(softmax_gradient(weights, g)).numpy() for name, g in _upstream(weights, params.label).items()
    }
    grad_weights = params.upstream_std * run.randn(CURVE_ROWS, params.kv_len).cpu().double()
    rows, grad_weights = weights[:, None].expand(-1, CURVE_ROWS, -1), grad_weights.expand(len(CURVE_GAPS), -1, -1)
    curves["attention"] = np.sqrt((row_norm(softmax_gradient(rows, grad_weights)).numpy() ** 2).mean(axis=-1))
    return {
        "gap": np.tile(CURVE_GAPS, len(curves)).astype(np.float32),
        "upstream": np.repeat(list(curves), len(CURVE_GAPS)),
        "logits_gradient": np.concatenate(list(curves.values())).astype(np.float32),
    }


def _formats(params: Params, run: Run) -> Table:
    """Norms over the gap in the number format."""
    run.progress(0.9)
    norms = _in_format(FORMAT_GAPS, params, run)
    return {
        "gap": np.tile(FORMAT_GAPS, len(norms)).astype(np.float32),
        "cross_entropy": np.repeat(list(norms), len(FORMAT_GAPS)),
        "logits_gradient": np.concatenate(list(norms.values())).astype(np.float32),
    }
