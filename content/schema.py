"""The shape of a card and of the files beside it.

Field by field as in docs/cards.md. These models check one file by itself; what needs the whole deck or the engine (links,
bindings, parity) is checked in ``content/checks.py`` and ``tools/check_content.py``.
"""

from __future__ import annotations

import ast
import math
import operator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

LANGUAGES = ("en", "zh")
Language = Literal["en", "zh"]

Id = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]  # kebab-case: cards, claims, topics, items
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*$")]  # snake_case: engine's names
Prose = Annotated[str, StringConstraints(min_length=1, max_length=4000)]
Scalar = bool | int | float | str


class Model(BaseModel):
    """Base of everything here: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Text(Model):
    """The same prose in both languages. Any language missing is an error."""

    en: Prose
    zh: Prose

    def get(self, language: str) -> str:
        return self.zh if language == "zh" else self.en


# --------------------------------------------------------------------------------------------------------------------
# Claims

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}


def arithmetic(text: str) -> float:
    """The value of ``40 * 2**30``: numbers and + - * / ** with brackets, nothing else.

    Raises: ValueError that names what was not understood.
    """

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > 64:
                raise ValueError(f"{text!r}: exponent above 64")
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"{text!r}: only numbers, + - * / ** and brackets are read here")

    if len(text) > 80:
        raise ValueError("an expression has at most 80 characters")
    try:
        result = value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{text!r}: {error}") from None
    if isinstance(result, complex) or not math.isfinite(result):
        raise ValueError(f"{text!r} is not a finite number")
    return result


def _number(value: Any) -> Any:
    return arithmetic(value) if isinstance(value, str) else value


Num = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Exact = Annotated[int | float | tuple[int, ...], BeforeValidator(_number)]

_WITH_TOLERANCE = ("approx", "ratio_approx")
_ONLY_VERSUS = ("ratio_approx", "ratio_equals", "ratio_at_least", "ratio_at_most", "greater", "less")


class Expect(Model):
    """What must come out: exactly one of these, ``approx`` and ``ratio_approx`` with one tolerance."""

    approx: Num | None = None
    between: tuple[Num, Num] | None = None
    at_least: Num | None = None
    at_most: Num | None = None
    equals: Exact | None = None
    ratio_approx: Num | None = None
    ratio_equals: Num | None = None
    ratio_at_least: Num | None = None
    ratio_at_most: Num | None = None
    greater: bool | None = None
    less: bool | None = None
    rel_tol: Annotated[float, Field(gt=0, lt=1)] | None = None
    abs_tol: Annotated[float, Field(gt=0)] | None = None

    @property
    def kind(self) -> str:
        """The one expectation that is set."""
        return next(n for n in type(self).model_fields if n not in ("rel_tol", "abs_tol") and getattr(self, n) is not None)

    @property
    def is_ratio(self) -> bool:
        """Whether the value of the claim is params ÷ versus."""
        return self.kind in _ONLY_VERSUS

    @model_validator(mode="after")
    def _one(self) -> Expect:
        given = [n for n in type(self).model_fields if n not in ("rel_tol", "abs_tol") and getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(f"got {', '.join(given) or 'nothing'}; exactly one expectation is wanted")
        tolerances = [n for n in ("rel_tol", "abs_tol") if getattr(self, n) is not None]
        if given[0] in _WITH_TOLERANCE and len(tolerances) != 1:
            raise ValueError(f"{given[0]} wants exactly one of rel_tol, abs_tol")
        if given[0] not in _WITH_TOLERANCE and tolerances:
            raise ValueError(f"{given[0]} takes no tolerance")
        if self.between and self.between[0] >= self.between[1]:
            raise ValueError(f"between: the lower bound {self.between[0]:g} is not below {self.between[1]:g}")
        if self.greater is False or self.less is False:
            raise ValueError("greater and less are written `true`")
        return self


class Claim(Model):
    """A statement with the run that shows it."""

    id: Id
    statement: Text
    experiment: Name
    params: dict[Name, Scalar] = {}
    versus: dict[Name, Scalar] | None = None
    metric: Name
    seeds: tuple[Annotated[int, Field(ge=0)], ...]
    expect: Expect
    because: Prose
    fails_when: dict[Name, Scalar] | None = None
    limit: bool = False
    observation: bool = False  # wall-clock: one-sided, shown as an observation
    replaces: Id | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        if self.expect.is_ratio and self.versus is None:
            raise ValueError(f"expect.{self.expect.kind} wants `versus`")
        if self.versus is not None and not self.expect.is_ratio:
            raise ValueError(f"`versus` wants a ratio or greater/less, got expect.{self.expect.kind}")
        if self.versus is not None and (not self.versus or ("metric" in self.versus and len(self.versus) > 1)):
            raise ValueError("versus changes parameters, or names one other `metric` of the same run")
        return self


# --------------------------------------------------------------------------------------------------------------------
# The parts of a card


class Cite(Model):
    key: Id
    where: Prose


class Asked(Model):
    """How often interviewers ask it: in ``banks`` of ``of`` question banks and in ``reports`` interview reports."""

    banks: Annotated[int, Field(ge=0)]
    of: Annotated[int, Field(ge=1)]
    reports: Annotated[int, Field(ge=0)]
    source: Id


Phrases = tuple[tuple[Annotated[str, StringConstraints(min_length=1)], ...], ...]


class SaysPerLanguage(Model):
    """Groups of phrases per language: a text says the point when each group has a phrase in it."""

    en: Phrases
    zh: Phrases

    def get(self, language: str) -> Phrases:
        return self.zh if language == "zh" else self.en


class KeyPoint(Model):
    id: Id
    point: Text
    must: bool
    says: SaysPerLanguage
    not_says: SaysPerLanguage | None = None


class Step(Model):
    step: Text
    tex: Prose
    because: Text
    check: Id | None = None


class Lab(Model):
    id: Id
    experiment: Name
    params: dict[Name, Scalar] = {}
    controls: tuple[Name, ...]
    look_for: Text
    figures: tuple[Name, ...] = Field(default=(), max_length=3)  # metrics printed large; the first three of the experiment by default


class Mistake(Model):
    id: Id
    wrong: Text
    right: Text
    why: Text
    refuted_by: Id | None = None


class LabUse(Model):
    use: Id
    params: dict[Name, Scalar] = {}


class FollowUp(Model):
    id: Id
    question: Text
    answer: Text
    key_points: tuple[Text, ...] = Field(min_length=1)
    claim: Id | None = None
    lab: LabUse | None = None


class FilledTable(Model):
    """A comparison table that the engine fills: one row for each value of ``over``."""

    experiment: Name
    params: dict[Name, Scalar] = {}
    over: dict[Name, tuple[Scalar, ...]] = Field(min_length=1, max_length=1)
    metrics: tuple[Name, ...] = Field(min_length=1)


class Alternative(Model):
    name: Text
    formula: Prose
    buys: Text
    costs: Text
    claim: Id | None = None


class Alternatives(Model):
    items: tuple[Alternative, ...] = ()
    table: FilledTable | None = None


class InPractice(Model):
    symptom: Text
    cause: Text
    mend: Text
    detect: Text


class ResumeLine(Model):
    background: Literal["experienced", "classic", "new-grad"]
    line: Text


class Change(Model):
    date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    what: Text


# --------------------------------------------------------------------------------------------------------------------
# Quiz items


class Option(Model):
    text: Text
    right: bool = False
    why: Text


class _Item(Model):
    id: Id
    prompt: Text


class Choice(_Item):
    kind: Literal["choice"]
    options: tuple[Option, ...] = Field(min_length=2)
    multi: bool = False

    @model_validator(mode="after")
    def _one_right(self) -> Choice:
        right = sum(o.right for o in self.options)
        if right == 0 or (right > 1 and not self.multi):
            raise ValueError(f"got {right} right options; exactly one is wanted, or `multi: true` and at least one")
        return self


Vary = dict[Name, tuple[Scalar, ...]] | tuple[dict[Name, Scalar], ...]


class Numeric(_Item):
    kind: Literal["numeric"]
    vary: Vary = Field(min_length=1)
    answer_from: Id
    rel_tol: Annotated[float, Field(gt=0, lt=1)]
    unit: str = "1"


class Predict(_Item):
    kind: Literal["predict"]
    claim: Id
    ask: Literal["direction", "value"]


class Cloze(_Item):
    kind: Literal["cloze"]
    setup: str
    code: str
    holes: tuple[tuple[Option, ...], ...] = Field(min_length=1, max_length=2)
    check: str = Field(alias="assert")

    @model_validator(mode="after")
    def _holes(self) -> Cloze:
        if self.code.count("___") != len(self.holes):
            raise ValueError(f"code has {self.code.count('___')} ___ and holes {len(self.holes)} lists of options")
        for n, options in enumerate(self.holes):
            if sum(o.right for o in options) != 1:
                raise ValueError(f"hole {n} wants exactly one right option")
        return self


class Shape(_Item):
    kind: Literal["shape", "count"]
    vary: Vary = Field(min_length=1)
    answer: str


Item = Annotated[Choice | Numeric | Predict | Cloze | Shape, Field(discriminator="kind")]


# --------------------------------------------------------------------------------------------------------------------
# The card


class Card(Model):
    """One question, everything that is said about it, and the runs that show it."""

    id: Id
    topic: Id
    level: Literal["core", "deep", "trap"]
    version: Annotated[int, Field(ge=1)]
    asked: Asked | None = None
    minutes: Annotated[int, Field(ge=1, le=120)]
    tracks: tuple[Id, ...] = ()
    prerequisites: tuple[Id, ...] = ()
    related: tuple[Id, ...] = ()
    sources: tuple[Cite, ...] = Field(min_length=1)
    question: Text
    intent: Text
    short_answer: Text
    spoken: Text
    key_points: tuple[KeyPoint, ...] = Field(min_length=1)
    derivation: tuple[Step, ...] = ()
    labs: tuple[Lab, ...] = Field(min_length=1)
    claims: tuple[Claim, ...] = Field(min_length=1)
    mistakes: tuple[Mistake, ...] = Field(min_length=1)
    follow_ups: tuple[FollowUp, ...] = Field(min_length=1)
    alternatives: Alternatives = Alternatives()
    in_practice: tuple[InPractice, ...] = ()
    resume: tuple[ResumeLine, ...] = ()
    quiz: tuple[Item, ...] = Field(min_length=1)
    changes: tuple[Change, ...] = ()

    def claim(self, claim_id: str) -> Claim:
        return next(c for c in self.claims if c.id == claim_id)

    def lab(self, lab_id: str) -> Lab:
        return next(lab for lab in self.labs if lab.id == lab_id)


# --------------------------------------------------------------------------------------------------------------------
# The files beside the cards


class Source(Model):
    """One entry of sources.yaml. ``link`` is an https address or an arXiv/DOI identifier."""

    short: Prose  # as cited in a sentence: "Vaswani et al., 2017"
    authors: Prose
    title: Prose
    year: Annotated[int, Field(ge=1900, le=2100)]
    link: Prose
    note: Text | None = None


class Term(Model):
    """One entry of glossary.yaml."""

    term: Text
    meaning: Text
    paper: Prose | None = None  # the paper's own word for it


class Topic(Model):
    title: Text


class Track(Model):
    title: Text
    about: Text
    cards: tuple[Id, ...] = Field(min_length=1)


class NameText(Model):
    """Words for one name of the engine (a parameter, metric or column). ``label`` may hold ``$math$``; charts and option
    lists, which can't typeset it, take ``plain``."""

    label: Text
    plain: Text | None = None
    help: Text | None = None

    def text(self, language: str, *, plain: bool = False) -> str:
        return (self.plain if plain and self.plain else self.label).get(language)


class ExperimentText(Model):
    """Words for one experiment; ``formula`` is TeX, ``plots`` maps a plot's name to its title."""

    title: Text
    about: Text
    formula: Prose
    plots: dict[Name, Text]
    summary: Text  # one sentence filled with metrics: {weight_max_mean:.2f}


class Strings(Model):
    """strings.yaml: every word of the interface, and of the engine's names, in both languages."""

    ui: dict[Name, Text]
    names: dict[Name, NameText]
    choices: dict[Name, NameText]
    rules: dict[Name, Text]
    units: dict[str, Text]
    experiments: dict[Name, ExperimentText]
