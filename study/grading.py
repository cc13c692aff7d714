"""How right an answer is, and what the reader is told about each part of it.

Every grade is between 0 and 1. A choice of several options gains a part for each right one that is chosen and loses one
for each wrong one, not below 0. An order's grade is the share of neighbouring pairs that stand as they belong.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from claims.verify import verify
from content.schema import Claim
from engine import registry
from study import answers
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
from study.schedule import AGAIN, GOOD, HARD

LARGER, SMALLER = "larger", "smaller"
NEAR = 2.0  # a predicted value within this factor of the measured one earns half the grade
RIGHT_WITHIN = 0.1  # and within this share of it the whole


@dataclass(frozen=True)
class Grade:
    """``score`` from 0 to 1; ``low`` and ``high`` are what would have been accepted, of a number."""

    score: float
    low: float | None = None
    high: float | None = None
    first_wrong: int | None = None  # of an order: the first place whose step stands before one that it builds on

    @property
    def right(self) -> bool:
        """Whether nothing is missing and nothing is wrong."""
        return self.score == 1


def choice(question: ChoiceQuestion, chosen: Collection[int]) -> Grade:
    """The options chosen, by their place as shown.

    Raises: Unreadable when none is, or several of a question that has one right option.
    """
    if not chosen:
        raise answers.Unreadable("answer_empty")
    if len(chosen) > 1 and not question.multi:
        raise answers.Unreadable("answer_one_option")
    right = {place for place, option in enumerate(question.options) if option.right}
    gained = len(right & set(chosen)) - len(set(chosen) - right)
    return Grade(max(0.0, gained / len(right)))


def cloze(question: ClozeQuestion, chosen: Sequence[int | None]) -> Grade:
    """An option for each hole, by its place as shown.

    Raises: Unreadable while a hole is open.
    """
    if len(chosen) != len(question.holes) or None in chosen:
        raise answers.Unreadable("answer_open_hole")
    right = [
        bool(options[place].right) for options, place in zip(question.holes, chosen, strict=True) if place is not None
    ]
    return Grade(sum(right) / len(right))


def order(question: OrderQuestion, arranged: Sequence[int]) -> Grade:
    """The shown steps as the reader has arranged them, each by its place as shown.

    Raises: Unreadable unless each step stands there once.
    """
    if sorted(arranged) != list(range(len(question.steps))):
        raise answers.Unreadable("answer_every_step_once")
    early = [place for place, step in enumerate(arranged) if not set(question.needs[step]) <= set(arranged[:place])]
    n_built = sum(1 for needs in question.needs if needs)
    return Grade(1 - len(early) / n_built, first_wrong=early[0] if early else None)


def measure(card: str, claim: Claim, **runner_options: Any) -> float:
    """What the engine measures for a claim now: the number that an answer is held against.

    Raises: what ``claims.verify.verify`` raises.
    """
    return verify(claim, card, cached=True, **runner_options).value


def numeric(question: NumericQuestion, text: str, measured: float) -> Grade:
    """A number against the one that the engine has measured with the drawn values.

    Raises: Unreadable.
    """
    given = answers.number(text, question.unit)
    low, high = accepted(measured, question.rel_tol)
    return Grade(float(low <= given <= high), low, high)


def accepted(measured: float, rel_tol: float) -> tuple[float, float]:
    """What is accepted as the measured value, both ends included."""
    width = abs(measured) * rel_tol
    return measured - width, measured + width


def predicted_value(question: PredictQuestion, text: str, measured: float, unit: str) -> Grade:
    """A predicted value: right within a tenth, half right within a factor of two. Nothing is failed for being bold.

    Raises: Unreadable.
    """
    given = answers.number(text, unit)
    low, high = accepted(measured, RIGHT_WITHIN)
    if low <= given <= high:
        return Grade(1.0, low, high)
    near = measured != 0 and given != 0 and 1 / NEAR <= given / measured <= NEAR
    return Grade(0.5 if near else 0.0, low, high)


def predicted_direction(direction: str, measured: float) -> Grade:
    """Larger or smaller than what the claim compares with; ``measured`` is the ratio.

    Raises: Unreadable unless it is one of the two.
    """
    if direction not in (LARGER, SMALLER):
        raise answers.Unreadable("answer_empty")
    return Grade(float(math.isfinite(measured) and (measured > 1) == (direction == LARGER) and measured != 1))


def sizes(question: ShapeQuestion, text: str) -> Grade:
    """A shape or a count.

    Raises: Unreadable.
    """
    kind = question.item.kind
    judge = answers.is_shape if kind == "shape" else answers.is_count
    return Grade(float(judge(text, question.answer, question.drawn, question.others)))


# --------------------------------------------------------------------------------------------------------------------
# Answers as the log and an exam's sheet keep them: one text each


def places(answer: str) -> list[int]:
    """Options, or steps in their order, by their places as shown: ``2,0,1``. What is no place is left out."""
    return [int(part) for part in answer.split(",") if part.strip().isdecimal()]


def wants_run(question: Question) -> bool:
    """Whether the answer is held against a run of the engine."""
    return isinstance(question, NumericQuestion | PredictQuestion)


def unit_of(question: NumericQuestion | PredictQuestion) -> str:
    """The unit in which a number is asked for. A claim that compares two runs is a ratio and has none."""
    if isinstance(question, NumericQuestion):
        return question.unit
    claim = question.claim
    return "1" if claim.versus else registry.get(claim.experiment).metric(claim.metric).unit


def grade(question: Question, answer: str, measured: float | None = None) -> Grade:
    """The grade of an answer; ``measured`` is what the engine said, where the question wants a run.

    Raises: Unreadable; ValueError for a run that is missing, and for recall, which readers grade themselves.
    """
    if isinstance(question, ChoiceQuestion):
        return choice(question, [place for place in places(answer) if place < len(question.options)])
    if isinstance(question, ClozeQuestion):
        return cloze(question, [*places(answer)])
    if isinstance(question, OrderQuestion):
        return order(question, places(answer))
    if isinstance(question, ShapeQuestion):
        return sizes(question, answer)
    if measured is None or isinstance(question, RecallQuestion):
        raise ValueError(f"{question.item.id}: no run to hold the answer against")
    if isinstance(question, NumericQuestion):
        return numeric(question, answer, measured)
    if question.ask == "direction":
        return predicted_direction(answer, measured)
    return predicted_value(question, answer, measured, unit_of(question))


def readable(question: Question, answer: str) -> None:
    """Look whether an answer can be read, before the engine is asked.

    Raises: Unreadable.
    """
    if isinstance(question, NumericQuestion):
        answers.number(answer, question.unit)
    elif isinstance(question, PredictQuestion) and question.ask == "direction":
        predicted_direction(answer, 1.0)
    elif isinstance(question, PredictQuestion):
        answers.number(answer, unit_of(question))
    elif not isinstance(question, RecallQuestion):
        grade(question, answer)


def suggested(score: float, hints: int = 0) -> int:
    """The rating that fits a score, at best hard after a hint; the reader may say otherwise."""
    return AGAIN if score < 0.5 else GOOD if score == 1 and not hints else HARD
