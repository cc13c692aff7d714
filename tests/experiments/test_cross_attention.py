"""cross_attention against PyTorch's own attention in float64, and which orders and tokens reach which outputs."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "cross_attention"
SIZES = {"q_len": 5, "kv_len": 9, "padding_len": 3, "d_model": 32, "d_source": 20, "n_heads": 4}
ROUNDING = 1e-12  # float64, sums of at most 64 terms of size 1; a wrong call is off by more than 0.01


def attend(x: torch.Tensor, memory: torch.Tensor, t: dict[str, torch.Tensor], mask=None) -> torch.Tensor:
    """PyTorch's attention on the recorded matrices, each divided by the root of its rows."""
    q, k, v = (
        (tokens @ t[name] / len(t[name]) ** 0.5).unflatten(-1, (4, -1)).transpose(0, 1)
        for tokens, name in ((x, "q"), (memory, "k"), (memory, "v"))
    )
    context = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return context.transpose(0, 1).flatten(-2) @ t["o"] / len(t["o"]) ** 0.5


def encode(source: torch.Tensor, t: dict[str, torch.Tensor], mask=None) -> torch.Tensor:
    W = [t[f"E{i}"] / len(source[0]) ** 0.5 for i in range(4)]
    return source + scaled_dot_product_attention(*(source @ M for M in W[:3]), attn_mask=mask) @ W[3]


def apart(out: torch.Tensor, other: torch.Tensor) -> float:
    return float((out - other).abs().max() / other.square().mean().sqrt())


def law(experiment: Experiment) -> None:
    """Each metric of the call against the same call of PyTorch's."""
    result, draws = recorded(experiment, **SIZES, cross_mask="no_mask", padding_side="padding_left")
    names = (
        "source",
        "target",
        "other",
        "source_padding",
        "target_padding",
        "E0",
        "E1",
        "E2",
        "E3",
        "q",
        "k",
        "v",
        "o",
    )
    t = {name: torch.from_numpy(draw) for name, draw in zip(names, draws, strict=True)}
    plain = attend(t["target"], encode(t["source"], t), t)
    padded = torch.cat((t["source_padding"].expand(3, -1), t["source"]))
    real = torch.arange(12) >= 3
    wanted = apart(attend(t["target"], encode(padded, t, real[None]), t), plain)
    assert result.metrics["padding_error"] == pytest.approx(wanted, abs=1e-9)
    assert result.metrics["encoder_order_error"] < ROUNDING
    assert result.metrics["source_order_error"] < ROUNDING
    assert result.metrics["target_order_error"] < ROUNDING
    assert result.metrics["earlier_output_change"] < ROUNDING
    assert result.metrics["output_rows"] == 5
    assert result.metrics["keys_seen_min"] == 9


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("drawn.target[:-1], drawn.other_token", "drawn.other_token, drawn.target[1:]"),
        ("return source + attention(", "return attention("),
        ("weights = softmax(logits if", "weights = softmax(2 * logits if"),
        ("else (more, tokens))", "else (tokens, more))"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_padding_mask_leaves_nothing_of_the_padding():
    metrics = run(get(NAME), dtype="float64", **SIZES).metrics
    assert metrics["padding_error"] < ROUNDING
    assert metrics["padding_weight_share"] == 0


def test_left_padding_moves_the_source_under_positions_that_count_places():
    for positions in ("added_to_source", "rope_on_both"):
        both = [
            run(get(NAME), dtype="float64", cross_positions=positions, padding_side=side, **SIZES).metrics
            for side in ("padding_right", "padding_left")
        ]
        assert both[0]["padding_error"] < ROUNDING < 0.01 < both[1]["padding_error"]


def test_a_causal_mask_hides_the_source():
    metrics = run(get(NAME), cross_mask="causal", **SIZES).metrics
    assert metrics["keys_seen_min"] == 1
    assert metrics["padding_error"] > 0.1


def test_positions_stay_with_the_rows_of_the_encoder():
    table = run(get(NAME), dtype="float64", **SIZES).tables["orders"]
    errors = {(p, r): e for p, r, e in zip(*table.values(), strict=True)}
    assert errors["added_to_source", "encoder_outputs"] < ROUNDING < 0.1 < errors["added_to_source", "source_tokens"]
    assert errors["rope_on_queries", "source_tokens"] < ROUNDING < 0.1 < errors["rope_on_both", "encoder_outputs"]


def test_keys_of_the_target_leak_its_future_and_give_the_order_away():
    sizes = SIZES | {"q_len": 9}
    metrics = run(get(NAME), dtype="float64", cross_wiring="keys_from_target", **sizes).metrics
    assert metrics["earlier_output_change"] > 0.1
    assert metrics["source_order_error"] > 0.1
    with pytest.raises(ParamsError, match="keys_beside_values"):
        get(NAME).Params(cross_wiring="keys_from_target", q_len=5, kv_len=9)


def test_swapped_roles_return_a_row_for_each_source_token():
    metrics = run(get(NAME), dtype="float64", cross_wiring="roles_swapped", **SIZES).metrics
    assert metrics["output_rows"] == 9
    assert metrics["target_order_error"] < ROUNDING
    assert metrics["earlier_output_change"] > 0.1


def test_the_map_shows_every_key():
    table = run(get(NAME), **SIZES).tables["weights"]
    assert len(table["attention_weight"]) == 5 * 12
    rows = table["attention_weight"].reshape(5, 12).sum(1)
    assert np.allclose(rows, 1, atol=1e-5)  # float32 sums of 12 weights
