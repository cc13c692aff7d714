"""What a page leaves behind in the process is put back: other tests start processes by ``__main__``."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _main_stays_pytest():
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main  # Streamlit puts the page's script there


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the reader's log of a page lies, for tests that look into it."""
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    return tmp_path
