"""The reader's log on this visit: where it is kept, what it says, and adding to it.

Where the app listens on this machine alone, or ``DATA_DIR`` is set: a file, without any login, of one reader. With
``DATABASE_URL`` and a login: the database, each reader by what the login names. Else the visitor's own browser, which
a script in the page keeps; the server holds the log of a visit only as long as the visit.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st
from streamlit.components import v2

from claims.verify import Verdict
from study import log as logs
from study.events import Event, Prediction, now, write_line
from study.log import Log, MemoryLog, NotKept, SqlLog
from study.measured import event_of, verdict_of
from study.progress import Progress, fold
from ui import state
from ui.deck import deck
from ui.text import t

LOOPBACK = ("localhost", "127.0.0.1", "::1")
LOOK_S = 0.5  # how old what another tab has added may be
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
        if not st.user.is_logged_in:
            return None
    except AttributeError:  # a host without a login has no such field
        return None
    # a name is unique with its issuer only, and may be longer than a column
    named = f"{st.user.get('iss', '')}\n{st.user.get('sub') or st.user.get('email')}"
    return hashlib.sha256(named.encode()).hexdigest()


@st.cache_resource(show_spinner=False, max_entries=4)
def _engine(url: str, file: int | None) -> Any:
    """A database that is ready; of a ``file`` that was deleted meanwhile another one."""
    from study.database import connect

    return connect(url)


# SQLAlchemy can't be imported by two threads at once: each meets modules that the other has half read
_importing = threading.Lock()
_prepared = threading.Event()  # the database was opened once, outside a script run


def prepare() -> None:
    """Open the database of this process, in the warm-up: its libraries take half a second to import."""
    url = os.environ.get("DATABASE_URL") or (logs.file_url() if place() == "file" else None)
    try:
        if url:
            _open_database(url)
    finally:
        _prepared.set()


def is_at_hand() -> bool:
    """Whether the log can be read without holding up a page."""
    return state.reader().log is not None or place() == "browser" or _prepared.is_set()


def reader_log() -> Log:
    """The log of this visit's reader. A database that can't be had is told once, and the visit goes on without it."""
    reader = state.reader()
    if reader.log is None:
        reader.progress, reader.log_failed = None, ""
        reader.log = _open()
        reader.log_file = logs.file_mark()
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
        from alembic.util import CommandError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            if not url.startswith("sqlite"):
                return _engine(url, None)
            if logs.file_mark() is None:
                from study.database import connect

                connect(url).dispose()  # makes the file; the connections that are kept stand for that very file
            return _engine(url, logs.file_mark())
        # the driver is missing; the tables are of a newer app; the host does not answer; the folder can't be made
        except (SQLAlchemyError, CommandError, ImportError, OSError) as error:
            log.error("progress can't be kept: %s", error)
            return error


def progress() -> Progress:
    """What the log says, computed anew when it has changed, here or in another tab; asked for often in a script run,
    so it looks only once in a while."""
    reader, clock = state.reader(), time.monotonic()
    if reader.progress is not None and clock - reader.progress.looked < LOOK_S:
        return reader.progress.progress
    try:
        held = _current_log()
        known, mark = reader.progress, held.mark()
        if known is None or known.mark != mark:
            known = reader.progress = _folded(held, mark, known)
        if place() != "browser":
            reader.browser.lost = held.lost
        if isinstance(held, SqlLog):  # not one that stands in for a database that could not be had
            reader.log_failed = ""
    except NotKept as failed:  # the pages go on with what is known; the next look tries again
        log.error("progress can't be read: %s", failed.__cause__)
        reader.log_failed = str(failed)
        known = reader.progress = reader.progress or state.Folded((-1, None), Progress(), [])
    known.looked = clock
    return known.progress


def _folded(held: Log, mark: tuple[int, object], known: state.Folded | None) -> state.Folded:
    """What the log says now; where it has grown by what was recorded here alone, without reading all of it again."""
    if known is not None and known.recorded and mark[0] == known.mark[0] + len(known.recorded):
        events = known.events + known.recorded
    else:
        events = held.events()
    return state.Folded(mark, fold(events), events)


def _current_log() -> Log:
    """The reader's log, opened anew when its file was deleted: a connection would go on writing into a lost one."""
    reader = state.reader()
    if reader.log is not None and place() == "file" and reader.log_file != logs.file_mark():
        reader.log = reader.progress = None
    return reader_log()


def _say_not_kept(failed: NotKept) -> None:
    log.error("progress can't be kept: %s", failed.__cause__)
    st.toast(t("not_kept", kind=failed), icon=":material/error:", duration="long")


def look_again() -> None:
    """What is asked next is what the log says now."""
    if state.reader().progress is not None:
        state.reader().progress.looked = -math.inf


