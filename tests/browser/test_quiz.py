"""The Quiz and Progress pages in a real browser: keys, and a log that lives in it."""

import json

import pytest

from tools import browser as harness

KEY = "attention-interview-lab.log"
HOSTED = ["--server.address", "0.0.0.0"]  # not this machine alone: the visitor's browser keeps the log


@pytest.fixture(scope="module")
def hosted():
    with harness.serve(options=HOSTED, environment={"DATA_DIR": ""}) as running:
        yield running


def held(visit) -> list[dict]:
    """The log in the browser."""
    text = visit.page.evaluate(f"localStorage.getItem({KEY!r})") or ""
    return [json.loads(line) for line in text.splitlines()]


def wait_for(visit, number: int) -> list[dict]:
    """The log in the browser once it holds so many events."""
    visit.page.wait_for_function(
        f"(localStorage.getItem({KEY!r}) ?? '').split('\\n').filter(Boolean).length >= {number}", timeout=60_000
    )
    return held(visit)


def press(visit, key):
    # a button is painted first, and only then listened for by its key
    visit.page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
    visit.act(lambda: visit.page.keyboard.press(key))


def grade(visit):
    """See the answer to an item, then grade it, both by key."""
    press(visit, "s")
    # not after any run of the page: the log in the browser causes some too
    visit.page.get_by_role("button", name="Again").first.wait_for()
    press(visit, "1")


def graded(hosted, open_reader):
    """A visitor who has graded one answer by its keys, which are shown on the buttons, and the event of it."""
    visit = open_reader(hosted)
    visit.goto("quiz", mode="review", lang="en")
    visit.page.get_by_role("button", name="Show the answer").wait_for()
    grade(visit)
    (first,) = wait_for(visit, 1)
    return visit, first


def test_a_log_in_the_browser_outlives_the_page_and_another_visitor_sees_none_of_it(hosted, open_reader):
    visit, first = graded(hosted, open_reader)
    assert (first["kind"], first["rating"], first["mode"]) == ("review", 1, "review")
    visit.goto("progress", view="history", lang="en")
    visit.page.get_by_text("Answers: 1.").wait_for()
    visit.goto("quiz", mode="review", lang="en")  # a new visit of the same browser
    visit.page.get_by_text("1 done").wait_for()
    press(visit, "u")
    assert [event["kind"] for event in wait_for(visit, 2)] == ["review", "undo"]
    visit.page.get_by_text("0 done").wait_for()
    other = open_reader(hosted)
    other.goto("quiz", mode="review", lang="en")
    other.page.get_by_text("0 done").wait_for()
    assert held(other) == []
    harness.assert_clean(visit)
    harness.assert_clean(other)


def test_a_damaged_line_costs_only_itself(hosted, open_reader):
    visit = open_reader(hosted)
    visit.goto("progress", view="log", lang="en")
    good = (
        '{"v":1,"id":"'
        + "a" * 32
        + '","at":"2026-03-01T08:00:00Z","kind":"report","item":"code-mha/recall","words":"?"}'
    )
    visit.page.evaluate(f"text => localStorage.setItem({KEY!r}, text)", f"{good}\nnot an event\n")
    visit.goto("progress", view="log", lang="en")
    visit.page.get_by_text("Events: 1 · answers: 0").wait_for()
    visit.page.get_by_text("Lines of the log that can't be read: 1").wait_for()
    assert "not an event" in visit.page.evaluate(f"localStorage.getItem({KEY!r})")


def test_forgetting_empties_the_browser_too(hosted, open_reader):
    visit, _ = graded(hosted, open_reader)
    visit.goto("progress", view="log", lang="en")
    forget(visit)
    visit.page.wait_for_function(f"!localStorage.getItem({KEY!r})")
    visit.goto("quiz", mode="review", lang="en")
    visit.page.get_by_text("0 done").wait_for()


def test_what_comes_after_forgetting_stays(hosted, open_reader, tmp_path):
    """More events than the server sends again and again: those that were acknowledged must not be forgotten too."""
    visit, first = graded(hosted, open_reader)
    visit.goto("progress", view="log", lang="en")
    forget(visit)
    visit.page.keyboard.press("Escape")
    many = "".join(json.dumps(first | {"id": f"{n:032x}"}) + "\n" for n in range(150))
    given(visit, tmp_path, many.encode(), "New events: 150; here already: 0.")
    wait_for(visit, 150)
    visit.page.get_by_role("link", name="Quiz").first.click()  # the same visit goes on
    answer = visit.page.get_by_role("button", name="Show the answer")
    answer.or_(visit.page.get_by_role("button", name="Compare with the points")).first.click()
    visit.page.get_by_role("button", name="Again").first.wait_for()
    press(visit, "1")
    ids = {event["id"] for event in wait_for(visit, 151)}
    assert {f"{n:032x}" for n in range(150)} < ids
    assert first["id"] not in ids


