"""qk_variance against the law of the mean and variance of a sum of products."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "qk_variance"
SETTINGS = [
    {"d_k": 1},
    {"d_k": 64},
    {"d_k": 512, "scale": "inv_sqrt_d_k"},
    {"d_k": 64, "scale": "inv_d_k"},
    {"d_k": 256, "scale": "inv_log_d_k"},
    {"d_k": 64, "distribution": "uniform"},
    {"d_k": 64, "distribution": "heavy_tail"},
    {"d_k": 64, "q_mean": 0.5, "k_mean": -0.3, "q_std": 1.5, "k_std": 0.7, "qk_correlation": 0.4},
    {"d_k": 16, "qk_correlation": 1.0},
]


def independent_law(p: dict) -> tuple[float, float]:
    """Mean and variance from E[q²k²] of a bivariate normal by Isserlis' theorem, not from the engine's formula."""
    mq, mk, sq, sk, rho = (
        p.get(n, d) for n, d in [("q_mean", 0), ("k_mean", 0), ("q_std", 1), ("k_std", 1), ("qk_correlation", 0)]
    )
    cov = rho * sq * sk
    e_qk = mq * mk + cov
    e_q2k2 = (mq**2 + sq**2) * (mk**2 + sk**2) + 2 * cov**2 + 4 * mq * mk * cov
    scale = {
        "none": 1,
        "inv_sqrt_d_k": p["d_k"] ** -0.5,
        "inv_d_k": 1 / p["d_k"],
        "inv_log_d_k": 1 / math.log(max(2, p["d_k"])),
    }
    c = scale[p.get("scale", "none")]
    return c * p["d_k"] * e_qk, c * c * p["d_k"] * (e_q2k2 - e_qk**2)


def law(experiment: Experiment) -> None:
    n_pairs = 16384
    for p in SETTINGS:
        mean, variance = independent_law(p)
        measured = run(experiment, seed=3, n_pairs=n_pairs, **p).metrics
        # kurtosis of a product of two normals is 9, of two Laplace variables 36; with rho = 1 it is that of chi², 15
        excess = {"heavy_tail": 33, "uniform": 0.24}.get(p.get("distribution", ""), 12)
        se_variance = variance * math.sqrt((2 + excess / p["d_k"]) / n_pairs)
        assert abs(measured["logits_mean"] - mean) <= 5 * math.sqrt(variance / n_pairs), (p, "mean")
        assert abs(measured["logits_variance"] - variance) <= 5 * se_variance, (p, "variance")
        assert measured["theory_mean"] == pytest.approx(mean, rel=1e-12, abs=1e-12), p  # float64 on both sides
        assert measured["theory_std"] == pytest.approx(math.sqrt(variance), rel=1e-12), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(q * k).sum(dim=-1) * scale", "(q * k).sum(dim=-1)"),  # scale dropped
        ("(q * k).sum(dim=-1) * scale", "(q * k).mean(dim=-1) * scale"),  # mean instead of sum
        ("math.sqrt(1 - rho * rho) * k", "(1 - rho) * k"),  # correlated k no longer has unit variance
        ("* math.sqrt(12)", "* 3"),  # uniform numbers of another variance
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_histogram_is_a_density_near_the_normal_one():
    table = run(get(NAME), seed=1, d_k=512, n_pairs=131072).tables["histogram"]
    width = float(table["logits"][1] - table["logits"][0])
    # a bin's count is binomial: its relative error is 1/sqrt(count); the product's own excess kurtosis 6/d_k adds 1 %
    counts = table["density"] * width * 131072
    assert counts.sum() == pytest.approx(131072, rel=1e-4)  # 6e-7 of the mass lies outside ±5 standard deviations
    tall = counts > 400
    assert np.all(np.abs(table["density"] / table["theory_density"] - 1)[tall] < 5 / np.sqrt(counts[tall]) + 0.03)


def test_refuses_what_makes_no_sense():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="log_needs_two"):
        params(d_k=1, scale="inv_log_d_k")
    with pytest.raises(ParamsError, match="correlation_needs_normal"):
        params(distribution="uniform", qk_correlation=0.5)
