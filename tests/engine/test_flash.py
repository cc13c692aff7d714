"""The loops of engine/flash.py: what they compute against engine/attention.py, what they count against hand counts."""

import itertools

import pytest
import torch

from engine import flash
from engine.attention import attention
from engine.masks import keep_causal

SIZES = [(12, 12, 5, 3, False), (12, 12, 4, 4, True), (7, 19, 3, 4, True), (1, 30, 8, 7, False), (9, 9, 16, 16, True)]


def numbers(q_len, kv_len, d_k=6, d_v=4):
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((q_len, d_k), (kv_len, d_k))]
    v = torch.randn(kv_len, d_v, generator=generator, dtype=torch.float64)
    return *drawn, v, torch.randn(q_len, d_v, generator=generator, dtype=torch.float64)


def reference(q, k, v, do, causal):
    """Output and gradients by the eager reference and autograd."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keep = keep_causal(len(q), len(k), alignment="bottom_right") if causal else None
    out = attention(*leaves, keep=keep)
    return out.detach(), torch.autograd.grad(out, leaves, do)


@pytest.mark.parametrize("loop", [flash.by_keys, flash.by_queries])
@pytest.mark.parametrize(("q_len", "kv_len", "q_tile", "kv_tile", "causal"), SIZES)
def test_both_loops_are_attention(loop, q_len, kv_len, q_tile, kv_tile, causal):
    q, k, v, do = numbers(q_len, kv_len)
    out, _ = reference(q, k, v, do, causal)
    memory = flash.with_numbers(q, k, v)
    loop(memory, flash.Tiles(q_len, kv_len, q_tile, kv_tile, causal))
    assert torch.allclose(memory.arrays["o"], out, rtol=0, atol=1e-14)  # float64, means of 30 numbers near 1


@pytest.mark.parametrize(("q_len", "kv_len", "q_tile", "kv_tile", "causal"), SIZES)
def test_the_backward_loop_is_the_gradient(q_len, kv_len, q_tile, kv_tile, causal):
    q, k, v, do = numbers(q_len, kv_len)
    _, gradients = reference(q, k, v, do, causal)
    memory = flash.with_numbers(q, k, v)
    tiles = flash.Tiles(q_len, kv_len, q_tile, kv_tile, causal)
    flash.by_queries(memory, tiles)
    memory.arrays["do"] = do
    flash.row_terms(memory, tiles)
    flash.backward_tiled(memory, tiles)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert torch.allclose(memory.arrays[name], gradient, rtol=0, atol=1e-13), name  # sums of 30 terms near 1


@pytest.mark.parametrize("loop", [flash.by_keys, flash.by_queries])
@pytest.mark.parametrize(("q_len", "kv_len", "q_tile", "kv_tile", "causal"), SIZES)
def test_counts_are_those_of_the_run_that_computes(loop, q_len, kv_len, q_tile, kv_tile, causal):
    q, k, v, do = numbers(q_len, kv_len, d_v=6)
    tiles = flash.Tiles(q_len, kv_len, q_tile, kv_tile, causal)
    computing, counting = flash.with_numbers(q, k, v), flash.shapes_only(q_len, kv_len, 6, 8)
    computing.arrays["do"] = do
    for step in (loop, flash.row_terms, flash.backward_tiled):
        step(computing, tiles)
        step(counting, tiles)
        assert (computing.read_bytes, computing.written_bytes) == (counting.read_bytes, counting.written_bytes)


def test_counts_by_hand():
    # 8 queries and 8 keys of width 4, two bytes a number, four a statistic; tiles of 4 by 2
    n, d, tiles = 8, 4, flash.Tiles(8, 8, 4, 2)
    row = 2 * n * d

    def moved(work, *arguments):
        memory = flash.shapes_only(n, n, d, 2)
        work(memory, *arguments)
        return memory.read_bytes, memory.written_bytes

    assert moved(flash.standard, flash.STANDARD_FORWARD) == (3 * row + 2 * 2 * n * n, row + 2 * 2 * n * n)
    assert moved(flash.standard, flash.STANDARD_BACKWARD) == (5 * row + 5 * 2 * n * n, 3 * row + 2 * 2 * n * n)
    # 4 blocks of keys: keys and values once, queries and outputs with two statistics four times
    assert moved(flash.by_keys, tiles) == (2 * row + 4 * (2 * row + 8 * n), row + 8 * n + 4 * (row + 8 * n))
    # 2 blocks of queries: queries and outputs once, with the log-sum-exp; keys and values twice
    assert moved(flash.by_queries, tiles) == (row + 2 * 2 * row, row + 4 * n)
    # queries, their gradients and those of the output four times, with two statistics
    assert moved(flash.backward_tiled, tiles) == (2 * row + 4 * (3 * row + 8 * n), row + 4 * row + 2 * row)
    assert moved(flash.row_terms, tiles) == (2 * row, 4 * n)


@pytest.mark.parametrize(("q_len", "kv_len", "q_tile", "kv_tile", "causal"), SIZES)
def test_hidden_tiles_hold_no_visible_pair(q_len, kv_len, q_tile, kv_tile, causal):
    tiles = flash.Tiles(q_len, kv_len, q_tile, kv_tile, causal)
    keep = keep_causal(q_len, kv_len, alignment="bottom_right") if causal else torch.ones(q_len, kv_len, dtype=bool)
    for queries, keys in itertools.product(tiles.queries, tiles.keys):
        assert tiles.hidden(queries, keys) == (not keep[queries, keys].any())
    assert tiles.visible() == sum(bool(keep[a, b].any()) for a, b in itertools.product(tiles.queries, tiles.keys))


def test_tiles_from_the_fast_memory_are_those_of_the_paper():
    by_keys, by_queries = flash.sram_tiles(4096, 4096, 64, 98304)
    assert (by_keys.q_tile, by_keys.kv_tile) == (64, 384)  # min(⌈M/4d⌉, d) by ⌈M/4d⌉
    assert (by_queries.q_tile, by_queries.kv_tile) == (384, 64)
    wide, _ = flash.sram_tiles(4096, 4096, 256, 98304)
    assert (wide.q_tile, wide.kv_tile) == (96, 96)


def test_work_counts_products_and_exponentials_of_both_passes():
    x = torch.randn(5, 3).requires_grad_()
    with flash.count_work() as work:
        weights = (x @ x.mT).softmax(dim=-1)
        assert (work.product_flop, work.exps) == (2 * 5 * 5 * 3, 25)
        (weights @ x).exp().sum().backward()
    assert work.product_flop == (2 + 4) * 2 * 5 * 5 * 3
    assert work.exps == 25 + 15


def test_kept_counts_each_piece_of_memory_once():
    x = torch.randn(5, 3).requires_grad_()
    with flash.count_kept() as kept:
        _ = (x @ x.mT).softmax(dim=-1) @ x  # x three times, the weights twice
    assert kept.bytes == 4 * (15 + 25)
