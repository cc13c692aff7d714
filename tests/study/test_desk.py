"""What is asked when: due first, new within the day's number, siblings apart, the same after a reload."""

from datetime import UTC, date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from study import desk, schedule
from study.events import Review, Setting, Undo
from study.plan import SECONDS
from study.progress import fold

START = datetime(2026, 3, 2, 8, tzinfo=UTC)


@pytest.fixture(scope="session")
def known(deck):
    return desk.items(deck.cards, deck.topics)


def review(item, at=START, rating=4, **other):
    return Review(at=at, item=item, mode="review", score=1, rating=rating, counts=True, **other)


def new_a_day(n):
    return Setting(at=START - timedelta(days=99), name="new_a_day", value=n)


def test_items_stand_in_the_order_of_the_track_then_of_study(deck, known):
    track = (
        deck.tracks["algorithm-engineer"] if "algorithm-engineer" in deck.tracks else next(iter(deck.tracks.values()))
    )
    ordered = desk.items(deck.cards, deck.topics, track)
    written = [card for card in track.cards if card in deck.cards]
    cards = list(dict.fromkeys(desk.card_of(item) for item in ordered))
    assert cards[: len(written)] == written
    assert sorted(ordered) == sorted(known)


def test_an_empty_log_gives_the_new_items_of_the_day(known):
    now = desk.today(known, fold([new_a_day(4)]), START, UTC)
    assert now.due == ()
    assert len(now.new) == 4
    assert now.later is None
    assert set(now.new) == set(list(known)[:4])


def test_new_items_met_today_are_off_the_number_of_the_day(known):
    first, second, *_ = known
    yesterday = review(first, START - timedelta(days=1))
    now = desk.today(known, fold([new_a_day(4), yesterday, review(second)]), START + timedelta(hours=1), UTC)
    assert len(now.new) == 3
    undone = Undo(at=START + timedelta(minutes=1), of=yesterday.id)
    again = desk.today(known, fold([new_a_day(4), yesterday, review(second), undone]), START + timedelta(hours=1), UTC)
    assert first in again.new


def test_what_is_learned_now_comes_first_and_then_what_is_most_forgotten(known):
    learning, old, older, another, *_ = {desk.card_of(item): item for item in known}.values()  # one of each card
    log = [
        review(old, START - timedelta(days=40)),
        review(older, START - timedelta(days=80)),
        review(learning, START - timedelta(minutes=5), rating=1),
        Review(at=START - timedelta(minutes=1), item=another, mode="practice", score=1, rating=3, counts=False),
    ]
    assert desk.today(known, fold([new_a_day(0), *log]), START, UTC).due == (learning, older, old)


def test_what_comes_back_in_minutes_is_announced(known):
    item = next(iter(known))
    now = desk.today(known, fold([new_a_day(0), review(item, rating=3)]), START + timedelta(minutes=1), UTC)
    assert now.next is None
    assert now.later == START + timedelta(minutes=10)


items = st.lists(st.sampled_from([f"{card}/{n}" for card in "abcd" for n in range(5)]), unique=True)


@given(items, st.sampled_from(["", "a/0", "b/1"]))
def test_siblings_stand_apart_where_it_can_be_helped(some, last):
    placed = desk.apart(some, last)
    assert sorted(placed) == sorted(some)
    before = desk.card_of(last)
    for n, item in enumerate(placed):
        if desk.card_of(item) == before:  # then nothing else was left
            assert {desk.card_of(rest) for rest in placed[n:]} == {before}
            break
        before = desk.card_of(item)


def test_practice_begins_with_what_was_never_asked_and_ends_with_what_was_asked_last(known):
    some = list(known)[:30]
    log = [review(item, START + timedelta(minutes=n)) for n, item in enumerate(some[:10])]
    order = desk.practice(some, fold(log))
    assert sorted(order) == sorted(some)
    assert set(order[:15]).isdisjoint(some[:5])


