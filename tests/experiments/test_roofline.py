"""roofline against operations and bytes counted while attention runs, with ceilings and times that are given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from engine import ceilings, timing
from engine.base import ParamsError, Stopped, make_run
from engine.ceilings import Ceilings
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "roofline"
ROOF = Ceilings(
    "cpu", "any", copy_bytes_per_s=8e9, matmul_flop_per_s=64e9, copy_bytes=1, matmul_size=1, torch="", threads=1
)
SETTINGS = [
    {"phase": "decode", "n_heads": 8, "n_kv_heads": 2, "d_k": 16, "kv_len": 32},
    {"phase": "prefill", "n_heads": 4, "n_kv_heads": 4, "d_k": 8, "kv_len": 48, "batch": 2},
    {"phase": "decode", "n_heads": 6, "n_kv_heads": 1, "d_k": 32, "kv_len": 16, "batch": 3},
    {"phase": "prefill", "n_heads": 8, "n_kv_heads": 2, "d_k": 64, "kv_len": 64},
]
VIEWS = ("transpose", "expand", "view", "_unsafe_view", "reshape", "alias", "detach")


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, each tensor in full, and among them those that come from outside."""

    def __init__(self):
        super().__init__()
        self.steps, self.ends, self.made, self.seen, self.kept = 0, 0, set(), set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.kept.append(out)  # an address must not be used twice
        if func.overloadpacket.__name__ not in VIEWS:
            for tensor in (x for x in args if isinstance(x, torch.Tensor)):
                self.steps += tensor.nbytes
                place = tensor.untyped_storage().data_ptr()
                if place not in self.made | self.seen:
                    self.seen.add(place)
                    self.ends += tensor.nbytes
            first = out[0] if isinstance(out, tuple) else out  # fused attention also returns a row's logarithms
            self.steps += first.nbytes
            self.made.add(first.untyped_storage().data_ptr())
        return out


@dataclass(frozen=True)
class Counted:
    """One call of an implementation: its output, operations of its products, bytes of all steps, of ins and outs."""

    out: torch.Tensor
    flop: int
    steps_bytes: int
    ends_bytes: int

    @staticmethod
    def of(work: Callable[[], torch.Tensor]) -> Counted:
        with FlopCounterMode(display=False) as flops:
            work()
        with Traffic() as traffic:
            out = work()
        return Counted(out, flops.get_total_flops(), traffic.steps, traffic.ends + out.nbytes)


class Device:
    """Stands in for the clock: eager attention takes 3 ns an operation, fused 1 ns; keeps what it was given to time."""

    def __init__(self) -> None:
        self.eager: dict[tuple[int, ...], Counted] = {}  # by the shape of the output
        self.displaced: list[tuple[int, ...]] = []  # before which calls memory was written

    def wall_time_s(self, work, device, check_stop, *, before):
        check_stop()
        with Traffic() as traffic:
            before()
        now = Counted.of(work)
        shape = tuple(now.out.shape)
        if traffic.steps >= 2**25:
            self.displaced.append(shape)
        if shape not in self.eager:
            self.eager[shape] = now
            return 3e-9 * now.flop
        # the same numbers come out of both, or one of them is not attention: float32, sums of 64 numbers
        torch.testing.assert_close(now.out, self.eager[shape].out, rtol=1e-4, atol=1e-5)
        assert now.steps_bytes == now.ends_bytes  # one kernel, which writes no logits
        return 1e-9 * self.eager[shape].flop  # torch counts no operations of the fused kernel of the CPU


