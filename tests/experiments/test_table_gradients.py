"""table_gradients against differences of the loss itself, in float64, text by text."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "table_gradients"
D, LONGEST, ROWS, BATCH = 8, 8, 16, 4
SIZES = {"d_model": D, "longest": LONGEST, "table_rows": ROWS, "batch": BATCH, "n_layers": 1}
STEP = 1e-5


def loss(tokens: np.ndarray, targets: np.ndarray, lengths: list[int], table: np.ndarray, layer: np.ndarray) -> float:
    """Mean over all real tokens of the squared distance to the target, a coordinate."""
    W_q, W_k, W_v, W_o, W_up, W_down = layer / math.sqrt(D)

    def norm(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)

    total = 0.0
    for text, target, length in zip(tokens, targets, lengths, strict=True):
        x = text[:length] + table[:length]  # padding is not even there
        y = norm(x)
        logits = (y @ W_q) @ (y @ W_k).T / math.sqrt(D)
        weights = np.tril(np.exp(logits))
        x = x + weights / weights.sum(axis=1, keepdims=True) @ (y @ W_v) @ W_o
        up = norm(x) @ W_up
        x = x + np.vectorize(lambda u: u * (1 + math.erf(u / math.sqrt(2))) / 2)(up) @ W_down
        total += ((x - target[:length]) ** 2).mean(axis=1).sum()
    return total / sum(lengths)


def law(experiment: Experiment) -> None:
    for kind, lengths in (("all_lengths", [2, 4, 6, 8]), ("packed", [8, 8, 8, 8])):
        result, (tokens, targets, table, layer) = recorded(experiment, seed=2, lengths=kind, **SIZES)
        rows_of = result.tables["by_row"]["lengths"] == kind
        found, texts = (result.tables["by_row"][column][rows_of] for column in ("row_gradient", "texts"))
        assert texts.tolist() == [sum(length > t for length in lengths) for t in range(ROWS)]
        wanted = np.zeros((ROWS, D))
        for t, c in np.ndindex(wanted.shape):
            ends = []
            for sign in (1, -1):
                shaken = table.copy()
                shaken[t, c] += sign * STEP
                ends.append(loss(tokens, targets, lengths, shaken, layer))
            wanted[t, c] = (ends[0] - ends[1]) / (2 * STEP)
        rows = np.sqrt((wanted**2).sum(axis=1))
        # central differences: some 1e-10 of curvature, and 1e-11 of rounding over the step
        assert found == pytest.approx(rows, rel=1e-6, abs=1e-9), kind
        assert result.metrics["untouched_rows"] == ROWS - LONGEST
        assert result.metrics["last_row_texts"] == lengths.count(LONGEST)
        late, early = (math.sqrt((part**2).mean()) for part in (rows[LONGEST - 2 : LONGEST], rows[:2]))
        assert result.metrics["late_to_early_gradient"] == pytest.approx(late / early, rel=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mean(dim=-1)[real].mean()", "mean(dim=-1).mean()"),  # padding counts
        (", keep=keep)", ")"),
        ("x = tokens + from_table(rows, places)", "x = tokens + from_table(rows, places + 1)"),
        ("(filled[:, None] > torch", "(filled[:, None] >= torch"),
        ("rows[:quarter])", "rows[quarter:])"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_longest_text_decides_which_rows_are_reached():
    for longest in (8, 31, 64):
        metrics = run(get(NAME), longest=longest, table_rows=64, batch=5).metrics
        assert metrics["untouched_rows"] == 64 - longest
        assert metrics["last_row_texts"] == 1


def test_refuses_texts_that_the_table_has_no_row_for():
    with pytest.raises(ParamsError, match="text_within_table"):
        get(NAME).Params(longest=65, table_rows=64)
