"""What is to be answered now: the reviews that are due, the new items of the day, practice of anything, and exams.

Nothing is kept here: the desk follows from the items of the deck, the reader's progress and the time, so it is the same
after a reload and on another page. Items of one card do not follow each other where another card has one to give.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, tzinfo

from content.schema import Card, Topic, Track
from study import plan, schedule
from study.items import Item, items_of
from study.plan import Candidate, Chosen
from study.progress import Progress
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
    """How long an answer to each item takes this reader: the median of the last ones of its kind, else a usual time."""
    times: dict[str, list[float]] = {}
    for review in progress.reviews:
        if review.item in known and 0 < review.seconds <= LONGEST_THOUGHT_S:
            times.setdefault(known[review.item].kind, []).append(review.seconds)
    own = {kind: sorted(of_kind[-50:])[len(of_kind[-50:]) // 2] for kind, of_kind in times.items() if len(of_kind) >= 5}
    return {item: own.get(known[item].kind, plan.SECONDS[known[item].kind]) for item in known}


def candidates(known: Mapping[str, Item], progress: Progress) -> list[Candidate]:
    """Every item, as the plan weighs it."""
    takes = seconds(known, progress)
    return [Candidate(item, takes[item], held(item, progress)) for item in known]


def planned(
    known: Mapping[str, Item], progress: Progress, at: datetime, interview: date, zone: tzinfo
) -> tuple[Chosen, ...]:
    """Today's list for an interview at nine in the morning of its day; what was done today is off its minutes."""
    when = morning(interview, zone)
    spent = sum(min(r.seconds, LONGEST_THOUGHT_S) for r in progress.reviews if day(r.at, zone) == day(at, zone)) / 60
    minutes = max(0.0, float(progress.setting("minutes_a_day") or 0) - spent)
    return plan.today(candidates(known, progress), at, when, minutes)


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
