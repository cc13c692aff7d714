"""paged_attention against PyTorch's own attention on the tokens in one piece, and lengths rounded by hand."""

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "paged_attention"
SMALL = {"batch": 3, "longest_sequence": 60, "block_size": 8, "n_kv_heads": 2, "d_k": 4}


def law(experiment: Experiment) -> None:
    results = {
        way: recorded(experiment, seed=3, paged_read=way, **SMALL)
        for way in experiment.Params.specs()["paged_read"].values
    }
    _, (drawn_lengths, _, _, _, *pairs) = results["block_walk"]
    lengths = [1 + int(u * 60) for u in drawn_lengths]
    whole, queries = pairs[:6], [torch.from_numpy(q) for q in pairs[6:]]
    stale, means, apart = [], [], []
    for n, q in enumerate(queries):
        keys, values = (torch.from_numpy(x) for x in whole[2 * n : 2 * n + 2])
        reference = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
        blocks = [slice(start, start + 8) for start in range(0, lengths[n], 8)]
        means = [torch.nn.functional.scaled_dot_product_attention(q, keys[:, b], values[:, b]) for b in blocks]
        wrong = sum(means) / len(means)
        apart.append(float(((wrong - reference).norm(dim=-1) / reference.norm(dim=-1)).mean()))
        stale.append(-lengths[n] % 8)
    for way in ("block_walk", "pool_order", "gathered"):
        assert results[way][0].metrics["output_error"] < 1e-14, way  # sums of a few dozen float64 terms
    assert results["block_means"][0].metrics["output_error"] == pytest.approx(np.mean(apart), rel=1e-12)
    assert results["whole_last_block"][0].metrics["output_error"] > 0.01

    metrics = results["block_walk"][0].metrics
    held = [n + -n % 8 for n in lengths]
    assert metrics["tokens_in_blocks"] == sum(lengths)
    assert metrics["table_entries"] == sum(held) / 8
    assert metrics["most_empty_slots"] == max(stale)
    assert metrics["empty_slot_share"] == pytest.approx(sum(stale) / sum(held), rel=1e-12)
    accesses = {way: results[way][0].metrics["slot_accesses_per_token"] * sum(lengths) for way in results}
    assert accesses["block_walk"] == accesses["pool_order"] == pytest.approx(sum(lengths), rel=1e-12)
    assert accesses["whole_last_block"] == pytest.approx(sum(held), rel=1e-12)
    assert accesses["gathered"] == pytest.approx(2 * sum(held) + sum(lengths), rel=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[*sorted(table.blocks[:-1]), table.blocks[-1]]", "[table.blocks[-1], *sorted(table.blocks[:-1])]"),
        ("2 * copied + keys.shape[-2]", "keys.shape[-2]"),
        ("paged_attention(q, cache, table)", "[paged_attention(q, cache, table) for _ in range(2)][0]"),
        ("BlockTable(table.blocks, len(table.blocks) * cache.paging.block_size)", "table"),
        ("sum(outs[1:], outs[0]) / len(outs)", "outs[0]"),
        ("cache.append(table, *(x[:, new] for x in whole[sequence]))", "paging.grow(table, new.stop - new.start)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_blocks_of_one_token_have_no_empty_slot_and_an_entry_for_each():
    metrics = run(get(NAME), block_size=1).metrics
    assert metrics["empty_slot_share"] == 0
    assert metrics["table_entries"] == metrics["tokens_in_blocks"]


def test_half_a_block_is_the_law_while_blocks_are_short_beside_the_sequences():
    table = run(get(NAME), batch=256, longest_sequence=200, block_size=16, seed=1).tables["by_block_size"]
    small = table["block_size"] <= 16
    # the empty slots of a block of 16 spread by 4.6: of 256 sequences a standard error of 4 % of their mean
    assert table["empty_slot_share"][small] == pytest.approx(table["half_block_share"][small], rel=0.2, abs=1e-12)
    assert table["empty_slot_share"][-1] > table["half_block_share"][-1]  # 256 slots for about 100 tokens


def test_refuses_what_is_too_large():
    with pytest.raises(ParamsError, match="too_large_a_block_pool"):
        get(NAME).Params(batch=256, longest_sequence=8192)
    with pytest.raises(ParamsError, match="too_many_cache_blocks"):
        get(NAME).Params(batch=64, longest_sequence=512, block_size=1, d_k=1, n_kv_heads=1)
