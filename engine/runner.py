"""Run one experiment, a sweep or a batch within bounds of memory, time and concurrency.

Two layers. :func:`run`, :func:`sweep` and :func:`map_runs` compute where they are called: they check the parameters,
refuse what does not fit into memory, and keep complete results for the next who asks. :class:`Jobs` carries such calls
out in threads: one at a time per device in the order of arrival, at most one a reader, with Stop, a deadline and
partial results.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import math
import platform
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from engine import devices, executors, registry
from engine.base import BaseParams, Result, Stopped, Table, make_run
from engine.fingerprint import code_hash

T = TypeVar("T")
Key = tuple[Any, ...]
OnProgress = Callable[[float, Any], None]
CheckStop = Callable[[], None]

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.9  # of what is free; the interpreter and the page need the rest
CACHE_BYTES = 64 * 2**20
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # of glibc's malloc.h
ON_THIS_MACHINE = (concurrent.futures.ThreadPoolExecutor, concurrent.futures.ProcessPoolExecutor)


class TooLarge(Exception):
    """The run was not started: its estimate does not fit into what the device has left."""

    def __init__(self, needed_bytes: int, limit_bytes: int, device: str) -> None:
        super().__init__(f"the run needs about {needed_bytes:,} bytes; {device} has {limit_bytes:,} to give")
        self.needed_bytes, self.limit_bytes, self.device = needed_bytes, limit_bytes, device

    def __reduce__(self) -> Any:  # exceptions cross process borders too
        return TooLarge, (self.needed_bytes, self.limit_bytes, self.device)


class OutOfMemory(Exception):
    """The device ran out of memory; what the run held is free again. ``needed_bytes``: the estimate, 0 without one."""

    def __init__(self, device: str, needed_bytes: int) -> None:
        estimate = f"; the run was estimated at {needed_bytes:,} bytes" if needed_bytes else ""
        super().__init__(f"{device} ran out of memory{estimate}")
        self.device, self.needed_bytes = device, needed_bytes

    def __reduce__(self) -> Any:
        return OutOfMemory, (self.device, self.needed_bytes)


# --------------------------------------------------------------------------------------------------------------------
# Results that are already known


class ResultCache:
    """Complete results by what they depend on; the least recently used go first when they take more than the limit."""

    def __init__(self, limit_bytes: int = CACHE_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._kept: OrderedDict[Key, tuple[Result, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Result | None:
        """The result, in dictionaries of one's own; the columns are shared and read-only."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            result = self._kept[key][0]
        return Result(dict(result.metrics), {name: dict(table) for name, table in result.tables.items()}, result.done)

    def put(self, key: Key, result: Result) -> None:
        """Keep a result, unless it is partial or by itself above the limit."""
        columns = [column for table in result.tables.values() for column in table.values()]
        size = 256 * (1 + len(result.metrics) + len(columns)) + sum(column.nbytes for column in columns)
        if result.done < 1 or size > self.limit_bytes:
            return
        with self._lock:
            if key in self._kept:
                self._bytes -= self._kept.pop(key)[1]
            self._kept[key] = _read_only(result), size
            self._bytes += size
            while self._bytes > self.limit_bytes:
                self._bytes -= self._kept.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    @property
    def nbytes(self) -> int:
        """What the kept results take, about."""
        return self._bytes


def _read_only(result: Result) -> Result:
    """A copy whose columns nobody can write to, and which keeps no larger array alive behind a view."""
    tables = {name: {key: column.copy() for key, column in table.items()} for name, table in result.tables.items()}
    for table in tables.values():
        for column in table.values():
            column.flags.writeable = False
    return Result(dict(result.metrics), tables, result.done)


cache = ResultCache()


# --------------------------------------------------------------------------------------------------------------------
# One run


