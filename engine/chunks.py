"""How an experiment that draws q and k for a batch cuts its work, and which sizes it refuses.

A run notices Stop only between chunks, and a chunk holds at least one item of the batch (one set of keys with its
queries). So the items are bounded here, and small ones are put together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from engine.base import Problem

if TYPE_CHECKING:
    import torch

MAX_KEY_NUMBERS = 2**21  # of one item: 12 ms to draw on one core
MAX_LOGITS = 2**20  # of one item: some 0.1 s where rows are sorted and several scale rules compared
CHUNK_NUMBERS = 2**21
CHUNK_LOGITS = 2**18


def oversize(*, q_len: int, kv_len: int, width: int, width_name: str = "d_k") -> Iterator[Problem]:
    """Problems of an item that is too large for one chunk. ``width`` is that of a key."""
    if kv_len * width > MAX_KEY_NUMBERS:
        values = {"product": kv_len * width, "limit": MAX_KEY_NUMBERS, "width": width_name}
        yield Problem("rule", "kv_len", kv_len, rule="too_many_key_numbers", values=values)
    if q_len * kv_len > MAX_LOGITS:
        values = {"product": q_len * kv_len, "limit": MAX_LOGITS}
        yield Problem("rule", "kv_len", kv_len, rule="too_many_logits", values=values)


def items_per_chunk(batch: int, *, numbers: int, logits: int) -> int:
    """Items of the batch that are worked on together; ``numbers`` and ``logits`` are those of one item."""
    return max(1, min(batch, CHUNK_NUMBERS // numbers, CHUNK_LOGITS // logits))


def chunks(batch: int, items: int) -> Iterator[tuple[int, int]]:
    """Start and number of items of each chunk."""
    for start in range(0, batch, items):
        yield start, min(items, batch - start)


def per_row(x: torch.Tensor) -> np.ndarray:
    """One number a row to keep, float64 on the CPU: a copy, as a view would keep the chunk it was cut from."""
    return np.array(x.flatten().cpu().double().numpy())
