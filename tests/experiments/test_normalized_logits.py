"""normalized_logits against the same formulas in numpy, float64, and against what a norm can and can't do."""

import math

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "normalized_logits"
SETTINGS = [
    {"norm": "none", "d_k": 8, "kv_len": 5, "q_std": 2.0, "tau": 0.5, "gain": 3.0},
    {"norm": "inv_sqrt_d_k", "d_k": 8, "kv_len": 5, "q_std": 0.5, "gain": 3.0},
    {"norm": "layer_norm_logits", "d_k": 8, "kv_len": 6, "q_std": 4.0, "tau": 2.0, "gain": 1.5},
    {"norm": "layer_norm_logits", "d_k": 8, "kv_len": 6, "gain": 1.5, "gain_std": 0.5},
    {"norm": "qk_norm", "d_k": 8, "kv_len": 5, "q_std": 2.0, "gain": 1.2, "tau": 1.5},
    {"norm": "cosine", "d_k": 8, "kv_len": 5, "q_std": 2.0, "tau": 0.07, "gain": 3.0},
]


def whiteboard(p: dict, seed: int, batch: int) -> dict[str, float]:
    """Every metric from the formulas, in numpy, on the numbers that the seed gives."""
    g = torch.Generator().manual_seed(seed)
    norm, d_k, n = p["norm"], p["d_k"], p["kv_len"]
    tau, gain = p.get("tau", 1.0), p.get("gain", 1.0)

    def normal(*shape):
        return torch.randn(*shape, generator=g).double().numpy()

    gains = gain * (1 + p.get("gain_std", 0.0) * normal(n))
    rows, raw, lengths = [], [], []
    for _ in range(batch):
        q, k = p.get("q_std", 1.0) * normal(64, d_k), normal(n, d_k)
        for query in q:
            qk = np.array([query @ key for key in k])
            raw.append(qk)
            lengths += [np.linalg.norm(query) * np.linalg.norm(key) for key in k]
            rows.append(
                {
                    "none": qk / tau,
                    "inv_sqrt_d_k": qk / math.sqrt(d_k) / tau,
                    "layer_norm_logits": gains * (qk - qk.mean()) / np.sqrt(qk.var() + 1e-5) / tau,
                    "qk_norm": gain**2
                    * qk
                    / (np.linalg.norm(query) * np.linalg.norm(k, axis=1))
                    * math.sqrt(d_k)
                    / tau,
                    "cosine": qk / (np.linalg.norm(query) * np.linalg.norm(k, axis=1)) / tau,
                }[norm]
            )
    logits, raw = np.array(rows), np.array(raw)
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    entropy = -(weights * np.log(weights)).sum(axis=1).mean()

    def largest_weight(row):
        return (np.exp(row) / np.exp(row).sum()).max()

    if norm == "layer_norm_logits":  # the extreme row: one number √(n-1) deviations up, at the largest gain
        extreme = np.full(n, -1 / math.sqrt(n - 1))
        extreme[np.abs(gains).argmax()] = math.sqrt(n - 1)
        aligned = opposed = extreme * gains / tau
    else:
        bound = {
            "none": max(lengths),
            "inv_sqrt_d_k": max(lengths) / math.sqrt(d_k),
            "qk_norm": gain**2 * math.sqrt(d_k),
            "cosine": 1,
        }[norm] / tau
        aligned, opposed = np.array([bound] + [0.0] * (n - 1)), np.array([bound] + [-bound] * (n - 1))
    return {
        "order_kept_share": (logits.argsort(axis=1) == raw.argsort(axis=1)).all(axis=1).mean(),
        "top_key_kept_share": (logits.argmax(axis=1) == raw.argmax(axis=1)).mean(),
        "logits_std": logits.std(),
        "logits_abs_max": np.abs(logits).max(),
        "logits_bound": np.abs(opposed).max(),
        "weight_max_mean": weights.max(axis=1).mean(),
        "weight_max_bound": largest_weight(opposed),
        "match_weight": largest_weight(aligned),
        "entropy_nats": entropy,
        "entropy_share": entropy / math.log(n),
    }


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        measured = run(experiment, seed=4, dtype="float64", batch=2, **p).metrics
        # float64 in another order: 1e-13; rms_norm's own epsilon (2e-16) is below that
        assert measured == pytest.approx(whiteboard(p, 4, 2), rel=1e-9, abs=1e-12), p
        assert measured["logits_abs_max"] <= measured["logits_bound"] * (1 + 1e-12), p  # a bound is a bound
        assert measured["weight_max_mean"] <= measured["weight_max_bound"], p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q, k = (params.gain * rms_norm", "q, k = (rms_norm"),  # gain of the norm dropped
        (
            "layer_norm(qk_product(q, k), position_gain.shape)",
            "layer_norm(qk_product(q, k).mT, q.shape[-2:-1]).mT",
        ),  # LN over the queries
        (
            ' if norm == "none" else "inv_sqrt_d_k") / params.tau',
            ' if norm == "none" else "inv_sqrt_d_k")',
        ),  # temperature dropped
        ('"cosine", tau=params.tau', '"cosine"'),
        ("torch.where(match > 0, match, -match[0]), match", "match, match"),  # opposed keys taken for orthogonal ones
        ("order[:, -1:]", "order[:, :1]"),  # the last key for the first
        ("- mean**2", ""),  # mean square for variance
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_layer_norm_keeps_the_order_in_float32_and_forgets_the_spread():
    flat, wide = (run(get(NAME), seed=1, norm="layer_norm_logits", q_std=q_std).metrics for q_std in (0.0625, 64.0))
    assert flat["order_kept_share"] == wide["order_kept_share"] == 1.0
    assert flat["weight_max_mean"] == pytest.approx(
        wide["weight_max_mean"], rel=1e-3
    )  # LayerNorm's epsilon: 1e-5 beside a variance of 0.25
    free = [
        run(get(NAME), seed=1, norm="inv_sqrt_d_k", q_std=q_std).metrics["weight_max_mean"] for q_std in (0.0625, 64.0)
    ]
    assert free[1] > 5 * free[0]


def test_norm_on_q_and_k_changes_the_order_and_two_keys_share_one_with_an_equal_length():
    assert run(get(NAME), seed=1, norm="qk_norm").metrics["order_kept_share"] < 0.1
    # one coordinate: the norm leaves only signs, all keys tie or differ by sign
    assert run(get(NAME), seed=1, norm="cosine", d_k=1).metrics["logits_abs_max"] == pytest.approx(1, rel=1e-6)


def test_tables_show_the_chosen_norm_among_all_and_sum_to_one():
    result = run(get(NAME), seed=2, kv_len=16)
    ranks = result.tables["by_rank"]
    for norm in set(ranks["norm"]):
        weights = ranks["weight_mean"][ranks["norm"] == norm]
        assert weights.sum() == pytest.approx(1, rel=1e-5)
        assert np.all(np.diff(weights) <= 0)
    spread = result.tables["by_spread"]
    assert len(set(spread["norm"])) == 5
    rows = (spread["norm"] == "layer_norm_logits") & (spread["q_std"] == 1)
    # 128 queries here, 512 there; the largest of 16 normal logits' weights spreads by some 0.12 from query to query
    assert spread["weight_max_mean"][rows][0] == pytest.approx(
        result.metrics["weight_max_mean"], abs=5 * 0.12 / math.sqrt(128)
    )