@dataclass(frozen=True)
class RunSpec:
    """One run as data, so that it can be sent to another process or machine."""

    experiment: str
    params: Mapping[str, object]
    seed: int
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class _Checked:
    """A run whose experiment, parameters, device and dtype exist."""

    experiment: registry.Experiment
    params: BaseParams
    device: devices.Device
    key: Key
    needed_bytes: int

    @staticmethod
    def of(spec: RunSpec) -> _Checked:
        experiment = registry.get(spec.experiment)
        params = experiment.Params.from_mapping(spec.params)
        device = devices.get(spec.device)
        if spec.dtype not in device.dtypes:
            raise devices.UnsupportedDtype(device.id, spec.dtype, device.dtypes)
        values = tuple(sorted(params.as_dict().items()))
        key = (spec.experiment, code_hash(spec.experiment), values, spec.seed, device.id, spec.dtype)
        # estimates are made for float32, which narrower types do not exceed
        needed = experiment.memory_bytes(params) * (2 if spec.dtype == "float64" else 1)
        return _Checked(experiment, params, device, key, needed)

    def limit_bytes(self) -> int:
        return int(devices.free_bytes(self.device) * MEMORY_SHARE)

    def refuse_if_too_large(self) -> None:
        limit = self.limit_bytes()
        if self.needed_bytes > limit:
            raise TooLarge(self.needed_bytes, limit, self.device.id)


def look_up(spec: RunSpec) -> Result | None:
    """The complete result of a run, if it is kept already.

    Raises: UnknownExperiment, ParamsError, UnknownDevice, UnsupportedDtype.
    """
    return cache.get(_Checked.of(spec).key)


def run(
    name: str,
    params: Mapping[str, object],
    *,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "float32",
    on_progress: OnProgress | None = None,
    check_stop: CheckStop | None = None,
    cached: bool | None = None,
) -> Result:
    """Run an experiment once; a complete result that is already known is returned as it is when ``cached``.

    None stands for yes, save where times are measured: another run's may be of a busier moment, and two runs that agree
    to the last digit would look like a steadiness that is not there.

    Raises: UnknownExperiment, ParamsError, UnknownDevice, UnsupportedDtype, TooLarge, OutOfMemory, Stopped.
    """
    checked = _Checked.of(RunSpec(name, params, seed, device, dtype))
    if cached is None:
        cached = not checked.experiment.measures_time
    if cached and (known := cache.get(checked.key)):
        return known
    checked.refuse_if_too_large()
    settle_process()
    hooks = {"on_progress": on_progress, "check_stop": check_stop}

    def compute() -> Result:
        prepared = make_run(seed, checked.device.id, dtype, **{hook: call for hook, call in hooks.items() if call})
        prepared.check_stop()
        return _read_only(checked.experiment.run(checked.params, prepared))

    result = _surviving(compute, checked.device.id, checked.needed_bytes)
    cache.put(checked.key, result)
    return result


@functools.cache
def settle_process() -> None:
    """Settings of the whole process, made once, before torch is imported where possible.

    One torch thread for each run: more are slower as soon as two runs share the cores. And freed tensors go back to the
    system: glibc would keep blocks of up to 32 MB, in up to eight times as many arenas as there are cores, so that a
    run estimated at 30 MB holds on to 400. The price: filling a new large tensor costs a page fault every 4 kB.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, 2)
        libc.mallopt(M_MMAP_THRESHOLD, 2 * 2**20)

    import torch

    torch.set_num_threads(1)


def _surviving(compute: Callable[[], T], device: str, needed_bytes: int) -> T:
    """What ``compute`` returns; exhausted memory becomes OutOfMemory, after everything is freed that it held."""
    try:
        return compute()
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
    # out of the except block: the error is gone by now, and with it the frames that held the tensors
    gc.collect()
    devices.empty_pool(device)
    raise OutOfMemory(device, needed_bytes)


def _is_out_of_memory(error: BaseException) -> bool:
    """MemoryError, torch.OutOfMemoryError, and the plain RuntimeErrors of the CPU's allocator and of drivers."""
    words = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    )


# --------------------------------------------------------------------------------------------------------------------
# Many runs


