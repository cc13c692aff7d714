"""Seeing every torch operation inside a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watching(seen: Callable[[Any, Any, Any, Any], None]) -> Iterator[None]:
    """Call ``seen(func, args, kwargs, out)`` after each operation of the block, those of a backward pass too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # as in engine/operations.py: True imports torch._dynamo

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen(func, args, kwargs or {}, out)
            return out

    with Watch():
        yield
