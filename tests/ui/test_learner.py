"""Where a reader's log is kept, that opening it disturbs nothing, and what becomes of the pages when it fails."""

import sqlite3

import pytest

from study.events import now
from study.log import FILE
from tests.ui.test_pages import opened
from tests.ui.test_quiz import button, kept
from ui import learner
from ui.frame import PAGES


def test_the_database_is_opened_by_one_thread_at_a_time(monkeypatch):
    """SQLAlchemy, imported by two threads at once, ends in an ImportError of one: in one cold start of three or so."""
    held = []
    monkeypatch.setattr(learner, "_engine", lambda url, file: held.append(learner._importing.locked()))
    learner._open_database("sqlite://")
    monkeypatch.setattr(learner, "place", lambda: "file")
    learner.prepare()
    assert len(held) >= 2
    assert all(held)


def test_a_hosted_app_without_a_login_leaves_the_log_to_the_browser(monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    for address, place in (("0.0.0.0", "browser"), ("localhost", "file"), ("127.0.0.1", "file")):
        monkeypatch.setattr(learner.st, "get_option", lambda name, address=address: address)
        assert learner.place() == place
    monkeypatch.setenv("DATABASE_URL", "postgresql://somewhere/db")  # nobody is logged in
    assert learner.place() == "file"
    monkeypatch.setenv("DATA_DIR", "/somewhere")
    monkeypatch.delenv("DATABASE_URL")
    monkeypatch.setattr(learner.st, "get_option", lambda name: "0.0.0.0")
    assert learner.place() == "file"


@pytest.mark.parametrize("page", PAGES)
def test_a_line_that_is_no_event_costs_only_itself(page, folder):
    app = opened("quiz", "en")
    button(app, "Show the answer").click().run()
    button(app, "Again").click().run()
    with sqlite3.connect(folder / FILE) as file:
        for number, line in enumerate(('{"v":2,"kind":"dream"}', "no JSON")):
            row = ("reader", f"{number:032x}", int(now().timestamp() * 1e6), "dream", line)
            file.execute("insert into events (reader, id, at, kind, line) values (?, ?, ?, ?, ?)", row)
    app = opened(page, "en")
    assert not app.exception
    assert not app.error
    if page in ("quiz", "progress"):
        assert any("can't be read: 2" in w.value for w in app.warning)


@pytest.mark.parametrize("page", PAGES)
def test_a_file_that_is_damaged_while_the_app_runs_blocks_no_page(page, folder):
    opened("quiz", "en")
    for file in folder.glob(f"{FILE}*"):
        file.write_bytes(b"not a database" * 500)
    app = opened(page, "en")
    assert not app.exception
    assert not app.error


def test_a_file_that_is_deleted_while_the_app_runs_is_made_anew(folder):
    app = opened("quiz", "en")
    button(app, "Show the answer").click().run()
    button(app, "Again").click().run()
    for file in folder.glob(f"{FILE}*"):
        file.unlink()
    app.run()
    button(app, "Show the answer").click().run()
    button(app, "Again").click().run()
    assert not app.exception
    assert len(kept(folder)) == 1  # of after that


def test_what_can_not_be_written_now_is_said_and_stays_on_the_table(folder, monkeypatch):
    monkeypatch.setattr("study.database.BUSY_MS", 50)
    learner._engine.clear()
    app = opened("quiz", "en")
    button(app, "Show the answer").click().run()
    lock = sqlite3.connect(folder / FILE, isolation_level=None)
    lock.execute("begin immediate")
    button(app, "Again").click().run()
    assert not app.exception
    assert any("Not kept" in toast.value for toast in app.toast)
    assert button(app, "Again")
    lock.execute("rollback")
    lock.close()
    button(app, "Again").click().run()
    assert not app.exception
    assert len(kept(folder)) == 1
    learner._engine.clear()


def test_a_busy_store_forgets_nothing_and_loses_no_words(folder, monkeypatch):
    monkeypatch.setattr("study.database.BUSY_MS", 50)
    learner._engine.clear()
    app = opened("quiz", "en")
    lock = sqlite3.connect(folder / FILE, isolation_level=None)
    lock.execute("begin immediate")
    words = next(area for area in app.text_area if "report" in area.key)
    words.set_value("the key is wrong")
    button(app, "Keep the report").click().run()
    assert any("Not kept" in toast.value for toast in app.toast)
    assert next(area for area in app.text_area if "report" in area.key).value == "the key is wrong"
    lock.execute("rollback")
    button(app, "Keep the report").click().run()
    app = opened("progress", "en", view="log")
    app.text_input(key="forget-word").set_value("forget").run()
    lock.execute("begin immediate")
    button(app, "Delete my log").click().run()
    assert not app.exception
    assert not any("deleted" in m.value for m in app.markdown)
    lock.execute("rollback")
    lock.close()
    assert len(kept(folder)) == 1
    learner._engine.clear()
