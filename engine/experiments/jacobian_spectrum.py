r"""The Jacobian of a row of attention weights: its entries, its eigenvalues, and its size as the logits spread.

With weights w the Jacobian of the softmax is :math:`J = \mathrm{diag}(w) - ww^\top`, and for any x

.. math:: x^\top J x = \sum_i w_i x_i^2 - \Big(\sum_i w_i x_i\Big)^2 = \mathrm{Var}_w(x)

So no eigenvalue is negative; J x = 0 where x is the same for every key of weight above 0, so the rank is the number of
these keys less one; and a variance is at most a quarter of the squared range, which is at most 2|x|², so no eigenvalue
exceeds 1/2.

Logits are z = sε with ε of N(0, 1): s is ``logits_std``. The Jacobian with respect to ε, which stands for scores before
a scale or a temperature, carries the factor s. ``sigmoid`` gives every key a weight of its own, σ(z - ln n): J is
diagonal.

J is made by autograd, row by row, and compared with the formula; all in float64 on the CPU, as not every device has it.

Source: dao2022, appendix B.2 (the Jacobian in attention); ramapuram2024, section 2 (sigmoid attention, bias -ln n).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import jacobian_norm, row_norm, softmax, softmax_jacobian
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.chunks import chunks, per_row

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    kv_len: int = number(16, low=2, high=256, log2=True)
    logits_std: float = number(1.0, low=2**-4, high=2**6, log2=True)
    activation: str = choice("softmax", "sigmoid")
    tied_top: bool = flag(False)
    n_masked: int = number(0, low=0, high=254)
    n_rows: int = number(1024, low=64, high=4096, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.n_masked > self.kv_len - 2:
            yield Problem("rule", "n_masked", self.n_masked, rule="two_keys_left", values={"kv_len": self.kv_len})


METRICS = (
    Metric("eigenvalue_max"),
    Metric("jacobian_norm_median"),
    Metric("jacobian_rank"),
    Metric("spectral_norm_median"),
    Metric("jacobian_norm_mean"),
    Metric("scores_jacobian_norm_median"),
    Metric("scores_jacobian_norm_mean"),
    Metric("shift_response"),
    Metric("off_diagonal_share"),
    Metric("formula_error"),
    Metric("eigenvalue_min"),
    Metric("weight_max_median"),
)
PLOTS = (
    Plot("jacobian", table="jacobian", mark="heat", x="logit_rank", y="weight_rank", value="derivative"),
    Plot("eigenvalues", table="eigenvalues", mark="point", x="order", y="spectrum", by="quantity"),
    Plot("norms", table="norms", x="logits_std", y="norm_median", by="quantity", x_scale="log2", y_scale="log10"),
    Plot(
        "by_kv_len",
        table="by_kv_len",
        x="logits_std",
        y="jacobian_norm_median",
        by="kv_len",
        x_scale="log2",
        y_scale="log10",
    ),
)
BUDGET_S = 0.02

SPECTRUM_ROWS = 64  # whose Jacobians are built
CURVE_ROWS = 16  # behind each point of the curves; the same rows at every spread
SPREADS = tuple(2.0**power for power in range(-4, 7))
COMPARED = (4, 16, 64)
SHOWN = 16  # keys of the heat map
MATRIX_NUMBERS = 2**17  # of the curves' Jacobians at once: all spreads up to 16 keys, one at a time from 128 on
DRAWN_FLOOR = 1e-12  # smaller norms are drawn here; eigenvalues are wrong by some 1e-16


def memory_bytes(params: Params) -> int:
    """Jacobians of rows, with gradients or of the curves, and a dozen arrays of logits, in float64."""
    jacobians = SPECTRUM_ROWS * params.kv_len**2
    at_all_spreads = len(SPREADS) * CURVE_ROWS * max(*COMPARED, params.kv_len)
    return 8 * (6 * jacobians + 4 * MATRIX_NUMBERS + 14 * params.n_rows * params.kv_len + 10 * at_all_spreads)


def run(params: Params, run: Run) -> Result:
    """Rows of logits at one spread, the Jacobians of some of them, and norms over all spreads.

    ``shift_response``: the largest norm of J·1, the answer to the same step of every logit. ``jacobian_rank``: that of
    the first row. ``off_diagonal_share``: of the squared Frobenius norm, mean over the rows.

    Shapes: scores and weights (n_rows, kv_len), jacobians (SPECTRUM_ROWS, kv_len, kv_len).
    """
    import torch

    scores = _scores(params, run.randn(params.n_rows, params.kv_len))
    logits = params.logits_std * scores
    weights = _weights(logits, params.activation)
    norms = per_row(_norms(logits, params.activation))

    jacobians = _jacobians(logits[:SPECTRUM_ROWS], params.activation, run)
    values = []
    for start, n in chunks(SPECTRUM_ROWS, max(1, MATRIX_NUMBERS // params.kv_len**2)):
        run.progress(0.2 + 0.3 * start / SPECTRUM_ROWS)
        values.append(torch.linalg.eigvalsh(jacobians[start : start + n]).numpy())
    eigenvalues = np.concatenate(values)
    formula = softmax_jacobian(weights[:SPECTRUM_ROWS])
    diagonal_norms = per_row(row_norm(_diagonals(logits, params.activation)))

    metrics = {
        "eigenvalue_max": float(eigenvalues.max()),
        "jacobian_norm_median": float(np.median(norms)),
        "jacobian_rank": float(torch.linalg.matrix_rank(jacobians[0], hermitian=True)),
        "spectral_norm_median": float(np.median(eigenvalues[:, -1])),
        "jacobian_norm_mean": float(norms.mean()),
        "scores_jacobian_norm_median": params.logits_std * float(np.median(norms)),
        "scores_jacobian_norm_mean": params.logits_std * float(norms.mean()),
        "shift_response": float(jacobians.sum(dim=-1).norm(dim=-1).max()),
        "off_diagonal_share": float(np.mean(1 - (diagonal_norms / norms) ** 2)),
        "formula_error": float((jacobians - formula).abs().max()),
        "eigenvalue_min": float(eigenvalues.min()),
        "weight_max_median": float(np.median(per_row(weights.amax(dim=-1)))),
    }
    tables = {
        "jacobian": _entries(jacobians[0], weights[0]),
        "eigenvalues": _spectrum(eigenvalues[0], weights[0]),
        "norms": _by_spread(params, scores[:CURVE_ROWS], run),
        "by_kv_len": _by_kv_len(params, run),
    }
    return Result(metrics, tables)


def _scores(params: Params, drawn: torch.Tensor) -> torch.Tensor:
    """Scores of unit variance in float64, the second largest lifted to the largest if asked for; masked ones -inf.

    Shapes: (rows, kv_len) to the same.
    """
    scores = drawn.cpu().double()
    if params.n_masked:
        scores[:, scores.shape[-1] - params.n_masked :] = -math.inf
    if params.tied_top:
        top = scores.topk(2, dim=-1)
        scores = scores.scatter(-1, top.indices[:, 1:], top.values[:, :1])
    return scores


def _weights(logits: torch.Tensor, activation: str) -> torch.Tensor:
    return softmax(logits) if activation == "softmax" else (logits - math.log(logits.shape[-1])).sigmoid()


def _jacobians(logits: torch.Tensor, activation: str, run: Run) -> torch.Tensor:
    """d weights_i / d logits_j of every row by PyTorch's own softmax (or sigmoid) and autograd.

    Shapes: (rows, n) to (rows, n, n).
    """
    import torch

    leaf = logits.clone().requires_grad_()
    weights = torch.softmax(leaf, -1) if activation == "softmax" else torch.sigmoid(leaf - math.log(leaf.shape[-1]))
    rows = []
    for i in range(leaf.shape[-1]):
        run.progress(0.2 * i / leaf.shape[-1])
        rows.append(torch.autograd.grad(weights[:, i].sum(), leaf, retain_graph=True)[0])
    return torch.stack(rows, dim=1)


def _diagonals(logits: torch.Tensor, activation: str) -> torch.Tensor:
    """weights_i (1 - weights_i). Where a weight is near 1, what is missing to it is summed up, not subtracted.

    Shapes: (..., n) to the same.
    """
    weights = _weights(logits, activation)
    if activation == "sigmoid":
        return weights * (math.log(logits.shape[-1]) - logits).sigmoid()
    top = weights.argmax(dim=-1, keepdim=True)
    others = weights.scatter(-1, top, 0.0).sum(dim=-1, keepdim=True)
    return weights * (1 - weights).scatter(-1, top, others)


def _norms(logits: torch.Tensor, activation: str) -> torch.Tensor:
    """Frobenius norm of every row's Jacobian. Shapes: (..., n) to (...,)."""
    return jacobian_norm(softmax(logits)) if activation == "softmax" else row_norm(_diagonals(logits, activation))


