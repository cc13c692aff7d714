r"""Through how many directions a stack still answers to its input: the singular values of its Jacobian.

The Jacobian of a stack is the product of those of its layers: J = J_L ⋯ J_1, with J_l = F_l without a residual path and
J_l = I + F_l with one. Its singular values say how much a change of the input, in each direction, changes the output;
the gradient goes through the same matrix, transposed. Their root mean square tells whether a gradient shrinks or grows.
How unequal they are is another matter, which no factor on the weights can change:

.. math:: \text{directions}=\frac{\big(\sum_i\sigma_i^2\big)^2}{\sum_i\sigma_i^4}

is n where all are equal and 1 where one is all there is.

Each layer's Jacobian is taken by autograd at the input that it gets there; they are multiplied in float64.

Sources: he2016, abstract (the gradient of a sum); balduzzi2017, abstract (gradients that are not small, but lost).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.residual_stream import BRANCHES, Wiring, draw_stack, walk

if TYPE_CHECKING:
    import torch

STACKS = ("plain_stack", "skip_stack", "scaled_stack")
SKIP_NORMS = {"unnormed": "bare", "normed_input": "pre_norm", "normed_output": "output_norm"}
STACK_BRANCHES = {"both_branches": BRANCHES, "attention_alone": BRANCHES[:1], "ffn_alone": BRANCHES[1:]}
D_FF = 4  # times d_model
MAX_NUMBERS = 128  # of the input: a Jacobian has the square of it


@dataclass(frozen=True)
class Params(BaseParams):
    n_layers: int = number(6, low=1, high=24)
    skip_norm: str = choice(*SKIP_NORMS)
    weight_gain: float = number(1.0, low=0.25, high=2.0, step=0.05)
    stack_branches: str = choice(*STACK_BRANCHES)
    d_model: int = number(8, low=4, high=64, log2=True)
    seq_len: int = number(4, low=1, high=16, log2=True)

    def rules(self) -> Iterator[Problem]:
        numbers = self.seq_len * self.d_model
        if numbers > MAX_NUMBERS:
            values = {"product": numbers, "limit": MAX_NUMBERS}
            yield Problem("rule", "d_model", self.d_model, rule="jacobian_too_large", values=values)


METRICS = (
    *(Metric(f"directions_{stack}") for stack in STACKS),
    *(Metric(f"jacobian_rms_{stack}") for stack in STACKS),
    Metric("input_numbers"),
)
PLOTS = (
    Plot("spectrum", table="spectrum", x="direction_rank", y="stretch_log10", by="skip_wiring"),
    Plot("directions", table="by_depth", x="layers_passed", y="directions_left", by="skip_wiring", y_scale="log2"),
)
BUDGET_S = 0.03
FLOOR = 1e-9  # of the chart: singular values below, relative to the largest, are rounding


def memory_bytes(params: Params) -> int:
    """A layer's graph for as many copies as the input has numbers, and the Jacobians."""
    n = params.seq_len * params.d_model
    weights = 3 * params.n_layers * (4 + 2 * D_FF) * params.d_model**2
    graph = 3 * n * params.seq_len * (16 * params.d_model + 4 * D_FF * params.d_model + 6 * params.seq_len)
    return 8 * (2 * weights + 2 * graph + 3 * (params.n_layers + 6) * n * n) + 2**20


def run(params: Params, run: Run) -> Result:
    """Multiply the Jacobians of the layers, for the three stacks at once.

    ``jacobian_rms``: root mean square of the singular values, the factor by which a random gradient changes its norm.

    Shapes: the model axis holds the stacks, the batch as many copies of the input as it has numbers.
    """
    import torch

    weights, carried = _stacks(params, run)
    x = run.randn(1, params.seq_len, params.d_model).expand(len(STACKS), 1, -1, -1)
    size = params.seq_len * params.d_model
    each = torch.eye(size, dtype=run.dtype, device=run.device).view(1, size, params.seq_len, params.d_model)
    each = each.expand(len(STACKS), -1, -1, -1)
    wiring, branches = Wiring(SKIP_NORMS[params.skip_norm]), STACK_BRANCHES[params.stack_branches]
    product = torch.eye(size, dtype=torch.float64)
    singular = []  # after each layer: (stack, size), the largest first
    for layer in range(params.n_layers):
        run.progress(layer / params.n_layers)
        of_layer = {name: weight[:, layer : layer + 1] for name, weight in weights.items()}
        copies = x.expand(-1, size, -1, -1).clone().requires_grad_()
        *_, last = walk(of_layer, copies, wiring, branches=branches, carried=carried)
        (rows,) = torch.autograd.grad(last.stream, copies, each)  # copy i: the gradient of number i of the output
        product = rows.flatten(2).cpu().double() @ product
        x = last.stream.detach()[:, :1]
        singular.append(torch.linalg.svdvals(product).numpy())

    squares = np.square(singular)  # (layer, stack, size)
    directions = squares.sum(axis=2) ** 2 / np.square(squares).sum(axis=2)
    metrics = {f"directions_{stack}": directions[-1, i] for i, stack in enumerate(STACKS)}
    metrics |= {f"jacobian_rms_{stack}": squares[-1, i].mean() ** 0.5 for i, stack in enumerate(STACKS)}
    metrics["input_numbers"] = size
    relative = singular[-1] / singular[-1][:, :1]
    spectrum: Table = {
        "direction_rank": np.tile(np.arange(1, size + 1), len(STACKS)),
        "skip_wiring": np.repeat(STACKS, size),
        "stretch_log10": np.log10(relative.clip(FLOOR)).ravel(),
    }
    by_depth: Table = {
        "layers_passed": np.repeat(np.arange(params.n_layers + 1), len(STACKS)),
        "skip_wiring": np.tile(STACKS, params.n_layers + 1),
        "directions_left": np.concatenate((np.full((1, len(STACKS)), float(size)), directions)).ravel(),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"spectrum": spectrum, "by_depth": by_depth})


def _stacks(params: Params, run: Run) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The weights of the three stacks, which differ in one factor, and what each carries of x."""
    n_branches = params.n_layers * len(STACK_BRANCHES[params.stack_branches])
    factor = run.randn(1).new_tensor((1.0, 1.0, n_branches**-0.5)).view(-1, 1, 1, 1)
    weights = {}
    for name, drawn in draw_stack(run.randn, params.n_layers, params.d_model, D_FF * params.d_model).items():
        scaled = factor if name in ("W_o", "W_down") else factor.new_ones(factor.shape)
        weights[name] = params.weight_gain * scaled * drawn
    return weights, factor.new_tensor((0.0, 1.0, 1.0)).view(-1, 1, 1, 1)
