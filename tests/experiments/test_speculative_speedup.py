"""speculative_speedup against the same flips read one by one in numpy, and against the formula."""

import math

import numpy as np
import pytest

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "speculative_speedup"
SETTINGS = [
    {},
    {"variation": "two_kinds", "spread": 0.3, "gamma": 2},
    {"variation": "fading", "spread": 0.2, "extra_token_cost": 0.3},
    {"alpha": 0.3, "draft_cost": 0.5, "gamma": 16},
    {"alpha": 1.0, "draft_cost": 0.0, "extra_token_cost": 1.0},
]


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = {"alpha": 0.8, "gamma": 4, "draft_cost": 0.1, "extra_token_cost": 0.0, "variation": "independent"}
        p |= {"spread": 0.2, "n_rounds": 1000} | given
        result, draws = recorded(experiment, seed=4, **p)
        two = p["variation"] == "two_kinds"
        chances = [p["alpha"] - p["spread"], min(1, p["alpha"] + p["spread"])] if two else [p["alpha"]]
        kept = []
        for flips, chance in zip(draws, chances, strict=True):
            rounds = []
            for flip in flips:
                count = 0
                while count < 16:
                    fade = (1 - p["spread"]) ** count if p["variation"] == "fading" else 1
                    if flip[count] >= chance * fade:
                        break
                    count += 1
                rounds.append(count)
            kept.append(np.array(rounds))

        def tokens(gamma: int, kept: list[np.ndarray] = kept) -> float:
            """Of texts of equal length."""
            length = 1000.0
            return len(kept) * length / sum(length / (np.minimum(k, gamma).mean() + 1) for k in kept)

        speedup = {g: tokens(g) / (1 + g * (p["draft_cost"] + p["extra_token_cost"])) for g in range(1, 17)}
        gamma = p["gamma"]
        rounds = [1 / (np.minimum(k, gamma).mean() + 1) for k in kept]
        all_kept = sum(n * np.minimum(k, gamma).mean() for n, k in zip(rounds, kept, strict=True))
        all_judged = sum(n * np.minimum(k + 1, gamma).mean() for n, k in zip(rounds, kept, strict=True))
        alpha = np.mean(chances)
        want = {
            "tokens_per_round": tokens(gamma),
            "speedup": speedup[gamma],
            "best_gamma": max(speedup, key=speedup.__getitem__),
            "best_speedup": max(speedup.values()),
            "formula_tokens_per_round": gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha),
            "tokens_per_round_of_kinds": np.mean([np.minimum(k, gamma).mean() + 1 for k in kept]),
            "kept_of_drafted_share": all_kept / (gamma * sum(rounds)),
            "kept_of_judged_share": all_kept / all_judged,
            "mean_alpha": alpha,
        }
        assert result.metrics == pytest.approx(want, rel=1e-9), p  # float64, means of 1000
        np.testing.assert_allclose(result.tables["by_gamma"]["speedup"], list(speedup.values()), rtol=1e-9)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("flips < _like(chances, flips)", "flips > _like(chances, flips)"),
        ("np.minimum(kept, gamma).mean()) + 1", "np.minimum(kept, gamma).mean())"),  # no bonus, no correction
        ("np.minimum(kept + 1, params.gamma)", "np.minimum(kept, params.gamma)"),
        ("(params.draft_cost + params.extra_token_cost)", "params.draft_cost"),
        ("len(tokens) / sum(1 / t for t in tokens)", "sum(tokens) / len(tokens)"),  # as if rounds were equally many
        ("(1 - params.spread) ** np.arange(MOST_DRAFTS)", "(1 - params.spread) ** np.arange(1, MOST_DRAFTS + 1)"),
        ("for sign in (-1, 1)", "for sign in (0, 1)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_independent_flips_follow_the_formula(alpha):
    metrics = run(get(NAME), seed=1, alpha=alpha).metrics
    kept = np.arange(5)
    chance = alpha**kept * np.where(kept < 4, 1 - alpha, 1)
    spread = math.sqrt((chance * (kept + 1) ** 2).sum() - (chance * (kept + 1)).sum() ** 2)
    error = 5 * spread / math.sqrt(20_000)
    assert abs(metrics["tokens_per_round"] - metrics["formula_tokens_per_round"]) <= error


def test_nothing_is_gained_where_a_token_costs_more_than_it_gives():
    """A gain for some γ if, and only if, alpha exceeds the cost of one more draft and its verification."""
    for alpha, cost in ((0.5, 0.45), (0.5, 0.55), (0.9, 0.85), (0.9, 0.95)):
        best = run(get(NAME), alpha=alpha, draft_cost=cost, n_rounds=200_000).metrics["best_speedup"]
        assert (best > 1) is (alpha > cost), (alpha, cost)
