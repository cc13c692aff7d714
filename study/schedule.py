"""When an item is due, after FSRS (package ``fsrs``): what is remembered of it, and what each grade would do.

Nothing here is stored. The memory of an item follows from its reviews, and its date from that memory and the recall
that the reader wants; so another wish moves all dates at once, and a review that is taken back leaves no trace.

Intervals of three days and more are moved a little, so that what was learned together does not stay together for ever.
The shift follows from the item and its number of reviews: a preview is exactly what will be.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo

from fsrs import Card, Rating, Scheduler, State

AGAIN, HARD, GOOD, EASY = 1, 2, 3, 4
RATINGS = (AGAIN, HARD, GOOD, EASY)
RETENTION = (0.7, 0.97)  # what a reader may wish for
DAY_BEGINS = timedelta(hours=4)  # a late evening belongs to the day before
FUZZ_FROM_DAYS = 3
FUZZ_SHARE = 0.05  # of the interval, at least one day
LONGEST_DAYS = 3650
LEECH_LAPSES = 6

Graded = tuple[datetime, int]  # when, and with which rating


@dataclass(frozen=True)
class Memory:
    """What is remembered of an item after its last review. ``stability`` is in days."""

    stability: float
    difficulty: float
    last: datetime
    due: datetime
    learning: bool  # in the steps of minutes, before the first interval of days
    lapses: int
    reviews: int

    def recall(self, at: datetime) -> float:
        """The probability that it is recalled at a time, of 1."""
        return recall(self.stability, (at - self.last) / timedelta(days=1))

    @property
    def is_leech(self) -> bool:
        """Whether it is forgotten again and again: it wants to be understood, not to be repeated."""
        return self.lapses >= LEECH_LAPSES


@functools.cache
def _scheduler(retention: float) -> Scheduler:
    # its own fuzz comes from the global random numbers: a preview would not be what follows
    return Scheduler(desired_retention=retention, maximum_interval=LONGEST_DAYS, enable_fuzzing=False)


def recall(stability: float, days: float) -> float:
    """The forgetting curve: probability of recall after some days, fractions of a day counted."""
    scheduler = _scheduler(0.9)
    return float((1 + scheduler._FACTOR * max(0.0, days) / stability) ** scheduler._DECAY)


@functools.lru_cache(maxsize=50_000)
def memory(item: str, past: tuple[Graded, ...], retention: float) -> Memory | None:
    """What is remembered of an item with this past; None before the first review."""
    if not past:
        return None
    card, lapses = Card(card_id=0, due=past[0][0]), 0
    scheduler = _scheduler(retention)
    for at, rating in past:
        lapses += card.state == State.Review and rating == AGAIN
        card, _ = scheduler.review_card(card, Rating(rating), _utc(at))
    assert card.last_review is not None
    assert card.stability is not None
    assert card.difficulty is not None
    return Memory(
        stability=card.stability,
        difficulty=card.difficulty,
        last=card.last_review,
        due=card.last_review + _moved(card.due - card.last_review, item, len(past)),
        learning=card.state != State.Review,
        lapses=lapses,
        reviews=len(past),
    )


def preview(item: str, past: tuple[Graded, ...], at: datetime, retention: float) -> dict[int, Memory]:
    """What each rating given now would make of an item."""
    made = {rating: memory(item, (*past, (at, rating)), retention) for rating in RATINGS}
    return {rating: after for rating, after in made.items() if after is not None}


def _moved(interval: timedelta, item: str, n_reviews: int) -> timedelta:
    """An interval with its share of fuzz, in whole days."""
    days = interval / timedelta(days=1)
    if days < FUZZ_FROM_DAYS:
        return interval
    digest = hashlib.sha256(f"{item} {n_reviews}".encode()).digest()
    share = 2 * int.from_bytes(digest[:4]) / 2**32 - 1  # the same for all grades, so that a better one is never sooner
    return timedelta(days=min(LONGEST_DAYS, round(days + share * max(1.0, days * FUZZ_SHARE))))


def _utc(at: datetime) -> datetime:
    return at.astimezone(UTC)  # fsrs takes no other zone, not even one that is the same


def day(at: datetime, zone: tzinfo) -> date:
    """The reader's day that a time belongs to."""
    return (at.astimezone(zone) - DAY_BEGINS).date()


def begins(of: date, zone: tzinfo) -> datetime:
    """When a reader's day begins."""
    return datetime(of.year, of.month, of.day, tzinfo=zone) + DAY_BEGINS


def is_due(held: Memory, at: datetime, zone: tzinfo) -> bool:
    """Whether an item wants to be reviewed: in its minute while it is learned, from the morning of its day later on."""
    if held.learning or held.due - held.last < timedelta(days=1):
        return held.due <= at
    return day(held.due, zone) <= day(at, zone)
