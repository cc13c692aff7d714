"""online_softmax against whole rows in numpy, and each slip against what it must do."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "online_softmax"
SETTINGS = [
    {},
    {"kv_len": 37, "tile_len": 5},
    {"kv_len": 37, "tile_len": 5, "tiles_taken": "backward", "slack_log2": 3},
    {"kv_len": 37, "tile_len": 64, "masked_first": 6},
    {"kv_len": 64, "tile_len": 8, "logits_order": "ascending", "logits_mean": -50},
    {"kv_len": 64, "tile_len": 8, "slip": "o_not_rescaled"},
    {"kv_len": 64, "tile_len": 8, "slip": "nothing_rescaled"},
    {"kv_len": 64, "tile_len": 8, "slip": "tile_max"},
    {"kv_len": 64, "tile_len": 8, "slip": "follows_tile"},
    {"kv_len": 64, "tile_len": 8, "slip": "starts_at_zero", "logits_mean": -50},
]


def by_hand(p: dict, logits: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """One key or tile after the other, in Python: output, log-sum-exp and moves of a row."""
    slip = p.get("slip", "correct")
    slices = [slice(i, i + p["tile_len"]) for i in range(0, len(logits), p["tile_len"])]
    m, total, out, moves = (0.0 if slip == "starts_at_zero" else -math.inf), 0.0, np.zeros(v.shape[1]), 0
    for keys in slices[::-1] if p.get("tiles_taken") == "backward" else slices:
        z, top = logits[keys], logits[keys].max()
        new = max(m, top)
        if slip == "follows_tile":
            new = top
        elif new - m <= p.get("slack_log2", 0) * math.log(2):
            new = m
        moves += new != m and m > -math.inf
        factor = 0.0 if m == -math.inf else math.exp(m - new)
        base = top if slip == "tile_max" else new
        powers = np.zeros_like(z) if base == -math.inf else np.exp(z - base)
        total = total * (1 if slip == "nothing_rescaled" else factor) + powers.sum()
        out = out * (1 if slip in ("nothing_rescaled", "o_not_rescaled") else factor) + powers @ v[keys]
        m = new
    return out / total, m + math.log(total), moves


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | given
        result, (drawn, v) = recorded(experiment, seed=5, **p)
        logits = p["logits_std"] * drawn
        if p["logits_order"] == "ascending":
            logits = np.sort(logits)
        logits = logits + p["logits_mean"]
        logits[:, : p["masked_first"]] = -math.inf
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        wanted = powers @ v / powers.sum(axis=1, keepdims=True)
        found = [by_hand(p, row, v) for row in logits]
        errors = [np.linalg.norm(out - w) / np.linalg.norm(w) for (out, _, _), w in zip(found, wanted, strict=True)]
        got = result.metrics
        # float64 on both sides: a right version is at rounding, a wrong one agrees with the loop
        assert got["output_error"] == pytest.approx(np.mean(errors), rel=1e-9, abs=1e-13), given
        lse = np.log(powers.sum(axis=1)) + logits.max(axis=1)
        lse_errors = [abs(f[1] - x) for f, x in zip(found, lse, strict=True)]
        assert got["lse_error"] == pytest.approx(max(lse_errors), rel=1e-9, abs=1e-12), given
        assert got["rescales_per_row"] == np.mean([moves for _, _, moves in found]), given
        assert got["undefined_rows"] == got["zero_rows"] == 0
        assert got["largest_power"] <= 2 ** p["slack_log2"] * (1 + 1e-12) or p["slip"] == "starts_at_zero"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("state.total * factor + powers.sum(dim=-1)", "state.total + powers.sum(dim=-1)"),
        ('factor.new_ones(factor.shape) if slip == "o_not_rescaled" else factor', "factor"),
        ('finite_or_zero(largest) if slip == "tile_max" else base', "base"),
        ('largest if slip == "follows_tile" else', 'largest if slip == "never" else'),
        ("return absorb(state, logits, v, slack)", "return absorb(state, logits, v)"),
        ("slices.reverse()", "pass"),
        ("& before.reference.isfinite()", ""),
        ("logits = logits + params.logits_mean", "logits = logits"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=2, **params).metrics


@pytest.mark.parametrize("works_in", ["float64", "float32", "bfloat16", "float16"])
def test_a_right_version_errs_as_little_as_whole_rows(works_in):
    found = metrics(works_in=works_in, tile_len=128)
    roundings = {"float64": 2**-53, "float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}[works_in]
    assert found["output_error"] < 30 * roundings  # a state that is rounded 8 times, relative to a smaller mean
    # eight rescalings of two roundings each, where whole rows may happen to be exact to one
    assert found["output_error"] < 16 * max(found["whole_row_error"], roundings)


def test_a_maximum_in_the_first_tile_hides_a_missing_rescale():
    for slip in ("o_not_rescaled", "nothing_rescaled"):
        assert metrics(slip=slip, logits_order="descending")["output_error"] < 1e-13
        assert metrics(slip=slip, logits_order="ascending")["output_error"] > 0.5


def test_two_empty_tiles_are_needed_for_nan_only_where_the_guard_is_missing():
    assert metrics(slip="unguarded", masked_first=128)["undefined_rows"] == 16
    assert metrics(slip="unguarded", masked_first=127)["undefined_rows"] == 0
    assert metrics(masked_first=1023)["output_error"] < 1e-13
    # taken last, an empty tile meets a finite maximum
    assert metrics(slip="unguarded", masked_first=128, tiles_taken="backward")["undefined_rows"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_reference_that_follows_the_tiles_stays_at_an_empty_one(seed):
    given = {"slip": "follows_tile", "masked_first": 128, "tiles_taken": "shuffled"}
    found = run(get(NAME), seed=seed, **given).metrics
    assert found["output_error"] < 1e-13
    assert found["lse_error"] < 1e-13


def test_a_maximum_that_starts_too_high_returns_zero_without_a_word():
    low = {"slip": "starts_at_zero", "works_in": "float32"}
    assert metrics(**low, logits_mean=-200)["zero_rows"] == 16
    assert metrics(**low, logits_mean=-200)["undefined_rows"] == 0
    assert metrics(**low, logits_mean=50)["output_error"] < 1e-5
    assert metrics(works_in="float32", logits_mean=-200)["output_error"] < 1e-5


def test_trace_ends_at_the_log_sum_exp():
    result = run(get(NAME), kv_len=64, tile_len=64)
    rows = dict(zip(result.tables["trace"]["state_part"], result.tables["trace"]["state_value"], strict=True))
    assert rows["running_max"] + rows["log_of_sum"] == pytest.approx(rows["running_lse"], abs=1e-14)


def test_refusals():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="too_many_tiles"):
        params(kv_len=1024, tile_len=1)
    with pytest.raises(ParamsError, match="some_key_visible"):
        params(kv_len=64, masked_first=64)
    with pytest.raises(ParamsError, match="too_many_rows_or_values"):
        params(kv_len=8192, n_rows=256)
