"""The plan: its formulas against the package, its list against an exhaustive one, its gain on simulated learners."""

import itertools
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from fsrs import Card, Rating, Scheduler, State
from hypothesis import given
from hypothesis import strategies as st

from bench import plan as bench
from study import forecast, plan
from study.items import KINDS
from study.plan import Candidate, today
from study.schedule import RATINGS, memory

START = datetime(2026, 3, 1, 8, tzinfo=UTC)
stabilities = st.floats(0.01, 2000)
difficulties = st.floats(1, 10)
days = st.integers(1, 400)


def reviewed(stability, difficulty, elapsed, rating):
    """The package's card after one review of a card in review."""
    card = Card(card_id=1, state=State.Review, stability=stability, difficulty=difficulty, last_review=START)
    after, _ = Scheduler(enable_fuzzing=False).review_card(card, Rating(rating), START + elapsed)
    return after


@given(stabilities, difficulties, days, st.sampled_from(RATINGS))
def test_a_later_review_is_the_packages(stability, difficulty, n_days, rating):
    wanted = reviewed(stability, difficulty, timedelta(days=n_days), rating)
    recalled = forecast.recall(np.float64(stability), n_days)
    card = Card(card_id=1, state=State.Review, stability=stability, difficulty=difficulty, last_review=START)
    package = Scheduler().get_card_retrievability(card, START + timedelta(days=n_days))
    assert recalled == pytest.approx(package, rel=1e-12)  # the same few roundings
    given_ = np.float64(stability), np.float64(difficulty), recalled
    ours = forecast.after_lapse(*given_) if rating == 1 else forecast.after_success(*given_, rating)
    assert ours == pytest.approx(wanted.stability, rel=1e-9)
    assert forecast.next_difficulty(np.float64(difficulty), rating) == pytest.approx(wanted.difficulty, rel=1e-9)


@given(stabilities, difficulties, st.sampled_from(RATINGS))
def test_a_review_on_the_same_day_is_the_packages(stability, difficulty, rating):
    wanted = reviewed(stability, difficulty, timedelta(minutes=10), rating)
    assert forecast.same_day(np.float64(stability), rating) == pytest.approx(wanted.stability, rel=1e-9)


@pytest.mark.parametrize("rating", RATINGS)
def test_a_first_review_is_the_packages(rating):
    card, _ = Scheduler(enable_fuzzing=False).review_card(Card(card_id=1), Rating(rating), START)
    assert forecast.first_stability(rating) == pytest.approx(card.stability, rel=1e-12)
    assert forecast.first_difficulty(rating) == pytest.approx(card.difficulty, rel=1e-12)


def candidates(n_known, n_new):
    past = [((START - timedelta(days=2 + n), 3), (START - timedelta(days=1 + n), 1 + n % 4)) for n in range(n_known)]
    known = [Candidate(f"a/{n}", "choice", 30.0 + n, memory(f"a/{n}", past[n], 0.9)) for n in range(n_known)]
    return known + [Candidate(f"b/{n}", "choice", 40.0 + n, None) for n in range(n_new)]


@pytest.mark.parametrize("days_left", [0.5, 3, 30])
def test_the_list_gains_the_most_that_its_minutes_can(days_left):
    """Against all subsets. Filling by worth per second is optimal but for the last item that does not fit any more."""
    some, interview = candidates(5, 4), START + timedelta(days=days_left)
    every = {c.item: c for c in today(some, START, interview, minutes=1e9)}
    for minutes in (1, 3, 6):
        chosen = today(some, START, interview, minutes)
        assert sum(c.seconds for c in chosen) <= 60 * minutes
        gain = sum(c.with_it - c.without for c in chosen)
        best = max(
            sum(c.with_it - c.without for c in subset)
            for size in range(len(every) + 1)
            for subset in itertools.combinations(every.values(), size)
            if sum(c.seconds for c in subset) <= 60 * minutes
        )
        largest = max(c.with_it - c.without for c in every.values())
        assert best - largest <= gain <= best + 1e-12


def test_the_kinds_share_the_minutes_as_they_share_what_is_worth_asking():
    """A slow kind is not crowded out by a quick one, and within a kind the worthiest come first."""
    quick = [Candidate(f"q/{n}", "choice", 20.0 + n, None) for n in range(30)]
    slow = [Candidate(f"s/{n}", "recall", 90.0 + n, None) for n in range(10)]
    chosen = today(quick + slow, START, START + timedelta(days=9), minutes=20)
    takes = {name: sum(c.seconds for c in chosen if c.item.startswith(name)) for name in "qs"}
    wanted = sum(c.seconds for c in slow) / sum(c.seconds for c in quick + slow)
    largest = 2 * max(c.seconds for c in slow)  # an item that fits no more, looked at twice
    assert abs(takes["s"] / 1200 - wanted) <= largest / 1200
    for name in "qs":
        numbers = [int(c.item[2:]) for c in chosen if c.item.startswith(name)]
        assert numbers == sorted(numbers)


def test_what_gains_nothing_is_left_out():
    held = memory("a/b", ((START - timedelta(minutes=30), 4),), 0.9)
    known_now = [Candidate("a/b", "choice", 30, held)]
    assert not today(known_now, START, START, minutes=60)  # and the interview is now
    assert today([], START, START + timedelta(days=3), minutes=60) == ()


def test_without_a_review_the_prediction_is_that_of_the_schedule():
    some, interview = candidates(4, 1), START + timedelta(days=9)
    wanted = [c.held.recall(interview) if c.held else 0 for c in some]
    assert plan.predicted(some, START, interview) == pytest.approx(wanted, rel=1e-12)


def test_every_kind_has_its_time():
    assert set(plan.SECONDS) == set(KINDS)


@pytest.mark.slow
def test_on_simulated_learners_the_plan_loses_at_no_horizon():
    """bench/plan.py in small: 100 learners, three standard errors of the difference between two policies."""
    better = 0
    for interview in bench.HORIZONS:
        recalls = {name: bench.simulate(policy, interview, n_learners=100) for name, policy in bench.POLICIES.items()}
        for name in ("due dates", "through the deck"):
            gain = recalls["plan"] - recalls[name]
            noise = 3 * gain.std() / len(gain) ** 0.5
            assert gain.mean() > -noise, (interview, name)
        better += all((recalls["plan"] - recalls[n]).mean() > noise for n in ("due dates", "through the deck"))
    assert better >= 2
