"""The log of a reader's events, behind one small interface, and the places where it is kept.

A log only grows. Adding an event whose id it holds already changes nothing, so a request that is sent twice counts
once, and importing is a union. ``forget`` is the one exception: it deletes a reader's whole log, because the reader
says so.

Stores: :class:`SqlLog` for SQLite and PostgreSQL alike; :class:`MemoryLog` for a visit whose log the browser keeps.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from study.events import BadLine, Event, read_line, read_lines, write_line

APP = "attention-interview-lab"
FILE = "progress.sqlite3"
LARGEST_IMPORT = 20_000_000  # characters; a browser's message to the server has at most 50 MB


class NotKept(Exception):
    """The store of a log can't be read or written now; says the kind of error."""


@contextlib.contextmanager
def _asking_the_store() -> Iterator[None]:
    """A database's errors as one kind. Raises: NotKept."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, OSError) as error:
        raise NotKept(type(error).__name__) from error


class Log(Protocol):
    """What a page knows of a log. ``lost``: lines of it that are no events, of a newer app or damaged; they stay."""

    lost: int

    def events(self) -> list[Event]:
        """Everything, in the order of arrival."""

    def size(self) -> int:
        """How many events there are."""

    def mark(self) -> tuple[int, object]:
        """The number of its lines, and something that differs with it when the log does."""

    def append(self, events: Sequence[Event]) -> int:
        """Keep events, all or none; how many were new. What this returns for is safe from a killed process."""

    def forget(self) -> None:
        """Delete the whole log of this reader."""


class MemoryLog:
    """A log for as long as a visit lasts."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events = {event.id: event for event in events}
        self._forgotten = 0  # times
        self.lost = 0
        self._lock = threading.Lock()

    def events(self) -> list[Event]:
        """Everything, in the order of arrival."""
        with self._lock:
            return list(self._events.values())

    def size(self) -> int:
        """How many events there are."""
        return len(self._events)

    def mark(self) -> tuple[int, object]:
        """How many there are, and how often it was forgotten."""
        return len(self._events), self._forgotten

    def append(self, events: Sequence[Event]) -> int:
        """Keep events; how many were new."""
        with self._lock:
            before = len(self._events)
            for event in events:
                self._events.setdefault(event.id, event)
            return len(self._events) - before

    def forget(self) -> None:
        """Delete everything."""
        with self._lock:
            self._events.clear()
            self._forgotten += 1


class SqlLog:
    """The log of one reader in a database that many may share. Its methods raise NotKept when that can't be had."""

    def __init__(self, engine: Any, reader: str) -> None:
        self._engine, self._reader = engine, reader
        self.lost = 0

    @_asking_the_store()
    def events(self) -> list[Event]:
        """Everything, in the order of time."""
        from sqlalchemy import select

        from study.database import EVENTS

        mine = select(EVENTS.c.line).where(EVENTS.c.reader == self._reader).order_by(EVENTS.c.at, EVENTS.c.id)
        with self._engine.connect().execution_options(reads=True) as connection:
            found, self.lost = readable([line for (line,) in connection.execute(mine)])
        return found

    def size(self) -> int:
        """How many events there are."""
        return self.mark()[0]

    @_asking_the_store()
    def mark(self) -> tuple[int, object]:
        """Their number and the time of the newest: together they differ when the log does."""
        from sqlalchemy import func, select

        from study.database import EVENTS

        wanted = select(func.count(), func.max(EVENTS.c.at)).where(EVENTS.c.reader == self._reader)
        with self._engine.connect().execution_options(reads=True) as connection:
            count, newest = connection.execute(wanted).one()
        return int(count), newest

    @_asking_the_store()
    def append(self, events: Sequence[Event]) -> int:
        """Keep events in one transaction; how many were new."""
        from study.database import insert_new

        rows = [
            {"reader": self._reader, "id": e.id, "at": e.at, "kind": e.kind, "line": write_line(e)}
            for e in {event.id: event for event in events}.values()
        ]
        with self._engine.begin() as connection:
            return insert_new(connection, rows)

    @_asking_the_store()
    def forget(self) -> None:
        """Delete all events of this reader, of nobody else."""
        from sqlalchemy import delete

        from study.database import EVENTS

        with self._engine.begin() as connection:
            connection.execute(delete(EVENTS).where(EVENTS.c.reader == self._reader))


def data_folder() -> Path:
    """Where progress lies on this machine: ``DATA_DIR``, or the user's data directory."""
    if os.environ.get("DATA_DIR"):
        return Path(os.environ["DATA_DIR"])
    from platformdirs import user_data_path

    return user_data_path(APP, appauthor=False)


def file_url() -> str:
    """The file of this machine's reader, as a database."""
    return f"sqlite:///{data_folder() / FILE}"


def file_mark() -> int | None:
    """Which file that is now; None while there is none. A file that was deleted and made anew is another one."""
    with contextlib.suppress(OSError):
        return (data_folder() / FILE).stat().st_ino
    return None


def readable(lines: Iterable[str]) -> tuple[list[Event], int]:
    """The events of a log's lines, and the number of lines that are none: one damaged line must not cost the others."""
    events, lost = [], 0
    for line in filter(str.strip, lines):
        try:
            events.append(read_line(line))
        except BadLine:
            lost += 1
    return events, lost


def export_lines(log: Log) -> str:
    """The whole log as JSON lines."""
    return "".join(write_line(event) + "\n" for event in log.events())


def import_lines(log: Log, text: str) -> int:
    """Take the events of an exported log into a log: the union of both.

    All lines are read before one is kept: a damaged file changes nothing. Returns how many were new.

    Raises: BadLine; ValueError for a file that is larger than any log of ours.
    """
    if len(text) > LARGEST_IMPORT:
        raise ValueError(f"got {len(text)} characters; a log has at most {LARGEST_IMPORT}")
    # not splitlines: it also cuts at separators that may stand inside an event
    events = list({event.id: event for event in read_lines(text.split("\n"))}.values())
    return log.append(events)
