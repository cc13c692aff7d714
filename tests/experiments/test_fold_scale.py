"""fold_scale against PyTorch's own optimizers, one variant at a time, and against powers of d_k."""

import math

import numpy as np
import pytest
import torch

from engine.attention import attention
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "fold_scale"
SETTINGS = [
    {"d_model": 16, "d_k": 9, "seq_len": 6, "optimizer": "adam", "learning_rate": 0.01, "steps": 8},
    {"d_model": 16, "d_k": 16, "seq_len": 6, "optimizer": "sgd", "learning_rate": 0.1, "steps": 8},
    {"d_model": 16, "d_k": 9, "seq_len": 6, "optimizer": "sgd", "learning_rate": 0.1, "steps": 8, "lr_matched": True},
    {"d_model": 16, "d_k": 9, "seq_len": 6, "optimizer": "adam", "learning_rate": 0.01, "steps": 8, "lr_matched": True},
]


def losses(p: dict, folded: bool, seed: int) -> np.ndarray:
    """The loss at every step of one variant, trained by torch.optim."""
    g = torch.Generator().manual_seed(seed)
    d_model, d_k, seq_len = p["d_model"], p["d_k"], p["seq_len"]
    x, target = torch.randn(seq_len, d_model, generator=g).double(), torch.randn(seq_len, 8, generator=g).double()
    W_q, W_k, W_v = (torch.randn(rows, d_model, generator=g).double() / math.sqrt(d_model) for rows in (d_k, d_k, 8))
    root = math.sqrt(d_k)
    q_rate, q_epsilon = p["learning_rate"], 1e-8
    if folded:
        W_q = W_q / root
        if p.get("lr_matched"):
            q_rate, q_epsilon = q_rate / (d_k if p["optimizer"] == "sgd" else root), q_epsilon * root
    weights = [w.requires_grad_() for w in (W_q, W_k, W_v)]
    groups = [{"params": weights[:1], "lr": q_rate}, {"params": weights[1:], "lr": p["learning_rate"]}]
    if p["optimizer"] == "adam":
        groups[0]["eps"] = q_epsilon
        optimizer = torch.optim.Adam(groups)
    else:
        optimizer = torch.optim.SGD(groups)
    found = []
    for _ in range(p["steps"] + 1):
        out = attention(x @ W_q.T, x @ W_k.T, x @ W_v.T, rule="none" if folded else "inv_sqrt_d_k")
        loss = ((out - target) ** 2).mean()
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return np.array(found)


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = run(experiment, seed=6, **p)
        table, metrics = result.tables["training"], result.metrics
        scaled, folded = losses(p, False, 6), losses(p, True, 6)
        # float64, 8 steps; Adam divides by gradients, which loses a few digits of 1e-16
        np.testing.assert_allclose(table["loss"][table["variant"] == "inv_sqrt_d_k"], scaled, rtol=1e-9, err_msg=str(p))
        np.testing.assert_allclose(table["loss"][table["variant"] == "folded"], folded, rtol=1e-9, err_msg=str(p))
        ends = {"loss_start": scaled[0], "loss_scaled": scaled[-1], "loss_folded": folded[-1], "steps_done": p["steps"]}
        assert {name: metrics[name] for name in ends} == pytest.approx(ends, rel=1e-9), p
        assert metrics["loss_difference"] == pytest.approx(np.abs(folded - scaled).max(), rel=1e-6, abs=1e-12), p
        assert metrics["forward_difference"] < 1e-14, p
    for d_k in (4, 64, 100):
        root = math.sqrt(d_k)
        # exact for SGD; Adam's ε = 1e-8 beside gradients from 1e-5 up moves a step by up to 1e-3 of itself
        for optimizer, ratio in (("sgd", d_k), ("adam", root), ("relative_step", 1.0)):
            metrics = run(experiment, seed=2, optimizer=optimizer, d_k=d_k, steps=1).metrics
            assert metrics["grad_ratio"] == pytest.approx(root, rel=1e-10), (optimizer, d_k)
            assert metrics["first_step_ratio"] == pytest.approx(ratio, rel=1e-8 if optimizer == "sgd" else 2e-3), (
                optimizer,
                d_k,
            )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scale = fold.flip(0)", "scale = fold"),  # the folded one scaled twice, the other not at all
        ('"sgd": 2', '"sgd": 1'),  # the wrong match
        ("self.q_epsilon if i == 0 else EPSILON", "EPSILON"),  # ε not matched
        ("weight**2).mean(dim=(1, 2), keepdim=True)", "weight**2).mean()"),  # one size for both variants
        ("0.999 * second", "0.99 * second"),  # another Adam
        ("moved[1] / moved[0]", "moved[0] / moved[1]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(("optimizer", "learning_rate"), [("adam", 0.001), ("sgd", 0.3), ("relative_step", 0.01)])
def test_a_matched_learning_rate_undoes_the_fold(optimizer, learning_rate):
    metrics = run(
        get(NAME), seed=3, optimizer=optimizer, learning_rate=learning_rate, steps=40, lr_matched=True
    ).metrics
    # d_k = 64: the fold is a power of two and rounds nothing
    assert metrics["loss_difference"] == pytest.approx(0, abs=1e-12)
    assert metrics["logits_difference"] == pytest.approx(0, abs=1e-10)
    assert metrics["loss_scaled"] < metrics["loss_start"]


def test_without_it_adam_trains_the_two_apart():
    assert run(get(NAME), seed=3, optimizer="adam", steps=40).metrics["logits_difference"] > 0.1


def test_training_ends_before_a_divergence():
    result = run(get(NAME), seed=0, optimizer="sgd", learning_rate=1.0, steps=200)
    assert result.metrics["steps_done"] < 200
    assert np.isfinite(list(result.metrics.values())).all()
    assert len(result.tables["training"]["loss"]) == 2 * (result.metrics["steps_done"] + 1)


def test_one_coordinate_needs_no_scale():
    metrics = run(get(NAME), seed=1, d_k=1).metrics
    assert metrics["loss_difference"] == 0
    assert metrics["first_step_ratio"] == 1
