"""encoder_decoder_costs against PyTorch's own modules, and a count by hand."""

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "encoder_decoder_costs"
D, F, H, E, L, V, S, T = 128, 320, 4, 3, 2, 1000, 16, 8
SIZES = {
    "d_model": D,
    "d_ff": F,
    "n_encoder_layers": E,
    "n_decoder_layers": L,
    "vocabulary": V,
    "source_len": S,
    "target_len": T,
}


def numbers(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def layer_flop(rows: int, keys: int) -> int:
    return 2 * rows * (4 * D * D + 2 * D * F + 2 * keys * D)


def law(experiment: Experiment) -> None:
    """Parameters of nn.Transformer, which has biases in all matrices and a norm behind each stack; operations."""
    with torch.device("meta"):
        theirs = torch.nn.Transformer(D, H, E, L, F, batch_first=True)
    found = run(experiment, matrix_biases="all_biases", stack_norms=True, **SIZES).metrics
    assert found["stacks_parameters"] == numbers(theirs)
    assert found["encoder_layer_parameters"] == numbers(theirs.encoder.layers[0])
    assert found["decoder_layer_parameters"] == numbers(theirs.decoder.layers[0])
    assert found["decoder_extra_parameters"] == 4 * D * D + 6 * D
    assert found["stack_norm_parameters"] == 4 * D

    source = E * layer_flop(S, S) + L * 2 * S * 2 * D * D
    steps = sum(L * (layer_flop(1, t) + 2 * (2 * D * D + 2 * S * D)) for t in range(1, T + 1))
    single = L * (layer_flop(S, S) + sum(layer_flop(1, S + t) for t in range(1, T + 1)))
    assert found["writing_flop"] == source + steps
    assert found["encoder_writing_share"] == pytest.approx(source / (source + steps), rel=1e-12)  # but for division
    assert found["encoder_rerun_ratio"] == pytest.approx((T * source + steps) / (source + steps), rel=1e-12)
    assert found["over_stack_flop"] == pytest.approx((source + steps) / single, rel=1e-12)
    again = run(experiment, encoder_runs="encoder_each_step", **SIZES).metrics
    assert again["writing_flop"] == T * source + steps


def test_counts_agree_with_pytorch_and_with_a_count_by_hand():
    law(get(NAME))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_reading_flop(heads, 1, d_k, length) if params", "_reading_flop(heads, 1, d_k, 1) if params"),
        (
            'attention_biases=params.matrix_biases == "all_biases"',
            'attention_biases=params.matrix_biases != "all_biases"',
        ),
        ("for _ in range(2))", "for _ in range(1))"),
    ],
)
def test_the_law_catches(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_base_model_in_both_conventions():
    paper = run(get(NAME)).metrics
    assert paper["encoder_layer_parameters"] == 3_150_336
    assert paper["decoder_extra_parameters"] == 4 * 512**2 + 2 * 512 == 1_049_600
    assert paper["stacks_parameters"] == 44_101_632
    assert paper["seq2seq_parameters"] == 44_101_632 + 37_000 * 512
    pytorch = run(get(NAME), matrix_biases="all_biases", stack_norms=True, table_sharing="three_tables").metrics
    assert pytorch["stacks_parameters"] == 44_140_544
    assert pytorch["seq2seq_parameters"] == 44_140_544 + 3 * 37_000 * 512


def test_without_cross_attention_both_layers_are_alike():
    metrics = run(get(NAME), cross_sublayer=False, n_encoder_layers=4, n_decoder_layers=4).metrics
    assert metrics["decoder_extra_parameters"] == 0
    assert metrics["over_stack_parameters"] == 2
    assert metrics["step_matrix_share"] == 1


def test_a_step_leaves_the_matrices_of_the_source_keys_out():
    share = run(get(NAME), **SIZES).metrics["step_matrix_share"]
    assert share == (6 * D * D + 2 * D * F) / (8 * D * D + 2 * D * F)


def test_the_parts_add_up():
    result = run(get(NAME), matrix_biases="no_biases", **SIZES)
    parts = result.tables["parts"]
    for layer in ("encoder_layer", "decoder_layer"):
        of_layer = parts["part_parameters"][parts["seq2seq_layer"] == layer]
        assert of_layer.sum() == result.metrics[f"{layer}_parameters"]
    writing = result.tables["writing"]
    once = writing["flop_so_far"][writing["writing_way"] == "encoder_once"]
    assert once[-1] == result.metrics["writing_flop"]
    assert np.all(np.diff(once) > 0)
