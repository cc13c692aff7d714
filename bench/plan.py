"""The plan for the date against two plain ways to study, on simulated learners.

Their memories follow the forgetting curve with parameters of their own, drawn around the default ones; no policy knows
them: each sees only what was answered, and believes in the default parameters. They lapse, and miss days. What counts
is the share of the deck that they would recall on the day of the interview, which here is known exactly.

``due dates``     what is due first, the longest overdue before; then new items in the order of the deck
``through the deck``   new items in order; when all are known, those that were not seen for longest
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from bench.measure import Row
from study import forecast, plan
from study.forecast import AGAIN, DEFAULT, EASY, FIRST, GOOD, HARD, Array

LEARNERS = 1000
ITEMS = 300
MINUTES = 30
HORIZONS = (7, 14, 30)
MISSED_DAYS = 0.15  # of all days
SPREAD = 0.3  # of the logarithm of each parameter
SECONDS_SPREAD = 0.1  # of the logarithm of an item's time, around the time of its kind: that of the deck
OF_KIND = {
    "choice": 9,
    "numeric": 2,
    "predict": 2,
    "order": 1,
    "cloze": 2,
    "shape": 1,
    "count": 2,
    "recall": 1,
}  # a card
KINDS = np.resize([kind for kind, n in OF_KIND.items() for _ in range(n)], ITEMS)  # in the order of the deck
LATER = np.array([0.15, 0.7, 0.15])  # hard, good, easy, of later reviews that succeed

# What the parameters of FSRS may be, of those whose drawn values could leave their range.
_RANGES = {
    4: (1, 10), 5: (0.001, 4), 7: (0, 0.75), 8: (0, 4.5), 9: (0, 0.8), 10: (0.001, 3.5), 13: (0.001, 0.9), 15: (0, 1),
    16: (1, 6), 17: (0, 2), 18: (0, 2), 19: (0.001, 0.8), 20: (0.1, 0.8),
}  # fmt: skip


@dataclass
class Memories:
    """Many learners' memories of many items. Shapes: (learner, item); ``w``: (learner or 1, 1, parameter)."""

    w: Array
    stability: Array  # nan while an item is new
    difficulty: Array
    last: Array  # day of the last review

    @classmethod
    def empty(cls, w: Array, n_learners: int) -> Memories:
        """Nobody knows anything."""
        return cls(w, *(np.full((n_learners, ITEMS), np.nan) for _ in range(2)), np.zeros((n_learners, ITEMS)))

    def recall(self, day: int) -> Array:
        """Probability of recall on a day."""
        known = np.where(np.isnan(self.stability), 1.0, self.stability)
        return np.where(np.isnan(self.stability), 0.0, forecast.recall(known, day - self.last, self.w))

    def review(self, which: Array, rating: Array, day: int) -> None:
        """Review items; what failed, and what is new and not easy, is seen once more on the same day."""
        w, new, recalled = self.w, np.isnan(self.stability), self.recall(day)
        old, hard = np.where(new, 1.0, self.stability), np.where(new, 5.0, self.difficulty)
        later = np.where(
            rating == AGAIN,
            forecast.after_lapse(old, hard, recalled, w),
            forecast.after_success(old, hard, recalled, rating, w),
        )
        stability = np.where(new, forecast.first_stability(rating, w), later)
        difficulty = np.where(new, forecast.first_difficulty(rating, w), forecast.next_difficulty(hard, rating, w))
        twice = (rating == AGAIN) | (new & (rating < EASY))
        stability = np.where(twice, forecast.same_day(stability, GOOD, w), stability)
        difficulty = np.where(twice, forecast.next_difficulty(difficulty, GOOD, w), difficulty)
        self.stability = np.where(which, stability, self.stability)
        self.difficulty = np.where(which, difficulty, self.difficulty)
        self.last = np.where(which, day, self.last)


Policy = Callable[[Memories, int, int, Array], Array]  # belief, day, day of the interview, seconds: the best is largest


