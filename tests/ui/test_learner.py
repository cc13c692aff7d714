"""Where a reader's log is kept, and that opening it disturbs nothing."""

from ui import learner


def test_the_database_is_opened_by_one_thread_at_a_time(monkeypatch):
    """SQLAlchemy, imported by two threads at once, ends in an ImportError of one: in one cold start of three or so."""
    held = []
    monkeypatch.setattr(learner, "_engine", lambda url: held.append(learner._importing.locked()))
    learner._open_database("sqlite://")
    monkeypatch.setattr(learner, "place", lambda: "file")
    learner.prepare()
    assert held == [True, True]


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
