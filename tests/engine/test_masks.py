"""The keep-masks against masks written out by hand, against loops over positions, and against PyTorch's own."""

import pytest
import torch

from engine import masks
from engine.attention import attention


def rows(keep: torch.Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in keep.tolist()]


def test_alignments_as_drawn_on_a_whiteboard():
    assert rows(masks.keep_causal(3)) == ["x..", "xx.", "xxx"]
    assert rows(masks.keep_causal(2, 5, alignment="top_left")) == ["x....", "xx..."]
    assert rows(masks.keep_causal(2, 5, alignment="bottom_right")) == ["xxxx.", "xxxxx"]
    assert rows(masks.keep_causal(5, 2, alignment="top_left")) == ["x.", "xx", "xx", "xx", "xx"]
    assert rows(masks.keep_causal(5, 2, alignment="bottom_right")) == ["..", "..", "..", "x.", "xx"]


def test_the_other_masks_as_drawn_on_a_whiteboard():
    assert rows(masks.keep_causal(3, diagonal=-1)) == ["...", "x..", "xx."]
    assert rows(masks.keep_window(5, window=2)) == ["x....", "xx...", ".xx..", "..xx.", "...xx"]
    assert rows(masks.keep_window(2, 5, window=3)) == [".xxx.", "..xxx"]
    assert rows(masks.keep_prefix(4, prefix_len=2)) == ["xx..", "xx..", "xxx.", "xxxx"]
    documents = torch.tensor([0, 0, 1])
    assert rows(masks.keep_documents(documents, documents)) == ["xx.", "xx.", "..x"]
    assert rows(masks.keep_padding([1, 3], 3)[:, 0]) == ["x..", "xxx"]
    assert rows(masks.keep_padding([1, 3], 3, side="left")[:, 0]) == ["..x", "xxx"]
    assert masks.keep_padding([1, 3], 3).shape == (2, 1, 3)


def by_position(name: str, at: int, key: int, size: int) -> bool:
    """One pair, in words: the query at position ``at`` and this key."""
    return {
        "causal": key <= at,
        "no_mask": True,
        "strict": key < at,
        "one_ahead": key <= at + 1,
        "prefix": key <= at or key < size,
        "window": at - size < key <= at,
        "documents": key <= at and key // size == at // size,
    }[name]


@pytest.mark.parametrize("name", masks.MASKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (7, 7), (1, 9), (3, 8), (8, 3)])
@pytest.mark.parametrize("alignment", masks.ALIGNMENTS)
def test_named_masks_say_what_they_mean_for_every_pair(name, q_len, kv_len, alignment):
    for size in (1, 3, 20):
        keep = masks.keep_named(
            name, q_len, kv_len, prefix_len=size, window=size, document_len=size, alignment=alignment
        )
        first = kv_len - q_len if alignment == "bottom_right" else 0
        wanted = [[by_position(name, first + i, j, size) for j in range(kv_len)] for i in range(q_len)]
        assert keep.tolist() == wanted, (size,)


def test_a_window_as_long_as_the_keys_is_the_causal_mask():
    assert torch.equal(masks.keep_window(4, 9, window=9), masks.keep_causal(4, 9))
    assert torch.equal(masks.keep_prefix(9, prefix_len=0), masks.keep_causal(9))


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 4), (1, 6), (5, 5)])
def test_alignments_are_those_of_torch(q_len, kv_len):
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    for ours, theirs in (("top_left", causal_upper_left), ("bottom_right", causal_lower_right)):
        keep = masks.keep_causal(q_len, kv_len, alignment=ours)
        assert torch.equal(keep, theirs(q_len, kv_len)._materialize())


def test_torch_reads_a_keep_mask_as_attention_does():
    from torch.nn.functional import scaled_dot_product_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator, dtype=torch.float64) for n in (5, 9, 9))
    keep = masks.keep_causal(5, 9) & masks.keep_padding([6, 9], 9)[:, None]
    assert keep.shape == (2, 1, 5, 9)
    ours, theirs = attention(q, k, v, keep=keep), scaled_dot_product_attention(q, k, v, attn_mask=keep)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)  # float64, sums of 16 and 9 terms


def test_a_mask_is_made_where_it_is_asked_for():
    for made in (
        masks.keep_causal(2, device="meta"),
        masks.keep_window(2, window=1, device="meta"),
        masks.keep_prefix(2, prefix_len=1, device="meta"),
        *(masks.keep_named(name, 2, device="meta") for name in masks.MASKS),
    ):
        assert made.device.type == "meta"


@pytest.mark.parametrize(("q_len", "kv_len", "tile"), [(8, 8, 4), (7, 10, 4), (3, 3, 8), (5, 9, 1)])
def test_tiles_count_the_pairs_in_them(q_len, kv_len, tile):
    keep = masks.keep_window(q_len, kv_len, window=4)
    counted = masks.kept_in_tiles(keep, tile)
    assert counted.sum() == keep.sum()
    for i, row in enumerate(counted.tolist()):
        for j, kept in enumerate(row):
            assert kept == keep[i * tile : (i + 1) * tile, j * tile : (j + 1) * tile].sum()


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="wanted one of bottom_right, top_left"):
        masks.keep_causal(2, alignment="center")
    with pytest.raises(ValueError, match="wanted one of causal"):
        masks.keep_named("diagonal", 2)
    with pytest.raises(ValueError, match="wanted right or left"):
        masks.keep_padding([1], 2, side="top")
