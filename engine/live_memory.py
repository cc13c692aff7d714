"""How many bytes of tensors are alive at once while a piece of work runs.

Counted from the tensors themselves, on any device: a piece of memory counts from the operation that makes it until the
last tensor that looks at it is gone. What was there before does not count, nor do buffers inside a single operation,
which no tensor shows, nor what an allocator rounds up or keeps back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.watching import watching


@dataclass
class Live:
    """Bytes that are alive now, and the most that were at once."""

    now: int = 0
    peak: int = 0

    def _release(self, freed: int) -> None:
        self.now -= freed


@contextmanager
def count_live(*before: Any) -> Iterator[Live]:
    """Watch the ``with`` block; the tensors ``before`` it are free, though operations may return views of them."""
    import torch

    live = Live()
    known: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in before)

    def seen(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, torch.Tensor):
                storage = made.untyped_storage()
                if storage not in known:
                    known.add(storage)
                    weakref.finalize(storage, live._release, storage.nbytes())
                    live.now += storage.nbytes()
        live.peak = max(live.peak, live.now)

    with watching(seen):
        yield live
