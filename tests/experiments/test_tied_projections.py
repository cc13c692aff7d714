"""tied_projections against the same layer in numpy, written out, and against what is known of Gram matrices."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "tied_projections"
SETTINGS = [
    {},
    {"projections": "separate", "d_k": 6, "seq_len": 5, "mask": "causal"},
    {"projections": "symmetric", "d_k": 5, "seq_len": 7, "mask": "strict"},
    {"projections": "separate", "d_k": 4, "seq_len": 6, "rope": True, "qk_lengths": "unit_keys"},
    {"projections": "tied", "d_k": 8, "seq_len": 6, "qk_lengths": "unit_keys", "mask": "no_self"},
    {"projections": "tied", "d_k": 8, "seq_len": 9, "qk_lengths": "unit_both", "previous_bias": 3.0},
    {"projections": "symmetric", "d_k": 4, "seq_len": 6, "rope": True, "mask": "causal", "previous_bias": 1.0},
    {"projections": "tied", "d_k": 1, "seq_len": 4, "weight_std": 0.5},
    {"projections": "separate", "d_model": 1024, "d_k": 2, "seq_len": 256, "batch": 16},  # several chunks
]


def whiteboard(params, draws: list[np.ndarray]) -> dict[str, float]:
    """The metrics from loops over sequences, queries and keys, on the numbers that were drawn."""
    p, n = params, params.seq_len
    W_q, W_k = p.weight_std * draws[0], p.weight_std * draws[1]
    signs = np.array([1.0 if i < math.ceil(p.d_k / 2) else -1.0 for i in range(p.d_k)])
    W_k = {"tied": W_q, "symmetric": W_q * signs, "separate": W_k}[p.projections]
    M = W_q @ W_k.T
    all_logits, all_weights, visible = [], [], []
    for x in np.concatenate(draws[2:]):
        q, k = x @ W_q, x @ W_k
        if p.qk_lengths != "as_projected":
            k = k / np.sqrt((k**2).mean(axis=1, keepdims=True))
        if p.qk_lengths == "unit_both":
            q = q / np.sqrt((q**2).mean(axis=1, keepdims=True))
        if p.rope:
            pairs = p.d_k // 2
            theta = np.exp(-math.log(1e4) * np.arange(pairs) / pairs)
            turn = np.exp(1j * np.outer(np.arange(n), theta))
            q, k = (turn * (y[:, :pairs] + 1j * y[:, pairs:]) for y in (q, k))
        logits = np.real(q @ np.conj(k).T) / math.sqrt(p.d_k)
        weights = np.zeros((n, n))
        for i in range(n):
            if i:
                logits[i, i - 1] += p.previous_bias
            seen = list(range(i + 1)) if p.mask in ("causal", "strict") else list(range(n))
            if p.mask in ("no_self", "strict"):
                seen = [j for j in seen if j != i] or [i]
            weights[i, seen] = np.exp(logits[i, seen]) / np.exp(logits[i, seen]).sum()
            visible.append(len(seen))
        all_logits.append(logits)
        all_weights.append(weights)
    logits, weights = np.array(all_logits), np.array(all_weights)
    own = np.array([w[i, i] for w in weights for i in range(n)])
    spectrum = np.linalg.eigvals((logits[0] + logits[0].T) / 2).real
    return {
        "self_weight_mean": own.mean(),
        "self_weight_times_uniform": (own * np.array(visible)).mean(),
        "logits_asymmetry": np.abs(logits - logits.transpose(0, 2, 1)).max() / np.sqrt((logits**2).mean()),
        "weights_asymmetry": np.abs(weights - weights.transpose(0, 2, 1)).max(),
        "self_is_top_share": np.mean([w[i].argmax() == i for w in weights for i in range(n)]),
        "self_logit_mean": np.mean([s[i, i] for s in logits for i in range(n)]),
        "previous_weight_mean": np.mean([w[i, i - 1] for w in weights for i in range(1, n)]),
        "logits_eigenvalue_min": spectrum.min() / np.abs(spectrum).max(),
        "logits_eigenvalue_max": spectrum.max() / np.abs(spectrum).max(),
        "symmetric_share": (((M + M.T) / 2) ** 2).sum() / (M**2).sum(),
        "qk_parameters": W_q.size * (2 if p.projections == "separate" else 1),
    }


def law(experiment: Experiment) -> None:
    for setting in SETTINGS:
        result, draws = recorded(experiment, seed=4, **setting)
        expected = whiteboard(experiment.Params(**setting), draws)
        # float64 on both sides, but for RoPE's angles, which are float32: 1e-7 of angles below 256
        assert result.metrics == pytest.approx(expected, rel=1e-6, abs=1e-6), setting


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("keep[0, 0] = params.mask", "keep[0, 0] = not params.mask"),  # the first token has nothing to see
        ("signs[(like.shape[-1] + 1) // 2 :] = -1", "signs[1:] = -1"),
        ("k = math.sqrt(params.d_k) * unit_norm(k)", "k = unit_norm(k)"),  # another temperature
        ("q, k = rotate(q, angles), rotate(k, angles)", "q = rotate(q, angles)"),
        ("logits[..., at, at - 1]", "logits[..., at - 1, at]"),  # the next token, not the previous one
        ("diagonal(offset=-1, dim1", "diagonal(offset=1, dim1"),
        ("trace = (across * across.mT)", "trace = (across * across)"),
        ('if params.mask in ("causal", "strict")', 'if params.mask in ("causal",)'),
        ("return x @ W_other", "return q"),  # separate projections that are tied
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("more", [{}, {"rope": True}, {"qk_lengths": "unit_both"}, {"d_k": 4}, {"seq_len": 128}])
def test_tied_logits_are_a_gram_matrix(more):
    for seed in range(5):
        m = run(get(NAME), seed=seed, **more).metrics
        assert m["logits_asymmetry"] < 1e-5  # float32 rounding of sums of d_k terms, in units of a typical logit
        assert m["logits_eigenvalue_min"] > -1e-12  # float64; where d_k < seq_len the smallest are exactly 0


def test_keys_of_one_length_make_every_token_its_own_favourite_and_break_the_symmetry():
    m = run(get(NAME), qk_lengths="unit_keys").metrics
    assert m["self_is_top_share"] == 1  # Cauchy-Schwarz: cosines of other tokens are below 1
    assert m["logits_asymmetry"] > 0.5
    # and separate projections know no such favourite
    assert run(get(NAME), qk_lengths="unit_keys", projections="separate").metrics["self_is_top_share"] < 0.1


def test_without_length_weights_are_equal_and_the_token_itself_stands_out_as_it_grows():
    table = run(get(NAME)).tables["by_spread"]
    own = {name: table["self_weight_mean"][table["projections"] == name] for name in set(table["projections"])}
    assert np.all(np.diff(own["tied"]) > 0)
    assert own["tied"][0] == pytest.approx(1 / 32, rel=0.5)  # q of a quarter: |q|²/√d_k is 1/4
    assert own["tied"][-1] > 0.8 > 0.2 > own["separate"][-1]
    at = table["coordinate_std"][:8] == 1  # the default's spread, on 4 of its 8 sequences
    assert own["tied"][at][0] == pytest.approx(run(get(NAME), batch=4).metrics["self_weight_mean"], rel=1e-5)


def test_refuses_pairs_of_an_odd_width():
    with pytest.raises(ParamsError, match="rope_needs_pairs"):
        get(NAME).Params(rope=True, d_k=1)
