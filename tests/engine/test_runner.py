"""runner.py: the same numbers as the experiment by itself, and what happens when memory, time or patience run out."""

import concurrent.futures
import dataclasses
import gc
import logging
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import devices, registry, runner
from engine.base import BaseParams, Metric, ParamsError, Result, Stopped, choice, flag, number
from engine.runner import Jobs, OutOfMemory, ResultCache, RunSpec, Sweep, TooLarge, map_runs, run, sweep
from tests.harness import run as run_bare

ROOT = Path(runner.__file__).parents[1]

SMALL = {"d_k": 16, "n_pairs": 256}
PATIENCE_S = 30  # how long a test waits for a thread that should answer at once


@pytest.fixture(autouse=True)
def _empty_cache():
    runner.cache.clear()


@dataclasses.dataclass(frozen=True)
class Params(BaseParams):
    size: int = number(4, low=1, high=1000)
    rule: str = choice("sum", "mean")
    on: bool = flag(False)


ONE_METRIC = (Metric("value"),)


@pytest.fixture
def pretend(monkeypatch):
    """Let the registry know an experiment "pretended" whose run is given; returns the list of its calls."""

    def install(body=None, *, memory_bytes=lambda params: 1000, metrics=ONE_METRIC):
        calls = []

        def experiment_run(params, run):
            calls.append(params)
            if body is not None:
                return body(params, run)
            value = float(run.randn(params.size).double().sum())
            return Result({"value": value}, {"t": {"x": np.arange(params.size), "y": np.ones(params.size)}})

        found = registry.Experiment(
            "pretended", Params, metrics, (), 0.1, False, memory_bytes, experiment_run, registry.FOLDER
        )
        get = registry.get
        monkeypatch.setattr(registry, "get", lambda name: found if name == "pretended" else get(name))
        monkeypatch.setattr(runner, "code_hash", lambda name: f"hash of {name}")
        return calls

    return install


# --------------------------------------------------------------------------------------------------------------------
# One run


def test_a_run_gives_what_the_experiment_gives_by_itself():
    expected = run_bare(registry.get("qk_variance"), seed=5, **SMALL)
    measured = run("qk_variance", SMALL, seed=5)
    assert measured.metrics == expected.metrics
    assert np.array_equal(measured.tables["histogram"]["density"], expected.tables["histogram"]["density"])
    assert run("qk_variance", SMALL, seed=6).metrics != measured.metrics


def test_a_run_leaves_torchs_own_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    run("qk_variance", SMALL)
    assert torch.rand(1) == expected


def test_runs_use_one_torch_thread_in_every_thread():
    runner.settle_process.cache_clear()
    torch.set_num_threads(2)
    run("qk_variance", SMALL)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1


def test_what_a_large_run_held_goes_back_to_the_system():
    # 64 chunks of 4 MB arrays; without the allocator's settings the process keeps ten times the estimate
    code = (
        "import ctypes, os\n"
        "from engine import registry, runner\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "large = dict(d_k=1, kv_len=2048, q_len=512, batch=64)\n"
        "runner.run('aligned_keys', {})\n"
        "before = resident()\n"
        "runner.run('aligned_keys', large)\n"
        "aligned = registry.get('aligned_keys')\n"
        "print(resident() - before, aligned.memory_bytes(aligned.Params(**large)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept, estimate = map(int, done.stdout.split())
    assert kept < estimate


def test_bad_requests_say_what_is_wrong():
    with pytest.raises(registry.UnknownExperiment, match="did you mean qk_variance"):
        run("qk_varianc", {})
    with pytest.raises(ParamsError, match="did you mean d_k"):
        run("qk_variance", {"dk": 1})
    with pytest.raises(devices.UnknownDevice, match="this machine has"):
        run("qk_variance", SMALL, device="cuda:9")
    with pytest.raises(devices.UnsupportedDtype, match=r"float8.*cpu computes in float32"):
        run("qk_variance", SMALL, dtype="float8")


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1), ("bfloat16", 1), ("float64", 2)])
def test_what_does_not_fit_is_refused_before_it_starts(pretend, monkeypatch, dtype, factor):
    calls = pretend(memory_bytes=lambda params: 1000 * params.size)
    monkeypatch.setattr(devices, "free_bytes", lambda device: 10_000)
    limit = int(10_000 * runner.MEMORY_SHARE)
    fits = limit // (1000 * factor)
    run("pretended", {"size": fits}, dtype=dtype)
    with pytest.raises(TooLarge) as caught:
        run("pretended", {"size": fits + 1}, dtype=dtype)
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (1000 * (fits + 1) * factor, limit)
    assert caught.value.device == "cpu"
    assert [params.size for params in calls] == [fits]


