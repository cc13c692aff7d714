"""Quiz items out of cards, and one item made ready to be asked.

An item belongs to a card and keeps its id for ever: reviews in a reader's log name it. Written items carry the id that
the author gave; made ones are called after what they are made of: a mistake, ``order`` or ``recall``.

Everything that chance decides in a question (the order of options, drawn sizes) follows from the item and a number of
the attempt, so that a question that was left half answered comes back as it was.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from content.bindings import Hole, format_number, scan
from content.schema import (
    Card,
    Choice,
    Claim,
    Cloze,
    KeyPoint,
    Mistake,
    Numeric,
    Option,
    Predict,
    Scalar,
    Shape,
    Step,
    Text,
    draws,
)
from engine import registry
from engine.base import ParamsError

KINDS = ("choice", "numeric", "predict", "order", "cloze", "shape", "count", "recall")
TRUE_SENTENCES = 3  # beside the wrong one, in an item that is made of a mistake
MOST_OTHER_DRAWS = 5  # at which an expression is compared with the author's


@dataclass(frozen=True)
class Item:
    """Something to be asked. ``made_of`` is the written item, the mistake, or the card's steps or key points."""

    card: str
    name: str
    kind: str
    made_of: Choice | Numeric | Predict | Cloze | Shape | Mistake | tuple[Step, ...] | tuple[KeyPoint, ...]

    @property
    def id(self) -> str:
        """What the log calls it."""
        return f"{self.card}/{self.name}"

    @functools.cached_property
    def length(self) -> int:
        """How much there is to read: its characters, in all languages, reasons and all."""
        parts = self.made_of if isinstance(self.made_of, tuple) else (self.made_of,)
        return sum(len(part.model_dump_json()) for part in parts)


def items_of(card: Card) -> tuple[Item, ...]:
    """All items of a card: the written ones, one for each mistake, the derivation's order, and recall."""
    found = [Item(card.id, item.id, item.kind, item) for item in card.quiz]
    found += [Item(card.id, mistake.id, "choice", mistake) for mistake in card.mistakes]
    if card.built_on():
        found.append(Item(card.id, "order", "order", tuple(card.derivation[place] for place in card.built_on())))
    return (*found, Item(card.id, "recall", "recall", card.key_points))


# --------------------------------------------------------------------------------------------------------------------
# Questions


@dataclass(frozen=True)
class ChoiceQuestion:
    """Options in the order in which they are shown. ``prompt`` is None where the interface has the words: which of
    these sentences is wrong."""

    item: Item
    prompt: Text | None
    options: tuple[Option, ...]
    multi: bool


@dataclass(frozen=True)
class NumericQuestion:
    """A number that the engine is to be asked for: that of ``claim``, whose params hold what was drawn."""

    item: Item
    prompt: Text
    drawn: Mapping[str, Scalar]
    claim: Claim
    rel_tol: float
    unit: str


@dataclass(frozen=True)
class PredictQuestion:
    """A value, or a direction, that the reader commits to before the claim is run."""

    item: Item
    prompt: Text
    claim: Claim
    ask: str


@dataclass(frozen=True)
class OrderQuestion:
    """Steps in the order in which they are shown; ``places[i]`` is where the card has the shown step i among them, and
    ``needs[i]`` are the shown steps that it builds on. Every order is right in which each comes after those."""

    item: Item
    steps: tuple[Step, ...]
    places: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ClozeQuestion:
    """Code with one or two holes, for each hole its options as shown."""

    item: Item
    prompt: Text
    code: str
    holes: tuple[tuple[Option, ...], ...]


@dataclass(frozen=True)
class ShapeQuestion:
    """A shape or a count of the drawn sizes; an expression is compared at ``others`` too."""

    item: Item
    prompt: Text
    drawn: Mapping[str, Scalar]
    others: tuple[Mapping[str, Scalar], ...]
    answer: str


@dataclass(frozen=True)
class RecallQuestion:
    """The card's question, answered aloud or in writing, and the points that a complete answer has."""

    item: Item
    prompt: Text
    points: tuple[KeyPoint, ...]


Question = (
    ChoiceQuestion | NumericQuestion | PredictQuestion | OrderQuestion | ClozeQuestion | ShapeQuestion | RecallQuestion
)


