"""A reader with ten thousand events: what a page waits for."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from bench.measure import Row, median_and_p95
from content.loader import load_deck
from study import desk, schedule
from study.events import UTC, Review, now
from study.progress import fold

EVENTS = 10_000


def rows() -> Iterable[Row]:
    """Times of the steps between a log and the list of what is due."""
    deck = load_deck()
    known = desk.items(deck.cards, deck.topics)
    chance, start, names = random.Random(0), now() - timedelta(days=200), list(known)
    log = [
        Review(
            at=start + n * timedelta(days=200) / EVENTS,
            item=chance.choice(names),
            mode="review",
            score=1,
            rating=chance.choice([1, 2, 3, 3, 3, 4]),
            counts=True,
            seconds=30,
        )
        for n in range(EVENTS)
    ]
    progress, at = fold(log), now()
    schedule.memory.cache_clear()
    yield _row("memory of all items, first page", lambda: desk.today(known, progress, at, UTC), once=True)
    yield _row("due list", lambda: desk.today(known, progress, at, UTC), aim=0.05)
    yield _row("progress from events", lambda: fold(log))


def _row(what: str, work: Callable[[], object], *, once: bool = False, aim: float | None = None) -> Row:
    times = []
    for _ in range(1 if once else 20):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    median, p95 = median_and_p95(times)
    return Row("study", f"{EVENTS} events: {what}", median, "s", f"p95 {p95:.3f} s", aim)
