"""retrieval_ceiling against the formulas, with keys that reach the ceiling and a search that does not pass it."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, assert_stops_at_once, recorded, run

NAME = "retrieval_ceiling"
SETTINGS = [
    {"key_placement": "random_keys", "d_k": 8, "kv_len": 16, "logits_limit": 3.0},
    {"key_placement": "random_keys", "d_k": 8, "kv_len": 128, "logits_limit": 6.0},
    {"key_placement": "orthogonal_keys", "d_k": 16, "kv_len": 8, "logits_limit": 3.0},
    {"key_placement": "simplex_keys", "d_k": 8, "kv_len": 8, "logits_limit": 2.0},
    {"key_placement": "simplex_keys", "d_k": 4, "kv_len": 4, "logits_limit": 5.0},
    {"key_placement": "one_favourite", "d_k": 8, "kv_len": 32, "logits_limit": 4.0},
]


def ceiling(B, n):
    return 1 / (1 + (n - 1) * math.exp(-B * n / (n - 1)))


def favourite(B, n):
    return 1 / (1 + (n - 1) * math.exp(-2 * B))


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, drawn = recorded(experiment, seed=2, **p)
        B, n, d_k = p["logits_limit"], p["kv_len"], p["d_k"]
        metrics = result.metrics
        expected = {"found_ceiling": ceiling(B, n), "favourite_ceiling": favourite(B, n), "found_logits_max": B}
        if p["key_placement"] == "random_keys":
            k = drawn[0] / np.linalg.norm(drawn[0], axis=-1, keepdims=True)
            logits = B * k @ k.T
            weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            some = min(n, 64)
            expected["found_weight"] = math.exp(np.log(np.diag(weights))[:some].mean())
            expected["margin_mean"] = np.mean([(B - logits[i]).sum() / (n - 1) for i in range(some)])
        elif p["key_placement"] == "orthogonal_keys":
            expected |= {"found_weight": 1 / (1 + (n - 1) * math.exp(-B)), "margin_mean": B}
        elif p["key_placement"] == "simplex_keys":
            expected |= {"found_weight": ceiling(B, n), "margin_mean": B * n / (n - 1)}
        else:
            expected |= {"found_weight": favourite(B, n), "margin_mean": 2 * B}
        assert metrics == pytest.approx(expected, rel=1e-9), p
        table = result.tables["by_length"]
        for case, formula in (("favourite", favourite), ("each_found", ceiling)):
            rows = table["ceiling"] == case
            np.testing.assert_allclose(table["found_weight"][rows], [formula(B, n) for n in table["kv_len"][rows]])
        rows = table["ceiling"] == "random_keys"
        k = drawn[-1] / np.linalg.norm(drawn[-1], axis=-1, keepdims=True)
        for n, weight in zip(table["kv_len"][rows], table["found_weight"][rows], strict=True):
            logits = B * k[: min(n, 64)] @ k[:n].T
            log_weight = np.diagonal(logits) - np.log(np.exp(logits).sum(-1))
            assert weight == pytest.approx(math.exp(log_weight.mean()), rel=1e-9)
        assert d_k >= 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("math.exp(-limit * n / (n - 1))", "math.exp(-limit)"),
        ("math.exp(-2 * limit)", "math.exp(-limit)"),
        ("corners = torch.eye(n, dtype=torch.float64) - 1 / n", "corners = torch.eye(n, dtype=torch.float64)"),
        ("below = logits - logits.diagonal()[:, None]", "below = logits - logits.mean(dim=-1, keepdim=True)"),
        ("k = -first.repeat(n, 1)", "k = 0 * first.repeat(n, 1)"),
        ("return root * k[:MOST_QUERIES], root * k", "return root * k[:MOST_QUERIES].flip(0), root * k"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_search_comes_near_the_ceiling_and_not_above_it():
    p = {"key_placement": "searched_keys", "d_k": 8, "kv_len": 8, "logits_limit": 3.0, "search_steps": 400}
    m = run(get(NAME), seed=1, dtype="float64", **p).metrics
    assert 0.99 * m["found_ceiling"] < m["found_weight"] <= m["found_ceiling"]
    assert m["found_logits_max"] <= 3 * (1 + 1e-12)


def test_keys_that_do_not_fit_are_refused():
    for placement, kv_len in (("orthogonal_keys", 128), ("simplex_keys", 128), ("searched_keys", 512)):
        with pytest.raises(ParamsError):
            get(NAME).Params(key_placement=placement, d_k=64, kv_len=kv_len)


def test_a_stop_takes_effect_at_once():
    assert_stops_at_once(get(NAME), get(NAME).Params(key_placement="searched_keys", kv_len=8))
