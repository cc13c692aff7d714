"""Stacks against torch.nn's own layers in float64, against each placement written out, and models side by side."""

import dataclasses

import pytest
import torch
from torch import nn

from engine.masks import keep_causal
from engine.residual_stream import PLACEMENTS, Wiring, deep_norm_scales, draw_stack, walk, walk_side_by_side

N_LAYERS, D_MODEL, D_FF, N_HEADS, BATCH, SEQ_LEN = 2, 12, 20, 3, 2, 5
EXACT = 1e-11  # float64: some hundred operations on numbers near 1


def drawn(seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """One stack of weights and an input, with an axis for the one model in front."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {name: w[None] for name, w in draw_stack(randn, N_LAYERS, D_MODEL, D_FF).items()}
    return weights, randn(1, BATCH, SEQ_LEN, D_MODEL)


def last(weights: dict[str, torch.Tensor], x: torch.Tensor, wiring: Wiring, keep=None) -> torch.Tensor:
    *_, step = walk(weights, x, wiring, n_heads=N_HEADS, keep=keep)
    return step.stream


def of_the_library(weights: dict[str, torch.Tensor], x: torch.Tensor, keep: torch.Tensor, pre: bool) -> torch.Tensor:
    for i in range(N_LAYERS):
        layer = nn.TransformerEncoderLayer(
            D_MODEL, N_HEADS, D_FF, dropout=0, activation="gelu", batch_first=True, norm_first=pre, dtype=x.dtype
        )
        of = {name: w[0, i].mT for name, w in weights.items()}
        with torch.no_grad():
            layer.self_attn.in_proj_weight.copy_(torch.cat([of["W_q"], of["W_k"], of["W_v"]]))
            layer.self_attn.out_proj.weight.copy_(of["W_o"])
            layer.linear1.weight.copy_(of["W_up"])
            layer.linear2.weight.copy_(of["W_down"])
            for linear in (layer.self_attn.out_proj, layer.linear1, layer.linear2):
                linear.bias.zero_()
            layer.self_attn.in_proj_bias.zero_()
            x = layer.train()(x, src_mask=~keep)
    return x


@pytest.mark.parametrize("placement", ["pre_norm", "post_norm"])
def test_pre_and_post_are_the_layers_of_the_library(placement):
    weights, x = drawn()
    keep = keep_causal(SEQ_LEN)
    wanted = of_the_library(weights, x[0], keep, placement == "pre_norm")
    assert torch.allclose(last(weights, x, Wiring(placement), keep)[0], wanted, rtol=0, atol=EXACT)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("residual", [True, False])
def test_a_placement_joins_stream_and_branch_as_it_says(placement, residual):
    """Each step from the one before: the branch is that of ``bare`` without a residual path, on what it reads."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (D_MODEL,))

    weights, x = drawn()
    wiring = Wiring(placement, residual, skip_scale=3.0)
    steps = list(walk(weights, x, wiring, n_heads=N_HEADS))
    assert len(steps) == 2 * N_LAYERS
    for i, step in enumerate(steps):
        one_layer = {name: w[:, i // 2 : i // 2 + 1] for name, w in weights.items()}
        read = norm(x) if placement in ("pre_norm", "sandwich") else x
        if i % 2:  # the network alone: what it gives behind an attention that gives what it is to read
            one_layer |= {"W_v": torch.eye(D_MODEL, dtype=x.dtype)[None, None]}
            one_layer |= {"W_o": torch.eye(D_MODEL, dtype=x.dtype)[None, None]}
            keep = torch.eye(SEQ_LEN, dtype=torch.bool)
        else:
            keep = None
        alone = list(walk(one_layer, read, Wiring("bare", residual=False), n_heads=N_HEADS, keep=keep))[i % 2].stream
        branch = norm(alone) if placement in ("output_norm", "sandwich") else alone
        stream = branch + (3.0 if placement == "post_norm" else 1.0) * x * residual
        x = norm(stream) if placement == "post_norm" else stream
        assert torch.allclose(step.branch, branch, rtol=0, atol=EXACT)
        assert torch.allclose(step.stream, x, rtol=0, atol=EXACT)


def test_models_side_by_side_are_each_as_alone():
    (a, x), (b, y) = drawn(0), drawn(1)
    both = {name: torch.cat([a[name], b[name]]) for name in a}
    out = last(both, torch.cat([x, y]), Wiring())
    assert torch.allclose(out, torch.cat([last(a, x, Wiring()), last(b, y, Wiring())]), rtol=0, atol=EXACT)


def test_the_norm_and_the_attention_are_those_that_are_asked_for():
    weights, x = drawn()
    rms = last(weights, x, Wiring(normalization="rms_norm"))
    assert (rms - last(weights, x, Wiring())).abs().max() > 1e-3
    calls = []

    def attend(q, k, v, keep=None):
        calls.append((q.shape, keep))
        return v

    list(walk(weights, x, Wiring(), n_heads=N_HEADS, attend=attend))
    assert calls == [((1, BATCH, N_HEADS, SEQ_LEN, D_MODEL // N_HEADS), None)] * N_LAYERS


def test_an_unknown_placement_is_named():
    weights, x = drawn()
    with pytest.raises(ValueError, match="'above' is none of bare, pre_norm"):
        next(walk(weights, x, dataclasses.replace(Wiring(), placement="above")))


MIXED = (*(Wiring(placement) for placement in PLACEMENTS), Wiring("post_norm", skip_scale=3.0))


def test_wirings_side_by_side_are_each_as_alone_and_so_are_their_gradients():
    one, x = drawn()
    keep = keep_causal(SEQ_LEN)
    weights = {name: w.repeat_interleave(len(MIXED), dim=0).requires_grad_() for name, w in one.items()}
    steps = list(walk_side_by_side(weights, x.expand(len(MIXED), -1, -1, -1), MIXED, n_heads=N_HEADS, keep=keep))
    found = torch.autograd.grad(steps[-1].stream.pow(3).sum(), list(weights.values()))
    for i, wiring in enumerate(MIXED):
        alone = {name: w.clone().requires_grad_() for name, w in one.items()}
        wanted = list(walk(alone, x, wiring, n_heads=N_HEADS, keep=keep))
        for step, alone_step in zip(steps, wanted, strict=True):
            assert torch.allclose(step.stream[i], alone_step.stream[0], rtol=0, atol=EXACT)
            assert torch.allclose(step.branch[i], alone_step.branch[0], rtol=0, atol=EXACT)
        gradients = torch.autograd.grad(wanted[-1].stream.pow(3).sum(), list(alone.values()))
        for gradient, alone_gradient in zip(found, gradients, strict=True):
            assert torch.allclose(gradient[i], alone_gradient[0], rtol=1e-9, atol=1e-9)  # cubes of numbers up to 20


@pytest.mark.parametrize("wiring", [Wiring(normalization="rms_norm"), Wiring(residual=False)])
def test_wirings_side_by_side_share_the_norm_and_have_a_residual_path(wiring):
    weights, x = drawn()
    with pytest.raises(ValueError, match="wanted LayerNorm and a residual path"):
        next(walk_side_by_side(weights, x, [wiring], n_heads=N_HEADS))


def test_constants_of_deep_norm():
    alpha, beta = deep_norm_scales(24)
    assert (alpha, beta) == (pytest.approx(2.6321, abs=1e-4), pytest.approx(0.26864, abs=1e-5))
