"""moment_formats against torch.optim.Adam where moments are float32, and against a rounding loop in numpy elsewhere."""

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests.experiments.test_precision import rounded
from tests.harness import assert_law_catches, recorded, run

NAME = "moment_formats"
SETTINGS = [
    {"n_adam_steps": 64},
    {"n_adam_steps": 64, "moment_dtype": "float16", "beta_2": 0.95, "gradient_std": 0.01, "later_gradient_std": 0.003},
    {"n_adam_steps": 32, "moments_kept_low": "both_moments", "epsilon_log10": -4},
    {"n_adam_steps": 32, "moments_kept_low": "first_moment", "beta_2": 0.9},
]


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | given
        result, (drawn,) = recorded(experiment, seed=6, **p)
        n, half = p["n_adam_steps"], p["n_adam_steps"] // 2
        g = np.concatenate((p["gradient_std"] * drawn[:half], p["later_gradient_std"] * drawn[half:]))
        low_first = p["moment_dtype"] if p["moments_kept_low"] != "second_moment" else "float32"
        low_second = p["moment_dtype"] if p["moments_kept_low"] != "first_moment" else "float32"
        m = v = np.zeros(g.shape[1])
        steps, seconds, fell = [], [], []
        for t in range(1, n + 1):
            before = v
            m = rounded(0.9 * m + 0.1 * g[t - 1], low_first)
            v = rounded(p["beta_2"] * v + (1 - p["beta_2"]) * g[t - 1] ** 2, low_second)
            steps.append(m / (1 - 0.9**t) / (np.sqrt(v / (1 - p["beta_2"] ** t)) + 10.0 ** p["epsilon_log10"]))
            seconds.append(v)
            fell.append(v < before)
        last = slice(-(n // 4), None)
        exact = reference(g, p)
        got = result.metrics
        # float32 against float64: one rounding in some hundred falls on the other side
        assert got["adam_step_rms"] == pytest.approx(np.sqrt(np.mean(np.square(steps[last]))), rel=3e-3), given
        assert got["exact_adam_step_rms"] == pytest.approx(np.sqrt(np.mean(exact[last] ** 2)), rel=1e-5), given
        assert got["adam_step_ratio"] == pytest.approx(got["adam_step_rms"] / got["exact_adam_step_rms"], rel=1e-9)
        assert got["zero_moment_share"] == pytest.approx(np.mean(np.array(seconds[last]) == 0), abs=0.01)
        assert got["second_moment_fell_share"] == pytest.approx(np.mean(fell[last]), abs=0.01), given
        v32, sums = np.zeros(g.shape[1]), []
        for row in g:
            v32 = p["beta_2"] * v32 + (1 - p["beta_2"]) * row**2
            sums.append(v32.mean())
        wanted = np.mean(np.array(seconds[last]).mean(axis=1)) / np.mean(sums[last])
        assert got["second_moment_ratio"] == pytest.approx(wanted, rel=3e-3), given


def reference(g: np.ndarray, p: dict) -> np.ndarray:
    """The steps of PyTorch's own Adam, in float64."""
    weight = torch.zeros(g.shape[1], dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, p["beta_2"]), eps=10.0 ** p["epsilon_log10"])
    places = [weight.detach().clone()]
    for row in g:
        weight.grad = torch.from_numpy(row).clone()
        adam.step()
        places.append(weight.detach().clone())
    return -torch.stack(places).diff(dim=0).numpy()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(1 - params.beta_2**updates)", "1"),  # no bias correction
        ("gradients.square()", "gradients.abs()"),
        ("added_square[n]).to(second_dtype)", "added_square[n]).to(torch.float32)"),
        ("(second_hat.sqrt() + 10.0**params.epsilon_log10)", "second_hat.sqrt()"),
        ("params.later_gradient_std * gradients[half:]", "params.gradient_std * gradients[half:]"),
        ("second[1:] < second[:-1]", "second[1:] <= second[:-1]"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_float32_is_its_own_reference():
    found = run(get(NAME), moment_dtype="float32").metrics
    assert found["second_moment_ratio"] == found["adam_step_ratio"] == 1


def test_a_decay_below_half_a_distance_never_happens():
    decaying = {"n_adam_steps": 512, "gradient_std": 1e-2, "later_gradient_std": 1e-9}
    assert run(get(NAME), **decaying).metrics["second_moment_fell_share"] == 0
    assert run(get(NAME), **decaying, beta_2=0.95).metrics["second_moment_fell_share"] > 0.9
