"""mask_alignment against attention written out in numpy over the keys that each query may see."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "mask_alignment"
SETTINGS = [
    {"q_len": q_len, "kv_len": kv_len, "call": call}
    for call in ("is_causal", "lower_right", "no_mask", "upper_left")
    for q_len, kv_len in ((1, 1), (1, 6), (3, 8), (5, 5))
]


def last_key(call: str, i: int, q_len: int, kv_len: int) -> int:
    """The last key that new token i sees."""
    return {
        "is_causal": i,
        "upper_left": i,
        "lower_right": i + kv_len - q_len,
        "no_mask": kv_len - 1,
    }[call]


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, last: int) -> np.ndarray:
    """Context of one query over the keys 0 to ``last``. Shapes: (d_k,), (kv_len, d_k) twice."""
    e = np.exp(k[: last + 1] @ q / np.sqrt(len(q)))
    return e @ v[: last + 1] / e.sum()


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        q_len, kv_len, call = p["q_len"], p["kv_len"], p["call"]
        result, (q, k, v) = recorded(experiment, seed=4, batch=2, **p)
        first, units = kv_len - q_len, np.eye(kv_len)
        errors, weights, off = [], np.zeros((2, q_len, kv_len)), {"top_left": [], "bottom_right": []}
        for b in range(2):
            for i in range(q_len):
                query, last = q[b, first + i], last_key(call, i, q_len, kv_len)
                errors.append(attended(query, k[b], v[b], last) - attended(query, k[b], v[b], first + i))
                weights[b, i] = attended(query, k[b], units, last)
                off["top_left"].append(weights[b, i] - attended(query, k[b], units, i))
                off["bottom_right"].append(weights[b, i] - attended(query, k[b], units, first + i))
        seen = [last_key(call, i, q_len, kv_len) + 1 for i in range(q_len)]
        ought = [first + i + 1 for i in range(q_len)]
        wanted = {
            "chunk_error": np.abs(errors).max(),
            "first_query_keys": seen[0],
            "last_query_keys": seen[-1],
            "hidden_pairs": sum(max(0, o - s) for s, o in zip(seen, ought, strict=True)),
            "leaked_pairs": sum(max(0, s - o) for s, o in zip(seen, ought, strict=True)),
            "top_left_difference": np.abs(off["top_left"]).max(),
            "bottom_right_difference": np.abs(off["bottom_right"]).max(),
        }
        assert result.metrics == pytest.approx(wanted, abs=1e-12), p  # float64, sums of 64 terms
        table = result.tables["weights"]
        np.testing.assert_allclose(table["attention_weight"], weights[0].ravel(), atol=1e-6, err_msg=str(p))  # float32
        assert table["query_position"].min() == first, p
        curve = result.tables["by_chunk"]
        at = (curve["q_len"] == kv_len) & (curve["call"] == "lower_right")
        assert curve["chunk_error"][at] == pytest.approx([0], abs=1e-12), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('is_causal=call == "is_causal"', "is_causal=False"),  # the flag is not passed on
        ('"bottom_right" if call == "lower_right"', '"bottom_right" if call == "upper_left"'),
        ("chunk = q[:, -params.q_len :]", "chunk = q[:, : params.q_len]"),  # the first tokens, not the last
        ("(ought & ~seen).sum()", "(seen & ~ought).sum()"),
        (
            "(_call(call, q[:, -q_len:], k, v) - full[:, -q_len:])",
            "(_call(call, q[:, -q_len:], k, v) - full[:, :q_len])",
        ),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_curve_tells_the_three_calls_apart():
    table = run(get(NAME), kv_len=16).tables["by_chunk"]
    rows = {(n, c): e for n, c, e in zip(*(table[x] for x in ("q_len", "call", "chunk_error")), strict=True)}
    fits = {at for at, error in rows.items() if error < 1e-5}  # float32
    assert {n for n, call in fits if call == "is_causal"} == {16}  # the whole sequence
    assert {n for n, call in fits if call == "no_mask"} == {1}  # one new token
    assert {n for n, call in fits if call == "lower_right"} == {n for n, _ in rows}


def test_refuses_more_new_tokens_than_keys():
    with pytest.raises(ParamsError, match="chunk_within_keys"):
        get(NAME).Params(q_len=9, kv_len=8)
