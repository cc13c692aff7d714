"""parameter_count and engine/built_decoder.py against PyTorch's own modules and counts written out by hand."""

import pytest
import torch

from engine.base import ParamsError
from engine.built_decoder import BUILT, PARTS, BuiltShape, count, modules
from engine.model_shapes import SHAPES, weights
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "parameter_count"
# of a GPT-2: two matrices in an FFN, biases and LayerNorm throughout, learned positions, one table
GPT_2 = {
    "n_layers": 12,
    "d_model": 768,
    "n_heads": 12,
    "n_kv_heads": 12,
    "d_k": 64,
    "d_ff": 3072,
    "ffn": "plain",
    "vocabulary": 50257,
    "tied_embedding": True,
    "matrix_biases": "all_biases",
    "norm_vectors": "gain_and_bias",
    "learned_positions": 1024,
}
SMALL = {"n_layers": 3, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_k": 24, "d_ff": 192, "vocabulary": 300}


def law(experiment: Experiment) -> None:
    m = run(experiment, **GPT_2).metrics
    assert m["model_parameters"] == 124_439_808  # nanoGPT's sizing notebook without biases has 102,144 less
    assert (
        run(experiment, **GPT_2 | {"matrix_biases": "no_biases", "norm_vectors": "gain_alone"}).metrics[
            "model_parameters"
        ]
        == 124_337_664
    )
    assert m["listed_ratio"] * m["model_parameters"] == pytest.approx(124_439_808 + 50257 * 768, rel=1e-12)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, device="meta")  # a block of that kind
    sizes = {"n_layers": 5, "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "d_k": 16, "d_ff": 256, "vocabulary": 300}
    m = run(experiment, **GPT_2 | sizes | {"learned_positions": 10}).metrics
    blocks = 5 * sum(p.numel() for p in layer.parameters())
    assert m["model_parameters"] == blocks + (300 + 10) * 64 + 2 * 64
    m = run(experiment, **SMALL).metrics  # shared keys, wide heads, a gate, two tables
    attention, ffn = 3 * 64 * 24 * (4 + 2 + 2 + 4), 3 * 3 * 64 * 192
    assert m["attention_parameters"] == attention
    assert m["ffn_parameters"] == pytest.approx(ffn, rel=1e-12)
    assert m["table_parameters"] == 2 * 300 * 64
    assert m["model_parameters"] == attention + ffn + 2 * 300 * 64 + (2 * 3 + 1) * 64
    assert m["whiteboard_ratio"] == pytest.approx(12 * 3 * 64**2 / m["model_parameters"], rel=1e-12)
    assert m["written_out_ratio"] == pytest.approx(1 - 7 * 64 / m["model_parameters"], rel=1e-12)
    assert m["active_parameters"] == m["model_parameters"]
    with_bias = run(experiment, **SMALL, matrix_biases="qkv_biases").metrics["model_parameters"]
    assert with_bias - m["model_parameters"] == 3 * 24 * (4 + 2 + 2)
    mixed = run(experiment, **SMALL, n_experts=8, active_experts=2).metrics
    assert mixed["ffn_parameters"] == pytest.approx(8 * ffn + 3 * 8 * 64, rel=1e-12)
    assert mixed["active_parameters"] == m["model_parameters"] + ffn + 3 * 8 * 64
    assert mixed["written_out_ratio"] == pytest.approx(1 - 7 * 64 / mixed["model_parameters"], rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tied_embedding=params.tied_embedding,", "tied_embedding=False,"),
        ("n_kv_heads=params.n_kv_heads,", "n_kv_heads=params.n_heads,"),
        ('gated=params.ffn == "gated",', "gated=True,"),
        ("d_k=params.d_k,", "d_k=params.d_model // params.n_heads,"),
        ("active_experts=params.active_experts if sparse else 0,", "active_experts=params.n_experts if sparse else 0,"),
        ("n_positions=params.learned_positions,", ""),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("name", SHAPES)
def test_the_modules_have_the_weights_of_the_shapes(name):
    """The two descriptions agree, but for the bias of DeepSeek-V3's router."""
    shape = BUILT[name]
    sparse = shape.n_layers - shape.n_dense_layers
    router_bias = sparse * shape.n_experts if shape.router_bias else 0
    listed = sum(times * tensor.numel() for _, times, tensor in weights(SHAPES[name], torch.bfloat16))
    assert count(shape).total == listed + router_bias


def test_blocks_stand_for_all_layers():
    """Built layer by layer it is as many: no layer is forgotten, none counted twice."""
    for name in ("llama_2_7b", "mixtral_8x7b", "deepseek_v3"):
        shape = BUILT[name]
        assert sum(times for times, _ in modules(shape)) == shape.n_layers + 1


def test_every_parameter_has_a_part_and_none_has_two():
    for shape in BUILT.values():
        counted = count(shape)
        assert set(counted.parts) == set(PARTS)
        names = [name for _, module in modules(shape) for name, _ in module.named_parameters()]
        assert len(set(names)) >= 8
        numbers = sum(times * p.numel() for times, module in modules(shape) for p in module.parameters())
        assert counted.total == numbers
        assert counted.active <= counted.total


def test_a_decoder_of_these_modules_runs():
    """The matrices fit one another: a block forward at full size, without storage."""
    shape = BuiltShape("", 1, 64, 4, 2, 24, 192, 300)
    (_, outside), (_, block) = modules(shape)
    x = outside["embedding"](torch.zeros(2, 5, dtype=torch.long, device="meta"))
    attention, ffn = block["attention"], block["ffn"]
    q, k, v = (attention[name](x).unflatten(-1, (-1, 24)).transpose(1, 2) for name in ("W_q", "W_k", "W_v"))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    x = x + attention["W_o"](mixed.transpose(1, 2).flatten(2))
    x = x + ffn["W_down"](ffn["W_up"](x) * ffn["W_gate"](x))
    assert outside["unembedding"](x).shape == (2, 5, 300)


def test_tables_fade_with_the_width():
    table = run(get(NAME), **GPT_2).tables["by_width"]
    shares = table["parameter_share"][table["parameter_part"] == "table_parameters"]
    assert (shares[1:] < shares[:-1]).all()


def test_refuses_what_is_no_model():
    with pytest.raises(ParamsError, match="groups_divide_heads"):
        get(NAME).Params(n_kv_heads=5)
    with pytest.raises(ParamsError, match="active_within_experts"):
        get(NAME).Params(active_experts=2)
