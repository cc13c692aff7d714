"""shared_matrix_times: what is timed is the product it says, and its counts; the times are this machine's."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine import ceilings, timing
from engine.base import ParamsError
from engine.ceilings import Ceilings
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "shared_matrix_times"
ROOF = Ceilings(
    "cpu", "any", copy_bytes_per_s=8e9, matmul_flop_per_s=64e9, copy_bytes=1, matmul_size=1, torch="", threads=1
)


@contextlib.contextmanager
def pretended():
    """Ceilings as given; a product takes 3 ns an operation with a matrix for each row, else 1 ns, the first time."""
    seen: dict[tuple[int, ...], torch.Tensor] = {}

    def times_s(work, device, check_stop, *, repeats, before):
        check_stop()
        before()
        with FlopCounterMode(display=False) as flops:
            out = work()
        again = tuple(out.shape) in seen
        seen[tuple(out.shape)] = out
        cost = 3e-9 if out.ndim == 3 else 1e-9
        return [(2 if again else 1) * cost * flops.get_total_flops()] * repeats  # what is timed again takes longer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "known_ceilings", lambda device, dtype, check_stop: ROOF)
        patch.setattr(timing, "times_s", times_s)
        yield seen


def law(experiment: Experiment) -> None:
    batch, side = 12, 64
    with pretended() as seen:
        result = run(experiment, batch=batch, matrix_side=side)
    metrics = result.metrics
    assert set(seen) == {(n, side) for n in (1, 4, 12)} | {(n, side, 1) for n in (1, 4, 12)}
    # the same numbers in the first row, whose matrix is the same in both: float32, sums of 64 numbers
    torch.testing.assert_close(seen[12, side, 1][0, :, 0], seen[12, side][0], rtol=1e-4, atol=1e-5)
    # its own matrix for the last row
    varied = torch.arange(12 * side * side, dtype=torch.float32).sin().view(12, side, side)
    rows = torch.arange(12 * side, dtype=torch.float32).sin().view(12, side)
    torch.testing.assert_close(seen[12, side, 1][11, :, 0], varied[11] @ rows[11], rtol=1e-4, atol=1e-5)

    flop = 2 * batch * side**2
    shared, own = 4 * (side**2 + 2 * batch * side), 4 * batch * (side**2 + 2 * side)
    expected = {
        "one_for_all_gain": 1,  # the pretended clock counts operations
        "one_each_gain": 1,
        "one_each_over_one_for_all": 3,
        "read_ratio": batch,
        "one_for_all_roof_share": max(flop / 64e9, shared / 8e9) / (1e-9 * flop),
        "one_each_roof_share": max(flop / 64e9, own / 8e9) / (3e-9 * flop),
        "one_for_all_s": 1e-9 * flop,
        "one_each_s": 3e-9 * flop,
        "ridge_flop_per_byte": 8,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-12), name
    table = result.tables["by_batch"]
    for owner, moved in (("one_for_all", shared), ("one_each", own)):
        row = (table["batch"] == batch) & (table["matrix_owner"] == owner)
        least_us = 1e6 * max(flop / 64e9, moved / 8e9) / batch
        assert table["least_row_us"][row] == pytest.approx(least_us, rel=1e-12)
    points = result.tables["points"]
    assert 8 in points["flop_per_byte"][points["matrix_owner"] == "roofline"]
    assert (points["matrix_owner"] == "one_each").sum() == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.bmm(matrices[:batch], x[..., None])", "torch.bmm(matrices[:1].expand(batch, -1, -1), x[..., None])"),
        ("matrices[0].mT), matrices[:1]", "matrices[0].mT), matrices[:batch]"),  # read for every row
        (
            "params.batch * alone[owner].seconds / all_rows[owner].seconds",
            "alone[owner].seconds / all_rows[owner].seconds",
        ),
        ("1e6 * one.least_s(roof) / one.batch", "1e6 * one.least_s(roof)"),
        (
            '["one_each"].seconds / all_rows["one_for_all"].seconds',
            '["one_for_all"].seconds / all_rows["one_each"].seconds',
        ),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_on_the_real_device_times_are_possible():
    metrics = run(get(NAME), batch=1, matrix_side=64).metrics
    assert 1e-7 < metrics["one_for_all_s"] < 1
    assert 1e-7 < metrics["one_each_s"] < 1
    assert metrics["one_for_all_gain"] == metrics["one_each_gain"] == metrics["read_ratio"] == 1  # it is one row


def test_refuses_what_would_take_long():
    with pytest.raises(ParamsError, match="too_many_matrices"):
        get(NAME).Params(batch=64, matrix_side=1024)
