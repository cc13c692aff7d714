"""product_intensity against a bill by hand, and against products that really run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "product_intensity"
SETTINGS = [
    {"batch": 1},
    {"batch": 24, "rows_per_sequence": 3, "matrix_in": 640, "matrix_out": 384},
    {"batch": 24, "rows_per_sequence": 3, "matrix_in": 640, "matrix_out": 384, "matrix_owner": "one_each"},
    {"batch": 7, "rows_per_sequence": 2, "matrix_in": 300, "matrix_out": 128, "matrix_format": "w4a16"},
    {"batch": 7, "matrix_in": 300, "matrix_out": 128, "matrix_format": "w8a16", "matrix_owner": "one_each"},
    {"batch": 512, "matrix_in": 4096, "matrix_out": 16, "matrix_format": "w8a8"},
    {"batch": 512, "matrix_in": 1024, "matrix_out": 4096, "matmul_tflop_per_s": 60, "memory_gb_per_s": 400},
]


def bill(p: dict, rows_on_matrix: int, matrices: int) -> tuple[int, float, int]:
    """Operations, bytes of the matrices and bytes of rows and results: as on a whiteboard."""
    k, m = p.get("matrix_in", 4096), p.get("matrix_out", 4096)
    stored = {
        "w16a16": 2 * k * m,
        "w8a16": k * m + 2 * m,
        "w8a8": k * m + 2 * m,
        "w4a16": k * m / 2 + 2 * m * math.ceil(k / 128),
    }
    row = {"w8a8": 1}.get(p.get("matrix_format", "w16a16"), 2)
    T = rows_on_matrix * matrices
    return 2 * T * k * m, matrices * stored[p.get("matrix_format", "w16a16")], T * (row * k + 2 * m)


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = run(experiment, **p)
        metrics, each = result.metrics, p.get("matrix_owner") == "one_each"
        batch, rows = p["batch"], p.get("rows_per_sequence", 1)
        flop, read, moved = bill(p, rows, batch) if each else bill(p, batch * rows, 1)
        fast = {"w8a8": 2}.get(p.get("matrix_format", ""), 1)
        peak, bandwidth = fast * p.get("matmul_tflop_per_s", 989) * 1e12, p.get("memory_gb_per_s", 3350) * 1e9
        least = max(flop / peak, (read + moved) / bandwidth)
        expected = {
            "product_flop": flop,
            "matrix_read_bytes": read,
            "rows_moved_bytes": moved,
            "product_flop_per_byte": flop / (read + moved),
            "given_ridge_flop_per_byte": peak / bandwidth,
            "reachable_peak_share": flop / least / peak,
            "product_least_us": 1e6 * least,
            "row_least_us": 1e6 * least / (batch * rows),
        }
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-12), (p, name)  # a few roundings of doubles
        flop, read, moved = bill(p, 2**30, 1)
        assert metrics["highest_flop_per_byte"] == pytest.approx(flop / (read + moved), rel=1e-12), p

        def above(T: int, p: dict = p, ridge: float = peak / bandwidth) -> bool:
            flop, read, moved = bill(p, T, 1)
            return flop / (read + moved) >= ridge

        turning = int(metrics["turning_rows"])
        if turning == 2**30:
            assert not above(2**29), p
        else:
            assert above(turning), p
            assert not above(turning - 1), p

        table = result.tables["by_batch"]
        for owner in ("one_for_all", "one_each"):
            row = (table["matrix_owner"] == owner) & (table["batch"] == batch)
            flop, read, moved = bill(p, rows, batch) if owner == "one_each" else bill(p, batch * rows, 1)
            assert table["product_flop_per_byte"][row] == pytest.approx(flop / (read + moved), rel=1e-12), p
            time_us = 1e6 * max(flop / peak, (read + moved) / bandwidth) / (batch * rows)
            assert table["row_least_us"][row] == pytest.approx(time_us, rel=1e-12), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('(1, batch * rows) if owner == "one_for_all" else (batch, rows)', "(1, batch * rows)"),
        ("(1, batch * rows) if owner", "(1, batch) if owner"),
        ("math.ceil(width_in / GROUP) if bits == 4 else 1", "1"),
        ('"w8a8": _Format(8, 8, 2)', '"w8a8": _Format(8, 8, 1)'),
        ('"w8a8": _Format(8, 8, 2)', '"w8a8": _Format(8, 16, 2)'),
        ("flop_per_byte < P / B", "flop_per_byte < 2 * P / B"),
        ("_on_one_matrix(params, SEARCHED)", "_on_one_matrix(params, 2**20)"),
        ("product.time_s(P, B) / rows", "product.time_s(P, B) / params.batch"),
        ("rows = params.rows_per_sequence * np.tile", "rows = np.tile"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (5, 1), (3, 4)])
def test_a_product_that_really_runs_takes_as_many_operations_and_bytes(batch, rows):
    x, W = torch.ones(batch, rows, 48, dtype=torch.bfloat16), torch.ones(batch, 48, 32, dtype=torch.bfloat16)
    p = {"batch": batch, "rows_per_sequence": rows, "matrix_in": 48, "matrix_out": 32}
    for owner, rows_given, matrix in (("one_for_all", x.flatten(0, 1), W[0]), ("one_each", x, W)):
        with FlopCounterMode(display=False) as flops:
            out = rows_given @ matrix
        metrics = run(get(NAME), matrix_owner=owner, **p).metrics
        assert metrics["product_flop"] == flops.get_total_flops()
        assert metrics["matrix_read_bytes"] == matrix.nbytes
        assert metrics["rows_moved_bytes"] == x.nbytes + out.nbytes


def test_limits_that_are_known():
    """One row and one matrix: one operation a byte, less what the row takes; a matrix each leaves it at that."""
    expected = 4096 / (4096 + 2)  # 2k² over 2k² + 4k bytes
    for p in ({"batch": 1}, {"batch": 64, "matrix_owner": "one_each"}, {"batch": 4096, "matrix_owner": "one_each"}):
        assert run(get(NAME), **p).metrics["product_flop_per_byte"] == pytest.approx(expected, rel=1e-12)
    # with ever more rows: half the harmonic mean of the sides, in 16 bits
    thin = run(get(NAME), matrix_out=16).metrics["highest_flop_per_byte"]
    assert thin == pytest.approx(1 / (1 / 4096 + 1 / 16), rel=1e-7)  # the matrix is 2e-8 of the bytes of so many rows


def test_charts_draw_the_chosen_matrix_between_others():
    table = run(get(NAME), matrix_out=1024).tables["by_width"]
    assert sorted(set(table["matrix_out"].tolist())) == [16, 256, 1024]
    rising = table["product_flop_per_byte"][table["matrix_out"] == 1024]
    assert (np.diff(rising) > 0).all()