def _entries(jacobian: torch.Tensor, weights: torch.Tensor) -> Table:
    """The entries between the keys of the largest weights, the largest first."""
    shown = weights.argsort(descending=True)[:SHOWN]
    ranks = np.arange(1, len(shown) + 1)
    return {
        "weight_rank": np.repeat(ranks, len(shown)),
        "logit_rank": np.tile(ranks, len(shown)),
        "derivative": jacobian[shown][:, shown].flatten().numpy().astype(np.float32),
    }


def _spectrum(eigenvalues: np.ndarray, weights: torch.Tensor) -> Table:
    """Weights and eigenvalues of a row, each from the largest down."""
    n = len(eigenvalues)
    return {
        "quantity": np.repeat(["weight", "eigenvalue"], n),
        "order": np.tile(np.arange(1, n + 1), 2),
        "spectrum": np.r_[np.sort(weights.numpy())[::-1], eigenvalues[::-1]].astype(np.float32),
    }


def _by_spread(params: Params, scores: torch.Tensor, run: Run) -> Table:
    """Median norms of the same rows at every spread."""
    import torch

    spreads = np.array(SPREADS)
    logits = scores * scores.new_tensor(spreads)[:, None, None]
    frobenius = np.median(_norms(logits, params.activation).numpy(), axis=-1)
    spectral = np.empty(len(spreads))
    for start, n in chunks(len(spreads), max(1, MATRIX_NUMBERS // (CURVE_ROWS * params.kv_len**2))):
        run.progress(0.5 + 0.4 * start / len(spreads))
        rows = logits[start : start + n]
        if params.activation == "softmax":
            matrices = softmax_jacobian(softmax(rows))
        else:
            matrices = _diagonals(rows, params.activation).diag_embed()
        spectral[start : start + n] = np.median(torch.linalg.eigvalsh(matrices)[..., -1].numpy(), axis=-1)
    norms = {"frobenius": frobenius, "spectral": spectral, "before_factor": spreads * frobenius}
    return {
        "logits_std": np.tile(spreads, len(norms)).astype(np.float32),
        "quantity": np.repeat(list(norms), len(spreads)),
        "norm_median": np.maximum(np.concatenate(list(norms.values())), DRAWN_FLOOR).astype(np.float32),
    }


def _by_kv_len(params: Params, run: Run) -> Table:
    """Median Frobenius norm for several numbers of keys, none of them masked."""
    lengths = sorted({*COMPARED, params.kv_len})
    drawn = run.randn(CURVE_ROWS, lengths[-1])
    spreads = np.array(SPREADS)
    columns: dict[str, list[np.ndarray]] = {"logits_std": [], "kv_len": [], "jacobian_norm_median": []}
    for n in lengths:
        run.progress(0.9)
        scores = _scores(Params(kv_len=n, tied_top=params.tied_top), drawn[:, :n].clone())
        logits = scores * scores.new_tensor(spreads)[:, None, None]
        norms = _norms(logits, params.activation).numpy()
        columns["logits_std"].append(spreads)
        columns["kv_len"].append(np.full(len(spreads), n))
        columns["jacobian_norm_median"].append(np.maximum(np.median(norms, axis=-1), DRAWN_FLOOR))
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return {name: part if name == "kv_len" else part.astype(np.float32) for name, part in joined.items()}
