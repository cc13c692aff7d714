"""timing.py by a clock of its own, and on stand-ins for the events and counters of accelerators."""

import contextlib
import time
import types

import pytest
import torch

from engine import timing
from engine.base import Stopped
from engine.timing import DISPLACED_BYTES, displacer, least_times_s, peak_bytes, times_s, varied, wall_time_s

CPU = torch.device("cpu")
ACCELERATORS = ("cuda:1", "xpu:0", "mps")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved on."""

    class Clock:
        now = 100.0

        def moves(self, *seconds):
            left = list(seconds)
            return lambda: setattr(self, "now", self.now + left.pop(0))

    made = Clock()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_the_first_call_does_not_count_and_the_median_of_the_others_does(clock):
    work = clock.moves(1000, 3, 1, 20)
    assert wall_time_s(work, CPU, repeats=3) == 3


def test_what_comes_before_is_outside_the_time(clock):
    calls = []

    def before():
        calls.append("before")
        clock.now += 50

    def work():
        calls.append("work")
        clock.now += 2

    assert times_s(work, CPU, lambda: calls.append("check"), repeats=2, before=before) == [2, 2]
    assert calls == ["check", "before", "work"] * 3


def test_of_several_works_the_fastest_repeat_of_each_counts_and_none_is_at_a_stretch(clock):
    taken = {"a": [9, 3, 4, 9, 2, 8], "b": [9, 7, 7, 9, 6, 5]}  # seconds; the first of each round does not count
    order, fractions = [], []

    def work(name):
        def one():
            order.append(name)
            clock.now += taken[name].pop(0)

        return one

    found = least_times_s({name: work(name) for name in taken}, CPU, fractions.append, rounds=2, repeats=2)
    assert found == {"a": 2, "b": 5}
    assert order == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3
    assert sorted(set(fractions)) == [0, 0.25, 0.5, 0.75]
    assert fractions == sorted(fractions)


def test_what_displaces_writes_a_buffer_of_its_size(monkeypatch):
    wrote = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: wrote.append(empty(*shape, **options)) or wrote[-1])
    displace = displacer(CPU)
    wrote[0].fill_(1.0)
    displace()
    assert wrote[0].nbytes == DISPLACED_BYTES
    assert not wrote[0].any()


def test_numbers_vary_without_a_seed():
    numbers = varied(3, 5, device=CPU, dtype=torch.float64)
    assert numbers.shape == (3, 5)
    assert numbers.dtype == torch.float64
    assert len(numbers.unique()) == 15
    assert numbers.abs().max() <= 1
    assert varied(2, device=CPU).dtype == torch.float32


def test_a_stop_takes_effect_between_repeats():
    calls = []

    def check_stop():
        if len(calls) == 2:
            raise Stopped("stop")

    with pytest.raises(Stopped):
        wall_time_s(lambda: calls.append(1), CPU, check_stop, repeats=10)
    assert len(calls) == 2


def test_the_real_clock_counts_seconds():
    # sleep waits at least as long as asked; a busy machine adds to it, but not a thousandfold
    assert 0.01 <= wall_time_s(lambda: time.sleep(0.01), CPU) < 10


class Queue:
    """A device's queue as torch shows it: work passes there later than it is called, by a clock of its own."""

    def __init__(self):
        self.now_ms, self.entered, self.synchronized = 7.0, [], 0
        queue = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing
                self.at = None

            def record(self):
                self.at = queue.now_ms

            def synchronize(self):
                assert self.at is not None
                queue.synchronized += 1

            def elapsed_time(self, end):
                assert queue.synchronized  # before that the end has no time
                return end.at - self.at

        self.Event = Event

    @contextlib.contextmanager
    def device(self, device):
        self.entered.append(str(device))
        yield


@pytest.mark.parametrize("name", ACCELERATORS)
def test_an_accelerator_is_timed_by_its_own_events(monkeypatch, name):
    device, queue = torch.device(name), Queue()
    module = getattr(torch, device.type)
    monkeypatch.setattr(module, "Event", queue.Event)
    if device.type != "mps":
        monkeypatch.setattr(module, "device", queue.device)
    times_ms = iter([900, 4, 1, 2])

    def work():
        queue.now_ms += next(times_ms)

    assert wall_time_s(work, device, repeats=3) == pytest.approx(0.002, rel=1e-12)  # milliseconds became seconds
    assert queue.synchronized == 4
    assert queue.entered == ([] if name == "mps" else [name])  # events of another device's queue would time nothing


@pytest.mark.parametrize("name", ["cuda:1", "xpu:0"])
def test_the_highest_mark_of_a_device_is_read_after_its_queue_is_empty(monkeypatch, name):
    device, calls = torch.device(name), []
    module = getattr(torch, device.type)
    for call in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(module, call, lambda device, call=call: calls.append((call, str(device))))
    monkeypatch.setattr(module, "max_memory_allocated", lambda device: calls.append(("max", str(device))) or 12345)
    with peak_bytes(device) as peak:
        assert peak.bytes is None
        calls.append(("work", name))
    assert peak.bytes == 12345
    wanted = ("synchronize", "reset_peak_memory_stats", "work", "synchronize", "max")
    assert calls == [(call, name) for call in wanted]


@pytest.mark.parametrize("name", ["cpu", "mps"])
def test_a_device_that_keeps_no_mark_says_none(name):
    with peak_bytes(torch.device(name)) as peak:
        torch.ones(10)
    assert peak.bytes is None
