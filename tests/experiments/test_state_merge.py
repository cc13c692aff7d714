"""state_merge against whole rows in numpy, and each wrong way against its own formula."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "state_merge"
SIZES = {"kv_len": 100, "n_rows": 6, "d_v": 3, "n_workers": 7}
SETTINGS = [
    {},
    {"merge_tree": "pairwise", "empty_workers": 3},
    {"merge_tree": "shuffled", "empty_workers": 1},
    {"merged_by": "means_by_lse", "empty_workers": 2},
    {"merged_by": "plain_mean"},
    {"merged_by": "lse_in_base_2"},
    {"merged_by": "sum_only"},
]


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | SIZES | given
        result, (drawn, v) = recorded(experiment, seed=6, **p)
        logits = p["logits_std"] * drawn
        weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        wanted, wanted_lse = weights @ v, np.log(np.exp(logits).sum(axis=1))
        parts = []
        for keys in np.array_split(np.arange(p["kv_len"]), p["n_workers"]):
            z = logits[:, keys]
            parts.append((np.exp(z) @ v[keys] / np.exp(z).sum(axis=1, keepdims=True), np.log(np.exp(z).sum(axis=1)), z))
        outs, lses = np.stack([out for out, _, _ in parts]), np.stack([lse for _, lse, _ in parts])
        shares = {
            "plain_mean": np.full(lses.shape, 1 / len(lses)),
            "lse_in_base_2": np.exp(lses / math.log(2)) / np.exp(lses / math.log(2)).sum(axis=0),
        }
        if p["merged_by"] == "sum_only":
            sums = np.stack([np.exp(z - z.max(axis=1, keepdims=True)).sum(axis=1) for _, _, z in parts])
            out = (sums[..., None] * outs).sum(axis=0) / sums.sum(axis=0)[:, None]
        else:
            out = (shares.get(p["merged_by"], np.exp(lses - wanted_lse))[..., None] * outs).sum(axis=0)
        errors = np.linalg.norm(out - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        got = result.metrics
        assert got["output_error"] == pytest.approx(errors.mean(), rel=1e-9, abs=1e-13), given  # float64 everywhere
        assert got["lse_std"] == pytest.approx(lses.std(axis=0).mean(), rel=1e-12)
        assert got["largest_worker_weight"] == pytest.approx(np.exp(lses - wanted_lse).max(axis=0).mean(), rel=1e-12)
        assert 0 < got["tree_spread"] < 1e-13
        assert got["undefined_rows"] == 0
        if p["merged_by"] in ("states", "means_by_lse"):
            assert got["lse_error"] < 1e-13, given


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lses / math.log(2)),\n", "lses),\n"),
        ('"plain_mean": (outs.mean(dim=0)', '"plain_mean": (merge_means(outs, lses)[0]'),
        ("two(*states[i : i + 2]) for i", "two(states[i], states[i]) for i"),
        ("torch.stack(part).sum(dim=0) for part", "torch.stack(part).amax(dim=0) for part"),
        (
            "states.append(absorb(empty, logits[:, keys], v[keys]))",
            "states.append(absorb(empty, logits[:, keys], v[:len(keys)]))",
        ),
        ("shares.amax(dim=0).mean()", "shares.amax()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=1, **params).metrics


def test_equal_log_sum_exps_are_the_only_case_for_a_plain_mean():
    assert metrics(merged_by="plain_mean", logits_std=0)["output_error"] < 1e-14
    assert metrics(merged_by="plain_mean", logits_std=0.5)["output_error"] > 0.01


def test_nan_needs_two_empty_sides_and_no_guard():
    bare = {"guarded": False}
    assert metrics(**bare, empty_workers=2)["undefined_rows"] == 32
    assert metrics(**bare, empty_workers=2, merge_tree="right_to_left")["undefined_rows"] == 0
    assert metrics(**bare, empty_workers=1)["undefined_rows"] == 0
    assert metrics(empty_workers=64)["output_error"] < 1e-13


def test_shares_are_those_of_the_first_row():
    table = run(get(NAME), n_workers=4, empty_workers=1).tables["shares"]
    for rule in ("means_by_lse", "lse_in_base_2", "plain_mean"):
        assert table["worker_weight"][table["weight_rule"] == rule].sum() == pytest.approx(1)
    assert table["worker_weight"][(table["weight_rule"] == "means_by_lse") & (table["worker"] == "W1")] == 0


def test_refuses_what_is_too_large():
    with pytest.raises(ParamsError, match="too_many_rows_or_values"):
        get(NAME).Params(kv_len=8192, n_rows=128)
