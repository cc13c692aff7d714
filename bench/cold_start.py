"""A new server and a new browser profile: how long until the flagship can be read and its chart is seen."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bench.measure import CARD, Row
from tools.browser import WATCH, context, launch, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROUNDS = 5
CHART = """() => {
  const painted = canvas => Object.keys(window.__lab.drawn(canvas)).length > 0;
  const charts = [...document.querySelectorAll('[data-testid="stVegaLiteChart"]')];
  const shown = chart => chart.querySelector('svg.marks') || [...chart.querySelectorAll('canvas')].some(painted);
  return charts.some(shown) && performance.now();
}"""
TITLE = """() => {
  const titles = [...document.querySelectorAll('[data-testid="stMain"] :is(h1, h2)')];
  return titles.some(h => h.innerText.trim()) && performance.now();
}"""
FIRST_PAINT = "() => performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0]"


def once(browser: Browser, script: str, link: str) -> dict[str, float]:
    """Seconds: the server from its start to healthy, the rest from the moment the link is opened."""
    with serve(script) as app:
        profile = context(browser)
        page = profile.new_page()
        page.add_init_script(WATCH)
        page.goto(f"{app.url}{link}", wait_until="commit")
        found = {"health": app.health_s}
        for name, sought in (("title", TITLE), ("chart", CHART)):
            found[name] = page.wait_for_function(sought, timeout=60_000).json_value() / 1000
        found["paint"] = page.wait_for_function(FIRST_PAINT, timeout=60_000).json_value() / 1000
        page.reload(wait_until="commit")
        found["again"] = page.wait_for_function(CHART, timeout=60_000).json_value() / 1000
        profile.close()
    return found


def rows() -> Iterator[Row]:
    from playwright.sync_api import sync_playwright

    apps = {"app": ("app.py", f"/cards?card={CARD}&lang=en"), "trivial": ("bench/apps/trivial.py", "/")}
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in apps}
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for _ in range(ROUNDS):
            for name, (script, link) in apps.items():
                seen[name].append(once(browser, script, link))
        browser.close()
    floor = {key: statistics.median(r[key] for r in seen["trivial"]) for key in seen["trivial"][0]}
    words = {
        "health": "server healthy, from the start of the process",
        "paint": "first paint, from opening the link",
        "title": "the card's question on the page",
        "chart": "its chart painted",
        "again": "its chart painted, second visit",
    }
    for key, what in words.items():
        value = statistics.median(r[key] for r in seen["app"])
        yield Row("cold start", what, value, "s", f"trivial page {floor[key]:.2f} s, ratio {value / floor[key]:.2f}")
