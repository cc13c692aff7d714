r"""Tokens a verification gives and the time it saves, by the number of drafts: counted over rounds of coin flips.

A round drafts :math:`\gamma` tokens, keeps those before the first rejection and adds one. Each flip comes up with its
own chance, and the rounds differ in which:

``independent``   every draft is kept with probability alpha
``two_kinds``     half of the tokens stand in texts where alpha is higher by ``spread``, half where it is lower
``fading``        the i-th draft is kept with probability alpha · (1 - spread)^(i - 1): the draft reads its own guesses

Time is counted in steps of the target: ``draft_cost`` for a draft, 1 for a verification of one token, and
``extra_token_cost`` more for each further token in it, which is 0 as long as the step is bound by memory and 1 where
every token costs as much as the first. The law is that of independent flips, all with the mean chance of a first draft:

.. math:: \frac{1-\alpha^{\gamma+1}}{1-\alpha}\Big/\big(1+\gamma\,(c+s)\big)

Texts of two kinds are of equal length, so that a kind with fewer tokens a round takes more of the rounds;
``tokens_per_round_of_kinds`` is the plain mean of both instead, as if rounds were equally many.

Source: leviathan2022, abstract (the method); the law is derived on the card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, choice, number
from engine.speculative import expected_tokens, leading

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    alpha: float = number(0.8, low=0, high=1, step=0.05)
    gamma: int = number(4, low=1, high=16)
    draft_cost: float = number(0.1, low=0, high=1, step=0.01)
    extra_token_cost: float = number(0.0, low=0, high=1, step=0.01)
    variation: str = choice("independent", "two_kinds", "fading")
    spread: float = number(0.2, low=0, high=0.5, step=0.05)
    n_rounds: int = number(20_000, low=1000, high=200_000)

    def unread(self) -> frozenset[str]:
        return frozenset({"spread"} if self.variation == "independent" else ())


METRICS = (
    Metric("speedup"),
    Metric("tokens_per_round"),
    Metric("best_gamma"),
    Metric("best_speedup"),
    Metric("formula_tokens_per_round"),
    Metric("tokens_per_round_of_kinds"),
    Metric("kept_of_drafted_share"),
    Metric("kept_of_judged_share"),
    Metric("mean_alpha"),
)
PLOTS = (
    Plot("speedup", table="by_gamma", x="gamma", y="speedup", theory="formula_speedup", mark="point"),
    Plot("tokens", table="by_gamma", x="gamma", y="tokens_per_round", theory="formula_tokens_per_round", mark="point"),
)
BUDGET_S = 0.03

MOST_DRAFTS = 16  # of the curves
ROUNDS_AT_ONCE = 50_000


def memory_bytes(params: Params) -> int:
    """Flips of some rounds, with copies, and the kept drafts of all."""
    return 40 * MOST_DRAFTS * min(params.n_rounds, ROUNDS_AT_ONCE) + 32 * params.n_rounds


def run(params: Params, run: Run) -> Result:
    """Flip for ``n_rounds`` rounds of each kind, once, and read off what any number of drafts would have kept.

    Shapes: flips (rounds, MOST_DRAFTS).
    """
    kinds = _kinds(params)
    runs = []  # of each kind, how many drafts were kept before the first rejection
    for i, chances in enumerate(kinds):
        parts = []
        for start in range(0, params.n_rounds, ROUNDS_AT_ONCE):
            run.progress((i + start / params.n_rounds) / len(kinds))
            flips = run.rand(min(ROUNDS_AT_ONCE, params.n_rounds - start), MOST_DRAFTS)
            parts.append(leading(flips < _like(chances, flips)).cpu().numpy())
        runs.append(np.concatenate(parts))

    mean_alpha = float(np.mean([chances[0] for chances in kinds]))
    gammas = range(1, MOST_DRAFTS + 1)
    tokens = np.array([_per_token(_tokens(runs, gamma)) for gamma in gammas])
    formula = np.array([expected_tokens(mean_alpha, gamma) for gamma in gammas])
    cost = 1 + np.array(gammas) * (params.draft_cost + params.extra_token_cost)
    speedup = tokens / cost

    at = params.gamma - 1
    kept = [np.minimum(kept, params.gamma).mean() for kept in runs]  # a round
    judged = [np.minimum(kept + 1, params.gamma).mean() for kept in runs]
    shares = 1 / (np.array(kept) + 1)  # rounds that a token of each kind takes
    metrics = {
        "speedup": float(speedup[at]),
        "tokens_per_round": float(tokens[at]),
        "best_gamma": float(gammas[speedup.argmax()]),
        "best_speedup": float(speedup.max()),
        "formula_tokens_per_round": float(formula[at]),
        "tokens_per_round_of_kinds": float(np.mean(_tokens(runs, params.gamma))),
        "kept_of_drafted_share": float((kept @ shares) / (params.gamma * shares.sum())),
        "kept_of_judged_share": float((kept @ shares) / (judged @ shares)),
        "mean_alpha": mean_alpha,
    }
    table = {
        "gamma": np.array(gammas),
        "speedup": speedup,
        "formula_speedup": formula / cost,
        "tokens_per_round": tokens,
        "formula_tokens_per_round": formula,
    }
    return Result(metrics, {"by_gamma": table})


def _kinds(params: Params) -> list[np.ndarray]:
    """The chance of each draft, in order, for each kind of text."""
    ones = np.ones(MOST_DRAFTS)
    if params.variation == "two_kinds":
        return [np.clip(params.alpha + sign * params.spread, 0, 1) * ones for sign in (-1, 1)]
    if params.variation == "fading":
        return [params.alpha * (1 - params.spread) ** np.arange(MOST_DRAFTS)]
    return [params.alpha * ones]


def _like(chances: np.ndarray, flips: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.tensor(chances, dtype=flips.dtype, device=flips.device)


def _tokens(runs: list[np.ndarray], gamma: int) -> list[float]:
    """Tokens a round of each kind: the drafts kept, and one more."""
    return [float(np.minimum(kept, gamma).mean()) + 1 for kept in runs]


def _per_token(tokens: list[float]) -> float:
    """Tokens a round over texts of equal length: all tokens over all rounds."""
    return len(tokens) / sum(1 / t for t in tokens)
