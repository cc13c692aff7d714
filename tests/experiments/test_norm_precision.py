"""norm_precision against numpy's own formats, and limits whose answer is known."""

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "norm_precision"


def by_hand(x: np.ndarray, gain: np.ndarray, way: str, place: str, epsilon: float) -> np.ndarray:
    """float16 in numpy, every step rounded; the sum between squares and mean kept in float32. x, gain: float16."""
    with np.errstate(all="ignore"):
        if way == "in_float32":
            wide = x.astype(np.float32)
            mean_square = (wide**2).mean(axis=-1, keepdims=True)
            root = np.sqrt(mean_square + np.float32(epsilon))
            normed = wide / (root if place == "inside_root" else np.sqrt(mean_square) + np.float32(epsilon))
            return (normed.astype(np.float16) * gain).astype(np.float64)
        total = (x * x).astype(np.float32).sum(axis=-1, keepdims=True)
        if way == "sum_in_format":
            mean_square = (total.astype(np.float16).astype(np.float32) / x.shape[-1]).astype(np.float16)
        else:
            mean_square = (total / x.shape[-1]).astype(np.float16)
        if place == "inside_root":
            inside = (mean_square.astype(np.float32) + np.float32(epsilon)).astype(np.float16)
            factor = (1 / np.sqrt(inside.astype(np.float32))).astype(np.float16)
            return ((x * factor) * gain).astype(np.float64)
        root = (np.sqrt(mean_square).astype(np.float32) + np.float32(epsilon)).astype(np.float16)
        return ((x / root) * gain).astype(np.float64)


def law(experiment: Experiment) -> None:
    for way in ("squares_in_format", "sum_in_format", "in_float32"):
        for place in ("inside_root", "outside_root"):
            for size in (0.002, 1.0, 40.0, 85.0):  # of the last size some tokens overflow
                p = {"statistics_in": way, "epsilon_place": place, "token_std": size, "epsilon_log10": -5.0}
                result, draws = recorded(experiment, seed=1, d_model=128, normed_tokens=4, **p)
                x = (size * draws[0]).astype(np.float16)
                gain = (1 + 0.3 * draws[1]).astype(np.float16)
                exact = x.astype(np.float64)
                mean_square = (exact**2).mean(axis=-1, keepdims=True)
                inside = place == "inside_root"
                root = np.sqrt(mean_square + 1e-5) if inside else np.sqrt(mean_square) + 1e-5
                exact = exact / root * gain.astype(np.float64)
                out = by_hand(x, gain, way, place, 1e-5)
                ones = by_hand(x, np.ones_like(gain), way, place, 1e-5)
                m = result.metrics
                silenced = ((ones == 0).all(axis=-1) & (x != 0).any(axis=-1)).mean()
                assert m["silenced_share"] == silenced, (way, place, size)
                error = np.sqrt(((out - exact) ** 2).mean() / (exact**2).mean())
                # one rounding more or less in a factor that all features share: half a unit of float16, 5e-4
                assert m["normed_error"] == pytest.approx(error, abs=5e-4), (way, place, size)
                assert m["norm_output_rms"] == pytest.approx(np.sqrt((ones**2).mean()), abs=1e-3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('inner = x.float() if way == "in_float32" else x', "inner = x.float()"),
        ("/ (mean_square.sqrt() + epsilon)\n", "/ (mean_square + epsilon).sqrt()\n"),
        ("x.cpu().double(), gain.cpu().double()", "x.cpu().double(), 1 + 0 * gain.cpu().double()"),
        ("(out == 0).all(dim=-1)", "(out == 0).all(dim=0).all()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_squares_of_256_and_more_are_infinite_in_float16():
    for value, finite in ((255.75, True), (256.0, False)):
        assert bool((torch.tensor(value, dtype=torch.float16) ** 2).isfinite()) is finite


def test_bfloat16_does_not_overflow_and_float32_is_exact():
    for size in (1e-3, 1.0, 1e4):
        metrics = run(get(NAME), number_format="bfloat16", token_std=size).metrics
        assert metrics["silenced_share"] == metrics["undefined_share"] == 0
        assert metrics["normed_error"] < 0.01  # some roundings of 2⁻⁹ each
        assert run(get(NAME), number_format="float32", token_std=size).metrics["normed_error"] < 1e-6


def test_a_token_of_zeros_needs_an_epsilon_that_the_format_holds():
    for power, held in ((-6.0, True), (-7.0, True), (-8.0, False)):  # the smallest positive float16 is 6e-8
        metrics = run(get(NAME), epsilon_log10=power).metrics
        assert (metrics["zero_token_undefined"] == 0) is held
        assert (metrics["epsilon_in_format"] > 0) is held
    assert run(get(NAME), epsilon_log10=-8.0, statistics_in="in_float32").metrics["zero_token_undefined"] == 0


def test_the_epsilon_counts_at_its_root_inside_and_at_itself_outside():
    p = {"number_format": "float32", "d_model": 4096, "normed_tokens": 64}
    half = run(get(NAME), token_std=1e-3, **p).metrics["norm_output_rms"]
    assert half == pytest.approx(1 / np.sqrt(2), rel=0.01)  # squares scatter by 0.02 a token, by 0.003 over all
    outside = run(get(NAME), token_std=1e-6, epsilon_place="outside_root", **p).metrics["norm_output_rms"]
    assert outside == pytest.approx(1 / 2, rel=0.01)
