"""What a reader sees of a job: the place in line, how far it is, and Stop."""

from __future__ import annotations

from typing import Any

import streamlit as st

from engine.runner import Job
from ui import engine, verifying
from ui.boundary import fragment
from ui.text import t

POLL_S = 0.4


def draw(job: Job[Any], label: str = "") -> None:
    """A progress bar with a Stop button that takes effect within a second."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if job.state == "waiting":
            st.progress(0.0, text=t("in_line", place=job.place))
        else:
            done = f"{job.fraction:.0%} · {job.seconds:.0f} s"
            st.progress(min(1.0, job.fraction), text=f"{label or t('running')} {done}")
        st.button(t("stop"), key=f"stop-{job.id}", icon=":material/stop:", on_click=job.stop)


def foot() -> None:
    """At the foot of every page: the reader's job, unless the page draws it itself. It can be stopped from anywhere."""
    if engine.active_elsewhere() is not None:
        with st.bottom:
            fragment(_foot, run_every=POLL_S)()


def _foot() -> None:
    going_on = engine.active_elsewhere()
    if going_on is None:
        st.rerun()  # takes in what it brought
    else:
        purpose, job = going_on
        draw(job, t("verifying") if purpose == verifying.PURPOSE else "")
