"""source_conditioning against PyTorch's own attention and autograd in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "source_conditioning"
T, S, D, H = 6, 11, 32, 4
SIZES = {"text_len": T, "source_len": S, "d_model": D, "n_heads": H}


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (H, -1)).transpose(0, 1)


def attend(x: torch.Tensor, x_kv: torch.Tensor, W: list[torch.Tensor], mask=None) -> torch.Tensor:
    q, k, v = (heads(tokens @ M) for tokens, M in zip((x, x_kv, x_kv), W, strict=False))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(-2) @ W[3]


def law(experiment: Experiment) -> None:
    gate = 0.7
    result, draws = recorded(experiment, cross_gate=gate, **SIZES)
    text, source, probe, *matrices = (torch.from_numpy(draw) for draw in draws)
    own, other = ([M / D**0.5 for M in matrices[i : i + 4]] for i in (0, 4))
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    normed = layer_norm(text, (D,))
    plain = text + attend(normed, normed, own, causal)
    seen = torch.cat((torch.ones(T, S, dtype=torch.bool), causal), dim=1)
    with_prefix = text + attend(normed, torch.cat((source, normed)), own, seen)
    learned = [M.clone().requires_grad_() for M in other]
    g = torch.tensor(gate, dtype=torch.float64, requires_grad=True)
    gated = plain + torch.tanh(g) * attend(layer_norm(plain, (D,)), source, learned)
    (gated * probe).mean().backward()
    unit = plain.square().mean().sqrt()
    logits = heads(normed @ own[0])[:, -1:] @ heads(torch.cat((source, normed)) @ own[1]).mT / (D / H) ** 0.5
    wanted = {
        "text_weight_share": logits.softmax(-1)[..., S:].sum(-1).mean(),
        "prefix_effect": (with_prefix - plain).abs().max() / unit,
        "gated_effect": (gated - plain).abs().max() / unit,
        "gate_gradient": g.grad.abs(),
        "cross_matrix_gradient": torch.stack([M.grad.norm() for M in learned]).norm(),
    }
    for name, value in wanted.items():
        assert result.metrics[name] == pytest.approx(float(value.detach()), rel=1e-9), name  # rounding of float64
    assert result.metrics["mixture_error"] < 1e-12  # rounding of float64


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "share = torch.sigmoid(to_text.logsumexp(-1) - to_source",
            "share = torch.sigmoid(to_source.logsumexp(-1) - to_source",
        ),
        ("return plain + math.tanh(gate) * read", "return plain + gate * read"),
        ("plain + torch.tanh(learned_gate) * _attend", "plain + learned_gate * _attend"),
        (
            "weights = softmax(torch.cat((to_source, to_text), dim=-1))",
            "weights = softmax(torch.cat((to_source - 1, to_text), dim=-1))",
        ),
        (
            "read = _attend(params, other, _norm(plain), source, None)",
            "read = _attend(params, own, _norm(plain), source, None)",
        ),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_closed_gate_changes_nothing_and_is_all_that_learns():
    metrics = run(get(NAME), **SIZES).metrics
    assert metrics["gated_effect"] == metrics["cross_matrix_gradient"] == 0
    assert metrics["gate_gradient"] > 0


def test_a_closed_gate_before_a_zero_matrix_learns_nothing():
    metrics = run(get(NAME), zero_cross_out=True, **SIZES).metrics
    assert metrics["gate_gradient"] == metrics["cross_matrix_gradient"] == 0
    opened = run(get(NAME), zero_cross_out=True, cross_gate=0.5, **SIZES).metrics
    assert opened["gated_effect"] == opened["gate_gradient"] == 0
    assert opened["cross_matrix_gradient"] > 0


def test_without_a_prefix_all_weight_is_the_texts():
    table = run(get(NAME), **SIZES).tables["shares"]
    alone = table["conditioning"] == "gated_cross_attention"
    assert np.allclose(table["text_weight_share"][alone], 1, atol=1e-6)  # float32 sum of a row of weights
    left = table["text_weight_share"][~alone]
    assert (np.diff(left) < 0).all()
    assert math.isclose(left[-1], run(get(NAME), **SIZES).metrics["text_weight_share"], rel_tol=1e-6)
