"""engine/grouped_heads.py: grouped attention against heads written out one by one, and what is counted as copied."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention import attention
from engine.grouped_heads import count_copies, group_rows, grouped_attention, kv_head_of, stored_bytes, ungroup_rows


def draw(n_heads, n_kv_heads, q_len=5, kv_len=7):
    generator = torch.Generator().manual_seed(n_heads * 100 + n_kv_heads)
    return (
        torch.randn(2, n, length, 4, generator=generator, dtype=torch.float64)
        for n, length in ((n_heads, q_len), (n_kv_heads, kv_len), (n_kv_heads, kv_len))
    )


def test_neighbours_share_or_heads_are_dealt_out():
    assert kv_head_of(8, 2, "adjacent") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert kv_head_of(8, 2, "strided") == [0, 1, 0, 1, 0, 1, 0, 1]
    for layout in ("adjacent", "strided"):  # nothing to choose where every head has its own, or all have the same
        assert kv_head_of(4, 4, layout) == [0, 1, 2, 3]
        assert kv_head_of(4, 1, layout) == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="got 'tiled', wanted one of adjacent, strided"):
        kv_head_of(4, 2, "tiled")


@pytest.mark.parametrize("layout", ["adjacent", "strided"])
@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(6, 6), (6, 3), (6, 2), (6, 1)])
def test_each_head_reads_its_kv_head(n_heads, n_kv_heads, layout):
    q, k, v = draw(n_heads, n_kv_heads)
    keep = torch.ones(5, 7, dtype=torch.bool).tril(2)
    got = grouped_attention(q, k, v, keep=keep, layout=layout)
    for head, kv in enumerate(kv_head_of(n_heads, n_kv_heads, layout)):
        wanted = attention(q[:, head], k[:, kv], v[:, kv], keep=keep)
        torch.testing.assert_close(got[:, head], wanted, rtol=0, atol=1e-14)  # rounding of sums of 7 terms near 1
    assert torch.equal(ungroup_rows(group_rows(q, n_kv_heads, layout), n_heads // n_kv_heads, layout), q)


def test_adjacent_is_what_pytorch_means_by_gqa():
    q, k, v = draw(6, 2)
    wanted = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(grouped_attention(q, k, v), wanted, rtol=0, atol=1e-14)
    assert (grouped_attention(q, k, v, layout="strided") - wanted).abs().max() > 0.1


def test_what_copies_and_what_only_shows():
    x = torch.zeros(2, 3, 5, 4)
    shown = x[:, :, None].expand(-1, -1, 6, -1, -1)
    assert stored_bytes(shown) == x.nbytes
    assert shown.nbytes == 6 * x.nbytes
    with count_copies() as views:
        x[:, :, None].expand(-1, -1, 6, -1, -1).transpose(-1, -2)
    assert (views.read, views.written) == (0, 0)
    for way in (
        lambda: x.repeat_interleave(6, dim=1),
        lambda: shown.reshape(2, 18, 5, 4),
        lambda: x.repeat(1, 6, 1, 1),
    ):
        with count_copies() as copies:
            way()
        assert copies.read == x.nbytes
        assert copies.written == 6 * x.nbytes


def test_grouped_attention_copies_no_keys():
    q, k, v = draw(6, 2)
    with count_copies() as copies:
        grouped_attention(q, k, v)
    assert copies.written == 0
