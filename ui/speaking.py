"""The 30-second answer: the text for the ear, how long it takes, and a timer to rehearse with."""

from __future__ import annotations

import time

import streamlit as st

from content.schema import Card
from content.speech import spoken_seconds
from ui import prose, state
from ui.boundary import fragment
from ui.text import say, t

TARGET_S = 30
STOPS_AT_S = 180  # a timer left alone ends by itself


def draw(card: Card) -> None:
    """Text, estimate and timer."""
    with st.container(border=True):
        st.markdown(prose.markdown(card, card.spoken))
    st.caption(t("spoken_takes", seconds=f"{spoken_seconds(say(card.spoken), state.language()):.0f}"))
    running = state.reader().timer_started is not None
    fragment(_timer, run_every=1.0 if running else None)()


def _timer() -> None:
    reader = state.reader()
    started = reader.timer_started
    if started is None:
        st.button(t("timer_start"), icon=":material/timer:", key="timer", on_click=_set_timer, args=(True,))
        return
    elapsed = time.monotonic() - started
    if elapsed > STOPS_AT_S:
        reader.timer_started = None
        st.rerun()
    over = elapsed > TARGET_S
    label = (
        t("timer_over", seconds=f"{elapsed:.0f}")
        if over
        else t("timer_running", seconds=f"{elapsed:.0f}", target=TARGET_S)
    )
    st.progress(min(1.0, elapsed / TARGET_S), text=label)
    st.button(t("timer_stop"), icon=":material/timer_off:", key="timer", on_click=_set_timer, args=(False,))


def _set_timer(on: bool) -> None:
    state.reader().timer_started = time.monotonic() if on else None
