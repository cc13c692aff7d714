"""How many operations a piece of work takes, and how many bytes its tensors have, counted while it runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ELEMENTWISE = (
    *("add", "add_", "sub", "rsub", "mul", "mul_", "div", "neg", "pow", "square", "abs"),
    *("bitwise_not", "masked_fill", "where", "eq", "ge", "le"),
)
COMPARISONS = ("eq", "ge", "le")
REDUCTIONS = ("sum", "mean", "amax", "argmax")
TRANSCENDENTAL = (
    *("tanh", "exp", "log", "rsqrt", "sigmoid", "silu", "gelu"),
    *("sigmoid_backward", "silu_backward", "gelu_backward"),
)
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
        "detach",
        "unbind",
    ),
    *("clone", "cat", "copy_", "new_empty", "_to_copy", "repeat", "fill_", "zero_"),
    *("empty_like", "new_zeros", "zeros", "ones_like", "zeros_like", "select_backward", "slice_backward"),
    *("gather", "embedding", "embedding_dense_backward"),  # a lookup; its gradient adds rows up where they came from
)


@dataclass
class Operations:
    """Counts so far; ``total`` is everything but moving numbers about.

    ``product_bytes`` and ``other_bytes`` are those of all tensors that matrix products, and that everything else,
    take in and give out: what passes through memory if each operation reads and writes it, as eager code does.
    Views are free.
    """

    products: int = 0
    elementwise: int = 0
    transcendental: int = 0
    product_bytes: int = 0
    other_bytes: int = 0

    @property
    def total(self) -> int:
        return self.products + self.elementwise + self.transcendental


class UncountedOperation(LookupError):
    """An operation was met that is in none of the lists above; it has to be put where it belongs."""


@contextmanager
def count_operations() -> Iterator[Operations]:
    """Count the torch operations inside the ``with`` block, those of a backward pass too.

    Matrix products by the formulas of ``torch.utils.flop_counter`` (two operations for a multiply-add), elementwise
    work by the numbers that come out, reductions by those that go in, one operation each, transcendental functions
    apart.

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
            packet = func.overloadpacket
            name = packet.__name__
            out = _without_storage(name, args)
            if out is None:
                out = func(*args, **(kwargs or {}))
            if packet in flop_registry:
                counted.products += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
                counted.product_bytes += _bytes(args) + _bytes((out,))
                return out
            if name in ELEMENTWISE:
                counted.elementwise += out.numel()
            elif name in REDUCTIONS:
                counted.elementwise += args[0].numel()
            elif name in TRANSCENDENTAL:
                counted.transcendental += out.numel()
            elif name not in MOVES:
                raise UncountedOperation(f"no rule to count {func}")
            if not func.is_view:
                counted.other_bytes += _bytes(args) + _bytes((out,))
            return out

    with Counter():
        yield counted


def _without_storage(name: str, args: Any) -> Any:
    """The result of an elementwise operation whose tensors have no storage: its shape is all there is to compute.

    PyTorch computes it in Python, ten times as slowly, and imports torch._dynamo for it.
    """
    import torch

    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if name not in ELEMENTWISE + TRANSCENDENTAL or name.endswith("_") or not all(t.is_meta for t in tensors):
        return None
    dtype = torch.bool if name in COMPARISONS else functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    shapes = {t.shape for t in tensors}
    return tensors[0].new_empty(torch.broadcast_shapes(*shapes) if len(shapes) > 1 else tensors[0].shape, dtype=dtype)


def _bytes(values: Any) -> int:
    """Of the tensors among the values. A tensor that was expanded counts what it shows, not what it stores."""
    import torch

    return sum(_bytes(v) if isinstance(v, (tuple, list)) else v.nbytes for v in values if _holds(v, torch.Tensor))


def _holds(value: Any, kind: type[torch.Tensor]) -> bool:
    return isinstance(value, (kind, tuple, list))
