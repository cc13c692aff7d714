r"""How large a token's embedding is beside the position that is added to it, under the usual initializations.

The first Transformer multiplies the embedding by :math:`\sqrt d`. What this does depends on how the embedding was
drawn, for the sinusoidal position has norm :math:`\sqrt{d/2}` whatever is done to the token:

``normal_unit``     N(0, 1), PyTorch's ``nn.Embedding``
``normal_inv_d``    N(0, 1/d), tensor2tensor's, which serves the tied softmax as well
``xavier_uniform``  uniform with variance 2/(n_tokens + d), as where every matrix of a model is drawn anew
``normal_002``      N(0, 0.02^2), as in GPT-2

Source: vaswani2017, sections 3.4 and 3.5; tensor2tensor-code, ``SymbolModality``; pytorch-code, ``Embedding``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.encodings import sinusoidal

if TYPE_CHECKING:
    import torch

INITS = ("normal_inv_d", "normal_unit", "xavier_uniform", "normal_002")


@dataclass(frozen=True)
class Params(BaseParams):
    embedding_init: str = choice(*INITS)
    times_sqrt_d: bool = flag(True)
    d_model: int = number(512, low=4, high=4096, log2=True)
    n_tokens: int = number(32768, low=2, high=262144, log2=True)
    n_drawn: int = number(128, low=2, high=512, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % 2:
            yield Problem("rule", "d_model", self.d_model, rule="model_width_is_even")


METRICS = (
    Metric("token_norm"),
    Metric("position_norm"),
    Metric("position_over_token"),
    Metric("same_token_cosine"),
    Metric("same_position_cosine"),
)
PLOTS = (
    Plot(
        "ratios",
        table="by_init",
        mark="point",
        x="embedding_init",
        y="position_over_token",
        by="embedding",
        y_scale="log10",
    ),
    Plot("cosines", table="cosines", mark="bar", x="embedding_init", y="sum_cosine", by="two_sums_share"),
)
BUDGET_S = 0.04


def memory_bytes(params: Params) -> int:
    """The drawn rows, two of them scaled and summed at a time, and the positions."""
    return 4 * 12 * params.n_drawn * params.d_model + 2**20


def run(params: Params, run: Run) -> Result:
    """Norms of n_drawn tokens and of the positions 0 to n_drawn - 1, and cosines of their sums.

    Shapes: tokens and positions (n_drawn, d_model).
    """
    import torch

    normal, uniform = run.randn(params.n_drawn, params.d_model), run.rand(params.n_drawn, params.d_model)
    positions = sinusoidal(torch.arange(params.n_drawn, device=run.device), params.d_model).to(run.dtype)
    run.progress(0.2)

    ratios, cosines = [], []
    for init in INITS:
        for scaled in (False, True):
            tokens = _embedding(params, init, scaled, normal, uniform)
            ratios.append((positions.norm(dim=1).mean() / tokens.norm(dim=1).mean()).item())
        chosen = _embedding(params, init, params.times_sqrt_d, normal, uniform)
        cosines += [_cosine(chosen, positions, shared) for shared in ("token", "position")]
        run.progress(0.2 + 0.2 * (INITS.index(init) + 1))

    tokens = _embedding(params, params.embedding_init, params.times_sqrt_d, normal, uniform)
    metrics = {
        "token_norm": tokens.norm(dim=1).mean().item(),
        "position_norm": positions.norm(dim=1).mean().item(),
        "position_over_token": (positions.norm(dim=1).mean() / tokens.norm(dim=1).mean()).item(),
        "same_token_cosine": _cosine(tokens, positions, "token"),
        "same_position_cosine": _cosine(tokens, positions, "position"),
    }
    by_init: Table = {
        "embedding_init": np.repeat(INITS, 2),
        "embedding": np.tile(["as_drawn", "times_root_d"], len(INITS)),
        "position_over_token": np.array(ratios),
    }
    shares: Table = {
        "embedding_init": np.repeat(INITS, 2),
        "two_sums_share": np.tile(["the_token", "the_position"], len(INITS)),
        "sum_cosine": np.array(cosines),
    }
    return Result(metrics, {"by_init": by_init, "cosines": shares})


def _embedding(params: Params, init: str, scaled: bool, normal: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding, drawn as ``init`` says. Shapes: (n_drawn, d_model)."""
    factor = params.d_model**0.5 if scaled else 1.0
    if init == "xavier_uniform":
        bound = math.sqrt(6 / (params.n_tokens + params.d_model))
        return (2 * uniform - 1) * (bound * factor)
    std = {"normal_unit": 1.0, "normal_inv_d": params.d_model**-0.5, "normal_002": 0.02}[init]
    return normal * (std * factor)


def _cosine(tokens: torch.Tensor, positions: torch.Tensor, shared: str) -> float:
    """Mean cosine of two sums that share the token, or the position; what they do not share is half the list away."""
    from torch.nn.functional import cosine_similarity

    half = len(tokens) // 2
    if shared == "token":
        one, other = tokens + positions, tokens + positions.roll(half, 0)
    else:
        one, other = tokens + positions, tokens.roll(half, 0) + positions
    return float(cosine_similarity(one, other, dim=1).mean())
