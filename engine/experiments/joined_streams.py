r"""Adding what a branch writes to the stream, or setting it beside: parameters and width, counted on the matrices.

By *addition* every branch reads and writes d numbers. By *concatenation* it writes d numbers beside those that are
there, so that branch l reads (l + 1) d of them: widths grow with depth, and the matrices that read with them. Heads and
hidden units keep their number, and so does the width of what is written.

The matrices are made at full size, without storage, one for each projection: W_q, W_k, W_v, W_o of attention, and the
two of a feed-forward network four times as wide as d. No biases, no norms.

Source: huang2020, abstract (a layer that reads the features of all layers before it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    n_layers: int = number(12, low=1, high=128)
    d_model: int = number(768, low=16, high=8192, log2=True)


METRICS = (
    Metric("concatenated_to_added"),
    Metric("addition_parameters"),
    Metric("concatenation_parameters"),
    Metric("last_width_concatenated"),
    Metric("last_width_added"),
)
PLOTS = (Plot("parameters", table="by_depth", x="n_layers", y="million_parameters", by="joining", y_scale="log10"),)
BUDGET_S = 0.05
JOININGS = ("addition", "concatenation")
D_FF = 4  # times d_model
MOST_POINTS = 16  # of the curve


def memory_bytes(params: Params) -> int:
    """No storage but for the objects of the matrices."""
    return 2**21 + 2**13 * params.n_layers


def run(params: Params, run: Run) -> Result:
    """Build both stacks branch by branch and add up what they hold.

    ``last_width``: numbers of a token that go on from the last branch.
    """
    counts: dict[str, list[int]] = {joining: [] for joining in JOININGS}  # of each layer
    widths = {}
    for joining in JOININGS:
        width = params.d_model
        for layer in range(params.n_layers):
            run.progress(0.5 * JOININGS.index(joining) + 0.5 * layer / params.n_layers)
            count = 0
            for build in (_attention, _ffn):
                matrices = build(width, params.d_model)
                count += sum(matrix.numel() for matrix in matrices)
                width = width if joining == "addition" else width + matrices[-1].shape[1]
            counts[joining].append(count)
        widths[joining] = width
    added, concatenated = (sum(counts[joining]) for joining in JOININGS)
    metrics = {
        "concatenated_to_added": concatenated / added,
        "addition_parameters": added,
        "concatenation_parameters": concatenated,
        "last_width_concatenated": widths["concatenation"],
        "last_width_added": widths["addition"],
    }
    depths = np.unique(np.linspace(1, params.n_layers, MOST_POINTS).round().astype(int))
    table: Table = {
        "n_layers": np.tile(depths, 2),
        "joining": np.repeat(JOININGS, len(depths)),
        "million_parameters": np.concatenate([np.cumsum(counts[joining])[depths - 1] for joining in JOININGS]) / 1e6,
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"by_depth": table})


def _attention(d_read: int, d_model: int) -> list[torch.Tensor]:
    return [_matrix(d_read, d_model), _matrix(d_read, d_model), _matrix(d_read, d_model), _matrix(d_model, d_model)]


def _ffn(d_read: int, d_model: int) -> list[torch.Tensor]:
    return [_matrix(d_read, D_FF * d_model), _matrix(D_FF * d_model, d_model)]


def _matrix(d_in: int, d_out: int) -> torch.Tensor:
    import torch

    return torch.empty(d_in, d_out, device="meta")
