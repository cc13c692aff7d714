"""encoder_decoder_reach against PyTorch's own encoder and decoder, and which tokens reach which states."""

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "encoder_decoder_reach"
S, T, L, D, H = 5, 4, 2, 16, 2
SIZES = {"source_len": S, "target_len": T, "n_layers": L, "d_model": D, "n_heads": H}
ROUNDING = 1e-12  # float64, a few layers of sums of at most 64 terms of size 1


def pytorch_states(draws: list[np.ndarray], norm_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Last states of source and target, by PyTorch's layers, for the tokens as they are and with each replaced."""
    matrices = iter([torch.from_numpy(m) / m.shape[-1] ** 0.5 for m in draws[:-3]])
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "dtype": torch.float64}

    def load_attention(attention: torch.nn.MultiheadAttention) -> None:
        attention.in_proj_weight.copy_(torch.cat([next(matrices) for _ in range(3)]))
        attention.out_proj.weight.copy_(next(matrices))
        attention.in_proj_bias.zero_()
        attention.out_proj.bias.zero_()

    def load_ffn(layer: torch.nn.Module) -> None:
        for linear in (layer.linear1, layer.linear2):
            linear.weight.copy_(next(matrices))
            linear.bias.zero_()

    with torch.no_grad():
        encoder = [torch.nn.TransformerEncoderLayer(D, H, 4 * D, **options) for _ in range(L)]
        decoder = [torch.nn.TransformerDecoderLayer(D, H, 4 * D, **options) for _ in range(L)]
        for layer in encoder:
            load_attention(layer.self_attn)
            load_ffn(layer)
        for layer in decoder:
            load_attention(layer.self_attn)
            load_attention(layer.multihead_attn)
            load_ffn(layer)
        tokens, others = torch.from_numpy(draws[-3]), torch.from_numpy(draws[-2])
        each = torch.arange(S + T)
        copies = tokens.repeat(S + T + 1, 1, 1)
        copies[each, each] = others
        x, y = copies[:, :S], copies[:, S:]
        for layer in encoder:
            x = layer(x)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        for layer in decoder:
            y = layer(y, x, tgt_mask=hidden)
    return x, y


def law(experiment: Experiment) -> None:
    for position in ("norm_behind_sum", "norm_before_sublayer"):
        result, draws = recorded(experiment, norm_position=position, **SIZES)
        x, y = pytorch_states(draws, position == "norm_before_sublayer")
        states = torch.cat((x, y), 1)
        unit = states[-1].square().mean().sqrt()
        change = ((states[:-1] - states[-1]).abs().amax(-1).T / unit).numpy()
        found = result.tables["reach"]["state_change_log10"].reshape(S + T, S + T)
        assert np.allclose(found, np.log10(change.clip(1e-6)), atol=1e-5)  # the table is float32
        assert result.metrics["memory_size"] == pytest.approx(float(x[-1].square().mean().sqrt()), rel=ROUNDING)


def test_the_map_is_that_of_pytorchs_layers():
    law(get(NAME))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if reads else None", "if depth else None"),
        ('if self.params.memory_depth == "same_depth" else -1', "if True else -1"),
        ('self.params.target_mask == "causal_target"', "False"),
        ('== "norm_before_sublayer"', '== "norm_behind_sum"'),
    ],
)
def test_the_law_catches(old, new):
    assert_law_catches(law, NAME, old, new)


def test_what_depends_on_what_in_each_structure():
    both, encoder, decoder = (
        run(get(NAME), stack_kind=kind, **SIZES).metrics for kind in ("encoder_decoder", "encoder_only", "decoder_only")
    )
    assert both["source_on_source_share"] == encoder["source_on_source_share"] == 1
    assert decoder["source_on_source_share"] == S * (S + 1) / 2 / S**2
    assert both["source_on_target_pairs"] == decoder["source_on_target_pairs"] == 0
    assert encoder["source_on_target_pairs"] == S * T
    assert all(found["target_on_source_pairs"] == S * T for found in (both, encoder, decoder))
    assert both["target_on_later_pairs"] == decoder["target_on_later_pairs"] == 0
    assert encoder["target_on_later_pairs"] == T * (T - 1) / 2


def test_visible_pairs():
    metrics = run(get(NAME), **SIZES).metrics
    assert metrics["encoder_score_pairs"] == S * S
    assert metrics["decoder_score_pairs"] == T * (T + 1) / 2
    assert metrics["cross_score_pairs"] == T * S
    assert run(get(NAME), target_mask="open_target", **SIZES).metrics["decoder_score_pairs"] == T * T


def test_what_the_decoder_reads():
    plain, same, first = (
        run(get(NAME), **change, **SIZES).metrics
        for change in ({}, {"memory_depth": "same_depth"}, {"reading_layers": "first_decoder_layer"})
    )
    assert plain["last_memory_reached"] > 0.1
    assert plain["later_memory_reached"] > 0.1
    assert same["last_memory_reached"] == 0
    assert first["later_memory_reached"] == 0


def test_a_decoder_layer_without_cross_attention_is_an_encoder_layer_with_a_causal_mask():
    for position in ("norm_behind_sum", "norm_before_sublayer"):
        right, wrong = (
            run(get(NAME), dtype="float64", norm_position=position, target_mask=mask, **SIZES).metrics
            for mask in ("causal_target", "open_target")
        )
        assert right["bare_decoder_error"] < ROUNDING < 0.1 < wrong["bare_decoder_error"]


def test_a_norm_behind_a_norm_changes_next_to_nothing():
    behind, before = (
        run(get(NAME), dtype="float64", norm_position=position, **SIZES).metrics
        for position in ("norm_behind_sum", "norm_before_sublayer")
    )
    assert behind["stack_norm_change"] < 1e-4 < 0.1 < before["stack_norm_change"]  # epsilon 1e-5 beside 1
    assert behind["memory_size"] == pytest.approx(1, abs=1e-4)
    assert before["memory_size"] > 1.1


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ParamsError, match="heads_divide_width"):
        get(NAME).Params(d_model=16, n_heads=3)
