"""Today's list for a reader with an interview date: the reviews and new items that most raise the recall predicted for
that date, within the minutes of a day.

Each item is weighed by itself: what it would add to the recall of the date, divided by the time it takes; of each kind
the best come first. The kinds share the minutes as they share what is worth asking: an interview wants answers in full
and numbers, and a list by worth alone would be the quick clicks. The list is made anew each day from what was answered,
so that what is forgotten comes back and the last days go to what would be forgotten by the date. Near the date, or with
fewer minutes than the deck wants, that is another list than the one of due dates, which keeps everything for ever.
``bench/plan.py`` says what it gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np

from study import forecast
from study.forecast import AGAIN, EASY, FIRST, GOOD, Array
from study.schedule import Memory

# Seconds that an answer of usual length takes before a reader's own times are known, by kind of item.
SECONDS = {
    "choice": 35.0,
    "numeric": 60.0,
    "predict": 45.0,
    "order": 75.0,
    "cloze": 45.0,
    "shape": 40.0,
    "count": 45.0,
    "recall": 90.0,
}
LEAST_GAIN = 0.01  # of recall on the date: for less nobody is asked
LOOKS_AT_NEW = 2  # a new item is seen again on its first day


@dataclass(frozen=True)
class Candidate:
    """An item as the plan sees it; ``held`` is None while it is new. ``waits``: for the new ones of the track."""

    item: str
    kind: str
    seconds: float
    held: Memory | None
    waits: bool = False


@dataclass(frozen=True)
class Chosen:
    """An item of today's list: the recall of the date without and with its review today."""

    item: str
    seconds: float
    without: float
    with_it: float
    is_new: bool


def today(candidates: Sequence[Candidate], now: datetime, interview: datetime, minutes: float) -> tuple[Chosen, ...]:
    """The list of a day, the most valuable of each kind first."""
    if not candidates:
        return ()
    days_left = max(0.0, (interview - now) / timedelta(days=1))
    seconds = np.array([candidate.seconds for candidate in candidates])
    stability, difficulty, elapsed = _arrays(candidates, now)
    without, with_it, takes = weigh(stability, difficulty, elapsed, days_left, seconds)
    kinds = np.unique([candidate.kind for candidate in candidates], return_inverse=True)[1]
    order = in_turn(np.where(with_it - without >= LEAST_GAIN, (with_it - without) / takes, -np.inf), takes, kinds)
    order += 2 * np.array([candidate.waits and candidate.held is None for candidate in candidates])  # shares end at 1
    chosen, left = [], 60 * minutes
    for at in np.argsort(order, kind="stable"):
        if np.isfinite(order[at]) and takes[at] <= left:
            left -= takes[at]
            numbers = float(takes[at]), float(without[at]), float(with_it[at])
            chosen.append(Chosen(candidates[at].item, *numbers, is_new=candidates[at].held is None))
    return tuple(chosen)


def in_turn(worth: Array, takes: Array, kinds: np.ndarray[Any, Any]) -> Array:
    """What orders the items of a list, the smallest first: how much of its kind's time is done when the item is.

    Within a kind the worthiest come first; what is worth -inf is never asked. Shapes: (..., item); kinds: (item,).
    """
    out = np.full(worth.shape, np.inf)
    for kind in np.unique(kinds):
        at = np.flatnonzero(kinds == kind)
        order = np.argsort(-worth[..., at], axis=-1, kind="stable")
        asked = np.take_along_axis(np.isfinite(worth[..., at]), order, axis=-1)
        time = np.where(asked, np.take_along_axis(takes[..., at], order, axis=-1), 0).cumsum(axis=-1)
        share = np.where(asked, time / np.maximum(time[..., -1:], 1), np.inf)
        of_kind = np.empty_like(share)
        np.put_along_axis(of_kind, order, share, axis=-1)
        out[..., at] = of_kind
    return out


def weigh(
    stability: Array, difficulty: Array, elapsed: Array, days_left: float, seconds: Array
) -> tuple[Array, Array, Array]:
    """The recall of the date without and with a review today, and the seconds that this takes. Shapes: alike.

    ``stability`` is nan for what is new; ``elapsed`` are days since the last review. What fails is seen once more on
    the same day, and so is what is new.
    """
    new = np.isnan(stability)
    held, hard = np.where(new, 1.0, stability), np.where(new, 5.0, difficulty)
    now = np.where(new, 0.0, forecast.recall(held, elapsed))
    without = np.where(new, 0.0, forecast.recall(held, elapsed + days_left))
    later = elapsed >= 1
    succeeded = np.where(later, forecast.after_success(held, hard, now, GOOD), forecast.same_day(held, GOOD))
    lapsed = np.where(later, forecast.after_lapse(held, hard, now), forecast.same_day(held, AGAIN))
    failed = forecast.same_day(lapsed, GOOD)
    again = now * forecast.recall(succeeded, days_left) + (1 - now) * forecast.recall(failed, days_left)
    met = sum(share * forecast.recall(_met(rating), days_left) for rating, share in enumerate(FIRST, start=AGAIN))
    takes = seconds * np.where(new, LOOKS_AT_NEW, 2 - now)
    return without, np.where(new, met, again), takes


def _met(rating: int) -> Array:
    """Stability after the first day with an item: the first review, and a second look unless it was easy."""
    first = forecast.first_stability(rating)
    return first if rating == EASY else forecast.same_day(first, GOOD)


def predicted(candidates: Sequence[Candidate], now: datetime, interview: datetime) -> Array:
    """The recall of the date of each item, without further reviews. Shapes: (item,)."""
    stability, _, elapsed = _arrays(candidates, now)
    days_left = max(0.0, (interview - now) / timedelta(days=1))
    new = np.isnan(stability)
    out: Array = np.where(new, 0.0, forecast.recall(np.where(new, 1.0, stability), elapsed + days_left))
    return out


def _arrays(candidates: Sequence[Candidate], now: datetime) -> tuple[Array, Array, Array]:
    """Stability (nan while new), difficulty, and days since the last review. Shapes: (item,) each."""
    held = [candidate.held for candidate in candidates]
    stability = np.array([math.nan if memory is None else memory.stability for memory in held])
    difficulty = np.array([math.nan if memory is None else memory.difficulty for memory in held])
    elapsed = np.array([0.0 if memory is None else (now - memory.last) / timedelta(days=1) for memory in held])
    return stability, difficulty, elapsed
