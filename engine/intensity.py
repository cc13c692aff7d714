"""One piece of work as a roofline sees it: what it computes, what it moves, and the least time at two rates.

Operations are counted while the work runs on tensors of full size without storage, two for a multiply-add; bytes are
those of the tensors that it reads and writes, each once. That is what a kernel moves that keeps everything between
on the chip. Caches of the device are not thought of: what still lies in one need not be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from engine.operations import count_operations

if TYPE_CHECKING:
    import torch


class Kernel(NamedTuple):
    """Work that is started once, reads its inputs, writes its outputs, and leaves nothing else in memory.

    ``times``: how often it runs; operations and bytes are of all of them. ``products``: those of matrix products.
    """

    name: str
    products: int
    other_flop: int
    bytes: int
    times: int = 1

    @property
    def flop(self) -> int:
        return self.products + self.other_flop

    @property
    def flop_per_byte(self) -> float:
        return self.flop / self.bytes

    def time_s(self, flop_per_s: float, bytes_per_s: float) -> float:
        """The least: computing and moving overlap at best."""
        return max(self.flop / flop_per_s, self.bytes / bytes_per_s)


def counted_kernel(
    name: str, read: Iterable[torch.Tensor], work: Callable[[], torch.Tensor], *, times: int = 1
) -> Kernel:
    """The kernel that does ``work`` on the tensors it reads and writes what comes out."""
    with count_operations() as counted:
        out = work()
    moved = sum(tensor.nbytes for tensor in read) + out.nbytes
    other = counted.elementwise + counted.transcendental
    return Kernel(name, times * counted.products, times * other, times * moved, times)


def joined(name: str, kernels: Iterable[Kernel]) -> Kernel:
    """Several kernels taken as one sum."""
    kernels = list(kernels)
    columns = zip(*((one.products, one.other_flop, one.bytes, one.times) for one in kernels), strict=True)
    return Kernel(name, *(sum(column) for column in columns))


def bound_flop_per_s(flop_per_byte: float, flop_per_s: float, bytes_per_s: float) -> float:
    """The roofline: the highest rate at so many operations for each byte."""
    return min(flop_per_s, flop_per_byte * bytes_per_s)
