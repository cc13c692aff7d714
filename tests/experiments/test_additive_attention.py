"""additive_attention against the moments of tanh, by quadrature, and against operations counted by hand."""

import math

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "additive_attention"


def additive_variance() -> float:
    """E[tanh² z] for z ~ N(0, 2), by Gauss-Hermite quadrature."""
    points, weights = np.polynomial.hermite_e.hermegauss(80)
    return float((weights * np.tanh(math.sqrt(2) * points) ** 2).sum() / weights.sum())


def operations(kind: str, d_k: int, kv_len: int) -> tuple[int, int]:
    """Operations for the logits of 64 queries, and the tanh among them."""
    pairs = 64 * kv_len
    if kind == "additive":
        projections = 2 * (64 + kv_len) * d_k * d_k
        return projections + pairs * d_k + pairs * d_k + 2 * pairs * d_k, pairs * d_k  # sum, tanh, product with v
    return 2 * pairs * d_k + (pairs if kind == "scaled_dot" else 0), 0


def law(experiment: Experiment) -> None:
    variance = {"additive": lambda d_k: additive_variance(), "dot": float, "scaled_dot": lambda d_k: 1.0}
    for kind, expected in variance.items():
        for d_k in (16, 64, 256):
            # logits of one draw share W, v and their rows: the spread over seeds gives the standard error
            seeds = [run(experiment, seed=s, kind=kind, d_k=d_k, batch=4).metrics for s in range(12)]
            squares = np.array([m["logits_std"] for m in seeds]) ** 2
            error = squares.std(ddof=1) / math.sqrt(len(seeds))
            assert abs(squares.mean() - expected(d_k)) <= 5 * error, (kind, d_k)
            assert (seeds[0]["flops"], seeds[0]["transcendental_count"]) == operations(kind, d_k, 64), (kind, d_k)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"inv_sqrt_d_k")', '"none")'),  # scale dropped
        (".tanh()", ""),  # not bounded any more
        (
            "projected_q, projected_k = q.shape[-2], q @ W_q.mT, k @ W_k.mT",
            "projected_q, projected_k = q.shape[-2], q, k",
        ),
        ("run.randn(*shape, d_k, 1) / root", "run.randn(*shape, d_k, 1)"),  # v of variance 1
        ("[..., :, None, :] + projected_k", "[..., :, None, :] * projected_k"),  # product for sum
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_logits_equal_the_formula_pair_by_pair():
    p = {"d_k": 6, "kv_len": 5, "batch": 1}
    g = torch.Generator().manual_seed(9)

    def normal(*shape):
        return torch.randn(*shape, generator=g).double().numpy()

    q, k = normal(64, 6), normal(5, 6)
    W_q, W_k, v = (normal(*shape) / math.sqrt(6) for shape in ((6, 6), (6, 6), (6, 1)))
    logits = np.array([[v[:, 0] @ np.tanh(W_q @ a + W_k @ b) for b in k] for a in q])
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    metrics = run(get(NAME), seed=9, dtype="float64", **p).metrics
    assert metrics["logits_std"] == pytest.approx(logits.std(ddof=1), rel=1e-12)  # float64 on both sides
    assert metrics["logits_abs_max"] == pytest.approx(np.abs(logits).max(), rel=1e-12)
    assert metrics["logits_abs_max"] <= np.abs(v).sum()
    assert metrics["weight_max_mean"] == pytest.approx(weights.max(axis=1).mean(), rel=1e-12)
    assert metrics["entropy_nats"] == pytest.approx(-(weights * np.log(weights)).sum(axis=1).mean(), rel=1e-12)
    assert metrics["entropy_share"] == pytest.approx(metrics["entropy_nats"] / math.log(5), rel=1e-12)


def test_blocks_of_queries_change_nothing():
    # 512 x 256 hidden units a query: eight queries at a time
    metrics = run(get(NAME), seed=2, d_k=512, kv_len=256, batch=1).metrics
    assert (metrics["flops"], metrics["transcendental_count"]) == operations("additive", 512, 256)
    assert metrics["logits_std"] == pytest.approx(
        math.sqrt(additive_variance()), rel=0.3
    )  # one draw of v: some 6 % of spread


def test_table_has_every_form_at_every_width():
    table = run(get(NAME), seed=3).tables["by_width"]
    dot = table["kind"] == "dot"
    # 1152 logits of two draws: the variance's relative error is some 10 % where rows are shared
    np.testing.assert_allclose(table["logits_std"][dot], np.sqrt(table["d_k"][dot]), rtol=0.35)
    additive = table["logits_std"][table["kind"] == "additive"]
    assert additive.max() < 1.5
