"""forward_flops against the formulas written out, and against a whole decoder that really runs."""

import pytest
import torch

from engine.base import ParamsError
from engine.operations import count_operations
from engine.registry import Experiment, get
from engine.transformer_block import DecoderSizes, block_shapes, decoder, outer_shapes
from tests.harness import assert_law_catches, run

NAME = "forward_flops"
SMALL = {"n_layers": 3, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_k": 8, "d_ff": 128, "vocabulary": 300}


def law(experiment: Experiment) -> None:
    for seq_len, ffn, tied in ((128, "gated", False), (256, "plain", True)):
        m = run(experiment, seq_len=seq_len, ffn=ffn, tied_embedding=tied, **SMALL).metrics
        projections = 3 * 2 * (2 * 64 * 4 * 8 + 2 * 64 * 2 * 8)  # q and out, k and v
        attention = 3 * 2 * 2 * seq_len * 4 * 8  # two products, each with every key
        matrices = 3 if ffn == "gated" else 2
        assert m["projection_flop_per_token"] == projections
        assert m["attention_flop_per_token"] == attention
        assert m["ffn_flop_per_token"] == 3 * matrices * 2 * 64 * 128
        assert m["head_flop_per_token"] == 2 * 64 * 300
        linear = projections + m["ffn_flop_per_token"] + m["head_flop_per_token"]
        assert m["forward_flop_per_token"] == linear + attention
        assert m["flop_per_block_weight"] == 2
        assert m["two_n_attention_ratio"] == 1
        assert m["attention_to_linear"] == attention / linear
        assert m["linear_crossover_tokens"] == pytest.approx(linear / (3 * 4 * 4 * 8), rel=1e-12)  # rounding
        assert m["ffn_crossover_tokens"] == pytest.approx(m["ffn_flop_per_token"] / (3 * 4 * 4 * 8), rel=1e-12)
        assert m["head_share"] == 2 * 64 * 300 / (linear + attention)
        norms = 3 * 2 * 64 + 64
        tables = 64 * 300 * (1 if tied else 2)
        assert m["model_parameters"] == (projections + m["ffn_flop_per_token"]) / 2 + norms + tables
        assert m["embedding_share"] == tables / m["model_parameters"]
        assert m["two_n_ratio"] == 2 * m["model_parameters"] / m["forward_flop_per_token"]
        assert m["two_n_to_linear"] == 2 * m["model_parameters"] / linear
    # 4 tiles of 32 queries: 1 + 2 + 3 + 4 of 4 · 4 tiles
    skipping = run(experiment, seq_len=128, attention_kernel="skipping", tile=32, **SMALL).metrics
    assert skipping["attention_flop_per_token"] == 10 / 16 * 3 * 4 * 128 * 4 * 8
    assert skipping["counter_attention_flop_per_token"] == 3 * 4 * 128 * 4 * 8


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('counted if name == "head" else _times(counted, sizes.n_layers)', "counted"),
        ("project(weights, sizes, x)[0], x)", "q, x)"),  # q, k, v forgotten
        ("context(logits, v[:, :, keys])", "pass"),  # the second product forgotten
        ("min(start + tile, kv_len)", "kv_len"),  # tiles of the future not skipped
        ('unembedding = outside.get("unembedding", outside["embedding"])', "unembedding = 0"),
        ("crossing(linear)", "crossing(forward)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_attention_at_the_crossing_costs_what_it_is_compared_with():
    """With a kernel that skips, twice as far and less a tile: of n tokens the mean query meets (n + tile) / 2 keys."""
    sizes = {"n_layers": 2, "d_model": 512, "n_heads": 8, "n_kv_heads": 8, "d_k": 64, "d_ff": 2048}
    found = {
        kernel: run(get(NAME), attention_kernel=kernel, tile=64, seq_len=512, **sizes).metrics
        for kernel in ("dense", "skipping")
    }
    for name in ("linear_crossover_tokens", "ffn_crossover_tokens"):
        assert found["skipping"][name] == pytest.approx(2 * found["dense"][name] - 64, rel=1e-12)  # rounding
    longer = run(get(NAME), attention_kernel="skipping", tile=64, seq_len=4096, **sizes).metrics
    assert longer["linear_crossover_tokens"] == found["skipping"]["linear_crossover_tokens"]


@pytest.mark.parametrize("tied", [False, True])
def test_the_parts_are_those_of_a_decoder_that_runs(tied):
    sizes = DecoderSizes(**SMALL, tied=tied)
    generator = torch.Generator().manual_seed(0)
    outer = {n: torch.randn(*s, generator=generator) for n, s in outer_shapes(sizes).items()}
    blocks = [{n: torch.randn(*s, generator=generator) for n, s in block_shapes(sizes).items()} for _ in range(3)]
    tokens, keep = torch.arange(128).view(1, -1), torch.ones(128, 128, dtype=torch.bool).tril()
    with count_operations() as counted:
        decoder(outer, blocks, sizes, tokens, keep)
    m = run(get(NAME), seq_len=128, tied_embedding=tied, **SMALL).metrics
    assert m["forward_flop_per_token"] == counted.products / 128
    assert m["model_parameters"] == sum(w.numel() for part in (outer, *blocks) for w in part.values())
    assert m["other_operations_share"] == pytest.approx(1 - counted.products / counted.total, rel=1e-12)  # rounding


def test_sizes_of_published_models():
    llama = run(get(NAME)).metrics  # defaults: Llama 2 7B
    assert llama["model_parameters"] == 6738415616
    mixtral = run(get(NAME), n_kv_heads=8, d_ff=14336, n_experts=8, active_experts=2).metrics
    assert mixtral["model_parameters"] == 46702792704
    expected = 32 * 3 * 2 * 4096 * 14336 * 2 + 32 * 2 * 4096 * 8  # two experts of three matrices, and the router
    assert mixtral["ffn_flop_per_token"] == expected


def test_decode_costs_what_a_token_of_a_dense_sequence_costs():
    sequence, decode = (run(get(NAME), tokens_counted=tokens, **SMALL).metrics for tokens in ("sequence", "decode"))
    assert decode["forward_flop_per_token"] == sequence["forward_flop_per_token"]
    skipping = run(get(NAME), attention_kernel="skipping", **SMALL).metrics
    assert skipping["attention_flop_per_token"] < decode["attention_flop_per_token"]


def test_refuses_what_does_not_divide():
    with pytest.raises(ParamsError, match="groups_divide_heads"):
        get(NAME).Params(n_heads=32, n_kv_heads=5)
    with pytest.raises(ParamsError, match="active_within_experts"):
        get(NAME).Params(active_experts=2)
    with pytest.raises(ParamsError, match="experts_divide_tokens"):
        get(NAME).Params(n_experts=7, active_experts=1)
    with pytest.raises(ParamsError, match="too_many_tile_rows"):
        get(NAME).Params(attention_kernel="skipping", tile=16)
