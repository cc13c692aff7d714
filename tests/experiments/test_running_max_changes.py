"""running_max_changes against counting by hand, and against the harmonic numbers."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "running_max_changes"
SETTINGS = [
    {"kv_len": 50, "tile_len": 7, "rows_together": 4, "n_groups": 8},
    {"kv_len": 50, "tile_len": 7, "rows_together": 4, "n_groups": 8, "slack_log2": 2},
    {"kv_len": 50, "tile_len": 1, "rows_together": 2, "n_groups": 4, "logits_order": "drifting"},
    {"kv_len": 50, "tile_len": 4, "rows_together": 2, "n_groups": 4, "logits_order": "receding", "drift": 2},
    {"kv_len": 50, "tile_len": 3, "rows_together": 2, "n_groups": 4, "logits_order": "ascending", "slack_log2": 1},
    {"kv_len": 5, "tile_len": 8, "rows_together": 1, "n_groups": 1},
]


def moves_of(row: np.ndarray, p: dict) -> list[bool]:
    reference, moves = -math.inf, []
    for start in range(0, len(row), p["tile_len"]):
        top = max(reference, row[start : start + p["tile_len"]].max())
        moved = top - reference > p["slack_log2"] * math.log(2)
        moves.append(moved and reference > -math.inf)
        reference = top if moved else reference
    return moves


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | given
        result, (drawn,) = recorded(experiment, seed=4, **p)
        drift = {"drifting": p["drift"], "receding": -p["drift"]}.get(p["logits_order"], 0)
        logits = drawn + drift * np.linspace(0, 1, p["kv_len"])
        logits = p["logits_std"] * (np.sort(logits) if p["logits_order"] == "ascending" else logits)
        moves = np.array([moves_of(row, p) for row in logits])
        tiles, later = moves.shape[1], max(1, moves.shape[1] - 1)
        groups = moves.reshape(p["n_groups"], p["rows_together"], tiles).any(axis=1)
        wanted = {
            "rescales_per_row": moves.sum(axis=1).mean(),
            "rescales_std": moves.sum(axis=1).std(),
            "rescales_max": moves.sum(axis=1).max(),
            "row_rescale_share": moves.sum() / (len(moves) * later),
            "group_rescale_share": groups.sum() / (len(groups) * later),
            "theory_rescales": sum(1 / j for j in range(2, tiles + 1)),
            "tiles": tiles,
        }
        assert result.metrics == pytest.approx(wanted, rel=1e-12, abs=1e-15), given
        table = result.tables["by_tile"]
        one = table["rescale_share"][table["rescaled_unit"] == "one_row"]
        assert one.tolist() == moves.mean(axis=0)[1:].tolist()
        assert result.tables["total"]["rescales_so_far"][-1] == pytest.approx(wanted["rescales_per_row"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("before, m = m, next_reference", "before, m = logits.new_zeros(rows), next_reference"),
        ("amax(dim=-1), slack)", "amax(dim=-1))"),
        (".any(axis=1)", ".all(axis=1)"),
        ("upwards * params.drift", "params.drift"),
        ("logits *= params.logits_std", "logits *= 1"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_random_order_gives_harmonic_numbers():
    found = run(get(NAME), kv_len=100, tile_len=1, n_groups=64, rows_together=64).metrics
    n = 64 * 64
    std = math.sqrt(sum(1 / j - 1 / j**2 for j in range(2, 101)))  # the moves at different keys are independent
    assert found["rescales_per_row"] == pytest.approx(sum(1 / j for j in range(2, 101)), abs=5 * std / math.sqrt(n))
    assert found["rescales_std"] == pytest.approx(std, rel=0.08)  # five standard errors, 1.4 % each


def test_sorted_rows_move_always_or_never():
    assert run(get(NAME), kv_len=100, tile_len=1, logits_order="ascending").metrics["rescales_per_row"] == 99
    assert run(get(NAME), kv_len=100, tile_len=1, logits_order="descending").metrics["rescales_per_row"] == 0


def test_refuses_what_is_too_large():
    with pytest.raises(ParamsError, match="too_many_logits_of_groups"):
        get(NAME).Params(kv_len=16384, rows_together=256, n_groups=8)
