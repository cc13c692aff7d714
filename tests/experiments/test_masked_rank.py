"""masked_rank against the same weights worked out row by row in numpy, with numpy's own rank and determinant."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.engine.test_masks import by_position
from tests.harness import assert_law_catches, recorded, run

NAME = "masked_rank"
SETTINGS = [
    {"seq_len": 8},
    {"seq_len": 8, "mask": "no_mask"},
    {"seq_len": 16, "mask": "prefix", "prefix_tokens": 5},
    {"seq_len": 8, "mask": "strict", "qk_size": 0.0},
    {"seq_len": 16, "d_v": 4, "qk_size": 0.5},
    {"seq_len": 8, "mask": "no_mask", "n_layers": 3},
    {"seq_len": 8, "n_layers": 3},
]


def attention_weights(mask: str, prefix: int, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    n = len(q)
    weights = np.zeros((n, n))
    for t in range(n):
        row = [math.exp(q[t] @ k[s] / math.sqrt(q.shape[1])) * by_position(mask, t, s, prefix) for s in range(n)]
        weights[t] = np.array(row) / sum(row) if sum(row) else row
    return weights


def reference(p: dict, draws: list[np.ndarray]) -> dict[str, float]:
    n_layers, mask, size = p.get("n_layers", 1), p.get("mask", "causal"), p.get("qk_size", 1.0)
    layers = [
        attention_weights(mask, p.get("prefix_tokens", 1), size * draws[2 * i], size * draws[2 * i + 1])
        for i in range(n_layers)
    ]
    product = np.linalg.multi_dot(layers[::-1]) if n_layers > 1 else layers[0]
    v, n = draws[-1], len(product)
    singular = np.linalg.svd(product, compute_uv=False)
    with_self = np.linalg.svd(product + np.eye(n), compute_uv=False)
    return {
        "log10_determinant": max(sum(np.linalg.slogdet(a)[1] for a in layers) / math.log(10), -1e4),
        "condition_number": min(singular[0] / singular[-1], 1e18) if singular[-1] else 1e18,
        "float32_rank": np.linalg.matrix_rank(product, tol=singular[0] * n * np.finfo(np.float32).eps),
        "weights_rank": np.linalg.matrix_rank(product),
        "weights_strong": np.linalg.matrix_rank(product, tol=0.01 * singular[0]),
        "context_rank": np.linalg.matrix_rank(product @ v),
        "residual_rank": np.linalg.matrix_rank(product + np.eye(n)),
        "residual_condition": with_self[0] / with_self[-1],
        "own_weight_mean": np.mean([np.diag(layer).mean() for layer in layers]),
    }


@pytest.mark.filterwarnings("ignore:divide by zero")
def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=3, **p)
        expected = reference(p, draws)
        # float64 rounds at 1e-16, and a condition number of up to 1e6 here makes 1e-9 of it
        for name, value in result.metrics.items():
            if name == "condition_number" and expected[name] > 1e9:
                assert value > 1e9, (p, name)  # of three layers: the smallest value is close to rounding
            else:
                assert value == pytest.approx(expected[name], rel=1e-6), (p, name)
        table = result.tables["context"]
        chosen = table["singular_share"][table["mask"] == p.get("mask", "causal")]
        assert (chosen > 1e-12).sum() == expected["context_rank"], p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weights = _weights(logits, keep)", "weights = _weights(logits.mT, keep)"),
        ("weights if layer == 0 else weights @ products[mask]", "weights"),
        ("mask_logits(logits, keep | ~full)) * full", "mask_logits(logits, keep | ~full))"),
        ("weights.diagonal().log10().sum()", "weights.diagonal().log10().mean()"),
        ("logabsdet) / math.log(10)", "logabsdet)"),
        ("torch.eye(n, dtype=v.dtype)", "torch.zeros_like(products[params.mask])"),
        ("prefix_len=min(params.prefix_tokens, n)", "prefix_len=1"),
        ("(params.qk_size * run.randn(n, params.d_k)", "(run.randn(n, params.d_k)"),
        ('"weights_strong": _above(chosen, STRONG)', '"weights_strong": _above(chosen, 0.2)'),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_equal_logits_average_the_prefix():
    metrics = run(get(NAME), qk_size=0.0, seq_len=64).metrics
    # row t of the causal weights is 1/t: the determinant is 1/64!, and its rank full without a look at any token
    assert metrics["log10_determinant"] == pytest.approx(-math.log10(math.factorial(64)), rel=1e-9)
    assert metrics["weights_rank"] == metrics["float32_rank"] == 64
    assert metrics["own_weight_mean"] == pytest.approx(np.mean([1 / t for t in range(1, 65)]))
    unmasked = run(get(NAME), qk_size=0.0, seq_len=64, mask="no_mask").metrics
    assert unmasked["weights_rank"] == unmasked["context_rank"] == 1
    assert unmasked["residual_rank"] == 64
    assert unmasked["residual_condition"] == pytest.approx(2)  # I + 11'/n has the values 1 and 2


def test_a_strict_mask_is_singular():
    metrics = run(get(NAME), qk_size=0.0, seq_len=64, mask="strict").metrics
    assert metrics["log10_determinant"] == -1e4  # stands for 0
    assert metrics["weights_rank"] == 63


@pytest.mark.parametrize("d_v", [1, 4, 16])
def test_the_output_has_the_rank_of_the_values(d_v):
    for mask in ("causal", "no_mask", "prefix"):
        assert run(get(NAME), seed=1, mask=mask, d_v=d_v).metrics["context_rank"] == d_v


def test_refuses_what_takes_too_long():
    with pytest.raises(ParamsError, match="too_many_weight_products"):
        get(NAME).Params(seq_len=512, n_layers=32)
