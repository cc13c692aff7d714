"""conversation_reuse against sets of tokens that know which tokens they were made of."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "conversation_reuse"
MASKS = get(NAME).Params.specs()["history_mask"].values
SETTINGS = [
    {"history_mask": mask, "n_turns": turns, "turn_len": 3, "answer_len": 2, "n_layers": layers}
    for mask in MASKS
    for turns, layers in ((1, 2), (3, 1), (3, 2), (4, 3))
]


def made_of(tokens: int, prefix: int, n_layers: int) -> list[list[frozenset[int]]]:
    """Layer by layer the tokens that the row of each token was made of."""
    states = [frozenset({t}) for t in range(tokens)]
    layers = []
    for _ in range(n_layers):
        layers.append(states)
        states = [frozenset().union(*(states[s] for s in range(tokens) if s <= t or s < prefix)) for t in range(tokens)]
    return layers


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        length, rows, stored, stale = p["turn_len"] + p["answer_len"], 0, None, 0
        for turn in range(p["n_turns"]):
            asked = turn * length + p["turn_len"]
            prefix = {"causal": 0, "first_turn_prefix": p["turn_len"], "history_prefix": asked}[p["history_mask"]]
            fresh = made_of((turn + 1) * length, prefix, p["n_layers"])
            stale = (
                0
                if stored is None
                else sum(any(fresh[i][t] != stored[i][t] for i in range(len(fresh))) for t in range(turn * length))
            )
            stored, rows = fresh, rows + length + stale
        metrics = dict(run(experiment, seed=4, **p).metrics)
        assert (metrics.pop("last_turn_change") > 1e-4) == (stale > 0), p  # rounding leaves 1e-15
        assert metrics == {
            "computed_rows": rows,
            "conversation_tokens": p["n_turns"] * length,
            "rows_per_token": rows / (p["n_turns"] * length),
            "last_turn_stale": stale,
            "last_turn_stored": (p["n_turns"] - 1) * length,
        }, p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("asked = turn * length + params.turn_len", "asked = turn * length"),
        ('"history_prefix": asked}', '"history_prefix": params.turn_len}'),
        ("for layer in range(len(stored.keys)):", "for layer in range(1):"),
        ("n_heads=N_HEADS, mask=_mask(prefix)", "n_heads=N_HEADS"),
        ("np.cumsum(length + rows)", "np.cumsum(params.turn_len + rows)"),
        ("            stored = cache\n", "            stored = stored or cache\n"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_reading_the_history_both_ways_is_quadratic():
    rows = [
        run(get(NAME), history_mask="history_prefix", n_turns=turns).metrics["rows_per_token"] for turns in (1, 2, 4, 8)
    ]
    assert rows == [(turns + 1) / 2 for turns in (1, 2, 4, 8)]


def test_what_is_right_is_far_from_what_is_stale():
    turns = run(get(NAME), seed=3).tables["turns"]
    last = turns["turn"] == 4
    assert dict(zip(turns["history_mask"][last], turns["stale_rows"][last], strict=True)) == {
        "causal": 0,
        "first_turn_prefix": 0,
        "history_prefix": 48,
    }
    assert np.all(turns["rows_so_far"][:4] == [16, 32, 48, 64])


def test_the_curve_of_changes_is_rounding_or_far_above():
    turns = run(get(NAME), seed=3).tables["turns"]
    for mask, stale, change in zip(turns["history_mask"], turns["stale_rows"], turns["kv_change"], strict=True):
        assert (change > 1e-4) == (stale > 0), mask  # rounding leaves 1e-15
        assert change < 1e-12 or mask == "history_prefix"


def test_refuses_what_takes_too_long():
    with pytest.raises(ParamsError, match="width_of_two_even_heads"):
        get(NAME).Params(d_model=33)
    with pytest.raises(ParamsError, match="too_long_a_conversation"):
        get(NAME).Params(n_turns=12, turn_len=32)
