"""windowed_reading against the model worked out in numpy, token by token, with and without the window."""

import numpy as np
import pytest
import torch

from engine import corpus, inputs
from engine.base import make_run
from engine.registry import Experiment, get
from tests import language_model_reference as reference
from tests.harness import assert_law_catches, run

NAME = "windowed_reading"
SEED = 5
SETTINGS = [
    {"source": "stories", "window": 20, "first_tokens_kept": 0, "n_texts": 3},  # two chunks
    {"source": "repeats", "window": 7, "first_tokens_kept": 3, "repeat_period": 9, "n_texts": 1},
]


def texts(p: dict) -> list[tuple[int, ...]]:
    if p["source"] == "stories":
        found = inputs.draw_texts(make_run(SEED), "stories", p["n_texts"], 128).tokens
        return [tuple(text) for text in found.tolist()]
    seed = inputs.LOWEST_SEED + int(torch.randint(2**62, (1,), generator=make_run(SEED).generator))
    drawn = corpus.repeats(seed, 128, period=p["repeat_period"])
    return [tuple(corpus.encode(next(drawn)[0])) for _ in range(p["n_texts"])]


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = run(experiment, seed=SEED, dtype="float64", **p)
        whole = [reference.read(text) for text in texts(p)]
        windowed = [reference.read(t, window=p["window"], first=p["first_tokens_kept"]) for t in texts(p)]
        rows = np.mean([passed.weights.mean(axis=0) for passed in whole], axis=0)  # of all heads of all layers
        hidden = [
            sum(rows[i, j] for j in range(128) if j <= i - p["window"] and j >= p["first_tokens_kept"])
            for i in range(64, 128)
        ]
        loss, without = (np.mean([passed.losses[63:] for passed in some]) for some in (windowed, whole))
        wanted = {
            "windowed_loss_nats": loss,
            "whole_loss_nats": without,
            "window_loss_added_nats": loss - without,
            "first_token_weight": rows[64:, 0].mean(),
            "beyond_window_weight": np.mean(hidden),
        }
        # float64 in three layers; LayerNorm's epsilon and the angles are the same, logits are some tens
        assert result.metrics == pytest.approx(wanted, rel=1e-7, abs=1e-9), p
        table = result.tables["by_place"]
        shown = table["loss_nats"][table["attention_span"] == "window_only"]
        assert shown[3] == pytest.approx(np.mean([passed.losses[24:32] for passed in windowed]), rel=1e-7)
        by_distance = result.tables["by_distance"]
        at = (by_distance["layer"] == "L1") & (by_distance["tokens_back"] == 5)
        of_layer = np.mean([passed.weights[4:8] for passed in whole], axis=(0, 1))
        assert by_distance["mean_weight"][at] == pytest.approx(
            [np.mean([of_layer[i, i - 5] for i in range(64, 128)])], rel=1e-7
        )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("window=params.window, device", "window=params.window - 1, device"),
        ("(causal & first)", "(causal & ~first)"),
        ("half - 1 :].mean()", "half :].mean()"),
        ("tokens.shape[1] // 2 :]", "tokens.shape[1] // 2 - 1 : -1]"),
        ('norm(x, weights["norm"])', "norm(x)"),
        ("period=params.repeat_period", "period=params.repeat_period - 1"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_window_of_the_whole_text_changes_nothing():
    metrics = run(get(NAME), window=128).metrics
    assert metrics["window_loss_added_nats"] == 0
    assert metrics["beyond_window_weight"] == 0
