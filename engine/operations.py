"""How many operations a piece of work takes, counted while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ELEMENTWISE = ("add", "sub", "mul", "div")
TRANSCENDENTAL = ("tanh", "exp", "log")
MOVES = (
    *(
        "alias",
        "view",
        "_unsafe_view",
        "transpose",
        "t",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "select",
        "slice",
    ),
    *("clone", "cat", "copy_", "new_empty"),
)


@dataclass
class Operations:
    """Counts so far; ``total`` is everything but moving numbers about."""

    products: int = 0
    elementwise: int = 0
    transcendental: int = 0

    @property
    def total(self) -> int:
        return self.products + self.elementwise + self.transcendental


class UncountedOperation(LookupError):
    """An operation was met that is in none of the lists above; it has to be put where it belongs."""


@contextmanager
def count_operations() -> Iterator[Operations]:
    """Count the torch operations inside the ``with`` block.

    Matrix products by the formulas of ``torch.utils.flop_counter`` (two operations for a multiply-add), elementwise
    work by the numbers that come out, one operation each, transcendental functions apart.

    Raises: UncountedOperation for an operation that has no rule here, rather than counting it as nothing.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    counted = Operations()

    class Counter(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return (
                False  # FlopCounterMode says True and so imports torch._dynamo: one second and 70 MB in every process
            )

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            packet = func.overloadpacket
            name = packet.__name__
            if packet in flop_registry:
                counted.products += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            elif name in ELEMENTWISE:
                counted.elementwise += out.numel()
            elif name in TRANSCENDENTAL:
                counted.transcendental += out.numel()
            elif name not in MOVES:
                raise UncountedOperation(f"no rule to count {func}")
            return out

    with Counter():
        yield counted
