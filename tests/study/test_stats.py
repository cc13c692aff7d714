"""What a log adds up to, against sums of the tests' own."""

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from study import desk, schedule, stats
from study.events import Prediction, Review, Setting
from study.progress import fold

NOW = datetime(2026, 3, 31, 15, tzinfo=UTC)


@pytest.fixture(scope="module")
def known(deck):
    return desk.items(deck.cards, deck.topics)


@pytest.fixture(scope="module")
def log(known):
    chance = random.Random(7)
    items = list(known)[:40]
    return [
        Review(
            at=NOW - timedelta(days=chance.random() * 60),
            item=chance.choice(items),
            mode="review",
            score=1,
            rating=chance.choice([1, 2, 3, 3, 3, 4]),
            counts=True,
            seconds=chance.choice([5, 60, 4000]),
        )
        for _ in range(600)
    ]


def test_the_calendar_has_every_answer_on_its_day(log):
    table = stats.calendar(fold(log), NOW, UTC)
    assert table["n_reviews"].sum() == len(log)
    assert table["minutes"].sum() * 60 == pytest.approx(sum(min(r.seconds, 300) for r in log))
    for ago in (0, -1, -30):
        wanted = [r for r in log if schedule.day(r.at, UTC) == (NOW + timedelta(days=ago)).date()]
        assert table["n_reviews"][table["days_from_today"] == ago] == len(wanted)


def test_days_are_those_of_the_readers_zone():
    late = Review(
        at=datetime(2026, 3, 30, 21, tzinfo=UTC), item="a/b", mode="review", score=1, rating=3, counts=True
    )  # five in the morning of the 31st in Shanghai
    for zone, ago in ((UTC, -1), (ZoneInfo("Asia/Shanghai"), 0)):
        table = stats.calendar(fold([late]), NOW, zone)
        assert table["days_from_today"][table["n_reviews"] == 1] == ago


def test_the_forecast_has_every_item_met_once(known, log):
    progress = fold(log)
    table = stats.forecast(known, progress, NOW, UTC)
    later = [
        item for item in progress.past if (desk.held(item, progress).due - NOW) > timedelta(days=stats.DAYS_AHEAD + 1)
    ]
    assert len(progress.past) - len(later) - 3 <= table["n_due"].sum() <= len(progress.past) - len(later) + 3
    assert table["n_due"][0] >= len(desk.today(known, progress, NOW, UTC).due)
    assert not stats.forecast(known, fold([]), NOW, UTC)["n_due"].any()


def test_retention_counts_later_days_only(known):
    item, other = list(known)[:2]
    start = NOW - timedelta(days=40)
    log = [Review(at=start, item=item, mode="review", score=1, rating=4, counts=True)]
    log += [  # on the same day: learned, not recalled
        Review(at=start + timedelta(minutes=n), item=item, mode="review", score=0, rating=1, counts=True)
        for n in range(1, 9)
    ]
    assert len(stats.retention(fold(log), NOW, UTC)["recalled_share"]) == 0
    ratings = [3, 3, 1, 3, 4]
    log += [
        Review(at=NOW - timedelta(hours=1, minutes=n), item=name, mode="review", score=1, rating=rating, counts=True)
        for n, (name, rating) in enumerate(zip(list(known)[2:7], ratings, strict=True))
    ]
    log += [
        Review(at=start, item=name, mode="review", score=1, rating=3, counts=True)
        for name in [*list(known)[2:7], other]
    ]
    table = stats.retention(fold([*log, Setting(at=start, name="retention", value=0.85)]), NOW, UTC)
    assert table["recalled_share"].tolist() == [0.8]
    assert table["days_from_today"].tolist() == [-3]  # the week that ends today
    assert table["wished_share"].tolist() == [0.85]


def test_mastery_is_the_mean_of_predicted_recall(deck, known, log):
    progress = fold(log)
    group = {name: card.topic for name, card in deck.cards.items()}
    rows = {row.name: row for row in stats.mastery(known, progress, NOW, group)}
    assert sum(row.items for row in rows.values()) == len(known)
    assert sum(row.met for row in rows.values()) == len(progress.past)
    topic = next(iter(rows))
    wanted = [
        desk.held(i, progress).recall(NOW) if i in progress.past else 0
        for i, m in known.items()
        if group[m.card] == topic
    ]
    assert rows[topic].recall == pytest.approx(np.mean(wanted))


def test_calibration_has_values_and_no_directions():
    def prediction(predicted, measured, **other):
        return Prediction(at=NOW, experiment="e", metric="m", predicted=predicted, measured=measured, **other)

    log = [prediction(3, 4), prediction(2, 1.7), prediction(2, 2, ask="direction"), prediction(-1, 1), prediction(8, 8)]
    table = stats.calibration(fold(log))
    assert sorted(table["predicted"].tolist()) == [2, 3, 8]
    first, again = (
        prediction(n, 9, claim="some-claim").model_copy(update={"at": NOW + timedelta(minutes=n)}) for n in (5, 9)
    )
    assert stats.calibration(fold([again, first]))["predicted"].tolist() == [5]  # who has seen it predicts no more
    assert table["equal"].tolist() == table["predicted"].tolist()
