"""running_statistics against numpy on the same draws, and against what sums of independent numbers do."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "running_statistics"
SETTINGS = [
    {"batch": 3, "seq_len": 4},
    {"batch": 2, "seq_len": 1, "text_share": 0.0, "norm_updates": 5},
    {"batch": 3, "seq_len": 4, "mean_drift": 0.1, "norm_momentum": 0.3},
    {"batch": 3, "seq_len": 4, "text_share": 1.0, "norm_momentum": 1.0, "norm_updates": 3},
]


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        updates, m = p.get("norm_updates", 30), p.get("norm_momentum", 0.1)
        share, drift = p.get("text_share", 0.2), p.get("mean_drift", 0.0)
        arguments = {"norm_updates": updates, "d_model": 4} | p
        result, draws = recorded(experiment, seed=2, **arguments)
        places = {max(1, round(updates * k / 12)) for k in range(1, 13)}
        draws = iter(draws)

        def batch(step, draws=draws, share=share, drift=drift):
            common, own = next(draws), next(draws)
            return 2 + 3 * drift * step + 3 * (math.sqrt(share) * common + math.sqrt(1 - share) * own)

        def distances(x, running, step, drift=drift):
            outs = [
                (x - mean) / np.sqrt(variance + 1e-5)
                for mean, variance in ((x.mean((0, 1)), x.var((0, 1))), running, (2 + 3 * drift * step, 9))
            ]
            pairs = ((0, 1), (0, 2), (1, 2))
            return [np.sqrt(((outs[a] - outs[b]) ** 2).mean()) for a, b in pairs], np.abs(outs[0]).max()

        running, offs, rows = [np.zeros(4), np.ones(4)], [], []
        for step in range(1, updates + 1):
            x = batch(step)
            numbers = x.reshape(-1, 4)
            new = numbers.mean(0), ((numbers - numbers.mean(0)) ** 2).sum(0) / (len(numbers) - 1)
            running = [(1 - m) * old + m * found for old, found in zip(running, new, strict=True)]
            offs.append((new[0] - 2 - 3 * drift * step) / 3)
            if step in places:
                rows.append(distances(batch(step), running, step)[0])
        ends = [distances(batch(updates), running, updates) for _ in range(12)]
        gap, noise, error = np.sqrt(np.mean([np.square(sizes) for sizes, _ in ends], axis=0))

        near = {"rel": 1e-9}  # float64, some thousand operations on numbers near 1
        measured = result.metrics
        assert measured["mode_gap_rms"] == pytest.approx(gap, **near), p
        assert measured["training_noise_rms"] == pytest.approx(noise, **near), p
        assert measured["evaluation_error_rms"] == pytest.approx(error, **near), p
        assert measured["batch_mean_std"] == pytest.approx(np.sqrt(np.square(offs).mean()), **near), p
        assert measured["independent_tokens"] == pytest.approx(1 / np.square(offs).mean(), **near), p
        off = (running[0] - 2 - 3 * drift * updates) / 3
        assert measured["running_mean_error"] == pytest.approx(np.sqrt(np.square(off).mean()), **near), p
        assert measured["training_output_abs_max"] == pytest.approx(max(largest for _, largest in ends), **near), p
        table = result.tables["distances"]["output_distance_rms"].reshape(-1, 3)
        assert table == pytest.approx(np.array(rows), **near), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"batch_norm", unbiased=True)', '"batch_norm")'),  # the biased variance remembered
        ("p.text_share**0.5 * common", "p.text_share * common"),
        ("running, found, params.norm_momentum", "running, found, 1 - params.norm_momentum"),
        ("STD * self._params.mean_drift * step", "STD * self._params.mean_drift"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(
    "p",
    [
        {"batch": 8, "seq_len": 16, "text_share": 0.2},
        {"batch": 4, "seq_len": 32, "text_share": 0.0},
        {"batch": 16, "seq_len": 4, "text_share": 0.8},
        {"batch": 8, "seq_len": 4, "mean_drift": 0.1, "norm_updates": 25},
        {"batch": 8, "seq_len": 4, "norm_momentum": 0.02, "norm_updates": 60},
    ],
)
def test_spread_and_lag_are_those_of_independent_sums(p):
    metrics = run(get(NAME), seed=5, d_model=256, **p).metrics
    n = 256 * p.get("norm_updates", 80)  # means of independent batches and features
    assert metrics["batch_mean_std"] == pytest.approx(metrics["theory_batch_mean_std"], rel=5 / math.sqrt(2 * n))
    # the error at the end is a mean over 256 features only
    assert metrics["running_mean_error"] == pytest.approx(
        metrics["theory_running_mean_error"], rel=5 / math.sqrt(2 * 256)
    )


def test_the_lag_is_exact_where_nothing_is_random():
    # 256 texts would do: with many tokens the spread is far below the lag
    metrics = run(get(NAME), batch=64, seq_len=32, text_share=0.0, mean_drift=0.5, norm_updates=60, d_model=4).metrics
    behind = 0.5 * sum(0.1 * 0.9**j * j for j in range(60)) + 0.9**60 * (2 / 3 + 0.5 * 60)
    # the spread of the running mean, 0.005 deviations
    assert metrics["running_mean_error"] == pytest.approx(behind, abs=0.02)
    assert metrics["theory_running_mean_error"] == pytest.approx(behind, abs=0.001)


def test_two_tokens_become_plus_and_minus_one():
    metrics = run(get(NAME), batch=2, seq_len=1, text_share=0.0, norm_updates=5, dtype="float64").metrics
    assert metrics["training_output_abs_max"] == pytest.approx(1, abs=1e-5)  # epsilon beside a variance of some units


def test_a_single_token_has_no_variance_and_is_refused():
    with pytest.raises(ParamsError) as refused:
        get(NAME).Params(batch=1, seq_len=1)
    assert refused.value.problems[0].rule == "variance_needs_two_tokens"