def really_out_of_memory():
    return torch.empty(2**50)  # four petabytes: the allocator refuses without touching anything


def pretended_cuda():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def out_of_python_memory():
    raise MemoryError


@pytest.mark.parametrize("fail", [really_out_of_memory, pretended_cuda, out_of_python_memory])
def test_running_out_of_memory_is_a_message_and_frees_what_was_held(pretend, monkeypatch, fail):
    held, emptied = [], []
    monkeypatch.setattr(devices, "empty_pool", emptied.append)

    def body(params, run):
        tensor = run.randn(1000)
        held.append(weakref.ref(tensor))
        circle = [tensor]
        circle.append(circle)
        fail()

    pretend(body, memory_bytes=lambda params: 1234)
    gc.disable()  # what is freed must be freed by the runner
    try:
        with pytest.raises(OutOfMemory, match=r"cpu ran out of memory.*1,234 bytes") as caught:
            run("pretended", {})
        assert (caught.value.device, caught.value.needed_bytes) == ("cpu", 1234)
        assert held[0]() is None
        assert emptied == ["cpu"]
    finally:
        gc.enable()
    assert run("qk_variance", SMALL).done == 1  # the process lives on


def test_another_runtime_error_stays_what_it_is(pretend):
    def body(params, run):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    pretend(body)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run("pretended", {})


def test_progress_and_stop_reach_the_experiment(pretend):
    def body(params, run):
        for step in range(10):
            run.progress(step / 10, Result({"value": float(step)}, done=step / 10))
        return Result({"value": 10.0})

    pretend(body)
    seen = []

    def check_stop():
        if len(seen) == 3:
            raise Stopped("stop")

    with pytest.raises(Stopped):
        run(
            "pretended",
            {},
            on_progress=lambda fraction, partial: seen.append(partial.metrics["value"]),
            check_stop=check_stop,
        )
    assert seen == [0.0, 1.0, 2.0]


def test_a_stop_before_the_first_chunk_runs_nothing(pretend):
    calls = pretend()

    def check_stop():
        raise Stopped("stop")

    with pytest.raises(Stopped):
        run("pretended", {}, check_stop=check_stop)
    assert calls == []


@pytest.mark.parametrize(
    "error",
    [
        TooLarge(1, 2, "cpu"),
        OutOfMemory("cpu", 3),
        devices.UnknownDevice("x", ("cpu",)),
        devices.UnsupportedDtype("cpu", "x", ("float32",)),
    ],
)
def test_errors_survive_the_way_from_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


# --------------------------------------------------------------------------------------------------------------------
# Results that are already known


def test_a_known_result_is_not_computed_again(pretend):
    calls = pretend()
    first = run("pretended", {"size": 5})
    again = run("pretended", {"size": 5.0, "rule": "sum"})  # the same parameters, written otherwise
    assert len(calls) == 1
    assert again.metrics == first.metrics
    assert run("pretended", {"size": 5}, cached=False).metrics == first.metrics
    assert len(calls) == 2


def test_everything_that_a_result_depends_on_is_in_its_key(pretend, monkeypatch):
    calls = pretend()
    monkeypatch.setattr(
        devices, "available", lambda: (devices.Device("cpu", "cpu", "", 2**30, ("float32", "float64")),)
    )
    settings = [
        {"params": {"size": 5}},
        {"params": {"size": 6}},
        {"params": {"size": 5, "on": True}},
        {"params": {"size": 5}, "seed": 1},
        {"params": {"size": 5}, "dtype": "float64"},
    ]
    for setting in settings:
        run("pretended", **setting)
    assert len(calls) == len(settings)
    monkeypatch.setattr(runner, "code_hash", lambda name: "mended")
    run("pretended", **settings[0])
    assert len(calls) == len(settings) + 1


