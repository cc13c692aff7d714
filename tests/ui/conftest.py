"""What a page leaves behind in the process is put back: other tests start processes by ``__main__``."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _main_stays_pytest():
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main  # Streamlit puts the page's script there
