"""gradient_signal against gradients taken one batch at a time from the model on the whiteboard."""

import itertools

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests import recall_reference
from tests.harness import assert_law_catches, run

NAME = "gradient_signal"
SETTINGS = [
    {"d_k": 16, "kv_len": 4, "scale": "none", "n_batches": 16},
    {"d_k": 16, "kv_len": 4, "scale": "inv_sqrt_d_k", "n_batches": 18, "init": "normal_002"},
    {"d_k": 4, "kv_len": 4, "scale": "inv_d_k", "n_batches": 16, "init": "folded"},
    {"d_k": 512, "kv_len": 2, "scale": "inv_sqrt_d_k", "n_batches": 18, "init": "linear_default"},  # several chunks
]


def gradients(p: dict, seed: int) -> dict[str, np.ndarray]:
    """One gradient a batch. Shapes: (n_batches, n_weights)."""
    scale = {"none": 1, "inv_sqrt_d_k": p["d_k"] ** -0.5, "inv_d_k": 1 / p["d_k"]}[p["scale"]]
    model = recall_reference.Model(seed, p["d_k"], p["kv_len"], 1, p.get("init", "unit"), scale, learned=False)
    found = {"W_q": [], "W_v": []}
    drawn = recall_reference.sequences(recall_reference.generator(seed, 1), p["kv_len"], p["n_batches"], 32)
    for batch in zip(*drawn, strict=True):
        for name, g in zip(found, torch.autograd.grad(model(*batch)[0], [model.q, model.v]), strict=True):
            found[name].append(g.flatten().numpy())
    return {name: np.array(g) for name, g in found.items()}


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = run(experiment, seed=8, dtype="float64", **p)
        for name, g in gradients(p, 8).items():
            norm = np.mean([x @ x for x in g])
            signal = np.mean([x @ y for x, y in itertools.permutations(g, 2)])
            share = (max(0.0, signal) / norm) ** 0.5
            # inner products are float32: 1e-7 of the norms, more of a small difference of theirs
            assert result.metrics[f"grad_{name}_norm"] == pytest.approx(norm**0.5, rel=1e-5), (p, name)
            assert result.metrics[f"signal_share_{name}"] == pytest.approx(share, rel=1e-4, abs=1e-3), (p, name)
            table = result.tables["by_batch"]
            rows = table["weight"] == name
            assert table["n_sequences"][rows].tolist() == [32, 64, 128], p
            for m, measured, theory in zip(
                (1, 2, 4), table["signal_share"][rows], table["theory_share"][rows], strict=True
            ):
                means = [np.mean(g[i : i + m], axis=0) for i in range(0, len(g) - m + 1, m)]
                of_means = (max(0.0, signal) / np.mean([x @ x for x in means])) ** 0.5
                assert measured == pytest.approx(of_means, rel=1e-4, abs=1e-3), (p, name, m)
                noise = norm - max(0.0, signal)
                assert theory == pytest.approx(
                    (max(0.0, signal) / (max(0.0, signal) + noise / m)) ** 0.5, rel=1e-4, abs=1e-3
                )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- n * norm_square) / (n * (n - 1))", ") / (n * n)"),  # batches with themselves counted as signal
        ("scale_value(params.scale, params.d_k)", "1.0"),  # scale dropped
        ("(norm_square - signal_square) / m)", "(norm_square - signal_square))"),  # noise that does not fall
        ("some.mean(axis=(1, 3))", "some.mean(axis=(0, 2))"),  # means over the wrong batches
        ('stream(seed, "train")', 'stream(seed, "evaluation")'),
        ("part[start : start + at_once]", "part[:at_once]"),  # the first chunk again and again
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_unscaled_gradient_is_larger_and_noisier():
    for seed in range(5):
        none, scaled = (
            run(get(NAME), seed=seed, d_k=256, scale=scale, n_batches=128).metrics for scale in ("none", "inv_sqrt_d_k")
        )
        assert none["grad_W_q_norm"] > 2 * scaled["grad_W_q_norm"]
        assert none["signal_share_W_q"] < 0.75 * scaled["signal_share_W_q"]