def test_a_partial_result_is_not_kept(pretend):
    calls = pretend(lambda params, run: Result({"value": 1.0}, done=0.5))
    assert run("pretended", {}).done == 0.5
    run("pretended", {})
    assert len(calls) == 2


def test_one_reader_can_not_spoil_the_result_of_another(pretend):
    pretend()
    first = run("pretended", {})
    first.metrics["value"] = 0.0
    first.tables.clear()
    second = run("pretended", {})
    assert second.metrics["value"] != 0.0
    for result in (second, run("pretended", {}, cached=False)):
        with pytest.raises(ValueError, match="read-only"):
            result.tables["t"]["y"][0] = 7


def table_of(n_bytes: int) -> Result:
    return Result({}, {"t": {"x": np.zeros(n_bytes, np.uint8)}})


def test_the_cache_drops_the_least_recently_used_and_counts_what_it_holds():
    cache = ResultCache(limit_bytes=10_000)
    for key in "abc":
        cache.put((key,), table_of(2500))
    assert cache.get(("a",)) is not None  # a is now fresher than b
    cache.put(("d",), table_of(2500))
    assert [key for key in "abcd" if cache.get((key,))] == ["a", "c", "d"]
    assert 7500 <= cache.nbytes <= 10_000
    cache.put(("big",), table_of(20_000))
    assert cache.get(("big",)) is None
    assert cache.get(("a",)) is not None
    cache.put(("a",), table_of(100))  # replaced, not added
    assert cache.nbytes < 7500
    cache.clear()
    assert cache.nbytes == 0


def test_the_cache_keeps_no_large_array_alive_behind_a_view():
    base = np.zeros((1000, 1000))
    gone = weakref.ref(base)
    cache = ResultCache()
    cache.put(("k",), Result({}, {"t": {"x": base[:3, 0]}}))
    del base
    assert gone() is None
    assert cache.nbytes < 2000


def test_the_cache_under_many_threads():
    cache = ResultCache(limit_bytes=20_000)

    def work(n):
        for i in range(200):
            cache.put((n, i % 7), table_of(1000))
            found = cache.get((n, i % 7))
            assert found is None or len(found.tables["t"]["x"]) == 1000

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert cache.nbytes <= 20_000
    assert cache.nbytes == sum(size for _, size in cache._kept.values())


# --------------------------------------------------------------------------------------------------------------------
# Many runs


def specs(n):
    return [RunSpec("qk_variance", SMALL, seed) for seed in range(n)]


def spawned():
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


EXECUTORS = {"here": lambda: None, "threads": lambda: concurrent.futures.ThreadPoolExecutor(3), "processes": spawned}


@pytest.mark.parametrize("make", EXECUTORS.values(), ids=EXECUTORS)
def test_a_map_gives_the_same_results_wherever_it_runs(make):
    expected = [run_bare(registry.get("qk_variance"), seed=seed, **SMALL).metrics for seed in range(4)]
    executor = make()
    try:
        fractions = []
        results = map_runs(
            specs(4), executor=executor, on_progress=lambda fraction, partial: fractions.append(fraction)
        )
        assert [result.metrics for result in results] == expected
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1
        # what another process computed is known here from now on
        assert run("qk_variance", SMALL, seed=2).metrics == expected[2]
        assert len(runner.cache._kept) == 4
    finally:
        if executor:
            executor.shutdown()


def test_a_map_checks_all_before_it_runs_one(pretend):
    calls = pretend()
    with pytest.raises(ParamsError):
        map_runs([RunSpec("pretended", {"size": 1}, 0), RunSpec("pretended", {"size": 0}, 0)])
    assert calls == []


def test_a_map_is_refused_as_a_whole_when_one_run_does_not_fit(pretend):
    calls = pretend(memory_bytes=lambda params: 2**60 if params.size == 2 else 1)
    with pytest.raises(TooLarge):
        map_runs([RunSpec("pretended", {"size": size}, 0) for size in (1, 2, 3)])
    assert calls == []


