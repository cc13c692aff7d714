"""The log of a reader's events, behind one small interface, and the places where it is kept.

A log only grows. Adding an event whose id it holds already changes nothing, so a request that is sent twice counts
once, and importing is a union. ``forget`` is the one exception: it deletes a reader's whole log, because the reader
says so.

Stores: :class:`SqlLog` for SQLite and PostgreSQL alike; :class:`MemoryLog` for a visit whose log the browser keeps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from study.events import Event, read_line, read_lines, write_line

APP = "attention-interview-lab"
FILE = "progress.sqlite3"
LARGEST_IMPORT = 50_000_000  # characters


class Log(Protocol):
    """What a page knows of a log."""

    def events(self) -> list[Event]:
        """Everything, in the order of arrival."""

    def size(self) -> int:
        """How many events there are: another number is another log."""

    def append(self, events: Sequence[Event]) -> int:
        """Keep events, all or none; how many were new. What this returns for is safe from a killed process."""

    def forget(self) -> None:
        """Delete the whole log of this reader."""


class MemoryLog:
    """A log for as long as a visit lasts."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events = {event.id: event for event in events}
        self._lock = threading.Lock()

    def events(self) -> list[Event]:
        """Everything, in the order of arrival."""
        with self._lock:
            return list(self._events.values())

    def size(self) -> int:
        """How many events there are."""
        return len(self._events)

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


class SqlLog:
    """The log of one reader in a database that many may share."""

    def __init__(self, engine: Any, reader: str) -> None:
        self._engine, self._reader = engine, reader

    def events(self) -> list[Event]:
        """Everything, in the order of time."""
        from sqlalchemy import select

        from study.database import EVENTS

        mine = select(EVENTS.c.line).where(EVENTS.c.reader == self._reader).order_by(EVENTS.c.at, EVENTS.c.id)
        with self._engine.connect() as connection:
            return [read_line(line) for (line,) in connection.execute(mine)]

    def size(self) -> int:
        """How many events there are."""
        from sqlalchemy import func, select

        from study.database import EVENTS

        with self._engine.connect() as connection:
            count = select(func.count()).where(EVENTS.c.reader == self._reader)
            return int(connection.execute(count).scalar_one())

    def append(self, events: Sequence[Event]) -> int:
        """Keep events in one transaction; how many were new."""
        from study.database import insert_new

        rows = [
            {"reader": self._reader, "id": e.id, "at": e.at, "kind": e.kind, "line": write_line(e)}
            for e in {event.id: event for event in events}.values()
        ]
        with self._engine.begin() as connection:
            return insert_new(connection, rows)

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


@dataclass(frozen=True)
class Imported:
    """What an import did: events that were new, and events that the log held already."""

    new: int
    known: int


def export_lines(log: Log) -> str:
    """The whole log as JSON lines."""
    return "".join(write_line(event) + "\n" for event in log.events())


def import_lines(log: Log, text: str) -> Imported:
    """Take the events of an exported log into a log: the union of both.

    All lines are read before one is kept: a damaged file changes nothing.

    Raises: BadLine; ValueError for a file that is larger than any log of ours.
    """
    if len(text) > LARGEST_IMPORT:
        raise ValueError(f"got {len(text)} characters; a log has at most {LARGEST_IMPORT}")
    events = list({event.id: event for event in read_lines(text.splitlines())}.values())
    new = log.append(events)
    return Imported(new, len(events) - new)
