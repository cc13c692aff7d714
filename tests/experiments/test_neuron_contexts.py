"""neuron_contexts against hidden units computed from the residual stream, place by place, in float64."""

import numpy as np
import pytest

from engine import corpus
from engine.base import make_run
from engine.inputs import draw_texts
from engine.language_model import forward, load_weights
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "neuron_contexts"
P = {"layer": 1, "hidden_unit": 7, "n_texts": 8}


def law(experiment: Experiment) -> None:
    result = run(experiment, seed=4, dtype="float64", **P)
    r = make_run(4, dtype="float64")
    tokens = draw_texts(r, "stories", 8, 96).tokens
    hidden = {}
    forward(load_weights(dtype=r.dtype), tokens, edit_hidden=lambda name, h: hidden.setdefault(name, h))
    flat = tokens.flatten().numpy()
    for layer in range(3):
        units = hidden[f"L{layer} FFN"].flatten(0, 1).numpy()
        within = sum(((units[flat == c] - units[flat == c].mean(0)) ** 2).sum(0) for c in np.unique(flat))
        explained = 1 - within / ((units - units.mean(0)) ** 2).sum(0)
        table = result.tables["explained"]
        drawn = table["character_explained"][table["ffn_of_layer"] == f"L{layer}"]
        np.testing.assert_allclose(drawn, np.sort(explained), atol=1e-6)  # kept as float32
        if layer == P["layer"]:
            assert abs(result.metrics["character_explained_median"] - np.median(explained)) < 1e-9  # rounding
            assert abs(result.metrics["unit_character_explained"] - explained[P["hidden_unit"]]) < 1e-9
            unit = units[:, P["hidden_unit"]]
    assert result.metrics["unit_active_share"] == (unit > 0).mean()
    top = np.argsort(-unit, kind="stable")[:10]
    contexts = result.tables["contexts"]
    np.testing.assert_allclose(contexts["unit_activation"], unit[top])
    for said, place in zip(contexts["context_read"], top, strict=True):
        text, at = divmod(place, 96)
        read = corpus.decode(tokens[text, max(0, at - 15) : at + 1].tolist())
        assert said.split(": ", 1)[1] == read.replace("\n", "↵").replace(" ", "␣")
    characters = [flat[place] for place in top]
    assert result.metrics["top_character_share"] == max(characters.count(c) for c in characters) / 10


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("hidden - hidden.mean(dim=0)", "hidden"),
        ("max(0, at - N_READ + 1) : at + 1", "max(0, at - N_READ) : at + 1"),  # one character too many
        ("descending=True", "descending=False"),
        ("[:, params.hidden_unit]", "[:, 0]"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_first_layer_sees_little_but_the_character():
    first, last = (run(get(NAME), layer=layer).metrics["character_explained_median"] for layer in (0, 2))
    assert first > 2 * last