def by_plan(belief: Memories, day: int, interview: int, seconds: Array) -> Array:
    """What the recall of the date gains for its time: study/plan.py."""
    left = interview - day
    without, with_it, takes = plan.weigh(belief.stability, belief.difficulty, day - belief.last, left, seconds)
    worth = np.where(with_it - without >= plan.LEAST_GAIN, (with_it - without) / takes, -np.inf)
    return -plan.in_turn(worth, np.broadcast_to(takes, worth.shape), KINDS)


def by_due_date(belief: Memories, day: int, interview: int, seconds: Array) -> Array:
    """What is due, then what is new."""
    due = belief.last + np.maximum(1, np.round(belief.stability))
    return np.where(np.isnan(due), -1e6 - np.arange(ITEMS), np.where(due <= day, -due, -np.inf))


def through_the_deck(belief: Memories, day: int, interview: int, seconds: Array) -> Array:
    """What is new in order, then what was not seen for longest."""
    return np.where(np.isnan(belief.stability), 1e6 - np.arange(ITEMS), -1e3 * belief.last - np.arange(ITEMS) / ITEMS)


POLICIES: dict[str, Policy] = {"plan": by_plan, "due dates": by_due_date, "through the deck": through_the_deck}


def simulate(policy: Policy, interview: int, *, n_learners: int = LEARNERS, seed: int = 0) -> Array:
    """The share of the deck that each learner recalls on the day of the interview. Shapes: (learner,)."""
    chance = np.random.default_rng(seed)
    w = np.tile(DEFAULT, (n_learners, 1, 1)) * np.exp(SPREAD * chance.standard_normal((n_learners, 1, len(DEFAULT))))
    w[..., :4].sort(axis=-1)
    for parameter, (low, high) in _RANGES.items():
        w[..., parameter] = w[..., parameter].clip(low, high)
    truth, belief = Memories.empty(w, n_learners), Memories.empty(DEFAULT[None, None], n_learners)
    usual = [plan.SECONDS[kind] for kind in KINDS]
    seconds = np.exp(chance.normal(np.log(usual), SECONDS_SPREAD, (1, ITEMS)))
    for day in range(interview):
        there = chance.random((n_learners, 1)) >= MISSED_DAYS
        new, recalled = np.isnan(truth.stability), truth.recall(day)
        succeeds = chance.random((n_learners, ITEMS)) < recalled
        first = chance.choice([AGAIN, HARD, GOOD, EASY], p=FIRST, size=(n_learners, ITEMS))
        later = chance.choice([HARD, GOOD, EASY], p=LATER, size=(n_learners, ITEMS))
        rating = np.where(new, first, np.where(succeeds, later, AGAIN))
        which = there & _within_minutes(policy(belief, day, interview, seconds), belief, day, seconds)
        truth.review(which, rating, day)
        belief.review(which, rating, day)
    return np.asarray(truth.recall(interview).mean(axis=1))


def _within_minutes(worth: Array, belief: Memories, day: int, seconds: Array) -> Array:
    """The items that fill the minutes of a day, the best first, each with the time that it is expected to take."""
    takes = seconds * np.where(np.isnan(belief.stability), plan.LOOKS_AT_NEW, 2 - belief.recall(day))
    order = np.argsort(-worth, axis=1, kind="stable")
    fits = np.take_along_axis(takes, order, axis=1).cumsum(axis=1) <= 60 * MINUTES
    which = np.zeros(worth.shape, dtype=bool)
    np.put_along_axis(which, order, fits & np.isfinite(np.take_along_axis(worth, order, axis=1)), axis=1)
    return which


def rows() -> Iterable[Row]:
    """Recall on the day of the interview by policy, and what the plan gains over the better of the two others."""
    for interview in HORIZONS:
        recalls = {name: simulate(policy, interview) for name, policy in POLICIES.items()}
        for name, values in recalls.items():
            yield Row("plan", f"{interview} days, {name}: recall", 100 * float(values.mean()), "%")
        for name in ("due dates", "through the deck"):
            loss = recalls[name] - recalls["plan"]  # of the same learner, on the same days
            error = 300 * loss.std() / np.sqrt(len(loss))
            note = f"± {error:.1f}: three standard errors over {len(loss)} learners"
            yield Row("plan", f"{interview} days, {name} minus plan", 100 * float(loss.mean()), "%", note, aim=0.0)
