"""Print one table of times and sizes.

    python -m bench.run                      all subjects
    python -m bench.run repaint memory       some of them

Absolute times are this machine's at this moment; ratios within one run are what to compare. Exit status 1 when an aim
was missed or a subject could not be measured.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import traceback
from collections.abc import Iterable, Sequence

from bench.measure import Row, quietness

SUBJECTS = ("cold_start", "repaint", "grading", "readers", "experiments", "sweep", "claims", "memory", "study", "plan")


def show(row: Row) -> str:
    digits = 2 if row.value < 10 else 1 if row.value < 100 else 0
    aim = "" if row.aim is None else f"≤ {row.aim:g}"
    value = f"{row.value:>9.{digits}f} {row.unit:<4}"
    return f"{row.subject:<22} {row.what:<42} {value} {aim:<8} {row.verdict:<7} {row.note}".rstrip()


def measure(subject: str) -> Iterable[Row]:
    """The rows of one subject; a failure becomes a row, so that the others are still measured."""
    try:
        yield from importlib.import_module(f"bench.{subject}").rows()
    except Exception as error:  # whatever goes wrong in one subject is told, and the next one is tried
        traceback.print_exc()
        yield Row(subject, f"not measured: {type(error).__name__}", float("inf"), "", aim=0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "subjects", nargs="*", default=SUBJECTS, choices=SUBJECTS, metavar="SUBJECT", help=", ".join(SUBJECTS)
    )
    options = parser.parse_args(arguments)
    print(f"Python {platform.python_version()}, {platform.machine()}, {quietness()}\n")
    print(f"{'subject':<22} {'what':<42} {'value':>9} {'':<4} {'aim':<8} {'':<7} note")
    missed = 0
    for subject in options.subjects:
        for row in measure(subject):
            print(show(row), flush=True)
            missed += row.verdict == "MISSED"
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
