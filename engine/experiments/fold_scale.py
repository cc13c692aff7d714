r"""The scale folded into W_q at initialization: the same forward values, and what an optimizer then makes of them.

``inv_sqrt_d_k`` computes :math:`(W_q x)^\top (W_k y) / \sqrt{d_k}`; ``folded`` starts from :math:`W_q / \sqrt{d_k}`
and has no scale. They agree at step 0. Folded, the gradient of W_q is :math:`\sqrt{d_k}` times as large and W_q that
much smaller, so the first step moves the logits :math:`d_k` times as far under SGD, :math:`\sqrt{d_k}` times under
Adam, whose step does not depend on the gradient's size, and equally far when the step is relative to the size of the
weight, as in Adafactor. ``lr_matched`` undoes it by W_q's own learning rate (and, for Adam, its own ε).

One attention layer fits random targets; float64 on the CPU, since the differences at the start are rounding errors.

Source: mesh_tensorflow/transformer/attention.py, which T5 uses (``fold_scaling_into_initializer``);
torch.optim.Adafactor (a step of the learning rate times max(1e-3, root mean square of the weight)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import context, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Result, Run, choice, flag, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    d_model: int = number(64, low=1, high=512, log2=True)
    d_k: int = number(64, low=1, high=512, log2=True)
    seq_len: int = number(32, low=2, high=256, log2=True)
    optimizer: str = choice("adam", "sgd", "relative_step")
    learning_rate: float = number(0.001, low=1e-6, high=1.0)
    lr_matched: bool = flag(False)
    steps: int = number(10, low=1, high=1000)


METRICS = (
    Metric("forward_difference"),
    Metric("grad_ratio"),
    Metric("first_step_ratio"),
    Metric("loss_start"),
    Metric("loss_scaled"),
    Metric("loss_folded"),
    Metric("loss_difference"),
    Metric("logits_difference"),
    Metric("steps_done"),
)
PLOTS = (Plot("loss", table="training", x="step", y="loss", by="variant"),)
BUDGET_S = 0.05

D_V = 8
VARIANTS = ("inv_sqrt_d_k", "folded")
EPSILON = 1e-8
DIVERGED = 1e3
RMS_FLOOR = 1e-3  # of the relative step, as Adafactor's


def memory_bytes(params: Params) -> int:
    """Both variants in float64: weights, gradients, moments, their next values, tokens, logits kept by autograd."""
    weights = (2 * params.d_k + D_V) * params.d_model
    tokens = params.seq_len * (params.d_model + 2 * params.d_k + 2 * D_V)
    return 8 * 2 * (18 * weights + 4 * tokens + 20 * params.seq_len**2)


def run(params: Params, run: Run) -> Result:
    """Train both variants side by side from the same weights on the same data.

    ``forward_difference``: largest difference of two logits at step 0. ``grad_ratio``, ``first_step_ratio``: norm of
    W_q's gradient, and of the change of the logits by the first step of W_q alone, folded ÷ scaled.
    ``loss_difference``: largest difference of the two losses on the way; ``logits_difference``: distance of the two
    after ``steps``, relative to how far the scaled ones moved. Training ends early, at ``steps_done``, when a loss
    reaches 1000 (it begins near 1).

    Shapes: variants are a leading axis of 2.
    """
    import torch

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=run.generator).cpu().double()

    x, target = normal(params.seq_len, params.d_model), normal(params.seq_len, D_V)
    fold = torch.tensor([1.0, params.d_k**-0.5], dtype=torch.float64)[:, None, None]
    scale = fold.flip(0)
    W_q, W_k, W_v = (normal(rows, params.d_model) / math.sqrt(params.d_model) for rows in (params.d_k, params.d_k, D_V))
    weights = [W_q * fold, W_k.repeat(2, 1, 1), W_v.repeat(2, 1, 1)]
    optimizer = _Optimizer(params, fold)

    def logits_of(W_q: torch.Tensor, W_k: torch.Tensor) -> torch.Tensor:
        return qk_product(x @ W_q.mT, x @ W_k.mT) * scale

    start = end = logits_of(weights[0], weights[1])
    losses: list[torch.Tensor] = []
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1))
        leaves = [w.requires_grad_() for w in weights]
        logits = logits_of(leaves[0], leaves[1])
        loss = ((context(softmax(logits), x @ leaves[2].mT) - target) ** 2).mean(dim=(1, 2))
        if not (loss < DIVERGED).all():  # catches nan too
            break
        losses.append(loss.detach())
        end = logits.detach()
        gradients = torch.autograd.grad(loss.sum(), leaves)
        weights = optimizer.step([w.detach() for w in weights], gradients)
        if step == 0:
            grad_norms = gradients[0].flatten(1).norm(dim=1)
            moved = (logits_of(weights[0], leaves[1].detach()) - start).flatten(1).norm(dim=1)
    curve = torch.stack(losses)  # (step, variant)

    metrics = {
        "forward_difference": (start[1] - start[0]).abs().max(),
        "grad_ratio": grad_norms[1] / grad_norms[0],
        "first_step_ratio": moved[1] / moved[0],
        "loss_start": curve[0, 0],
        "loss_scaled": curve[-1, 0],
        "loss_folded": curve[-1, 1],
        "loss_difference": (curve[:, 1] - curve[:, 0]).abs().max(),
        "logits_difference": (end[1] - end[0]).norm() / (end[0] - start[0]).norm(),
        "steps_done": torch.tensor(len(losses) - 1.0),
    }
    table = {
        "step": np.repeat(np.arange(len(losses)), 2),
        "variant": np.tile(np.array(VARIANTS), len(losses)),
        "loss": curve.flatten().numpy(),
    }
    return Result({name: value.item() for name, value in metrics.items()}, {"training": table})


class _Optimizer:
    """One optimizer for all weights, W_q's learning rate and ε matched to the fold where asked for.

    The relative step is Adam's direction times the root mean square of the weight.
    """

    def __init__(self, params: Params, fold: torch.Tensor) -> None:
        self.kind, self.learning_rate, self.steps = params.optimizer, params.learning_rate, 0
        powers = {"sgd": 2, "adam": 1, "relative_step": 0}
        self.q_rate = fold ** powers[self.kind] if params.lr_matched else 1.0
        self.q_epsilon = EPSILON / fold if params.lr_matched else EPSILON
        self.moments: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(self, weights: list[torch.Tensor], gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """The weights after one step; W_q comes first. Shapes: (2, rows, d_model) each."""
        self.steps += 1
        if not self.moments:
            self.moments = [(g * 0, g * 0) for g in gradients]
        moved = []
        for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            rate = self.learning_rate * (self.q_rate if i == 0 else 1.0)
            direction = gradient if self.kind == "sgd" else self._adam(i, gradient)
            if self.kind == "relative_step":
                rate = rate * (weight**2).mean(dim=(1, 2), keepdim=True).sqrt().clamp_min(RMS_FLOOR)
            moved.append(weight - rate * direction)
        return moved

    def _adam(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        first, second = self.moments[i]
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        self.moments[i] = first, second
        spread = (second / (1 - 0.999**self.steps)).sqrt()
        return first / (1 - 0.9**self.steps) / (spread + (self.q_epsilon if i == 0 else EPSILON))
