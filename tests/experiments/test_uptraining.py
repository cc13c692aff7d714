"""uptraining against the model itself: pooled heads written out, gradients that add up, and losses by hand."""

import numpy as np
import pytest
import torch

from engine import corpus, inputs, language_model
from engine.base import make_run
from engine.experiments import uptraining
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "uptraining"
PAIRS = {
    "heads_01_23": [[0, 1], [2, 3]],
    "heads_02_13": [[0, 2], [1, 3]],
    "heads_03_12": [[0, 3], [1, 2]],
}


def loss(source, groups, how, names, seed=0, n_texts=8):
    """The loss of the model with heads of a group equal, by the eager reference, on the texts of a seed."""
    weights = {name: weight.clone() for name, weight in language_model.load_weights().items()}
    for layer in range(language_model.N_LAYERS):
        for name in names:
            heads = weights[f"{layer}.{name}"].unflatten(0, (4, 32))
            for group in groups:
                one = heads[group].mean(0) if how == "pooled_mean" else heads[group[0]].clone()
                heads[group] = one
    texts = inputs.draw_texts(make_run(seed), source, n_texts, 128)
    losses = language_model.token_losses(language_model.forward(weights, texts.tokens), texts.tokens)
    return float(losses[texts.known()].mean())


def law(experiment: Experiment) -> None:
    all_heads, everything = [[0, 1, 2, 3]], ("W_k", "b_k", "W_v")
    for p, names in (
        ({}, everything),
        ({"source": "repeats", "head_pairs": "heads_02_13"}, everything),
        ({"pooling": "pooled_first", "head_pairs": "heads_03_12"}, everything),
        ({"pooled": "k_alone"}, ("W_k", "b_k")),
        ({"pooled": "v_alone", "head_pairs": "heads_03_12"}, ("W_v",)),
    ):
        m = run(experiment, steps=0, **p).metrics
        source, how = p.get("source", "stories"), p.get("pooling", "pooled_mean")
        pairs = PAIRS[p.get("head_pairs", "heads_01_23")]
        # float32 in two orders of summation
        assert m["original_loss_nats"] == pytest.approx(loss(source, [], how, names), rel=1e-4)
        assert m["start_loss_nats_gqa"] == pytest.approx(loss(source, pairs, how, names), rel=1e-4), p
        assert m["start_loss_nats_mqa"] == pytest.approx(loss(source, all_heads, how, names), rel=1e-4), p
        assert m["start_loss_ratio_gqa"] == m["start_loss_nats_gqa"] / m["original_loss_nats"]
        assert m["end_loss_nats_gqa"] == m["start_loss_nats_gqa"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("heads[list(group)].mean(dim=0)", "heads[list(group)].sum(dim=0)"),
        ('"k_and_v": ("W_k", "b_k", "W_v")', '"k_and_v": ("W_k", "W_v")'),  # biases forgotten
        ("group_of[head] for head in sorted(group_of)", "group_of[head] for head in group_of"),
        ("heads[group[0]] for", "heads[group[-1]] for"),
        ("return losses[texts.known()].mean()", "return losses.mean()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_shared_head_collects_the_gradients_of_its_group():
    original = language_model.load_weights()
    params = get(NAME).Params(learning_rate=0.01)
    variant = uptraining._Variant(params, make_run(0), original, uptraining.HEAD_PAIRS["heads_02_13"])
    repeated = {name: weight.detach().clone().requires_grad_() for name, weight in variant.weights().items()}
    tokens = torch.tensor([corpus.encode("Ada has a red key. Ben is in the barn. Who has the red key? Ada.")])
    texts = inputs.Texts(tokens, torch.zeros(1, dtype=torch.long))
    uptraining._mean_loss(repeated, texts).backward()
    uptraining._mean_loss(variant.weights(), texts).backward()
    for name in ("0.W_k", "1.b_k", "2.W_v"):
        heads = repeated[name].grad.unflatten(0, (4, 32))
        wanted = torch.stack([heads[0] + heads[2], heads[1] + heads[3]])
        assert not torch.allclose(heads[0], heads[2], rtol=0.1)  # so copies would not stay the same
        torch.testing.assert_close(variant.own[name].grad, wanted, rtol=1e-4, atol=1e-7)


def test_training_goes_on_and_shows_where_it_is():
    seen = []
    result = get(NAME).run(get(NAME).Params(steps=11), make_run(0, on_progress=lambda f, p: seen.append((f, p))))
    table = result.tables["curves"]
    assert table["step"].tolist() == [0, 5, 10, 11] * 2
    assert (table["original_loss"] == result.metrics["original_loss_nats"]).all()
    assert result.metrics["end_loss_nats_gqa"] < result.metrics["start_loss_nats_gqa"]
    assert result.metrics["uptrained_share"] == 11 * 8 * 128 / 16_384_000
    assert [p.done for _, p in seen if p][-1] == pytest.approx(10 / 11)
    assert np.all(np.diff([f for f, _ in seen]) > 0)
