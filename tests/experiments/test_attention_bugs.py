"""attention_bugs against the same draws in numpy, one number at a time, and against what each test must find."""

import math

import numpy as np
import pytest
import torch

from engine.experiments.attention_bugs import BUGS, TESTS
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "attention_bugs"
SETTINGS = [
    {"batch": 2, "n_heads": 4, "seq_len": 7, "d_model": 8},
    {"batch": 1, "n_heads": 2, "seq_len": 5, "d_model": 6, "chunk_len": 2, "biases": "random", "logits_gain": 4.0},
    {"batch": 1, "n_heads": 4, "seq_len": 4, "d_model": 8, "chunk_len": 1},  # as many tokens as heads
]
# the slips that each test finds, at the default sizes with biases of zero
FOUND = {
    "output_shape": set(),
    "parameters_missing": {"no_bias"},
    "relative_error": set(BUGS) - {"corner", "no_bias"},
    "relative_error_one_head": {"axis", "late_mask", "no_mask"},
    "relative_error_one_token": set(),
    "relative_error_equal_tokens": {
        "by_view",
        "merge",
        "axis",
        "late_mask",
    },
    "future_gradient_max": set(BUGS) - {"scale", "corner", "no_bias"},
    "last_token_change": set(BUGS) - {"scale", "corner", "no_bias"},
    "chunks_error": set(BUGS) - {"scale", "no_bias"},
}


