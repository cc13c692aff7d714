"""A slider is moved: how long until the new chart is painted, against a trivial page with the same charts and data.

Beside the trivial page stands a bare panel: the same chart among the app's controls, drawn by plain Streamlit calls.

Moves alternate between the pages within one run, so that whatever else the machine does falls on all alike. Each
position of the app's slider is visited once a server, so no result comes from a cache.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.client import Reader
from bench.measure import CARD, Row, cpu_s, median_and_p95
from tools.browser import App, Visit, context, launch, serve
from tools.setup_env import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

ROUNDS = 3
STEPS = 12
AIM = 1.25
FOLDER = ROOT / "out" / "bench"
QUERY = f"card={CARD}&lang=en"

# Notes when a key went down and when a chart was last drawn on, whichever way it is drawn.
CLOCK = """
(() => {
  const clock = window.__clock = {key: 0, paint: 0};
  addEventListener('keydown', () => { clock.key = performance.now(); clock.paint = 0; }, true);
  const note = node => {
    if (node.closest && node.closest('[data-testid="stVegaLiteChart"]')) clock.paint = performance.now();
  };
  for (const name of ['stroke', 'fill', 'fillRect', 'fillText']) {
    const original = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...args) {
      note(this.canvas);
      return original.apply(this, args);
    };
  }
  new MutationObserver(records => {
    for (const r of records) if (r.target.closest && r.target.closest('svg.marks')) note(r.target);
  }).observe(document, {subtree: true, childList: true, attributes: true});
})();
"""
# The repaint is over when the script has finished and nothing was drawn for a while.
PAINTED = """() => {
  const {key, paint} = window.__clock;
  return paint > 0 && !window.__lab.pending && performance.now() - paint > 250 && paint - key;
}"""


def record(folder: Path) -> int:
    """Ask the app for its charts at the first positions of its slider; the trivial page draws the same ones.

    Returns how many positions there are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with serve() as app, Reader(app.url, "cards", QUERY) as reader:
        reader.open()
        wait_for_engine(reader)
        slider = reader.lab_slider()
        low, high, step = slider.proto.min, slider.proto.max, slider.proto.step or 1
        positions = [low + i * step for i in range(STEPS + 1) if low + i * step <= high]
        charts: list[list[dict[str, str]]] = []
        before: list[bytes] = []
        for position in positions:
            reader.slide(reader.lab_slider(), position)
            for _ in range(100):  # on a busy machine the run becomes a job, and its chart comes a moment later
                fragment = reader.lab_slider().fragment
                drawn = [f.proto for f in reader.elements("vega_lite_chart") if f.fragment == fragment]
                if drawn and [rows_of(chart) for chart in drawn] != before:
                    break
                reader.rerun()
            else:
                raise RuntimeError(f"the chart did not change at position {position:g} of the slider")
            before = [rows_of(chart) for chart in drawn]
            charts.append([save(chart, folder / f"{position:g}-{n}") for n, chart in enumerate(drawn)])
    (folder / "charts.json").write_text(json.dumps(charts))
    return len(positions)


def rows_of(chart: Any) -> bytes:
    """A chart's rows, in Arrow's stream format."""
    return bytes(chart.data.data or chart.datasets[0].data.data)


def save(chart: Any, stem: Path) -> dict[str, str]:
    """Write one chart's rows; what the trivial page needs to draw it."""
    file = stem.with_suffix(".arrow")
    file.write_bytes(rows_of(chart))
    return {"spec": chart.spec, "rows": file.name}


def wait_for_engine(reader: Reader) -> None:
    """Until the first chart is there: torch has been imported by then."""
    for _ in range(600):
        if any(True for _ in reader.elements("vega_lite_chart")):
            return
        reader.rerun()
    raise RuntimeError("no chart after 600 runs of the page")


@dataclass
class Page:
    """One of the compared pages, open in the browser, with its slider at the first position."""

    app: App
    visit: Visit
    slider: Locator
    paints_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def move(self) -> None:
        """One press of the right arrow: milliseconds until the chart is painted, and the server's CPU time for it."""
        before = cpu_s(self.app.pid)
        self.slider.press("ArrowRight")
        self.paints_ms.append(float(self.visit.page.wait_for_function(PAINTED, timeout=60_000).json_value()))
        self.cpu_ms.append(1000 * (cpu_s(self.app.pid) - before))


def open_page(stack: ExitStack, browser: Browser, script: str, link: str, options: tuple[str, ...] = ()) -> Page:
    app = stack.enter_context(serve(script, options=options, environment={"BENCH_FOLDER": str(FOLDER)}))
    profile = context(browser)
    stack.callback(profile.close)
    page = profile.new_page()
    page.add_init_script(CLOCK)
    visit = Visit(app, page)
    page.goto(app.url + link, wait_until="domcontentloaded")
    visit.idle()
    page.wait_for_timeout(3000)  # the warm-up thread imports torch; what it costs the first reader is in cold_start
    visit.idle()
    panel = page.locator(".st-key-bench")
    slider = (panel if panel.count() else page.get_by_test_id("stMain")).get_by_role("slider").first
    slider.focus()
    slider.press("Home")
    page.wait_for_timeout(1500)
    visit.idle()
    return Page(app, visit, slider)


def rows() -> Iterator[Row]:
    from playwright.sync_api import sync_playwright

    positions = record(FOLDER)
    pages = {
        "app": ("app.py", f"/cards?{QUERY}", ()),
        "trivial": ("bench/apps/trivial.py", "/", ()),
        "bare panel": ("bench/apps/panel.py", "/", ()),
        "untuned": ("bench/apps/untuned.py", "/", ("--runner.postScriptGC", "true")),
    }
    paints: dict[str, list[float]] = {name: [] for name in pages}
    cpu: dict[str, list[float]] = {name: [] for name in pages}
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for _ in range(ROUNDS):
            with ExitStack() as stack:
                opened = {name: open_page(stack, browser, *how) for name, how in pages.items()}
                for step in range(positions - 1):
                    for page in opened.values():
                        page.move()
                    if step == 0:  # the first move pays for what is made once: the chart's spec, code that is compiled
                        for page in opened.values():
                            page.paints_ms.clear()
                            page.cpu_ms.clear()
                for name, page in opened.items():
                    paints[name] += page.paints_ms
                    cpu[name] += page.cpu_ms
        browser.close()
    floor, floor_p95 = median_and_p95(paints["trivial"])
    for name in pages:
        middle, high = median_and_p95(paints[name])
        note = f"p95 {high:.0f}, n {len(paints[name])}, {os.cpu_count()} cores"
        yield Row("slider to repaint", f"{name}, median", middle, "ms", note)
    for name, aim in (("app", AIM), ("bare panel", None), ("untuned", None)):
        middle, high = median_and_p95(paints[name])
        yield Row("slider to repaint", f"{name} ÷ trivial", middle / floor, "×", f"p95 {high / floor_p95:.2f}", aim)
    for name in pages:
        yield Row("server CPU per rerun", name, statistics.mean(cpu[name]), "ms", "mean; the clock ticks every 10 ms")
