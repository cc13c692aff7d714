"""A number that a page waits for: ask the engine, show how far it is, and go on when it has answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import streamlit as st

from engine.runner import Handle
from ui import engine, jobbar, state, text
from ui.boundary import fragment
from ui.text import t

T = TypeVar("T")


def asked(purpose: str, work: Callable[[Handle], T]) -> T | None:
    """What a job of that purpose brings. None while it works: its progress then stands here, and the page is drawn
    anew when it ends; or when it failed or was stopped: then that stands here, with a button to try again."""
    finished = engine.take_finished(purpose)
    if finished is None and engine.active_job(purpose) is None:
        engine.submit(purpose, work)
        finished = engine.take_finished(purpose)  # most are done by then
    if finished is None:
        state.reader().drawn_jobs.add(purpose)
        fragment(_poll, run_every=jobbar.POLL_S)(purpose)
        return None
    if finished.state == "done":
        return finished.result
    if finished.state == "failed" and finished.error is not None:
        st.error(text.error(finished.error), icon=":material/error:")
    else:
        st.info(t("measuring_stopped"), icon=":material/stop:")
    st.button(t("measure_again"), key=f"again-{purpose}", icon=":material/play_arrow:")
    return None


def _poll(purpose: str) -> None:
    job = engine.active_job(purpose)
    if job is None:
        st.rerun()
    else:
        jobbar.draw(job, t("measuring"))
