"""The plain decoder against PyTorch's own layers, and its parts against the whole."""

import dataclasses

import pytest
import torch

from engine.operations import count_operations
from engine.transformer_block import (
    EPSILON,
    DecoderSizes,
    block,
    block_shapes,
    decoder,
    feed_forward,
    linear,
    merge,
    mix,
    norm,
    outer_shapes,
    project,
    unembed,
)

SIZES = DecoderSizes(n_layers=2, d_model=24, n_heads=4, n_kv_heads=2, d_k=8, d_ff=40, vocabulary=13)


def drawn(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def model(sizes):
    return drawn(outer_shapes(sizes)), [drawn(block_shapes(sizes), seed) for seed in range(sizes.n_layers)]


def tokens_of(sizes, seq_len=7):
    return torch.arange(2 * seq_len).view(2, seq_len) % sizes.vocabulary


@pytest.mark.parametrize("gated", [True, False])
def test_a_block_is_attention_and_a_feed_forward_network_with_the_norm_in_front(gated):
    sizes = dataclasses.replace(SIZES, gated=gated)
    w = drawn(block_shapes(sizes))
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    rms = torch.nn.functional.rms_norm
    h = rms(x, (24,), w["norm_attention"], EPSILON)
    q, k, v = ((h @ w[n].mT).unflatten(-1, (-1, 8)).transpose(1, 2) for n in ("W_q", "W_k", "W_v"))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)  # query head i with key head i // 2
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = x + mixed.transpose(1, 2).flatten(2) @ w["W_o"].mT
    h = rms(y, (24,), w["norm_ffn"], EPSILON)
    up, down = w["W_up"][0], w["W_down"][0]
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    hidden = silu(h @ w["W_gate"][0].mT) * (h @ up.mT) if gated else gelu(h @ up.mT)
    expected = y + hidden @ down.mT
    # float64 sums of at most 40 terms: rounding of some 1e-15 of numbers that reach 1e3
    torch.testing.assert_close(block(w, sizes, x, keep), expected, rtol=1e-11, atol=1e-9)


def test_the_whole_is_its_blocks_between_table_and_unembedding():
    outer, blocks = model(SIZES)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    tokens = tokens_of(SIZES)
    x = outer["embedding"][tokens]
    for weights in blocks:
        x = block(weights, SIZES, x, keep)
    logits = decoder(outer, blocks, SIZES, tokens, keep)
    assert torch.equal(logits, unembed(outer, x))
    assert logits.shape == (2, 7, 13)
    tied = drawn(outer_shapes(dataclasses.replace(SIZES, tied=True)))
    assert "unembedding" not in tied
    assert torch.equal(unembed(tied, x), norm(x, tied["norm"]) @ tied["embedding"].mT)


def test_a_later_token_changes_nothing_before_it():
    outer, blocks = model(SIZES)
    keep = torch.ones(7, 7, dtype=torch.bool).tril()
    tokens = tokens_of(SIZES)
    other = tokens.clone()
    other[:, -1] += 1
    one, two = (decoder(outer, blocks, SIZES, t % 13, keep) for t in (tokens, other))
    assert torch.equal(one[:, :-1], two[:, :-1])
    assert not torch.equal(one[:, -1], two[:, -1])


def test_thin_matrices_beside_one_add_their_product():
    w = {"W_q": torch.randn(6, 5), "W_q_down": torch.randn(2, 5), "W_q_up": torch.randn(6, 2)}
    x = torch.randn(3, 5)
    merged = x @ (w["W_q"] + w["W_q_up"] @ w["W_q_down"]).mT
    torch.testing.assert_close(linear(w, "W_q", x), merged)


def test_experts_get_equal_shares_of_the_tokens():
    sizes = dataclasses.replace(SIZES, n_experts=4, active_experts=2)
    w = drawn(block_shapes(sizes))
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    with count_operations() as counted:
        out = feed_forward(w, sizes, x)
    assert out.shape == x.shape
    router, expert = 2 * 12 * 4 * 24, 2 * 24 * 40
    assert counted.products == router + 3 * 12 * 2 * expert  # two of four experts for each of 12 tokens
    with count_operations() as counted:
        feed_forward(w, sizes, x[:1, :1])  # one token keeps two experts busy
    assert counted.products == router // 12 + 3 * 2 * expert


@pytest.mark.parametrize("n_experts", [1, 4])
def test_shapes_alone_give_the_same_counts(n_experts):
    sizes = dataclasses.replace(SIZES, n_experts=n_experts)
    outer, blocks = model(sizes)
    keep = torch.ones(6, 6, dtype=torch.bool)
    found = []
    for device in ("cpu", "meta"):
        there = [{n: w.to(device) for n, w in weights.items()} for weights in (outer, *blocks)]
        tokens, mask = tokens_of(sizes, 6).to(device), keep.to(device)
        with count_operations() as counted:
            decoder(there[0], there[1:], sizes, tokens, mask)
        found.append(counted)
    assert found[0] == found[1]


def test_heads_of_a_group_share_a_key_without_copying_it():
    q, k, v = (torch.randn(1, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    with count_operations() as counted:
        mixed = mix(q, k, v, keep)
    assert counted.products == 2 * 2 * 4 * 5 * 5 * 8
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True
    )
    torch.testing.assert_close(mixed, expected)
    w = drawn(block_shapes(SIZES))
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    assert [t.shape[1] for t in project(w, SIZES, x)] == [4, 2, 2]
    assert merge(w, torch.zeros(1, 4, 5, 8, dtype=torch.float64), x).equal(x)
