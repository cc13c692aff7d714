r"""How large signal and gradient are along a stack: without a residual path, with one, and with one scaled.

The same layers, drawn with variance 1/fan_in, are wired in three ways:

``plain_stack``   x ← f(x)
``skip_stack``    x ← x + f(x)
``scaled_stack``  x ← x + f(x), the matrices that write to the stream (W_o, W_down) divided by √N at the start

where N counts branches, two for each layer, or layers. f may normalize what it reads or what it writes.

Forward, the mean square of the stream is followed from branch to branch; backward, a random gradient at the output is
taken to every place before. If what the branches write is uncorrelated, the squares add up: *square to sum* is the mean
square of the last stream over the sum of those of the input and of all that was written. Layers that share one set of
weights are the simplest case of branches that are correlated.

Sources: he2016, abstract and introduction (signal and gradient of a sum); nanogpt-code, ``GPT.__init__`` (the scaled
start).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.residual_stream import BRANCHES, Wiring, draw_stack, walk

if TYPE_CHECKING:
    import torch

STACKS = ("plain_stack", "skip_stack", "scaled_stack")
SKIP_NORMS = {"unnormed": "bare", "normed_input": "pre_norm", "normed_output": "output_norm"}
STACK_BRANCHES = {"both_branches": BRANCHES, "attention_alone": BRANCHES[:1], "ffn_alone": BRANCHES[1:]}
N_HEADS = 4
D_FF = 4  # times d_model
MAX_WORK = 2**25  # n_layers · seq_len · d_model²: 0.3 s


@dataclass(frozen=True)
class Params(BaseParams):
    n_layers: int = number(8, low=1, high=48)
    skip_norm: str = choice(*SKIP_NORMS)
    weight_gain: float = number(1.0, low=0.25, high=2.0, step=0.05)
    stack_branches: str = choice(*STACK_BRANCHES)
    residual_scaled_by: str = choice("number_of_branches", "number_of_layers")
    layers_shared: bool = flag(False)
    d_model: int = number(32, low=8, high=128, log2=True)
    seq_len: int = number(16, low=2, high=64, log2=True)

    def rules(self) -> Iterator[Problem]:
        work = self.n_layers * self.seq_len * self.d_model**2
        if work > MAX_WORK:
            values = {"product": work, "limit": MAX_WORK}
            yield Problem("rule", "n_layers", self.n_layers, rule="stack_too_large", values=values)

    def unread(self) -> frozenset[str]:
        idle = set()
        if self.stack_branches != "both_branches":
            idle.add("residual_scaled_by")  # one branch a layer: the two counts agree
        if self.n_layers == 1:
            idle.add("layers_shared")
        return frozenset(idle)


METRICS = (
    *(Metric(f"gradient_kept_{stack}") for stack in STACKS),
    *(Metric(f"stream_square_{stack}") for stack in STACKS),
    *(Metric(f"square_to_sum_{stack}") for stack in STACKS[1:]),
    *(Metric(f"branch_square_{stack}") for stack in STACKS[1:]),
)
PLOTS = (
    Plot("gradient", table="by_depth", x="branches_passed", y="gradient_kept", by="skip_wiring", y_scale="log10"),
    Plot("stream", table="by_depth", x="branches_passed", y="stream_square", by="skip_wiring", y_scale="log10"),
)
BUDGET_S = 0.03
SMALLEST = 1e-38  # what the logarithmic axis shows for a gradient that is rounded to 0


def memory_bytes(params: Params) -> int:
    """The weights three times, and the graph of all branches with its gradients."""
    d, n = params.d_model, params.seq_len
    per_layer = 4 * d * d + 2 * D_FF * d * d
    activations = n * (12 * d + 4 * D_FF * d + 4 * N_HEADS * n)
    return 8 * 3 * params.n_layers * (2 * per_layer + 2 * activations) + 2**20


def run(params: Params, run: Run) -> Result:
    """Forward through the three stacks at once, and back.

    ``gradient_kept``: norm of the gradient at the input over that at the output. ``stream_square``: mean square of the
    output over that of the input. ``branch_square``: mean of the mean squares of what the branches write.

    Shapes: the model axis holds the three stacks; x (3, 1, seq_len, d_model).
    """
    import torch

    weights, carried = _stacks(params, run)
    x = run.randn(1, params.seq_len, params.d_model).expand(len(STACKS), -1, -1, -1).clone().requires_grad_()
    g = run.randn(1, params.seq_len, params.d_model).expand(len(STACKS), -1, -1, -1)
    branches = STACK_BRANCHES[params.stack_branches]
    streams = [x]
    written: list[np.ndarray] = []
    n_steps = params.n_layers * len(branches)
    wiring = Wiring(SKIP_NORMS[params.skip_norm])
    for step in walk(weights, x, wiring, n_heads=N_HEADS, branches=branches, carried=carried):
        run.progress(0.5 * len(written) / n_steps)
        streams.append(step.stream)
        written.append(_square(step.branch))
    gradients = []
    back = g
    for after, before in zip(streams[:0:-1], streams[-2::-1], strict=True):
        gradients.append(_square(back))
        run.progress(1 - 0.5 * (n_steps - len(gradients)) / n_steps)
        (back,) = torch.autograd.grad(after, before, back, retain_graph=True)
    gradients.append(_square(back))

    squares = np.array([_square(stream) for stream in streams])  # (place, stack)
    kept = np.sqrt(np.array(gradients[::-1]) / gradients[0])
    branch_squares = np.array(written)
    metrics = {}
    for i, stack in enumerate(STACKS):
        metrics[f"gradient_kept_{stack}"] = kept[0, i]
        metrics[f"stream_square_{stack}"] = squares[-1, i] / squares[0, i]
        if stack != "plain_stack":
            metrics[f"square_to_sum_{stack}"] = squares[-1, i] / (squares[0, i] + branch_squares[:, i].sum())
            metrics[f"branch_square_{stack}"] = branch_squares[:, i].mean()
    table: Table = {
        "branches_passed": np.repeat(np.arange(n_steps + 1), len(STACKS)),
        "skip_wiring": np.tile(STACKS, n_steps + 1),
        "gradient_kept": kept.ravel().clip(SMALLEST),
        "stream_square": (squares / squares[0]).ravel().clip(SMALLEST),
    }
    return Result({m.name: float(metrics[m.name]) for m in METRICS}, {"by_depth": table})


def _stacks(params: Params, run: Run) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The weights of the three stacks, which differ in one factor, and what each carries of x."""
    n_layers, d = params.n_layers, params.d_model
    n_drawn = 1 if params.layers_shared else n_layers
    n_scaled = n_layers
    if params.residual_scaled_by == "number_of_branches":
        n_scaled *= len(STACK_BRANCHES[params.stack_branches])
    factor = run.randn(1).new_tensor((1.0, 1.0, n_scaled**-0.5)).view(-1, 1, 1, 1)
    weights = {}
    for name, drawn in draw_stack(run.randn, n_drawn, d, D_FF * d).items():
        of_layers = params.weight_gain * drawn.expand(n_layers, -1, -1)
        scaled = factor if name in ("W_o", "W_down") else factor.new_ones(factor.shape)
        weights[name] = scaled * of_layers
    return weights, factor.new_tensor((0.0, 1.0, 1.0)).view(-1, 1, 1, 1)


def _square(x: torch.Tensor) -> np.ndarray:
    """Mean square of each stack. Shapes: (stack, ...) to (stack,)."""
    return np.array(x.detach().cpu().double().square().flatten(1).mean(dim=1).numpy())
