"""What a reader sees of a job: the place in line, how far it is, and Stop."""

from __future__ import annotations

from typing import Any

import streamlit as st

from engine.runner import Job
from ui.text import t


def draw(job: Job[Any], label: str = "") -> None:
    """A progress bar with a Stop button that takes effect within a second."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if job.state == "waiting":
            st.progress(0.0, text=t("in_line", place=job.place))
        else:
            st.progress(
                min(1.0, job.fraction), text=f"{label or t('running')} {job.fraction:.0%} · {job.seconds:.0f} s"
            )
        st.button(t("stop"), key=f"stop-{job.id}", icon=":material/stop:", on_click=job.stop)
