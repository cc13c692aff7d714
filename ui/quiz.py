"""The Quiz page: what is due, practice of anything, and exams."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta

import streamlit as st

from content.schema import Card
from engine.runner import Handle
from study import answers, desk, grading, schedule
from study.answers import Unreadable
from study.events import Report, Review, Undo, now
from study.grading import Grade
from study.items import Item, NumericQuestion, PredictQuestion, Question, RecallQuestion, pose
from study.schedule import RATINGS
from ui import asking, deck, exam, frame, learner, measuring, state, text
from ui.boundary import fragment
from ui.state import Asking
from ui.text import say, t

MODES = {
    "review": ":material/event_repeat:",
    "plan": ":material/event:",
    "practice": ":material/fitness_center:",
    "exam": ":material/timer:",
}
RATING_NAMES = {1: "again", 2: "hard", 3: "good", 4: "easy"}


def draw() -> None:
    """The mode stands in the link."""
    st.header(t("page_quiz"), anchor=False)
    learner.warning()
    mode = state.link_value("mode", MODES) or "review"
    chosen = st.segmented_control(
        t("quiz_mode"),
        MODES,
        default=mode,
        key="quiz_mode",
        format_func=lambda m: (
            f"{MODES[m]} {t(f'quiz_{m}')}"
        ),  # t("quiz_review") t("quiz_plan") t("quiz_practice") t("quiz_exam")
        label_visibility="collapsed",
        required=True,
    )
    state.set_link(mode=chosen)
    # a fragment: grading and moving on draw anew only what is below
    fragment(_kept)({"review": _review, "plan": _plan, "practice": _practice, "exam": exam.draw}[chosen])


def _kept(view: Callable[[], None]) -> None:
    view()
    learner.keep()


def known() -> dict[str, Item]:
    """All items of the deck, in the order in which new ones are met."""
    track = learner.progress().setting("track")
    return deck.items(track if isinstance(track, str) else None)


def _card(item: str) -> Card:
    return deck.deck().cards[desk.card_of(item)]


# -- review -----------------------------------------------------------------------------------------------------------


def _review() -> None:
    items, progress = known(), learner.progress()
    at, zone = now(), learner.zone()
    today = desk.today(items, progress, at, zone)
    done = sum(r.mode == "review" and schedule.day(r.at, zone) == schedule.day(at, zone) for r in progress.reviews)
    st.caption(t("quiz_today", due=len(today.due), new=len(today.new), done=done))
    held = state.reader().asking.get("review")
    # a question on the table stays there until it is graded, whatever comes due meanwhile
    item = held.item if held and held.item in items and held.attempt == _attempt(held.item) else today.next
    if item is None:
        _nothing_left(today.later, at, done)
        _undo_button()
        return
    _ask(items[item], "review")


def _nothing_left(later: datetime | None, at: datetime, done: int) -> None:
    st.success(t("quiz_done_today", n=done) if done else t("quiz_nothing_due"), icon=":material/task_alt:")
    if later is not None:
        st.caption(t("quiz_later", minutes=max(1, round((later - at) / timedelta(minutes=1)))))
    with st.container(horizontal=True):
        st.button(t("quiz_look_again"), icon=":material/refresh:", key="look-again")
        frame.link("quiz", t("quiz_practise_more"), icon=MODES["practice"], mode="practice")
        frame.link("cards", t("all_cards"), icon=":material/style:")


# -- the plan's list --------------------------------------------------------------------------------------------------


def _plan() -> None:
    items, progress = known(), learner.progress()
    at, zone = now(), learner.zone()
    interview = desk.interview_date(progress)
    if interview is None or interview < schedule.day(at, zone):
        st.info(t("plan_no_date"), icon=":material/event:")
        frame.link("progress", t("plan_set_date"), icon=":material/event:", view="plan")
        return
    chosen = [c.item for c in desk.planned(items, progress, at, interview, zone)]
    st.caption(t("quiz_plan_left", n=len(chosen), days=(interview - schedule.day(at, zone)).days))
    last = progress.reviews[-1].item if progress.reviews else ""
    held = state.reader().asking.get("plan")
    if held and held.item in items and held.attempt == _attempt(held.item):
        _ask(items[held.item], "plan")
    elif chosen:
        _ask(items[desk.apart(chosen, last)[0]], "plan")
    else:
        st.success(t("plan_nothing"), icon=":material/task_alt:")
        _undo_button()


# -- practice ---------------------------------------------------------------------------------------------------------


def _practice() -> None:
    items, progress = known(), learner.progress()
    cards = deck.deck().cards
    with st.container(horizontal=True):
        topics = list(dict.fromkeys(card.topic for card in cards.values()))
        topic = st.pills(
            t("topic"), topics, key="practice_topic", format_func=lambda v: say(deck.deck().topics[v].title)
        )
        kinds = list(dict.fromkeys(item.kind for item in items.values()))
        only_kind = st.pills(t("quiz_kind"), kinds, key="practice_kind", format_func=kind)
    only = state.link_value("card", cards)
    some = [
        name
        for name, item in items.items()
        if (not topic or cards[item.card].topic == topic)
        and (not only_kind or item.kind == only_kind)
        and (not only or item.card == only)
    ]
    if only:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(t("quiz_of_card", question=say(cards[only].question).strip()))
            st.button(t("quiz_all_items"), key="all-items", on_click=lambda: state.set_link(card=None), type="tertiary")
    if not some:
        st.info(t("quiz_no_items"), icon=":material/search_off:")
        return
    held = state.reader().asking.get("practice")
    stays = held and held.item in some and held.attempt == _attempt(held.item)
    item = held.item if held and stays else desk.practice(some, progress)[0]
    counts = bool(progress.setting("practice_counts"))
    st.caption(t("quiz_practice_counts") if counts else t("quiz_practice_is_free"))
    _ask(items[item], "practice")


def kind(of: str) -> str:
    """A kind of item, in the reader's language."""
    return t(f"kind_{of}")
    # t("kind_choice") t("kind_numeric") t("kind_predict") t("kind_order") t("kind_cloze") t("kind_shape")
    # t("kind_count") t("kind_recall")


