"""The harness sees what it is there to see: on a page of its own, with one fault at a time."""

from __future__ import annotations

import pytest
from playwright.sync_api import Error

from tools import browser
from tools.browser import assert_clean, serve


@pytest.fixture(scope="module")
def tiny():
    with serve("tests/browser/apps/tiny.py") as running:
        yield running


def test_a_clean_page_is_clean_in_both_languages(tiny, open_reader):
    for language, title in [("en", "Tiny lab"), ("zh", "小实验室")]:
        visit = open_reader(tiny, language=language)
        visit.goto(lang=language)
        assert title in visit.texts()
        assert visit.page.locator(".katex").count() == 1
        assert_clean(visit)


def test_each_fault_is_seen(tiny, open_reader):
    faults = {
        "binding": "a binding that was not filled",
        "nan": "not a number",
        "NaN": "not a number",
        "formula": "a formula that was not typeset",
        "citation": "a citation that was not resolved",
        "bold": "bold that Markdown did not see",
        "katex": "KaTeX refused",
    }
    visit = open_reader(tiny)
    for bad, seen in faults.items():
        visit.goto(bad=bad)
        found = visit.problems()
        assert [p for p in found if p.startswith(seen)], (bad, found)
        assert len(found) == 1, (bad, found)


def test_an_exception_is_seen_on_the_page_and_in_the_log(open_reader):
    with serve("tests/browser/apps/tiny.py") as own:
        visit = open_reader(own)
        visit.goto(bad="exception")
        found = visit.problems()
    assert any(p.startswith("exception") for p in found)
    assert any(p.startswith("the server's log") for p in found)


def test_console_errors_are_seen(tiny, open_reader):
    visit = open_reader(tiny)
    visit.goto()
    visit.page.evaluate("() => console.error('from a test')")
    with visit.page.expect_event("pageerror"):
        visit.page.evaluate("() => setTimeout(() => { throw new Error('thrown') }, 0)")
    assert any("from a test" in p for p in visit.problems())
    assert any("page error" in p and "thrown" in p for p in visit.problems())


def test_a_chart_has_marks_for_each_series_and_a_slider_moves_them(tiny, open_reader):
    visit = open_reader(tiny)
    visit.goto()
    drawn = visit.marks()
    assert drawn["stroke #ff0000"] > 0
    assert drawn["stroke #0000ff"] > 0
    slider = visit.page.get_by_role("slider")
    visit.act(lambda: slider.press("ArrowRight"))
    assert "d_k = 9" in visit.texts()


def test_a_poll_that_the_server_drops_is_not_waited_for(tiny, open_reader):
    """A fragment that went with a run of the page is polled once more; nobody answers that."""
    visit = open_reader(tiny)
    visit.goto(gone="yes")
    visit.page.wait_for_timeout(1500)  # forgotten after a second; polled ten times a second all along
    visit.idle(seconds=5)
    assert visit.runs == 1


def test_act_waits_for_a_slow_run(tiny, open_reader):
    visit = open_reader(tiny)
    visit.goto()
    before = visit.runs
    visit.act(lambda: visit.page.get_by_role("button", name="Slow").click())
    assert visit.runs > before
    assert visit.page.get_by_test_id("stApp").get_attribute("data-test-script-state") == "notRunning"


def test_no_browser_is_an_error_not_a_skip(playwright, monkeypatch):
    monkeypatch.setattr(browser, "find_chromium", lambda: "/nowhere/chromium")
    with pytest.raises(Error, match="/nowhere/chromium"):
        browser.launch(playwright)


def test_a_script_that_does_not_start_is_told_with_the_servers_words(tmp_path):
    with pytest.raises(RuntimeError, match="does not exist"), serve(tmp_path / "nothing.py"):
        pass


def test_the_server_is_gone_afterwards():
    with serve("tests/browser/apps/tiny.py") as own:
        assert own.process.poll() is None
    assert own.process.poll() is not None
