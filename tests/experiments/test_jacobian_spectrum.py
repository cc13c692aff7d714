"""jacobian_spectrum against complex-step derivatives of its own draws in numpy, and against exact rows."""

import math

import numpy as np
import pytest
import torch

from engine.attention import jacobian_norm, softmax_jacobian
from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "jacobian_spectrum"
SETTINGS = [
    {},
    {"kv_len": 7, "logits_std": 3.0, "n_masked": 2},
    {"kv_len": 5, "logits_std": 16.0, "tied_top": True},
    {"kv_len": 2, "logits_std": 0.5},
    {"kv_len": 9, "logits_std": 2.0, "activation": "sigmoid"},
    {"kv_len": 9, "logits_std": 2.0, "activation": "sigmoid", "n_masked": 3, "tied_top": True},
    {"kv_len": 20, "logits_std": 0.0625},
]


def rows_of(p: dict, drawn: np.ndarray) -> np.ndarray:
    """The scores of every row, as the parameters ask for them."""
    scores = drawn.copy()
    scores[:, scores.shape[1] - p["n_masked"] :] = -np.inf
    if p["tied_top"]:
        for row in scores:
            second = np.argsort(row)[-2]
            row[second] = row.max()
    return scores


def weights_of(z: np.ndarray, n: int, activation: str) -> np.ndarray:
    """Weights of one row of n keys without its masked ones; analytic, so that it also takes complex logits."""
    if activation == "sigmoid":
        return 1 / (1 + n * np.exp(-z))
    e = np.exp(z - z.real.max())
    return e / e.sum()


def jacobian_of(z: np.ndarray, activation: str) -> np.ndarray:
    """d w_i / d z_j by complex steps, which subtract nothing: exact to rounding."""
    n, step = len(z), 1e-30
    jacobian = np.zeros((n, n))
    for j in np.flatnonzero(np.isfinite(z)):
        moved = z[np.isfinite(z)].astype(complex)
        moved[np.flatnonzero(np.isfinite(z)) == j] += 1j * step
        jacobian[np.isfinite(z), j] = weights_of(moved, n, activation).imag / step
    return jacobian


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params(**given).as_dict() | {"n_rows": 64}
        result, (drawn, _) = recorded(experiment, seed=3, **p)
        scores = rows_of(p, drawn)
        jacobians = np.array([jacobian_of(p["logits_std"] * row, p["activation"]) for row in scores])
        eigenvalues = np.linalg.eigvalsh(jacobians)
        norms = np.linalg.norm(jacobians, axis=(1, 2))
        diagonal = np.diagonal(jacobians, axis1=1, axis2=2)
        wanted = {
            "eigenvalue_max": eigenvalues.max(),
            "jacobian_norm_median": np.percentile(norms, 50),
            "jacobian_norm_mean": norms.mean(),
            "spectral_norm_median": np.percentile(np.linalg.norm(jacobians, 2, axis=(1, 2)), 50),
            "scores_jacobian_norm_median": p["logits_std"] * np.percentile(norms, 50),
            "scores_jacobian_norm_mean": p["logits_std"] * norms.mean(),
            "shift_response": np.linalg.norm(jacobians @ np.ones(p["kv_len"]), axis=1).max(),
            "off_diagonal_share": np.mean(1 - (diagonal**2).sum(axis=1) / norms**2),
            "jacobian_rank": np.linalg.matrix_rank(jacobians[0]),
        }
        # float64 on both sides: 1e-16 times some ten operations, on entries below 1
        for name, want in wanted.items():
            assert result.metrics[name] == pytest.approx(want, rel=1e-10, abs=1e-13), (given, name)
        shown = np.argsort(-scores[0], kind="stable")[:16]
        table = result.tables["jacobian"]
        place = shown[table["weight_rank"] - 1], shown[table["logit_rank"] - 1]
        assert table["derivative"] == pytest.approx(jacobians[0][place], rel=1e-6, abs=1e-7)  # float32
        spectrum = result.tables["eigenvalues"]
        drawn_values = spectrum["spectrum"][spectrum["quantity"] == "eigenvalue"]
        assert drawn_values == pytest.approx(eigenvalues[0][::-1], rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("logits = params.logits_std * scores\n    weights", "logits = scores\n    weights"),
        ("rows.append(torch.autograd.grad(weights[:, i].sum()", "rows.append(torch.autograd.grad(weights[:, 0].sum()"),
        ("scores[:, scores.shape[-1] - params.n_masked :]", "scores[:, : params.n_masked]"),
        ("scores.scatter(-1, top.indices[:, 1:]", "scores.scatter(-1, top.indices[:, :1]"),
        ("torch.sigmoid(leaf - math.log(leaf.shape[-1]))", "torch.sigmoid(leaf)"),
        ("jacobians.sum(dim=-1).norm(dim=-1)", "jacobians.norm(dim=-1).sum(dim=-1)"),
        ("float(eigenvalues.max())", "float(eigenvalues[0].max())"),
        ("np.median(eigenvalues[:, -1])", "np.median(eigenvalues.sum(-1))"),
        ("np.mean(1 - (diagonal_norms / norms) ** 2)", "np.mean((diagonal_norms / norms) ** 2)"),
        ("weights.argsort(descending=True)", "weights.argsort()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def curves_law(experiment: Experiment) -> None:
    """The curves are the medians of sixteen rows, redone entry by entry."""
    p = {"kv_len": 8, "n_rows": 64, "activation": "softmax", "tied_top": False, "n_masked": 0}
    result, (drawn, other) = recorded(experiment, seed=4, **p)
    norms, by_kv_len = result.tables["norms"], result.tables["by_kv_len"]
    for spread in np.unique(norms["logits_std"]):
        at = norms["logits_std"] == spread
        found = dict(zip(norms["quantity"][at], norms["norm_median"][at], strict=True))
        rows = np.array([jacobian_of(float(spread) * row, "softmax") for row in drawn[:16]])
        frobenius = np.median(np.linalg.norm(rows, axis=(1, 2)))
        wanted = {
            "frobenius": frobenius,
            "spectral": np.median(np.linalg.norm(rows, 2, axis=(1, 2))),
            "before_factor": spread * frobenius,
        }
        # float32 in the table; what lies below the floor is drawn on it
        assert found == pytest.approx({k: max(v, 1e-12) for k, v in wanted.items()}, rel=1e-5, abs=2e-15), spread
        for n in (4, 8, 64):
            at = (by_kv_len["logits_std"] == spread) & (by_kv_len["kv_len"] == n)
            rows = np.array([jacobian_of(float(spread) * row, "softmax") for row in other[:, :n]])
            want = max(np.median(np.linalg.norm(rows, axis=(1, 2))), 1e-12)
            assert by_kv_len["jacobian_norm_median"][at].item() == pytest.approx(want, rel=1e-5, abs=2e-15), (n, spread)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("spreads)[:, None, None]\n    frobenius", "1 / spreads)[:, None, None]\n    frobenius"),
        ("eigvalsh(matrices)[..., -1]", "eigvalsh(matrices)[..., 0]"),
        ("spreads * frobenius}", "frobenius / spreads}"),
        ("drawn[:, :n].clone()", "drawn[:, -n:].clone()"),
    ],
)
def test_curves_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(curves_law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=1, **params).metrics