def pose(item: Item, card: Card, attempt: int) -> Question:
    """An item made ready to be asked; the same attempt is the same question."""
    chance = random.Random(_seed(item.id, attempt))
    made_of = item.made_of
    if isinstance(made_of, Mistake):
        return ChoiceQuestion(item, None, _shuffled(_around(made_of, card), chance), multi=False)
    if isinstance(made_of, Choice):
        return ChoiceQuestion(item, made_of.prompt, _shuffled(made_of.options, chance), made_of.multi)
    if isinstance(made_of, Cloze):
        holes = tuple(_shuffled(options, chance) for options in made_of.holes)
        return ClozeQuestion(item, made_of.prompt, made_of.code, holes)
    if isinstance(made_of, Numeric):
        claim = card.claim(made_of.answer_from)
        drawn, asked = _draw(made_of, claim, chance)
        return NumericQuestion(item, filled(made_of.prompt, drawn), drawn, asked, made_of.rel_tol, made_of.unit)
    if isinstance(made_of, Predict):
        return PredictQuestion(item, made_of.prompt, card.claim(made_of.claim), made_of.ask)
    if isinstance(made_of, Shape):
        every = list(draws(made_of.vary))
        drawn = chance.choice(every)
        others = tuple(chance.sample(every, min(MOST_OTHER_DRAWS, len(every))))
        return ShapeQuestion(item, filled(made_of.prompt, drawn), drawn, others, made_of.answer)
    if item.kind == "order":
        return _to_order(item, card, chance)
    return RecallQuestion(item, card.question, card.key_points)


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(map(str, parts)).encode()).digest()[:8])


def _shuffled(options: Sequence[Option], chance: random.Random) -> tuple[Option, ...]:
    return tuple(chance.sample(options, len(options)))


def _to_order(item: Item, card: Card, chance: random.Random) -> OrderQuestion:
    built_on = card.built_on()
    shown = list(built_on)
    while all(set(built_on[step]) <= set(shown[:place]) for place, step in enumerate(shown)):  # right as it stands
        chance.shuffle(shown)
    return OrderQuestion(
        item,
        tuple(card.derivation[step] for step in shown),
        tuple(list(built_on).index(step) for step in shown),
        tuple(tuple(shown.index(needed) for needed in built_on[step]) for step in shown),
    )


def _draw(made_of: Numeric, claim: Claim, chance: random.Random) -> tuple[dict[str, Scalar], Claim]:
    """One of the draws that the engine accepts, and the claim with it.

    Raises: ValueError when it accepts none, which the content check rules out.
    """
    every = list(draws(made_of.vary))
    chance.shuffle(every)
    for drawn in every:
        asked = claim.model_copy(update={"params": {**claim.params, **drawn}})
        with contextlib.suppress(ParamsError):
            registry.get(claim.experiment).Params.from_mapping(asked.params)
            return drawn, asked
    raise ValueError(f"{made_of.id}: {claim.experiment} accepts none of the values that can be drawn")


def _around(mistake: Mistake, card: Card) -> tuple[Option, ...]:
    """The mistake among true sentences of the card, those of its own length: the wrong one is to be found."""
    wrong = Option(text=mistake.wrong, right=True, why=_joined(mistake.right, mistake.why))
    points = sorted(card.key_points, key=lambda point: abs(_length(point.point) - _length(mistake.wrong)))
    return (wrong, *(Option(text=p.point, right=False, why=card.short_answer) for p in points[:TRUE_SENTENCES]))


def _length(text: Text) -> float:
    return len(text.en) + 2 * len(text.zh)  # a Chinese sentence has about half the characters


def _joined(*texts: Text) -> Text:
    return Text(en="\n\n".join(t.en.strip() for t in texts), zh="\n\n".join(t.zh.strip() for t in texts))


def filled(prompt: Text, drawn: Mapping[str, Scalar]) -> Text:
    """A prompt with its holes filled."""
    return Text(en=_filled(prompt.en, drawn, "en"), zh=_filled(prompt.zh, drawn, "zh"))


def _filled(text: str, drawn: Mapping[str, Scalar], language: str) -> str:
    return "".join(_pieces(text, drawn, language))


def _pieces(text: str, drawn: Mapping[str, Scalar], language: str) -> Iterator[str]:
    for piece in scan(text):
        if isinstance(piece, Hole):
            value = drawn[piece.name]
            yield format_number(value, piece.format, language) if isinstance(value, (int, float)) else str(value)
        elif isinstance(piece, str):
            yield piece
        else:
            yield getattr(piece, "source", "")
