"""fact_memory against normal equations solved with numpy, and against what least squares leaves over."""

import numpy as np
import pytest

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "fact_memory"
SETTINGS = [
    {"n_facts": 64, "d_ff": 32, "d_model": 8, "n_answers": 16, "unit_function": "relu_unit"},
    {"n_facts": 16, "d_ff": 16, "d_model": 8, "n_answers": 16, "unit_function": "relu_unit", "key_noise": 0.5},
]


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, (keys, noise, answers, uniform, W_up, bias) = recorded(experiment, seed=6, **p)
        d, n = p["d_model"], p["n_facts"]
        keys = keys / np.linalg.norm(keys, axis=1, keepdims=True) * d**0.5
        asked = keys + p.get("key_noise", 0) * noise
        answers = answers / np.linalg.norm(answers, axis=1, keepdims=True)
        right = np.minimum((uniform * len(answers)).astype(int), len(answers) - 1)[:n]
        wanted = answers[right]

        def hidden(x, W=W_up, b=bias, d=d):
            return np.maximum(x @ W.T / d**0.5 + b, 0)

        def lookup(x, p=p, keys=keys, wanted=wanted, d=d, n=n):
            out = np.zeros((len(x), d))
            for unit in range(min(n, p["d_ff"])):
                cosine = x @ keys[unit] / d
                out += np.maximum(cosine - 0.7, 0)[:, None] / 0.3 * wanted[unit]
            return out

        fit_matrix = np.linalg.lstsq(keys[:n], wanted, rcond=None)[0]
        fit_hidden = np.linalg.lstsq(hidden(keys[:n]), wanted, rcond=None)[0]
        outputs = {
            "matrix_memory": lambda x, W=fit_matrix: x @ W,
            "fitted_ffn": lambda x, W=fit_hidden, f=hidden: f(x) @ W,
            "lookup_ffn": lookup,
        }
        for name, out in outputs.items():
            recall = ((out(asked[:n]) @ answers.T).argmax(1) == right).mean()
            left = ((out(keys[:n]) - wanted) ** 2).sum() / (wanted**2).sum()
            # the fits agree to rounding times the condition of the units, some 1e4 here: a near tie may still flip
            assert abs(result.metrics[f"recall_{name}"] - recall) < 1.01 / n, (p, name)
            assert abs(result.metrics[f"left_over_{name}"] - left) < 1e-9, (p, name)
        assert result.metrics["hidden_rank"] == np.linalg.matrix_rank(hidden(keys[:n]))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("keys / keys.norm(dim=-1, keepdim=True) * math.sqrt(params.d_model)", "keys"),  # lengths left as drawn
        ("_fitted(hidden, wanted, (hidden, features(asked[:n])))", "_fitted(hidden, wanted, (hidden, hidden))"),
        ("x @ W_up.mT + bias", "x @ W_up.mT"),
        ("relu(x @ stored.mT / d_model - THRESHOLD)", "relu(x @ stored.mT / d_model)"),
        ("wanted[: len(stored)]", "wanted[: len(stored)].roll(1, 0)"),  # values beside the wrong keys
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_least_squares_leaves_the_share_that_its_rank_can_not_reach():
    """Answers don't depend on keys, so a fit of rank r takes r/n of their square, in the mean."""
    left = [run(get(NAME), seed=s, n_facts=256, n_answers=256).metrics for s in range(5)]
    # 5 runs: the standard error is below 0.003; the mean of 256 answers, which any fit gets, is 0.004 of their square
    assert abs(np.mean([m["left_over_fitted_ffn"] for m in left]) - (1 - 64 / 256)) < 0.02
    assert abs(np.mean([m["left_over_matrix_memory"] for m in left]) - (1 - 16 / 256)) < 0.02


def test_without_a_function_width_adds_nothing_but_the_bias():
    assert run(get(NAME), d_ff=512, unit_function="linear_unit").metrics["hidden_rank"] == 17
