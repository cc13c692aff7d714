"""An answer is graded: how long until the next question is painted, against a trivial page that turns to its next line.

Presses alternate between the two pages within one run, so that whatever else the machine does falls on both alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.measure import Row, median_and_p95
from study.database import connect
from study.events import Setting, now
from study.log import FILE, SqlLog
from tools.browser import Visit, context, launch, serve

PRESSES = 30
AIM = 1.5

# Notes when a key went down and when the text of the page last changed.
CLOCK = """
(() => {
  const clock = window.__clock = {key: 0, paint: 0};
  addEventListener('keydown', () => { clock.key = performance.now(); clock.paint = 0; }, true);
  new MutationObserver(records => {
    const inMain = r => (r.target.closest ? r.target : r.target.parentElement)?.closest('[data-testid="stMain"]');
    if (records.some(inMain)) requestAnimationFrame(() => { clock.paint = performance.now(); });
  }).observe(document, {subtree: true, childList: true, characterData: true});
})();
"""
# The page stands when the script has finished and nothing has changed for a while.
PAINTED = """() => {
  const {key, paint} = window.__clock;
  return paint > 0 && !window.__lab.pending && performance.now() - paint > 250 && paint - key;
}"""


def press(visit: Visit, key: str) -> float:
    """Milliseconds from a key to the last change of the page."""
    visit.page.keyboard.press(key)
    return float(visit.page.wait_for_function(PAINTED, timeout=60_000).json_value())


def rows() -> Iterator[Row]:
    """Milliseconds after a grade, and their ratio to the trivial page."""
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {"quiz": [], "trivial": []}
    with ExitStack() as stack, sync_playwright() as playwright:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        database = connect(f"sqlite:///{folder / FILE}")
        SqlLog(database, "reader").append([Setting(at=now(), name="new_a_day", value=200.0)])
        database.dispose()
        servers = {
            "quiz": (serve(environment={"DATA_DIR": str(folder)}), ("quiz",), {"mode": "review", "lang": "en"}),
            "trivial": (serve("bench/apps/turning.py"), (), {}),
        }
        browser = launch(playwright)
        pages = {}
        for name, (server, link, query) in servers.items():
            app = stack.enter_context(server)
            page = context(browser).new_page()
            page.add_init_script(CLOCK)
            pages[name] = Visit(app, page)
            pages[name].goto(*link, **query)
            page.wait_for_timeout(4000)  # the warm-up thread imports torch
        for _ in range(PRESSES):
            show(pages["quiz"])
            times["quiz"].append(press(pages["quiz"], "1"))
            times["trivial"].append(press(pages["trivial"], "1"))
        browser.close()
    middle = {name: median_and_p95(values) for name, values in times.items()}
    for name, (median, p95) in middle.items():
        yield Row("grade to next question", f"{name}, median", median, "ms", f"p95 {p95:.0f}, n {PRESSES}")
    yield Row("grade to next question", "quiz ÷ trivial", middle["quiz"][0] / middle["trivial"][0], "×", aim=AIM)


def show(visit: Visit) -> None:
    """Turn the question on the table over, whatever its kind is, and wait until it can be graded."""
    pass_on = visit.page.get_by_role("button", name="Show the answer")
    compare = visit.page.get_by_role("button", name="Compare with the points")
    pass_on.or_(compare).first.click()
    visit.page.get_by_role("button", name="Again").first.wait_for()
    visit.idle()
