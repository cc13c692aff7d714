"""The exam of the Quiz page: a number of items and a clock, an answer sheet, one submission, the wrong ones once more.

The sheet is in the log, and every choice goes onto it at once: an exam goes on after a reload, on another page and on
another machine. When the clock runs out the sheet counts as it stands, also where no page was open then.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Mapping
from datetime import datetime, timedelta
from math import ceil

import streamlit as st

from content.schema import Card
from engine.runner import Handle
from study import desk, grading
from study.answers import Unreadable
from study.events import Exam, Review, Sheet, Submitted, now
from study.grading import Grade
from study.items import Item, NumericQuestion, PredictQuestion, Question, pose
from study.progress import ExamState
from study.schedule import AGAIN, GOOD
from ui import asking, deck, frame, learner, measuring, prose, state
from ui.boundary import fragment
from ui.text import item_kind, say, t

SIZES = (5, 10, 20, 40)
MINUTES_AN_ITEM = 1.5
ANSWERED, OPEN, FLAGGED = ":material/check_box:", ":material/check_box_outline_blank:", ":material/flag:"


def draw() -> None:
    """The exam that goes on, or the result of the last one and the beginning of another."""
    exams = learner.progress().exams
    running = next((exam for exam in reversed(exams) if exam.submitted is None), None)
    if running is not None and now() >= _ends(running):
        _hand_in(running)
        running, exams = None, learner.progress().exams
    if running is not None:
        _sheet(running)
        return
    if exams and exams[-1].submitted is not None:
        _result(exams[-1])
    _new()


def _ends(exam: ExamState) -> datetime:
    return exam.begun + timedelta(minutes=exam.minutes)


def _items() -> dict[str, Item]:
    """What a program can grade, of all cards."""
    return {name: item for name, item in deck.items(None).items() if item.kind != "recall"}


def _question(item: str, attempt: int) -> tuple[Question, Card]:
    card = deck.deck().cards[desk.card_of(item)]
    return pose(deck.items(None)[item], card, attempt), card


# -- a new one --------------------------------------------------------------------------------------------------------


def _new() -> None:
    st.subheader(t("exam_new"), anchor=False)
    cards = deck.deck().cards
    with st.container(border=True):
        topics = list(dict.fromkeys(card.topic for card in cards.values()))
        st.pills(
            t("topic"),
            topics,
            key="exam_topics",
            selection_mode="multi",
            format_func=lambda v: say(deck.deck().topics[v].title),
            help=t("exam_topics_help"),
        )
        size = st.segmented_control(
            t("exam_size"), SIZES, default=10, key="exam_size", required=True, on_change=_fit_minutes
        )
        st.number_input(
            t("exam_minutes"), 1, 240, _minutes(size or 10), key="exam_minutes", help=t("exam_minutes_help")
        )
        st.button(t("exam_begin"), key="exam-begin", type="primary", icon=":material/timer:", on_click=_begin)


def _minutes(n_items: int) -> int:
    return ceil(MINUTES_AN_ITEM * n_items)


def _fit_minutes() -> None:
    state.set_value("exam_minutes", _minutes(int(state.value_of("exam_size"))))


def _begin() -> None:
    topics = state.value_of("exam_topics")
    cards = deck.deck().cards
    some = [name for name, item in _items().items() if not topics or cards[item.card].topic in topics]
    _start(
        desk.exam(some, int(state.value_of("exam_size")), secrets.randbits(31)), float(state.value_of("exam_minutes"))
    )


def _start(items: tuple[tuple[str, int], ...], minutes: float) -> None:
    """One at a time: a second click finds the first one's exam going on."""
    if items and all(exam.submitted is not None for exam in learner.progress().exams):
        learner.record(Exam(at=now(), items=items, minutes=minutes))


# -- the sheet --------------------------------------------------------------------------------------------------------


def _sheet(exam: ExamState) -> None:
    fragment(_clock, run_every=1.0)(exam)
    places = range(len(exam.items))
    key = f"exam-place-{exam.id}"
    place = st.segmented_control(
        t("exam_sheet"), places, default=0, key=key, format_func=lambda p: _mark(exam, p), required=True
    )
    item, attempt = exam.items[place]
    if item in _items():
        _place(exam, place, *_question(item, attempt))
        frame.turned_to(f"{exam.id}-{place}")
    else:
        st.warning(t("exam_item_gone"), icon=":material/search_off:")
    _ending(exam)


