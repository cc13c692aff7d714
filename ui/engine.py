"""The engine as pages use it: warmed up in the background, asked without ever holding up a page.

What is quick answers inside the script run; what is not becomes a job of the runner, which the page polls.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

import streamlit as st
from streamlit import runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

from engine import devices, executors, runner
from engine.base import Result, Stopped, Stopwatch
from engine.runner import Handle, Job, RunSpec
from ui import learner, state

QUICK_S = 0.3  # a run that takes longer than this becomes a job
ABANDONED_S = 150  # a browser asks at least once a minute, also for a tab in the background
GONE_S = 10  # a connection that was lost for a moment comes back sooner
ACTIVE = ("waiting", "running")
WAIT_S = 0.3  # how long a script run waits for a job just submitted: most single claims are done by then
T = TypeVar("T")

log = logging.getLogger("attention_interview_lab")

_turn = threading.Lock()  # of the quick runs


class WarmUp:
    """Imports torch in a thread of its own, so that no page waits for it (1.7 s and 200 MB)."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self._started = threading.Lock()
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start once, however often it is called."""
        if self._started.acquire(blocking=False):
            threading.Thread(target=self._work, name="warm-up", daemon=True).start()

    def _work(self) -> None:
        try:
            runner.settle_process()  # imports torch
            devices.available()
            # what was made so far lives as long as the process: the collector need not look at it again
            gc.collect()
            gc.freeze()
        except (ImportError, OSError) as error:  # torch missing, or its libraries do not load: the pages say so
            log.error("the engine can't start", exc_info=error)
            self.failure = error
        self.ready.set()
        learner.prepare()  # whatever becomes of it, the engine is there


@st.cache_resource(show_spinner=False)
def warm_up() -> WarmUp:
    """The one warm-up of this process."""
    return WarmUp()


def is_ready() -> bool:
    """Whether a run can start at once."""
    return warm_up().ready.is_set() and warm_up().failure is None


@functools.cache
def torch_version() -> str:
    """The installed torch, known without importing it; empty when there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def quick(spec: RunSpec) -> Result | None:
    """The result if it is kept already or can be had within ``QUICK_S``; None when it wants a job.

    One at a time: more would share the same cores, and hold the memory of all of them at once.
    """
    if not is_ready():
        return None
    clock = Stopwatch()

    def check() -> None:
        if clock() > QUICK_S:
            raise Stopped("deadline")

    if not _turn.acquire(timeout=QUICK_S):
        return None
    try:
        return runner.run_spec(spec, check_stop=check)
    except Stopped:
        return None
    finally:
        _turn.release()


@contextlib.contextmanager
def many_runs() -> Iterator[Executor | None]:
    """What a job hands its many runs to: the cluster of who hosts this page, and without an answer from it, threads."""
    with contextlib.ExitStack() as stack:
        try:
            pool = stack.enter_context(executors.executor())
        except executors.ClusterUnavailable as error:
            log.warning("computing here instead: %s", error)  # a reader can't mend it, and needs the result
            pool = stack.enter_context(executors.executor("threads"))
        yield pool


def submit(
    purpose: str, work: Callable[[Handle], T], *, device: str = "cpu", deadline_s: float | None = None
) -> Job[T]:
    """Start a job of this reader (a newer one replaces an older) and wait for it a moment.

    It ends by itself ``GONE_S`` after the reader's connection is gone (the tab is closed or loaded anew), or when no
    page has asked for it in ``ABANDONED_S``.
    """
    reader = state.reader()
    reader.seen = reader.connected = time.monotonic()
    there = _connection()

    def wanted() -> bool:
        now = time.monotonic()
        if there():
            reader.connected = now
        return now - reader.seen < ABANDONED_S and now - reader.connected < GONE_S

    warm_up().start()
    job = runner.jobs.submit(
        reader.id,
        work,
        device=device,
        deadline_s=deadline_s,
        wanted=wanted,
    )
    reader.jobs[purpose] = job
    job.wait(WAIT_S)
    return job


def _connection() -> Callable[[], bool]:
    """Tells, from any thread, whether the browser of this script run is still connected."""
    context = get_script_run_ctx()
    if context is None or not runtime.exists():  # a test without a server
        return lambda: True
    session, server = context.session_id, runtime.get_instance()
    return lambda: server.is_active_session(session)


def active_job(purpose: str) -> Job[Any] | None:
    """This reader's job of that purpose while it waits or runs."""
    reader = state.reader()
    reader.seen = time.monotonic()
    job = reader.jobs.get(purpose)
    return job if job is not None and job.state in ACTIVE else None


def active_elsewhere() -> tuple[str, Job[Any]] | None:
    """This reader's job with its purpose, if one is going on and the page drawn now does not draw its progress."""
    reader = state.reader()
    for purpose in reader.jobs:
        job = active_job(purpose)
        if job is not None and purpose not in reader.drawn_jobs:
            return purpose, job
    return None


def take_finished(purpose: str) -> Job[Any] | None:
    """The job of that purpose once it has ended, also when a newer one replaced it; handed out one time."""
    reader = state.reader()
    job = reader.jobs.get(purpose)
    if job is None or job.state in ACTIVE:
        return None
    return reader.jobs.pop(purpose)


def spec_of(
    experiment: str, params: Mapping[str, Any], *, seed: int = 0, device: str = "cpu", dtype: str = "float32"
) -> RunSpec:
    """One run, as data."""
    return RunSpec(experiment, dict(params), seed, device, dtype)
