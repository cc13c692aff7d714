"""sublayer_ablation against the model with the matrices of a part set to zero, and the hooks of its pass."""

import functools

import numpy as np
import pytest
import torch

from engine.base import make_run
from engine.inputs import draw_texts, read_texts
from engine.language_model import SUBLAYERS, Trace, forward, load_weights, token_losses
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "sublayer_ablation"
MATRIX = {"attention": "W_o", "FFN": "W_down"}  # without it a sublayer adds nothing


@functools.cache
def model() -> dict[str, torch.Tensor]:
    return load_weights(dtype=torch.float64)


def without(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    weights = dict(model())
    for name in names:
        layer, kind = name.removeprefix("L").split()
        key = f"{layer}.{MATRIX[kind]}"
        weights[key] = torch.zeros_like(weights[key])
    return weights


GROUPS = {
    **{f"loss_added_{name.lower().replace(' ', '_')}_nats": (name,) for name in SUBLAYERS},
    "loss_added_all_attention_nats": SUBLAYERS[::2],
    "loss_added_all_ffn_nats": SUBLAYERS[1::2],
}


def law(experiment: Experiment) -> None:
    for source in ("stories", "repeats"):
        p = {"source": source, "n_texts": 4, "seq_len": 64, "replacement": "zeros"}
        metrics = run(experiment, seed=2, dtype="float64", **p).metrics
        texts = read_texts(make_run(2, dtype="float64"), source, "", 4, 64)

        def loss(weights, texts=texts):
            losses = token_losses(forward(weights, texts.tokens), texts.tokens)
            return losses[texts.known()].mean().item()

        assert abs(metrics["loss_nats"] - loss(model())) < 1e-9  # rounding of float64
        for name, names in GROUPS.items():
            assert abs(metrics[name] - (loss(without(names)) - loss(model()))) < 1e-9, (source, name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if name in removed else out", "if name not in removed else out"),
        ("torch.cat(parts)[known].mean()", "torch.cat(parts).mean()"),  # counts what cannot be known
        ('name.endswith("FFN")', 'name.endswith("attention")'),
        ("- intact for done", "for done"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_pass_is_that_of_the_model():
    tokens = draw_texts(make_run(1), "stories", 2, 64).tokens
    trace, seen = Trace(), {}

    def keep(name, x):
        seen[name] = x
        return x

    mine = forward(model(), tokens, edit_out=keep, edit_hidden=keep)
    np.testing.assert_allclose(mine, forward(model(), tokens, trace=trace), atol=1e-10)  # rounding of float64
    assert tuple(seen) == SUBLAYERS
    last = trace.context[2].transpose(-3, -2).flatten(-2) @ model()["2.W_o"].mT
    np.testing.assert_allclose(seen["L2 attention"], last, atol=1e-10)


def test_a_mean_is_that_of_other_texts_and_keeps_what_a_part_always_adds():
    """Replaced by its mean, a part whose output never moved would be missed by nobody."""
    zeros = run(get(NAME), seed=2, n_texts=8, replacement="zeros").metrics
    mean = run(get(NAME), seed=2, n_texts=8).metrics
    assert mean["loss_added_l0_attention_nats"] < zeros["loss_added_l0_attention_nats"] - 1
    assert mean["loss_nats"] > 0


def test_mean_replacement_by_hand():
    r = make_run(2, dtype="float64")
    apart = draw_texts(r, "stories", 8, 64).tokens
    texts = read_texts(r, "stories", "", 4, 64)
    outs = {}
    forward(model(), apart, edit_out=lambda name, x: outs.setdefault(name, x))

    def edit(name, x):
        return outs[name].mean((0, 1)).expand_as(x) if name == "L1 FFN" else x

    lost = token_losses(forward(model(), texts.tokens, edit_out=edit), texts.tokens).mean()
    metrics = run(get(NAME), seed=2, dtype="float64", n_texts=4).metrics
    assert abs(metrics["loss_nats"] + metrics["loss_added_l1_ffn_nats"] - lost) < 1e-9
