r"""How many operations one matrix product does for each byte that it moves, by the rows that share its matrix.

``batch`` sequences bring ``rows_per_sequence`` rows each. ``one_for_all``: they all meet the same matrix, which is read
once (a weight). ``one_each``: every sequence meets a matrix of its own (the keys in its cache). The rows, their
operations and their results are the same in both; what differs is how many rows share the reading of a matrix.

.. math:: I=\frac{2\,T\,k\,m}{b\,k\,m+s\,T\,(k+m)},\qquad T\text{ rows on each }k\times m\text{ matrix}

for ``b`` bytes of a number of the matrix and ``s`` of a row. Operations are counted while the product runs on tensors
of full size without storage; bytes are those of the tensors, each read or written once. ``w8a16`` and ``w4a16`` store
the matrix in 8 or 4 bits and multiply in 16: with a scale of 16 bits for each column, and in 4 bits for each 128
numbers of a column. ``w8a8`` also reads its rows in 8 bits and multiplies twice as fast; results are written in 16
bits. The operations that unpack the numbers are left out.

Sources: scaling-book, roofline.md (the model, and all four cases as problems); h100-sheet (the rates: half of what is
stated with sparsity, and twice as many operations a second in 8 bits).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.intensity import bound_flop_per_s, counted_kernel

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    matrix_owner: str = choice("one_for_all", "one_each")
    batch: int = number(16, low=1, high=65536, log2=True)
    rows_per_sequence: int = number(1, low=1, high=4096, log2=True)
    matrix_in: int = number(4096, low=8, high=65536, log2=True)
    matrix_out: int = number(4096, low=8, high=65536, log2=True)
    matrix_format: str = choice("w16a16", "w8a16", "w4a16", "w8a8")
    matmul_tflop_per_s: float = number(989.0, low=0.1, high=5000)
    memory_gb_per_s: float = number(3350.0, low=10, high=20000)


METRICS = (
    Metric("product_flop_per_byte", "flop/byte"),
    Metric("given_ridge_flop_per_byte", "flop/byte"),
    Metric("turning_rows"),
    Metric("highest_flop_per_byte", "flop/byte"),
    Metric("reachable_peak_share"),
    Metric("product_least_us"),
    Metric("row_least_us"),
    Metric("product_flop", "flop"),
    Metric("matrix_read_bytes", "bytes"),
    Metric("rows_moved_bytes", "bytes"),
)
PLOTS = (
    Plot(
        "intensity",
        table="by_batch",
        x="batch",
        y="product_flop_per_byte",
        by="matrix_owner",
        theory="given_ridge_flop_per_byte",
        x_scale="log2",
        y_scale="log10",
        y_unit="flop/byte",
        one_law=True,
    ),
    Plot(
        "row_time",
        table="by_batch",
        x="batch",
        y="row_least_us",
        by="matrix_owner",
        x_scale="log2",
        y_scale="log10",
    ),
    Plot(
        "shapes",
        table="by_width",
        x="rows_on_matrix",
        y="product_flop_per_byte",
        by="matrix_out",
        theory="given_ridge_flop_per_byte",
        x_scale="log2",
        y_scale="log10",
        y_unit="flop/byte",
        one_law=True,
    ),
)
BUDGET_S = 0.05

OWNERS = ("one_for_all", "one_each")
BATCHES = (1, 4, 16, 64, 256, 1024, 4096, 16384)
THIN = 16  # outputs of a thin matrix: a usual rank of LoRA
GROUP = 128  # numbers of a column that share a scale in 4 bits
SEARCHED = 2**30  # rows up to which a turning point is looked for


class _Format(NamedTuple):
    matrix_bits: int
    row_bits: int
    speed: int  # of the arithmetic, against 16 bits


FORMATS = {
    "w16a16": _Format(16, 16, 1),
    "w8a16": _Format(8, 16, 1),
    "w4a16": _Format(4, 16, 1),
    "w8a8": _Format(8, 8, 2),
}


class _Product(NamedTuple):
    flop: int
    matrix_bytes: int
    row_bytes: int

    @property
    def flop_per_byte(self) -> float:
        return self.flop / (self.matrix_bytes + self.row_bytes)

    def time_s(self, flop_per_s: float, bytes_per_s: float) -> float:
        return max(self.flop / flop_per_s, (self.matrix_bytes + self.row_bytes) / bytes_per_s)


def memory_bytes(params: Params) -> int:
    """Tensors have no storage."""
    return 2**20


def run(params: Params, run: Run) -> Result:
    """Counts of the product and what the two rates make of them.

    ``turning_rows``           rows on one matrix from which on it takes longer to compute than to move; the end of the
                               search where there are none
    ``highest_flop_per_byte``  with so many rows that the matrix is next to nothing: what no number of rows goes beyond
    ``reachable_peak_share``   of the operations a second, where the roofline lets this product be
    ``row_least_us``           the least time of the product, shared out over the rows
    """
    run.progress(0.0)
    P = params.matmul_tflop_per_s * 1e12 * FORMATS[params.matrix_format].speed
    B = params.memory_gb_per_s * 1e9
    product = _product(params, params.matrix_owner, params.batch)
    rows = params.batch * params.rows_per_sequence
    metrics = {
        "product_flop_per_byte": product.flop_per_byte,
        "given_ridge_flop_per_byte": P / B,
        "turning_rows": _turning_rows(params, P, B),
        "highest_flop_per_byte": _on_one_matrix(params, SEARCHED).flop_per_byte,
        "reachable_peak_share": bound_flop_per_s(product.flop_per_byte, P, B) / P,
        "product_least_us": 1e6 * product.time_s(P, B),
        "row_least_us": 1e6 * product.time_s(P, B) / rows,
        "product_flop": product.flop,
        "matrix_read_bytes": product.matrix_bytes,
        "rows_moved_bytes": product.row_bytes,
    }
    run.progress(0.5)
    tables = {"by_batch": _by_batch(params, P, B), "by_width": _by_width(params, P, B)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _product(params: Params, owner: str, batch: int) -> _Product:
    rows = params.rows_per_sequence
    matrices, rows = (1, batch * rows) if owner == "one_for_all" else (batch, rows)
    return _counted(matrices, rows, params.matrix_in, params.matrix_out, params.matrix_format)


def _on_one_matrix(params: Params, rows: int) -> _Product:
    return _counted(1, rows, params.matrix_in, params.matrix_out, params.matrix_format)


@functools.lru_cache(maxsize=4096)
def _counted(matrices: int, rows: int, width_in: int, width_out: int, number_format: str) -> _Product:
    """So many products of rows and a matrix. Shapes: (matrices, rows, in) and (matrices, in, out)."""
    import torch

    bits = FORMATS[number_format]
    row_dtype = {16: torch.bfloat16, 8: torch.float8_e4m3fn}[bits.row_bits]
    x = torch.empty(matrices, rows, width_in, dtype=row_dtype, device="meta")
    multiplied = torch.empty(matrices, width_in, width_out, dtype=torch.bfloat16, device="meta")
    kernel = counted_kernel("product", [x], lambda: torch.bmm(x.to(torch.bfloat16), multiplied))
    stored = sum(tensor.nbytes for tensor in _stored(multiplied, bits.matrix_bits))
    return _Product(kernel.products, stored, kernel.bytes)


def _stored(matrix: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """The tensors that hold the numbers of (matrices, in, out) in so many bits each, scales among them."""
    import torch

    if bits == 16:
        return [matrix]
    matrices, width_in, width_out = matrix.shape
    groups = math.ceil(width_in / GROUP) if bits == 4 else 1
    numbers = torch.empty(matrices, math.ceil(width_in * bits / 8), width_out, dtype=torch.uint8, device=matrix.device)
    return [numbers, torch.empty(matrices, groups, width_out, dtype=matrix.dtype, device=matrix.device)]


def _turning_rows(params: Params, P: float, B: float) -> int:
    """By halving: with more rows the operations grow faster than the bytes."""
    low, high = 0, SEARCHED
    while high - low > 1:
        middle = (low + high) // 2
        if _on_one_matrix(params, middle).flop_per_byte < P / B:
            low = middle
        else:
            high = middle
    return high


def _by_batch(params: Params, P: float, B: float) -> Table:
    """Both kinds of sharing, by the number of sequences."""
    batches = sorted({*BATCHES, params.batch})
    products = [_product(params, owner, batch) for owner in OWNERS for batch in batches]
    rows = params.rows_per_sequence * np.tile(batches, len(OWNERS))
    return {
        "matrix_owner": np.repeat(OWNERS, len(batches)),
        "batch": np.tile(batches, len(OWNERS)),
        "product_flop_per_byte": np.array([one.flop_per_byte for one in products]),
        "row_least_us": np.array([1e6 * one.time_s(P, B) for one in products]) / rows,
        "given_ridge_flop_per_byte": np.full(len(products), P / B),
    }


def _by_width(params: Params, P: float, B: float) -> Table:
    """One matrix by the rows that share it: a thin one, a quarter of the chosen one, and that one."""
    widths = sorted({min(THIN, params.matrix_out), max(8, params.matrix_out // 4), params.matrix_out})
    rows = [*BATCHES, 2**16, 2**18]
    products = [
        _counted(1, number_of, params.matrix_in, width, params.matrix_format) for width in widths for number_of in rows
    ]
    return {
        "matrix_out": np.repeat(widths, len(rows)),
        "rows_on_matrix": np.tile(rows, len(widths)),
        "product_flop_per_byte": np.array([one.flop_per_byte for one in products]),
        "given_ridge_flop_per_byte": np.full(len(products), P / B),
    }
