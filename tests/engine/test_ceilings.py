"""ceilings.py on the real CPU, on pretended clocks, and with several readers at once."""

import threading

import pytest
import torch

from engine import ceilings
from engine.base import Stopped
from engine.ceilings import (
    COPY_BYTES,
    MEMORY_BYTES,
    Ceilings,
    least_s,
    ridge_flop_per_byte,
    roofline_flop_per_s,
    under_roofline,
)

CPU = torch.device("cpu")
PATIENCE_S = 30
MADE = Ceilings(
    "cpu", "float32", copy_bytes_per_s=10.0, matmul_flop_per_s=80.0, copy_bytes=1, matmul_size=1, torch="", threads=1
)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(ceilings, "_known", {})


@pytest.mark.parametrize(("intensity", "rate"), [(0.5, 5.0), (4, 40.0), (8, 80.0), (9, 80.0), (1000, 80.0)])
def test_the_roofline_is_the_lower_of_both_bounds(intensity, rate):
    assert roofline_flop_per_s(intensity, MADE) == rate


def test_at_the_ridge_both_bounds_meet():
    ridge = ridge_flop_per_byte(MADE)
    assert ridge == 8
    assert roofline_flop_per_s(ridge * (1 - 1e-9), MADE) < MADE.matmul_flop_per_s
    assert ridge * MADE.copy_bytes_per_s == MADE.matmul_flop_per_s


@pytest.mark.parametrize(("flop", "moved"), [(160.0, 10.0), (80.0, 40.0), (80.0, 10.0)])
def test_the_least_time_is_that_of_the_rate_under_the_roofline(flop, moved):
    assert least_s(flop, moved, MADE) == flop / roofline_flop_per_s(flop / moved, MADE)