def test_measured_times_are_measured_anew_for_everyone(pretend):
    taken = iter(range(100))

    def body(params, run):
        return Result({"value": 1.0, "time_s": float(next(taken))})

    pretend(body, metrics=(Metric("value"), Metric("time_s", "s", measured=True)))
    assert [run("pretended", {}).metrics["time_s"] for _ in range(3)] == [0, 1, 2]
    assert run("pretended", {}, cached=True).metrics["time_s"] == 2  # unless the known one is asked for
    assert run("pretended", {}, cached=False).metrics["time_s"] == 3
    swept = sweep("pretended", {}, "size", (1, 2), (0, 1))
    assert swept.metrics["time_s"].tolist() == [[4, 5], [6, 7]]


def test_measured_times_are_taken_here_and_one_by_one(pretend):
    pretend(
        lambda params, run: Result({"time_s": float(threading.get_ident())}),
        metrics=(Metric("time_s", "s", measured=True),),
    )
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = map_runs([RunSpec("pretended", {"size": n}, 0) for n in (1, 2, 3)], executor=pool)
    assert {result.metrics["time_s"] for result in results} == {float(threading.get_ident())}


class Elsewhere(concurrent.futures.Executor):
    """An executor that could be in another process as far as the runner can see."""

    def __init__(self, workers):
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)

    def submit(self, call, /, *args, **kwargs):
        return self._pool.submit(call, *args, **kwargs)

    def shutdown(self, wait=True, *, cancel_futures=False):
        self._pool.shutdown(wait)


@pytest.mark.parametrize(
    ("make", "workers", "ends"),
    [
        (Elsewhere, 1, ["whole"]),  # what has begun ends by itself, the rest is cancelled
        (concurrent.futures.ThreadPoolExecutor, 3, ["stopped"] * 3),  # what has begun meets the stop at its next chunk
    ],
)
def test_a_stopped_map_waits_for_nobody(pretend, make, workers, ends):
    begun, go, seen = threading.Barrier(workers + 1), threading.Event(), []

    def body(params, run):
        begun.wait(PATIENCE_S)
        assert go.wait(PATIENCE_S)
        try:
            run.progress(0.5)
        except Stopped:
            seen.append("stopped")
            raise
        seen.append("whole")
        return Result({"value": 1.0})

    calls = pretend(body)
    stopped = threading.Event()

    def check_stop():
        if threading.current_thread() is threading.main_thread() and not stopped.is_set():
            begun.wait(PATIENCE_S)
            stopped.set()
        if stopped.is_set():
            raise Stopped("stop")

    with make(workers) as pool:
        with pytest.raises(Stopped):
            map_runs([RunSpec("pretended", {"size": n}, 0) for n in range(1, 9)], executor=pool, check_stop=check_stop)
        assert seen == []
        go.set()
    assert seen == ends
    assert len(calls) == workers


@pytest.mark.parametrize(
    "make", [lambda: None, lambda: concurrent.futures.ThreadPoolExecutor(2)], ids=["here", "threads"]
)
def test_an_error_in_a_map_comes_out(pretend, make):
    def body(params, run):
        if params.size == 2:
            raise ZeroDivisionError("in the second")
        return Result({"value": 1.0})

    pretend(body)
    executor = make()
    with pytest.raises(ZeroDivisionError, match="in the second"):
        map_runs([RunSpec("pretended", {"size": n}, 0) for n in (1, 2, 3)], executor=executor)
    if executor:
        executor.shutdown()


def test_a_sweep_is_its_single_runs():
    values, seeds = (16, 64, 256), (3, 1)
    swept = sweep("qk_variance", {"n_pairs": 256}, "d_k", values, seeds)
    assert (swept.over, swept.values, swept.seeds) == ("d_k", values, seeds)
    assert set(swept.metrics) == set(registry.get("qk_variance").metric_names)
    for row, d_k in enumerate(values):
        for column, seed in enumerate(seeds):
            expected = run_bare(registry.get("qk_variance"), seed=seed, d_k=d_k, n_pairs=256).metrics
            assert {name: array[row, column] for name, array in swept.metrics.items()} == expected


