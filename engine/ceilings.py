r"""The two ceilings of a device: how fast it copies memory, and how fast it multiplies matrices.

Work that does :math:`I` operations for every byte it moves can't run faster than
:math:`\min(\text{matmul rate},\ I \cdot \text{copy rate})`, the roofline; at the ridge both bounds meet. Both rates are
measured here, not looked up: what torch reaches on this device, with the threads of this process, at this moment. On a
busy machine they come out low. Only the CPU part was tried on real hardware. The model is that of Williams, Waterman
and Patterson (2009).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import Table
from engine.timing import nothing, times_s, varied

if TYPE_CHECKING:
    import torch

COPY_BYTES = 2**26  # of each of the two buffers: above the caches of most devices, within the memory of all
MEMORY_BYTES = 2 * COPY_BYTES  # the most that is held at once, for the copy or for three matrices
FIRST_SIZE = 256  # rows of the smallest square matrix
CALL_S = 0.08  # no product is tried that would take longer
TRIES = 5
TIMER_S = 0.05  # how long torch's timer repeats on the CPU, at the least


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches in one dtype, with the size and the settings at which it did."""

    device: str
    dtype: str
    copy_bytes_per_s: float
    matmul_flop_per_s: float
    copy_bytes: int
    matmul_size: int
    torch: str
    threads: int


def roofline_flop_per_s(intensity: float, ceilings: Ceilings) -> float:
    """The highest rate at ``intensity`` operations for each byte."""
    return min(ceilings.matmul_flop_per_s, intensity * ceilings.copy_bytes_per_s)


def ridge_flop_per_byte(ceilings: Ceilings) -> float:
    """The intensity from which on the matrix rate is the bound, and no longer the memory."""
    return ceilings.matmul_flop_per_s / ceilings.copy_bytes_per_s


def least_s(flop: float, moved_bytes: float, ceilings: Ceilings) -> float:
    """Seconds that neither bound lets work fall below."""
    return max(flop / ceilings.matmul_flop_per_s, moved_bytes / ceilings.copy_bytes_per_s)


def under_roofline(
    by: str, points: Sequence[tuple[str, float, float]], ceilings: Ceilings, *, x: str = "flop_per_byte"
) -> Table:
    """A row for each point (its series, operations for each byte, rate), and three for the roofline: its corner, and
    ends beyond all points. ``by`` and ``x`` name the columns of the series and of the intensities.
    """
    ridge = ridge_flop_per_byte(ceilings)
    marks = sorted([ridge, *(intensity for _, intensity, _ in points)])
    corners = [("roofline", at, roofline_flop_per_s(at, ceilings)) for at in (marks[0] / 2, ridge, marks[-1] * 2)]
    series, intensities, rates = zip(*points, *corners, strict=True)
    return {
        by: np.array(series),
        x: np.array(intensities),
        "flop_per_s": np.array(rates),
        "roofline_flop_per_s": np.array([roofline_flop_per_s(intensity, ceilings) for intensity in intensities]),
    }


_known: dict[tuple[str, str], Ceilings] = {}
_measuring = threading.Lock()


def known_ceilings(device: torch.device, dtype: torch.dtype, check_stop: Callable[[], None] = nothing) -> Ceilings:
    """The ceilings of a device in a dtype, measured once a process, in about a second.

    One at a time: two that measure together would both measure half.

    Raises: what ``check_stop`` raises, also while another one measures.
    """
    key = str(device), _name(dtype)
    while not _measuring.acquire(timeout=0.1):
        check_stop()
    try:
        if key not in _known:
            _known[key] = measure(device, dtype, check_stop)
        return _known[key]
    finally:
        _measuring.release()


def measure(device: torch.device, dtype: torch.dtype, check_stop: Callable[[], None] = nothing) -> Ceilings:
    """Measure both: the best of a few repeats, of the matrices at the best of several sizes.

    The copy is large, since small ones stay in a cache; its bytes count twice, read and written. The matrices double
    their size as long as a product stays short and they fit into the memory of the copy.

    Raises: what ``check_stop`` raises, between two repeats.
    """
    import torch

    rate, best_size, size = 0.0, 0, FIRST_SIZE
    while 3 * size**2 * dtype.itemsize <= MEMORY_BYTES:
        # numbers that vary, as real ones do: multiplying constant ones takes a GPU less power, and so less time
        square = varied(size, size, device=device, dtype=dtype)
        taken_s = _best_s(functools.partial(torch.mm, square, square, out=torch.empty_like(square)), device, check_stop)
        if 2 * size**3 / taken_s > rate:
            rate, best_size = 2 * size**3 / taken_s, size
        if 8 * taken_s > CALL_S:
            break
        size *= 2
    del square

    count = COPY_BYTES // dtype.itemsize
    source, target = torch.ones(count, dtype=dtype, device=device), torch.zeros(count, dtype=dtype, device=device)
    copied_s = _best_s(functools.partial(target.copy_, source), device, check_stop)
    return Ceilings(
        device=str(device),
        dtype=_name(dtype),
        copy_bytes_per_s=2 * COPY_BYTES / copied_s,
        matmul_flop_per_s=rate,
        copy_bytes=COPY_BYTES,
        matmul_size=best_size,
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
    )


def _best_s(work: Callable[[], object], device: torch.device, check_stop: Callable[[], None]) -> float:
    """Seconds of the fastest repeat: what disturbs a measurement only ever makes it longer."""
    if device.type != "cpu":
        return min(times_s(work, device, check_stop, repeats=TRIES))
    import torch
    from torch.utils.benchmark import Timer

    check_stop()
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return float(min(timer.blocked_autorange(lambda number, taken_s: check_stop(), min_run_time=TIMER_S).times))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