def map_runs(
    specs: Sequence[RunSpec],
    *,
    executor: concurrent.futures.Executor | None = None,
    on_progress: OnProgress | None = None,
    check_stop: CheckStop | None = None,
) -> list[Result]:
    """The result of each spec, in their order: one after the other here, or side by side in an executor.

    Every spec is checked before the first one runs; whether it fits into the memory of another machine is checked
    there. The partial result that goes with the progress is the list of leading results that are complete. A stop
    waits for nobody: what an executor has not begun is cancelled; what it is computing stops at its next chunk in
    threads, and is left to end by itself in other processes. What measures times runs here, one after the other: side
    by side the runs would slow each other down, and elsewhere they would measure another device.

    Raises: what :func:`run` raises, for the first spec that fails; WorkersLost and OtherCode of engine.executors.
    """
    report = on_progress or (lambda fraction, partial: None)
    checked = [_Checked.of(spec) for spec in specs]
    if any(item.experiment.measures_time for item in checked):
        executor = None
    if executor is None or isinstance(executor, ON_THIS_MACHINE):
        for item in checked:
            item.refuse_if_too_large()
    if executor is not None:
        with executors.explained():
            return _map_in(executor, specs, checked, report, check_stop or (lambda: None))
    results: list[Result] = []
    for spec in specs:

        def inner(fraction: float, partial: object) -> None:
            report((len(results) + fraction) / len(specs), results[:])

        results.append(run_spec(spec, inner, check_stop))
        report(len(results) / len(specs), results[:])
    return results


def run_spec(spec: RunSpec, on_progress: OnProgress | None = None, check_stop: CheckStop | None = None) -> Result:
    """:func:`run` for a run given as data; a plain function of a plain value, so that an executor can be given it."""
    return run(
        spec.experiment,
        spec.params,
        seed=spec.seed,
        device=spec.device,
        dtype=spec.dtype,
        on_progress=on_progress,
        check_stop=check_stop,
    )


def run_as(spec: RunSpec, code: str) -> Result:
    """:func:`run_spec` in another process or on another machine, which may have been started from another checkout.

    Raises: OtherCode, before anything is computed, where the code is not ``code``, the :func:`code_of` who asks.
    """
    here = code_of(spec.experiment)
    if here != code:
        raise executors.OtherCode(platform.node(), here, code)
    return run_spec(spec)


def code_of(experiment: str) -> str:
    """What decides the numbers of an experiment beside its parameters: its code, and the version of torch."""
    import torch

    version = str(torch.__version__).partition("+")[0]  # behind the plus stands what it was built for
    return f"{experiment} {code_hash(experiment)} with torch {version}"


