"""The Quiz page: what is due, practice of anything, and exams."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

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
from ui.boundary import fragment, guarded
from ui.state import Asking
from ui.text import item_kind, say, t

MODES = {
    "review": ":material/event_repeat:",
    "plan": ":material/event:",
    "practice": ":material/fitness_center:",
    "exam": ":material/timer:",
}
MORE_MINUTES = 15
OWN_SCORE = {1: 0.0, 2: 0.5, 3: 1.0, 4: 1.0}  # of an answer that only the reader has judged
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
    with guarded(view.__name__):
        view()
    learner.keep()  # also what was recorded before something failed


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
    begins = schedule.begins(schedule.day(at, zone), zone)
    of_today = itertools.takewhile(lambda review: review.at >= begins, reversed(progress.reviews))
    done = sum(review.mode == "review" for review in of_today)
    st.caption(t("quiz_today", due=len(today.due), new=len(today.new), done=done))
    held = state.reader().asking.get("review")
    # a question on the table stays there until it is graded, whatever comes due meanwhile
    item = held.item if held and held.item in items and held.attempt == _attempt(held.item) else today.next
    if item is None:
        _nothing_left(today.later, at, done)
        _undo_button("review")
        return
    _ask(items[item], "review")


def _nothing_left(later: datetime | None, at: datetime, done: int) -> None:
    st.success(t("quiz_done_today", n=done) if done else t("quiz_nothing_due"), icon=":material/task_alt:")
    _comes_back(later, at)
    with st.container(horizontal=True):
        st.button(t("quiz_look_again"), icon=":material/refresh:", key="look-again")
        more = t("quiz_practise_more")
        if st.button(more, key="practise-more", icon=MODES["practice"], on_click=_switch, args=("practice",)):
            st.rerun()  # the modes stand outside this fragment
        frame.link("cards", t("all_cards"), icon=":material/style:")


def _comes_back(later: datetime | None, at: datetime) -> None:
    if later is not None:
        st.caption(t("quiz_later", minutes=max(1, round((later - at) / timedelta(minutes=1)))))


# -- the plan's list --------------------------------------------------------------------------------------------------


def day_of_plan() -> desk.Day | None:
    """Today's list; None without a date that is still to come."""
    reader, progress, at, zone = state.reader(), learner.progress(), now(), learner.zone()
    interview, today = desk.interview_date(progress), schedule.day(at, zone)
    if interview is None or interview < today:
        return None
    begins, items = schedule.begins(today, zone), known()
    track = deck.deck().tracks.get(str(progress.setting("track")))
    first = frozenset(track.cards) if track else frozenset()
    before = bisect.bisect_left(progress.reviews, begins, key=lambda review: review.at)
    newest = progress.reviews[before - 1].id if before else ""
    when, minutes = desk.morning(interview, zone), minutes_today()
    # all that the list follows from: it is weighed anew only when one of these is another
    cause = (begins, when, minutes, first, len(items), before, newest, desk.retention(progress))
    if reader.plan is None or reader.plan[0] != cause:
        reader.plan = cause, desk.chosen(items, progress, begins, when, minutes, first)
    return desk.day_of(reader.plan[1], items, progress, at, begins)


def minutes_today() -> float:
    """Those of the setting, and what was asked for beyond them on this visit."""
    day, more = state.reader().more_minutes
    today = schedule.day(now(), learner.zone())
    return float(learner.progress().setting("minutes_a_day") or 0) + (more if day == today else 0)


def _plan() -> None:
    items, today = known(), day_of_plan()
    if today is None:
        is_over = desk.interview_date(learner.progress()) is not None
        st.info(t("plan_over") if is_over else t("plan_no_date"), icon=":material/event:")
        frame.link("progress", t("plan_set_date"), icon=":material/event:", view="plan")
        return
    done, spent = len(today.chosen) - len(today.left), f"{today.spent:.0f}"
    st.caption(t("quiz_plan_done", done=done, n=len(today.chosen), spent=spent, minutes=f"{minutes_today():.0f}"))
    held = state.reader().asking.get("plan")
    if held and held.item in items and held.attempt == _attempt(held.item):
        _ask(items[held.item], "plan")
    elif today.next:
        _ask(items[today.next], "plan")
    else:
        st.success(t("plan_nothing"), icon=":material/task_alt:")
        _comes_back(today.later, now())
        with st.container(horizontal=True):
            if today.later is not None:
                st.button(t("quiz_look_again"), icon=":material/refresh:", key="look-again")
            st.button(t("plan_more_minutes", n=MORE_MINUTES), key="more-minutes", icon=":material/add:", on_click=_more)
        _undo_button("plan")


