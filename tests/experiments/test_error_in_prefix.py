"""error_in_prefix against the plain pass of the model over whole texts, without a cache."""

import itertools
import random

import numpy as np
import pytest
import torch

from engine import corpus
from engine.inputs import LOWEST_SEED
from engine.language_model import forward, load_weights
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "error_in_prefix"
N = 4
SETTINGS = [
    {"n_texts": N, "places_after": 20},
    {"n_texts": N, "string_len": 9, "wrong_in_a_row": 3, "places_after": 5, "wrong_character": "from_elsewhere"},
]


def drawn(p: dict, seed: int) -> tuple[list[str], list[str], list[str]]:
    """Strings, right texts up to the last place, and the wrong characters."""
    generator = torch.Generator().manual_seed(seed)
    number = LOWEST_SEED + int(torch.randint(2**62, (1,), generator=generator))
    length, row = p.get("string_len", 16), p.get("wrong_in_a_row", 1)
    total = 2 * length + 4 + row + p["places_after"]
    texts = [text for text, _ in itertools.islice(corpus.repeats(number, total, period=length), N)]
    draw, wrong = random.Random(number), []
    for text in texts:
        string, chosen = text[:length], ""
        for place in range(2 * length + 4, 2 * length + 4 + row):
            if p.get("wrong_character") == "from_elsewhere":
                pool = [c for c in corpus.VOCABULARY[1:] if c not in string]
            else:
                pool = [c for c in set(string) if c != text[place]]
            chosen += draw.choice(sorted(pool))
        wrong.append(chosen)
    return [text[:length] for text in texts], texts, wrong


def law(experiment: Experiment) -> None:
    weights = load_weights(dtype=torch.float64)
    for p in SETTINGS:
        strings, texts, wrong = drawn(p, 5)
        at = 2 * p.get("string_len", 16) + 4
        start, after = at + p.get("wrong_in_a_row", 1), p["places_after"]
        losses = {"no_error": [], "right_text_after": [], "own_text_after": []}
        right = {name: [] for name in losses}
        neighbours, confidence = [], []
        for string, text, bad in zip(strings, texts, wrong, strict=True):
            own = text[:at] + bad
            for _ in range(after):
                own += corpus.VOCABULARY[int(forward(weights, torch.tensor([corpus.encode(own)]))[0, -1].argmax())]
            read = {"no_error": text, "right_text_after": text[:at] + bad + text[start:], "own_text_after": own}
            wanted = torch.tensor(corpus.encode(text)[start:])
            for name, whole in read.items():
                logits = forward(weights, torch.tensor([corpus.encode(whole)]))[0, start - 1 : -1]
                losses[name].append(-logits.log_softmax(-1)[range(after), wanted])
                right[name].append(logits.argmax(-1) == wanted)
            confidence.append(logits[3:].softmax(-1).amax(-1).mean())
            follows = {a + b for a, b in itertools.pairwise(string * 2)}
            neighbours += [own[i - 1 : i + 1] in follows for i in range(start + 3, start + after)]
        mean = {name: torch.stack(rows).mean(0).numpy() for name, rows in losses.items()}
        share = {name: torch.stack(rows).double().mean(0).numpy() for name, rows in right.items()}
        result = run(experiment, seed=5, dtype="float64", **p)
        # float64 in three layers; sharp softmaxes leave losses as small as 1e-4
        assert result.metrics == pytest.approx(
            {
                "next_loss_nats": mean["right_text_after"][0],
                "next_loss_without_error_nats": mean["no_error"][0],
                "recovered_loss_nats": mean["right_text_after"][3:].mean(),
                "right_at_once_share": share["own_text_after"][0],
                "on_track_share": share["own_text_after"][-1],
                "neighbour_share": np.mean(neighbours),
                "own_confidence": np.mean(confidence),
            },
            rel=1e-6,
            abs=1e-9,
        )
        table = result.tables["by_place"]
        for name in losses:
            rows = table["prefix_case"] == name
            assert table["right_loss_nats"][rows] == pytest.approx(mean[name], rel=1e-6, abs=1e-9), name
            assert table["right_share"][rows] == pytest.approx(share[name]), name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("given = torch.cat((wrong, right[:, behind:-1]), dim=1)", "given = right[:, at:-1]"),
        ("logits[-1].argmax(dim=-1), cache)", "logits[0].argmax(dim=-1), cache)"),
        (
            "_go_on(params, run, weights, layers, wrong, _copy(beginning))",
            "_go_on(params, run, weights, layers, right[:, at:behind], _copy(beginning))",
        ),
        ("_read(weights, layers, given, _copy(beginning))", "_read(weights, layers, given, KVCache(N_LAYERS))"),
        ("others - {right}", "others"),
        ("string + string[0]", "string"),
        ("pair in pairs for", "pair not in pairs for"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_without_an_error_the_model_knows_the_string():
    result = run(get(NAME), seed=1)
    table = result.tables["by_place"]
    assert table["right_share"][table["prefix_case"] == "no_error"].mean() > 0.98  # 192 characters
    without = run(get(NAME), seed=1, wrong_character="the_right_one").metrics
    assert without["next_loss_nats"] == pytest.approx(without["next_loss_without_error_nats"], rel=1e-4)  # float32
    assert without["on_track_share"] > 0.9
    before = table["prefix_case"] != "no_error"
    first = table["right_loss_nats"][before & (table["places_behind"] == 1)]
    assert first[0] == pytest.approx(first[1], rel=1e-4)  # the same prefix; float32
