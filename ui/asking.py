"""One question on the table: how it is drawn, answered, and what is shown after the answer. Used by review, practice,
exams and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from content.schema import Card, Option
from study import grading
from study.events import LONGEST_TEXT
from study.grading import LARGER, SMALLER, Grade
from study.items import (
    ChoiceQuestion,
    ClozeQuestion,
    NumericQuestion,
    OrderQuestion,
    PredictQuestion,
    Question,
    RecallQuestion,
    ShapeQuestion,
)
from ui import deck, engine, frame, ledger, prose, runs, state, text
from ui.text import say, t

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
HOLE = "___"


def prompt(question: Question, card: Card) -> None:
    """What is asked."""
    if isinstance(question, OrderQuestion):
        st.markdown(f"**{t('quiz_order')}**")
        st.caption(say(card.question).strip())
    elif isinstance(question, ChoiceQuestion) and question.prompt is None:
        st.markdown(f"**{t('quiz_find_the_wrong')}**")
        st.caption(say(card.question).strip())
    else:
        assert question.prompt is not None
        st.markdown(f"**{prose.markdown(card, question.prompt).strip()}**")
    if isinstance(question, ClozeQuestion):
        st.code(question.code.strip("\n"), language="python", wrap_lines=True)


# -- answering --------------------------------------------------------------------------------------------------------


def controls(
    question: Question, key: str, given: str, submit: Callable[[str], None], label: str, left_out: int = 0
) -> None:
    """A form that takes an answer, filled with ``given``; ``submit`` is called with what the log keeps of it.

    ``left_out``: how many wrong options a hint has taken away.
    """
    if isinstance(question, OrderQuestion):
        arranged = _arrange(question, key, given, None)
        with st.container(horizontal=True):
            st.button(
                label,
                key=f"{key}-submit",
                type="primary",
                icon=":material/check:",
                shortcut="Enter",
                disabled=len(arranged) < len(question.steps),
                on_click=lambda: submit(_places(arranged)),
            )
            _one_back(key, arranged, None)
        return
    with st.form(f"{key}-form", border=False):
        _fields(question, key, given, left_out, None)
        st.form_submit_button(
            label, type="primary", icon=":material/check:", on_click=lambda: submit(written(question, key))
        )


def open_controls(question: Question, key: str, given: str, keep: Callable[[str], None]) -> None:
    """The same controls without a form: ``keep`` is called with each change."""
    if isinstance(question, OrderQuestion):
        arranged = _arrange(question, key, given, keep)
        _one_back(key, arranged, keep)
    else:
        _fields(question, key, given, 0, lambda: keep(written(question, key)))


def _fields(question: Question, key: str, given: str, left_out: int, changed: Callable[[], None] | None) -> None:
    if isinstance(question, ChoiceQuestion):
        _options(question.options, key, grading.places(given), question.multi, left_out, changed)
    elif isinstance(question, ClozeQuestion):
        held = grading.places(given)
        for hole, options in enumerate(question.holes):
            number = hole if len(question.holes) > 1 else None
            _hole(options, f"{key}-{hole}", held[hole : hole + 1], number, changed)
    elif isinstance(question, PredictQuestion) and question.ask == "direction":
        sides = (LARGER, SMALLER)
        st.radio(
            t("quiz_direction"),
            sides,
            index=sides.index(given) if given in sides else None,
            key=key,
            format_func=lambda side: t(f"quiz_{side}"),  # t("quiz_larger") t("quiz_smaller")
            label_visibility="collapsed",
            on_change=changed,
        )
    elif isinstance(question, RecallQuestion):
        st.text_area(_label(question), given, key=key, max_chars=LONGEST_TEXT, on_change=changed)
    else:
        st.text_input(_label(question), given, key=key, max_chars=200, autocomplete="off", on_change=changed)


def _label(question: Question) -> str:
    if isinstance(question, NumericQuestion | PredictQuestion):
        unit = grading.unit_of(question)
        return t("quiz_number") if unit == "1" else f"{t('quiz_number')} · {_unit(unit)}"
    if isinstance(question, ShapeQuestion):
        return t("quiz_shape") if question.item.kind == "shape" else t("quiz_count")
    return t("quiz_in_your_words")


def _unit(unit: str) -> str:
    return "" if unit == "1" else say(deck.deck().strings.units[unit])


def _options(
    options: Sequence[Option],
    key: str,
    held: Sequence[int],
    multi: bool,
    left_out: int,
    changed: Callable[[], None] | None,
) -> None:
    wrong = [place for place, option in enumerate(options) if not option.right][:left_out]
    shown = [place for place in range(len(options)) if place not in wrong]
    if multi:
        st.caption(t("quiz_several"))
        for place in shown:
            st.checkbox(_option(options, place), place in held, key=f"{key}-{place}", on_change=changed)
    else:
        st.radio(
            t("quiz_options"),
            shown,
            index=shown.index(held[0]) if held and held[0] in shown else None,
            key=key,
            format_func=lambda place: _option(options, place),
            label_visibility="collapsed",
            on_change=changed,
        )
    if wrong:
        st.caption(t("hint_left_out", letters=", ".join(LETTERS[place] for place in wrong)))


def _option(options: Sequence[Option], place: int) -> str:
    return f"{LETTERS[place]}.　{prose.cited(say(options[place].text).strip())}"


def _hole(
    options: Sequence[Option], key: str, held: Sequence[int], number: int | None, changed: Callable[[], None] | None
) -> None:
    st.radio(
        t("quiz_hole") if number is None else t("quiz_hole_number", n=number + 1),
        range(len(options)),
        index=held[0] if held and held[0] < len(options) else None,
        key=key,
        format_func=lambda place: f"`{_code_of(options[place])}`",
        on_change=changed,
    )


def _arrange(question: OrderQuestion, key: str, given: str, keep: Callable[[str], None] | None) -> list[int]:
    """Steps are put in order by choosing them one after another: with mouse, touch and keyboard alike."""
    arranged: list[int] | None = state.value_of(f"{key}-arranged")
    if arranged is None:
        arranged = [shown for shown in grading.places(given) if shown < len(question.steps)]
        state.set_value(f"{key}-arranged", arranged)
    for place, shown in enumerate(arranged, 1):
        st.markdown(f"{place}. {prose.cited(say(question.steps[shown].step).strip())}")
    left = [shown for shown in range(len(question.steps)) if shown not in arranged]
    if left:
        st.caption(t("quiz_which_next", n=len(arranged) + 1))
    for shown in left:
        number = shown + 1  # the step keeps its key while others are placed
        st.button(
            prose.cited(say(question.steps[shown].step).strip()),
            key=f"{key}-step-{shown}",
            shortcut=str(number) if number < 10 else None,
            on_click=_put,
            args=(key, [*arranged, shown], len(question.steps), keep),
            width="stretch",
        )
    return arranged


def _put(key: str, arranged: list[int], of: int, keep: Callable[[str], None] | None) -> None:
    state.set_value(f"{key}-arranged", arranged)
    if keep is not None:
        keep(_places(arranged) if len(arranged) == of else "")


def _one_back(key: str, arranged: list[int], keep: Callable[[str], None] | None) -> None:
    st.button(
        t("quiz_one_back"),
        key=f"{key}-back",
        icon=":material/undo:",
        disabled=not arranged,
        on_click=_put,
        args=(key, arranged[:-1], -1, keep),
    )


def _places(arranged: Sequence[int]) -> str:
    return ",".join(map(str, arranged))


def written(question: Question, key: str) -> str:
    """The answer in the controls, as the log keeps it."""
    if isinstance(question, ChoiceQuestion) and question.multi:
        return _places([p for p in range(len(question.options)) if state.value_of(f"{key}-{p}")])
    if isinstance(question, ClozeQuestion):
        held = [state.value_of(f"{key}-{hole}") for hole in range(len(question.holes))]
        return "" if None in held else _places(held)
    if isinstance(question, OrderQuestion):
        arranged = state.value_of(f"{key}-arranged") or []
        return _places(arranged) if len(arranged) == len(question.steps) else ""
    value = state.value_of(key)
    return "" if value is None else str(value)


# -- after the answer -------------------------------------------------------------------------------------------------


SIGNS = {
    "quiz_unanswered": ("gray", "remove"),
    "quiz_right": ("green", "check"),
    "quiz_partly": ("orange", "contrast"),
    "quiz_wrong": ("red", "close"),
}


def sign(answer: str, grade: Grade) -> tuple[str, str]:
    """How an answer went: the name of its words, and an icon in its colour."""
    name = "quiz_wrong" if not grade.score else "quiz_right" if grade.right else "quiz_partly"
    name = name if answer.strip() else "quiz_unanswered"
    # t("quiz_right") t("quiz_partly") t("quiz_wrong") t("quiz_unanswered")
    colour, icon = SIGNS[name]
    return name, f":{colour}[:material/{icon}:]"


def verdict(question: Question, card: Card, answer: str, grade: Grade | None, measured: float | None) -> None:
    """How right it was, and why: each option with its reason, the accepted interval, the order as it belongs."""
    if grade is not None:
        name, icon = sign(answer, grade)
        st.markdown(f"{icon} **{t(name)}**")
    if isinstance(question, ChoiceQuestion) and question.prompt is None:
        _sentences(card, question.options, grading.places(answer))
    elif isinstance(question, ChoiceQuestion):
        _reasons(card, question.options, grading.places(answer))
    elif isinstance(question, ClozeQuestion):
        _filled(question, card, grading.places(answer))
    elif isinstance(question, OrderQuestion):
        _as_it_belongs(question, card, answer, grade)
    elif isinstance(question, NumericQuestion | PredictQuestion) and measured is not None:
        _run(question, card, answer, grade, measured)
    elif isinstance(question, ShapeQuestion):
        _yours(answer)
        st.markdown(t("quiz_right_answer", answer=as_typed(_evaluated(question))) + f"　`{question.answer}`")


def _yours(answer: str) -> None:
    if answer.strip():
        st.markdown(t("quiz_your_answer", answer=as_typed(answer)))


def _mine(place: int, chosen: Sequence[int]) -> str:
    return f" :blue-background[{t('quiz_yours')}]" if place in chosen else ""


def _reasons(card: Card, options: Sequence[Option], chosen: Sequence[int], code: bool = False) -> None:
    for place, option in enumerate(options):
        icon = ":green[:material/check:]" if option.right else ":red[:material/close:]"
        words = f"`{_code_of(option)}`" if code else f"{LETTERS[place]}. {prose.cited(say(option.text).strip())}"
        st.markdown(f"{icon} {words}{_mine(place, chosen)}")
        st.caption(_quoted(prose.markdown(card, option.why)))


def _sentences(card: Card, options: Sequence[Option], chosen: Sequence[int]) -> None:
    """Sentences of which one was wanted because it is wrong: what is marked is whether they are true."""
    for place, option in enumerate(options):
        words = f"{LETTERS[place]}. {prose.cited(say(option.text).strip())}{_mine(place, chosen)}"
        if option.right:  # the one to find
            st.markdown(f":red[:material/close: **{t('sentence_wrong')}**] {words}")
            st.caption(_quoted(prose.markdown(card, option.why)))
        else:
            st.markdown(f":green[:material/check: {t('sentence_true')}] {words}")


def _quoted(words: str) -> str:
    """Set in below what it belongs to."""
    return "> " + words.strip().replace("\n", "\n> ")


def _filled(question: ClozeQuestion, card: Card, chosen: Sequence[int]) -> None:
    parts = question.code.strip("\n").split(HOLE)
    right = [next(_code_of(o) for o in options if o.right) for options in question.holes]
    filled = parts[0] + "".join(word + part for word, part in zip(right, parts[1:], strict=True))
    st.code(filled, language="python", wrap_lines=True)
    for hole, options in enumerate(question.holes):
        if len(question.holes) > 1:
            st.markdown(f"**{t('quiz_hole_number', n=hole + 1)}**")
        _reasons(card, options, chosen[hole : hole + 1], code=True)


def _code_of(option: Option) -> str:
    """What belongs into a hole; authors may have set it as code already."""
    return say(option.text).strip().strip("`")


def _as_it_belongs(question: OrderQuestion, card: Card, answer: str, grade: Grade | None) -> None:
    """In the card's order, with the reason of the first step that was put before one that it builds on."""
    arranged, early = grading.places(answer), None
    if arranged and grade is not None and grade.first_wrong is not None:
        early = arranged[grade.first_wrong]
        needed = next(step for step in question.needs[early] if step not in arranged[: grade.first_wrong])
        st.markdown(t("quiz_first_wrong", n=question.places[early] + 1, needed=question.places[needed] + 1))
        st.markdown(t("quiz_your_order", order=" → ".join(str(question.places[shown] + 1) for shown in arranged)))
    for place in range(len(question.steps)):
        shown = question.places.index(place)
        step, mark = question.steps[shown], "**" if shown == early else ""
        st.markdown(f"{mark}{place + 1}. {prose.cited(say(step.step).strip())}{mark}")
        if shown == early:
            st.caption(prose.markdown(card, step.because).strip())


