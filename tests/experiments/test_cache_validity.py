"""cache_validity against sets of tokens that know which tokens they were made of."""

import itertools

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "cache_validity"
SPECS = get(NAME).Params.specs()
EVENTS, MASKS, RECOMPUTED = (SPECS[field].values for field in ("event", "mask", "recomputed"))
N, AT, PREFIX, WINDOW, LAYERS = 8, 3, 5, 2, 3
SIZES = {
    "seq_len": N,
    "changed_at": AT,
    "prefix_tokens": PREFIX,
    "window": WINDOW,
    "n_layers": LAYERS,
    "d_model": 32,
    "n_heads": 2,
}


def sees(mask: str, t: int, s: int) -> bool:
    return {
        "causal": s <= t,
        "no_mask": True,
        "prefix": s <= t or s < PREFIX,
        "window": t - WINDOW < s <= t,
    }[mask]


def stored(mask: str, text: list[str]) -> list[list[tuple[str, str]]]:
    """Layer by layer what the key and the value of each token were made of, as text: the whiteboard's hash."""
    states, layers = list(text), []
    for _ in range(LAYERS):
        layers.append([(f"{state} at {t}", state) for t, state in enumerate(states)])
        # a rotated key and a query tell a distance; the residual stream carries the token itself
        states = [
            f"[{states[t]}: {' '.join(f'{states[s]}@{t - s}' for s in range(len(text)) if sees(mask, t, s))}]"
            for t in range(len(text))
        ]
    return layers


def whiteboard(event: str, mask: str, recomputed: str) -> dict[str, object]:
    text = [f"x{i}" for i in range(N)]
    new, kept = {
        "append_token": (text, {i: i for i in range(N)}),
        "edit_token": ([*text[:AT], "y", *text[AT + 1 :]], {i: i for i in range(N)}),
        "insert_token": ([*text[:AT], "y", *text[AT:]], {i if i < AT else i + 1: i for i in range(N)}),
        "drop_first": (text[1:], {i - 1: i for i in range(1, N)}),
    }[event]
    before, after = stored(mask, text), stored(mask, [*new, "next"])
    stale = [
        [tuple(a != b for a, b in zip(after[number][i], before[number][j], strict=True)) for i, j in kept.items()]
        for number in range(LAYERS)
    ]
    start = {"append_token": N + 1, "drop_first": 0}.get(event, AT)
    anew = {i for i in kept if i >= start} if recomputed == "from_change_on" else set()
    if recomputed == "changed_token" and event == "edit_token":
        anew = {AT}
    last = len(new)  # where the next token stands
    read = [
        (number, i)
        for number, layer in enumerate(stale)
        for i, (key, value) in zip(kept, layer, strict=True)
        if (key or value) and i not in anew and sees(mask, last, i)
    ]
    return {
        "stale_keys_first_layer": sum(key for key, _ in stale[0]),
        "stale_values_first_layer": sum(value for _, value in stale[0]),
        "stale_tokens_last_layer": sum(any(pair) for pair in stale[-1]),
        "stored_tokens": len(kept),
        "recomputed_tokens": len(anew),
        "error": bool(read),
    }


def law(experiment: Experiment) -> None:
    for event, mask, recomputed in itertools.product(EVENTS, MASKS, RECOMPUTED):
        metrics = dict(run(experiment, seed=3, event=event, mask=mask, recomputed=recomputed, **SIZES).metrics)
        metrics["error"] = metrics.pop("next_output_error") > 1e-9  # of rounding some 1e-15 are left, of staleness 1e-3
        assert metrics == whiteboard(event, mask, recomputed), (event, mask, recomputed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i + (i >= at)", "i + (i > at)"),
        ("{i - 1: i for i in same if i}", "{i - 1: i - 1 for i in same if i}"),
        ("if i >= start}", "if i > start}"),
        ("if new not in anew:", "if new in anew:"),
        ("row[:, new] = stored[:, old]", "row[:, old] = stored[:, old]"),
        ("window=params.window", "window=params.window + 1"),
        (
            "extend(layers, text, cache, n_heads=params.n_heads, mask=_mask(params))",
            "extend(layers, text, cache, n_heads=params.n_heads)",
        ),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_map_and_the_bars_hold_the_chosen_event():
    result = run(get(NAME), seed=1, event="edit_token", changed_at=4)
    stale = result.tables["stale"]
    last = stale["kv_change"][stale["layer"] == 2] > 1e-9
    assert np.flatnonzero(last).tolist() == list(range(4, 16))
    bars = result.tables["by_event"]
    at = (bars["event"] == "edit_token") & (bars["layer"] == 2)
    assert bars["stale_share"][at] == result.metrics["stale_tokens_last_layer"] / 16


def test_what_is_right_is_far_from_what_is_stale():
    for event in EVENTS:
        changes = run(get(NAME), seed=2, event=event, n_layers=6).tables["stale"]["kv_change"]
        assert ((changes < 1e-13) | (changes > 1e-4)).all()  # rounding of float64, or a change that is meant


def test_refuses_a_change_behind_the_text():
    with pytest.raises(ParamsError, match="within_text"):
        get(NAME).Params(seq_len=4, changed_at=4)
