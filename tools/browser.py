"""Start the app on a free port and drive it in a real Chromium: for browser tests, screenshots and benchmarks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from tools.setup_env import ROOT, find_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright

# --------------------------------------------------------------------------------------------------------------------
# The server


@dataclass(frozen=True)
class App:
    """A running server of its own: address, process, and how long it took to answer ``/_stcore/health``."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    health_s: float

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        """What the server has printed so far."""
        return self.log.read_text("utf-8", errors="replace")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def healthy(url: str) -> bool:
    """Whether the server at ``url`` says that it is well."""
    try:
        with urllib.request.urlopen(f"{url}/_stcore/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # URLError is one
        return False


@contextlib.contextmanager
def serve(
    script: str | Path = "app.py",
    *,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    seconds: float = 60,
) -> Iterator[App]:
    """Run ``script`` in a fresh Streamlit process, ended with all its children when the block ends.

    Raises: RuntimeError with the server's own words when it ends or is not well within ``seconds``.
    """
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "streamlit", "run", str(script), "--server.port", url.rsplit(":", 1)[1]]
    command += [
        "--server.address",
        "127.0.0.1",
        "--server.headless",
        "true",
        "--server.fileWatcherType",
        "none",
        *options,
    ]
    with tempfile.TemporaryDirectory(prefix="lab-server-") as folder:
        log = Path(folder) / "server.log"
        began = time.monotonic()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                # progress is kept beside the server's log, not where this machine's own reader has theirs
                env={**os.environ, "DATA_DIR": folder, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while not healthy(url):
                if process.poll() is not None or time.monotonic() - began > seconds:
                    raise RuntimeError(f"{script} did not start:\n{log.read_text('utf-8', errors='replace')}")
                time.sleep(0.02)
            yield App(url, process, log, time.monotonic() - began)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# --------------------------------------------------------------------------------------------------------------------
# The browser


def launch(playwright: Playwright) -> Browser:
    """The system's Chromium, else Playwright's own.

    Raises: playwright's Error when there is neither.
    """
    options = [
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--force-color-profile=srgb",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium refuses to be root in a sandbox
    return playwright.chromium.launch(executable_path=find_chromium(), args=options)


# Runs before the page's own scripts. Watches the protocol, because a short run comes and goes between two paints: a
# BackMsg with field 11 asks for a script run, a ForwardMsg with field 6 says that one has finished (2: early, another
# follows). What a polled fragment asks for by itself (in field 11, field 6) does not count: where the fragment has gone
# in the meantime, the server drops it without an answer. Notes what is drawn on each canvas in which colour, since a
# canvas can't be asked afterwards what it shows.
WATCH = """
(() => {
  const lab = window.__lab = {runs: 0, pending: false};
  const colours = new WeakMap();
  const field = (bytes, wanted) => {  // a varint's value, a message's or text's bytes; else undefined
    let at = 0;
    const varint = () => {
      let value = 0, factor = 1;
      for (;;) {
        const byte = bytes[at++];
        value += (byte & 127) * factor;
        factor *= 128;
        if (!(byte & 128)) return value;
      }
    };
    while (at < bytes.length) {
      const tag = varint(), kind = tag & 7;
      let value;
      if (kind === 0) value = varint();
      else {
        const size = kind === 2 ? varint() : kind === 1 ? 8 : 4;
        value = bytes.subarray(at, at + size);
        at += size;
      }
      if (tag >> 3 === wanted) return value;
    }
  };
  const send = WebSocket.prototype.send;
  const heard = new WeakSet();
  WebSocket.prototype.send = function (data) {
    if (!heard.has(this)) {
      heard.add(this);
      this.addEventListener('message', event => {
        const finished = event.data instanceof ArrayBuffer ? field(new Uint8Array(event.data), 6) : undefined;
        if (finished !== undefined && finished !== 2) lab.pending = false;
      });
    }
    const asked = typeof data === 'string' ? undefined : field(data.buffer ? data.slice() : new Uint8Array(data), 11);
    if (asked && !field(asked, 6)) {
      lab.runs += 1;
      lab.pending = true;
    }
    return send.call(this, data);
  };
  const draw = CanvasRenderingContext2D.prototype;
  for (const [name, style] of [['stroke', 'strokeStyle'], ['fill', 'fillStyle'], ['fillRect', 'fillStyle']]) {
    const original = draw[name];
    draw[name] = function (...args) {
      const seen = colours.get(this.canvas) || {};
      const key = name.startsWith('fill') ? 'fill' : 'stroke';
      const what = key + ' ' + String(this[style]).toLowerCase();
      seen[what] = (seen[what] || 0) + 1;
      colours.set(this.canvas, seen);
      return original.apply(this, args);
    };
  }
  lab.drawn = canvas => colours.get(canvas) || {};
})();
"""

_IDLE = """
before => {
  const app = document.querySelector('[data-testid="stApp"]');
  if (!app || window.__lab.runs <= before || window.__lab.pending) return false;
  if (app.dataset.testConnectionState !== 'CONNECTED' || app.dataset.testScriptState !== 'notRunning') return false;
  if (document.querySelector('[data-testid="stSkeleton"], [data-stale="true"]')) return false;
  const shown = e => e.getClientRects().length > 0;
  return [...document.querySelectorAll('[data-testid="stVegaLiteChart"]')].filter(shown)
    .every(chart => chart.querySelector('canvas, svg.marks'));
}
"""

# Text nodes that a reader sees as words: formulas and code are not prose.
_TEXTS = """
() => {
  const skip = '.katex, code, pre, script, style, [data-testid="stMarkdownPre"]';
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walk.nextNode()) {
    const parent = walk.currentNode.parentElement;
    if (!parent.closest(skip) && walk.currentNode.data.trim()) texts.push(walk.currentNode.data.trim());
  }
  return texts;
}
"""

_FORBIDDEN = (
    (re.compile(r"\{\{|\}\}"), "a binding that was not filled"),
    # as Python prints it anywhere, as JavaScript prints it where a number stands alone: cards on numerics speak of NaN
    (re.compile(r"(?<![A-Za-z])nan(?![A-Za-z])|^NaN\W*$"), "not a number"),
    (re.compile(r"(?<!\\)\$"), "a formula that was not typeset"),
    (re.compile(r"Traceback \(most recent call last\)"), "a traceback"),
    (re.compile(r"(?<![A-Za-z])undefined(?![A-Za-z])"), "undefined"),
    (re.compile(r"\[@[\w-]+"), "a citation that was not resolved"),
    (re.compile(r"\*\*"), "bold that Markdown did not see"),
)

# What Chromium and Streamlit say about themselves, not about the page. Streamlit builds a chart's view before it hands
# the data over, so Vega warns of empty extents; opened at /lab, it looks for its server below /lab before the root.
_NOT_OURS = re.compile(
    r"GPU stall due to ReadPixels|WebGL|willReadFrequently|Infinite extent|Log scale domain includes zero"
    r"|404 \(Not Found\) \(http://[\w.:]+/\w+/_stcore/(host-config|health)\)"
)


class Visit:
    """One reader's page: goes places, waits until Streamlit is idle, and knows what went wrong on the way."""

    def __init__(self, app: App, page: Page) -> None:
        self.app, self.page = app, page
        self.console: list[str] = []
        page.add_init_script(WATCH)
        page.on("console", self._listen)
        page.on("pageerror", lambda error: self._note(f"page error: {error}"))

    def _listen(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._note(f"console {message.type}: {message.text} ({message.location.get('url', '')})")

    def _note(self, text: str) -> None:
        if not _NOT_OURS.search(text):
            self.console.append(text)

    def goto(self, path: str = "", **query: str) -> None:
        """Open a page by its link, as a reader would who was sent it, and wait until it is drawn."""
        self.page.goto(
            f"{self.app.url}/{path}" + (f"?{urlencode(query)}" if query else ""), wait_until="domcontentloaded"
        )
        self.idle()

    @property
    def runs(self) -> int:
        """How many script runs this page has asked for, polling aside."""
        return int(self.page.evaluate("() => window.__lab.runs"))

    def idle(self, *, after: int = 0, seconds: float = 60) -> None:
        """Wait until more than ``after`` script runs were asked for, none is going on, and charts are drawn."""
        self.page.wait_for_function(_IDLE, arg=after, timeout=seconds * 1000)

    def act(self, action: Callable[[], object], *, seconds: float = 60) -> None:
        """Do something that makes Streamlit run, and wait until it is idle again."""
        before = self.runs
        action()
        self.idle(after=before, seconds=seconds)

    def texts(self) -> list[str]:
        """All text on the page but formulas and code, node by node."""
        return list(self.page.evaluate(_TEXTS))

    def marks(self, nth: int = 0) -> dict[str, int]:
        """What the nth chart has drawn: "stroke #rrggbb" or "fill #rrggbb" to how often."""
        chart = self.page.get_by_test_id("stVegaLiteChart").nth(nth)
        drawn: dict[str, int] = chart.evaluate(
            """chart => {
              const total = {};
              const add = (what, times) => { total[what] = (total[what] || 0) + times; };
              for (const canvas of chart.querySelectorAll('canvas'))
                Object.entries(window.__lab.drawn(canvas)).forEach(([what, times]) => add(what, times));
              for (const shape of chart.querySelectorAll('svg.marks :is(path, rect, line, circle)'))
                for (const kind of ['stroke', 'fill']) {
                  const colour = shape.getAttribute(kind);
                  if (colour && !['none', 'transparent'].includes(colour)) add(kind + ' ' + colour.toLowerCase(), 1);
                }
              return total;
            }"""
        )
        return drawn

    def problems(self) -> list[str]:
        """What no reader should meet, in words; empty on a clean page."""
        found = list(self.console)
        for element in self.page.get_by_test_id("stException").all():
            found.append(f"exception: {element.inner_text()}")
        for element in self.page.locator(".katex-error").all():
            found.append(f"KaTeX refused: {element.get_attribute('title')}")
        for text in self.texts():
            found += [f"{what}: {text!r}" for pattern, what in _FORBIDDEN if pattern.search(text)]
        if "Traceback (most recent call last)" in self.app.log_text():
            found.append(f"the server's log: {self.app.log_text()[-2000:]}")
        return found

    def height(self) -> int:
        """How tall the page is in pixels, all that scrolls included."""
        return int(
            self.page.evaluate(
                """() => {
                  const main = document.querySelector('[data-testid="stMain"]') || document.documentElement;
                  return window.innerHeight - main.clientHeight + main.scrollHeight;
                }"""
            )
        )

    def scroll_width(self) -> int:
        """How many pixels the page is wider than the window: 0 unless a phone's reader has to scroll sideways."""
        return int(
            self.page.evaluate(
                """() => {
                  const main = document.querySelector('[data-testid="stMain"]') || document.documentElement;
                  return Math.max(0, main.scrollWidth - main.clientWidth);
                }"""
            )
        )


def assert_clean(visit: Visit) -> None:
    """Fail with everything that a reader should not meet on this page."""
    found = visit.problems()
    assert not found, "\n".join([visit.page.url, *found])


def context(
    browser: Browser, *, language: str = "en", scheme: str = "light", width: int = 1440, height: int = 900
) -> BrowserContext:
    """A fresh profile of a reader with this language, colour scheme and window; under 600 px it is a phone."""
    return browser.new_context(
        locale={"en": "en-US", "zh": "zh-CN"}[language],
        color_scheme="dark" if scheme == "dark" else "light",
        viewport={"width": width, "height": height},
        has_touch=width < 600,
        reduced_motion="reduce",
    )
