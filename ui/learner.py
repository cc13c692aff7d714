"""The reader's log on this visit: where it is kept, what it says, and adding to it.

Where the app listens on this machine alone, or ``DATA_DIR`` is set: a file, without any login, of one reader. With
``DATABASE_URL`` and a login: the database, each reader by what the login names. Else the visitor's own browser, which
a script in the page keeps; the server holds the log of a visit only as long as the visit.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterable
from datetime import UTC, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st
from streamlit.components import v2

from claims.verify import Verdict
from study import log as logs
from study.events import BadLine, Event, Prediction, now, read_line, write_line
from study.log import Log, MemoryLog, SqlLog
from study.measured import event_of, verdict_of
from study.progress import Progress, fold
from ui import state
from ui.deck import deck
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


# SQLAlchemy can't be imported by two threads at once: each meets modules that the other has half read
_importing = threading.Lock()
_prepared = threading.Event()  # the database was opened once, outside a script run


def prepare() -> None:
    """Open the database of this process, in the warm-up: its libraries take half a second to import."""
    url = os.environ.get("DATABASE_URL") or (logs.file_url() if place() == "file" else None)
    if url:
        _open_database(url)
    _prepared.set()


def is_at_hand() -> bool:
    """Whether the log can be read without holding up a page."""
    return state.reader().log is not None or place() == "browser" or _prepared.is_set()


def reader_log() -> Log:
    """The log of this visit's reader. A database that can't be had is told once, and the visit goes on without it."""
    reader = state.reader()
    if reader.log is None:
        reader.log = _open()
    return reader.log


def _open() -> Log:
    where = place()
    if where == "browser":
        return MemoryLog()
    database = _open_database(os.environ["DATABASE_URL"] if where == "database" else logs.file_url())
    if isinstance(database, Exception):
        state.reader().log_failed = type(database).__name__
        return MemoryLog()
    return SqlLog(database, _login() or ONLY_READER)


def _open_database(url: str) -> Any:
    """The database, or the error that stands in its place."""
    with _importing:
        from sqlalchemy.exc import SQLAlchemyError

        try:
            return _engine(url)
        except (SQLAlchemyError, OSError) as error:
            log.error("progress can't be kept: %s", error)
            return error


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
    if not events:
        return
    reader_log().append(events)
    if place() == "browser":
        state.reader().browser.lines += [write_line(event) for event in events]


def predicted(experiment: str, metric: str, value: float, measured: float, claim: str = "") -> None:
    """A number that was committed to before a run, and what came out. What is no number has no place in a log."""
    if math.isfinite(value) and math.isfinite(measured):
        record(
            Prediction(at=now(), experiment=experiment, metric=metric, predicted=value, measured=measured, claim=claim)
        )


def remember(verdicts: Iterable[Verdict]) -> None:
    """Receipts that were measured on this device: they stand in the texts from now on, and in the log."""
    claims = {claim.id: claim for of_card in deck().claims.values() for claim in of_card}
    done = list(verdicts)
    state.reader().verdicts.update({verdict.claim: verdict for verdict in done})
    record(*(event_of(v, claims[v.claim], now()) for v in done if v.claim in claims))


def restore() -> None:
    """Take the reader's own receipts out of the log, once a visit, as far as claims and code are still the same."""
    reader = state.reader()
    events = progress().measured
    if reader.restored == len(events):
        return
    reader.restored = len(events)
    claims = {claim.id: claim for of_card in deck().claims.values() for claim in of_card}
    for name, event in events.items():
        if name in claims and name not in reader.verdicts:
            verdict = verdict_of(event, claims[name])
            if verdict is not None:
                reader.verdicts[name] = verdict


def keep_all() -> None:
    """After an import: everything goes into the visitor's browser, where that is the place."""
    if place() == "browser":
        held = state.reader().browser
        held.sent += len(held.lines)  # an acknowledgement that is under way speaks of those, not of the new ones
        held.lines = [write_line(event) for event in reader_log().events()]


def forget() -> None:
    """Delete the reader's whole log, here and in their browser."""
    reader = state.reader()
    reader_log().forget()
    reader.progress = None
    reader.asking.clear()
    reader.exam_runs.clear()
    before = reader.browser
    reader.browser = state.InBrowser(read=True, forget=True, sent=before.sent + len(before.lines))


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
            "forget": held.sent if held.forget else None,
            "failed": held.failed,
        },
        key="saved_log",
        on_log_change=lambda: None,
        on_kept_change=lambda: None,
        on_forgot_change=lambda: None,
        height=0,
    )
    if answer.forgot == held.sent:
        held.forget = False
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