def _run(
    question: NumericQuestion | PredictQuestion, card: Card, answer: str, grade: Grade | None, measured: float
) -> None:
    unit = grading.unit_of(question)
    is_direction = isinstance(question, PredictQuestion) and question.ask == "direction"
    _yours(t(f"quiz_{answer}") if answer in (LARGER, SMALLER) else answer)
    with_unit = f"{text.number(measured)} {_unit(unit)}".strip()
    st.markdown(t("quiz_measured", value=f":green-background[{with_unit}]", measure=ledger.measure(question.claim)))
    if is_direction:
        st.markdown(t("quiz_right_answer", answer=f"**{t('quiz_larger' if measured > 1 else 'quiz_smaller')}**"))
    elif grade is not None and grade.low is not None and grade.high is not None:
        st.caption(t("quiz_accepted", low=text.number(grade.low), high=text.number(grade.high)))
    if isinstance(question, PredictQuestion):
        st.markdown(prose.statement(question.claim).strip())
    else:
        st.latex(text.experiment(question.claim.experiment).formula)
    experiment = question.claim.experiment
    link = runs.link_of(engine.spec_of(experiment, question.claim.params))
    settings = {name: value for name, value in link.items() if value is not None}
    frame.link("lab", t("quiz_open_lab"), icon=":material/science:", experiment=experiment, **settings)


