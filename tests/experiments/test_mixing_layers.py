"""mixing_layers against table 1 with its constants, and against layers of torch that really run."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "mixing_layers"
N, D, H, TAPS, WINDOW = 48, 64, 4, 4, 8
SIZES = {"seq_len": N, "d_model": D, "n_heads": H, "conv_taps": TAPS, "window": WINDOW}


def of_torch(layer, x):
    with FlopCounterMode(display=False) as flops:
        layer(x)
    return flops.get_total_flops()


def law(experiment: Experiment) -> None:
    recurrent = 2 * N * 2 * D * D
    operations = {
        "self_attention": 2 * 2 * N * N * D,
        "window_attention": 2 * 2 * N * WINDOW * D,
        "linear_attention": 2 * 2 * N * D * (D // H),
        "recurrent_layer": recurrent,
        "lstm_layer": 4 * recurrent,
        "convolution": 2 * TAPS * N * D * D,
        "dilated_convolution": 2 * TAPS * N * D * D,
    }
    steps = {
        "self_attention": 1,
        "window_attention": math.ceil((N - 1) / (WINDOW - 1)),
        "linear_attention": 1,
        "recurrent_layer": N - 1,
        "lstm_layer": N - 1,
        "convolution": math.ceil((N - 1) / (TAPS - 1)),
        "dilated_convolution": math.ceil(math.log(N, TAPS)),
    }
    chains = {"recurrent_layer": N, "lstm_layer": N, "convolution": 1, "dilated_convolution": 1}
    for kind, flop in operations.items():
        m = run(experiment, mixing_layer=kind, **SIZES).metrics
        assert m["layer_flop"] == flop, kind
        assert m["flop_to_recurrent"] == flop / recurrent
        assert m["flop_to_lstm"] == flop / (4 * recurrent)
        assert m["signal_steps"] == steps[kind], kind
        assert m["longest_chain"] == chains.get(kind, 4), kind  # q or k, q·k, weights·v, the output
        counted = run(experiment, mixing_layer=kind, projections_counted=True, **SIZES).metrics
        four = 4 * 2 * N * D * D if kind.endswith("attention") else 0
        assert counted["layer_flop"] == flop + four, kind


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mixed = q @ (k.mT @ v)", "mixed = q @ k.mT @ v"),  # from the left: quadratic again
        ('"flop_to_lstm": mine / flop["lstm_layer"]', '"flop_to_lstm": mine / flop["recurrent_layer"]'),
        ("params.conv_taps**layer", "params.conv_taps"),  # the same gap in every layer
        ("range(1, taps)", "range(1, taps - 1)"),
        ("n * _counted(params, kind, 1) if kind in RECURRENT", "_counted(params, kind, 1) if kind in RECURRENT"),
        ("return out @ matrix(1) if projected else out", "return out"),
        ("row @ W_x + h @ W_h", "row @ W_x + row @ W_h"),
        (".unfold(-2, count, 1)", ".unfold(-2, count, 1).flip(-3)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_layers_of_torch_take_as_many_operations():
    x = torch.randn(1, D, N)
    conv = torch.nn.Conv1d(D, D, TAPS, padding=TAPS - 1, bias=False)
    per_position = of_torch(conv, x) / (N + TAPS - 1)  # padding on both sides makes more outputs than inputs
    assert run(get(NAME), mixing_layer="convolution", **SIZES).metrics["layer_flop"] == N * per_position
    for kind, layer in (("recurrent_layer", torch.nn.RNNCell(D, D)), ("lstm_layer", torch.nn.LSTMCell(D, D))):
        per_token = of_torch(layer, torch.randn(1, D))
        assert run(get(NAME), mixing_layer=kind, **SIZES).metrics["layer_flop"] == N * per_token, kind


def test_a_window_is_attention_with_a_mask():
    from engine.experiments.mixing_layers import _in_window

    q, k, v = (torch.randn(H, N, 8, generator=torch.Generator().manual_seed(n)).double() for n in range(3))
    back = torch.arange(N)[:, None] - torch.arange(N)
    logits = (q @ k.mT).masked_fill((back < 0) | (back >= WINDOW), -torch.inf)  # without a scale, as there
    assert torch.allclose(_in_window(q, k, v, WINDOW, False), torch.softmax(logits, -1) @ v, rtol=0, atol=1e-12)


def test_one_layer_is_enough_where_the_reach_is():
    m = run(get(NAME), mixing_layer="window_attention", seq_len=16, window=16).metrics
    assert m["signal_steps"] == 1
    assert run(get(NAME), mixing_layer="convolution", seq_len=2).metrics["signal_steps"] == 1
    assert run(get(NAME), mixing_layer="recurrent_layer", seq_len=2).metrics["signal_steps"] == 1
