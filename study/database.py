"""The table of events, in SQLite or PostgreSQL, and how it comes to be. No other module knows SQL.

SQLite: write-ahead log, transactions that take the write lock when they begin (``BEGIN IMMEDIATE``), a wait of some
seconds for another process. PostgreSQL: several replicas may start at once; one migrates, the others wait for it.
Times are kept as whole microseconds: SQLite would give them back without their zone.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Index,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

MIGRATIONS = Path(__file__).parent / "migrations"
BUSY_MS = 10_000
CONNECT_S = 5
LOCK = 7_105_117_101  # of PostgreSQL, for migrations: any number that is ours
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Microseconds(TypeDecorator[datetime]):
    """A time with its zone, kept as microseconds since 1970 in UTC."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> int | None:
        """Into the table."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"got {value} without a zone")
        return (value - _EPOCH) // timedelta(microseconds=1)

    def process_result_value(self, value: int | None, dialect: Any) -> datetime | None:
        """Out of the table."""
        return None if value is None else _EPOCH + timedelta(microseconds=value)


METADATA = MetaData()
EVENTS = Table(
    "events",
    METADATA,
    Column("reader", String(200), primary_key=True),
    Column("id", String(32), primary_key=True),
    Column("at", Microseconds, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("line", Text, nullable=False),
    Index("events_by_time", "reader", "at"),
)


def connect(url: str) -> Engine:
    """A database that is ready: made, and of this version.

    Raises: sqlalchemy.exc.SQLAlchemyError; alembic.util.CommandError for tables of a newer app; ImportError for a
    missing driver; OSError for a folder that can't be made.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
    if parsed.drivername in ("postgres", "postgresql"):  # as hosts write it; the driver is psycopg 3
        parsed = parsed.set(drivername="postgresql+psycopg")
    waits = {"connect_timeout": CONNECT_S} if parsed.get_backend_name() == "postgresql" else {}
    engine = create_engine(parsed, pool_pre_ping=True, connect_args=waits)
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine)
    _migrate(engine)
    return engine


def _prepare_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _settings(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver would begin a transaction late, and without the write lock
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")  # safe from a killed process; a power cut may cost the last write
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get("reads")
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _migrate(engine: Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def insert_new(connection: Connection, rows: list[dict[str, Any]]) -> int:
    """Insert events, those that are there already left as they are; how many were new."""
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    # asked for the ids that went in: the count of rows is not told alike by the two databases
    statement = dialect.insert(EVENTS).on_conflict_do_nothing().returning(EVENTS.c.id)
    return sum(len(connection.execute(statement, row).all()) for row in rows)