def _more() -> None:
    more = minutes_today() - float(learner.progress().setting("minutes_a_day") or 0)
    state.reader().more_minutes = schedule.day(now(), learner.zone()), more + MORE_MINUTES


def _switch(mode: str) -> None:
    state.set_value("quiz_mode", mode)


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
        only_kind = st.pills(t("quiz_kind"), kinds, key="practice_kind", format_func=item_kind)
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
    # what was answered stays until it is graded, whatever is chosen above meanwhile
    here = held and (held.item in some or (held.answer is not None and held.item in items))
    stays = here and held and held.attempt == _attempt(held.item)
    item = held.item if held and stays else desk.practice(some, progress)[0]
    counts = bool(progress.setting("practice_counts"))
    st.caption(t("quiz_practice_counts") if counts else t("quiz_practice_is_free"))
    _ask(items[item], "practice")


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
        st.caption(f"{topic} · {item_kind(item.kind)}")
        if held.answer is None and not any(desk.card_of(met) == card.id for met in learner.progress().by_item):
            frame.link("cards", t("quiz_new_card"), icon=":material/style:", card=card.id)
        asking.prompt(question, card)
        if held.answer is None:
            _answering(question, card, held, mode)
        elif not grading.wants_run(question) or held.measured is not None or _run(question, card, held):
            _answered(question, card, held, mode)
    with st.container(horizontal=True):
        _undo_button(mode)
        _report(item)
    frame.turned_to(held.id)


def _answering(question: Question, card: Card, held: Asking, mode: str) -> None:
    key = f"answer-{held.id}"  # a question that comes back is answered anew
    hints = asking.hints(question, card)
    for words in hints[: held.hints]:
        with st.container(border=True):
            st.markdown(f":material/lightbulb: {words}")
    label = t("quiz_show_points") if isinstance(question, RecallQuestion) else t("quiz_answer")
    left_out = max(0, held.hints - len(hints))  # once its words are said, a hint takes a wrong option away
    asking.controls(question, key, "", lambda answer: _submit(question, held, answer), label, left_out)
    if held.fault:
        st.warning(asking.fault(*held.fault), icon=":material/edit:")
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

    measured = measuring.asked(f"quiz:{held.id}", work)  # of this question: another attempt draws other numbers
    if measured is None:
        return False
    held.measured = measured
    _learn_from(question, held)
    return True


def _learn_from(question: Question, held: Asking) -> None:
    """A prediction, once it was run, is kept: it feeds the calibration plot."""
    if not isinstance(question, PredictQuestion) or not held.answer or held.measured is None:
        return
    is_direction = question.ask == "direction"
    if is_direction:
        predicted = 2.0 if held.answer == grading.LARGER else 0.5
    else:
        predicted = answers.number(held.answer, grading.unit_of(question))
    claim = question.claim
    learner.predicted(claim.experiment, claim.metric, predicted, held.measured, claim.id, is_direction=is_direction)


def _answered(question: Question, card: Card, held: Asking, mode: str) -> None:
    answer = held.answer or ""
    if isinstance(question, RecallQuestion):
        said = asking.rubric(question, card, answer, f"answer-{held.id}")
        grade = None if said is None else Grade(said)
        own = True
    else:
        grade, own = _grade(question, answer, held.measured), False
        asking.verdict(question, card, answer, grade, held.measured)
    frame.link("cards", t("quiz_read_card"), icon=":material/style:", card=card.id)
    _ratings(held, mode, grade, own)


def _grade(question: Question, answer: str, measured: float | None) -> Grade:
    return grading.grade(question, answer, measured) if answer else Grade(0.0)


