r"""What an initialization of W_q and W_k makes of the textbook's "variance 1".

With a LayerNormed input (mean 0, variance 1), :math:`\mathrm{Var}(q) = d_{model}\,\mathrm{Var}(W)`, and a logit
before scaling has standard deviation :math:`\sqrt{d_k}\,\mathrm{Var}(q)`. Only a square Xavier matrix gives variance
1.

``xavier_square`` a (d_model, d_model) matrix; ``xavier_per_head`` (d_k, d_model); ``xavier_packed`` W_q, W_k and W_v
in one (3 d_model, d_model) matrix, as in ``torch.nn.MultiheadAttention``; ``linear_default`` as ``torch.nn.Linear``;
``normal_002`` N(0, 0.02²), as GPT-2. One head's rows are used.

Source: torch.nn.init.xavier_uniform_, torch.nn.MultiheadAttention, torch.nn.Linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number

if TYPE_CHECKING:
    import torch

INITS = ("xavier_square", "xavier_per_head", "xavier_packed", "linear_default", "normal_002")


@dataclass(frozen=True)
class Params(BaseParams):
    d_model: int = number(768, low=8, high=12288, log2=True)
    d_k: int = number(64, low=1, high=256, log2=True)
    init: str = choice(*INITS)
    seq_len: int = number(64, low=2, high=256, log2=True)
    n_draws: int = number(4, low=1, high=64, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_k > self.d_model:
            yield Problem("rule", "d_k", self.d_k, rule="head_within_model", values={"d_model": self.d_model})


METRICS = (
    Metric("q_variance"),
    Metric("theory_q_variance"),
    Metric("logits_std"),
    Metric("theory_logits_std"),
    Metric("scaled_logits_std"),
    Metric("weight_max_mean"),
)
PLOTS = (
    Plot("q_variance", table="by_init", x="init", y="q_variance", theory="theory_q_variance", mark="bar"),
    Plot(
        "scaled_logits_std",
        table="by_init",
        x="init",
        y="scaled_logits_std",
        theory="theory_scaled_logits_std",
        mark="bar",
    ),
)
BUDGET_S = 0.05


def memory_bytes(params: Params) -> int:
    """The input, two weight matrices and a family's q, k and logits, with temporaries, in float64."""
    wide = (params.seq_len + 2 * params.d_k) * params.d_model
    return 8 * (4 * wide + 4 * params.seq_len * (params.d_k + params.seq_len))


def run(params: Params, run: Run) -> Result:
    """Spread of q and of the logits over ``n_draws`` draws of input and weights.

    One uniform and one normal draw of W_q and W_k serve all initializations, each stretched to its own variance.

    ``logits_std`` and ``weight_max_mean`` are those without the scale, over ``seq_len`` keys.

    Shapes: x (seq_len, d_model); W_q, W_k (d_k, d_model).
    """
    from torch.nn.functional import layer_norm

    variance = {init: _weight_variance(init, params.d_model, params.d_k) for init in INITS}
    q_square: dict[str, list[float]] = {init: [] for init in INITS}
    logits_square: dict[str, list[float]] = {init: [] for init in INITS}
    weight_max = []
    shape = (params.d_k, params.d_model)
    for draw in range(params.n_draws):
        x = layer_norm(run.randn(params.seq_len, params.d_model), (params.d_model,))
        for inits in (INITS[:-1], INITS[-1:]):
            run.progress(draw / params.n_draws)
            W_q, W_k = (_unit(run, shape, normal="normal_002" in inits) for _ in range(2))
            q, k = x @ W_q.mT, x @ W_k.mT
            logits = qk_product(q, k)
            for init in inits:
                q_square[init].append(variance[init] * _mean_square(q))
                logits_square[init].append(variance[init] ** 2 * _mean_square(logits))
            if params.init in inits:
                weight_max.append(softmax(logits * variance[params.init]).amax(dim=-1).mean().item())

    rows = {init: _row(params, variance[init], fmean(q_square[init]), fmean(logits_square[init])) for init in INITS}
    chosen = rows[params.init]
    metrics = {m.name: chosen[m.name] for m in METRICS if m.name in chosen} | {"weight_max_mean": fmean(weight_max)}
    table: Table = {"init": np.array(INITS)}
    for name in ("q_variance", "theory_q_variance", "scaled_logits_std", "theory_scaled_logits_std"):
        table[name] = np.array([rows[init][name] for init in INITS])
    return Result(metrics, {"by_init": table})


def _unit(run: Run, shape: tuple[int, int], *, normal: bool) -> torch.Tensor:
    """Numbers of mean 0 and variance 1, normal or uniform."""
    return run.randn(*shape) if normal else (2 * run.rand(*shape) - 1) * math.sqrt(3)


def _mean_square(x: torch.Tensor) -> float:
    return float(x.cpu().double().square().mean())


def _weight_variance(init: str, d_model: int, d_k: int) -> float:
    """Variance of one number of W_q or W_k: a uniform law on ±b has b²/3, Xavier's b² is 6 / (rows + columns)."""
    rows = {"xavier_square": d_model, "xavier_per_head": d_k, "xavier_packed": 3 * d_model}
    if init in rows:
        return 2 / (rows[init] + d_model)
    return 0.02**2 if init == "normal_002" else 1 / (3 * d_model)


def _row(params: Params, weight_variance: float, q_square: float, logits_square: float) -> dict[str, float]:
    """Measured beside the formula. Both means are 0, so a mean square is a variance."""
    theory = params.d_model * weight_variance
    return {
        "q_variance": q_square,
        "theory_q_variance": theory,
        "logits_std": math.sqrt(logits_square),
        "theory_logits_std": math.sqrt(params.d_k) * theory,
        "scaled_logits_std": math.sqrt(logits_square / params.d_k),
        "theory_scaled_logits_std": theory,
    }
