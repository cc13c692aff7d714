"""Readers at once, one moved slider a second each, while one more trains: how long a rerun takes on the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from bench.client import Found, Reader
from bench.measure import CARD, Row, median_and_p95
from bench.repaint import FOLDER, record
from tools.browser import App, serve

READERS = (1, 20)
SECONDS = 15
AIM_MS = 60  # on a quiet machine; on a busy one half as much again as the trivial page
TRAINING = f"card={CARD}&lang=en&lab=training"


def settle(reader: Reader) -> None:
    """Until the page has its chart and a moved slider is answered by a run, and no longer by a job that waits."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        reader.rerun()
        filled = [f for f in reader.elements("button") if f.proto.type == "primary"]  # the trivial page has none
        if any(True for _ in reader.elements("vega_lite_chart")) and all(not f.proto.disabled for f in filled):
            break
        time.sleep(0.2)
    else:
        raise RuntimeError("no chart within a minute")
    while time.monotonic() < until and reader.slide(first_slider(reader), 0) > 0.25:
        time.sleep(0.5)  # torch is being imported


def first_slider(reader: Reader) -> Found:
    """The slider that is moved: the panel's, or the page's only one."""
    sliders = list(reader.elements("slider"))
    return next((found for found in sliders if found.fragment), sliders[0])


def moves(url: str, page: str, query: str, number: int, times: list[float], ready: threading.Barrier) -> None:
    """One reader: a move a second, each to a place of its own, so that no result is known already."""
    with Reader(url, page, query) as reader:
        reader.open()
        settle(reader)
        ready.wait()
        began = time.monotonic() + number / 20  # spread over the second
        step = 0
        while time.monotonic() < began + SECONDS:
            time.sleep(max(0.0, began + step - time.monotonic()))
            slider = first_slider(reader)
            places = len(slider.proto.options) or int(slider.proto.max)
            times.append(reader.slide(slider, (number + step) % places))
            step += 1


def train(url: str, over: threading.Event) -> None:
    """A reader who trains, again and again, until the others are done."""
    with Reader(url, "cards", TRAINING) as reader:
        reader.open()
        while not over.is_set():
            button = next((f for f in reader.elements("button") if f.proto.type == "primary"), None)
            if button is not None and not button.proto.disabled:
                reader.press(button)
            else:
                reader.rerun()
            over.wait(0.4)


def measured(app: App, page: str, query: str, n: int, beside: Callable[[threading.Event], None] | None) -> list[float]:
    times: list[float] = []
    over, ready = threading.Event(), threading.Barrier(n)
    readers = [threading.Thread(target=moves, args=(app.url, page, query, i, times, ready)) for i in range(n)]
    other = threading.Thread(target=beside, args=(over,)) if beside else None
    for thread in (*readers, *([other] if other else [])):
        thread.start()
    for thread in readers:
        thread.join()
    over.set()
    if other:
        other.join()
    return [1000 * seconds for seconds in times]


def rows() -> Iterator[Row]:
    record(FOLDER)
    for n in READERS:
        with ExitStack() as stack:
            app = stack.enter_context(serve())
            trivial = stack.enter_context(serve("bench/apps/trivial.py", environment={"BENCH_FOLDER": str(FOLDER)}))
            floor = measured(trivial, "", "", n, None)
            ours = measured(app, "cards", f"card={CARD}&lang=en", n, partial(train, app.url))
        middle, high = median_and_p95(floor)
        who = "1 reader" if n == 1 else f"{n} readers"
        yield Row("readers", f"{who}, trivial page, p95", high, "ms", f"median {middle:.0f}, n {len(floor)}")
        limit = max(AIM_MS, 1.5 * high)
        middle, tail = median_and_p95(ours)
        note = f"median {middle:.0f}, n {len(ours)}"
        yield Row("readers", f"{who} of a card, one more trains, p95", tail, "ms", note, limit)
