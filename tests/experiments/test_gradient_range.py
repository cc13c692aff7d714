"""gradient_range against gradients by PyTorch's own operations, in float64, rounded where the format stores them."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention

from engine import inputs, language_model
from engine.base import make_run
from engine.positions import rotary_angles, rotate
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "gradient_range"
SETTINGS = [
    {"averaged_tokens": 4096, "n_texts": 2, "seq_len": 24},
    {"averaged_tokens": 65536, "loss_scale_log2": 10, "source": "repeats"},
    {"low_dtype": "bfloat16", "averaged_tokens": 4096},
]


def gradients(p: dict, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all weights, and at the token logits, in float64, with fused attention and none of the engine's steps."""
    texts = inputs.draw_texts(make_run(seed), p["source"], p["n_texts"], p["seq_len"]).tokens
    dtype = getattr(torch, p["low_dtype"])
    stored = {name: w.to(dtype).double().requires_grad_() for name, w in language_model.load_weights().items()}
    n_heads, d_k = language_model.N_HEADS, language_model.D_K
    angles = rotary_angles(torch.arange(p["seq_len"], dtype=torch.float64), d_k)
    x = stored["embedding"][texts]
    for layer in range(language_model.N_LAYERS):
        w = {name: stored[f"{layer}.{name}"] for name in ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "W_up", "W_down")}
        normed = layer_norm(x, (x.shape[-1],), stored[f"{layer}.norm_1"])
        q, k, v = (normed @ w["W_q"].T + w["b_q"], normed @ w["W_k"].T + w["b_k"], normed @ w["W_v"].T)
        q, k, v = (y.unflatten(-1, (n_heads, d_k)).transpose(1, 2) for y in (q, k, v))
        mixed = scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ w["W_o"].T
        x = x + gelu(layer_norm(x, (x.shape[-1],), stored[f"{layer}.norm_2"]) @ w["W_up"].T) @ w["W_down"].T
    logits = layer_norm(x, (x.shape[-1],), stored["norm"]) @ stored["embedding"].T / math.sqrt(language_model.D_MODEL)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten(), reduction="sum") / p["averaged_tokens"]
    *found, at_logits = torch.autograd.grad(loss, [*stored.values(), logits])
    return torch.cat([g.flatten() for g in found]), at_logits[:, :-1].flatten()


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | given
        result = run(experiment, seed=5, **given)
        got, (weights, at_logits) = result.metrics, gradients(p, 5)
        assert got["weight_gradient_rms"] == pytest.approx(weights.square().mean().sqrt().item(), rel=1e-4)
        # the gradient at the token logits is rounded once, by the format, as far as its own error is smaller: the
        # probabilities are off by the passes' errors, which moves a few in a hundred over the edge
        stored = (at_logits * 2.0 ** p["loss_scale_log2"]).to(getattr(torch, p["low_dtype"]))
        assert got["token_gradients_lost_share"] == pytest.approx((stored == 0).double().mean().item(), abs=0.02), given
        # half a distance of the format, some ten times over on the way forward and back, and what is lost
        eps = torch.finfo(getattr(torch, p["low_dtype"])).eps
        assert eps / 4 < got["gradient_error_low"] < 40 * eps, given
        assert got["gradients_not_finite_share"] == 0
        table = result.tables["by_scale"]
        lost = dict(zip(table["loss_scale"], table["outside_share"], strict=False))
        at = math.log2(min(lost, key=lambda s: abs(math.log2(s) - p["loss_scale_log2"])))
        assert lost[2.0**at] <= 1
        shares = result.tables["histogram"]
        for name in set(shares["gradient_of"]):
            assert shares["gradient_share"][shares["gradient_of"] == name].sum() == pytest.approx(1)
        mine = shares["gradient_of"] == "token_logits"
        octaves = np.clip(np.floor(np.log2(at_logits[at_logits != 0].abs().numpy())), -48, 4)
        for size, share in zip(shares["gradient_size"][mine], shares["gradient_share"][mine], strict=True):
            assert share == pytest.approx(np.mean(octaves == np.log2(size)), abs=0.01)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/ params.averaged_tokens", "/ tokens.numel()"),
        ("loss * 2.0**loss_scale_log2", "loss"),  # divided by a scale it was not multiplied with
        ("* 2.0**-loss_scale_log2", "* 1.0"),
        ("np.frexp(values)[1] - 1", "np.frexp(values)[1]"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=1, **params).metrics


def test_a_scale_undoes_an_average_to_the_last_bit():
    # powers of two move exponents and nothing else, as long as nothing reaches the ends of the format
    one = metrics(averaged_tokens=4096, loss_scale_log2=4)
    other = metrics(averaged_tokens=65536, loss_scale_log2=8)
    for name in (
        "gradients_lost_share",
        "gradient_error_low",
        "token_gradients_lost_share",
        "logit_gradients_lost_share",
    ):
        assert one[name] == pytest.approx(other[name], rel=1e-4), name


def test_float32_is_its_own_reference():
    found = metrics(low_dtype="float32")
    assert found["gradients_lost_share"] == found["gradient_error_low"] == found["gradients_not_finite_share"] == 0


def test_too_large_a_scale_leaves_nothing_finite():
    found = metrics(loss_scale_log2=40)
    assert found["gradients_not_finite_share"] > 0.9
    assert found["gradient_error_low"] > 0.9
    assert found["largest_gradient"] > 65504
