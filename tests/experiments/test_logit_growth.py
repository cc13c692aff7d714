"""logit_growth against the formulas, written out query by query in numpy."""

import math

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "logit_growth"
RULES = ("inv_sqrt_d_k", "qk_norm", "qk_layer_norm", "cosine_learned", "softcap")
SETTINGS = [
    {"logit_rule": rule, "d_k": 8, "kv_len": 5, "qk_weight_gain": 2.0, "gain": 1.5, "logit_threshold": 3.0}
    for rule in RULES
]
EPSILON = 1e-6


def rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)


def logits_of(rule, q, k, p):
    n, gain, cap = p["d_k"], p["gain"], p["logit_threshold"]
    rows = np.array([[query @ key for key in k] for query in q])
    lengths = np.outer(np.linalg.norm(q, axis=-1), np.linalg.norm(k, axis=-1))
    if rule == "qk_norm":
        return gain**2 * rms(q) @ rms(k).T / math.sqrt(n)
    if rule == "qk_layer_norm":
        q, k = (x - x.mean(-1, keepdims=True) for x in (q, k))
        return gain**2 * rms(q) @ rms(k).T / math.sqrt(n)
    if rule == "cosine_learned":
        return gain**2 * math.sqrt(n) * rows / lengths
    raw = rows / math.sqrt(n)
    return cap * np.tanh(raw / cap) if rule == "softcap" else raw


def rows_of(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights, -(weights * np.log(weights)).sum(-1)


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = run(experiment, seed=4, dtype="float64", **p)
        g = torch.Generator().manual_seed(4)
        x_q, x_k, W_q, W_k, spread = (
            torch.randn(*shape, generator=g).double().numpy()
            for shape in ((64, 128), (5, 128), (128, 8), (128, 8), (64, 1))
        )
        q = np.exp(0.5 * spread) * (rms(x_q) @ W_q) / math.sqrt(128)
        k = rms(x_k) @ W_k / math.sqrt(128)
        logits = logits_of(p["logit_rule"], 2 * q, 2 * k, p)
        weights, entropy = rows_of(logits)
        cosine = logits_of("cosine_learned", q, k, p)
        expected = {
            "logits_abs_max": np.abs(logits).max(),
            "entropy_share": entropy.mean() / math.log(5),
            "weight_max_mean": weights.max(-1).mean(),
            "logits_std": logits.std(ddof=1),
            "length_entropy_correlation": np.corrcoef(np.log(np.linalg.norm(q, axis=-1)), entropy)[0, 1],
            "difference_from_cosine": np.abs(logits - cosine).max(),
        }
        assert result.metrics == pytest.approx(expected, rel=1e-9, abs=1e-12), p  # float64 in another order
        table = result.tables["by_qk_weight_gain"]
        assert set(table["logit_rule"]) == set(RULES) - {"cosine_learned"}
        columns = ("logit_rule", "qk_weight_gain", "logits_abs_max", "entropy_share")
        for rule, gain, largest, share in zip(*(table[name] for name in columns), strict=True):
            drawn = logits_of(rule, gain * q, gain * k, p)
            assert largest == pytest.approx(np.abs(drawn).max(), rel=1e-9)
            # weights below the smallest float64 count 0 on both sides
            with np.errstate(divide="ignore", invalid="ignore"):
                row = np.exp(drawn - drawn.max(-1, keepdims=True))
                row /= row.sum(-1, keepdims=True)
                entropies = -np.where(row > 0, row * np.log(row), 0).sum(-1)
            assert share == pytest.approx(entropies.mean() / math.log(5), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q, k = params.gain * _rms(q), params.gain * _rms(k)", "q, k = _rms(q), _rms(k)"),
        ('norm_statistics(x, "layer_norm")', 'norm_statistics(x, "rms_norm")'),
        ("unit_norm(q) @ unit_norm(k).mT * scale", "unit_norm(q) @ unit_norm(k).mT"),
        ("(logits / params.logit_threshold).tanh()", "(logits / params.logit_threshold).clamp(-1, 1)"),
        ("params.qk_weight_gain * q, params.qk_weight_gain * k", "params.qk_weight_gain * q, k"),
        ("lengths * (x_q @ W_q)", "(x_q @ W_q)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_growth_is_the_square_without_a_norm_and_none_with_one():
    raw, normed = (
        [
            run(get(NAME), seed=2, dtype="float64", logit_rule=rule, qk_weight_gain=g).metrics["logits_abs_max"]
            for g in (1, 8)
        ]
        for rule in ("inv_sqrt_d_k", "qk_norm")
    )
    assert raw[1] == pytest.approx(64 * raw[0], rel=1e-12)
    assert normed[1] == pytest.approx(normed[0], rel=1e-5)  # the epsilon of the norm


def test_without_a_spread_of_lengths_nothing_correlates_with_a_constant():
    m = run(get(NAME), length_spread=0.0, d_k=2, kv_len=2, logit_rule="cosine_learned").metrics
    assert math.isfinite(m["length_entropy_correlation"])
