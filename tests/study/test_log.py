"""Logs and their stores: one interface, one conformance suite; nothing acknowledged is ever lost."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from study import log as logs
from study.database import connect
from study.events import BadLine, Report, Review, read_line, write_line
from study.log import MemoryLog, SqlLog, export_lines, import_lines
from tests.study.postgres import another_database, running
from tools.setup_env import find_postgresql

ROOT = Path(__file__).parents[2]
COMMITTED = Path(__file__).parent / "log-v1.jsonl"
START = datetime(2026, 3, 1, 8, 0, 0, 123456, tzinfo=UTC)


def review(n: int = 0) -> Review:
    at = START + timedelta(seconds=n)
    return Review(at=at, item="a/b", mode="review", score=1, rating=3, counts=True)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory):
    """A PostgreSQL of our own on a free port of the loopback, from the system's package."""
    programs = find_postgresql()
    assert programs, "no PostgreSQL here; `make test` sees to it"
    with running(programs, tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def log(request, tmp_path):
    if request.param == "memory":
        yield MemoryLog()
        return
    url = (
        f"sqlite:///{tmp_path}/deep/progress.sqlite3"
        if request.param == "sqlite"
        else request.getfixturevalue("postgres")
    )
    engine = connect(url)
    made = SqlLog(engine, f"reader-{os.urandom(4).hex()}")
    yield made
    engine.dispose()


def test_what_was_appended_comes_back(log):
    events = [read_line(line) for line in COMMITTED.read_text("utf-8").splitlines()]
    assert log.append(events) == len(events)
    assert sorted(log.events(), key=lambda e: e.id) == sorted(events, key=lambda e: e.id)


def test_the_same_event_counts_once(log):
    once = review()
    assert log.append([once]) == 1
    assert log.append([once, once]) == 0
    assert log.append([once, review(1)]) == 1
    assert len(log.events()) == log.size() == 2


def test_an_import_is_a_union(log):
    log.append([review(n) for n in range(3)])
    text = export_lines(log)
    assert import_lines(log, text) == 0
    other = MemoryLog([review(9)])
    assert import_lines(other, text + text) == 3
    assert len(other.events()) == 4


def test_a_damaged_file_imports_nothing(log):
    good = [write_line(review(n)) for n in range(3)]
    with pytest.raises(BadLine) as refused:
        import_lines(log, "\n".join([*good, good[0][:-9], good[1]]))
    assert refused.value.line == 4
    assert log.events() == []


def test_forgetting_deletes_everything(log):
    log.append([review(n) for n in range(3)])
    log.forget()
    assert log.events() == []
    assert log.append([review()]) == 1


def test_the_mark_differs_when_the_log_does(log):
    marks = [log.mark()]
    for change in (
        lambda: log.append([review(1)]),
        lambda: log.append([review(2)]),
        log.forget,
        lambda: log.append([review(3), review(4)]),
    ):
        change()
        marks.append(log.mark())
    assert log.mark() == marks[-1]
    assert all(before != after for before, after in itertools.pairwise(marks))
    assert marks[2] != marks[4]  # as many events, others


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c", "\r", "\n"])
def test_words_with_line_separators_come_back(separator, log):
    told = Report(at=START, item="a/b", words=f"one{separator}two")
    log.append([told])
    other = MemoryLog()
    assert import_lines(other, export_lines(log)) == 1
    assert other.events() == [told]


def test_a_database_that_is_not_there_or_newer_is_an_error_that_the_page_knows(tmp_path, postgres):
    from alembic.util import CommandError
    from sqlalchemy import text
    from sqlalchemy.exc import OperationalError

    url = f"sqlite:///{tmp_path}/p.sqlite3"
    engine = connect(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(CommandError):
        connect(url)
    with pytest.raises(OperationalError):
        connect("postgresql://test@127.0.0.1:1/nowhere")


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_readers_see_no_one_elses(kind, request, tmp_path):
    url = f"sqlite:///{tmp_path}/p.sqlite3" if kind == "sqlite" else request.getfixturevalue("postgres")
    engine = connect(url)
    mine, other = SqlLog(engine, f"mine-{kind}"), SqlLog(engine, f"other-{kind}")
    shared = review()
    assert mine.append([shared]) == other.append([shared]) == 1  # the same id, of two readers
    mine.forget()
    assert other.events() == [shared]
    engine.dispose()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_many_threads_append_at_once(kind, request, tmp_path):
    url = f"sqlite:///{tmp_path}/p.sqlite3" if kind == "sqlite" else request.getfixturevalue("postgres")
    engine = connect(url)
    log, new = SqlLog(engine, f"crowd-{kind}"), []
    same = review()

    def work(n: int) -> None:
        new.append(log.append([review(100 * n + k) for k in range(20)] + [same]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(new) == len(log.events()) == 8 * 20 + 1
    engine.dispose()


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_several_processes_may_make_the_database_at_once(kind, request, tmp_path):
    url = f"sqlite:///{tmp_path}/p.sqlite3"
    if kind == "postgresql":
        url = another_database(request.getfixturevalue("postgres"))
    program = "import sys; from study.database import connect; connect(sys.argv[1])"
    started = [
        subprocess.Popen([sys.executable, "-c", program, url], cwd=ROOT, stderr=subprocess.PIPE) for _ in range(4)
    ]
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert all(code == 0 for _, code in ended), ended
    engine = connect(url)
    assert SqlLog(engine, "me").append([review()]) == 1
    engine.dispose()


_WRITER = """
import sys
from datetime import UTC, datetime
from study.database import connect
from study.events import Review, write_line
from study.log import SqlLog
log = SqlLog(connect(sys.argv[1]), "me")
while True:
    event = Review(at=datetime.now(UTC), item="a/b", mode="review", score=1, rating=3, counts=True)
    log.append([event])
    print(event.id, flush=True)  # acknowledged
"""


@pytest.mark.slow
def test_a_killed_process_loses_no_acknowledged_event(tmp_path):
    url = f"sqlite:///{tmp_path}/p.sqlite3"
    acknowledged: set[str] = set()
    for attempt in range(50):
        process = subprocess.Popen([sys.executable, "-c", _WRITER, url], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(1 + attempt % 7):  # killed after another number of events each time, in the middle of the next
            acknowledged.add(process.stdout.readline().strip())
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        # the last line may have been cut off by the kill: then it was not acknowledged
        acknowledged |= {line for line in rest.splitlines() if len(line) == 32}
    engine = connect(url)
    kept = {event.id for event in SqlLog(engine, "me").events()}
    engine.dispose()
    assert "" not in acknowledged
    assert acknowledged <= kept
    assert len(kept) <= len(acknowledged) + 50  # at most the one each that was under way


def test_the_file_lies_where_the_host_says_or_in_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    assert logs.file_url() == f"sqlite:///{tmp_path}/{logs.FILE}"
    monkeypatch.delenv("DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    assert logs.APP in logs.file_url()


def test_a_file_larger_than_any_log_is_refused():
    with pytest.raises(ValueError, match="at most"):
        import_lines(MemoryLog(), " " * (logs.LARGEST_IMPORT + 1))


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), contextlib.closing(connect(f"sqlite:///{tmp_path}/file/p.sqlite3")):
        pass


def test_an_event_in_the_table_is_never_changed(tmp_path):
    engine = connect(f"sqlite:///{tmp_path}/p.sqlite3")
    log, first = SqlLog(engine, "me"), Report(at=START, item="a/b", words="first")
    log.append([first])
    log.append([Report(id=first.id, at=START, item="a/b", words="second")])
    assert log.events() == [first]
    engine.dispose()


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        ('{"v":1,"kind":"dream"}', "log_line_newer", "kind"),
        ('{"kind":"dream","name":"of another program"}', "log_line_damaged", "kind"),
        ('{"v":1,"id":"%s","at":"2026-03-01T08:00:00Z","kind":"undo","of":"x"}' % ("a" * 32), "log_line_damaged", "of"),
        ("no JSON", "log_line_damaged", "JSON"),
    ],
)
def test_what_is_wrong_with_a_line_is_named_in_no_language(line, reason, detail):
    with pytest.raises(BadLine) as refused:
        read_line(line)
    assert (refused.value.reason, refused.value.detail) == (reason, detail)


def test_an_exam_has_no_attempt_below_zero():
    """Its reviews could not be kept, and its page would fail for ever."""
    line = '{"v":1,"id":"%s","at":"2026-03-01T08:00:00Z","kind":"exam","items":[["a/b",-5]],"minutes":1}' % ("a" * 32)
    with pytest.raises(BadLine):
        read_line(line)
