"""What a log says: everything that a page shows of a reader's progress is computed here, from the set of events.

The order in which events arrive does not matter, nor how often: they are put in the order of their times (of equal
times, of their ids), and each id counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TypeVar

from study.events import Event, Exam, Measured, Prediction, Report, Review, Setting, Sheet, Submitted, Undo
from study.schedule import Graded

_T = TypeVar("_T")

DEFAULTS: dict[str, str | float | bool | None] = {
    "retention": 0.9,
    "new_a_day": 10,
    "minutes_a_day": 30,
    "interview": None,  # an ISO date
    "track": None,
    "practice_counts": False,
}


@dataclass(frozen=True)
class ExamState:
    """An exam as its sheet stands. ``submitted`` is None while it goes on."""

    id: str
    begun: datetime
    minutes: float
    items: tuple[tuple[str, int], ...]
    answers: Mapping[int, str]
    flagged: frozenset[int]
    submitted: datetime | None


@dataclass(frozen=True)
class Progress:
    """A reader's progress. Reviews that were taken back are in none of it."""

    reviews: tuple[Review, ...] = ()
    by_item: Mapping[str, tuple[Review, ...]] = field(default_factory=dict)
    past: Mapping[str, tuple[Graded, ...]] = field(default_factory=dict)  # of each item what moves its date
    settings: Mapping[str, str | float | bool | None] = field(default_factory=dict)
    predictions: tuple[Prediction, ...] = ()
    exams: tuple[ExamState, ...] = ()
    reports: tuple[Report, ...] = ()
    measured: Mapping[str, Measured] = field(default_factory=dict)  # by claim, the newest

    def setting(self, name: str) -> str | float | bool | None:
        """A setting, or its default."""
        return self.settings.get(name, DEFAULTS[name])


def until(progress: Progress, at: datetime) -> Progress:
    """Progress with the answers of before a time only."""
    return replace(
        progress,
        reviews=tuple(review for review in progress.reviews if review.at < at),
        by_item=_before(progress.by_item, lambda review: review.at < at),
        past=_before(progress.past, lambda graded: graded[0] < at),
    )


def _before(by_item: Mapping[str, tuple[_T, ...]], is_before: Callable[[_T], bool]) -> dict[str, tuple[_T, ...]]:
    kept = ((item, tuple(filter(is_before, of_item))) for item, of_item in by_item.items())
    return {item: of_item for item, of_item in kept if of_item}


def fold(events: Iterable[Event]) -> Progress:
    """The progress that a set of events makes."""
    unique: dict[str, Event] = {}
    for event in events:
        unique.setdefault(event.id, event)  # as in the stores: what is there stays
    ordered = sorted(unique.values(), key=lambda event: (event.at, event.id))
    taken_back = {event.of for event in ordered if isinstance(event, Undo)}
    kept = [event for event in ordered if event.id not in taken_back]
    of_kind: dict[type, list[Event]] = defaultdict(list)
    for event in kept:
        of_kind[type(event)].append(event)
    reviews: tuple[Review, ...] = tuple(of_kind[Review])  # type: ignore[arg-type]
    by_item: dict[str, list[Review]] = defaultdict(list)
    past: dict[str, list[Graded]] = defaultdict(list)
    for review in reviews:
        by_item[review.item].append(review)
        if review.counts:
            past[review.item].append((review.at, review.rating))
    return Progress(
        reviews=reviews,
        by_item={item: tuple(of_item) for item, of_item in by_item.items()},
        past={item: tuple(of_item) for item, of_item in past.items()},
        settings={event.name: event.value for event in of_kind[Setting]},  # type: ignore[union-attr]
        predictions=tuple(of_kind[Prediction]),  # type: ignore[arg-type]
        exams=tuple(_exam(event, of_kind) for event in of_kind[Exam]),  # type: ignore[arg-type]
        reports=tuple(of_kind[Report]),  # type: ignore[arg-type]
        measured={event.claim: event for event in of_kind[Measured]},  # type: ignore[union-attr,misc]
    )


def _exam(exam: Exam, of_kind: Mapping[type, list[Event]]) -> ExamState:
    handed_in = [s.at for s in of_kind[Submitted] if isinstance(s, Submitted) and s.exam == exam.id]
    end = min([exam.at + timedelta(minutes=exam.minutes), *handed_in])  # what another page keeps later does not count
    sheets = [s for s in of_kind[Sheet] if isinstance(s, Sheet) and s.exam == exam.id and s.at <= end]
    latest = {sheet.place: sheet for sheet in sheets if sheet.place < len(exam.items)}
    return ExamState(
        id=exam.id,
        begun=exam.at,
        minutes=exam.minutes,
        items=exam.items,
        answers={place: sheet.answer for place, sheet in latest.items() if sheet.answer},
        flagged=frozenset(place for place, sheet in latest.items() if sheet.flagged),
        submitted=handed_in[0] if handed_in else None,
    )