@contextlib.contextmanager
def pretended():
    """Ceilings and times as given, counts as taken while attention runs."""
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "known_ceilings", lambda device, dtype, check_stop: ROOF)
        patch.setattr(timing, "wall_time_s", device.wall_time_s)
        yield device


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        with pretended() as device:
            result = run(experiment, **p)
        batch, n_heads, d_k, kv_len = p.get("batch", 1), p["n_heads"], p["d_k"], p["kv_len"]
        variants = sorted({1, p["n_kv_heads"], n_heads})
        q_lens = {"decode": 1, "prefill": kv_len}
        shapes = {
            (phase, n): (batch, n, n_heads // n * q_len, d_k) for phase, q_len in q_lens.items() for n in variants
        }
        assert set(device.eager) == set(shapes.values())
        in_decode = [shapes["decode", n] for n in variants]
        assert sorted(device.displaced) == sorted(2 * in_decode)  # for both implementations

        chosen, metrics = device.eager[shapes[p["phase"], p["n_kv_heads"]]], result.metrics
        assert metrics["attention_flop"] == chosen.flop, p
        assert metrics["least_bytes"] == chosen.ends_bytes, p
        assert metrics["eager_bytes"] == chosen.steps_bytes, p
        assert metrics["intensity_flop_per_byte"] == chosen.flop / chosen.ends_bytes, p
        assert metrics["eager_intensity_flop_per_byte"] == chosen.flop / chosen.steps_bytes, p

        # each quotient rounds once or twice: within 1e-12
        least_s = max(chosen.flop / 64e9, chosen.ends_bytes / 8e9)
        assert (metrics["copy_bytes_per_s"], metrics["matmul_flop_per_s"]) == (8e9, 64e9)
        assert metrics["ridge_flop_per_byte"] == 8
        assert metrics["least_time_s"] == pytest.approx(least_s, rel=1e-12), p
        assert metrics["eager_time_s"] == pytest.approx(3e-9 * chosen.flop, rel=1e-12), p
        assert metrics["sdpa_time_s"] == pytest.approx(1e-9 * chosen.flop, rel=1e-12), p
        assert metrics["eager_roofline_share"] == pytest.approx(least_s / (3e-9 * chosen.flop), rel=1e-12), p
        assert metrics["sdpa_roofline_share"] == pytest.approx(least_s / (1e-9 * chosen.flop), rel=1e-12), p

        expected = set()
        for (phase, n), shape in shapes.items():
            variant = "MHA" if n == n_heads else "MQA" if n == 1 else "GQA"
            x = device.eager[shape].flop / device.eager[shape].ends_bytes
            expected |= {(f"{phase}_eager", variant, x, 1 / 3), (f"{phase}_sdpa", variant, x, 1.0)}
        table = result.tables["points"]
        timed = table["series"] != "roofline"
        rows = zip(*(table[c][timed].tolist() for c in ("series", "variant", "intensity_flop_per_byte")), strict=True)
        rates = (table["flop_per_s"][timed] / 1e9).round(9).tolist()  # operations a nanosecond
        assert {(*row, rate) for row, rate in zip(rows, rates, strict=True)} == {
            (*row, round(rate, 9)) for *row, rate in expected
        }, p
        x, roof = table["intensity_flop_per_byte"], table["roofline_flop_per_s"]
        assert roof == pytest.approx(np.minimum(64e9, 8e9 * x), rel=1e-12)
        assert table["flop_per_s"][~timed] == pytest.approx(roof[~timed], rel=1e-12)
        assert 8 in x[~timed]  # the corner, or the line would cut it off
        assert x[~timed].min() < x[timed].min()
        assert x[timed].max() < x[~timed].max()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return 4 * params.batch", "return 2 * params.batch"),  # a multiply-add counted as one
        ("(2 * queries + 2 * keys)", "(queries + 2 * keys)"),  # the output forgotten
        ("keys = params.batch * n_kv_heads", "keys = params.batch * params.n_heads"),  # keys counted as if not shared
        ("LOGIT_PASSES, ROW_PASSES = 12, 4", "LOGIT_PASSES, ROW_PASSES = 11, 4"),
        ("LOGIT_PASSES, ROW_PASSES = 12, 4", "LOGIT_PASSES, ROW_PASSES = 12, 3"),
        ("flop / ceilings.roofline_flop_per_s(flop / least, roof)", "flop / roof.matmul_flop_per_s"),  # memory is free
        ('"eager_roofline_share": least_s / eager_s', '"eager_roofline_share": least_s / sdpa_s'),
        ("rows = params.n_heads // n_kv_heads * _q_len", "rows = _q_len"),  # one query head for each KV head
        ('displace if phase == "decode"', 'displace if phase == "prefill"'),  # decode finds its keys in the cache
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_intensity_of_decode_by_the_formula(dtype):
    size = getattr(torch, dtype).itemsize
    with pretended():
        for n_heads, n_kv_heads in ((8, 8), (8, 4), (8, 1), (1, 1)):
            for batch in (1, 4):
                p = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "kv_len": 64, "d_k": 16, "batch": batch}
                # the batch cancels in whole numbers: not a digit differs
                expected = 2 * n_heads * 64 / (size * (n_heads + n_kv_heads * 64))
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(timing, "wall_time_s", lambda *call, before: 1.0)
                    assert run(get(NAME), dtype=dtype, **p).metrics["intensity_flop_per_byte"] == expected


def test_on_the_real_device_times_and_ceilings_are_possible():
    metrics = run(get(NAME), kv_len=64, n_heads=2, n_kv_heads=1).metrics
    # no device takes less than a tenth of a microsecond for a call, and none that runs tests a second for this one
    assert 1e-7 < metrics["sdpa_time_s"] < 1
    assert 1e-7 < metrics["eager_time_s"] < 1
    assert metrics["eager_roofline_share"] == pytest.approx(
        metrics["least_time_s"] / metrics["eager_time_s"], rel=1e-12
    )


def test_a_stop_takes_effect_while_the_ceilings_are_measured(monkeypatch):
    monkeypatch.setattr(ceilings, "_known", {})

    def check_stop():
        raise Stopped("stop")

    experiment, reported = get(NAME), []
    prepared = make_run(0, on_progress=lambda fraction, partial: reported.append(fraction))

    def measure(device, dtype, check):
        prepared.check_stop = check_stop
        check()
        raise AssertionError("it went on")

    monkeypatch.setattr(ceilings, "measure", measure)
    with pytest.raises(Stopped):
        experiment.run(experiment.Params(), prepared)
    assert set(reported) == {0.0}


def test_refuses_what_would_take_long_and_groups_that_do_not_divide():
    params = get(NAME).Params
    params(n_heads=8, kv_len=1024, d_k=64)
    with pytest.raises(ParamsError, match=r"too_much_prefill.*'logits': 8388608, 'limit': 4194304, 'd_k': 128"):
        params(n_heads=8, kv_len=1024, d_k=128)
    with pytest.raises(ParamsError, match="too_much_prefill"):
        params(n_heads=16, kv_len=1024, d_k=8)
    with pytest.raises(ParamsError, match=r"groups_divide_heads.*'n_heads': 8"):
        params(n_heads=8, n_kv_heads=3)
