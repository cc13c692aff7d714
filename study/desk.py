"""What is to be answered now: the reviews that are due, the new items of the day, practice of anything, and exams.

Nothing is kept here: the desk follows from the items of the deck, the reader's progress and the time, so it is the same
after a reload and on another page. Items of one card do not follow each other where another card has one to give.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, tzinfo
from typing import Literal

from content.schema import Card, Topic, Track
from study import plan, schedule
from study.items import Item, items_of
from study.plan import Candidate, Chosen
from study.progress import Progress, until
from study.schedule import Memory, day, is_due, memory

LONGEST_THOUGHT_S = 300.0  # an answer that took longer was left alone in between


@dataclass(frozen=True)
class Today:
    """Items by their ids, in the order in which they are asked."""

    due: tuple[str, ...]
    new: tuple[str, ...]
    later: datetime | None  # when the next item comes back that is being learned now

    @property
    def next(self) -> str | None:
        """What is asked now; None when the day is done."""
        return next(iter((*self.due, *self.new)), None)


@dataclass(frozen=True)
class Status:
    """A card's items: how many are due, how many were met, the day on which the next of these comes back."""

    due: int = 0
    met: int = 0
    next: date | None = None

    @property
    def name(self) -> Literal["new", "due", "later"]:
        """One word for it."""
        return "due" if self.due else "later" if self.met else "new"


def items(cards: Mapping[str, Card], topics: Mapping[str, Topic], track: Track | None = None) -> dict[str, Item]:
    """All items, in the order in which new ones are met: that of the track, then that of study."""
    first = [] if track is None else list(track.cards)
    order = dict.fromkeys([*first, *(name for topic in topics.values() for name in topic.cards), *cards])
    return {item.id: item for name in order if name in cards for item in items_of(cards[name])}


def retention(progress: Progress) -> float:
    """The recall that the reader wants, within what the schedule takes."""
    low, high = schedule.RETENTION
    return min(high, max(low, float(progress.setting("retention") or 0)))


def held(item: str, progress: Progress) -> Memory | None:
    """What is remembered of an item."""
    return memory(item, progress.past.get(item, ()), retention(progress))


def today(known: Mapping[str, Item], progress: Progress, at: datetime, zone: tzinfo) -> Today:
    """The reviews that are due and the new items that the day still takes."""
    memories = {item: held(item, progress) for item in known if item in progress.past}
    remembered = {item: of_item for item, of_item in memories.items() if of_item is not None}
    due = [item for item, of_item in remembered.items() if is_due(of_item, at, zone)]
    # what is learned now first, in the order of its minutes; then what is most forgotten
    due.sort(key=lambda item: (not remembered[item].learning, remembered[item].recall(at), item))
    met_today = sum(day(past[0][0], zone) == day(at, zone) for item, past in progress.past.items() if item in known)
    left = max(0, int(progress.setting("new_a_day") or 0) - met_today)
    new = [item for item in known if item not in progress.past][:left]
    waiting = [m.due for m in remembered.values() if m.learning and not is_due(m, at, zone)]
    last = progress.reviews[-1].item if progress.reviews else ""
    due = apart(due, last)
    return Today(tuple(due), tuple(apart(new, due[-1] if due else last)), min(waiting, default=None))


def statuses(known: Mapping[str, Item], progress: Progress, at: datetime, zone: tzinfo) -> dict[str, Status]:
    """Where each card stands: what of it was met, what is due, and when the next of it comes back."""
    rows: dict[str, list[Memory | None]] = defaultdict(list)
    for name, item in known.items():
        rows[item.card].append(held(name, progress) if name in progress.past else None)
    found = {}
    for card, memories in rows.items():
        met = [each for each in memories if each is not None]
        due = sum(is_due(each, at, zone) for each in met)
        found[card] = Status(due, len(met), min((day(each.due, zone) for each in met), default=None))
    return found


def practice(known: Iterable[str], progress: Progress) -> tuple[str, ...]:
    """Items to practise: never asked ones first, then those that were not asked for longest."""
    asked = {item: reviews[-1].at for item, reviews in progress.by_item.items()}
    never = [item for item in known if item not in asked]
    before = sorted((item for item in known if item in asked), key=lambda item: (asked[item], item))
    return tuple(apart([*never, *before], progress.reviews[-1].item if progress.reviews else ""))


def exam(known: Sequence[str], n_items: int, seed: int) -> tuple[tuple[str, int], ...]:
    """The items of an exam, each with its attempt: drawn from all that a program can grade, one card after another."""
    chance = random.Random(seed)
    drawn = chance.sample(known, min(n_items, len(known)))
    return tuple((item, chance.randrange(2**31)) for item in apart(drawn, ""))