def test_two_tied_keys_are_the_exact_half():
    result = run(get(NAME), kv_len=2, tied_top=True)
    assert result.tables["jacobian"]["derivative"].tolist() == [0.25, -0.25, -0.25, 0.25]
    # 1 - 1/2 and 1/4 are exact; the solver rounds
    assert result.metrics["eigenvalue_max"] == pytest.approx(0.5, abs=1e-15)
    assert result.metrics["off_diagonal_share"] == pytest.approx(0.5, abs=1e-12)
    assert result.metrics["jacobian_rank"] == 1


@pytest.mark.parametrize("kv_len", [4, 64, 256])
@pytest.mark.parametrize("spread", [0.0625, 1, 4, 64])
def test_no_eigenvalue_leaves_its_interval(kv_len, spread):
    """At least 0, at most 1/2, and each between two neighbouring weights (rank-one change of a diagonal)."""
    result = run(get(NAME), seed=2, kv_len=kv_len, logits_std=spread)
    assert result.metrics["eigenvalue_min"] > -1e-15
    assert result.metrics["eigenvalue_max"] <= 0.5 + 1e-15
    table = result.tables["eigenvalues"]
    weights, eigenvalues = (table["spectrum"][table["quantity"] == q] for q in ("weight", "eigenvalue"))
    assert np.all(eigenvalues <= weights * (1 + 1e-6) + 1e-7)
    assert np.all(eigenvalues[:-1] >= weights[1:] * (1 - 1e-6) - 1e-7)


@pytest.mark.parametrize("n_masked", [0, 5, 14])
def test_rank_counts_the_keys_that_have_a_weight(n_masked):
    assert metrics(kv_len=16, n_masked=n_masked)["jacobian_rank"] == 15 - n_masked
    assert metrics(kv_len=16, n_masked=n_masked, activation="sigmoid")["jacobian_rank"] == 16 - n_masked


def test_a_flat_row_has_one_over_n():
    """All weights 1/n: every eigenvalue but one is 1/n, the norm √(n - 1)/n. A spread of 1/16 moves them as much."""
    flat = metrics(kv_len=64, logits_std=0.0625)
    assert flat["jacobian_norm_median"] == pytest.approx(math.sqrt(63) / 64, rel=0.02)
    assert flat["spectral_norm_median"] == pytest.approx(1 / 64, rel=0.25)  # the largest of 64 normal logits is 2.4 s


def test_formulas_of_the_reference_are_those_of_torch():
    """softmax_jacobian and jacobian_norm, which the cards quote, against autograd in float64."""
    logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 4
    for row in logits:
        wanted = torch.autograd.functional.jacobian(lambda z: torch.softmax(z, 0), row)
        weights = torch.softmax(row, 0)
        # float64; the norm's square root doubles the relative error of what autograd subtracts
        torch.testing.assert_close(softmax_jacobian(weights), wanted, rtol=0, atol=1e-15)
        torch.testing.assert_close(jacobian_norm(weights), wanted.norm(), rtol=1e-9, atol=1e-15)


def test_sigmoid_ties_no_keys_together():
    found = metrics(activation="sigmoid", logits_std=2.0)
    assert found["off_diagonal_share"] == pytest.approx(0, abs=1e-12)
    assert found["eigenvalue_max"] <= 0.25
    assert found["shift_response"] > 0.1
    assert found["formula_error"] > 0.01  # the formula is that of the softmax


def test_saturated_norms_are_kept_far_below_rounding():
    sharp = metrics(logits_std=64.0)
    assert 1e-30 < sharp["jacobian_norm_median"] < 1e-5
    assert metrics(logits_std=64.0, tied_top=True)["jacobian_norm_median"] == pytest.approx(0.5, rel=1e-3)


def test_refuses_a_row_of_one_key():
    with pytest.raises(ParamsError, match="two_keys_left"):
        get(NAME).Params(kv_len=4, n_masked=3)
    get(NAME).Params(kv_len=4, n_masked=2)