# -- one question -----------------------------------------------------------------------------------------------------


def _attempt(item: str) -> int:
    return len(learner.progress().by_item.get(item, ()))


def _ask(item: Item, mode: str) -> None:
    reader, attempt = state.reader(), _attempt(item.id)
    held = reader.asking.get(mode)
    if held is None or (held.item, held.attempt) != (item.id, attempt):
        held = reader.asking[mode] = Asking(item.id, attempt)
    card = _card(item.id)
    question = pose(item, card, attempt)
    with st.container(border=True, key="question"):
        topic = say(deck.deck().topics[card.topic].title)
        st.caption(f"{topic} · {kind(item.kind)}")
        asking.prompt(question, card)
        if held.answer is None:
            _answering(question, card, held, mode)
        elif not grading.wants_run(question) or held.measured is not None or _run(question, card, held):
            _answered(question, card, held, mode)
    with st.container(horizontal=True):
        _undo_button()
        _report(item)


def _answering(question: Question, card: Card, held: Asking, mode: str) -> None:
    key = f"answer-{mode}-{held.item}-{held.attempt}"
    hints = asking.hints(question, card)
    for words in hints[: held.hints]:
        st.info(words, icon=":material/lightbulb:")
    label = t("quiz_show_points") if isinstance(question, RecallQuestion) else t("quiz_answer")
    left_out = max(0, held.hints - len(hints))  # once its words are said, a hint takes a wrong option away
    asking.controls(question, key, "", lambda answer: _submit(question, held, answer), label, left_out)
    if held.fault:
        reason, values = held.fault
        st.warning(t(reason, **values), icon=":material/edit:")
    with st.container(horizontal=True):
        st.button(
            t("quiz_hint"),
            key=f"{key}-hint",
            icon=":material/lightbulb:",
            shortcut="H",
            on_click=_hint,
            args=(held,),
            disabled=held.hints >= len(hints) + _wrong_options(question),
        )
        if not isinstance(question, RecallQuestion):
            st.button(
                t("quiz_dont_know"),
                key=f"{key}-pass",
                icon=":material/visibility:",
                shortcut="S",
                on_click=_give,
                args=(held, ""),
            )


def _wrong_options(question: Question) -> int:
    options = getattr(question, "options", ())
    return 0 if getattr(question, "multi", False) else max(0, sum(not option.right for option in options) - 1)


def _hint(held: Asking) -> None:
    held.hints += 1


def _submit(question: Question, held: Asking, answer: str) -> None:
    """Take an answer that can be read; the engine is asked afterwards, where it has to be."""
    try:
        grading.readable(question, answer)
    except Unreadable as refused:
        held.fault = (refused.reason, refused.values)
        return
    _give(held, answer)


def _give(held: Asking, answer: str) -> None:
    held.fault = None
    held.answer, held.at, held.seconds = answer, now(), time.monotonic() - held.began


def _run(question: Question, card: Card, held: Asking) -> bool:
    """Ask the engine; whether it has answered. While it works, its progress stands here."""
    assert isinstance(question, NumericQuestion | PredictQuestion)
    claim = question.claim

    def work(handle: Handle) -> float:
        def report(fraction: float) -> None:
            handle.progress(fraction, None)

        return grading.measure(card.id, claim, on_progress=report, check_stop=handle.check_stop)

    measured = measuring.asked(f"quiz:{held.item}", work)
    if measured is None:
        return False
    held.measured = measured
    _learn_from(question, held)
    return True


