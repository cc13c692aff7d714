"""Numbers as CSV: the table behind a chart, and a sweep."""

from __future__ import annotations

import io
from collections.abc import Iterable
from csv import writer

from engine.base import Table
from engine.runner import Sweep


def csv(table: Table) -> str:
    """A table as CSV (RFC 4180): a header, then a line for each row. Every number reads back as the same number.

    Raises: ValueError for columns of different lengths.
    """
    lengths = {name: len(column) for name, column in table.items()}
    if len({*lengths.values()}) > 1:
        raise ValueError(f"got columns of different lengths: {', '.join(f'{n} {k}' for n, k in lengths.items())}")
    return _lines(table, zip(*table.values(), strict=True))


def sweep_csv(sweep: Sweep) -> str:
    """A sweep as CSV in long form: the swept parameter, the seed, each metric; a line for each run.

    Raises: ValueError where the swept parameter, or "seed", is the name of a metric.
    """
    names = [sweep.over, "seed", *sweep.metrics]
    if len({*names}) < len(names):
        raise ValueError(f"got a column twice among {', '.join(names)}; rename the metric")
    runs = [
        (value, seed, *(metric[i, j] for metric in sweep.metrics.values()))
        for i, value in enumerate(sweep.values)
        for j, seed in enumerate(sweep.seeds)
    ]
    return _lines(names, runs)


def _lines(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    out = writer(text, lineterminator="\r\n")
    out.writerow(names)
    # a numpy number's str is the shortest that reads back as the same number of its own dtype
    out.writerows([str(value) for value in row] for row in rows)
    return text.getvalue()
