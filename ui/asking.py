"""One question on the table: how it is drawn, answered, and what is shown after the answer. Used by review, practice,
exams and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

from content.schema import Card, Option
from study import grading
from study.answers import Unreadable
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
from ui import deck, ledger, prose, state, text
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
        st.code(question.code.strip("\n"), language="python")


# -- answering --------------------------------------------------------------------------------------------------------


def controls(
    question: Question, key: str, given: str, submit: Callable[[str], None], label: str, left_out: int = 0
) -> None:
    """The controls that take an answer, filled with ``given``; ``submit`` is called with what the log keeps of it.

    ``left_out``: how many wrong options a hint has taken away.
    """
    if isinstance(question, OrderQuestion):
        _order(question, key, given, submit, label)
        return
    with st.form(f"{key}-form", border=False):
        if isinstance(question, ChoiceQuestion):
            _options(question.options, key, grading.places(given), question.multi, left_out)
        elif isinstance(question, ClozeQuestion):
            held = grading.places(given)
            for hole, options in enumerate(question.holes):
                _hole(options, f"{key}-{hole}", held[hole : hole + 1], hole if len(question.holes) > 1 else None)
        elif isinstance(question, PredictQuestion) and question.ask == "direction":
            sides = (LARGER, SMALLER)
            st.radio(
                t("quiz_direction"),
                sides,
                index=sides.index(given) if given in sides else None,
                key=key,
                format_func=lambda side: t(f"quiz_{side}"),  # t("quiz_larger") t("quiz_smaller")
                label_visibility="collapsed",
            )
        else:
            st.text_input(_label(question), given, key=key, max_chars=200, autocomplete="off")
        st.form_submit_button(
            label, type="primary", icon=":material/check:", on_click=lambda: submit(_written(question, key))
        )


def _label(question: Question) -> str:
    if isinstance(question, NumericQuestion | PredictQuestion):
        unit = grading.unit_of(question)
        return t("quiz_number") if unit == "1" else f"{t('quiz_number')} · {_unit(unit)}"
    if isinstance(question, ShapeQuestion):
        return t("quiz_shape") if question.item.kind == "shape" else t("quiz_count")
    return t("quiz_in_your_words")


def _unit(unit: str) -> str:
    return "" if unit == "1" else say(deck.deck().strings.units[unit])


def _options(options: Sequence[Option], key: str, held: Sequence[int], multi: bool, left_out: int) -> None:
    wrong = [place for place, option in enumerate(options) if not option.right][:left_out]
    shown = [place for place in range(len(options)) if place not in wrong]
    if multi:
        st.caption(t("quiz_several"))
        for place in shown:
            st.checkbox(_option(options, place), place in held, key=f"{key}-{place}")
    else:
        st.radio(
            t("quiz_options"),
            shown,
            index=shown.index(held[0]) if held and held[0] in shown else None,
            key=key,
            format_func=lambda place: _option(options, place),
            label_visibility="collapsed",
        )


def _option(options: Sequence[Option], place: int) -> str:
    return f"{LETTERS[place]}.　{prose.cited(say(options[place].text).strip())}"


def _hole(options: Sequence[Option], key: str, held: Sequence[int], number: int | None) -> None:
    st.radio(
        t("quiz_hole") if number is None else t("quiz_hole_number", n=number + 1),
        range(len(options)),
        index=held[0] if held and held[0] < len(options) else None,
        key=key,
        format_func=lambda place: f"`{say(options[place].text).strip()}`",
    )


def _order(question: OrderQuestion, key: str, given: str, submit: Callable[[str], None], label: str) -> None:
    """Steps are put in order by choosing them one after another: with mouse, touch and keyboard alike."""
    arranged = state.value_of(f"{key}-arranged")
    if arranged is None:
        arranged = grading.places(given)
        state.set_value(f"{key}-arranged", arranged)

    def put(places: list[int]) -> None:
        state.set_value(f"{key}-arranged", places)

    for place, shown in enumerate(arranged, 1):
        st.markdown(f"{place}. {prose.cited(say(question.steps[shown].step).strip())}")
    left = [shown for shown in range(len(question.steps)) if shown not in arranged]
    if left:
        st.caption(t("quiz_which_next", n=len(arranged) + 1))
    for number, shown in enumerate(left, 1):
        st.button(
            prose.cited(say(question.steps[shown].step).strip()),
            key=f"{key}-step-{shown}",
            shortcut=str(number) if number < 10 else None,
            on_click=put,
            args=([*arranged, shown],),
            width="stretch",
        )
    with st.container(horizontal=True):
        st.button(
            label,
            key=f"{key}-submit",
            type="primary",
            icon=":material/check:",
            disabled=bool(left),
            on_click=lambda: submit(",".join(map(str, arranged))),
        )
        st.button(
            t("quiz_one_back"),
            key=f"{key}-back",
            icon=":material/undo:",
            disabled=not arranged,
            on_click=put,
            args=(arranged[:-1],),
        )


def _written(question: Question, key: str) -> str:
    """The answer in the controls, as the log keeps it."""
    if isinstance(question, ChoiceQuestion) and question.multi:
        chosen = [str(p) for p in range(len(question.options)) if state.value_of(f"{key}-{p}")]
        return ",".join(chosen)
    if isinstance(question, ClozeQuestion):
        held = [state.value_of(f"{key}-{hole}") for hole in range(len(question.holes))]
        return ",".join(str(place) for place in held if place is not None)
    value = state.value_of(key)
    return "" if value is None else str(value)


# -- after the answer -------------------------------------------------------------------------------------------------


def verdict(question: Question, card: Card, answer: str, grade: Grade | None, measured: float | None) -> None:
    """How right it was, and why: each option with its reason, the accepted interval, the order as it belongs."""
    if grade is not None:
        sign = "quiz_right" if grade.right else "quiz_partly" if grade.score else "quiz_wrong"
        # t("quiz_right") t("quiz_partly") t("quiz_wrong")
        colour, icon = {"quiz_right": ("green", "check"), "quiz_partly": ("orange", "contrast")}.get(
            sign, ("red", "close")
        )
        st.markdown(f":{colour}[:material/{icon}: **{t(sign)}**]")
    if isinstance(question, ChoiceQuestion):
        _reasons(card, question.options, grading.places(answer))
    elif isinstance(question, ClozeQuestion):
        chosen = grading.places(answer)
        for hole, options in enumerate(question.holes):
            _reasons(card, options, chosen[hole : hole + 1], code=True)
    elif isinstance(question, OrderQuestion):
        _as_it_belongs(question, card, grade)
    elif isinstance(question, NumericQuestion | PredictQuestion) and measured is not None:
        _run(question, card, answer, grade, measured)
    elif isinstance(question, ShapeQuestion):
        st.markdown(t("quiz_your_answer", answer=_code(answer)))
        st.markdown(t("quiz_right_answer", answer=_code(_evaluated(question))) + f"　`{question.answer}`")
    elif isinstance(question, RecallQuestion):
        _points(question, card, answer)


def _reasons(card: Card, options: Sequence[Option], chosen: Sequence[int], code: bool = False) -> None:
    for place, option in enumerate(options):
        sign = ":green[:material/check:]" if option.right else ":red[:material/close:]"
        words = say(option.text).strip()
        words = f"`{words}`" if code else prose.cited(words)
        mine = f" :blue-background[{t('quiz_yours')}]" if place in chosen else ""
        st.markdown(f"{sign} {'' if code else LETTERS[place] + '. '}{words}{mine}")
        if option.right or place in chosen:
            st.caption(prose.markdown(card, option.why).strip())


def _as_it_belongs(question: OrderQuestion, card: Card, grade: Grade | None) -> None:
    if grade is not None and grade.first_wrong is not None:
        st.markdown(t("quiz_first_wrong", n=grade.first_wrong + 1))
    for place, step in enumerate(card.derivation):
        here = grade is not None and grade.first_wrong == place
        st.markdown(f"{'**' if here else ''}{place + 1}. {prose.cited(say(step.step).strip())}{'**' if here else ''}")
        if here:
            st.caption(prose.markdown(card, step.because).strip())


def _run(
    question: NumericQuestion | PredictQuestion, card: Card, answer: str, grade: Grade | None, measured: float
) -> None:
    unit = grading.unit_of(question)
    said = t(f"quiz_{answer}") if answer in (LARGER, SMALLER) else answer
    if answer:
        st.markdown(t("quiz_your_answer", answer=_code(said)))
    with_unit = f"{text.number(measured)} {_unit(unit)}".strip()
    st.markdown(t("quiz_measured", value=f":green-background[{with_unit}]", measure=ledger.measure(question.claim)))
    if grade is not None and grade.low is not None and grade.high is not None:
        st.caption(t("quiz_accepted", low=text.number(grade.low), high=text.number(grade.high)))
    if isinstance(question, NumericQuestion):
        st.latex(text.experiment(question.claim.experiment).formula)


def _points(question: RecallQuestion, card: Card, answer: str) -> None:
    if answer.strip():
        st.markdown(t("quiz_your_answer", answer=""))
        st.markdown("> " + answer.strip().replace("\n", "\n> "))
    st.markdown(f"**{t('quiz_points')}**")
    for point in question.points:
        must = "" if point.must else f" :gray[{t('quiz_extra')}]"
        st.markdown(f"- {prose.markdown(card, point.point).strip()}{must}")
    with st.expander(t("short_answer")):
        st.markdown(prose.markdown(card, card.short_answer))


def _evaluated(question: ShapeQuestion) -> str:
    from content.expressions import evaluate

    value = evaluate(question.answer, dict(question.drawn))
    parts = value if isinstance(value, tuple) else (value,)
    written = [f"{int(part):,}" if len(parts) == 1 else str(int(part)) for part in parts]
    return written[0] if len(parts) == 1 else f"({', '.join(written)})"


def _code(words: str) -> str:
    return f"`{words.strip().replace('`', '')}`" if words.strip() else ""


def fault(refused: Unreadable) -> str:
    """Why an answer can't be read, and how it would be."""
    return t(refused.reason, **refused.values)
    # t("answer_empty") t("answer_too_long") t("answer_not_a_number") t("answer_not_one_number") t("answer_unit")
    # t("answer_not_an_expression") t("answer_one_option") t("answer_open_hole") t("answer_every_step_once")


def hints(question: Question, card: Card) -> list[str]:
    """By degrees: what the question is after, then a part of the answer. Wrong options go one by one beside these."""
    given = [prose.markdown(card, card.intent).strip()]
    if isinstance(question, NumericQuestion):
        given.append(f"${text.experiment(question.claim.experiment).formula}$")
    elif isinstance(question, OrderQuestion):
        given.append(t("hint_first_step", step=say(card.derivation[0].step).strip()))
    elif isinstance(question, ShapeQuestion):
        given.append(t("hint_sizes", names=", ".join(f"`{name}`" for name in question.drawn)))
    elif isinstance(question, PredictQuestion):
        given.append(say(text.experiment(question.claim.experiment).about).strip())
    elif isinstance(question, RecallQuestion):
        given += [prose.markdown(card, point.point).strip() for point in question.points if point.must][:2]
    return given
