"""What reviews would do to many items at once: the formulas of FSRS-6 on arrays.

The package ``fsrs`` decides dates (``schedule.py``); it takes one item at a time, and a plan weighs hundreds of items
at once. A test holds each function against the package.

Source: the package's own ``Scheduler``, version 6, with its default parameters.
"""

from __future__ import annotations

import numpy as np
from fsrs.scheduler import DEFAULT_PARAMETERS

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

DEFAULT = np.array(DEFAULT_PARAMETERS)
LEAST_STABILITY = 0.001
AGAIN, HARD, GOOD, EASY = 1, 2, 3, 4
# How a first meeting with an item goes: shares of again, hard, good, easy. A guess of ours, of which the plan makes its
# own: how much a new item is worth beside one that is known.
FIRST = np.array([0.25, 0.1, 0.55, 0.1])


def recall(stability: Array, days: Array | float, w: Array = DEFAULT) -> Array:
    """Probability of recall after some days. Shapes: those of the stability."""
    decay = -w[..., 20]
    factor = 0.9 ** (1 / decay) - 1
    out: Array = (1 + factor * np.maximum(days, 0) / stability) ** decay
    return out


def first_stability(rating: Array | int, w: Array = DEFAULT) -> Array:
    """Stability after the first review, in days."""
    out: Array = np.maximum(np.choose(np.asarray(rating) - 1, [w[..., i] for i in range(4)]), LEAST_STABILITY)
    return out


def first_difficulty(rating: Array | int, w: Array = DEFAULT) -> Array:
    """Difficulty after the first review, from 1 to 10."""
    return np.clip(_first_difficulty(rating, w), 1, 10)


def _first_difficulty(rating: Array | int, w: Array) -> Array:
    out: Array = w[..., 4] - np.exp(w[..., 5] * (np.asarray(rating) - 1.0)) + 1
    return out


def next_difficulty(difficulty: Array, rating: Array | int, w: Array = DEFAULT) -> Array:
    """Difficulty after a further review."""
    moved = difficulty - w[..., 6] * (np.asarray(rating) - 3.0) * (10 - difficulty) / 9
    return np.clip(w[..., 7] * _first_difficulty(EASY, w) + (1 - w[..., 7]) * moved, 1, 10)


def after_success(
    stability: Array, difficulty: Array, recalled: Array, rating: Array | int, w: Array = DEFAULT
) -> Array:
    """Stability after a review on a later day that succeeded; ``recalled`` is the probability that it would."""
    rating = np.asarray(rating)
    hard = np.where(rating == HARD, w[..., 15], 1.0)
    easy = np.where(rating == EASY, w[..., 16], 1.0)
    spacing = np.exp((1 - recalled) * w[..., 10]) - 1
    out: Array = stability * (
        1 + np.exp(w[..., 8]) * (11 - difficulty) * stability ** -w[..., 9] * spacing * hard * easy
    )
    return np.maximum(out, LEAST_STABILITY)


def after_lapse(stability: Array, difficulty: Array, recalled: Array, w: Array = DEFAULT) -> Array:
    """Stability after a review on a later day that failed."""
    long = (
        w[..., 11]
        * difficulty ** -w[..., 12]
        * ((stability + 1) ** w[..., 13] - 1)
        * np.exp((1 - recalled) * w[..., 14])
    )
    short = stability / np.exp(w[..., 17] * w[..., 18])
    return np.maximum(np.minimum(long, short), LEAST_STABILITY)


def same_day(stability: Array, rating: Array | int, w: Array = DEFAULT) -> Array:
    """Stability after a further review on the same day."""
    rating = np.asarray(rating)
    factor = np.exp(w[..., 17] * (rating - 3 + w[..., 18])) * stability ** -w[..., 19]
    return np.maximum(stability * np.where(rating >= HARD, np.maximum(factor, 1), factor), LEAST_STABILITY)
