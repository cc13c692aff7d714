"""The log's laws: what is computed depends on the set of events alone, and every line of it is read for ever."""

import json
import math
import random
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claims.verify import Verdict, interval
from study import events as ev
from study.events import BadLine, read_line, read_lines, write_line
from study.measured import event_of, verdict_of
from study.progress import DEFAULTS, fold

COMMITTED = Path(__file__).parent / "log-v1.jsonl"
START = datetime(2026, 3, 1, 8, tzinfo=UTC)
ITEMS = ("a-card/one", "a-card/two", "b-card/one")

ids = st.integers(0, 2**128 - 1).map("{:032x}".format)
times = st.integers(0, 60).map(lambda minutes: START + timedelta(minutes=minutes))  # few: equal times do occur
reviews = st.builds(
    ev.Review,
    id=ids,
    at=times,
    item=st.sampled_from(ITEMS),
    mode=st.sampled_from(["review", "practice", "exam"]),
    score=st.floats(0, 1),
    rating=st.integers(1, 4),
    counts=st.booleans(),
)
settings = st.builds(
    ev.Setting, id=ids, at=times, name=st.sampled_from(["retention", "new_a_day"]), value=st.floats(0.7, 0.97)
)
predictions = st.builds(
    ev.Prediction,
    id=ids,
    at=times,
    experiment=st.just("qk_variance"),
    metric=st.just("logits_std"),
    predicted=st.floats(-9, 9),
    measured=st.floats(-9, 9),
)
exams = st.builds(
    ev.Exam, id=st.just("e" * 32), at=times, items=st.just(((ITEMS[0], 0), (ITEMS[1], 3))), minutes=st.just(9)
)
sheets = st.builds(
    ev.Sheet,
    id=ids,
    at=times,
    exam=st.just("e" * 32),
    place=st.integers(0, 3),
    answer=st.text(max_size=3),
    flagged=st.booleans(),
)
handed_in = st.builds(ev.Submitted, id=ids, at=times, exam=st.just("e" * 32))


@st.composite
def logs(draw):
    """Events of every kind; some reviews are taken back, some twice, and one undo is of a review that is not there."""
    events = draw(st.lists(st.one_of(reviews, reviews, settings, predictions, exams, sheets, handed_in), max_size=25))
    targets = [event.id for event in events if isinstance(event, ev.Review)] + ["f" * 32]
    undone = draw(st.lists(st.sampled_from(targets), max_size=4))
    undos = [ev.Undo(at=draw(times), of=target) for target in undone]
    return [*events, *undos]


def union(*some):
    """The events of several logs, each id once, the first of it."""
    return list({event.id: event for log in reversed(some) for event in reversed(log)}.values())