def rubric(question: RecallQuestion, card: Card, answer: str, key: str) -> float | None:
    """The points of a complete answer, to be ticked; the share of those that must be said, None when nothing is."""
    if answer.strip():
        st.markdown(t("quiz_your_answer", answer=""))
        st.code(answer, language=None, wrap_lines=True)
    st.markdown(f"**{t('quiz_points')}**")
    ticked = []
    for number, point in enumerate(question.points):
        extra = "" if point.must else f" :gray[{t('quiz_extra')}]"
        said = st.checkbox(f"{prose.markdown(card, point.point).strip()}{extra}", key=f"{key}-point-{number}")
        ticked.append((said, point.must))
    with st.expander(t("short_answer")):
        st.markdown(prose.markdown(card, card.short_answer))
    if not any(said for said, _ in ticked):
        return None
    musts = [said for said, must in ticked if must]
    return sum(musts) / len(musts)


def _evaluated(question: ShapeQuestion) -> str:
    from content.expressions import evaluate

    value = evaluate(question.answer, dict(question.drawn))
    parts = value if isinstance(value, tuple) else (value,)
    written = [f"{int(part):,}" if len(parts) == 1 else str(int(part)) for part in parts]
    return written[0] if len(parts) == 1 else f"({', '.join(written)})"