def _map_in(
    executor: concurrent.futures.Executor,
    specs: Sequence[RunSpec],
    checked: list[_Checked],
    report: OnProgress,
    check_stop: CheckStop,
) -> list[Result]:
    results = [cache.get(item.key) for item in checked]
    unasked = deque(index for index, known in enumerate(results) if known is None)
    at_once = len(specs)
    if isinstance(executor, ON_THIS_MACHINE):  # what runs side by side here holds its memory together
        at_once = min([at_once, *(item.limit_bytes() // max(1, item.needed_bytes) for item in checked)])
    asked: dict[concurrent.futures.Future[Result], int] = {}
    waiting: set[concurrent.futures.Future[Result]] = set()
    try:
        while unasked or waiting:
            while unasked and len(waiting) < max(1, at_once):
                index = unasked.popleft()
                if isinstance(executor, concurrent.futures.ThreadPoolExecutor):  # threads can be handed the stop
                    future = executor.submit(run_spec, specs[index], None, check_stop)
                else:
                    future = executor.submit(run_as, specs[index], code_of(specs[index].experiment))
                asked[future] = index
                waiting.add(future)
            done, waiting = concurrent.futures.wait(waiting, 0.1, concurrent.futures.FIRST_COMPLETED)
            for future in done:
                if not future.cancelled() and not future.exception():
                    results[asked[future]] = future.result()
                    cache.put(checked[asked[future]].key, future.result())
            for future in sorted(done, key=asked.__getitem__):
                future.result()  # the first error, after all that came back is kept
            left = len(waiting) + len(unasked)
            report(1 - left / len(specs), list(itertools.takewhile(lambda known: known is not None, results)))
            check_stop()
            if isinstance(executor, executors.Cluster):
                executor.check_workers()
    except BaseException:
        for future in waiting:
            future.cancel()
        raise
    return [result for result in results if result is not None]


@dataclass(frozen=True)
class Sweep:
    """Metrics over the values of one parameter, for several seeds. Shapes: each metric (len(values), len(seeds))."""

    over: str
    values: tuple[Any, ...]
    seeds: tuple[int, ...]
    metrics: dict[str, np.ndarray]

    def table(self, metric: str) -> Table:
        """Columns ``over``, mean, low and high: the mean over the seeds, between the lowest and the highest of them."""
        rows = self.metrics[metric]
        values = np.asarray(self.values)
        return {
            self.over: values.astype(np.int64) if values.dtype == bool else values,
            "mean": rows.mean(axis=1),
            "low": rows.min(axis=1),
            "high": rows.max(axis=1),
        }


def sweep(
    name: str,
    params: Mapping[str, object],
    over: str,
    values: Sequence[object],
    seeds: Sequence[int],
    *,
    device: str = "cpu",
    dtype: str = "float32",
    on_progress: OnProgress | None = None,
    check_stop: CheckStop | None = None,
    executor: concurrent.futures.Executor | None = None,
) -> Sweep:
    """Run an experiment for each value of one parameter with each seed; the partial result is the Sweep so far.

    Raises: what :func:`run` raises; every value is checked before the first one runs.
    """
    specs = [RunSpec(name, {**params, over: value}, seed, device, dtype) for value in values for seed in seeds]

    def gathered(results: list[Result]) -> Sweep:
        rows = len(results) // len(seeds)  # whole rows only: a mean over some of the seeds would jump
        whole = results[: rows * len(seeds)]
        return Sweep(
            over,
            tuple(values[:rows]),
            tuple(seeds),
            {
                metric: np.array([result.metrics[metric] for result in whole]).reshape(rows, len(seeds))
                for metric in registry.get(name).metric_names
            },
        )

    def report(fraction: float, results: list[Result]) -> None:
        if on_progress:
            on_progress(fraction, gathered(results))

    return gathered(map_runs(specs, executor=executor, on_progress=report, check_stop=check_stop))


# --------------------------------------------------------------------------------------------------------------------
# Jobs

State = Literal["waiting", "running", "done", "stopped", "failed"]
Reason = Literal["", "stop", "replaced", "deadline", "abandoned"]


class Job(Generic[T]):
    """One piece of work of one reader. Read its fields at any time; only :class:`Jobs` writes them."""

    def __init__(
        self,
        jobs: Jobs,
        id: int,
        reader: str,
        work: Callable[[Handle], T],
        device: str,
        deadline_s: float,
        wanted: Callable[[], bool],
    ) -> None:
        self.id, self.reader, self.device, self.deadline_s = id, reader, device, deadline_s
        self.wanted = wanted
        self.state: State = "waiting"
        self.fraction = 0.0
        self.partial: Any = None
        self.result: T | None = None
        self.error: BaseException | None = None
        self.reason: Reason = ""
        self._jobs = jobs
        self._work: Callable[[Handle], T] | None = work
        self._stop_for: Reason = ""
        self._started = self._ended = math.nan
        self._over = threading.Event()

    @property
    def place(self) -> int:
        """Place in the line of its device: 1 is next, 0 is no longer waiting."""
        return self._jobs._place(self)

    @property
    def seconds(self) -> float:
        """Seconds it has been running, or ran; waiting does not count."""
        if math.isnan(self._started):
            return 0.0
        return (self._jobs._clock() if math.isnan(self._ended) else self._ended) - self._started

    def stop(self) -> None:
        """End it: at once while it waits, at its next chunk while it runs."""
        self._jobs._stop(self, "stop")

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is over within ``timeout`` seconds. Not for script runs of a page, which never wait."""
        return self._over.wait(timeout)


class Handle:
    """What a job's work reports with and is stopped by; its methods fit ``on_progress`` and ``check_stop``."""

    def __init__(self, job: Job[Any]) -> None:
        self._job = job

    def progress(self, fraction: float, partial: Any = None) -> None:
        """Tell how far the work is and, if there is one, what is known so far.

        Raises: Stopped.
        """
        self._job.fraction = fraction
        if partial is not None:
            self._job.partial = partial
        self.check_stop()

    def check_stop(self) -> None:
        """Raise Stopped when the reader stopped the job or left it, a newer one replaced it, or its time is up."""
        if self._job._stop_for:
            raise Stopped(self._job._stop_for)
        if self._job.seconds > self._job.deadline_s:
            raise Stopped("deadline")
        if not self._job.wanted():
            raise Stopped("abandoned")


class Jobs:
    """Work in daemon threads: ``slots`` at a time on each device in the order of arrival, at most one a reader.

    A reader's newer job replaces the older one, and takes over its place in the line if that was still waiting. Every
    job ends as "done", "stopped" or "failed", whatever its work raised; the last one of each of the ``keep`` latest
    readers is remembered.
    """

    def __init__(self, *, slots: int = 1, keep: int = 64, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots, self._keep, self._clock = slots, keep, clock
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._waiting: list[Job[Any]] = []
        self._running: list[Job[Any]] = []
        self._ended: OrderedDict[str, Job[Any]] = OrderedDict()  # the last of each reader

    def submit(
        self,
        reader: str,
        work: Callable[[Handle], T],
        *,
        device: str = "cpu",
        deadline_s: float | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Job[T]:
        """Put work in the line of a device; a deadline counts from its start and keeps what it reported by then.

        ``wanted`` is asked at every chunk: once it says no, nobody waits for the job any more and it ends.
        """
        limit_s = math.inf if deadline_s is None else deadline_s
        job = Job(self, next(self._ids), reader, work, device, limit_s, wanted)
        with self._lock:
            at = len(self._waiting)
            for older in [other for other in (*self._waiting, *self._running) if other.reader == reader]:
                if older in self._waiting and older.device == device:
                    at = self._waiting.index(older)
                self._end_or_flag(older, "replaced")
            self._waiting.insert(min(at, len(self._waiting)), job)
            self._start_what_can()
        return job

    def of(self, reader: str) -> Job[Any] | None:
        """The reader's latest job, None when there is none or it is forgotten."""
        with self._lock:
            known = [job for job in (*self._ended.values(), *self._running, *self._waiting) if job.reader == reader]
        return max(known, key=lambda job: job.id, default=None)

    def _place(self, job: Job[Any]) -> int:
        with self._lock:
            line = [other for other in self._waiting if other.device == job.device]
            return line.index(job) + 1 if job in line else 0

    def _stop(self, job: Job[Any], reason: Reason) -> None:
        with self._lock:
            self._end_or_flag(job, reason)

    def _end_or_flag(self, job: Job[Any], reason: Reason) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            self._end(job, "stopped", reason)
        elif job in self._running and not job._stop_for:
            job._stop_for = reason

    def _end(self, job: Job[Any], state: State, reason: Reason = "") -> None:
        job.state, job.reason, job._work = state, reason, None
        earlier = self._ended.pop(job.reader, job)
        self._ended[job.reader] = max(
            earlier, job, key=lambda one: one.id
        )  # a replaced job may end after its successor
        while len(self._ended) > self._keep:
            self._ended.popitem(last=False)
        job._over.set()

    def _start_what_can(self) -> None:
        """Start each waiting job whose device has a slot and whose reader has nothing running; the lock is held."""
        for job in self._waiting[:]:
            taken = sum(other.device == job.device for other in self._running)
            if taken < self._slots and all(other.reader != job.reader for other in self._running):
                self._waiting.remove(job)
                self._running.append(job)
                job.state, job._started = "running", self._clock()
                thread = threading.Thread(target=self._carry_out, args=(job,), name=f"job-{job.id}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system gives no more threads
                    job.error = error
                    log.error("job %d could not start: %s", job.id, error)
                    self._running.remove(job)
                    self._end(job, "failed")

    def _carry_out(self, job: Job[Any]) -> None:
        """The body of a job's thread. Nothing that the work raises gets past it: the error is kept and logged."""
        state: State = "failed"
        reason: Reason = ""
        assert job._work is not None
        try:
            job.result = _surviving(functools.partial(job._work, Handle(job)), job.device, 0)
            job.fraction, state = 1.0, "done"
        except Stopped as stopped:
            state, reason = "stopped", stopped.reason
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the error is kept, the tensors in its frames are not
            job.error = error
            log.exception("job %d of a reader on %s failed", job.id, job.device)
        with self._lock:
            job._ended = self._clock()
            self._running.remove(job)
            self._end(job, state, reason)
            self._start_what_can()


jobs = Jobs()
