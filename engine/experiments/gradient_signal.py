r"""How much of a mini-batch gradient is signal, at initialization, with and without the scale.

A mini-batch gradient g is its expectation plus noise. Its share of signal, :math:`\sqrt{\lVert E g\rVert^2 / E\lVert
g\rVert^2}`, is 1 without noise and falls as noise grows. Unscaled, the gradient of W_q is not small: it is large, and
mostly noise.

The model is that of ``scale_training`` at step 0: associative recall with one attention layer, batches of 32 sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import scale_value
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.training import BATCH, D_MODEL, Sequences, Sizes, draw_sequences, draw_weights, forward, losses, stream

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=1, high=512, log2=True)
    kv_len: int = number(16, low=2, high=64, log2=True)
    scale: str = choice("none", "inv_sqrt_d_k", "inv_d_k")
    init: str = choice("unit", "linear_default", "normal_002", "folded")
    n_batches: int = number(64, low=16, high=512, log2=True)


METRICS = (
    Metric("signal_share_W_q"),
    Metric("signal_share_W_v"),
    Metric("grad_W_q_norm"),
    Metric("grad_W_v_norm"),
)
PLOTS = (
    Plot(
        "signal_share",
        table="by_batch",
        x="n_sequences",
        y="signal_share",
        by="weight",
        theory="theory_share",
        x_scale="log2",
    ),
)
BUDGET_S = 0.05

CHUNK_NUMBERS = 2**18  # numbers of W_q's copies, or of the slots, in one pass: some 10 ms


def memory_bytes(params: Params) -> int:
    """All gradients, then a chunk of weights, slots and activations with their temporaries, and the sequences."""
    gradients = params.n_batches * (params.d_k * D_MODEL + D_MODEL * D_MODEL)
    one = params.d_k * D_MODEL + 16 * params.kv_len * D_MODEL + BATCH * (params.d_k + params.kv_len * D_MODEL)
    chunk = max(CHUNK_NUMBERS, one)
    return 8 * (3 * gradients + 16 * chunk + 8 * params.n_batches * BATCH * params.kv_len)


def run(params: Params, run: Run) -> Result:
    """Gradients of W_q and W_v on ``n_batches`` mini-batches at the same weights.

    From the inner products of the gradients of two batches: those of different batches average to ‖E g‖² without bias,
    those of a batch with itself to E‖g‖². ``grad_*_norm`` is √E‖g‖². The table averages the gradients of m batches,
    which is the gradient of a batch m times as large; theory: the noise falls as 1/m.
    """
    inner = _inner_products(params, run)
    metrics: dict[str, float] = {}
    columns: list[tuple[int, str, float, float]] = []
    for weight, products in inner.items():
        n = len(products)
        norm_square = float(np.trace(products)) / n
        signal_square = max(0.0, (float(products.sum()) - n * norm_square) / (n * (n - 1)))
        metrics[f"signal_share_{weight}"] = (signal_square / norm_square) ** 0.5
        metrics[f"grad_{weight}_norm"] = norm_square**0.5
        for m in (2**power for power in range((n // 4).bit_length())):  # at least 4 groups
            groups = n // m
            some = products[: groups * m, : groups * m].reshape(groups, m, groups, m)
            means = some.mean(axis=(1, 3))  # inner products of the means of m batches
            measured = (signal_square / (float(np.trace(means)) / groups)) ** 0.5
            theory = (signal_square / (signal_square + (norm_square - signal_square) / m)) ** 0.5
            columns.append((m * BATCH, weight, measured, theory))
    names = ("n_sequences", "weight", "signal_share", "theory_share")
    table: Table = {name: np.array(column) for name, column in zip(names, zip(*columns, strict=True), strict=True)}
    return Result({m.name: metrics[m.name] for m in METRICS}, {"by_batch": table})


def _inner_products(params: Params, run: Run) -> dict[str, np.ndarray]:
    """Of the gradients of every two batches, for W_q and W_v. Shapes: (n_batches, n_batches) each, float64."""
    import torch

    seed = run.generator.initial_seed()
    drawn = draw_weights(stream(seed, "init"), Sizes(params.d_k, params.kv_len), params.init)
    weights = {name: weight.to(run.device, run.dtype) for name, weight in drawn.items()}
    sequences = draw_sequences(stream(seed, "train"), params.kv_len, params.n_batches, BATCH)
    size = max(params.d_k * D_MODEL, BATCH * params.kv_len * D_MODEL)
    at_once = min(params.n_batches, max(1, CHUNK_NUMBERS // size))
    found: dict[str, list[torch.Tensor]] = {"W_q": [], "W_v": []}
    for start in range(0, params.n_batches, at_once):
        run.progress(start / params.n_batches)
        some = Sequences(*(part[start : start + at_once].to(run.device) for part in sequences))
        for name, gradient in _gradients(weights, some, scale_value(params.scale, params.d_k)).items():
            found[name].append(gradient)
    rows = {name: torch.cat(gradients).float() for name, gradients in found.items()}
    return {name: (g @ g.mT).cpu().double().numpy() for name, g in rows.items()}


def _gradients(weights: dict[str, torch.Tensor], sequences: Sequences, scale: float) -> dict[str, torch.Tensor]:
    """The gradient of each batch by itself: one copy of the weights for each. Shapes: (n_batches, n_weights)."""
    import torch

    n = sequences.target.shape[0]
    copies = {name: weight.expand(n, *weight.shape) for name, weight in weights.items()}
    leaves = {name: copies[name].clone().requires_grad_() for name in ("W_q", "W_v")}
    result = forward(copies | leaves, sequences, torch.full_like(weights["W_q"][:, 0, 0], scale).expand(n, -1))
    gradients = torch.autograd.grad(losses(result, sequences.target).sum(), list(leaves.values()))
    return {name: gradient.flatten(1) for name, gradient in zip(leaves, gradients, strict=True)}