def _learn_from(question: Question, held: Asking) -> None:
    """A prediction, once it was run, is kept: it feeds the calibration plot."""
    if not isinstance(question, PredictQuestion) or not held.answer or held.measured is None:
        return
    if question.ask == "direction":
        predicted = 2.0 if held.answer == grading.LARGER else 0.5
    else:
        predicted = answers.number(held.answer, grading.unit_of(question))
    claim = question.claim
    learner.predicted(claim.experiment, claim.metric, predicted, held.measured, claim.id)


def _answered(question: Question, card: Card, held: Asking, mode: str) -> None:
    answer = held.answer or ""
    grade = None if isinstance(question, RecallQuestion) else _grade(question, answer, held.measured)
    asking.verdict(question, card, answer, grade, held.measured)
    with st.container(horizontal=True):
        frame.link("cards", t("quiz_read_card"), icon=":material/style:", card=card.id)
    _ratings(held, mode, grade)


def _grade(question: Question, answer: str, measured: float | None) -> Grade:
    return grading.grade(question, answer, measured) if answer else Grade(0.0)


def _ratings(held: Asking, mode: str, grade: Grade | None) -> None:
    progress = learner.progress()
    counts = mode != "practice" or bool(progress.setting("practice_counts"))
    at = held.at or now()
    after = schedule.preview(held.item, progress.past.get(held.item, ()), at, desk.retention(progress))
    best = grading.suggested(grade.score) if grade else None
    st.caption(t("quiz_rate") if counts else t("quiz_rate_practice"))
    with st.container(horizontal=True):
        for rating in RATINGS:
            when = f" · {text.span(after[rating].due - at)}" if counts else ""
            st.button(
                f"{t(f'rate_{RATING_NAMES[rating]}')}{when}",
                # t("rate_again") t("rate_hard") t("rate_good") t("rate_easy")
                key=f"rate-{held.item}-{held.attempt}-{rating}",
                type="primary" if rating == best else "secondary",
                shortcut=str(rating),
                help=t(f"rate_{RATING_NAMES[rating]}_help"),
                # t("rate_again_help") t("rate_hard_help") t("rate_good_help") t("rate_easy_help")
                on_click=_rate,
                args=(held, mode, rating, grade.score if grade else (rating - 1) / 3, counts),
                disabled=grade is not None and grade.score == 0 and rating > schedule.AGAIN,
            )


def _rate(held: Asking, mode: str, rating: int, score: float, counts: bool) -> None:
    """Keep the review and clear the table. A second click finds another attempt there and does nothing."""
    reader = state.reader()
    if reader.asking.get(mode) is not held or held.attempt != _attempt(held.item):
        return
    learner.record(
        Review(
            at=held.at or now(),
            item=held.item,
            mode="practice" if mode == "practice" else "review",
            score=score,
            rating=rating,
            counts=counts,
            seconds=held.seconds,
            attempt=held.attempt,
            answer=held.answer or "",
        )
    )
    del reader.asking[mode]


# -- beside the question ----------------------------------------------------------------------------------------------


def _undo_button() -> None:
    reviews = [review for review in learner.progress().reviews if review.mode != "exam"]
    st.button(
        t("quiz_undo"),
        key="undo",
        icon=":material/undo:",
        shortcut="U",
        help=t("quiz_undo_help"),
        disabled=not reviews,
        on_click=_undo,
        args=(reviews[-1].id if reviews else "",),
    )


def _undo(review: str) -> None:
    """Take back the last grade, and put its question on the table again."""
    found = next((r for r in learner.progress().reviews if r.id == review), None)
    if found is None:
        return
    learner.record(Undo(at=now(), of=review))
    state.reader().asking[found.mode] = Asking(found.item, _attempt(found.item))


def _report(item: Item) -> None:
    with st.popover(t("quiz_report"), icon=":material/flag:"):
        key = f"report-{item.id}"
        st.text_area(t("quiz_report_words"), key=key, max_chars=2000)

        def send() -> None:
            words = str(state.value_of(key) or "").strip()
            if words:
                learner.record(Report(at=now(), item=item.id, words=words))
                state.set_value(key, "")

        st.button(t("quiz_report_keep"), key=f"{key}-keep", on_click=send)
        sent = [r for r in learner.progress().reports if r.item == item.id]
        if sent:
            st.caption(t("quiz_reported", n=len(sent)))
            st.code("\n\n".join(f"{r.item}: {r.words}" for r in sent), language=None, wrap_lines=True)