def apart(items: Sequence[str], last: str) -> list[str]:
    """The items in their order, but for this: where it can be helped none follows one of its own card."""
    left, placed, card = list(items), [], card_of(last)
    while left:
        at = next((place for place, item in enumerate(left) if card_of(item) != card), 0)
        placed.append(left.pop(at))
        card = card_of(placed[-1])
    return placed


def card_of(item: str) -> str:
    """The card that an item belongs to."""
    return item.split("/", 1)[0]


def seconds(known: Mapping[str, Item], progress: Progress) -> dict[str, float]:
    """How long an answer to each item takes this reader: the median of the last of its kind, else a usual one; half of
    it goes by how much there is to read.
    """
    times: dict[str, list[float]] = {}
    for review in progress.reviews:
        if review.item in known and 0 < review.seconds <= LONGEST_THOUGHT_S:
            times.setdefault(known[review.item].kind, []).append(review.seconds)
    usual = plan.SECONDS | {kind: sorted(t[-50:])[len(t[-50:]) // 2] for kind, t in times.items() if len(t) >= 5}
    lengths: dict[str, list[int]] = defaultdict(list)
    for item in known.values():
        lengths[item.kind].append(item.length)
    mean = {kind: sum(of_kind) / len(of_kind) for kind, of_kind in lengths.items()}
    return {name: usual[item.kind] * (0.5 + 0.5 * item.length / mean[item.kind]) for name, item in known.items()}


def candidates(known: Mapping[str, Item], progress: Progress, track: Collection[str] = ()) -> list[Candidate]:
    """Every item, as the plan weighs it; with a track (its cards) the new items of others wait."""
    takes = seconds(known, progress)
    return [
        Candidate(item, made.kind, takes[item], held(item, progress), bool(track) and made.card not in track)
        for item, made in known.items()
    ]


@dataclass(frozen=True)
class Day:
    """The list of a day of the plan, and how far it is done. Items by their ids, in the order in which they come."""

    chosen: tuple[Chosen, ...]  # the whole list
    again: tuple[str, ...]  # of what was answered today: wanted once more now
    left: tuple[str, ...]
    later: datetime | None  # when the next of what was answered today is wanted once more
    spent: float  # minutes, today

    @property
    def next(self) -> str | None:
        """What is asked now; None when the list is done."""
        return next(iter((*self.again, *self.left)), None)


def chosen(
    known: Mapping[str, Item],
    progress: Progress,
    begins: datetime,
    interview: datetime,
    minutes: float,
    track: Collection[str] = (),
) -> tuple[Chosen, ...]:
    """The list of the day that began then. It follows from what was known at that time, so that it stays as it is while
    it is worked through."""
    return plan.today(candidates(known, until(progress, begins), track), begins, interview, minutes)


def day_of(
    list_of_day: tuple[Chosen, ...], known: Mapping[str, Item], progress: Progress, at: datetime, begins: datetime
) -> Day:
    """How far the list of the day that began then is done."""
    of_today = list(itertools.takewhile(lambda review: review.at >= begins, reversed(progress.reviews)))
    answered = {r.item for r in of_today if r.counts and r.item in known}
    last = of_today[0].item if of_today else ""
    waiting = [(m.due, item) for item in answered if (m := held(item, progress)) is not None and m.learning]
    again = apart([item for due, item in sorted(waiting) if due <= at], last)
    left = apart([c.item for c in list_of_day if c.item not in answered], again[-1] if again else last)
    later = min((due for due, _ in waiting if due > at), default=None)
    spent = sum(min(review.seconds, LONGEST_THOUGHT_S) for review in of_today) / 60
    return Day(list_of_day, tuple(again), tuple(left), later, spent)


def interview_date(progress: Progress) -> date | None:
    """The date that the reader prepares for."""
    raw = progress.setting("interview")
    with contextlib.suppress(ValueError):
        return date.fromisoformat(raw) if isinstance(raw, str) else None
    return None


def morning(of: date, zone: tzinfo) -> datetime:
    """Nine o'clock of a day: when an interview is taken to be."""
    return datetime(of.year, of.month, of.day, 9, tzinfo=zone)


def leeches(known: Collection[str], progress: Progress) -> list[str]:
    """Items that are forgotten again and again, the worst first."""
    memories = {item: held(item, progress) for item in progress.past if item in known}
    worst = {item: m.lapses for item, m in memories.items() if m is not None and m.is_leech}
    return sorted(worst, key=lambda item: (-worst[item], item))
