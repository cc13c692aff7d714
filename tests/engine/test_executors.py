"""executors.py with real processes: spawned ones, and a real Dask scheduler with real workers on this machine."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import distributed
import pytest

from engine import executors, registry, runner
from engine.base import ParamsError, Problem, Stopped
from engine.executors import ADDRESS, ClusterUnavailable, OtherCode, WorkersLost, executor
from engine.runner import RunSpec, map_runs, run, sweep

ROOT = Path(runner.__file__).parents[1]
PATIENCE_S = 60  # for what takes a second on an idle machine
SMALL = {"d_k": 16, "n_pairs": 256}
LONG = {"d_k": 256, "n_pairs": 32768}  # long enough to be met in the middle of it


@pytest.fixture(autouse=True)
def _empty_cache():
    runner.cache.clear()


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def specs(n: int, params: dict[str, int], first_seed: int = 0) -> list[RunSpec]:
    return [RunSpec("qk_variance", params, first_seed + seed) for seed in range(n)]


def metrics(results) -> list[dict[str, float]]:
    return [result.metrics for result in results]


def plain_loop(asked: list[RunSpec]) -> list[dict[str, float]]:
    """What the runs give one after the other in this process, none of them taken from or left in the cache."""
    runner.cache.clear()
    expected = metrics(map_runs(asked))
    runner.cache.clear()
    return expected


# --------------------------------------------------------------------------------------------------------------------
# Which executor


@pytest.mark.parametrize(
    ("cores", "kind", "made"),
    [
        (1, None, None),
        (2, None, None),
        (2, "threads", None),
        (2, "processes", None),
        (8, None, concurrent.futures.ThreadPoolExecutor),
        (8, "threads", concurrent.futures.ThreadPoolExecutor),
        (8, "processes", concurrent.futures.ProcessPoolExecutor),
    ],
)
def test_what_is_made_without_a_cluster(monkeypatch, cores, kind, made):
    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setattr(executors, "cores", lambda: cores)
    with executor(kind) as pool:
        assert type(pool) is (made or type(None))
        if made:
            assert pool._max_workers == (7 if kind == "processes" else 4)
    if made:
        with pytest.raises(RuntimeError, match="shutdown"):
            pool.submit(int)


def test_an_unknown_kind_is_told_which_there_are(monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 8)
    with pytest.raises(ValueError, match="'threadz', wanted threads, processes or cluster"), executor("threadz"):
        pass


def test_the_cores_are_those_of_this_process():
    assert 1 <= executors.cores() <= os.cpu_count()


@pytest.mark.parametrize(
    "error",
    [
        ClusterUnavailable("tcp://a:1", "no answer"),
        OtherCode("host", "that", "this"),
        WorkersLost("gone"),
        ParamsError([Problem("range", "d_k", 0, 1, 4)]),
        registry.UnknownExperiment("qk_varianc"),
        runner.TooLarge(2, 1, "cpu"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_process_borders(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


# --------------------------------------------------------------------------------------------------------------------
# Processes


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(executors, "cores", lambda: 3)
    with executor("processes") as pool:
        yield pool


def torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def test_processes_give_what_the_plain_loop_gives(processes):
    asked = specs(5, SMALL)
    assert metrics(map_runs(asked, executor=processes)) == plain_loop(asked)
    assert processes.submit(torch_threads).result(PATIENCE_S) == 1


def test_a_process_that_dies_is_told_and_what_came_back_is_kept(processes):
    asked = specs(8, LONG)

    def kill(fraction, partial):
        if partial:
            for pid in list(processes._processes or ()):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(WorkersLost, match=r"a worker process ended during a run.*run it again for the others"):
        map_runs(asked, executor=processes, on_progress=kill)
    assert 1 <= len(runner.cache._kept) < 8


def test_processes_of_other_code_are_refused(processes, monkeypatch):
    monkeypatch.setattr(runner, "code_hash", lambda name: "another")
    with pytest.raises(OtherCode, match=r"got qk_variance [0-9a-f]{16} with torch .*; wanted qk_variance another"):
        map_runs(specs(2, SMALL), executor=processes)


class Watched(concurrent.futures.ThreadPoolExecutor):
    """Threads that remember how many calls they had at once, begun or not."""

    def __init__(self, wanted: int) -> None:
        super().__init__(4)
        self.open = self.most = 0
        self.wanted, self.reached = wanted, threading.Event()
        self._counting = threading.Lock()

    def submit(self, call, /, *args, **kwargs):
        self._count(1)
        future = super().submit(call, *args, **kwargs)
        future.add_done_callback(lambda done: self._count(-1))
        return future

    def _count(self, change: int) -> None:
        with self._counting:
            self.open += change
            self.most = max(self.most, self.open)
            if self.most >= self.wanted:
                self.reached.set()


@pytest.mark.parametrize(("share", "most"), [(1.5, 1), (2.5, 2), (100, 6)])
def test_what_runs_side_by_side_here_must_fit_together(monkeypatch, share, most):
    asked = specs(6, SMALL)
    needed = runner._Checked.of(asked[0]).needed_bytes
    monkeypatch.setattr(runner.devices, "free_bytes", lambda device: int(share * needed / runner.MEMORY_SHARE))
    expected, run_spec = plain_loop(asked), runner.run_spec
    with Watched(most) as pool:
        # nothing is done before as many are handed out as may be
        monkeypatch.setattr(runner, "run_spec", lambda *given: pool.reached.wait(PATIENCE_S) and run_spec(*given))
        assert metrics(map_runs(asked, executor=pool)) == expected
    assert pool.most == most


# --------------------------------------------------------------------------------------------------------------------
# A cluster


class Cluster:
    """A scheduler and workers as processes of this machine, each started in a checkout."""

    def __init__(self, folder: Path, checkout: Path = ROOT) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        contact = folder / "scheduler.json"
        self.scheduler = self._start(checkout, "scheduler", "--host", "127.0.0.1", "--scheduler-file", str(contact))
        wait_until(lambda: contact.exists() and contact.read_text().endswith("}"))
        self.address: str = json.loads(contact.read_text())["address"]

    def start_worker(self, name: str, checkout: Path = ROOT) -> subprocess.Popen[bytes]:
        options = ("--name", name, "--nthreads", "1", "--no-nanny", "--local-directory", str(self.folder))
        return self._start(checkout, "worker", self.address, "--host", "127.0.0.1", *options)

    def _start(self, checkout: Path, what: str, *options: str) -> subprocess.Popen[bytes]:
        ports = ("--port", "0") if what == "scheduler" else ()
        log = (self.folder / f"{what}-{len(self.processes)}.log").open("wb")
        command = [sys.executable, "-m", "dask", what, *options, *ports, "--no-dashboard"]
        environment = {**os.environ, "PYTHONPATH": "", "PYTHONWARNINGS": "default"}
        with log:
            process = subprocess.Popen(
                command, cwd=checkout, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in reversed(self.processes):  # the scheduler last
            process.kill()
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A cluster with two workers that no test harms."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start_worker("one")
        made.start_worker("two")
        with client(made) as asking:
            asking.wait_for_workers(2, timeout=PATIENCE_S)
        yield made
    finally:
        made.end()


@pytest.fixture
def own_cluster(tmp_path) -> Iterator[Cluster]:
    """A cluster for one test, without workers yet."""
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.end()


def client(cluster: Cluster) -> distributed.Client:
    return distributed.Client(cluster.address, timeout=PATIENCE_S, set_as_default=False)


@pytest.fixture
def at(monkeypatch):
    """Set the address in the environment, as who hosts the app does."""
    monkeypatch.setattr(executors, "ANSWER_S", PATIENCE_S)
    return lambda cluster: monkeypatch.setenv(ADDRESS, cluster.address)


def test_a_cluster_gives_what_the_plain_loop_gives_in_order(cluster, at):
    at(cluster)
    asked = [
        *specs(4, SMALL),
        RunSpec("softmax_saturation", {"d_k": 16, "kv_len": 32}, 3),
        RunSpec("qk_variance", SMALL, 1, dtype="float64"),
    ]
    fractions = []
    with executor() as pool:
        results = map_runs(asked, executor=pool, on_progress=lambda fraction, partial: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    kept = [run(s.experiment, s.params, seed=s.seed, dtype=s.dtype, check_stop=_refuse) for s in asked]
    assert metrics(kept) == metrics(results)  # known here from now on: no run is begun
    assert metrics(results) == plain_loop(asked)


def _refuse() -> None:
    raise AssertionError("this was to come from the cache")


def test_a_sweep_on_a_cluster_is_the_sweep_here(cluster, at):
    at(cluster)
    with executor() as pool:
        far = sweep("qk_variance", {"n_pairs": 256}, "d_k", (16, 64), (5, 6), executor=pool)
    runner.cache.clear()
    near = sweep("qk_variance", {"n_pairs": 256}, "d_k", (16, 64), (5, 6))
    assert far.values == near.values == (16, 64)
    assert {name: rows.tolist() for name, rows in far.metrics.items()} == {
        name: rows.tolist() for name, rows in near.metrics.items()
    }


def test_an_error_in_a_worker_is_the_error_of_the_run(cluster, at, monkeypatch):
    at(cluster)
    monkeypatch.setattr(runner, "_surviving", _refuse)  # nothing runs here
    checked = runner._Checked.of
    monkeypatch.setattr(  # what this machine lets pass, the workers check by themselves
        runner._Checked, "of", staticmethod(lambda spec: checked(RunSpec("qk_variance", SMALL, spec.seed)))
    )
    with executor() as pool, pytest.raises(ParamsError, match="d_k: got 0, wanted a value from 1"):
        map_runs([RunSpec("qk_variance", {"d_k": 0}, 0)], executor=pool)


def test_memory_is_that_of_the_worker(cluster, at, monkeypatch):
    at(cluster)
    monkeypatch.setattr(runner.devices, "free_bytes", lambda device: 0)
    with pytest.raises(runner.TooLarge):
        map_runs(specs(2, SMALL, 100))
    with executor() as pool:
        assert len(map_runs(specs(2, SMALL, 100), executor=pool)) == 2


def test_stop_cancels_what_no_worker_has_begun(cluster, at):
    at(cluster)
    came_back = []

    def check_stop():
        if came_back:
            raise Stopped("stop")

    def report(fraction, partial):
        came_back.extend(partial[:1])

    with client(cluster) as asking:
        asking.run(lambda: __import__("engine.runner").runner.cache.clear())
        with executor() as pool, pytest.raises(Stopped):
            map_runs(specs(40, LONG, 200), executor=pool, on_progress=report, check_stop=check_stop)
        wait_until(lambda: asking.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) == 0)
        wait_until(lambda: not any(asking.call_stack().values()))
        computed = sum(asking.run(lambda: len(__import__("engine.runner").runner.cache._kept)).values())
    assert 1 <= computed <= 12  # a few per worker were on their way; 40 were asked for


def test_a_worker_killed_in_the_middle_loses_nothing(own_cluster, at):
    at(own_cluster)
    victim = own_cluster.start_worker("victim")
    own_cluster.start_worker("survivor")
    asked = specs(16, LONG, 300)
    state = {"stopped": False, "killed": False, "lost": 0}
    with client(own_cluster) as asking:
        asking.wait_for_workers(2, timeout=PATIENCE_S)
        by_name = {worker["name"]: address for address, worker in asking.scheduler_info(-1)["workers"].items()}

        def report(fraction, partial):
            held = len(asking.processing().get(by_name["victim"], ()))
            if not state["stopped"] and held >= 2:  # one is computed, one waits beside it
                os.kill(victim.pid, signal.SIGSTOP)  # whatever it computes now is in the middle, and stays there
                state["stopped"] = True
            elif state["stopped"] and not state["killed"] and held and round((1 - fraction) * len(asked)) <= held:
                os.kill(victim.pid, signal.SIGKILL)  # the survivor has done all else
                state.update(killed=True, lost=held)

        with executor() as pool:
            results = map_runs(asked, executor=pool, on_progress=report)
    assert state["killed"]
    assert state["lost"] >= 1
    assert victim.wait(PATIENCE_S) == -signal.SIGKILL
    assert metrics(results) == plain_loop(asked)


def test_a_scheduler_that_dies_in_the_middle_is_told(own_cluster, at):
    at(own_cluster)
    own_cluster.start_worker("only")

    def kill(fraction, partial):
        if partial:
            own_cluster.scheduler.kill()

    with executor() as pool, pytest.raises(WorkersLost, match="connection to the scheduler is lost"):
        map_runs(specs(16, LONG, 400), executor=pool, on_progress=kill)
    assert len(runner.cache._kept) >= 1


@pytest.fixture
def other_checkout(tmp_path):
    """A copy of the engine with one number changed."""
    shutil.copytree(ROOT / "engine", tmp_path / "other" / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "other" / "engine" / "attention.py"
    source = changed.read_text("utf-8")
    assert source.count('"none": 1.0') == 1
    changed.write_text(source.replace('"none": 1.0', '"none": 1.5'), "utf-8")
    return tmp_path / "other"


def test_a_worker_with_other_code_is_refused(own_cluster, at, other_checkout):
    at(own_cluster)
    own_cluster.start_worker("other", other_checkout)
    with executor() as pool, pytest.raises(OtherCode, match=r"got qk_variance .* wanted qk_variance .* start it again"):
        map_runs(specs(2, SMALL), executor=pool)
    assert len(runner.cache._kept) == 0


def test_a_cluster_that_loses_its_last_worker_is_told(own_cluster, at, tmp_path, monkeypatch):
    at(own_cluster)
    own_cluster.start_worker("without the engine", tmp_path)  # its first call ends it
    monkeypatch.setattr(executors, "WITHOUT_WORKERS_S", 2.0)
    with executor() as pool, pytest.raises(WorkersLost, match=r"no worker left.*logs.*without this checkout"):
        map_runs(specs(2, SMALL), executor=pool)


def test_a_scheduler_without_the_engine_is_told(tmp_path, at):
    made = Cluster(tmp_path, checkout=tmp_path)
    try:
        at(made)
        made.start_worker("one")
        with executor() as pool, pytest.raises(OtherCode, match=r"scheduler: got .*No module named 'engine'"):
            map_runs(specs(2, SMALL), executor=pool)
    finally:
        made.end()


def test_a_scheduler_that_is_not_there_is_told_soon(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setattr(executors, "ANSWER_S", 0.5)
    monkeypatch.setenv(ADDRESS, f"tcp://127.0.0.1:{port}")
    mend = rf"{port}: no scheduler answers.*dask scheduler.*unset {ADDRESS}"
    with pytest.raises(ClusterUnavailable, match=mend), executor():
        pass
    # what was begun for it has ended: a client left over would get in the way of the next one
    assert [thread.name for thread in threading.enumerate() if thread.name == "IO loop"] == []


@pytest.mark.parametrize("address", ["nonsense://somewhere:1", "tcp://127.0.0.1:port"])
def test_an_address_that_is_none_is_told(monkeypatch, address):
    monkeypatch.setattr(executors, "ANSWER_S", 0.5)
    monkeypatch.setenv(ADDRESS, address)
    with pytest.raises(ClusterUnavailable, match=f"{address}: no scheduler answers"), executor():
        pass


def test_a_cluster_without_an_address_is_told(monkeypatch):
    monkeypatch.delenv(ADDRESS, raising=False)
    with pytest.raises(ClusterUnavailable, match=f"no address: set {ADDRESS}"), executor("cluster"):
        pass


def test_a_scheduler_without_workers_is_told(own_cluster, monkeypatch):
    monkeypatch.setenv(ADDRESS, own_cluster.address)
    mend = rf"no worker; start one with .*dask worker {own_cluster.address}"
    with pytest.raises(ClusterUnavailable, match=mend), executor():
        pass


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)  # importing it fails from here on
    monkeypatch.setenv(ADDRESS, "tcp://127.0.0.1:8786")
    with pytest.raises(ClusterUnavailable, match=r"pip install -r requirements-cluster\.txt"), executor():
        pass


def test_threads_need_no_dask(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setattr(executors, "cores", lambda: 8)
    with executor("threads") as pool:
        assert metrics(map_runs(specs(3, SMALL), executor=pool)) == plain_loop(specs(3, SMALL))