@given(logs(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_nothing(log, chance):
    unique = union(log)
    shuffled = chance.sample(unique, len(unique))
    assert fold(shuffled) == fold(unique)


@given(logs(), logs())
def test_merging_twice_is_merging_once(one, other):
    merged = union(one, other)
    assert fold([*merged, *merged, *one]) == fold(merged) == fold([*one, *other])


@given(logs())
def test_a_review_that_is_taken_back_might_never_have_been(log):
    unique = union(log)
    undone = {event.of for event in unique if isinstance(event, ev.Undo)}
    without = [e for e in unique if not isinstance(e, ev.Undo) and e.id not in undone]
    with_undo, never = fold(unique), fold(without)
    assert with_undo.reviews == never.reviews
    assert with_undo.past == never.past
    assert with_undo.settings == never.settings
    assert not {review.id for review in with_undo.reviews} & undone


@given(logs())
def test_a_log_comes_back_from_its_lines(log):
    assert list(read_lines(write_line(event) for event in log)) == log


def test_only_what_counts_moves_dates():
    counting, not_counting = (
        ev.Review(at=START, item=ITEMS[0], mode="practice", score=1, rating=3, counts=counts)
        for counts in (True, False)
    )
    progress = fold([counting, not_counting])
    assert progress.past[ITEMS[0]] == ((START, 3),)
    assert len(progress.by_item[ITEMS[0]]) == 2


def test_the_last_setting_counts_and_the_others_are_defaults():
    first, second = (
        ev.Setting(at=START + timedelta(days=day), name="retention", value=value)
        for day, value in ((0, 0.8), (1, 0.95))
    )
    progress = fold([second, first])
    assert progress.setting("retention") == 0.95
    assert progress.setting("new_a_day") == DEFAULTS["new_a_day"]


def test_an_exam_holds_the_last_of_each_place_and_the_first_submission():
    exam = ev.Exam(at=START, items=((ITEMS[0], 0), (ITEMS[1], 1)), minutes=10)
    sheet = [
        ev.Sheet(at=START + timedelta(minutes=1), exam=exam.id, place=0, answer="b"),
        ev.Sheet(at=START + timedelta(minutes=2), exam=exam.id, place=0, answer="c", flagged=True),
        ev.Sheet(at=START + timedelta(minutes=1), exam=exam.id, place=7, answer="there is no such place"),
        ev.Submitted(at=START + timedelta(minutes=4), exam=exam.id),
        ev.Submitted(at=START + timedelta(minutes=3), exam=exam.id),
    ]
    (state,) = fold([exam, *reversed(sheet)]).exams
    assert state.answers == {0: "c"}
    assert state.flagged == {0}
    assert state.submitted == START + timedelta(minutes=3)


def test_a_sheet_counts_as_it_stood_at_the_end():
    """Another page may still show it, with the solutions in sight."""
    exam = ev.Exam(at=START, items=((ITEMS[0], 0),), minutes=10)

    def sheet(minute, answer):
        return ev.Sheet(at=START + timedelta(minutes=minute), exam=exam.id, place=0, answer=answer)

    (open_one,) = fold([exam, sheet(1, "a"), sheet(11, "b")]).exams
    assert open_one.answers == {0: "a"}  # the clock had run out
    handed_in = ev.Submitted(at=START + timedelta(minutes=5), exam=exam.id)
    (done,) = fold([exam, sheet(1, "a"), sheet(6, "b"), handed_in]).exams
    assert done.answers == {0: "a"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention", "x"),
        ("retention", 0.2),
        ("new_a_day", float("nan")),
        ("minutes_a_day", 1000.0),
        ("interview", "tomorrow"),
        ("interview", 7.0),
        ("track", 1.0),
        ("practice_counts", "yes"),
    ],
)
def test_a_setting_that_no_page_could_show_is_refused(name, value):
    with pytest.raises(ValueError, match="validation error"):
        ev.Setting(at=START, name=name, value=value)


@pytest.mark.parametrize("at", ["9999-01-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "1999-12-31T23:59:59Z"])
def test_a_time_that_no_calendar_could_show_is_refused_as_a_line(at):
    with pytest.raises(BadLine):
        read_line('{"v":1,"id":"' + "0" * 32 + f'","at":"{at}","kind":"undo","of":"' + "1" * 32 + '"}')


def test_times_are_kept_in_utc_whatever_their_zone():
    east = ev.Undo(at=datetime(2026, 3, 1, 16, tzinfo=timezone(timedelta(hours=8))), of="0" * 32)
    assert east.at == START
    assert east.at.tzinfo is UTC
    assert read_line(write_line(east)) == east
    with pytest.raises(ValueError, match="timezone"):
        ev.Undo(at=datetime(2026, 3, 1), of="0" * 32)


def test_a_log_of_this_version_is_read_for_ever():
    """The committed file has every kind of event. It is never changed: a new form is a new file beside it."""
    lines = COMMITTED.read_text("utf-8").splitlines()
    events = [read_line(line, number) for number, line in enumerate(lines, start=1)]
    assert {event.kind for event in events} == {
        "review", "undo", "prediction", "setting", "exam", "sheet", "submitted", "report", "measured",
    }  # fmt: skip
    for event, line in zip(events, lines, strict=True):  # a field that came later is written with its default
        assert json.loads(line).items() <= json.loads(write_line(event)).items()
    progress = fold(random.Random(1).sample(events, len(events)))
    assert len(progress.reviews) == 2
    assert progress.setting("interview") == "2026-04-01"
    assert progress.exams[0].submitted is not None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("", "log_line_damaged"),
        ("{}", "log_line_damaged"),
        ("[1, 2]", "log_line_damaged"),
        ("not json", "log_line_damaged"),
        ('{"v":1,"id":"' + "0" * 32 + '","at":"2026-03-01T08:00:00Z","kind":"report"}', "log_line_damaged"),
        ('{"v":1,"id":"short","at":"2026-03-01T08:00:00Z","kind":"undo","of":"f"}', "log_line_damaged"),
        (
            '{"v":2,"id":"' + "0" * 32 + '","at":"2026-03-01T08:00:00Z","kind":"undo","of":"f"}',
            "log_line_newer",
        ),
        ('{"v":1,"id":"' + "0" * 32 + '","at":"2026-03-01T08:00:00Z","kind":"dreamt"}', "log_line_newer"),
        (
            '{"v":1,"id":"' + "0" * 32 + '","at":"2026-03-01T08:00:00Z","kind":"undo","of":"f","x":1}',
            "log_line_damaged",
        ),
        ('{"kind":"report","words":"' + "a" * 200_000 + '"}', "log_line_too_long"),
    ],
)
def test_a_line_that_is_no_event_is_refused_with_its_number(line, reason):
    with pytest.raises(BadLine) as refused:
        read_line(line, 7)
    assert (refused.value.line, refused.value.reason) == (7, reason)


def test_an_own_receipt_comes_back_while_claim_and_code_are_the_same(deck):
    claim = next(c for c in deck.cards["sdpa-scale-sqrt-dk"].claims if c.seeds)
    verdict = Verdict(
        claim=claim.id,
        card="sdpa-scale-sqrt-dk",
        value=math.nan,
        values=(1.5, math.nan),
        low=interval(claim.expect)[0],
        high=interval(claim.expect)[1],
        holds=False,
        failed_seeds=(1,),
        seeds=(0, 1),
        device="cuda:0",
        dtype="float32",
        torch="2.13.0",
        seconds=0.5,
    )
    event = read_line(write_line(event_of(verdict, claim, START)))
    again = verdict_of(event, claim)
    assert repr(again) == repr(verdict)  # nan is not equal to itself
    other = claim.model_copy(update={"params": {**claim.params, "d_k": 3}})
    assert verdict_of(event, other) is None
    assert verdict_of(event.model_copy(update={"code_hash": "0" * 16}), claim) is None