def record(*events: Event) -> bool:
    """Add to the log; whether it is kept, in a browser when the page is drawn. What is not is said."""
    if not events:
        return True
    reader = state.reader()
    try:
        _current_log().append(events)
    except NotKept as failed:
        _say_not_kept(failed)
        return False
    if reader.progress is not None:
        reader.progress.recorded += events
    look_again()
    reader.told.pop("forget", None)  # there is something again
    if place() == "browser":
        reader.browser.lines += [write_line(event) for event in events]
    return True


def predicted(
    experiment: str, metric: str, value: float, measured: float, claim: str = "", *, is_direction: bool = False
) -> None:
    """A number that was committed to before a run, and what came out. What is no number has no place in a log."""
    if math.isfinite(value) and math.isfinite(measured):
        record(
            Prediction(
                at=now(),
                ask="direction" if is_direction else "value",
                experiment=experiment,
                metric=metric,
                predicted=value,
                measured=measured,
                claim=claim,
            )
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


def imported(events: Sequence[Event]) -> int | None:
    """Take the events of a file into the log, and into the visitor's browser where that is the place.

    Returns how many were new; None where they can't be kept.
    """
    try:
        new = _current_log().append(events)
    except NotKept as failed:
        _say_not_kept(failed)
        return None
    state.reader().progress = None
    if place() == "browser":
        state.reader().browser.imported += [write_line(event) for event in events]
    return new


def forget() -> bool:
    """Delete the reader's whole log, here and in their browser; whether that was done."""
    reader = state.reader()
    try:
        _current_log().forget()
    except NotKept as failed:
        _say_not_kept(failed)
        return False
    reader.progress = reader.plan = None
    reader.restored, reader.browser.lost, reader.more_minutes = 0, 0, (None, 0.0)
    for held in (reader.asking, reader.exam_runs, reader.verdicts, reader.refuted):
        held.clear()
    if place() == "browser":
        before = reader.browser
        end = before.sent + len(before.lines)  # acknowledgements under way speak of these
        reader.browser = state.InBrowser(read=True, forget=now().isoformat(), sent=end)
    return True


def keep() -> None:
    """Drawn with whatever may record something: takes the log out of the visitor's browser, and brings it there."""
    if place() != "browser":
        return
    reader = state.reader()
    held = reader.browser
    answer = _saved_log(
        data={
            "visit": reader.id,
            "lines": held.lines,
            "end": held.sent + len(held.lines),
            "imported": held.imported,
            "read": held.read,
            "forget": held.forget,
            "forgotten": held.forgotten,
            "failed": held.failed,
        },
        key="saved_log",
        on_log_change=lambda: None,
        on_kept_change=lambda: None,
        on_forgot_change=lambda: None,
        height=0,
    )
    if _is_ours(answer.forgot) and answer.forgot["forgotten"] == held.forget:
        held.forgotten, held.forget = held.forget, ""
    if _is_ours(answer.kept):
        if answer.kept["end"] > held.sent:
            del held.lines[: answer.kept["end"] - held.sent]
            held.sent = answer.kept["end"]
        if answer.kept["imported"] == len(held.imported):
            held.imported = []
    if _is_ours(answer.log):
        _take(answer.log)
        st.rerun()


def _is_ours(answer: Any) -> bool:
    """Whether an answer of the browser is for this visit: a page that slept is taken up by another one."""
    return bool(answer) and answer["visit"] == state.reader().id


def _take(answer: Mapping[str, Any]) -> None:
    """What the browser holds becomes this visit's log; or why it holds nothing."""
    reader = state.reader()
    held = reader.browser
    if answer["failed"]:
        held.failed = reader.log_failed = str(answer["failed"])
        return
    if held.read and held.forgotten != answer["forgotten"]:
        # another tab has forgotten: what was older is gone here too, what was recorded meanwhile is not
        forgotten = datetime.fromisoformat(str(answer["forgotten"]))
        newer = [event for event in reader_log().events() if event.at > forgotten]
        reader.log = MemoryLog(newer)
        held.sent += len(held.lines)
        held.lines = [write_line(event) for event in newer]
    held.read, held.forgotten = True, str(answer["forgotten"])
    events, held.lost = logs.readable(str(answer["held"]).split("\n"))
    reader_log().append(events)
    reader.progress = None


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
    if failed and place() == "browser":
        st.warning(t("log_failed_browser", kind=failed), icon=":material/warning:")
        return
    lost = state.reader().browser.lost
    if lost:
        st.warning(t("log_lines_lost", n=lost), icon=":material/warning:")
    if failed:
        st.warning(t("log_failed", kind=failed), icon=":material/warning:")
