"""training_flops against PyTorch's counter on a module, and the passes written out product by product."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "training_flops"
SIZES = {"n_layers": 2, "d_model": 128, "ffn_ratio": 3, "seq_len": 32, "vocabulary": 64}


def products() -> dict[str, int]:
    """Operations of each product of one sequence."""
    tokens, d = 32, 128
    return {
        "square": 2 * tokens * d * d,
        "core": 2 * 2 * tokens * tokens * d,
        "ffn": 2 * 2 * tokens * d * 3 * d,
        "head": 2 * tokens * d * 64,
    }


def law(experiment: Experiment) -> None:
    p = products()
    block = 4 * p["square"] + p["core"] + p["ffn"]
    forward = 2 * block + p["head"]

    def measured(**params: object) -> dict[str, float]:
        return run(experiment, **SIZES, **params).metrics

    m = measured()
    assert m["forward_flop"] == forward
    assert m["backward_flop"] == 2 * forward
    assert m["recomputed_flop"] == 0
    # the first block's q, k and v need no gradient of what they read
    assert measured(trained="matrices")["backward_flop"] == 2 * forward - 3 * p["square"]
    # the gradient passes the head to the block; nothing passes below q, k and v... but their gains, which are trained
    assert measured(trained="last_block")["backward_flop"] == p["head"] + 2 * block
    assert measured(trained="head_only")["backward_flop"] == p["head"]
    thin = 2 * 32 * 128 * 8
    adapters = measured(trained="adapters")
    assert adapters["forward_flop"] == forward + 2 * 2 * 2 * thin  # two layers, two matrices, two thin ones each
    # one gradient of each frozen product, and none of q, k and v in the first block, whose input wants none; its keys
    # want none either, as no adapter stands beside W_k: three products of attention there, not four
    frozen = p["head"] + 2 * (p["ffn"] + p["square"]) + 3 * p["square"] + 2 * p["core"] + 1.5 * p["core"]
    # two gradients of each thin product, but one of the two in the first block that read its input
    assert adapters["backward_flop"] == frozen + (2 * 2 * 2 * 2 - 2) * thin
    assert measured(recompute="whole_blocks")["recomputed_flop"] == 2 * block
    assert measured(recompute="attention_weights")["recomputed_flop"] == 2 * p["core"] / 2
    assert measured(recompute="whole_blocks")["backward_flop"] == 2 * forward
    assert measured(recompute="attention_weights")["attention_backward_to_forward"] == 2.5
    assert measured(recompute="whole_blocks")["hfu_to_mfu"] == (3 * forward + 2 * block) / (3 * forward)
    n_parameters = 2 * (4 + 6) * 128**2 + 5 * 128 + 2 * 64 * 128
    assert m["six_n_ratio"] == 6 * n_parameters * 32 / (3 * forward)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"matrices": [*matrices, outer["unembedding"]]', '"matrices": everything'),
        ('"last_block": of_blocks[-1]', '"last_block": of_blocks[0]'),
        ("params.recompute)[1] - kept[1]", "params.recompute)[0]"),
        ('6 * step["n_parameters"]', '2 * step["n_parameters"]'),
        ("lambda q, k, v: attention_without_weights(q, k, v, keep=keep)", "work"),
        ("n_heads = params.d_model // D_K", "n_heads = 2 * params.d_model // D_K"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_one_linear_layer_on_data_has_one_gradient_product_and_two_behind_another():
    layers = torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 64, bias=False)
    x = torch.randn(32, 64)
    with FlopCounterMode(display=False) as forward:
        out = layers[1](layers[0](x))
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    one = 2 * 32 * 64 * 128
    assert forward.get_total_flops() == 2 * one
    assert backward.get_total_flops() == one + 2 * one


def test_the_table_shows_every_choice_relative_to_its_forward_pass():
    result = run(get(NAME), recompute="whole_blocks")
    table = result.tables["passes"]
    assert len(table["trained"]) == 5 * 3
    assert (table["relative_flop"][table["pass"] == "forward_pass"] == 1).all()
    mine = (table["trained"] == "everything") & (table["pass"] == "recomputed")
    assert table["relative_flop"][mine].item() == result.metrics["recomputed_to_forward"]
