"""Where what a page did not foresee becomes a message, and its cause an entry in the log."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import streamlit as st

from ui.text import t

log = logging.getLogger("attention_interview_lab")


@contextmanager
def guarded(part: str) -> Iterator[None]:
    """Draw a part of the app; Streamlit's own stop and rerun pass, for they are no Exception."""
    try:
        yield
    except Exception as error:  # this is the boundary: narrower ones stand where a failure is foreseen
        log.exception("%s failed", part)
        st.error(t("page_failed", kind=type(error).__name__), icon=":material/error:")


def fragment(body: Callable[..., None], *, run_every: float | None = None) -> Callable[..., None]:
    """``body`` as a fragment with a boundary of its own: it also runs when its page does not."""

    @functools.wraps(body)
    def inside(*arguments: object) -> None:
        with guarded(body.__name__):
            body(*arguments)

    return st.fragment(inside, run_every=run_every)