def _mark(exam: ExamState, place: int) -> str:
    flag = FLAGGED if place in exam.flagged else ""
    return f"{ANSWERED if place in exam.answers else OPEN}{flag} {place + 1}"


def _clock(exam: ExamState) -> None:
    left = (_ends(exam) - now()).total_seconds()
    if left <= 0:
        st.rerun()
    share = min(1.0, max(0.0, left / (60 * exam.minutes)))
    st.progress(share, text=t("exam_left", minutes=int(left // 60), seconds=f"{int(left % 60):02d}"))


def _place(exam: ExamState, place: int, question: Question, card: Card) -> None:
    """One item of the sheet. What stands in the controls is kept with each change."""
    key, given, flagged = f"exam-{exam.id}-{place}", exam.answers.get(place, ""), place in exam.flagged

    def keep(answer: str) -> None:
        if _refused(question, answer) is None:
            _keep(exam.id, place, answer, flagged)

    with st.container(border=True):
        asking.prompt(question, card)
        asking.open_controls(question, key, given, keep)
        if (refused := _refused(question, asking.written(question, key))) is not None:
            st.warning(asking.fault(refused.reason, refused.values), icon=":material/edit:")
        elif given:
            st.caption(t("exam_kept"))
    with st.container(horizontal=True):
        st.button(
            t("exam_back"),
            key=f"{key}-back-one",
            icon=":material/chevron_left:",
            shortcut="P",
            disabled=place == 0,
            on_click=_turn,
            args=(exam.id, place - 1),
        )
        st.button(
            t("exam_next"),
            key=f"{key}-next",
            icon=":material/chevron_right:",
            shortcut="N",
            type="primary",
            disabled=place + 1 == len(exam.items),
            on_click=_turn,
            args=(exam.id, place + 1),
        )
        st.button(
            t("exam_unflag") if flagged else t("exam_flag"),
            key=f"{key}-flag",
            icon=FLAGGED,
            shortcut="F",
            on_click=_flag,
            args=(exam.id, place),
        )


def _refused(question: Question, answer: str) -> Unreadable | None:
    """Why an answer can't be read; None where it can, or is none."""
    try:
        if answer.strip():
            grading.readable(question, answer)
    except Unreadable as refused:
        return refused
    return None


def _turn(exam: str, place: int) -> None:
    state.set_value(f"exam-place-{exam}", place)


def _running(exam: str) -> ExamState | None:
    """An exam as its sheet stands now; None once it was handed in."""
    return next((e for e in learner.progress().exams if e.id == exam and e.submitted is None), None)


def _flag(exam: str, place: int) -> None:
    sheet = _running(exam)
    if sheet is not None:
        _keep(exam, place, sheet.answers.get(place, ""), place not in sheet.flagged)


def _keep(exam: str, place: int, answer: str, flagged: bool) -> None:
    sheet = _running(exam)
    if sheet is not None and (sheet.answers.get(place, ""), place in sheet.flagged) != (answer, flagged):
        learner.record(Sheet(at=now(), exam=exam, place=place, answer=answer, flagged=flagged))


def _ending(exam: ExamState) -> None:
    left = len(exam.items) - len(exam.answers)
    with st.popover(t("exam_hand_in"), icon=":material/assignment_turned_in:"):
        st.markdown(t("exam_open_places", n=left) if left else t("exam_all_answered"))
        if exam.flagged:
            st.markdown(t("exam_flagged_places", places=", ".join(str(place + 1) for place in sorted(exam.flagged))))
        st.button(t("exam_hand_in_now"), key="hand-in", on_click=_hand_in, args=(exam,))


def _hand_in(exam: ExamState) -> None:
    """Once, however often it is clicked, and with the time of the clock where that ran out before."""
    if _running(exam.id) is not None:
        learner.record(Submitted(at=min(now(), _ends(exam)), exam=exam.id))


# -- the result -------------------------------------------------------------------------------------------------------


def _result(exam: ExamState) -> None:
    grades = _grades(exam)
    if grades is None:
        return
    right = sum(grade.right for grade in grades.values())
    st.subheader(t("exam_result", right=right, of=len(exam.items)), anchor=False)
    assert exam.submitted is not None
    st.caption(
        t("exam_took", minutes=f"{(exam.submitted - exam.begun) / timedelta(minutes=1):.0f}", of=f"{exam.minutes:g}")
    )
    wrong = [place for place in range(len(exam.items)) if place in grades and not grades[place].right]
    if wrong:
        st.button(
            t("exam_again_wrong", n=len(wrong)),
            key=f"again-{exam.id}",
            icon=":material/replay:",
            on_click=_again,
            args=(tuple(exam.items[place] for place in wrong),),
        )
    _by_topic(exam, grades)
    for place, (item, attempt) in enumerate(exam.items):
        if place not in grades:
            continue
        grade, answer = grades[place], exam.answers.get(place, "")
        question, card = _question(item, attempt)
        name, icon = asking.sign(answer, grade)
        asked = getattr(question, "prompt", None) or card.question  # some are asked in words of the interface
        title = f"{icon} {place + 1}. {t(name)} · {item_kind(question.item.kind)} · {prose.cited(say(asked).strip())}"
        with st.expander(title, key=f"result-{exam.id}-{place}", on_change="rerun") as fold:
            if fold.open:
                asking.prompt(question, card)
                asking.verdict(question, card, answer, grade, _measured(exam).get(place))
                frame.link("cards", t("quiz_read_card"), icon=":material/style:", card=card.id)


def _by_topic(exam: ExamState, grades: Mapping[int, Grade]) -> None:
    held = deck.deck()
    by_topic: dict[str, list[bool]] = {}
    for place, grade in grades.items():
        topic = held.cards[desk.card_of(exam.items[place][0])].topic
        by_topic.setdefault(topic, []).append(grade.right)
    rows = [
        {t("topic"): say(held.topics[topic].title), t("exam_right"): f"{sum(right)} / {len(right)}"}
        for topic, right in by_topic.items()
    ]
    if len(rows) > 1:
        st.table(rows, border="horizontal")


def _again(items: tuple[tuple[str, int], ...]) -> None:
    """The wrong ones once more, as they were, with the usual time."""
    _start(items, float(_minutes(len(items))))


def _measured(exam: ExamState) -> dict[int, float]:
    return state.reader().exam_runs.get(exam.id, {})


def _grades(exam: ExamState) -> dict[int, Grade] | None:
    """The grade of each place; None while the engine is asked. The reviews are kept once."""
    questions = {place: _question(*each) for place, each in enumerate(exam.items) if each[0] in _items()}
    wanted = {p: q for p, (q, _) in questions.items() if grading.wants_run(q)}  # also to show what it would have been
    if wanted and exam.id not in state.reader().exam_runs and not _run(exam, wanted):
        return None
    measured = _measured(exam)
    grades = {}
    for place, (question, _) in questions.items():
        answer = exam.answers.get(place, "")
        # an item that was edited since may not know this answer any more: it does not count
        with contextlib.suppress(Unreadable):
            grades[place] = grading.grade(question, answer, measured.get(place)) if answer else Grade(0.0)
    _remember(exam, grades)
    return grades


def _run(exam: ExamState, wanted: Mapping[int, Question]) -> bool:
    """Ask the engine for the numbers of an exam; whether they are there."""

    def work(handle: Handle) -> dict[int, float]:
        found = {}
        for n, (place, question) in enumerate(wanted.items()):
            assert isinstance(question, NumericQuestion | PredictQuestion)
            handle.progress(n / len(wanted), None)
            found[place] = grading.measure(question.item.card, question.claim, check_stop=handle.check_stop)
        return found

    measured = measuring.asked(f"exam:{exam.id}", work)
    if measured is None:
        return False
    state.reader().exam_runs[exam.id] = measured
    return True


def _remember(exam: ExamState, grades: Mapping[int, Grade]) -> None:
    """The answers of an exam as reviews that move no date, once: their ids follow from the exam."""
    assert exam.submitted is not None
    kept = {review.id for review in learner.progress().reviews}
    answered = [place for place in grades if exam.answers.get(place)]
    if all(review_id(exam.id, place) in kept for place in answered):
        return
    learner.record(
        *(
            Review(
                id=review_id(exam.id, place),
                at=exam.submitted,
                item=exam.items[place][0],
                mode="exam",
                score=grades[place].score,
                rating=GOOD if grades[place].right else AGAIN,
                counts=False,
                attempt=exam.items[place][1],
                answer=exam.answers[place],
            )
            for place in answered
        )
    )


def review_id(exam: str, place: int) -> str:
    """The id of an exam's review: the same wherever and however often it is graded."""
    return hashlib.sha256(f"{exam} {place}".encode()).hexdigest()[:32]
