"""cross_cache: decoding behind two caches against PyTorch's attention on everything at once, in float64."""

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "cross_cache"
S, P, G, L, D, H = 7, 3, 5, 3, 32, 4
SIZES = {"source_len": S, "prompt_len": P, "new_tokens": G, "n_layers": L, "d_model": D, "n_heads": H}
ROUNDING = 1e-12  # float64; a wrong cache is off by more than 0.01


def turn(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions, by complex numbers. Shapes: (n_heads, seq_len, d_k)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = (torch.arange(x.shape[-2])[:, None].float() * rates).double()
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (H, -1)).transpose(0, 1)


def join(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).flatten(-2)


def whole_pass(layers, x: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    """Layer i reads sources[i], without any cache."""
    for (own, cross), source in zip(layers, sources, strict=True):
        y = layer_norm(x, (D,))
        q, k, v = turn(heads(y @ own[0].T)), turn(heads(y @ own[1].T)), heads(y @ own[2].T)
        x = x + join(scaled_dot_product_attention(q, k, v, is_causal=True)) @ own[3].T
        q, k, v = heads(layer_norm(x, (D,)) @ cross[0].T), heads(source @ cross[1].T), heads(source @ cross[2].T)
        x = x + join(scaled_dot_product_attention(q, k, v)) @ cross[3].T
        x = x + gelu(layer_norm(x, (D,)) @ own[4].T) @ own[5].T
    return x


def law(experiment: Experiment) -> None:
    """Another source's keys in the cache give, step by step, other outputs than the right ones."""
    result, draws = recorded(experiment, cross_caching="other_source", **SIZES)
    tensors = [torch.from_numpy(draw) for draw in draws]
    crosses = [[M / D**0.5 for M in tensors[4 * i : 4 * i + 4]] for i in range(L)]
    rest = tensors[4 * L :]
    owns = [[M / M.shape[1] ** 0.5 for M in rest[6 * i : 6 * i + 6]] for i in range(L)]
    text, source, other = rest[6 * L :]
    layers = list(zip(owns, crosses, strict=True))
    right, wrong = (whole_pass(layers, text, [s] * L) for s in (source, other))
    unit = right.square().mean().sqrt()
    wanted = (wrong - right)[P:].abs().amax(-1) / unit
    assert np.allclose(
        result.tables["errors"]["decoded_error"], wanted.numpy(), rtol=1e-5
    )  # angles are float32, a few times 1e-7
    metrics = result.metrics
    token = 2 * L * D * 2  # bytes of a key and a value in 16 bits, all layers
    assert metrics["cross_held_bytes"] == metrics["first_step_cross_bytes"] == S * token
    assert metrics["self_held_bytes"] == (P + G - 1) * token
    assert metrics["self_layers_changed_by_source"] == L - 1
    assert run(experiment, dtype="float64", **SIZES).metrics["decoded_error"] < ROUNDING


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('_heads(params, norm(x) @ layer["cross_W_q"].mT)', '_heads(params, x @ layer["cross_W_q"].mT)'),
        ('_heads(params, source @ layer["cross_W_v"].mT)', '_heads(params, source @ layer["cross_W_k"].mT)'),
        ("place = params.prompt_len + step - 1", "place = params.prompt_len"),
        (
            'read = cross_of_other if params.cross_caching == "other_source"',
            'read = cross_of_other if params.cross_caching == "never"',
        ),
        ("keep=keep)", "keep=None)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_appending_grows_and_no_output_shows_it():
    metrics = run(get(NAME), dtype="float64", cross_caching="appended", **SIZES).metrics
    assert metrics["decoded_error"] < ROUNDING
    assert (
        metrics["cross_held_bytes"] == G * metrics["first_step_cross_bytes"] / 2
    )  # twice the source in the first step


def test_text_read_beside_another_source_is_wrong_from_the_second_layer_on():
    one, two = (
        run(get(NAME), dtype="float64", cross_caching="text_of_other", **SIZES | {"n_layers": n}).metrics
        for n in (1, 2)
    )
    assert one["decoded_error"] < ROUNDING < 0.001 < two["decoded_error"]
