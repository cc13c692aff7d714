"""norm_rewriting: its pass against the model's own, the rewritings against matrices written out, and what must fail."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm

from engine.base import make_run
from engine.inputs import draw_texts
from engine.language_model import D_MODEL, forward, load_weights, token_losses
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "norm_rewriting"
C = torch.eye(D_MODEL, dtype=torch.float64) - 1 / D_MODEL


def law(experiment: Experiment) -> None:
    weights = load_weights(dtype=torch.float64)
    tokens = draw_texts(make_run(2), "stories", 2, 16).tokens
    losses = token_losses(forward(weights, tokens), tokens).mean().item()
    p = {"seed": 2, "dtype": "float64", "n_texts": 2, "seq_len": 16}
    for added in (0.0, 2.0):
        for name in ("centred_and_rms", "centred_folded_and_rms", "gains_folded", "layer_norm_kept"):
            metrics = run(experiment, norm_rewriting=name, uniform_added=added, **p).metrics
            assert metrics["kept_loss_nats"] == pytest.approx(losses, rel=1e-9), (name, added)  # float64
            assert metrics["rewritten_logits_change"] < 1e-9, (name, added)
            assert metrics["gain_numbers"] == (0 if "folded" in name else 7 * D_MODEL)
    # the stream before the first norm is the table, whose mean is known
    metrics = run(experiment, uniform_added=2.0, **p).metrics
    x = weights["embedding"][tokens] + 2
    share = (x.mean(-1) ** 2 / (x**2).mean(-1)).mean().item()
    assert metrics["first_uniform_share_times_d"] == pytest.approx(share * D_MODEL, rel=1e-9)
    # without gains: the last step by itself, from a model whose other gains are folded
    bare = {name: torch.ones_like(w) if "norm" in name else w for name, w in weights.items()}
    expected = token_losses(forward(bare, tokens), tokens).mean().item()
    metrics = run(experiment, norm_rewriting="gains_left_out", **p).metrics
    assert metrics["rewritten_loss_nats"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('for writer in ("W_o", "W_down")', 'for writer in ("W_o",)'),
        ('_centred(model[f"{layer}.{writer}"], 0)', '_centred(model[f"{layer}.{writer}"], 1)'),
        ('_centred(model["embedding"], 1)', '_centred(model["embedding"], 0)'),
        ("form[matrix] * model[gain]", "form[matrix] / model[gain]"),
        ("+ params.uniform_added", "* (1 + params.uniform_added)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("name", ["rms_exchanged", "centred_all_but_table", "gains_left_out", "folded_into_tied_table"])
def test_what_is_not_exact_shows(name):
    metrics = run(get(NAME), norm_rewriting=name, uniform_added=2.0, dtype="float64").metrics
    assert metrics["rewritten_logits_change"] > 0.1
    assert metrics["rewriting_loss_added_nats"] > 0.05


def test_a_layer_norm_model_does_not_see_the_vector_of_ones():
    losses = [run(get(NAME), uniform_added=added, dtype="float64").metrics["kept_loss_nats"] for added in (0.0, 8.0)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)  # float64


def test_centring_is_the_matrix_it_is_said_to_be():
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(5, D_MODEL, generator=generator, dtype=torch.float64)
    centred = x @ C
    rms = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(rms, layer_norm(x, (D_MODEL,)), rtol=0, atol=1e-12)


def test_the_share_of_a_random_direction_is_one_over_d():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((4096, D_MODEL))
    share = (x.mean(-1) ** 2 / (x**2).mean(-1)).mean() * D_MODEL
    assert share == pytest.approx(1, abs=5 * math.sqrt(2 / 4096))  # a squared normal, whose variance is 2
