"""What a log adds up to: tables of days, of retention, of what is to come, of topics, and of predictions.

Tables are named numpy columns, as an experiment's are, and drawn by the same charts. Days are the reader's: whole
numbers from today, negative before.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, tzinfo

import numpy as np

from engine.base import Plot, Table
from study import desk
from study.desk import LONGEST_THOUGHT_S
from study.items import Item
from study.progress import Progress
from study.schedule import AGAIN, day, memory

DAYS_BACK = 90
DAYS_AHEAD = 30
WEEK = 7
LEAST_REVIEWS = 5  # of a week, to call a share of them a retention

PLOTS = {
    "calendar": Plot("calendar", table="calendar", x="days_from_today", y="n_reviews", mark="bar"),
    "minutes": Plot("minutes", table="calendar", x="days_from_today", y="minutes", mark="bar"),
    "retention": Plot("retention", "retention", "days_from_today", "recalled_share", theory="wished_share"),
    "forecast": Plot("forecast", table="forecast", x="days_from_today", y="n_due", mark="bar"),
    "calibration": Plot(
        "calibration",
        table="calibration",
        x="predicted",
        y="measured",
        mark="point",
        theory="equal",
        x_scale="log10",
        y_scale="log10",
    ),
}


@dataclass(frozen=True)
class Mastery:
    """One topic or card: items, those met, the mean recall predicted for now with new items as 0."""

    name: str
    items: int
    met: int
    recall: float


def calendar(progress: Progress, at: datetime, zone: tzinfo, days_back: int = DAYS_BACK) -> Table:
    """Answers and minutes of each of the last days, today last."""
    today = day(at, zone)
    counts: Counter[int] = Counter()
    seconds: dict[int, float] = defaultdict(float)
    for review in progress.reviews:
        ago = (day(review.at, zone) - today).days
        counts[ago] += 1
        seconds[ago] += min(review.seconds, LONGEST_THOUGHT_S)
    days = np.arange(-days_back + 1, 1)
    return {
        "days_from_today": days,
        "n_reviews": np.array([counts[int(ago)] for ago in days]),
        "minutes": np.array([seconds[int(ago)] / 60 for ago in days]),
    }


def retention(progress: Progress, at: datetime, zone: tzinfo) -> Table:
    """Of each week with enough of them: the share of later days' reviews that were recalled, beside the wished one."""
    today, wished = day(at, zone), desk.retention(progress)
    weeks: dict[int, list[bool]] = defaultdict(list)
    for past in progress.past.values():
        for (before, _), (when, rating) in itertools.pairwise(past):
            if day(before, zone) != day(when, zone):
                weeks[(today - day(when, zone)).days // WEEK].append(rating > AGAIN)
    kept = {week: answers for week, answers in sorted(weeks.items(), reverse=True) if len(answers) >= LEAST_REVIEWS}
    return {
        "days_from_today": np.array([-(WEEK * week + WEEK // 2) for week in kept], dtype=np.int64),
        "recalled_share": np.array([float(np.mean(answers)) for answers in kept.values()]),
        "wished_share": np.full(len(kept), wished),
    }


def forecast(known: Mapping[str, Item], progress: Progress, at: datetime, zone: tzinfo) -> Table:
    """Reviews that come due on each day ahead, if nothing else is answered; what is overdue counts for today."""
    wished, today = desk.retention(progress), day(at, zone)
    due: Counter[int] = Counter()
    for item in known:
        held = memory(item, progress.past.get(item, ()), wished)
        if held is not None:
            due[max(0, (day(held.due, zone) - today).days)] += 1
    days = np.arange(DAYS_AHEAD)
    return {"days_from_today": days, "n_due": np.array([due[int(ahead)] for ahead in days])}


def mastery(known: Mapping[str, Item], progress: Progress, at: datetime, group: Mapping[str, str]) -> list[Mastery]:
    """Of each group of cards (a topic, or a card itself): how much of it would be recalled now."""
    wished = desk.retention(progress)
    rows: dict[str, list[tuple[float, bool]]] = {}
    for item, made in known.items():
        held = memory(item, progress.past.get(item, ()), wished)
        row = (0.0, False) if held is None else (held.recall(at), True)
        rows.setdefault(group[made.card], []).append(row)
    return [
        Mastery(
            name,
            len(of_group),
            sum(met for _, met in of_group),
            sum(recall for recall, _ in of_group) / len(of_group),
        )
        for name, of_group in rows.items()
    ]


def calibration(progress: Progress) -> Table:
    """Predicted values beside measured ones, those that a logarithm takes; of a claim only the first: whoever has seen
    the number does not predict it any more."""
    first = {p.claim or p.id: p for p in reversed(progress.predictions) if p.ask == "value"}
    pairs = [(p.predicted, p.measured) for p in reversed(first.values()) if p.predicted > 0 and p.measured > 0]
    predicted = np.array([pair[0] for pair in pairs])
    return {"predicted": predicted, "measured": np.array([pair[1] for pair in pairs]), "equal": predicted}
