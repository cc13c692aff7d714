r"""RMSNorm and LayerNorm on the same tokens: what an offset common to all features does, what an outlier, what is lost.

A token is an offset m, the same in all d features, plus numbers of standard deviation s, plus an outlier in one
feature. With :math:`r^2=\mathrm{mean}(x^2)=m^2+s^2` both outputs have the length :math:`\sqrt d`, and

.. math:: \mathrm{LN}(x)=\frac{x-m}{s},\qquad \mathrm{RMS}(x)=\frac xr=\frac mr\mathbf 1+\frac sr\,\mathrm{LN}(x)

so the cosine between them is s/r, and of RMSNorm's output the part that differs from feature to feature has the root
mean square s/r. The Jacobians, with y the output,

.. math:: J_{\mathrm{RMS}}=\tfrac1r\big(I-\tfrac1d yy^\top\big),\qquad
          J_{\mathrm{LN}}=\tfrac1s\big(I-\tfrac1d\mathbf 1\mathbf 1^\top-\tfrac1d yy^\top\big)

project out one direction and two. Here they are found by automatic differentiation. The epsilon is left out above.

Sources: zhang2019, abstract; brody2023, abstract (the projection); gupta2024, abstract (the three steps of LayerNorm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, flag, number
from engine.norms import norm_statistics, normalize

if TYPE_CHECKING:
    import torch

NORMS = ("rms_norm", "layer_norm")


@dataclass(frozen=True)
class Params(BaseParams):
    normalization: str = choice(*NORMS)
    token_offset: float = number(2.0, low=-16, high=16, step=0.5)
    token_std: float = number(1.0, low=0.0625, high=16, log2=True)
    outlier_size: float = number(0.0, low=0, high=256, step=8)
    center_tokens: bool = flag(False)
    d_model: int = number(64, low=8, high=1024, log2=True)
    normed_tokens: int = number(64, low=1, high=1024, log2=True)
    epsilon_log10: float = number(-6.0, low=-12, high=0, step=0.5)


METRICS = (
    Metric("varying_rms"),
    Metric("norms_difference_rms"),
    Metric("lost_directions"),
    Metric("norms_cosine"),
    Metric("output_offset"),
    Metric("norm_output_rms"),
    Metric("ordinary_features_rms"),
    Metric("gradient_along_token"),
    Metric("gradient_along_ones"),
    Metric("largest_stretch"),
)
PLOTS = (
    Plot("one_token", table="one_token", x="feature_number", y="feature_value", by="before_or_after", mark="point"),
    Plot("by_offset", table="by_offset", x="offset_over_std", y="varying_rms", by="normalization", theory="theory_rms"),
    Plot("stretches", table="stretches", x="direction_number", y="stretch", by="normalization", mark="point"),
)
BUDGET_S = 0.03

JACOBIAN_TOKENS = 4
JACOBIAN_WIDTH = 64  # directions of the spectrum; wider tokens are cut for it
LOST = 1e-3  # of the largest stretch; epsilon leaves epsilon / r² of it along the token
SHOWN_FEATURES = 24
CHART_TOKENS = 64
OFFSETS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0])


def memory_bytes(params: Params) -> int:
    """The tokens under both norms and at every offset of the chart, one after the other, and the Jacobians."""
    return 4 * 16 * params.normed_tokens * params.d_model + 8 * 8 * JACOBIAN_TOKENS * JACOBIAN_WIDTH**2


def run(params: Params, run: Run) -> Result:
    """Both norms on tokens drawn as asked; the metrics are those of the chosen one, means over the tokens.

    ``varying_rms``: root mean square of the output less the token's own mean, ``output_offset`` that mean;
    ``ordinary_features_rms``: of all features but the one with the outlier. ``norms_difference_rms`` and
    ``norms_cosine``: between the outputs of the two norms. ``lost_directions``: directions in which a small change of
    a token leaves the output where it was, singular values of the Jacobian below a thousandth of the largest, which is
    ``largest_stretch``. ``gradient_along_token``, ``gradient_along_ones``: largest |cosine| of the gradient of a random
    linear loss with the token, and with the vector of ones.

    Shapes: x (normed_tokens, d_model).
    """
    z = run.randn(params.normed_tokens, params.d_model)
    upstream = run.randn(params.normed_tokens, params.d_model)
    x = _tokens(params, z)
    outs = {kind: _normalized(params, x, kind) for kind in NORMS}
    out = outs[params.normalization]
    difference = outs["rms_norm"] - outs["layer_norm"]
    product = (outs["rms_norm"] * outs["layer_norm"]).sum(dim=-1)
    lengths = outs["rms_norm"].norm(dim=-1) * outs["layer_norm"].norm(dim=-1)
    run.progress(0.3)
    metrics = {
        "varying_rms": _rms(out - out.mean(dim=-1, keepdim=True)),
        "norms_difference_rms": _rms(difference),
        "norms_cosine": _mean(product / lengths),
        "output_offset": _mean(out.mean(dim=-1)),
        "norm_output_rms": _rms(out),
        "ordinary_features_rms": _rms(out[:, 1:]),
    }
    metrics["gradient_along_token"], metrics["gradient_along_ones"] = _gradient_cosines(params, x, upstream)
    run.progress(0.6)
    spectra = {kind: _spectrum(params, x, kind) for kind in NORMS}
    found = spectra[params.normalization]
    metrics["lost_directions"] = float((found < LOST * found[:, :1]).sum(axis=1).mean())
    metrics["largest_stretch"] = float(found[:, 0].mean())
    run.progress(0.8)
    tables = {
        "one_token": _one_token(x, outs),
        "by_offset": _by_offset(params, z[:CHART_TOKENS]),
        "stretches": _stretches(spectra),
    }
    return Result({m.name: metrics[m.name] for m in METRICS}, tables)


def _tokens(params: Params, z: torch.Tensor) -> torch.Tensor:
    x = params.token_offset + params.token_std * z
    x[:, 0] += params.outlier_size
    return x - x.mean(dim=-1, keepdim=True) if params.center_tokens else x


def _normalized(params: Params, x: torch.Tensor, kind: str) -> torch.Tensor:
    """Shapes: x (..., d_model), as the output."""
    return normalize(x, norm_statistics(x, kind), 10.0**params.epsilon_log10)


def _gradient_cosines(params: Params, x: torch.Tensor, upstream: torch.Tensor) -> tuple[float, float]:
    """Largest |cosine| over the tokens of the gradient with the token and with the vector of ones."""
    import torch

    leaf = x.clone().requires_grad_()
    loss = (_normalized(params, leaf, params.normalization) * upstream).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    g, token = gradient.cpu().double(), x.cpu().double()
    length = g.norm(dim=-1)
    along_token = (g * token).sum(dim=-1) / length / token.norm(dim=-1)
    along_ones = g.sum(dim=-1) / length / g.shape[-1] ** 0.5
    return along_token.abs().max().item(), along_ones.abs().max().item()


def _spectrum(params: Params, x: torch.Tensor, kind: str) -> np.ndarray:
    """Singular values of the Jacobian at some tokens, largest first. Shapes: (token, direction)."""
    import torch

    few = x[:JACOBIAN_TOKENS, :JACOBIAN_WIDTH]
    width = few.shape[-1]
    copies = few[:, None].repeat(1, width, 1).requires_grad_()  # copy i of a token is differentiated for output i
    out = _normalized(params, copies, kind)
    (rows,) = torch.autograd.grad(out.diagonal(dim1=-2, dim2=-1).sum(), copies)
    values: np.ndarray = torch.linalg.svdvals(rows.cpu().double()).numpy()
    return values


def _one_token(x: torch.Tensor, outs: dict[str, torch.Tensor]) -> Table:
    shown = {"token_before": x, "after_rms_norm": outs["rms_norm"], "after_layer_norm": outs["layer_norm"]}
    values = [tensor[0, :SHOWN_FEATURES].cpu().double().numpy() for tensor in shown.values()]
    n_shown = len(values[0])
    return {
        "feature_number": np.tile(np.arange(1, n_shown + 1), len(shown)),
        "feature_value": np.concatenate(values),
        "before_or_after": np.repeat(list(shown), n_shown),
    }


def _by_offset(params: Params, z: torch.Tensor) -> Table:
    """The part of the output that varies, at offsets in units of the standard deviation, without an outlier."""
    found, theory = [], []
    for kind in NORMS:
        for ratio in OFFSETS:
            out = _normalized(params, params.token_std * (z + float(ratio)), kind)
            found.append(_rms(out - out.mean(dim=-1, keepdim=True)))
            theory.append(1 / np.sqrt(1 + ratio**2) if kind == "rms_norm" else 1.0)
    return {
        "offset_over_std": np.tile(OFFSETS, len(NORMS)),
        "normalization": np.repeat(NORMS, len(OFFSETS)),
        "varying_rms": np.array(found),
        "theory_rms": np.array(theory),
    }


def _stretches(spectra: dict[str, np.ndarray]) -> Table:
    means = [found.mean(axis=0) for found in spectra.values()]
    width = len(means[0])
    return {
        "direction_number": np.tile(np.arange(1, width + 1), len(means)),
        "stretch": np.concatenate(means),
        "normalization": np.repeat(list(spectra), width),
    }


def _rms(x: torch.Tensor) -> float:
    return float(x.cpu().double().square().mean().sqrt())


def _mean(x: torch.Tensor) -> float:
    return float(x.cpu().double().mean())
