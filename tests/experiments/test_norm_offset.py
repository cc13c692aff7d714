"""norm_offset against numpy in float64, and the Jacobians against their formulas."""

import numpy as np
import pytest

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "norm_offset"
EPSILON = 1e-6


def by_hand(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "layer_norm":
        x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPSILON)


def jacobian(x: np.ndarray, kind: str) -> np.ndarray:
    """The formula of the module's docstring, with the epsilon."""
    d = len(x)
    centre = np.eye(d) - (np.ones((d, d)) / d if kind == "layer_norm" else 0)
    v = centre @ x
    root = np.sqrt((v**2).mean() + EPSILON)
    return (centre - np.outer(v, v) / d / root**2) / root


def law(experiment: Experiment) -> None:
    for kind in ("rms_norm", "layer_norm"):
        p = {"normalization": kind, "token_offset": 1.5, "token_std": 2.0, "outlier_size": 8.0, "d_model": 16}
        result, (z, upstream) = recorded(experiment, seed=2, normed_tokens=8, **p)
        x = 1.5 + 2.0 * z
        x[:, 0] += 8.0
        outs = {norm: by_hand(x, norm) for norm in ("rms_norm", "layer_norm")}
        out, other = outs[kind], outs["rms_norm"] - outs["layer_norm"]
        near = {"rel": 1e-9, "abs": 1e-12}  # float64, some hundred operations on numbers near 1
        m = result.metrics
        assert m["varying_rms"] == pytest.approx(np.sqrt(((out - out.mean(1, keepdims=True)) ** 2).mean()), **near)
        assert m["norms_difference_rms"] == pytest.approx(np.sqrt((other**2).mean()), **near)
        assert m["output_offset"] == pytest.approx(out.mean(), **near)
        assert m["ordinary_features_rms"] == pytest.approx(np.sqrt((out[:, 1:] ** 2).mean()), **near)
        a, b = outs["rms_norm"], outs["layer_norm"]
        cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        assert m["norms_cosine"] == pytest.approx(cosines.mean(), **near)
        stretches = np.array([np.linalg.svd(jacobian(token, kind))[1] for token in x[:4]]).mean(axis=0)
        shown = result.tables["stretches"]
        found = shown["stretch"][shown["normalization"] == kind]
        assert found == pytest.approx(stretches, rel=1e-9, abs=1e-8)  # the square root of rounding near 0
        assert m["largest_stretch"] == pytest.approx(stretches[0], **near)
        gradients = np.array([jacobian(token, kind).T @ up for token, up in zip(x, upstream, strict=True)])
        ones = np.abs(gradients.sum(1) / np.linalg.norm(gradients, axis=1) / 4).max()
        assert m["gradient_along_ones"] == pytest.approx(ones, **near)
        along = (gradients * x).sum(1) / np.linalg.norm(gradients, axis=1) / np.linalg.norm(x, axis=1)
        assert m["gradient_along_token"] == pytest.approx(np.abs(along).max(), **near)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x[:, 0] += params.outlier_size", "x[0] += params.outlier_size"),  # a token for a feature
        ("(out - out.mean(dim=-1, keepdim=True)),", "(out - out.mean(dim=0, keepdim=True)),"),
        ("_rms(out[:, 1:])", "_rms(out[1:])"),
        ("out.diagonal(dim1=-2, dim2=-1).sum()", "out.sum()"),
        ("10.0**params.epsilon_log10", "10.0 ** (params.epsilon_log10 / 2)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_norms_agree_exactly_on_centred_tokens():
    for offset in (0.0, 3.0):
        metrics = run(get(NAME), center_tokens=True, token_offset=offset, dtype="float64").metrics
        assert metrics["norms_difference_rms"] < 1e-12  # float64


def test_rms_norm_loses_one_direction_and_layer_norm_two():
    for kind, lost in (("rms_norm", 1), ("layer_norm", 2)):
        for d_model in (8, 64, 256):  # 64 directions are taken of wider tokens
            assert run(get(NAME), normalization=kind, d_model=d_model).metrics["lost_directions"] == lost


def test_the_chart_follows_its_formula():
    table = run(get(NAME), d_model=1024, normed_tokens=256, dtype="float64").tables["by_offset"]
    # a token's own mean and variance scatter by 1/32 and less, over 64 tokens by some 0.004; five of them and the bias
    assert table["varying_rms"] == pytest.approx(table["theory_rms"], rel=0.02)
