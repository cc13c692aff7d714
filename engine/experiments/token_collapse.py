r"""How alike the tokens of a sequence become with depth: attention alone, and what stands beside it in a transformer.

Attention puts an average in the place of every token. Layer after layer the tokens come nearer to each other, and what
is left is one vector repeated: a matrix of rank one. The *spread* of the tokens is

.. math:: \frac{\lVert X-\mathbf 1\bar x^\top\rVert_F}{\lVert X\rVert_F}

with the mean token :math:`\bar x`. With random weights six stacks that share them are compared:

``pure_attention``     x ← attention(x)
``with_norm``          x ← attention(norm(x))
``with_ffn``           the same with a feed-forward network after each attention, nothing normalized
``with_skip``          x ← x + attention(x)
``whole_block``        both branches, a norm in front of each, and the residual path
``whole_block_scaled`` the same, W_o and W_down divided by √(2 n_layers)

All is computed in float64 on the CPU, as spreads below the rounding of float32 are the point.

Source: dong2021, abstract (convergence to rank one, and what stops it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, flag, number
from engine.residual_stream import BRANCHES, Wiring, draw_stack, walk

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    n_layers: int = number(6, low=2, high=32)
    seq_len: int = number(16, low=2, high=64, log2=True)
    d_model: int = number(32, low=8, high=128, log2=True)
    n_heads: int = number(1, low=1, high=8, log2=True)
    weight_gain: float = number(1.0, low=0.25, high=2.0, step=0.05)
    causal: bool = flag(False)

    def rules(self) -> Iterator[Problem]:
        work = self.n_layers * self.seq_len * self.d_model**2
        if work > MAX_WORK:
            values = {"product": work, "limit": MAX_WORK}
            yield Problem("rule", "n_layers", self.n_layers, rule="stack_too_large", values=values)


class _Parts(NamedTuple):
    branches: tuple[str, ...]
    placement: str
    residual: bool
    scaled: bool = False


STACKS = {
    "pure_attention": _Parts(("attention",), "bare", residual=False),
    "with_norm": _Parts(("attention",), "pre_norm", residual=False),
    "with_ffn": _Parts(BRANCHES, "bare", residual=False),
    "with_skip": _Parts(("attention",), "bare", residual=True),
    "whole_block": _Parts(BRANCHES, "pre_norm", residual=True),
    "whole_block_scaled": _Parts(BRANCHES, "pre_norm", residual=True, scaled=True),
}
METRICS = (
    *(Metric(f"token_spread_log10_{stack}") for stack in STACKS),
    Metric("collapse_order"),
    Metric("layers_to_one_percent"),
)
PLOTS = (Plot("spread", table="by_layer", x="layers_passed", y="token_spread_log10", by="token_stack"),)
BUDGET_S = 0.03
D_FF = 4  # times d_model
MAX_WORK = 2**25  # n_layers · seq_len · d_model²: 0.3 s for all six
FLOOR = 1e-13  # spreads below are rounding: float64 keeps 16 digits, a layer's sums lose some of them


def memory_bytes(params: Params) -> int:
    """The weights, also scaled, and one layer's activations, in float64."""
    d, n = params.d_model, params.seq_len
    weights = params.n_layers * (4 + 2 * D_FF) * d * d
    return 8 * (4 * weights + n * (12 * d + 3 * D_FF * d + 4 * params.n_heads * n)) + 2**20


def run(params: Params, run: Run) -> Result:
    """Send the same tokens through the six stacks and take the spread after every layer.

    ``token_spread_log10``: after the last layer, not below -13. ``collapse_order``: of pure attention, how many times
    as far the logarithm falls in a layer as in the layer before it, for the last two layers that stay above rounding; 1
    for a spread that shrinks by a constant factor, 3 where each spread goes like the cube of the one before. It is 0
    where fewer than two layers stay above. ``layers_to_one_percent``: the first layer of pure attention after which the
    spread is below 0.01, or one more than there are.

    Shapes: x (1, 1, seq_len, d_model).
    """
    import torch

    def randn(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double()

    d = params.d_model
    weights = {
        name: params.weight_gain * w[None] for name, w in draw_stack(randn, params.n_layers, d, D_FF * d).items()
    }
    x = randn(1, 1, params.seq_len, d)
    keep = torch.ones(params.seq_len, params.seq_len, dtype=torch.bool).tril() if params.causal else None
    spreads: dict[str, list[float]] = {}
    for done, (stack, parts) in enumerate(STACKS.items()):
        factor = (2 * params.n_layers) ** -0.5 if parts.scaled else 1.0
        own = {name: w * factor if name in ("W_o", "W_down") else w for name, w in weights.items()}
        wiring = Wiring(parts.placement, residual=parts.residual)
        steps = walk(own, x, wiring, n_heads=params.n_heads, keep=keep, branches=parts.branches)
        spreads[stack] = [_spread(x)]
        for i, step in enumerate(steps, start=1):
            run.progress((done + i / (params.n_layers * len(parts.branches))) / len(STACKS))
            if i % len(parts.branches) == 0:
                spreads[stack].append(_spread(step.stream))

    logs = {stack: np.log10(np.maximum(values, FLOOR)) for stack, values in spreads.items()}
    below = [layer for layer, value in enumerate(spreads["pure_attention"]) if value < 0.01]
    metrics = {f"token_spread_log10_{stack}": values[-1] for stack, values in logs.items()}
    metrics["collapse_order"] = _order(logs["pure_attention"])
    metrics["layers_to_one_percent"] = below[0] if below else params.n_layers + 1
    table: Table = {
        "layers_passed": np.tile(np.arange(params.n_layers + 1), len(STACKS)),
        "token_stack": np.repeat(list(STACKS), params.n_layers + 1),
        "token_spread_log10": np.concatenate(list(logs.values())),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"by_layer": table})


def _spread(x: torch.Tensor) -> float:
    """What differs between the tokens, over all there is."""
    return float((x - x.mean(dim=-2, keepdim=True)).norm() / x.norm())


def _order(logs: np.ndarray) -> float:
    falls = -np.diff(logs[logs > math.log10(FLOOR)])
    return float(falls[-1] / falls[-2]) if len(falls) > 1 else 0.0
