"""Screenshots of pages in both languages, light and dark, on a phone and on a wide screen, for people to look at.

    python tools/screenshots.py                                      every page
    python tools/screenshots.py "cards?card=sdpa-scale-sqrt-dk" --languages zh --schemes dark --widths 390

One server serves them all. The pictures show the whole page; --window shows only what the first window of it shows.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.browser import Visit, context, launch, serve
from tools.setup_env import ROOT

SETTLE_S = 20
TALLEST = 16_000  # px; Chromium draws no picture much taller


def all_pages() -> list[str]:
    """Home and every file of pages/, as paths of links."""
    return ["", *sorted(path.stem for path in (ROOT / "pages").glob("*.py"))]


def shoot(visit: Visit, link: str, language: str, target: Path, *, whole: bool) -> list[str]:
    """Open a link, write its picture, and return what is wrong with the page."""
    from playwright.sync_api import TimeoutError as Late

    parts = urlsplit(link)
    visit.goto(parts.path, **{**dict(parse_qsl(parts.query)), "lang": language})
    # what is computed after the first paint belongs into the picture; a page that goes on for long is shown at work
    for waiting in ("stSkeleton", "stProgress"):
        with contextlib.suppress(Late):
            visit.page.get_by_test_id(waiting).first.wait_for(state="detached", timeout=1000 * SETTLE_S)
    visit.idle()
    window = visit.page.viewport_size
    if whole and window is not None:
        height = min(TALLEST, max(window["height"], visit.height()))
        visit.page.set_viewport_size({"width": window["width"], "height": height})
        visit.idle()
    target.parent.mkdir(parents=True, exist_ok=True)
    visit.page.screenshot(path=target)
    problems = visit.problems()
    if wider := visit.scroll_width():
        problems.append(f"{wider} px wider than the window")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when a page had a problem; its picture is there all the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("links", nargs="*", help='such as cards or "cards?card=ID"; none means every page')
    parser.add_argument("--languages", nargs="+", default=["en", "zh"], choices=["en", "zh"])
    parser.add_argument("--schemes", nargs="+", default=["light", "dark"], choices=["light", "dark"])
    parser.add_argument("--widths", nargs="+", type=int, default=[390, 1440], metavar="PX")
    parser.add_argument("--window", action="store_true", help="only what a window of 900 px shows, not the whole page")
    parser.add_argument("--script", default="app.py")
    parser.add_argument("--data", type=Path, help="a folder that holds a reader's progress; the pages begin from it")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "shots")
    options = parser.parse_args(arguments)

    from playwright.sync_api import sync_playwright

    bad = 0
    data = {"DATA_DIR": str(options.data.resolve())} if options.data else {}
    with serve(options.script, environment=data) as app, sync_playwright() as playwright:
        browser = launch(playwright)
        for language in options.languages:
            for scheme in options.schemes:
                for width in options.widths:
                    profile = context(browser, language=language, scheme=scheme, width=width)
                    for link in options.links or all_pages():
                        visit = Visit(app, profile.new_page())
                        name = re.sub(r"[^\w-]+", "-", link).strip("-") or "home"
                        target = options.out / f"{name}-{language}-{scheme}-{width}.png"
                        problems = shoot(visit, link, language, target, whole=not options.window)
                        visit.page.close()
                        bad += bool(problems)
                        print(target, *problems, sep="\n    ", flush=True)
                    profile.close()
        browser.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
