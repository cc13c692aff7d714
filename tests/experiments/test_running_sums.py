"""running_sums against a loop in numpy that rounds by the bits, and at sums that are known."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.experiments.test_precision import FORMATS, rounded
from tests.harness import assert_law_catches, recorded, run

NAME = "running_sums"
SETTINGS = [
    {"n_stores": 50},
    {"n_stores": 40, "low_dtype": "float16", "step_mean": 0.0004, "step_noise": 2, "spread_starts": True},
    {"n_stores": 30, "start_value": 0, "step_mean": 0.1, "steps_per_store": 4},
    {"n_stores": 20, "low_dtype": "float32", "step_mean": 1e-7},
]


def stochastic(x: np.ndarray, chance: np.ndarray, name: str) -> np.ndarray:
    """Up where the place between the neighbours is above the chance: neighbours by the exponent of each number."""
    if name == "float32":
        return x
    _, digits, smallest_normal = FORMATS[name]
    out = []
    for value, c in zip(x, chance, strict=True):
        spacing = 2.0 ** (math.frexp(max(abs(value), smallest_normal))[1] - 1 - digits)
        below = math.floor(value / spacing) * spacing
        out.append(below + spacing * (value - below > c * spacing))
    return np.array(out)


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | given
        result, (noise, chances) = recorded(experiment, seed=4, **p)
        name, n = p["low_dtype"], p["n_kept_numbers"]
        steps = (p["step_mean"] * (1 + p["step_noise"] * noise)).sum(axis=1)
        start = p["start_value"] * (1 + (np.arange(n) / n if p["spread_starts"] else np.zeros(n)))
        start = rounded(start, name)
        a = b = c = d = start
        rest, same = np.zeros(n), 0
        for step, chance in zip(steps, chances, strict=True):
            before, a = a, rounded(a + step, name)
            same += (a == before).sum()
            b = stochastic(b + step, chance, name)
            wanted = c + step + rest
            c = rounded(wanted, name)
            rest = rounded(wanted - c, name)
            d = d + step
        exact = steps.sum(axis=0)
        got = result.metrics
        # float32 against float64: seven digits of a sum of some ten steps; a number in thousands rounds the other way
        close = {"rel": 2e-4, "abs": 2e-4 * exact.mean()}
        for way, end in (("rounded_nearest", a), ("compensated", c), ("float32_kept", rounded(d, name))):
            assert got[f"end_mean_{way}"] - start.mean() == pytest.approx((end - start).mean(), **close), (given, way)
            assert got[f"arrived_share_{way}"] == pytest.approx((end - start).mean() / exact.mean(), rel=3e-4, abs=3e-4)
        if name != "float32":  # there every store rounds, and float64 does not
            # a chance that falls on the other side moves one number by one distance, a 64th of it in the mean
            assert got["end_mean_rounded_stochastic"] == pytest.approx(b.mean(), rel=3e-4), given
        assert got["stores_without_change"] == pytest.approx(same / steps.size, abs=1e-3)
        assert got["exact_end_mean"] == pytest.approx((start + exact).mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("round_to_nearest(nearest + step, dtype)", "nearest + step"),
        ("wanted = compensated + (step + rest)", "wanted = compensated + step"),
        ("round_stochastically(stochastic + step, chance, dtype)", "round_to_nearest(stochastic + step, dtype)"),
        ("kept = kept + step", "kept = round_to_nearest(kept + step, dtype)"),
        (".sum(dim=1)", ".mean(dim=1)"),  # one step of a store instead of all
        ("unchanged + (nearest == before)", "unchanged + (nearest != before)"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=2, **params).metrics


@pytest.mark.parametrize(("low_dtype", "step_mean", "stops_at"), [("bfloat16", 1, 256), ("float16", 1, 2048)])
def test_a_sum_of_ones_stops_where_half_a_distance_is_one(low_dtype, step_mean, stops_at):
    found = metrics(
        start_value=0, step_mean=step_mean, step_noise=0, n_stores=4096, low_dtype=low_dtype, n_kept_numbers=1
    )
    assert found["end_mean_rounded_nearest"] == stops_at
    assert found["end_mean_float32_kept"] == 4096


def test_the_share_left_unchanged_is_one_below_a_quarter_distance_and_none_above_a_half():
    table = run(get(NAME)).tables["unchanged"]
    for name, digits in (("bfloat16", 7), ("float16", 10)):
        mine = table["number_format"] == name
        steps, shares = table["relative_step"][mine], table["unchanged_share"][mine]
        assert (shares[steps < 2.0 ** -(digits + 2)] == 1).all()  # half a distance is a quarter of it relative to 2
        assert (shares[steps > 2.0 ** -(digits + 1)] == 0).all()
        assert ((shares > 0) & (shares < 1)).any()


def test_refusals():
    with pytest.raises(ParamsError, match="too_many_steps_drawn"):
        get(NAME).Params(n_stores=4096, steps_per_store=256, n_kept_numbers=64)