def test_the_table_of_a_sweep_is_a_mean_within_a_band():
    made = Sweep("size", (1, 2), (0, 1, 2), {"value": np.array([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]])})
    table = made.table("value")
    assert {name: column.tolist() for name, column in table.items()} == {
        "size": [1, 2],
        "mean": [3.0, 4.0],
        "low": [1.0, 4.0],
        "high": [6.0, 4.0],
    }


@pytest.mark.parametrize(
    ("over", "values", "column"), [("rule", ("sum", "mean"), ["sum", "mean"]), ("on", (False, True), [0, 1])]
)
def test_a_sweep_over_names_and_switches(pretend, over, values, column):
    pretend()
    table = sweep("pretended", {}, over, values, (0,)).table("value")
    assert table[over].tolist() == column
    assert table[over].dtype.kind in "iU"


def test_the_partial_sweep_holds_whole_rows_only(pretend):
    pretend(lambda params, run: Result({"value": float(params.size)}))
    partials = []
    sweep(
        "pretended",
        {},
        "size",
        (7, 8),
        (0, 1),
        on_progress=lambda fraction, partial: partials.append((fraction, partial)),
    )
    assert [fraction for fraction, _ in partials] == [0.25, 0.5, 0.75, 1.0]
    assert [partial.values for _, partial in partials] == [(), (7,), (7,), (7, 8)]
    assert [partial.metrics["value"].shape for _, partial in partials] == [(0, 2), (1, 2), (1, 2), (2, 2)]


# --------------------------------------------------------------------------------------------------------------------
# Jobs


