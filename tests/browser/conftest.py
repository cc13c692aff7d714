"""A real Chromium and servers of our own. What finds no browser fails; nothing here skips."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from tools import browser as harness

HERE = Path(__file__).parent
FAILURES = harness.ROOT / "out" / "failures"
_REPORT = pytest.StashKey[pytest.TestReport]()


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.xdist_group("browser"))  # one browser and one shared server for all of them


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.stash[_REPORT] = report
    return report


@pytest.fixture(scope="session")
def playwright():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def chromium(playwright):
    browser = harness.launch(playwright)
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def app():
    """One server for all tests that don't need a cold one."""
    with harness.serve() as running:
        yield running


@pytest.fixture
def cold_app():
    """A server that nobody has opened yet."""
    with harness.serve() as running:
        yield running


@pytest.fixture
def open_reader(chromium, request):
    """``open_reader(app, language="en", scheme="light", width=1440)`` gives a Visit with a profile of its own.

    When the test fails, a screenshot of each of its pages lies in out/failures.
    """
    visits = []
    with contextlib.ExitStack() as stack:

        def open_one(app, **reader):
            profile = stack.enter_context(contextlib.closing(harness.context(chromium, **reader)))
            visits.append(harness.Visit(app, profile.new_page()))
            return visits[-1]

        yield open_one
        report = request.node.stash.get(_REPORT, None)
        if report is None or report.failed:
            FAILURES.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]+", "_", request.node.nodeid.split("tests/browser/")[-1])
            for number, visit in enumerate(visits):
                visit.page.screenshot(path=FAILURES / f"{name}-{number}.png", full_page=True)


@pytest.fixture
def reader(app, open_reader):
    """A reader of the shared server, in English, light, on a wide screen."""
    return open_reader(app)
