"""Dates after FSRS: previews come true, a wish moves all dates, a day is the reader's."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from fsrs import Card, Rating, Scheduler
from hypothesis import given
from hypothesis import strategies as st

from study import schedule
from study.schedule import AGAIN, EASY, GOOD, RATINGS, day, is_due, memory, preview

START = datetime(2026, 3, 1, 8, tzinfo=UTC)
pasts = st.lists(st.tuples(st.integers(1, 60 * 24 * 40), st.sampled_from(RATINGS)), min_size=1, max_size=12).map(
    lambda gaps: tuple(
        (START + timedelta(minutes=sum(gap for gap, _ in gaps[: n + 1])), rating) for n, (_, rating) in enumerate(gaps)
    )
)


@given(pasts)
def test_memory_is_that_of_the_package(past):
    card, scheduler = Card(card_id=1), Scheduler(enable_fuzzing=False)
    for at, rating in past:
        card, _ = scheduler.review_card(card, Rating(rating), at)
    held = memory("a/b", past, 0.9)
    assert (held.stability, held.difficulty, held.last) == (card.stability, card.difficulty, card.last_review)
    assert held.reviews == len(past)


@given(pasts)
def test_a_preview_is_what_follows(past):
    at = past[-1][0] + timedelta(days=3, hours=1)
    for rating, after in preview("a/b", past, at, 0.9).items():
        schedule.memory.cache_clear()
        assert memory("a/b", (*past, (at, rating)), 0.9) == after


@given(pasts)
def test_a_better_grade_is_never_due_sooner(past):
    due = [after.due for _, after in sorted(preview("a/b", past, past[-1][0] + timedelta(days=2), 0.9).items())]
    assert due == sorted(due)


@given(pasts, st.floats(0.7, 0.96))
def test_who_wants_to_forget_less_reviews_no_later(past, wish):
    assert memory("a/b", past, 0.97).due <= memory("a/b", past, wish).due + timedelta(days=1)  # fuzz is in whole days


def test_items_learned_together_do_not_stay_together():
    past = ((START, EASY), (START + timedelta(days=9), GOOD))
    due = {memory(f"card/{n}", past, 0.9).due.date() for n in range(50)}
    assert len(due) >= 3
    plain = Scheduler(enable_fuzzing=False)
    card, _ = plain.review_card(Card(card_id=1), Rating(EASY), past[0][0])
    card, _ = plain.review_card(card, Rating(GOOD), past[1][0])
    days = (card.due - card.last_review).days
    most = max(1, round(days * schedule.FUZZ_SHARE)) + 1
    assert all(abs((memory(f"card/{n}", past, 0.9).due - card.due).days) <= most for n in range(50))


def test_an_item_that_is_forgotten_again_and_again_is_a_leech():
    past = [(START, EASY)]
    for n in range(schedule.LEECH_LAPSES):
        assert not memory("a/b", tuple(past), 0.9).is_leech
        at = START + timedelta(days=30 * (n + 1))
        past += [(at, AGAIN), (at + timedelta(minutes=11), GOOD)]
    assert memory("a/b", tuple(past), 0.9).is_leech


def test_recall_falls_from_one_through_nine_tenths():
    held = memory("a/b", ((START, EASY),), 0.9)
    assert held.recall(START) == 1
    assert held.recall(START + timedelta(days=held.stability)) == pytest.approx(0.9)  # what stability means
    assert held.recall(START + timedelta(days=400)) < 0.9
    assert memory("a/b", (), 0.9) is None


def test_a_late_evening_belongs_to_the_day_before():
    shanghai = ZoneInfo("Asia/Shanghai")
    assert day(datetime(2026, 3, 1, 19, 59, tzinfo=UTC), shanghai) == datetime(2026, 3, 1).date()  # 03:59 there
    assert day(datetime(2026, 3, 1, 20, 0, tzinfo=UTC), shanghai) == datetime(2026, 3, 2).date()


def test_due_is_a_matter_of_days_later_and_of_minutes_while_learning():
    learning = memory("a/b", ((START, GOOD),), 0.9)
    assert learning.learning
    assert not is_due(learning, learning.due - timedelta(seconds=1), UTC)
    assert is_due(learning, learning.due, UTC)
    known = memory("a/b", ((START, EASY),), 0.9)
    assert not known.learning
    morning = known.due.replace(hour=4, minute=0, second=0)
    assert is_due(known, morning, UTC)
    assert not is_due(known, morning - timedelta(seconds=1), UTC)
