"""causal_training against one model at a time, trained by torch.optim on torch's own operations."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "causal_training"
D, V, BATCH, N_EVALUATION = 32, 8, 32, 128
VARIANTS = ("causal", "no_mask", "one_ahead", "times_zero", "after_softmax")
SETTINGS = [
    {"steps": 10, "seq_len": 5, "n_layers": 1, "rule_share": 0.8, "learning_rate": 0.01},
    {"steps": 10, "seq_len": 4, "n_layers": 2, "rule_share": 0.5, "learning_rate": 0.002},
]


def sequences(generator: torch.Generator, p: dict, batch: int) -> torch.Tensor:
    drawn = torch.randint(V, (batch, p["seq_len"] + 1), generator=generator)
    by_rule = torch.rand((batch, p["seq_len"] + 1), generator=generator) < p["rule_share"]
    for row, rule in zip(drawn, by_rule, strict=True):
        for t in range(2, len(row)):
            if rule[t]:
                row[t] = (row[t - 2] + 3) % V
    return drawn


def rows(variant: str, logits: torch.Tensor) -> torch.Tensor:
    n = logits.shape[-1]
    past = torch.tril(torch.ones(n, n, dtype=torch.bool))
    if variant == "times_zero":
        return (logits * past).softmax(-1)
    if variant == "after_softmax":
        return logits.softmax(-1) * past
    if variant == "no_mask":
        return logits.softmax(-1)
    hidden = torch.triu(torch.ones(n, n, dtype=torch.bool), 1 if variant == "causal" else 2)
    return logits.masked_fill(hidden, -math.inf).softmax(-1)


def predict(variant: str, w: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    embedding, positions, layers, unembedding = w
    x = embedding[tokens] + positions[: tokens.shape[1]]
    for W_q, W_k, W_v, W_o in layers:
        h = layer_norm(x, (D,))
        x = x + rows(variant, (h @ W_q) @ (h @ W_k).mT / math.sqrt(D)) @ (h @ W_v) @ W_o
    return layer_norm(x, (D,)) @ unembedding.T


def evaluation_set(p: dict, seed: int) -> torch.Tensor:
    """The sequences drawn after the weights."""
    g = torch.Generator().manual_seed(seed)
    for shape in ((V, D), (p["seq_len"], D), (p["n_layers"], 4, D, D), (V, D)):
        torch.randn(*shape, generator=g)
    return sequences(g, p, N_EVALUATION)


@functools.cache
def reference(number: int, seed: int) -> dict[str, tuple[float, float]]:
    """Loss in one pass, and with prefixes only, of each variant after the training of a setting."""
    p, found = SETTINGS[number], {}
    for variant in VARIANTS:
        g = torch.Generator().manual_seed(seed)
        shapes = [(V, D), (p["seq_len"], D), (p["n_layers"], 4, D, D), (V, D)]
        drawn = [torch.randn(*shape, generator=g).double() for shape in shapes]
        w = [drawn[0], drawn[1], drawn[2] / math.sqrt(D), drawn[3] / math.sqrt(D)]
        w = [x.requires_grad_() for x in w]
        evaluation = sequences(g, p, N_EVALUATION)
        assert torch.equal(evaluation, evaluation_set(p, seed))
        optimizer = torch.optim.Adam(w, lr=p["learning_rate"])
        for _ in range(p["steps"]):
            tokens = sequences(g, p, BATCH)
            optimizer.zero_grad()
            cross_entropy(predict(variant, w, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        with torch.no_grad():
            loss = cross_entropy(predict(variant, w, evaluation[:, :-1]).flatten(0, 1), evaluation[:, 1:].flatten())
            each = [
                cross_entropy(predict(variant, w, evaluation[:, :n])[:, -1], evaluation[:, n])
                for n in range(1, p["seq_len"] + 1)
            ]
        found[variant] = loss.item(), float(np.mean(each))
    return found


def law(experiment: Experiment) -> None:
    for number, p in enumerate(SETTINGS):
        metrics = run(experiment, seed=3, dtype="float64", **p).metrics
        for variant, (loss, generation) in reference(number, 3).items():
            # float64; ten steps of Adam divide by gradients, which loses some digits
            assert metrics[f"loss_nats_{variant}"] == pytest.approx(loss, rel=1e-7), (p, variant)
            assert metrics[f"generation_loss_nats_{variant}"] == pytest.approx(generation, rel=1e-7), (p, variant)
        cost = []  # of each token of the sequences that all are measured on, under the rule
        for row in evaluation_set(p, 3).tolist():
            for t in range(1, len(row)):
                rule = p["rule_share"] * (row[t] == (row[t - 2] + 3) % V) if t > 1 else p["rule_share"] / V
                cost.append(-math.log(rule + (1 - p["rule_share"]) / V))
        assert metrics["floor_nats"] == pytest.approx(np.mean(cost), rel=1e-12), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask_logits(logits * before, keep)) * after", "mask_logits(logits * before, keep))"),
        ("mask_logits(logits * before, keep)) * after", "mask_logits(logits, keep)) * after"),
        ('v if v in ("causal", "one_ahead") else "no_mask"', '"causal"'),
        ("floor_nats(evaluation, params.rule_share)", "floor_nats(evaluation, params.rule_share / 2)"),
        ("_forward(weights, read[:, :n], masks)[:, :, -1:]", "_forward(weights, read, masks)[:, :, n - 1 : n]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_masks_share_their_start():
    table = run(get(NAME), steps=10).tables["curves"]
    start = table["step"] == 0
    # before training the masks differ only in what they show: losses of random models, near each other
    assert np.ptp(table["loss_nats"][start]) < 0.5


def test_the_floor_is_the_entropy_of_the_next_token():
    # nothing to know: ln 8 for every token; all to know: ln 8 for the first target alone
    assert run(get(NAME), steps=10, rule_share=0.0).metrics["floor_nats"] == pytest.approx(math.log(8))
    assert run(get(NAME), steps=10, rule_share=1.0, seq_len=4).metrics["floor_nats"] == pytest.approx(math.log(8) / 4)
    follows, other = 0.8 + 0.2 / 8, 0.2 / 8
    entropy = (math.log(8) - 31 * (follows * math.log(follows) + 7 * other * math.log(other))) / 32
    # 128 sequences of 31 such targets, whose cost has a standard deviation of 1.33 nats: standard error 0.021
    measured = run(get(NAME), steps=10, seq_len=32).metrics["floor_nats"]
    assert measured == pytest.approx(entropy, abs=5 * 0.021)


def test_a_causal_model_loses_nothing_when_the_future_is_cut_off():
    metrics = run(get(NAME), steps=10).metrics
    assert metrics["generation_loss_nats_causal"] == pytest.approx(metrics["loss_nats_causal"], rel=1e-6)  # float32
    for variant in VARIANTS[1:]:
        assert metrics[f"generation_loss_nats_{variant}"] > 1.01 * metrics[f"loss_nats_{variant}"], variant