def test_a_second_tab_does_not_bring_back_what_was_forgotten(hosted, open_reader):
    visit, first = graded(hosted, open_reader)
    tab = harness.Visit(hosted, visit.page.context.new_page())
    tab.goto("quiz", mode="review", lang="en")
    tab.page.get_by_text("1 done").wait_for()
    visit.goto("progress", view="log", lang="en")
    forget(visit)
    visit.page.wait_for_function(f"!localStorage.getItem({KEY!r})")
    grade(tab)  # with what it records next the tab hears of it
    (left,) = wait_for(tab, 1)
    assert left["id"] != first["id"]
    tab.page.get_by_text("1 done").wait_for()  # what was forgotten is not counted here either


def given(visit, tmp_path, content: bytes, words: str) -> None:
    """Choose a file on the Progress page, and wait for what is said of it."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with visit.page.expect_file_chooser() as chooser:
        visit.page.get_by_role("button", name="Choose a file").click()
    visit.act(lambda: chooser.value.set_files(path))
    visit.page.get_by_text(words).wait_for()


def test_a_log_goes_out_and_in_again_and_a_damaged_file_changes_nothing(hosted, open_reader, tmp_path):
    visit, _ = graded(hosted, open_reader)
    visit.goto("progress", view="log", lang="en")
    with visit.page.expect_download() as coming:
        visit.page.get_by_role("button", name="Export as JSON lines").click()
    exported = coming.value.path().read_bytes()
    assert [json.loads(line)["id"] for line in exported.splitlines()] == [event["id"] for event in held(visit)]
    given(visit, tmp_path, exported, "New events: 0; here already: 1.")
    other = open_reader(hosted)
    other.goto("progress", view="log", lang="en")
    given(other, tmp_path, exported + b"{}\n", "Line 2 is damaged")
    given(other, tmp_path, b"\xff\xfe\x00", "This file holds no event.")
    given(other, tmp_path, json.dumps({"v": 9, "kind": "undo"}).encode(), "newer version")
    assert held(other) == []
    given(other, tmp_path, b"\xef\xbb\xbf" + exported, "New events: 1; here already: 0.")
    assert wait_for(other, 1) == held(visit)


def test_two_tabs_hear_of_each_other_and_an_import_outlives_an_earlier_forgetting(hosted, open_reader, tmp_path):
    visit = open_reader(hosted)
    visit.goto("quiz", mode="review", lang="en")
    visit.page.get_by_role("button", name="Show the answer").wait_for()
    tab = harness.Visit(hosted, visit.page.context.new_page())
    tab.goto("progress", view="log", lang="en")
    tab.page.get_by_text("Events: 0").wait_for()
    grade(visit)
    (first,) = wait_for(visit, 1)
    tab.page.get_by_text("Events: 1").wait_for()  # without anything done here
    visit.goto("progress", view="log", lang="en")
    forget(visit)
    tab.page.get_by_text("Events: 0").wait_for()
    given(tab, tmp_path, (json.dumps(first) + "\n").encode(), "New events: 1; here already: 0.")
    assert wait_for(tab, 1) == [first]
    tab.goto("progress", view="log", lang="en")
    tab.page.get_by_text("Events: 1").wait_for()


def forget(visit) -> None:
    """Delete the log, as a reader does on the Progress page."""
    visit.page.get_by_role("button", name="Forget everything").click()
    visit.page.get_by_label("Type “forget” to go on").fill("forget")
    now = visit.page.get_by_role("button", name="Delete my log")
    now.and_(visit.page.locator(":enabled")).wait_for()
    visit.act(now.click)
    visit.page.get_by_text("Your log is deleted.").wait_for()


def test_a_day_that_is_done_leads_to_practice(app, open_reader):
    visit = open_reader(app)
    visit.goto("progress", view="plan", lang="en")
    visit.page.get_by_role("spinbutton", name="New items a day").fill("0")
    visit.act(lambda: visit.page.get_by_role("spinbutton", name="New items a day").press("Enter"))
    visit.goto("quiz", mode="review", lang="en")
    visit.act(lambda: visit.page.get_by_role("button", name="Practise something").click())
    visit.page.get_by_text("Practice is logged").wait_for()
    assert "mode=practice" in visit.page.url
    visit.goto("progress", view="plan", lang="en")
    visit.page.get_by_role("spinbutton", name="New items a day").fill("10")
    visit.act(lambda: visit.page.get_by_role("spinbutton", name="New items a day").press("Enter"))
