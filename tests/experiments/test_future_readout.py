"""future_readout against an explicit regression in numpy, float64, and against the law of exchangeable numbers."""

import math

import numpy as np
import pytest

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "future_readout"
AXES = {
    "layer_norm": 3,
    "rms_norm": 3,
    "whole_text_norm": (2, 3),
    "instance_norm": 2,
    "batch_norm": (1, 2),
    "position_batch_norm": 1,
}


def regression(x: np.ndarray) -> float:
    """Share of the last token explained, coefficients from the first half of the batches, sample by sample."""
    half = len(x) // 2

    def samples(part):
        return np.array([part[i, b, :, j] for i, b, j in np.ndindex(len(part), x.shape[1], x.shape[3])])

    fitted, measured = samples(x[:half]), samples(x[half:])
    coefficients = np.linalg.lstsq(fitted[:, :-1], fitted[:, -1], rcond=None)[0]
    errors = measured[:, -1] - measured[:, :-1] @ coefficients
    return 1 - (errors**2).sum() / (measured[:, -1] ** 2).sum()


def law(experiment: Experiment) -> None:
    for kind, axes in AXES.items():
        for mode in ("training_mode", "evaluation_mode"):
            sizes = {"batch": 2, "seq_len": 4, "d_model": 8, "n_batches": 6}
            result, draws = recorded(experiment, seed=1, normalization=kind, norm_mode=mode, **sizes)
            x = draws[0]
            mean = 0 if kind == "rms_norm" else x.mean(axes, keepdims=True)
            variance = ((x - mean) ** 2).mean(axes, keepdims=True)
            if mode == "evaluation_mode" and kind.endswith("batch_norm"):
                mean, variance = mean.mean(0, keepdims=True), variance.mean(0, keepdims=True)
            z = (x - mean) / np.sqrt(variance + 1e-5)
            near = {"rel": 1e-8, "abs": 1e-9}  # float64; the pseudo-inverse cuts at 1e-15 of the largest
            assert result.metrics["future_read_share"] == pytest.approx(regression(z), **near), (kind, mode)
            assert result.metrics["raw_read_share"] == pytest.approx(regression(x), **near)
            pairs = [(z[:, :, s] * z[:, :, t]).mean() for s in range(4) for t in range(4) if s != t]
            assert result.metrics["tokens_correlation"] == pytest.approx(np.mean(pairs) / (z**2).mean(), **near)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_products(x[:half]), _products(x[half:])", "_products(x), _products(x)"),  # measured where it was fitted
        ("part.mean(dim=0, keepdim=True) for part in statistics", "part for part in statistics"),
        ("return 1 - float(", "return float("),
        (" / (len(products) - 1) if", " / len(products) if"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("sizes", [{"batch": 1}, {"batch": 2}, {"batch": 1, "seq_len": 2}, {"batch": 4, "seq_len": 2}])
def test_what_can_be_read_is_what_exchangeable_numbers_tell(sizes):
    metrics = run(get(NAME), seed=3, d_model=256, n_batches=128, **sizes).metrics
    share, batch, seq_len = metrics["theory_future_read_share"], sizes["batch"], sizes.get("seq_len", 8)
    n, k, samples = batch * seq_len, seq_len - 1, 64 * 256 * batch
    assert share == k / ((n - 1) * (n - k))
    # an explained share spreads by 2 sqrt(share / samples), and a fit of k coefficients costs k / samples; epsilon
    assert metrics["future_read_share"] == pytest.approx(share, abs=10 * math.sqrt(share / samples) + 5 * k / samples)
    assert metrics["tokens_correlation"] == pytest.approx(-1 / (n - 1), abs=5 / math.sqrt(2 * samples) + 1e-5)


def test_one_text_tells_its_last_token_exactly_and_layer_norm_nothing():
    assert run(get(NAME), batch=1, dtype="float64").metrics["future_read_share"] == pytest.approx(1, abs=1e-12)
    for p in ({"normalization": "layer_norm"}, {"norm_mode": "evaluation_mode"}):
        metrics = run(get(NAME), batch=1, d_model=256, n_batches=128, **p).metrics
        assert metrics["theory_future_read_share"] == 0
        assert abs(metrics["future_read_share"]) < 10 * 7 / (64 * 256)  # seven coefficients of 16384 samples


def test_a_position_normalized_over_one_text_is_zero_and_tells_nothing():
    metrics = run(get(NAME), normalization="position_batch_norm", batch=1).metrics
    assert metrics["future_read_share"] == metrics["tokens_correlation"] == 0


def test_numbers_that_share_a_mean_are_counted_from_the_means():
    wanted = {"layer_norm": 64, "batch_norm": 16, "position_batch_norm": 2, "instance_norm": 8, "whole_text_norm": 512}
    assert {name: run(get(NAME), normalization=name).metrics["numbers_sharing"] for name in wanted} == wanted
