"""How long a piece of work takes on a device, and how much memory it takes there at most.

On an accelerator the clock is the device's own: events in its queue, since the call that starts a kernel returns before
the kernel has ended. Only the CPU part was tried on real hardware; the others are tested with stand-ins for torch's
modules.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

REPEATS = 3
DISPLACED_BYTES = 2**25  # more than the caches of a core

Name = TypeVar("Name", bound=Hashable)


def nothing() -> None:
    """What is called where nothing is to be done."""


def wall_time_s(
    work: Callable[[], object],
    device: torch.device,
    check_stop: Callable[[], None] = nothing,
    *,
    repeats: int = REPEATS,
    before: Callable[[], object] = nothing,
) -> float:
    """Seconds that ``work`` takes on ``device``: the median of :func:`times_s`."""
    return statistics.median(times_s(work, device, check_stop, repeats=repeats, before=before))


def times_s(
    work: Callable[[], object],
    device: torch.device,
    check_stop: Callable[[], None] = nothing,
    *,
    repeats: int = REPEATS,
    before: Callable[[], object] = nothing,
) -> list[float]:
    """Seconds of each repeat, after one that is not counted: first uses allocate, choose kernels, compile.

    ``before`` is called ahead of each repeat, outside its time; ``check_stop`` ahead of that.
    """
    measure = _by_clock if device.type == "cpu" else _by_events
    times = []
    with _on(device):
        for repeat in range(repeats + 1):
            check_stop()
            before()
            taken = measure(work, device)
            if repeat:
                times.append(taken)
    return times


def least_times_s(
    works: Mapping[Name, Callable[[], object]],
    device: torch.device,
    report: Callable[[float], None],
    *,
    rounds: int,
    repeats: int,
    before: Callable[[], object] = nothing,
) -> dict[Name, float]:
    """Seconds of the fastest repeat of each: whatever else the machine does only adds to it.

    One after the other, ``rounds`` times with ``repeats`` each, so that a busy moment spoils some repeats of each work
    and not all of one. ``report`` is told the fraction that is done; it and ``before`` are called as in
    :func:`times_s`.
    """
    times: dict[Name, list[float]] = {name: [] for name in works}
    for turn in range(rounds):
        for done, (name, work) in enumerate(works.items()):
            check_stop = functools.partial(report, (turn + done / len(works)) / rounds)
            times[name] += times_s(work, device, check_stop, repeats=repeats, before=before)
    return {name: min(taken) for name, taken in times.items()}


def varied(*shape: int, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Numbers in [-1, 1] that need no seed: a time does not depend on them as long as they are not all the same.

    In float32 without a ``dtype``.
    """
    import torch

    numbers = torch.arange(math.prod(shape), dtype=torch.float32, device=device).sin_()
    return numbers.to(dtype or torch.float32).view(shape)


def displacer(device: torch.device) -> Callable[[], object]:
    """What, called before a repeat, pushes out of the caches what the last one has read."""
    import torch

    displaced = torch.empty(DISPLACED_BYTES // 4, dtype=torch.float32, device=device)
    return functools.partial(displaced.fill_, 0.0)


def _by_clock(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _by_events(work: Callable[[], object], device: torch.device) -> float:
    events = _module(device)
    start, end = events.Event(enable_timing=True), events.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000  # events count milliseconds


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Makes it the current device, in whose queue events are recorded; Apple's is the only one of its kind."""
    if device.type in ("cpu", "mps"):
        return nullcontext()
    made: AbstractContextManager[object] = _module(device).device(device)
    return made


def _module(device: torch.device) -> Any:
    """torch.cuda (ROCm's too), torch.xpu or torch.mps."""
    import torch

    return getattr(torch, device.type)


@dataclass
class Peak:
    """``bytes``: the most that torch held there at once, known after the block; None where nothing counts it."""

    bytes: int | None = None


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Watch the memory of a device during a ``with`` block, by its own counter: what was held before counts too.

    CUDA, ROCm and XPU keep a highest mark; Apple's devices and the CPU do not.
    """
    peak = Peak()
    if device.type in ("cpu", "mps"):
        yield peak
        return
    counters = _module(device)
    counters.synchronize(device)
    counters.reset_peak_memory_stats(device)
    yield peak
    counters.synchronize(device)
    peak.bytes = int(counters.max_memory_allocated(device))