def by_hand(bug: str, x: np.ndarray, W: list[np.ndarray], b: list[np.ndarray], n_heads: int, past=None) -> np.ndarray:
    """One sequence, one number of a tensor at a time. Shapes: x (seq_len, d_model)."""
    n, d_model = x.shape
    d_k = d_model // n_heads
    b = [0 * each for each in b] if bug == "no_bias" else b

    def split(rows: np.ndarray) -> np.ndarray:
        heads = np.zeros((n_heads, n, d_k))
        for h in range(n_heads):
            for t in range(n):
                if bug == "by_view":  # the flat order of (seq_len, d_model) read as (n_heads, seq_len, d_k)
                    heads[h, t] = rows.ravel()[(h * n + t) * d_k : (h * n + t + 1) * d_k]
                else:
                    heads[h, t] = rows[t, h * d_k : (h + 1) * d_k]
        return heads

    q, k, v = (split(x @ W[i].T + b[i]) for i in range(3))
    if past is not None:
        if past:
            k, v = np.concatenate((past[0], k), axis=1), np.concatenate((past[1], v), axis=1)
        past[:] = k, v
    kv_len = k.shape[1]
    heads = np.zeros((n_heads, n, d_k))
    for h in range(n_heads):
        z = q[h] @ k[h].T / math.sqrt(d_model if bug == "scale" else d_k)
        seen = np.array([[j <= i + (0 if bug == "corner" else kv_len - n) for j in range(kv_len)] for i in range(n)])
        e = np.exp(z) if bug in ("late_mask", "no_mask") else np.where(seen, np.exp(z), 0)
        weights = e / e.sum(axis=0 if bug == "axis" else 1, keepdims=True)
        if bug == "late_mask":
            weights = np.where(seen, weights, 0)
        heads[h] = weights @ v[h]
    joined = heads.ravel().reshape(n, d_model) if bug == "merge" else np.concatenate(list(heads), axis=1)
    return joined @ W[3].T + b[3]


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params(**given).as_dict()
        n, n_heads = p["seq_len"], p["n_heads"]
        found_by_three = set()
        for bug in ("correct", *BUGS):
            result, draws = recorded(experiment, seed=6, bug=bug, **given)
            x, other, g = draws[:3]
            bounds = [math.sqrt(6 / (4 * p["d_model"]))] * 3 + [1 / math.sqrt(p["d_model"])]
            # the engine draws in float64 here; both sides multiply the same numbers
            W = [(2 * u - 1) * bound for u, bound in zip(draws[3:7], bounds, strict=True)]
            b = [each * (p["biases"] == "random") for each in draws[7:11]]
            W[0], b[0] = W[0] * p["logits_gain"], b[0] * p["logits_gain"]

            def attend(bug: str, tokens: np.ndarray, n_heads: int = n_heads, W=W, b=b) -> np.ndarray:
                return np.stack([by_hand(bug, each, W, b, n_heads) for each in tokens])

            out, equal = attend(bug, x), x[:, :1].repeat(n, axis=1)
            chunks = []
            for each in x:
                past: list[np.ndarray] = []
                steps = range(0, n, p["chunk_len"])
                chunks.append(
                    np.concatenate([by_hand(bug, each[s : s + p["chunk_len"]], W, b, n_heads, past) for s in steps])
                )
            changed = attend(bug, np.concatenate((x[:, :-1], other), axis=1))
            step = 1e-5  # central differences
            slopes = np.zeros((n, n))
            for s in range(n):
                moved = []
                for i in range(p["d_model"]):
                    up, down = x[:1].copy(), x[:1].copy()
                    up[0, s, i] += step
                    down[0, s, i] -= step
                    moved.append((attend(bug, up)[0] - attend(bug, down)[0]) @ g / (2 * step))
                slopes[:, s] = np.linalg.norm(moved, axis=0)
            count = sum(w.size for w in W) + (0 if bug == "no_bias" else sum(each.size for each in b))
            want = {
                "relative_error": distance(out, attend("correct", x)),
                "relative_error_one_head": distance(attend(bug, x, 1), attend("correct", x, 1)),
                "relative_error_one_token": distance(attend(bug, x[:, :1]), attend("correct", x[:, :1])),
                "relative_error_equal_tokens": distance(attend(bug, equal), attend("correct", equal)),
                "last_token_change": np.abs(changed - out)[:, :-1].max() / math.sqrt((out**2).mean()),
                "chunks_error": distance(np.stack(chunks), out),
                "layer_parameters": count,
                "parameters_missing": 4 * p["d_model"] if bug == "no_bias" else 0,
            }
            got = result.metrics
            # float64 on both sides, some hundred terms a sum; what is rounding on one side is rounding on the other
            assert {name: got[name] for name in want} == pytest.approx(want, rel=1e-9, abs=1e-13), (given, bug)
            # central differences with this step: their own error is near 1e-9
            assert got["future_gradient_max"] == pytest.approx(np.triu(slopes, 1).max(), rel=1e-5, abs=1e-8), bug
            table = result.tables["pairs"]
            drawn = np.array(table["gradient_log10"]).reshape(n, n)
            shown = slopes > 1e-6
            assert np.array_equal(drawn > -6, shown), bug
            np.testing.assert_allclose(10 ** drawn[shown], slopes[shown], rtol=1e-4)  # of the differences
            if max(want["relative_error"], want["parameters_missing"], np.triu(slopes, 1).max()) > 1e-8:
                found_by_three.add(bug)
        assert got["found_by_three_tests"] == len(found_by_three), given


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('if self.bug == "scale" else q.shape[-1]', 'if self.bug == "scale" else 1'),
        ("x.view(batch, seq_len, self.n_heads, d_k)", "x.view(batch, seq_len, d_k, self.n_heads).mT"),
        ('if self.bug != "merge":', "if False:"),
        ('self.bug == "corner" else kv_len - q_len', 'self.bug == "corner" else 0'),
        ("return logits.softmax(dim=-1) * keep", "return (logits * keep).softmax(dim=-1)"),
        ("dim=-2", "dim=-1"),
        ('if self.bug != "no_mask":', "if True:"),
        ("torch.cat((cache[1], v), dim=2)", "torch.cat((v, cache[1]), dim=2)"),
        ('(None, None) if bug == "no_bias" else', '(None, None) if bug == "correct" else'),
        ("slopes.triu(1).max()", "slopes.tril(-1).max()"),  # the past for the future
        ("(changed - out)[:, :-1]", "(changed - out)"),  # the replaced token itself
        ("one_head = copy(layer)", "one_head = layer"),
        ("one_head.num_heads, one_head.head_dim = 1, d", "pass"),
        ("matrices[0] *= params.logits_gain", "pass"),
        ("dtype=torch.bool).triu(1)", "dtype=torch.bool).triu(2)"),  # PyTorch's layer sees one key ahead
        ("equal = self.x[:, :1].expand_as(self.x)", "equal = self.x"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_each_test_finds_what_it_must_and_nothing_else():
    found: dict[str, set[str]] = {test: set() for test in TESTS}
    exact = {"future_gradient_max", "parameters_missing"}
    for bug in BUGS:
        metrics = run(get(NAME), seed=3, bug=bug).metrics
        for test in set(TESTS) - {"output_shape"}:
            # eight roundings of float64 for a comparison, nothing for the others
            if metrics[test] > (0 if test in exact else 8 * 2**-52):
                found[test].add(bug)
        assert metrics["tests_failed"] == sum(bug in FOUND[test] for test in TESTS)
        for test in TESTS:
            assert metrics[f"found_by_{test}"] == len(FOUND[test]), test
        assert metrics["found_by_three_tests"] == 7
        assert metrics["found_by_all_tests"] == len(BUGS)
    assert found == FOUND


@pytest.mark.parametrize("computed_in", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [{}, {"d_model": 128, "n_heads": 16, "seq_len": 32}, {"logits_gain": 16.0}, {"n_heads": 1}]
)
def test_the_correct_layer_passes_every_test(computed_in, sizes):
    for seed in range(5):
        assert run(get(NAME), seed=seed, bug="correct", computed_in=computed_in, **sizes).metrics["tests_failed"] == 0


def test_one_pass_as_a_single_chunk_checks_nothing():
    assert run(get(NAME), chunk_len=32).metrics["found_by_chunks_error"] == 0


def test_random_biases_let_every_comparison_miss_them():
    metrics = run(get(NAME), bug="no_bias", biases="random").metrics
    assert metrics["found_by_relative_error"] == 7
    assert metrics["relative_error_one_token"] > 0.1


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run(get(NAME))
    assert torch.equal(torch.get_rng_state(), before)