@pytest.mark.parametrize("intensities", [(0.5, 100.0), (9.0, 20.0), (1.0, 2.0)])
def test_the_roofline_is_drawn_with_its_corner_and_beyond_all_points(intensities):
    points = [(name, x, 7.0) for name, x in zip("ab", intensities, strict=True)]
    table = under_roofline("way", points, MADE, x="intensity")
    drawn = table["intensity"][table["way"] == "roofline"]
    assert 8.0 in drawn
    assert min(drawn) < min(intensities)
    assert max(drawn) > max(intensities)
    law = [roofline_flop_per_s(x, MADE) for x in table["intensity"]]
    assert list(table["roofline_flop_per_s"]) == law
    assert list(table["flop_per_s"]) == [7.0, 7.0, *law[2:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cpu_is_measured(dtype):
    made = ceilings.measure(CPU, dtype)
    assert (made.device, made.dtype) == ("cpu", str(dtype).removeprefix("torch."))
    assert (made.copy_bytes, made.threads, made.torch) == (COPY_BYTES, torch.get_num_threads(), str(torch.__version__))
    # any machine that runs this copies between 0.1 GB/s and 1 TB/s and multiplies between 0.1 and 10,000 GFLOP/s
    assert 1e8 < made.copy_bytes_per_s < 1e12
    assert 1e8 < made.matmul_flop_per_s < 1e13


class Bench:
    """Stands in for the clock: a call takes as long as its sizes say."""

    def __init__(self, monkeypatch, *, flop_per_s=None, bytes_per_s=2e9):
        self.sizes, self.copied = [], []
        self.flop_per_s = flop_per_s or (lambda size: 1e9)

        def best_s(work, device, check_stop):
            check_stop()
            if work.func is torch.mm:
                size = len(work.args[0])
                assert 3 * work.args[0].nbytes <= MEMORY_BYTES
                self.sizes.append(size)
                return 2 * size**3 / self.flop_per_s(size)
            self.copied.append(work.args[0].nbytes)
            return 2 * work.args[0].nbytes / bytes_per_s

        monkeypatch.setattr(ceilings, "_best_s", best_s)


def test_sizes_double_until_a_product_would_take_long(monkeypatch):
    bench = Bench(monkeypatch, flop_per_s=lambda size: {256: 1e11, 512: 3e11, 1024: 2e11}[size])
    made = ceilings.measure(CPU, torch.float32)
    # 1024 takes 11 ms at that rate, so 2048 would take more than 80
    assert bench.sizes == [256, 512, 1024]
    assert (made.matmul_flop_per_s, made.matmul_size) == (pytest.approx(3e11, rel=1e-12), 512)  # the best, not the last
    assert bench.copied == [COPY_BYTES]
    assert made.copy_bytes_per_s == pytest.approx(2e9, rel=1e-12)  # read and written


@pytest.mark.parametrize(("dtype", "last"), [(torch.float32, 2048), (torch.float64, 2048), (torch.bfloat16, 4096)])
def test_a_fast_device_is_bounded_by_memory(monkeypatch, dtype, last):
    bench = Bench(monkeypatch, flop_per_s=lambda size: 1e15)
    assert ceilings.measure(CPU, dtype).matmul_size == 256  # all alike: the first of them
    assert bench.sizes[-1] == last


def test_a_slow_device_is_measured_once_at_the_least(monkeypatch):
    bench = Bench(monkeypatch, flop_per_s=lambda size: 1e6)
    assert ceilings.measure(CPU, torch.float32).matmul_flop_per_s == pytest.approx(1e6, rel=1e-12)
    assert bench.sizes == [256]


def test_an_accelerator_takes_its_own_best_time(monkeypatch):
    asked = []
    monkeypatch.setattr(
        ceilings, "times_s", lambda *call, repeats: asked.append((call[1:], repeats)) or [3.0, 1.0, 2.0]
    )
    check = object()
    assert ceilings._best_s(lambda: None, torch.device("cuda:0"), check) == 1
    assert asked == [((torch.device("cuda:0"), check), ceilings.TRIES)]


def test_measured_once_a_process_for_each_device_and_dtype(monkeypatch):
    calls = []
    monkeypatch.setattr(
        ceilings, "measure", lambda device, dtype, check_stop: calls.append((device, dtype)) or object()
    )
    first = ceilings.known_ceilings(CPU, torch.float32)
    assert ceilings.known_ceilings(torch.device("cpu"), torch.float32) is first
    assert ceilings.known_ceilings(CPU, torch.float64) is not first
    assert calls == [(CPU, torch.float32), (CPU, torch.float64)]


def test_two_readers_measure_one_after_the_other_and_once(monkeypatch):
    begun, go, calls = threading.Event(), threading.Event(), []

    def measure(device, dtype, check_stop):
        calls.append(threading.current_thread().name)
        begun.set()
        assert go.wait(PATIENCE_S)
        return MADE

    monkeypatch.setattr(ceilings, "measure", measure)
    waiting, found = threading.Event(), []

    def ask(check_stop=lambda: None):
        found.append(ceilings.known_ceilings(CPU, torch.float32, check_stop))

    first = threading.Thread(target=ask)
    first.start()
    assert begun.wait(PATIENCE_S)
    second = threading.Thread(target=ask, args=(waiting.set,))
    second.start()
    assert waiting.wait(PATIENCE_S)  # it asks whether to stop while the other one measures

    def stop():
        raise Stopped("stop")

    with pytest.raises(Stopped):  # and a third one leaves at once
        ceilings.known_ceilings(CPU, torch.float32, stop)
    go.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert found == [MADE, MADE]
    assert len(calls) == 1


def test_a_stop_in_the_middle_leaves_nothing_half_known():
    asked = []

    def stop_at_the_third():
        asked.append(1)
        if len(asked) == 3:
            raise Stopped("stop")

    with pytest.raises(Stopped):
        ceilings.known_ceilings(CPU, torch.float32, stop_at_the_third)
    assert ceilings._known == {}
    assert ceilings.known_ceilings(CPU, torch.float32).matmul_flop_per_s > 0  # the lock is free again
