"""What the benchmarks share: rows of the table, a process's CPU time and memory, and the flagship's first lab."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CARD = "sdpa-scale-sqrt-dk"


@dataclass(frozen=True)
class Row:
    """One line of the table. ``aim`` is an upper limit for ``value``; None where the line only informs."""

    subject: str
    what: str
    value: float
    unit: str
    note: str = ""
    aim: float | None = None

    @property
    def verdict(self) -> str:
        return "" if self.aim is None else "ok" if self.value <= self.aim else "MISSED"


def p95(values: Sequence[float]) -> float:
    """The value that 95 % stay below."""
    return sorted(values)[min(len(values) - 1, round(0.95 * (len(values) - 1)))]


def median_and_p95(values: Sequence[float]) -> tuple[float, float]:
    return statistics.median(values), p95(values)


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


def cpu_s(pid: int) -> float:
    """CPU seconds that a process and its living descendants have used."""
    total = 0
    for member in family(pid):
        try:
            after_name = Path(f"/proc/{member}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        total += int(after_name[11]) + int(after_name[12])  # utime, stime
    return total / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Resident memory of a process and its descendants in 10^6 bytes.

    Pages of libraries that other programs share count in full: on a host of one's own nobody shares them.
    """
    pages = 0
    for member in family(pid):
        try:
            pages += int(Path(f"/proc/{member}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def quietness() -> str:
    """How busy the machine is, for whoever reads the numbers later."""
    load = Path("/proc/loadavg").read_text().split()[0]
    return f"{os.cpu_count()} cores, load {load}"
