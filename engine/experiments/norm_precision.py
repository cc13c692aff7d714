r"""RMSNorm in 16 bits: where squares leave the format, where the epsilon stands, and what float32 inside is for.

:math:`y=x/\sqrt{\mathrm{mean}(x^2)+\epsilon}\odot g`, the tokens being numbers of the format. The mean square is taken

``squares_in_format``   as ``x.pow(2).mean(-1)`` does: every square is rounded to the format, the mean once more; the
                        sum in between is kept in float32, as PyTorch's reductions do
``sum_in_format``       the same with the sum rounded to the format as well, as ``(x * x).sum(-1) / d`` does
``in_float32``          the token is cast first, and cast back after the division

In float16 a square is infinite from :math:`|x|=256` on and 0 below :math:`2^{-12.5}`; a mean square that is infinite
divides the token to 0, without any NaN. ``inside_root`` is :math:`\sqrt{\cdot+\epsilon}`, ``outside_root``
:math:`\sqrt{\cdot}+\epsilon`: they begin to be seen at tokens of size :math:`\sqrt\epsilon` and :math:`\epsilon`.

Sources: llama-code, ``RMSNorm``; gemma-hf-code, ``GemmaRMSNorm`` (the gain before the cast); rmsnorm-code,
``rmsnorm_torch.py`` (epsilon outside the root, 1e-8); pytorch-code, ``RMSNorm`` (inside).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    number_format: str = choice("float16", "bfloat16", "float32")
    statistics_in: str = choice("squares_in_format", "sum_in_format", "in_float32")
    token_std: float = number(1.0, low=1e-6, high=1e4)
    epsilon_log10: float = number(-6.0, low=-12, high=0, step=0.5)
    epsilon_place: str = choice("inside_root", "outside_root")
    gain_place: str = choice("gain_after_cast", "gain_before_cast")
    d_model: int = number(1024, low=16, high=4096, log2=True)
    normed_tokens: int = number(16, low=1, high=256, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset({"statistics_in"}) if self.number_format == "float32" else frozenset()


METRICS = (
    Metric("norm_output_rms"),
    Metric("normed_error"),
    Metric("silenced_share"),
    Metric("undefined_share"),
    Metric("zero_token_undefined"),
    Metric("epsilon_in_format"),
)
PLOTS = (
    Plot("by_size", table="by_size", x="token_size", y="norm_output_rms", by="norm_arithmetic", x_scale="log10"),
    Plot(
        "errors",
        table="errors",
        x="token_size",
        y="normed_error",
        by="norm_arithmetic",
        x_scale="log10",
        y_scale="log10",
    ),
)
BUDGET_S = 0.05

GAIN_STD = 0.3  # of the gains, about 1
SIZES = 10.0 ** np.arange(-6, 4.5, 0.5)
CHART_TOKENS, CHART_WIDTH = 2, 256
ERROR_FLOOR = 1e-8
SHOWN = (
    ("float16", "squares_in_format", "float16_squares"),
    ("float16", "in_float32", "float16_in_float32"),
    ("bfloat16", "squares_in_format", "bfloat16_squares"),
    ("bfloat16", "in_float32", "bfloat16_in_float32"),
)


def memory_bytes(params: Params) -> int:
    """The tokens in some formats, and those of the chart."""
    return 8 * 16 * (params.normed_tokens + CHART_TOKENS) * params.d_model


def run(params: Params, run: Run) -> Result:
    """Normalize tokens of one size as asked; the charts go through sizes, the epsilon and its place as chosen.

    ``norm_output_rms``: root mean square of the outputs, gains left out. ``normed_error``: root mean square of the
    error of the outputs over that of the exact ones, which are computed in float64 from the same rounded tokens and
    gains, epsilon included. In both, outputs that are not finite count as 0. ``silenced_share``: share of tokens that
    come out as zeros though they were none; ``undefined_share``: with an output that is not finite.
    ``zero_token_undefined``: 1 where a token of zeros comes out undefined. ``epsilon_in_format``: the epsilon as it is
    when rounded to the format.

    Shapes: x (normed_tokens, d_model), gain (d_model,).
    """
    import torch

    z, gain = run.randn(params.normed_tokens, params.d_model), 1 + GAIN_STD * run.randn(params.d_model)
    form = getattr(torch, params.number_format)
    x = (params.token_std * z).to(form)
    out = _normed(params, x, torch.ones_like(gain).to(form))
    finite = out.isfinite().all(dim=-1)
    run.progress(0.2)
    zeros = _normed(params, torch.zeros_like(x[:1]), torch.ones_like(gain).to(form))
    metrics = {
        "norm_output_rms": _rms(torch.where(out.isfinite(), out, torch.zeros_like(out))),
        "normed_error": _error(params, x, gain.to(form)),
        "silenced_share": ((out == 0).all(dim=-1) & (x != 0).any(dim=-1)).float().mean().item(),
        "undefined_share": 1 - finite.float().mean().item(),
        "zero_token_undefined": 1 - zeros.isfinite().all().float().item(),
        "epsilon_in_format": torch.tensor(10.0**params.epsilon_log10).to(form).float().item(),
    }
    run.progress(0.3)
    by_size, errors = _by_size(params, z[:CHART_TOKENS, :CHART_WIDTH], gain[:CHART_WIDTH], run)
    return Result(metrics, {"by_size": by_size, "errors": errors})


def _normed(
    params: Params, x: torch.Tensor, gain: torch.Tensor, statistics_in: str | None = None, place: str | None = None
) -> torch.Tensor:
    """RMSNorm as its line of code computes it in the format of x. Shapes: x (..., d_model), gain (d_model,)."""
    epsilon, way = 10.0**params.epsilon_log10, statistics_in or params.statistics_in
    inner = x.float() if way == "in_float32" else x
    if way == "sum_in_format":
        mean_square = (inner * inner).sum(dim=-1, keepdim=True) / x.shape[-1]
    else:
        mean_square = inner.pow(2).mean(dim=-1, keepdim=True)
    if (place or params.epsilon_place) == "inside_root":
        normed = inner * (mean_square + epsilon).rsqrt()
    else:
        normed = inner / (mean_square.sqrt() + epsilon)
    if params.gain_place == "gain_before_cast" and way == "in_float32":
        return (normed * gain.float()).to(x.dtype)
    return normed.to(x.dtype) * gain


def _exact(params: Params, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """In float64 on the CPU, of the same numbers."""
    x, gain = x.cpu().double(), gain.cpu().double()
    epsilon, mean_square = 10.0**params.epsilon_log10, x.square().mean(dim=-1, keepdim=True)
    if params.epsilon_place == "inside_root":
        return x / (mean_square + epsilon).sqrt() * gain
    return x / (mean_square.sqrt() + epsilon) * gain


def _error(params: Params, x: torch.Tensor, gain: torch.Tensor, statistics_in: str | None = None) -> float:
    out, exact = _normed(params, x, gain, statistics_in).cpu().double(), _exact(params, x, gain)
    out = out.nan_to_num(0.0, 0.0, 0.0)
    size = exact.square().mean()
    return math.sqrt(((out - exact).square().mean() / size).item()) if size > 0 else 0.0


def _by_size(params: Params, z: torch.Tensor, gain: torch.Tensor, run: Run) -> tuple[Table, Table]:
    """Output of tokens of every size: exactly, with the epsilon in both places, and in the formats; and the errors."""
    import torch

    sizes: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for done, size in enumerate(SIZES):
        run.progress(0.3 + 0.7 * done / len(SIZES))
        x, ones = float(size) * z, torch.ones_like(gain)
        for place, name in (("inside_root", "float32_inside_root"), ("outside_root", "float32_outside_root")):
            out = _normed(params, x, ones, "in_float32", place)
            sizes.setdefault(name, []).append(_rms(out))
        for form, way, name in SHOWN:
            rounded = x.to(getattr(torch, form))
            out = _normed(params, rounded, ones.to(rounded.dtype), way)
            if form == "float16":
                sizes.setdefault(name, []).append(_rms(out.nan_to_num(0.0, 0.0, 0.0)))
            error = _error(params, rounded, gain.to(rounded.dtype), way)
            errors.setdefault(name, []).append(max(error, ERROR_FLOOR))
    return _table(sizes, "norm_output_rms"), _table(errors, "normed_error")


def _table(found: dict[str, list[float]], column: str) -> Table:
    return {
        "token_size": np.tile(SIZES, len(found)),
        "norm_arithmetic": np.repeat(list(found), len(SIZES)),
        column: np.concatenate([np.array(values) for values in found.values()]),
    }


def _rms(x: torch.Tensor) -> float:
    return float(x.cpu().double().square().mean().sqrt())
