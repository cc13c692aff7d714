r"""Which changes of the weights and of the input each norm does not see, in training and in evaluation.

A linear layer and a norm behind it, :math:`y=\mathrm{norm}(xW^\top)`. One thing is changed, and the outputs compared:

``weights_scaled``       all of W times one factor           ``weights_shifted``  one vector added to every row of W
``rows_scaled``          each row of W by its own factor     ``inputs_scaled``    all tokens times one factor
``inputs_shifted``       the same vector added to all tokens ``tokens_scaled``    each token by its own factor
``bias_added``           a number of its own added to each feature, the same for all tokens
``offset_added``         a number of its own added to each token, the same for all features

The first six are those of a well-known table; the last two are what lies behind two of them, seen at the output of the
layer. Where a norm sees no factor on W, the gradient with respect to W is smaller by that factor and has no part along
W: steps of equal size turn long weights less.

Sources: ba2016, section 5.1 with table 1, section 5.2.2; rmsnorm-code, the table of its README; ioffe2015,
sections 3.1 and 3.2; vanlaarhoven2017, abstract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.norms import KEEP_RUNNING, NormStatistics, norm_statistics, normalize

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    normalization: str = choice(
        "layer_norm", "rms_norm", "batch_norm", "position_batch_norm", "instance_norm", "whole_text_norm"
    )
    norm_mode: str = choice("training_mode", "evaluation_mode")
    scaled_by: float = number(2.0, low=0.0625, high=16, log2=True)
    shifted_by: float = number(1.0, low=0, high=8, step=0.5)
    batch: int = number(8, low=2, high=32, log2=True)
    seq_len: int = number(8, low=2, high=32, log2=True)
    d_model: int = number(64, low=4, high=256, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset() if self.normalization in KEEP_RUNNING else frozenset({"norm_mode"})


CHANGES = (
    "weights_scaled",
    "weights_shifted",
    "rows_scaled",
    "inputs_scaled",
    "inputs_shifted",
    "tokens_scaled",
    "bias_added",
    "offset_added",
)
METRICS = (
    *(Metric(f"moved_by_{change}") for change in CHANGES),
    Metric("weight_gradient_ratio"),
    Metric("weight_gradient_cosine"),
    Metric("midpoint_difference"),
    Metric("folded_difference"),
)
PLOTS = (Plot("moved_by", table="changes", x="layer_change", y="normalized_moved_rms", by="norm_and_mode", mark="bar"),)
BUDGET_S = 0.05

EARLIER = 20  # batches whose statistics evaluation averages
SHOWN = (
    ("layer_norm", "training_mode", "layer_norm"),
    ("rms_norm", "training_mode", "rms_norm"),
    ("batch_norm", "training_mode", "batch_norm_training"),
    ("batch_norm", "evaluation_mode", "batch_norm_evaluation"),
)


def memory_bytes(params: Params) -> int:
    """Inputs and outputs of some batches at once, and a few matrices."""
    return 4 * (48 * params.batch * params.seq_len * params.d_model + 12 * params.d_model**2)


def run(params: Params, run: Run) -> Result:
    """Change one thing at a time under the chosen norm; the table has four norms side by side.

    ``moved_by_...``: root mean square of the change of the outputs, whose own is 1 (in evaluation about 1).
    ``weight_gradient_ratio``: length of the gradient to W with W times ``scaled_by`` over that with W as it is;
    ``weight_gradient_cosine`` of W and its gradient. ``midpoint_difference``: root mean square of f((x+z)/2) less
    (f(x)+f(z))/2 for two inputs, 0 for an affine map. ``folded_difference``: the same of f and a linear layer with the
    weights W/σ and the bias -μ/σ, where μ and σ of each feature are averages over earlier batches.

    Shapes: x (batch, seq_len, d_model), W (d_model, d_model).
    """
    import torch

    draw = _Draw(params, run)
    f = draw.norm(params.normalization, params.norm_mode)
    metrics = {f"moved_by_{change}": moved for change, moved in draw.moved(f).items()}
    run.progress(0.4)

    lengths, gradients = [], []
    for factor in (1.0, params.scaled_by):
        W = (factor * draw.W).requires_grad_()
        loss = (f(draw.x @ W.mT) * draw.upstream).sum()
        (gradient,) = torch.autograd.grad(loss, W)
        gradients.append(gradient)
        lengths.append(gradient.cpu().double().norm().item())
    a, b = draw.x @ draw.W.mT, draw.z @ draw.W.mT
    metrics["weight_gradient_ratio"] = lengths[1] / lengths[0]
    along = (draw.W * gradients[0]).cpu().double().sum().item()
    metrics["weight_gradient_cosine"] = along / (draw.W.cpu().double().norm().item() * lengths[0])
    metrics["midpoint_difference"] = _rms(f((a + b) / 2) - (f(a) + f(b)) / 2)
    run.progress(0.6)

    earlier = draw.running("batch_norm")
    inv_std = normalize(torch.ones_like(a[:1, :1]), NormStatistics(torch.zeros_like(a[:1, :1]), earlier.variance))
    W_folded = draw.W * inv_std.flatten()[:, None]
    bias = -(earlier.mean * inv_std).flatten()
    metrics["folded_difference"] = _rms(torch.nn.functional.linear(draw.x, W_folded, bias) - f(a))

    rows: list[tuple[str, str, float]] = []
    for normalization, mode, name in SHOWN:
        run.progress(0.8)
        moved = draw.moved(draw.norm(normalization, mode))
        rows += [(change, name, size) for change, size in moved.items()]
    return Result({name: float(value) for name, value in metrics.items()}, {"changes": _table(rows)})


class _Draw:
    """Inputs with a mean that is not 0, a layer, what it is changed by, and earlier batches of the same kind."""

    def __init__(self, params: Params, run: Run) -> None:
        d_model = params.d_model
        self._shape = (params.batch, params.seq_len, d_model)
        self._run = run
        self._mean = run.randn(d_model)
        self.W = run.randn(d_model, d_model) / d_model**0.5
        self.x, self.z = self._batch(), self._batch()
        self.upstream = run.randn(*self._shape)
        own = {  # factors between 1 and scaled_by, evenly in the logarithm
            "rows": params.scaled_by ** run.rand(d_model, 1),
            "tokens": params.scaled_by ** run.rand(*self._shape[:2], 1),
        }
        vector, bias = params.shifted_by * run.randn(d_model), params.shifted_by * run.randn(d_model)
        offsets = params.shifted_by * run.randn(*self._shape[:2], 1)
        x, W, factor = self.x, self.W, params.scaled_by
        self._changed = {
            "weights_scaled": x @ (factor * W).mT,
            "weights_shifted": x @ (W + vector / d_model**0.5).mT,
            "rows_scaled": x @ (own["rows"] * W).mT,
            "inputs_scaled": (factor * x) @ W.mT,
            "inputs_shifted": (x + vector) @ W.mT,
            "tokens_scaled": (own["tokens"] * x) @ W.mT,
            "bias_added": x @ W.mT + bias,
            "offset_added": x @ W.mT + offsets,
        }
        self._earlier = [self._batch() @ W.mT for _ in range(EARLIER)]

    def _batch(self) -> torch.Tensor:
        return self._mean + self._run.randn(*self._shape)

    def running(self, normalization: str) -> NormStatistics:
        """Averages over earlier batches, as running statistics become with a small momentum."""
        import torch

        found = [norm_statistics(a, normalization, unbiased=True) for a in self._earlier]
        return NormStatistics(*(torch.stack(parts).mean(dim=0) for parts in zip(*found, strict=True)))

    def norm(self, normalization: str, mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The norm as a function of the layer's outputs."""
        if mode == "evaluation_mode" and normalization in KEEP_RUNNING:
            fixed = self.running(normalization)
            return lambda a: normalize(a, fixed)
        return lambda a: normalize(a, norm_statistics(a, normalization))

    def moved(self, f: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """How far each change moves the normalized outputs."""
        plain = f(self.x @ self.W.mT)
        return {change: _rms(f(a) - plain) for change, a in self._changed.items()}


def _rms(x: torch.Tensor) -> float:
    return float(x.detach().cpu().double().square().mean().sqrt())


def _table(rows: list[tuple[str, str, float]]) -> Table:
    changes, names, sizes = zip(*rows, strict=True)
    return {
        "layer_change": np.array(changes),
        "norm_and_mode": np.array(names),
        "normalized_moved_rms": np.array(sizes),
    }
