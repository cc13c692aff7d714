r"""The same rows times a matrix that they share, and times a matrix of their own each, timed on this device.

``one_for_all``: ``batch`` rows times one matrix, as hidden states meet weights. ``one_each``: every row times a matrix
of its own, as the query of a sequence meets the keys in its cache. Operations and results are as many in both. Before
each product memory is written, so that no matrix waits in a cache of the processor, as none does in a model of real
size; what a very large cache keeps all the same makes few small matrices look cheap.

Both rates of the roofline are measured here (engine/ceilings.py). Bytes are those of the matrices, the rows and the
results, each once. How far a point stays below the roofline tells about this library and this device: which kernel it
takes for so few rows, and what every call costs however little it computes. A point above it is possible: reading alone
is cheaper than copying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine import ceilings, timing
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, number
from engine.intensity import counted_kernel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    batch: int = number(16, low=1, high=64, log2=True)
    matrix_side: int = number(512, low=64, high=2048, log2=True)

    def rules(self) -> Iterator[Problem]:
        numbers = self.batch * self.matrix_side**2
        if numbers > MAX_NUMBERS:
            values = {"work": numbers, "limit": MAX_NUMBERS}
            yield Problem("rule", "matrix_side", self.matrix_side, rule="too_many_matrices", values=values)


METRICS = (
    Metric("one_for_all_gain", measured=True),
    Metric("one_each_gain", measured=True),
    Metric("one_each_over_one_for_all", measured=True),
    Metric("read_ratio"),
    Metric("one_for_all_roof_share", measured=True),
    Metric("one_each_roof_share", measured=True),
    Metric("one_for_all_s", "s", measured=True),
    Metric("one_each_s", "s", measured=True),
    Metric("ridge_flop_per_byte", "flop/byte", measured=True),
    Metric("copy_bytes_per_s", "bytes/s", measured=True),
    Metric("matmul_flop_per_s", "flop/s", measured=True),
)
PLOTS = (
    Plot(
        "row_time",
        table="by_batch",
        x="batch",
        y="measured_row_us",
        by="matrix_owner",
        theory="least_row_us",
        x_scale="log2",
        y_scale="log10",
        measured=("measured_row_us", "least_row_us"),
    ),
    Plot(
        "roofline",
        table="points",
        x="flop_per_byte",
        y="flop_per_s",
        by="matrix_owner",
        theory="roofline_flop_per_s",
        mark="point",
        x_scale="log10",
        y_scale="log10",
        x_unit="flop/byte",
        y_unit="flop/s",
        one_law=True,
        measured=("flop_per_byte", "flop_per_s", "roofline_flop_per_s"),  # x: the ridge is one of the points
    ),
)
BUDGET_S = 0.3  # once the ceilings are known; they take half a second, once a process

MAX_NUMBERS = 2**24  # of all matrices together: reading them takes some 20 ms on one core
OWNERS = ("one_for_all", "one_each")
BATCHES = (1, 4, 16)
ROUNDS, REPEATS_A_ROUND = 2, 2


class _Timed(NamedTuple):
    owner: str
    batch: int
    seconds: float
    flop: int
    bytes: int

    def least_s(self, roof: ceilings.Ceilings) -> float:
        return ceilings.least_s(self.flop, self.bytes, roof)


def memory_bytes(params: Params) -> int:
    """Of the ceilings, which come first; or the matrices of all rows, of a number of 8 bytes, and what is displaced."""
    matrices = 8 * max(params.batch, 1) * params.matrix_side**2
    return max(ceilings.MEMORY_BYTES, timing.DISPLACED_BYTES + 3 * matrices) + 2**20


def run(params: Params, run: Run) -> Result:
    """Times are the fastest of four, in two rounds.

    ``one_for_all_gain``  rows a second at the chosen batch over those of a single row, with one matrix for all
    ``one_each_over_one_for_all``  time with a matrix for each row over that with one for all, at the chosen batch
    ``read_ratio``        bytes of the matrices that are read with one for each, over those with one for all

    Shapes: rows (batch, side), the matrix (side, side) or (batch, side, side).
    """
    import torch

    run.progress(0.0)
    roof = ceilings.known_ceilings(run.device, run.dtype, lambda: run.progress(0.0))
    side = params.matrix_side
    batches = sorted({*(batch for batch in BATCHES if batch < params.batch), params.batch, 1})

    matrices, rows = (
        timing.varied(*shape, device=run.device, dtype=run.dtype)
        for shape in ((params.batch, side, side), (params.batch, side))
    )

    def prepared(owner: str, batch: int) -> tuple[Callable[[], torch.Tensor], torch.Tensor]:
        """The product, and the matrices that it reads."""
        x = rows[:batch]
        if owner == "one_for_all":
            return (lambda: x @ matrices[0].mT), matrices[:1]
        return (lambda: torch.bmm(matrices[:batch], x[..., None])), matrices[:batch]

    works = {(owner, batch): prepared(owner, batch) for batch in batches for owner in OWNERS}
    counts = {key: counted_kernel(key[0], [read, rows[: key[1]]], work) for key, (work, read) in works.items()}
    seconds = timing.least_times_s(
        {key: work for key, (work, _) in works.items()},
        run.device,
        lambda done: run.progress(0.1 + 0.9 * done),
        rounds=ROUNDS,
        repeats=REPEATS_A_ROUND,
        before=timing.displacer(run.device),
    )
    found = {key: _Timed(*key, seconds[key], counts[key].products, counts[key].bytes) for key in works}

    all_rows = {owner: found[owner, params.batch] for owner in OWNERS}
    alone = {owner: found[owner, 1] for owner in OWNERS}
    metrics = {
        **{f"{owner}_gain": params.batch * alone[owner].seconds / all_rows[owner].seconds for owner in OWNERS},
        "one_each_over_one_for_all": all_rows["one_each"].seconds / all_rows["one_for_all"].seconds,
        "read_ratio": works["one_each", params.batch][1].nbytes / works["one_for_all", params.batch][1].nbytes,
        **{f"{owner}_roof_share": all_rows[owner].least_s(roof) / all_rows[owner].seconds for owner in OWNERS},
        **{f"{owner}_s": all_rows[owner].seconds for owner in OWNERS},
        "ridge_flop_per_byte": ceilings.ridge_flop_per_byte(roof),
        "copy_bytes_per_s": roof.copy_bytes_per_s,
        "matmul_flop_per_s": roof.matmul_flop_per_s,
    }
    timed = list(found.values())
    by_batch = {
        "batch": np.array([one.batch for one in timed]),
        "matrix_owner": np.array([one.owner for one in timed]),
        "measured_row_us": np.array([1e6 * one.seconds / one.batch for one in timed]),
        "least_row_us": np.array([1e6 * one.least_s(roof) / one.batch for one in timed]),
    }
    points = [(one.owner, one.flop / one.bytes, one.flop / one.seconds) for one in timed]
    return Result(
        {name: float(metrics[name]) for name in (metric.name for metric in METRICS)},
        {"by_batch": by_batch, "points": ceilings.under_roofline("matrix_owner", points, roof)},
    )
