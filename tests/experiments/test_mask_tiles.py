"""mask_tiles against counting by hand, pair by pair, and against the two products written out."""

import itertools
import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.engine.test_masks import by_position
from tests.harness import assert_law_catches, recorded, run

NAME = "mask_tiles"
SETTINGS = [
    {"q_len": 8, "kv_len": 8, "tile": 4},
    {"q_len": 7, "kv_len": 11, "tile": 4},
    {"q_len": 7, "kv_len": 11, "tile": 4, "corner": "top_left"},
    {"q_len": 9, "kv_len": 4, "tile": 2},
    {"q_len": 12, "kv_len": 12, "tile": 3, "mask": "window", "window": 3},
    {"q_len": 12, "kv_len": 12, "tile": 4, "mask": "documents", "document_len": 5},
    {"q_len": 12, "kv_len": 12, "tile": 4, "mask": "prefix", "prefix_tokens": 6},
    {"q_len": 5, "kv_len": 6, "tile": 1, "mask": "no_mask"},
    {"q_len": 1, "kv_len": 1, "tile": 64},
]
SIZES = {"prefix": "prefix_tokens", "window": "window", "documents": "document_len"}


def kept_pairs(p: dict, q_len: int, kv_len: int) -> set[tuple[int, int]]:
    mask, first = p.get("mask", "causal"), 0 if p.get("corner") == "top_left" else kv_len - q_len
    size = p.get(SIZES.get(mask, ""), 1)
    return {(i, j) for i in range(q_len) for j in range(kv_len) if by_position(mask, first + i, j, size)}


def tiles(p: dict, q_len: int, kv_len: int, tile: int) -> dict[tuple[int, int], list[bool]]:
    """For each tile, whether each of its pairs is kept."""
    kept, found = kept_pairs(p, q_len, kv_len), {}
    for i, j in itertools.product(range(q_len), range(kv_len)):
        found.setdefault((i // tile, j // tile), []).append((i, j) in kept)
    return found


def law(experiment: Experiment) -> None:
    d_k = 8
    for p in SETTINGS:
        result, (q, k, _) = recorded(experiment, seed=2, d_k=d_k, **p)
        q_len, kv_len, tile = p["q_len"], p["kv_len"], p["tile"]
        assert (q.shape, k.shape) == ((q_len, d_k), (kv_len, d_k))
        by_tile = tiles(p, q_len, kv_len, tile)
        kept = [len(pairs) for pairs in by_tile.values() if any(pairs)]
        pairs = kept_pairs(p, q_len, kv_len)
        wanted = {
            "kept_pairs": len(pairs),
            "kept_share": len(pairs) / (q_len * kv_len),
            "tiles": math.ceil(q_len / tile) * math.ceil(kv_len / tile),
            "tiles_kept": len(kept),
            "tiles_kept_share": len(kept) / len(by_tile),
            "tiles_full": sum(all(pairs) for pairs in by_tile.values()),
            "empty_rows": q_len - len({i for i, _ in pairs}),
            # two products, each a multiply-add for every logit and every coordinate
            "dense_flops": 4 * d_k * q_len * kv_len,
            "skipping_flops": 4 * d_k * sum(kept),
            "flops_share": sum(kept) / (q_len * kv_len),
        }
        measured = {name: result.metrics[name] for name in wanted}
        assert measured == wanted, p
        assert result.metrics["output_difference"] < 1e-14, p  # float64, sums of a dozen terms
        e = np.exp(q @ k.T / np.sqrt(d_k))
        lost = [sum(e[i, j] for j in range(kv_len) if (i, j) not in pairs) / e[i].sum() for i in range(q_len)]
        assert result.metrics["hidden_weight_mean"] == pytest.approx(np.mean(lost), rel=1e-12, abs=1e-15), p
        table = result.tables["tiles"]
        shown = dict(zip(zip(table["query_tile"], table["key_tile"], strict=True), table["kept_share"], strict=True))
        assert shown == pytest.approx({at: np.mean(pairs) for at, pairs in by_tile.items()}, rel=1e-6), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(in_tiles > 0).tolist()", "(in_tiles == sizes).tolist()"),  # leaves out the tiles on the border
        ("(in_tiles > 0).tolist()", "(in_tiles >= 0).tolist()"),  # skips nothing
        ("keep[queries, keys]", "keep[queries, keys] | True"),  # forgets the mask inside the tiles
        ("counted.products + counted_too.products", "2 * counted.products + 1"),
        ("alignment=params.corner", 'alignment="bottom_right"'),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_long_causal_mask_tends_to_half_from_above():
    shares = [run(get(NAME), q_len=n, kv_len=n, tile=64).metrics for n in (64, 256, 1024)]
    assert [m["tiles_kept"] for m in shares] == [1, 10, 136]  # T(T+1)/2 for T = 1, 4 and 16
    assert [m["kept_share"] for m in shares] == pytest.approx([65 / 128, 257 / 512, 1025 / 2048])
    assert [m["tiles_full"] for m in shares] == [0, 6, 120]


def test_lengths_are_counted_with_the_same_mask():
    table = run(get(NAME), tile=64).tables["by_length"]
    rows = {
        (n, c): share for n, c, share in zip(*(table[x] for x in ("seq_len", "counted", "computed_share")), strict=True)
    }
    assert rows[512, "dense"] == 1
    assert rows[512, "kept_pairs"] == pytest.approx(513 / 1024)
    assert rows[512, "skipped_tiles"] == pytest.approx(9 / 16)
    assert rows[16, "skipped_tiles"] == 1  # one tile, and it holds the diagonal


def test_the_map_is_drawn_with_larger_tiles_when_there_are_many():
    table = run(get(NAME), q_len=1024, kv_len=1024, tile=1).tables["tiles"]
    assert len(table["kept_share"]) == 32 * 32


def test_refuses_what_is_too_large():
    with pytest.raises(ParamsError, match="too_many_logits"):
        get(NAME).Params(q_len=2048, kv_len=1024)