def as_typed(words: str) -> str:
    """Somebody's words in a sentence of ours, letter by letter: they are no Markdown."""
    return f"`{words.strip().replace('`', '')}`" if words.strip() else ""


def fault(reason: str, values: Mapping[str, Any]) -> str:
    """Why an answer can't be read, and how it would be."""
    shown = dict(values)
    if "written" in shown:
        shown["written"] = as_typed(shown["written"])
    if "units" in shown:  # each language has its own
        chinese = state.language() == "zh"
        shown["units"] = ", ".join(u for u in shown["units"].split(", ") if chinese or u.isascii())
    return t(reason, **shown)
    # t("answer_empty") t("answer_too_long") t("answer_not_a_number") t("answer_not_one_number") t("answer_unit")
    # t("answer_not_an_expression") t("answer_one_option") t("answer_open_hole") t("answer_every_step_once")


def hints(question: Question, card: Card) -> list[str]:
    """By degrees: what the question is after, or a part of the answer. Of a choice wrong options go one by one."""
    if isinstance(question, NumericQuestion):
        return [f"${text.experiment(question.claim.experiment).formula}$"]
    if isinstance(question, OrderQuestion):
        return [t("hint_first_step", step=say(question.steps[question.places.index(0)].step).strip())]
    if isinstance(question, ShapeQuestion):
        return [t("hint_sizes", names=", ".join(f"`{name}`" for name in question.drawn))]
    if isinstance(question, PredictQuestion):
        return [say(text.experiment(question.claim.experiment).about).strip()]
    if isinstance(question, RecallQuestion):
        return [prose.markdown(card, point.point).strip() for point in question.points if point.must][:3]
    if isinstance(question, ChoiceQuestion) and not question.multi:
        return []
    return [f"**{t('intent')}**　{prose.markdown(card, card.intent).strip()}"]