def test_an_exam_is_drawn_once_for_its_seed(known):
    some = list(known)
    assert desk.exam(some, 12, seed=5) == desk.exam(some, 12, seed=5)
    assert desk.exam(some, 12, seed=5) != desk.exam(some, 12, seed=6)
    drawn = [item for item, _ in desk.exam(some, 12, seed=5)]
    assert len(set(drawn)) == 12
    assert len(desk.exam(some[:3], 12, seed=5)) == 3


def test_times_are_the_readers_own_once_there_are_five_of_a_kind(known):
    choices = [item for item, made in known.items() if made.kind == "choice"][:6]
    log = [review(item, START + timedelta(minutes=n), seconds=10 + n) for n, item in enumerate(choices)]

    def mean(events) -> float:  # half of an item's time goes by its length; the mean of a kind is the kind's time
        times = desk.seconds(known, fold(events))
        return sum(times[item] for item, made in known.items() if made.kind == "choice") / n_choices

    n_choices = sum(made.kind == "choice" for made in known.values())
    assert mean(log) == pytest.approx(13)
    assert mean(log[:4]) == pytest.approx(SECONDS["choice"])
    by_length = sorted((made.length, item) for item, made in known.items() if made.kind == "choice")
    times = desk.seconds(known, fold(log))
    assert times[by_length[-1][1]] > times[by_length[0][1]]
    away = [review(item, START + timedelta(minutes=n), seconds=9999) for n, item in enumerate(choices)]
    assert mean(away) == pytest.approx(SECONDS["choice"])


def test_the_plan_fills_the_minutes_of_the_day_and_no_more(known):
    settings = [Setting(at=START, name="minutes_a_day", value=20)]
    interview = date(2026, 3, 12)
    begins, when = schedule.begins(START.date(), UTC), desk.morning(interview, UTC)

    def day_at(at, *events, minutes=20.0, track=()):
        progress = fold([*settings, *events])
        list_of_day = desk.chosen(known, progress, begins, when, minutes, track)
        return desk.day_of(list_of_day, known, progress, at, begins)

    before = day_at(START)
    assert 0 < sum(c.seconds for c in before.chosen) <= 20 * 60
    assert set(before.left) == {c.item for c in before.chosen}
    assert before.next == before.left[0]
    # the list stays as it is while it is worked through, whatever an answer took; what failed comes back in its minute
    first = before.left[0]
    failed = review(first, START, rating=1, seconds=290)
    soon = day_at(START + timedelta(seconds=10), failed)
    assert soon.chosen == before.chosen
    assert set(soon.left) == set(before.left) - {first}
    assert (soon.again, soon.spent) == ((), 290 / 60)
    assert soon.later == START + timedelta(minutes=1)
    assert day_at(START + timedelta(minutes=2), failed).next == first
    assert 20 * 60 < sum(c.seconds for c in day_at(START, minutes=35.0).chosen) <= 35 * 60


def test_new_items_come_from_the_cards_of_the_track_first_and_reviews_from_all(known):
    cards = list(dict.fromkeys(item.card for item in known.values()))
    track, other = frozenset(cards[-1:]), next(item for item, made in known.items() if made.card == cards[0])
    past = [review(other, START - timedelta(days=n), rating=3) for n in (40, 30)]
    begins = schedule.begins(START.date(), UTC)
    list_of_day = desk.chosen(known, fold(past), begins, begins + timedelta(days=20), 1e6, track)
    new = [known[c.item].card in track for c in list_of_day if c.is_new]
    assert new == sorted(new, reverse=True)
    assert 0 < sum(new) < len(new)
    waiting = next(place for place, c in enumerate(list_of_day) if c.is_new and known[c.item].card not in track)
    assert other in {c.item for c in list_of_day[:waiting]}


def test_the_worst_leech_is_named_first(known):
    one, two = list(known)[:2]
    log = []
    for item, times in ((one, 6), (two, 8)):
        at = START - timedelta(days=2000)
        log.append(review(item, at))
        for _ in range(times):
            at += timedelta(days=60)
            log += [review(item, at, rating=1), review(item, at + timedelta(minutes=15), rating=3)]
    assert desk.leeches(known, fold(log)) == [two, one]
