"""Memory of the server with all its children after a class of readers: each opened the flagship and ran a lab."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

from bench.client import Found, Reader
from bench.measure import CARD, Row, memory_mb
from tools.browser import serve

READERS = 20
AIM_MB = 450  # a free host gives 690 MB at worst


def ready_button(reader: Reader) -> Found | None:
    """The page's one filled button, Run on this device, once it can be pressed."""
    return next((f for f in reader.elements("button") if f.proto.type == "primary" and not f.proto.disabled), None)


def run_a_lab(reader: Reader, number: int, seconds: float = 120) -> None:
    """Move the lab's slider, press Run, and poll as a page does until the run is over."""
    until = time.monotonic() + seconds
    slider = reader.lab_slider()
    reader.slide(slider, min(slider.proto.max, slider.proto.min + number % 8))
    pressed = False
    while time.monotonic() < until:
        button = ready_button(reader)
        if button is not None and pressed:
            return
        if button is not None:
            reader.press(button)
            pressed = True
        else:
            time.sleep(0.2)
        reader.rerun()
    raise RuntimeError("a lab's run was not over in time")


def rows() -> Iterator[Row]:
    with serve() as app, ExitStack() as readers:
        start = memory_mb(app.pid)
        peak, over = start, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.1):
                peak = max(peak, memory_mb(app.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(READERS):
                reader = readers.enter_context(
                    Reader(app.url, "cards", f"card={CARD}&lang={'en' if number % 2 else 'zh'}")
                )
                reader.open()
                run_a_lab(reader, number)
                if number == 0:
                    first = memory_mb(app.pid)
            end = memory_mb(app.pid)
        finally:
            over.set()
            watcher.join()
    yield Row("memory", "server healthy, no reader yet", start, "MB")
    yield Row("memory", "1 reader, lab run", first, "MB")
    yield Row("memory", f"{READERS} readers at once, a lab run by each", end, "MB", aim=AIM_MB)
    yield Row("memory", "highest on the way", max(peak, end), "MB", aim=AIM_MB)