class Gate:
    """Work that reports when it has begun, goes on chunk by chunk, and ends when it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, handle):
        self.begun.set()
        while not self.go.wait(0.002):
            handle.progress(0.5, "half")
        return "whole"


@pytest.fixture
def jobs():
    made = Jobs()
    yield made
    for job in (*made._running, *made._waiting):
        job.stop()
    for job in tuple(made._running):
        assert job.wait(PATIENCE_S)


def start(jobs, reader, **options):
    gate = Gate()
    return gate, jobs.submit(reader, gate, **options)


def test_a_job_runs_reports_and_ends(jobs):
    gate, job = start(jobs, "ann")
    assert gate.begun.wait(PATIENCE_S)
    assert (job.state, job.place) == ("running", 0)
    gate.go.set()
    assert job.wait(PATIENCE_S)
    assert (job.state, job.result, job.fraction, job.reason, job.error) == ("done", "whole", 1.0, "", None)
    assert jobs.of("ann") is job
    assert jobs.of("bob") is None


def test_jobs_of_a_device_run_one_at_a_time_in_the_order_of_arrival(jobs):
    gates, line = zip(*(start(jobs, reader) for reader in ("ann", "bob", "cid", "dan")), strict=True)
    for turn in range(4):
        assert gates[turn].begun.wait(PATIENCE_S)
        assert [job.place for job in line] == [max(0, n - turn) for n in range(4)]
        assert [job.state for job in line] == ["done"] * turn + ["running"] + ["waiting"] * (3 - turn)
        gates[turn].go.set()
        assert line[turn].wait(PATIENCE_S)


def test_another_device_has_a_line_of_its_own(jobs):
    start(jobs, "ann")
    other, job = start(jobs, "bob", device="cuda:0")
    assert other.begun.wait(PATIENCE_S)
    _, waiting = start(jobs, "cid", device="cuda:0")
    assert (job.place, waiting.place) == (0, 1)


def test_more_slots_run_more_at_once():
    jobs = Jobs(slots=2)
    gates, line = zip(*(start(jobs, reader) for reader in ("ann", "bob", "cid")), strict=True)
    assert gates[0].begun.wait(PATIENCE_S)
    assert gates[1].begun.wait(PATIENCE_S)
    assert [job.state for job in line] == ["running", "running", "waiting"]
    for gate, job in zip(gates, line, strict=True):
        gate.go.set()
        assert job.wait(PATIENCE_S)


def test_stop_ends_a_running_job_at_its_next_chunk_and_keeps_what_is_known(jobs):
    chunks = []
    reported, resume = threading.Event(), threading.Event()

    def work(handle):
        for chunk in range(5):
            chunks.append(chunk)
            handle.progress(chunk / 5, f"after {chunk}")
            if chunk == 1:
                reported.set()
                assert resume.wait(PATIENCE_S)

    job = jobs.submit("ann", work)
    assert reported.wait(PATIENCE_S)
    job.stop()
    resume.set()
    assert job.wait(PATIENCE_S)
    assert (job.state, job.reason, job.error) == ("stopped", "stop", None)
    assert chunks == [0, 1, 2]  # the chunk after the stop is the last
    assert job.partial == "after 2"


def test_stop_reaches_a_waiting_job_which_then_never_runs(jobs):
    first, running = start(jobs, "ann")
    gate, waiting = start(jobs, "bob")
    third, last = start(jobs, "cid")
    waiting.stop()
    assert waiting.wait(0)
    assert (waiting.state, waiting.reason, waiting.seconds) == ("stopped", "stop", 0.0)
    assert last.place == 1
    first.go.set()
    assert third.begun.wait(PATIENCE_S)
    assert not gate.begun.is_set()
    waiting.stop()  # once more changes nothing
    running.stop()
    assert (waiting.state, running.state, running.reason) == ("stopped", "done", "")


def test_a_newer_job_replaces_the_running_one_of_the_same_reader(jobs):
    first, old = start(jobs, "ann")
    assert first.begun.wait(PATIENCE_S)
    second, new = start(jobs, "ann")
    assert second.begun.wait(PATIENCE_S)
    assert (old.state, old.reason) == ("stopped", "replaced")
    assert old.partial == "half"
    assert jobs.of("ann") is new


def test_a_newer_job_takes_over_the_place_of_a_waiting_one(jobs):
    start(jobs, "ann")
    gate, old = start(jobs, "bob")
    _, behind = start(jobs, "cid")
    _, new = start(jobs, "bob")
    assert (old.state, old.reason) == ("stopped", "replaced")
    assert (new.place, behind.place) == (1, 2)  # moving a slider does not send a reader back in the line
    assert not gate.begun.is_set()


def start_one_that_is_slow_to_stop(jobs, reader):
    """A running job that notices its stop only once the event is set."""
    hold, began = threading.Event(), threading.Event()

    def work(handle):
        began.set()
        assert hold.wait(PATIENCE_S)
        handle.check_stop()

    job = jobs.submit(reader, work)
    assert began.wait(PATIENCE_S)
    return job, hold


def test_the_latest_job_of_a_reader_is_the_one_submitted_last_whichever_ends_last(jobs):
    old, hold = start_one_that_is_slow_to_stop(jobs, "ann")
    new = jobs.submit("ann", lambda handle: 1)
    new.stop()
    hold.set()
    assert old.wait(PATIENCE_S)
    assert jobs.of("ann") is new


def test_a_reader_never_has_two_jobs_running_even_on_two_devices(jobs):
    old, hold = start_one_that_is_slow_to_stop(jobs, "ann")
    gate, new = start(jobs, "ann", device="cuda:0")
    assert (old.state, new.state) == ("running", "waiting")
    hold.set()
    assert gate.begun.wait(PATIENCE_S)
    assert (old.state, old.reason) == ("stopped", "replaced")


def test_at_the_deadline_a_job_stops_with_what_it_has():
    now = [100.0]
    jobs = Jobs(clock=lambda: now[0])
    blocker, _ = start(jobs, "bob")
    seconds = []

    def work(handle):
        for step in range(10):
            handle.progress(step / 10, step)
            seconds.append(job.seconds)
            now[0] += 1.0

    job = jobs.submit("ann", work, deadline_s=3.5)
    now[0] += 50.0  # waiting does not count
    blocker.go.set()
    assert job.wait(PATIENCE_S)
    assert (job.state, job.reason, job.partial) == ("stopped", "deadline", 4)
    assert seconds == [0.0, 1.0, 2.0, 3.0]
    assert job.seconds == 4.0
    now[0] += 9.0
    assert job.seconds == 4.0


def test_progress_without_a_partial_keeps_the_last_one(jobs):
    def work(handle):
        handle.progress(0.1, "first")
        handle.progress(0.9)

    job = jobs.submit("ann", work)
    assert job.wait(PATIENCE_S)
    assert job.partial == "first"


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), SystemExit(3), TooLarge(2, 1, "cpu")])
def test_a_crash_is_kept_and_logged_and_the_next_job_runs(jobs, caplog, error):
    held = []

    def work(handle):
        tensor = torch.zeros(10)
        held.append(weakref.ref(tensor))
        raise error

    with caplog.at_level(logging.ERROR, logger="engine.runner"):
        job = jobs.submit("ann", work)
        assert job.wait(PATIENCE_S)
    assert (job.state, job.error, job.result) == ("failed", error, None)
    assert type(error).__name__ in caplog.text
    assert "in work" in caplog.text  # with the place where it happened
    assert held[0]() is None  # the error is kept, the tensor of its frame is not
    gate, following = start(jobs, "ann")
    gate.go.set()
    assert following.wait(PATIENCE_S)
    assert following.state == "done"


def test_a_job_that_runs_out_of_memory_says_so(jobs):
    job = jobs.submit("ann", lambda handle: really_out_of_memory())
    assert job.wait(PATIENCE_S)
    assert isinstance(job.error, OutOfMemory)
    assert str(job.error) == "cpu ran out of memory"


def test_a_thread_that_can_not_start_fails_its_job_only(jobs, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        job = jobs.submit("ann", lambda handle: 1)
    assert job.wait(0)
    assert (job.state, str(job.error)) == ("failed", "can't start new thread")
    assert jobs.submit("ann", lambda handle: 2).wait(PATIENCE_S)


def test_jobs_run_in_daemon_threads_and_let_go_of_their_work(jobs):
    def work(handle):
        return threading.current_thread().daemon

    gone = weakref.ref(work)
    job = jobs.submit("ann", work)
    del work
    assert job.wait(PATIENCE_S)
    assert job.result is True
    for thread in threading.enumerate():
        if thread.name == f"job-{job.id}":
            thread.join(PATIENCE_S)
    assert gone() is None


def test_finished_jobs_are_forgotten_in_the_end():
    jobs = Jobs(keep=3)
    for n in range(10):
        for job in (jobs.submit(f"reader {n}", lambda handle: 1), jobs.submit("busy", lambda handle: 2)):
            assert job.wait(PATIENCE_S)
    assert [n for n in range(10) if jobs.of(f"reader {n}")] == [8, 9]
    assert jobs.of("busy") is not None  # a reader with many jobs pushes nobody else out
    assert len(jobs._ended) == 3


def test_the_stop_of_a_job_reaches_a_real_experiment_within_a_chunk(jobs):
    began = threading.Event()

    def work(handle):
        def on_progress(fraction, partial):
            began.set()
            handle.progress(fraction, partial)

        return run(
            "qk_variance", {"d_k": 4096, "n_pairs": 131072}, on_progress=on_progress, check_stop=handle.check_stop
        )

    job = jobs.submit("ann", work)
    assert began.wait(PATIENCE_S)
    pressed = time.monotonic()
    job.stop()
    assert job.wait(PATIENCE_S)
    assert (job.state, job.reason) == ("stopped", "stop")
    assert job.fraction < 0.5  # the whole run takes some ten seconds; how long one chunk takes here is for the bench
    assert time.monotonic() - pressed < PATIENCE_S


def test_a_job_that_nobody_waits_for_any_more_ends_at_its_next_chunk_and_keeps_what_it_had(jobs):
    there = threading.Event()
    there.set()
    began, left = threading.Event(), threading.Event()

    def work(handle):
        handle.progress(0.5, "so far")
        began.set()
        assert left.wait(PATIENCE_S)
        handle.progress(0.6)

    job = jobs.submit("ann", work, wanted=there.is_set)
    assert began.wait(PATIENCE_S)
    there.clear()
    left.set()
    assert job.wait(PATIENCE_S)
    assert (job.state, job.reason, job.partial) == ("stopped", "abandoned", "so far")
