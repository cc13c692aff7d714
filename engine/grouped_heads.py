r"""Query heads that share keys and values: which head reads which, attention without copies of the keys, and its bytes.

With ``n_heads`` query heads and ``n_kv_heads`` KV heads a group of ``n_heads / n_kv_heads`` query heads reads the same
k and v. ``adjacent`` puts neighbours into a group, head i reads KV head i // group: how checkpoints and PyTorch's
``enable_gqa`` have it. ``strided`` deals them out, head i reads KV head i mod n_kv_heads.

Sources: ainslie2023, section 2.2 (groups); flash-attention-code, ``flash_attn_with_kvcache`` (adjacent heads).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.attention import attention
from engine.watching import watching

if TYPE_CHECKING:
    import torch

LAYOUTS = ("adjacent", "strided")
COPYING = ("clone", "repeat", "index_select")  # operations that copy what they are given


def kv_head_of(n_heads: int, n_kv_heads: int, layout: str) -> list[int]:
    """The KV head that each query head reads.

    Raises: ValueError for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, wanted one of {', '.join(LAYOUTS)}")
    group = n_heads // n_kv_heads
    return [head // group if layout == "adjacent" else head % n_kv_heads for head in range(n_heads)]


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, keep: torch.Tensor | None = None, layout: str = "adjacent"
) -> torch.Tensor:
    """Attention in which the queries of a group are rows of one product with their keys, so that no key is copied.

    Shapes: q (..., n_heads, q_len, d_k); k, v (..., n_kv_heads, kv_len, d_k); keep (q_len, kv_len); returns as q.
    """
    rows = group_rows(q, k.shape[-3], layout)
    group = q.shape[-3] // k.shape[-3]
    mixed = attention(rows, k, v, keep=None if keep is None else keep.repeat(group, 1))
    return ungroup_rows(mixed, group, layout)


def group_rows(q: torch.Tensor, n_kv_heads: int, layout: str = "adjacent") -> torch.Tensor:
    """The queries of each group below one another.

    Shapes: q (..., n_heads, q_len, d_k) to (..., n_kv_heads, group · q_len, d_k).
    """
    if layout == "adjacent":
        return q.unflatten(-3, (n_kv_heads, -1)).flatten(-3, -2)
    return q.unflatten(-3, (-1, n_kv_heads)).transpose(-4, -3).flatten(-3, -2)


def ungroup_rows(mixed: torch.Tensor, group: int, layout: str = "adjacent") -> torch.Tensor:
    """Back from :func:`group_rows`. Shapes: (..., n_kv_heads, group · q_len, d) to (..., n_heads, q_len, d)."""
    heads = mixed.unflatten(-2, (group, -1))
    return (heads if layout == "adjacent" else heads.transpose(-4, -3)).flatten(-4, -3)


# --------------------------------------------------------------------------------------------------------------------
# Bytes


@dataclass
class Copies:
    """Bytes of operations that only write numbers to another place: what they read, and what they wrote."""

    read: int = 0
    written: int = 0


@contextmanager
def count_copies() -> Iterator[Copies]:
    """Count the bytes that are copied inside the ``with`` block; views copy nothing.

    An expanded tensor is read as often as it stores its numbers, not as often as it shows them.
    """

    counted = Copies()

    def seen(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if func.overloadpacket.__name__ in COPYING:
            counted.read += stored_bytes(args[0])
            counted.written += stored_bytes(out)

    with watching(seen):
        yield counted


def stored_bytes(x: torch.Tensor) -> int:
    """Bytes of the numbers that a tensor shows, each of them once: an expanded axis stores one entry."""
    numbers: int = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    size: int = x.dtype.itemsize
    return numbers * size