def _ratings(held: Asking, mode: str, grade: Grade | None, own: bool) -> None:
    """The grades to choose from; ``own``: the reader has judged the answer, so every one of them may be given."""
    progress = learner.progress()
    counts = mode != "practice" or bool(progress.setting("practice_counts"))
    at = held.at or now()
    after = schedule.preview(held.item, progress.past.get(held.item, ()), at, desk.retention(progress))
    best = grading.suggested(grade.score, held.hints) if grade else None
    offered = [schedule.AGAIN] if grade and grade.score == 0 and not own else list(RATINGS)
    if grade and not own and not counts:
        offered = [best or schedule.AGAIN]  # it moves no date, and how right it was is known
    if len(offered) > 1:
        st.caption(t("quiz_rate") if counts else t("quiz_rate_practice"))
    with st.container(horizontal=True):
        for rating in offered:
            when = f" · {text.span(after[rating].due - at)}" if counts else ""
            label = f"{t(f'rate_{RATING_NAMES[rating]}')}{when}" if counts or len(offered) > 1 else t("quiz_next")
            # t("rate_again") t("rate_hard") t("rate_good") t("rate_easy")
            st.button(
                label,
                key=f"rate-{held.id}-{rating}",
                type="primary" if rating == best or len(offered) == 1 else "secondary",
                shortcut=str(rating) if len(offered) > 1 or counts else "N",
                help=t(f"rate_{RATING_NAMES[rating]}_help") if counts or len(offered) > 1 else None,
                # t("rate_again_help") t("rate_hard_help") t("rate_good_help") t("rate_easy_help")
                on_click=_rate,
                args=(held, mode, rating, grade.score if grade else OWN_SCORE[rating], counts),
            )


def _rate(held: Asking, mode: str, rating: int, score: float, counts: bool) -> None:
    """Keep the review and clear the table. A second click finds another attempt there and does nothing."""
    reader = state.reader()
    learner.look_again()  # another tab may have answered it
    if reader.asking.get(mode) is not held or held.attempt != _attempt(held.item):
        return
    reviews = learner.progress().reviews
    # in the order of grading, for that is the order in which they are taken back
    newest = reviews[-1].at + timedelta(microseconds=1) if reviews else datetime.min.replace(tzinfo=UTC)
    kept = learner.record(
        Review(
            at=max(held.at or now(), newest),
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
    if kept:
        del reader.asking[mode]


# -- beside the question ----------------------------------------------------------------------------------------------


def _undo_button(mode: str) -> None:
    reviews = [review for review in learner.progress().reviews if review.mode != "exam"]
    st.button(
        t("quiz_undo"),
        key="undo",
        icon=":material/undo:",
        shortcut="U",
        help=t("quiz_undo_help"),
        disabled=not reviews,
        on_click=_undo,
        args=(reviews[-1].id if reviews else "", mode),
    )


def _undo(review: str, mode: str) -> None:
    """Take back the last grade, and put its question on the table again: on this one, where it is of its kind."""
    found = next((r for r in learner.progress().reviews if r.id == review), None)
    if found is None:
        return
    if not learner.record(Undo(at=now(), of=review)):
        return
    here = mode if (mode == "practice") == (found.mode == "practice") else found.mode
    state.reader().asking[here] = Asking(found.item, _attempt(found.item))


def _report(item: Item) -> None:
    with st.popover(t("quiz_report"), icon=":material/flag:"):
        key = f"report-{item.id}"
        st.text_area(t("quiz_report_words"), key=key, max_chars=2000)

        def send() -> None:
            words = str(state.value_of(key) or "").strip()
            if words and learner.record(Report(at=now(), item=item.id, words=words)):
                state.set_value(key, "")

        st.button(t("quiz_report_keep"), key=f"{key}-keep", on_click=send)
        sent = [r for r in learner.progress().reports if r.item == item.id]
        if sent:
            st.caption(t("quiz_reported", n=len(sent)))
            st.code("\n\n".join(f"{r.item}: {r.words}" for r in sent), language=None, wrap_lines=True)
