"""rope_bugs against rotation matrices written out in full, one token at a time; which test must find which slip."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.experiments.rope_bugs import BUGS, OTHER_ENCODINGS, TESTS
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "rope_bugs"
SETTINGS = [
    {"n_heads": 2, "n_kv_heads": 1, "d_k": 8, "rotary_dims": 4, "seq_len": 6, "padding": 2, "position_shift": 32},
    {"n_heads": 4, "n_kv_heads": 2, "d_k": 4, "rotary_dims": 4, "seq_len": 5, "decoded_tokens": 1, "padding": 1},
    {"d_k": 8, "rotary_dims": 8, "seq_len": 7, "decoded_tokens": 3, "padding": 3, "base": 100.0, "position_shift": 2},
]
# the slips that each test finds at the default sizes
NOT_RELATIVE = {"mixed_pairing", "repeated_angles", "no_minus", "bfloat16_angles", "rotated_v"}
OF_THE_CACHE = {"no_offset", "turned_twice", "rescaled_base"}
FOUND = {
    "output_shape": set(),
    "length_change": {"repeated_angles", "no_minus"},
    "first_token_change": {"heads_for_tokens"},
    "shift_change": NOT_RELATIVE,
    "decoding_error": OF_THE_CACHE | {"heads_for_tokens"},
    "padded_error": OF_THE_CACHE | {"heads_for_tokens", "padding_gap"},
    "reference_error": set(BUGS) - OF_THE_CACHE - {"padding_gap"},
    "far_error": set(BUGS) - OF_THE_CACHE - {"padding_gap"},
}


def angle(bug: str, t: int, base: float, exponent: float) -> float:
    if bug != "bfloat16_angles":
        return t * base**-exponent
    low = torch.tensor(t).bfloat16() * torch.tensor(base**-exponent).bfloat16()
    return low.double().item()


def matrix(bug: str, p: dict, t: int, base: float, of_keys: bool = False) -> np.ndarray:
    """What multiplies a head's vector at position t."""
    d_k = p["d_k"]
    dims = d_k if bug == "whole_head" else p["rotary_dims"]
    width = d_k if bug == "head_width_exponent" else dims
    base = 10_000 if bug == "default_base" else base
    R = np.eye(d_k)
    for j in range(dims // 2):
        neighbours = bug == "other_pairing" or (bug == "mixed_pairing" and of_keys)
        a, b = (2 * j, 2 * j + 1) if neighbours else (j, j + dims // 2)
        # a table made for neighbours has the angle of pair i // 2 at place i
        of_a, of_b = (a // 2, b // 2) if bug == "repeated_angles" else (j, j)
        A, B = (angle(bug, t, base, 2 * i / width) for i in (of_a, of_b))
        R[a, a], R[a, b] = math.cos(A), -math.sin(A)
        R[b, a], R[b, b] = math.sin(B), math.cos(B)
        if bug in ("no_minus", "backwards"):
            R[a, b] = math.sin(A)
        if bug == "backwards":
            R[b, a] = -math.sin(B)
    return R


def attend(bug: str, p: dict, q, k, v, sizes: list[int], pad: int = 0, first: int = 0):
    """One text in calls of these sizes. Shapes: q (n_heads, n, d_k); returns out, raw logits, turned q and k."""
    n_heads, n, d_k = q.shape
    n_kv_heads = len(k)
    out, logits = np.zeros_like(q), np.zeros((n_heads, n, n))
    turned_q, keys, values = np.zeros_like(q), np.zeros_like(k), v.copy()
    start = 0
    for size in sizes:
        base = p["base"] * (4 if bug == "rescaled_base" and start else 1)
        skip = 0 if bug == "columns_counted" or (bug == "padding_gap" and start == 0) else pad

        def place(column: int, head: int, start=start, skip=skip) -> int:
            counted = column - start if bug == "no_offset" else column
            if bug == "heads_for_tokens":
                return max(start - skip, 0) + first + head
            return max(counted - skip, 0) + first

        for g in range(n_kv_heads):
            if bug == "turned_twice" and start:
                for c in range(start):
                    keys[g, c] = matrix(bug, p, max(c - skip, 0) + first, base) @ keys[g, c]
            for c in range(start, start + size):
                keys[g, c] = matrix(bug, p, place(c, g), base, of_keys=True) @ k[g, c]
                if bug == "rotated_v":
                    values[g, c] = matrix(bug, p, place(c, g), base) @ v[g, c]
        for h in range(n_heads):
            g = h // (n_heads // n_kv_heads)
            for c in range(start, start + size):
                turned_q[h, c] = matrix(bug, p, place(c, h), base) @ q[h, c]
                seen = [j for j in range(start + size) if j == c or pad <= j < c]
                for j in range(start + size):
                    logits[h, c, j] = turned_q[h, c] @ keys[g, j] / math.sqrt(d_k)
                w = np.exp(logits[h, c, seen])
                out[h, c] = (w / w.sum()) @ values[g, seen]
        start += size
    return out, logits, turned_q, keys


def distance(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def lengths(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x, axis=-1)


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params(**given).as_dict()
        n, pad, moved = p["seq_len"], p["padding"], p["position_shift"]
        calls = [n - p["decoded_tokens"]] + [1] * p["decoded_tokens"]
        failed = dict.fromkeys(TESTS[1:], 0)
        for bug in ("correct", "columns_counted", *BUGS):
            result, draws = recorded(experiment, seed=6, bug=bug, **given)
            q, k, v = draws
            text, short = [x[0] for x in (q, k, v)], [x[1][:, : n - pad] for x in (q, k, v)]
            padded = [np.concatenate((x[1][:, n - pad :], x[1][:, : n - pad]), axis=1) for x in (q, k, v)]
            reference, true_logits, *_ = attend("correct", p, *text, [n])
            out, logits, turned_q, turned_k = attend(bug, p, *text, [n])
            far, _, far_q, far_k = attend(bug, p, *text, [n], first=moved)
            decoded, decoded_logits, *_ = attend(bug, p, *text, calls)
            turned = [(turned_q, text[0]), (turned_k, text[1]), (far_q, text[0]), (far_k, text[1])]
            alone = attend(bug, p, *short, [n - pad])[0]
            wanted = {
                "reference_error": distance(out, reference),
                "far_error": distance(far, reference),
                "shift_change": distance(far, out),
                "decoding_error": distance(decoded, out),
                "padded_error": distance(attend(bug, p, *padded, calls, pad=pad)[0][:, pad:], alone),
                "length_change": max(abs(lengths(got) / lengths(x) - 1).max() for got, x in turned),
                "first_token_change": max(distance(got[:, 0], x[:, 0]) for got, x in turned[:2]),
            }
            got = {name: result.metrics[name] for name in wanted}
            # float64 on both sides, some dozen terms a sum, angles of up to a thousand radians
            assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12), (given, bug)
            for test in failed:
                failed[test] += bug in BUGS and wanted[test] > 1e-10

            size = math.sqrt((true_logits**2).mean())
            error = np.tril(np.sqrt(((decoded_logits - true_logits) ** 2).mean(axis=0))) / size
            drawn = result.tables["pairs"]["logit_difference"].reshape(n, n)
            np.testing.assert_allclose(drawn, error, rtol=1e-9, atol=1e-12)
            if bug in OTHER_ENCODINGS:
                squares = ((logits - true_logits) ** 2).mean(axis=0)
                by_distance = [math.sqrt(np.diagonal(squares, -r).mean()) / size for r in range(n)]
                table = result.tables["distances"]
                shown = table["logit_difference"][table["bug"] == bug]
                np.testing.assert_allclose(shown, by_distance, rtol=1e-9, atol=1e-12)
        # what slips have in common is computed once: each count is that of the runs in which the slip was chosen
        assert {test: result.metrics[f"found_by_{test}"] for test in failed} == failed, given


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('0 if self.bug == "no_offset" else cached', "cached"),
        ('(self.bug == "padding_gap" and not cache)', '(self.bug == "padding_gap" and bool(cache))'),
        ("RESCALED * self.params.base if", "self.params.base if"),
        ('if self.bug == "rotated_v":', "if False:"),
        ('if self.bug == "turned_twice" and cache:', "if False:"),
        ('bug == "mixed_pairing" and of_keys', 'bug == "mixed_pairing"'),
        ("even * cos - odd * sin", "even * cos + odd * sin"),
        ("exchanged = torch.cat((second, first), dim=-1)", "exchanged = torch.cat((-second, first), dim=-1)"),
        ("exchanged = torch.cat((second, -first), dim=-1)", "exchanged = torch.cat((-second, first), dim=-1)"),
        ("exchanged = torch.cat((-second, first), dim=-1)", "exchanged = torch.cat((second, -first), dim=-1)"),
        ("angles.repeat_interleave(2, dim=-1) if", "torch.cat((angles, angles), dim=-1) if"),
        ("if self.bug in OWN_TABLES:", 'if self.bug == "heads_for_tokens":'),  # one table for nearly all
        ("if bug in ONLY_WITH_A_CACHE:", 'if bug != "heads_for_tokens":'),  # one pass for nearly all
        ("exact_angles(at, params.d_k, base)[..., : dims // 2]", "exact_angles(at, dims, base)"),
        ('BASE if bug == "default_base" else base', "base"),
        ('params.d_k if bug == "whole_head" else params.rotary_dims', "params.rotary_dims"),
        ("positions[:, :1, None] + torch.arange(n_heads)[:, None]", "positions[:, None]"),
        ("real | (keys == queries)", "real | (keys <= queries)"),  # padding is seen
        ("x[1].roll(params.padding, dims=1)", "x[1].roll(-params.padding, dims=1)"),
        ("rounded_angles(at, dims, base, torch.bfloat16)", "rounded_angles(at, dims, base, torch.float32)"),
        ("q.unflatten(1, (k.shape[1], -1))", "q.unflatten(1, (-1, k.shape[1])).transpose(1, 2)"),
        ("dims, params.base)\n", "dims, 2 * params.base)\n"),  # of the reference
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_each_test_finds_what_it_must_and_nothing_else():
    for seed in range(3):
        for bug in ("correct", "columns_counted", *BUGS):
            metrics = run(get(NAME), seed=seed, bug=bug).metrics
            # eight roundings at angles of up to 1012 radians; the quietest slip is above 1e-6
            found = {test for test in TESTS[1:] if metrics[test] > 2e-12}
            assert found == {test for test in TESTS if bug in FOUND[test]}, bug
            assert metrics["tests_failed"] == len(found), bug
            for test in TESTS:
                assert metrics[f"found_by_{test}"] == len(FOUND[test]), test
    properties = set().union(*(FOUND[test] for test in TESTS if test not in ("reference_error", "far_error")))
    assert set(BUGS) - properties == set(OTHER_ENCODINGS)
    assert metrics["found_by_properties"] == len(properties)
    assert metrics["found_by_two_tests"] == metrics["found_by_all_tests"] == len(BUGS)


@pytest.mark.parametrize("bug", ["correct", "columns_counted"])
@pytest.mark.parametrize("computed_in", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"n_heads": 8, "n_kv_heads": 8, "d_k": 64, "rotary_dims": 64, "seq_len": 32, "position_shift": 16384},
        {"padding": 8, "decoded_tokens": 3},
        {"d_k": 2, "rotary_dims": 2, "n_heads": 1, "n_kv_heads": 1},
    ],
)
def test_what_is_no_slip_passes_every_test(bug, computed_in, sizes):
    for seed in range(3):
        assert run(get(NAME), seed=seed, bug=bug, computed_in=computed_in, **sizes).metrics["tests_failed"] == 0


def test_what_hides_a_slip():
    full = run(get(NAME), rotary_dims=16).metrics
    assert full["found_by_reference_error"] == 9  # the whole head is turned: two slips are none
    assert run(get(NAME), base=10_000).metrics["found_by_reference_error"] == 10
    assert run(get(NAME), padding=0).metrics["found_by_padded_error"] == 4
    assert run(get(NAME), decoded_tokens=0).metrics["found_by_decoding_error"] == 0
    two_wide = run(get(NAME), d_k=2, rotary_dims=2).metrics
    assert two_wide["found_by_reference_error"] == 4  # one pair and the frequency 1: no_minus, backwards, heads, v


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"n_heads": 4, "n_kv_heads": 8}, "groups_divide_heads"),
        ({"d_k": 8, "rotary_dims": 16}, "rotary_part_of_head"),
        ({"rotary_dims": 7}, "rotary_part_of_head"),
        ({"padding": 10, "decoded_tokens": 2}, "prompt_has_a_token"),
    ],
)
def test_refuses(params, rule):
    with pytest.raises(ParamsError, match=rule):
        get(NAME).Params(**params)
