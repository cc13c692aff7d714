"""norm_invariance against the published table of invariances, and against a computation in numpy, float64."""

import numpy as np
import pytest

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "norm_invariance"
B, N, D = 3, 4, 6
AXES = {
    "layer_norm": 2,
    "rms_norm": 2,
    "whole_text_norm": (1, 2),
    "instance_norm": 1,
    "batch_norm": (0, 1),
    "position_batch_norm": 0,
}
SIX = ("weights_scaled", "weights_shifted", "rows_scaled", "inputs_scaled", "inputs_shifted", "tokens_scaled")
# ba2016, table 1, and the row that zhang2019 adds: whether the outputs stay, in training.
STAYS = {
    "batch_norm": (True, False, True, True, True, False),
    "layer_norm": (True, True, False, True, False, True),
    "rms_norm": (True, False, False, True, False, True),
}


def by_hand(a: np.ndarray, kind: str, fixed=None) -> np.ndarray:
    if fixed is not None:
        mean, variance = fixed
    elif kind == "rms_norm":
        mean, variance = 0, (a**2).mean(axis=2, keepdims=True)
    else:
        mean, variance = a.mean(axis=AXES[kind], keepdims=True), a.var(axis=AXES[kind], keepdims=True)
    return (a - mean) / np.sqrt(variance + 1e-5)


def law(experiment: Experiment) -> None:
    for kind in AXES:
        for mode in ("training_mode", "evaluation_mode"):
            p = {"normalization": kind, "norm_mode": mode, "scaled_by": 2.0, "shifted_by": 1.5}
            result, draws = recorded(experiment, seed=1, batch=B, seq_len=N, d_model=D, **p)
            mean, W, x, z = draws[0], draws[1] / np.sqrt(D), mean_added(draws[0], draws[2]), mean_added(*draws[0:4:3])
            upstream, rows, tokens = draws[4], 2.0 ** draws[5], 2.0 ** draws[6]
            vector, bias, offsets = 1.5 * draws[7], 1.5 * draws[8], 1.5 * draws[9]
            earlier = [(mean + draw) @ W.T for draw in draws[10:30]]

            def averages(kind, earlier=earlier):
                axes = AXES[kind]
                moments = [(a.mean(axis=axes, keepdims=True), a.var(axis=axes, ddof=1, keepdims=True)) for a in earlier]
                return [np.mean(parts, axis=0) for parts in zip(*moments, strict=True)]

            fixed = averages(kind) if mode == "evaluation_mode" and kind.endswith("batch_norm") else None

            def f(a, kind=kind, fixed=fixed):
                return by_hand(a, kind, fixed)

            changed = {
                "weights_scaled": x @ (2 * W).T,
                "weights_shifted": x @ (W + vector[None, :] / np.sqrt(D)).T,
                "rows_scaled": x @ (rows * W).T,
                "inputs_scaled": 2 * x @ W.T,
                "inputs_shifted": (x + vector) @ W.T,
                "tokens_scaled": (tokens * x) @ W.T,
                "bias_added": x @ W.T + bias,
                "offset_added": x @ W.T + offsets,
            }
            near = {"rel": 1e-9, "abs": 1e-11}  # float64, some hundred operations on numbers near 1
            plain = f(x @ W.T)
            for name, a in changed.items():
                moved = np.sqrt(((f(a) - plain) ** 2).mean())
                assert result.metrics[f"moved_by_{name}"] == pytest.approx(moved, **near), (kind, mode, name)
            a, b = x @ W.T, z @ W.T
            bent = np.sqrt(((f((a + b) / 2) - (f(a) + f(b)) / 2) ** 2).mean())
            assert result.metrics["midpoint_difference"] == pytest.approx(bent, **near)
            mu, variance = averages("batch_norm")
            folded = np.sqrt((((a - mu) / np.sqrt(variance + 1e-5) - f(a)) ** 2).mean())
            assert result.metrics["folded_difference"] == pytest.approx(folded, **near)

            def gradient(W, f=f, x=x, upstream=upstream):
                out = np.empty_like(W)
                for place in np.ndindex(*W.shape):
                    up, down = W.copy(), W.copy()
                    up[place] += 1e-5
                    down[place] -= 1e-5
                    out[place] = ((f(x @ up.T) - f(x @ down.T)) * upstream).sum() / 2e-5
                return out

            one, two = gradient(W), gradient(2 * W)
            # central differences: the step squared, and rounding of 1e-15 over the step
            ratio, cosine = result.metrics["weight_gradient_ratio"], result.metrics["weight_gradient_cosine"]
            assert ratio == pytest.approx(np.linalg.norm(two) / np.linalg.norm(one), rel=1e-5)
            wanted = (W * one).sum() / np.linalg.norm(W) / np.linalg.norm(one)
            assert cosine == pytest.approx(wanted, abs=1e-5)


def mean_added(mean: np.ndarray, draw: np.ndarray) -> np.ndarray:
    return mean + draw


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('(own["rows"] * W)', '(own["rows"].mT * W)'),  # columns for rows
        ("lengths[1] / lengths[0]", "lengths[0] / lengths[1]"),
        ("(f(a) + f(b)) / 2)", "f(b))"),
        ("normalization, unbiased=True)", "normalization)"),  # the biased variance remembered
        ("return lambda a: normalize(a, fixed)", "pass"),  # batch statistics in evaluation, too
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("kind", STAYS)
def test_the_published_table_comes_out(kind):
    metrics = run(get(NAME), normalization=kind, dtype="float64").metrics
    stays = tuple(metrics[f"moved_by_{change}"] < 1e-4 for change in SIX)  # epsilon is 1e-5 of variances near 1
    assert stays == STAYS[kind]


def test_in_evaluation_batch_norm_sees_every_change_and_can_be_folded():
    metrics = run(get(NAME), normalization="batch_norm", norm_mode="evaluation_mode", dtype="float64").metrics
    assert min(metrics[f"moved_by_{change}"] for change in SIX) > 0.5
    assert metrics["midpoint_difference"] < 1e-12
    assert metrics["folded_difference"] < 1e-12
    assert metrics["weight_gradient_ratio"] == pytest.approx(1, abs=1e-12)


def test_four_norms_stand_beside_each_other():
    table = run(get(NAME)).tables["changes"]
    assert len(table["layer_change"]) == 8 * 4
    alone = run(get(NAME), normalization="batch_norm", norm_mode="evaluation_mode").metrics
    row = (table["norm_and_mode"] == "batch_norm_evaluation") & (table["layer_change"] == "bias_added")
    assert table["normalized_moved_rms"][row] == alone["moved_by_bias_added"]
