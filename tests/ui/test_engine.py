"""Jobs as the pages use them: one a purpose, none lost, none left behind."""

import logging
import threading

import pytest

from engine import executors
from engine.executors import OtherCode, WorkersLost
from engine.runner import Jobs
from ui import engine, state, text

PATIENCE_S = 60  # a busy machine; nothing here waits that long unless it is broken


@pytest.fixture
def reader(monkeypatch):
    """One visit, and a runner of its own."""
    visit = state.Reader()
    monkeypatch.setattr(state, "reader", lambda: visit)
    monkeypatch.setattr(engine.runner, "jobs", Jobs())
    return visit


def test_work_that_another_purpose_replaced_is_handed_out_with_what_it_had(reader):
    begun, go_on = threading.Event(), threading.Event()

    def measure(handle):
        handle.progress(0.5, ("first", "second"))
        begun.set()
        assert go_on.wait(PATIENCE_S)
        handle.check_stop()

    old = engine.submit("claims", measure)
    assert begun.wait(PATIENCE_S)
    new = engine.submit("lab:a", lambda handle: "done")
    go_on.set()
    assert old.wait(PATIENCE_S)
    assert new.wait(PATIENCE_S)
    replaced = engine.take_finished("claims")
    assert (replaced.state, replaced.reason, replaced.partial) == ("stopped", "replaced", ("first", "second"))
    assert engine.take_finished("claims") is None  # handed out one time
    assert engine.take_finished("lab:a").result == "done"


def test_a_job_is_shown_elsewhere_unless_the_page_draws_it(reader):
    go_on = threading.Event()
    job = engine.submit("lab:a", lambda handle: go_on.wait(PATIENCE_S))
    assert engine.active_elsewhere() == ("lab:a", job)
    reader.drawn_jobs.add("lab:a")
    assert engine.active_elsewhere() is None
    go_on.set()
    assert job.wait(PATIENCE_S)
    assert engine.active_job("lab:a") is None


def test_a_job_ends_when_the_page_stops_asking_for_it(reader, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def work(handle):
        begun.set()
        assert go_on.wait(PATIENCE_S)
        handle.check_stop()

    job = engine.submit("lab:a", work)
    assert begun.wait(PATIENCE_S)
    reader.seen -= engine.ABANDONED_S + 1  # as if the tab had been closed that long ago
    go_on.set()
    assert job.wait(PATIENCE_S)
    assert (job.state, job.reason) == ("stopped", "abandoned")


def test_without_an_answer_from_the_cluster_a_page_computes_here(monkeypatch, caplog):
    monkeypatch.delenv(executors.ADDRESS, raising=False)
    with engine.many_runs() as here:
        pass
    monkeypatch.setenv(executors.ADDRESS, "tcp://127.0.0.1:port")
    monkeypatch.setattr(executors, "ANSWER_S", 0.1)
    with caplog.at_level(logging.WARNING), engine.many_runs() as instead:
        assert type(instead) is type(here)
    assert "computing here instead: cluster at tcp://127.0.0.1:port" in caplog.text


@pytest.mark.parametrize("error", [WorkersLost("gone"), OtherCode("a host", "that", "this")])
def test_failed_workers_are_told_to_the_reader(error, monkeypatch):
    monkeypatch.setattr(state, "language", lambda: "zh")
    assert text.error(error).startswith("负责计算的机器已断开")
