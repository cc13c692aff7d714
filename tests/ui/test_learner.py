"""Where a reader's log is kept, and that opening it disturbs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

AT_ONCE = """
import sys, threading
sys.path.insert(0, ".")
from ui import learner
failed = []
def work(open_it):
    try:
        open_it()
    except BaseException as error:
        failed.append(repr(error))
threads = [threading.Thread(target=work, args=(f,)) for f in (learner.prepare, learner._open_database) * 3]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(failed)
"""


@pytest.mark.parametrize("attempt", range(3))
def test_the_warm_up_and_a_page_may_open_the_log_at_once(attempt, tmp_path, monkeypatch):
    """In a new process: SQLAlchemy, imported by two threads at once, ends in an ImportError of one of them."""
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", AT_ONCE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_a_hosted_app_without_a_login_leaves_the_log_to_the_browser(monkeypatch):
    from ui import learner

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
