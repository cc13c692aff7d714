"""accumulator_precision against a numpy loop that rounds as often, and at sums that are known."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.experiments.test_precision import rounded
from tests.harness import assert_law_catches, recorded, run

NAME = "accumulator_precision"
SETTINGS = [
    {"kv_len": 200, "tile_len": 16},
    {"kv_len": 200, "tile_len": 1, "accumulated_in": "float16", "logits_std": 2},
    {"kv_len": 200, "tile_len": 8, "accumulated_in": "bfloat16"},
    {"kv_len": 64, "tile_len": 8, "accumulated_in": "float32"},
]


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | given
        result, (drawn, v) = recorded(experiment, seed=8, **p)

        def low(x: np.ndarray, name: str = p["accumulated_in"]) -> np.ndarray:
            return rounded(x, name)

        logits, v = low(p["logits_std"] * drawn), low(v)
        m, total, out = np.full(len(logits), -np.inf), np.zeros(len(logits)), np.zeros((len(logits), v.shape[1]))
        for start in range(0, p["kv_len"], p["tile_len"]):
            z = logits[:, start : start + p["tile_len"]]
            new = np.maximum(m, z.max(axis=1))
            factor, powers = np.exp(m - new), np.exp(z - new[:, None])
            total = low(total * factor + powers.sum(axis=1))
            out = low(out * factor[:, None] + powers @ v[start : start + p["tile_len"]])
            m = new
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        exact, wanted = powers.sum(axis=1), powers @ v / powers.sum(axis=1, keepdims=True)
        errors = np.linalg.norm(out / total[:, None] - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        once = low(powers @ v) / low(exact)[:, None]
        once_errors = np.linalg.norm(once - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        got = result.metrics
        assert got["exact_sum_mean"] == pytest.approx(exact.mean(), rel=1e-12)
        # float32 against float64 inside a tile: a number in some hundred falls on the other side of a rounding
        close = {"bfloat16": 2e-3, "float16": 3e-4, "float32": 1e-6}[p["accumulated_in"]]
        assert got["running_sum_mean"] == pytest.approx(total.mean(), rel=close), given
        assert got["sum_share"] == pytest.approx((total / exact).mean(), rel=close), given
        if p["accumulated_in"] != "float32":
            assert got["output_error"] == pytest.approx(errors.mean(), rel=0.1), given
            assert got["once_error"] == pytest.approx(once_errors.mean(), rel=0.1), given
        assert result.tables["by_length"]["keys_seen"].max() == p["kv_len"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("State(*(x.to(dtype).float() for x in state))", "state"),
        (
            "state = _stored(absorb(state, logits[:, keys], v[keys]), dtype)",
            "state = absorb(state, logits[:, keys], v[keys])",
        ),
        ("once = _stored(absorb(empty", "once = _stored(absorb(state"),
        ("logits.to(dtype).float()", "logits.float()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=2, **params).metrics


@pytest.mark.parametrize(
    ("accumulated_in", "tile_len", "kv_len", "stops_at"),
    [("bfloat16", 1, 300, 256), ("bfloat16", 4, 2048, 1024), ("float16", 8, 4096, 4096), ("float32", 8, 4096, 4096)],
)
def test_equal_terms_stop_where_the_next_one_is_half_a_spacing(accumulated_in, tile_len, kv_len, stops_at):
    found = metrics(accumulated_in=accumulated_in, tile_len=tile_len, kv_len=kv_len, logits_std=0)
    assert found["running_sum_mean"] == stops_at
    assert found["exact_sum_mean"] == kv_len


def test_larger_tiles_are_stored_less_often():
    small, large = (metrics(kv_len=4096, tile_len=n)["output_error"] for n in (8, 256))
    assert small > 5 * large


def test_refusals():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="too_many_tiles"):
        params(kv_len=1024, tile_len=1)
