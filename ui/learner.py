"""The reader's log on this visit: where it is kept, what it says, and adding to it.

Where the app listens on this machine alone, or ``DATA_DIR`` is set: a file, without any login, of one reader. With
``DATABASE_URL`` and a login: the database, each reader by what the login names. Else the visitor's own browser, which
a script in the page keeps; the server holds the log of a visit only as long as the visit.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st
from streamlit.components import v2

from study import log as logs
from study.events import BadLine, Event, read_line, write_line
from study.log import Log, MemoryLog, SqlLog
from study.progress import Progress, fold
from ui import state
from ui.text import t

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ONLY_READER = "reader"  # of a file that is one person's

# declared once a process: a declaration in a script run would be a new component each time
_saved_log = v2.component("saved_log", js=(Path(__file__).parent / "saved_log.js").read_text("utf-8"))

log = logging.getLogger("attention_interview_lab")


def place() -> str:
    """Where logs of this app are kept: ``file``, ``database``, or ``browser``."""
    if os.environ.get("DATABASE_URL") and _login():
        return "database"
    if os.environ.get("DATA_DIR") or st.get_option("server.address") in LOOPBACK:
        return "file"
    return "browser"


def _login() -> str | None:
    """What names the reader who is logged in; None where nobody is, or can."""
    try:
        return str(st.user.get("sub") or st.user.get("email") or "") or None if st.user.is_logged_in else None
    except AttributeError:  # a host without a login has no such field
        return None


@st.cache_resource(show_spinner=False)
def _engine(url: str) -> Any:
    from study.database import connect

    return connect(url)


def reader_log() -> Log:
    """The log of this visit's reader. A database that can't be had is told once, and the visit goes on without it."""
    reader = state.reader()
    if reader.log is None:
        reader.log = _open()
    return reader.log


def _open() -> Log:
    from sqlalchemy.exc import SQLAlchemyError

    where = place()
    if where == "browser":
        return MemoryLog()
    try:
        return SqlLog(_engine(logs.database_url()), _login() or ONLY_READER)
    except (SQLAlchemyError, OSError) as error:
        log.error("progress can't be kept: %s", error)
        state.reader().log_failed = type(error).__name__
        return MemoryLog()


def progress() -> Progress:
    """What the log says, computed anew when it has grown, here or in another tab."""
    reader, held = state.reader(), reader_log()
    size = held.size()
    if reader.progress is None or reader.progress[0] != size:
        reader.progress = (size, fold(held.events()))
    found: Progress = reader.progress[1]
    return found


def record(*events: Event) -> None:
    """Add to the log. What is recorded is kept when this returns; in a browser, when the page is drawn."""
    reader_log().append(events)
    if place() == "browser":
        state.reader().browser.lines += [write_line(event) for event in events]


def keep_all() -> None:
    """After an import: everything goes into the visitor's browser, where that is the place."""
    if place() == "browser":
        state.reader().browser.lines = [write_line(event) for event in reader_log().events()]


def forget() -> None:
    """Delete the reader's whole log, here and in their browser."""
    reader = state.reader()
    reader_log().forget()
    reader.progress = None
    reader.asking.clear()
    reader.exam_runs.clear()
    reader.browser = state.InBrowser(read=True, forget=True)


def keep() -> None:
    """Drawn with whatever may record something: takes the log out of the visitor's browser, and brings it there."""
    if place() != "browser":
        return
    held = state.reader().browser
    answer = _saved_log(
        data={
            "lines": held.lines,
            "end": held.sent + len(held.lines),
            "read": held.read,
            "forget": held.forget,
            "failed": held.failed,
        },
        key="saved_log",
        on_log_change=lambda: None,
        on_kept_change=lambda: None,
        height=0,
    )
    if answer.kept and answer.kept > held.sent:
        del held.lines[: answer.kept - held.sent]
        held.sent = answer.kept
    if answer.log and (not held.read or (answer.log["failed"] and not held.failed)):
        held.read, held.failed = True, str(answer.log["failed"])
        state.reader().log_failed = held.failed
        taken, lost = readable(str(answer.log["held"]))
        reader_log().append(taken)
        held.lost = lost
        st.rerun()


def readable(text: str) -> tuple[list[Event], int]:
    """The events of a browser's log, and the number of lines that are none. One damaged line must not cost the others;
    it stays where it is."""
    events, lost = [], 0
    for line in filter(str.strip, text.splitlines()):
        try:
            events.append(read_line(line))
        except BadLine:
            lost += 1
    return events, lost


def zone() -> tzinfo:
    """The reader's time zone, as the browser says."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return UTC


def warning() -> None:
    """Above a page that keeps progress, when it can't."""
    reader_log()
    failed = state.reader().log_failed
    lost = state.reader().browser.lost
    if lost:
        st.warning(t("log_lines_lost", n=lost), icon=":material/warning:")
    if failed:
        st.warning(t("log_failed", kind=failed), icon=":material/warning:")
