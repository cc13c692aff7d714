"""The shape of a card and of the files beside it.

Field by field as in docs/cards.md. These models check one file by itself; what needs the whole deck or the engine
(links, bindings, parity) is checked in ``content/checks.py`` and ``tools/check_content.py``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Strict,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from content import expressions
from content.problems import Path, shown

LANGUAGES = ("en", "zh")

KEBAB = r"^[a-z0-9]+(-[a-z0-9]+)*$"
Id = Annotated[str, StringConstraints(pattern=KEBAB)]  # kebab-case: cards, topics, items
ClaimId = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+)+$")
]  # two words at least: {{batch}} is a hole
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*$")]  # snake_case: engine's names
Prose = Annotated[str, StringConstraints(min_length=1, max_length=4000)]
Flag = Annotated[bool, Strict()]  # `yes` is not true


class Model(BaseModel):
    """Base of everything here: frozen, and a key that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Text(Model):
    """The same prose in both languages. Any language missing is an error."""

    en: Prose
    zh: Prose

    def get(self, language: str) -> str:
        return self.zh if language == "zh" else self.en


def texts(part: Any, path: Path = ()) -> Iterator[tuple[Path, Text]]:
    """Every Text inside a model, with its path in the file."""
    if isinstance(part, Text):
        yield path, part
    elif isinstance(part, BaseModel):
        for name, field in type(part).model_fields.items():
            yield from texts(getattr(part, name), (*path, field.alias or name))
    elif isinstance(part, dict):
        for key, value in part.items():
            yield from texts(value, (*path, key))
    elif isinstance(part, tuple):
        for n, value in enumerate(part):
            yield from texts(value, (*path, n))


# --------------------------------------------------------------------------------------------------------------------
# Claims


def arithmetic(text: str) -> int | float:
    """The value of ``40 * 2**30``: numbers, arithmetic and brackets, no names.

    Raises: ValueError that names what was not understood.
    """
    value = expressions.evaluate(text)
    if isinstance(value, tuple):
        raise ValueError(f"{text!r}: one number is wanted, without commas")
    return value if isinstance(value, int) else float(value)


def _scalar(value: Any) -> Any:
    if value is None or not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"got {shown(value)}; wanted a number, a name, or true or false")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return arithmetic(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"got {shown(value)}; wanted a number or arithmetic such as 40 * 2**30")
    return value


def _exact(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        if not all(type(v) is int for v in value):
            raise ValueError(f"got {shown(value)} with parts that are no whole numbers; a shape has only those")
        return tuple(value)
    return _number(value)


_WRITTEN = int | float | str  # what a file may say where a number is wanted
Scalar = Annotated[bool | int | float | str, BeforeValidator(_scalar, json_schema_input_type=bool | _WRITTEN)]
Num = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number, json_schema_input_type=_WRITTEN)]
Exact = Annotated[int | float | tuple[int, ...], BeforeValidator(_exact, json_schema_input_type=_WRITTEN | list[int])]

_TOLERANCES = ("rel_tol", "abs_tol")
_WITH_TOLERANCE = ("approx", "ratio_approx")
_ONLY_VERSUS = ("ratio_approx", "ratio_equals", "ratio_at_least", "ratio_at_most", "greater", "less")
_ONE_SIDED = ("at_least", "at_most", "ratio_at_least", "ratio_at_most", "greater", "less")


class Expect(Model):
    """What must come out: exactly one of these, ``approx`` and ``ratio_approx`` with one tolerance.

    Numbers may be written as arithmetic: ``40 * 2**30``. A ratio is params ÷ versus.
    """

    approx: Num | None = None
    between: tuple[Num, Num] | None = None
    at_least: Num | None = None
    at_most: Num | None = None
    equals: Exact | None = None
    """Exact: counts, bytes, tuples of whole numbers."""
    ratio_approx: Num | None = None
    ratio_equals: Num | None = None
    ratio_at_least: Num | None = None
    ratio_at_most: Num | None = None
    greater: Flag | None = None
    less: Flag | None = None
    rel_tol: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Tolerance relative to the expected value; from the sampling error, at least five standard errors."""
    abs_tol: Annotated[float, Field(gt=0)] | None = None

    def _given(self) -> list[str]:
        return [n for n in type(self).model_fields if n not in _TOLERANCES and getattr(self, n) is not None]

    @property
    def kind(self) -> str:
        """The one expectation that is set."""
        return self._given()[0]

    @property
    def is_ratio(self) -> bool:
        """Whether the value of the claim is params ÷ versus."""
        return self.kind in _ONLY_VERSUS

    @property
    def is_one_sided(self) -> bool:
        """Whether any value beyond a bound will do."""
        return self.kind in _ONE_SIDED

    @model_validator(mode="after")
    def _one(self) -> Expect:
        given = self._given()
        if len(given) != 1:
            raise ValueError(f"got {', '.join(given) or 'nothing'}; exactly one expectation is wanted")
        tolerances = [n for n in _TOLERANCES if getattr(self, n) is not None]
        if given[0] in _WITH_TOLERANCE and len(tolerances) != 1:
            raise ValueError(f"{given[0]} wants exactly one of rel_tol, abs_tol; got {', '.join(tolerances) or 'none'}")
        if given[0] not in _WITH_TOLERANCE and tolerances:
            raise ValueError(f"{given[0]} takes no tolerance; delete {tolerances[0]}, or write approx")
        if self.between and self.between[0] >= self.between[1]:
            raise ValueError(f"between: the lower bound {self.between[0]:g} is not below {self.between[1]:g}")
        if self.greater is False or self.less is False:
            raise ValueError("greater and less are written `true`; for the other direction write the other word")
        return self


class Claim(Model):
    """A statement with the run that shows it."""

    id: ClaimId
    """Unique in the deck, two words at least; {{id}} in prose is its measured value."""
    statement: Text
    """Says no more than params do: each number stands in params, versus or expect."""
    experiment: Name
    """A file of engine/experiments."""
    params: dict[Name, Scalar] = {}
    """What differs from the experiment's defaults."""
    versus: dict[Name, Scalar] | None = None
    """The same run with this change, or {metric: ...} of the same run; the value is then params ÷ versus."""
    metric: Name
    seeds: tuple[Annotated[int, Strict(), Field(ge=0)], ...]
    """[] where nothing is random: runs once."""
    expect: Expect
    because: Prose
    """Why this bound and this tolerance."""
    fails_when: dict[Name, Scalar] | None = None
    """One change of params under which the claim must fail."""
    limit: Flag = False
    """Shows where the standard answer stops holding."""
    observation: Flag = False
    """A wall-clock time: one-sided, with a large margin, shown as an observation."""
    replaces: ClaimId | None = None
    """The published claim that this one corrects."""

    @model_validator(mode="after")
    def _consistent(self) -> Claim:
        if self.expect.is_ratio and self.versus is None:
            raise ValueError(f"expect.{self.expect.kind} compares two runs; say with which in `versus`")
        if self.versus is not None and not self.expect.is_ratio:
            raise ValueError(f"`versus` wants a ratio or greater/less; got expect.{self.expect.kind}")
        if self.versus is not None and (not self.versus or ("metric" in self.versus and len(self.versus) > 1)):
            raise ValueError("versus changes parameters, or names one other `metric` of the same run")
        if self.fails_when is not None and not self.fails_when:
            raise ValueError("fails_when is empty; name the parameter whose change must make the claim fail")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds: the same seed twice proves nothing more")
        return self

    @property
    def versus_params(self) -> dict[str, Scalar]:
        """Parameters of the run compared with; those of the claim itself where there is none or another metric is."""
        changes = {} if self.versus is None or "metric" in self.versus else self.versus
        return {**self.params, **changes}


# --------------------------------------------------------------------------------------------------------------------
# The parts of a card


class Cite(Model):
    key: Id
    """A key of sources.yaml."""
    where: Prose
    """The section, table or footnote that was opened."""


class Asked(Model):
    """How often interviewers ask it: in ``banks`` of ``of`` question banks and in ``reports`` interview reports."""

    banks: Annotated[int, Strict(), Field(ge=0)]
    of: Annotated[int, Strict(), Field(ge=1)]
    reports: Annotated[int, Strict(), Field(ge=0)]
    source: Id

    @model_validator(mode="after")
    def _share(self) -> Asked:
        if self.banks > self.of:
            raise ValueError(f"got {self.banks} banks of {self.of}")
        return self


Group = Annotated[tuple[Annotated[str, StringConstraints(min_length=1)], ...], Field(min_length=1)]
Phrases = Annotated[tuple[Group, ...], Field(min_length=1)]


class SaysPerLanguage(Model):
    """Groups of phrases per language: a text says the point when each group has a phrase in it."""

    en: Phrases
    zh: Phrases

    def get(self, language: str) -> Phrases:
        return self.zh if language == "zh" else self.en


class KeyPoint(Model):
    id: Id
    point: Text
    must: Flag
    """A complete answer says it; the short answer here does."""
    says: SaysPerLanguage
    """A text says the point when each group has a phrase in it: [[a, b], [c]] is (a or b) and c. Stems will do."""
    not_says: SaysPerLanguage | None = None
    """Written like says: a text that says this takes the point back."""


class Step(Model):
    step: Text
    tex: Prose
    because: Text
    check: ClaimId | None = None
    builds_on: tuple[Annotated[int, Strict(), Field(ge=1)], ...] | None = None
    """Numbers, from 1, of the earlier steps that this one needs; left out: the one before it."""


class Lab(Model):
    id: Id
    experiment: Name
    params: dict[Name, Scalar] = {}
    controls: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Parameters that the reader moves, in the order in which one thinks."""
    look_for: Text
    figures: tuple[Name, ...] = Field(default=(), max_length=3)
    """Metrics printed large; without it the first three of the experiment."""


class Mistake(Model):
    id: Id
    wrong: Text
    right: Text
    why: Text
    refuted_by: ClaimId | None = None


class LabUse(Model):
    use: Id
    """The id of one of this card's labs."""
    params: dict[Name, Scalar] = {}


class FollowUp(Model):
    id: Id
    question: Text
    answer: Text
    key_points: tuple[Text, ...] = Field(min_length=1)
    claim: ClaimId | None = None
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
    claim: ClaimId | None = None


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
    right: Flag = False
    why: Text


class _Item(Model):
    id: Id
    prompt: Text


class Choice(_Item):
    kind: Literal["choice"]
    options: tuple[Option, ...] = Field(min_length=2)
    multi: Flag = False
    """Several options may be right."""

    @model_validator(mode="after")
    def _one_right(self) -> Choice:
        right = sum(o.right for o in self.options)
        if right == 0 or (right > 1 and not self.multi):
            raise ValueError(f"got {right} right options; exactly one is wanted, or `multi: true` and at least one")
        if right == len(self.options):
            raise ValueError("every option is right; at least one must be wrong")
        return self


def _vary_form(value: Any) -> str:
    return "presets" if isinstance(value, (list, tuple)) else "lists"


_Lists = Annotated[dict[Name, tuple[Scalar, ...]], Field(min_length=1), Tag("lists")]
_Presets = Annotated[tuple[dict[Name, Scalar], ...], Field(min_length=1), Tag("presets")]
Vary = Annotated[_Lists | _Presets, Discriminator(_vary_form)]


def draws(
    vary: dict[str, tuple[Scalar, ...]] | tuple[dict[str, Scalar], ...], *, most: int = 20_000
) -> Iterator[dict[str, Scalar]]:
    """Everything that can be drawn, at most ``most``: each combination of the lists, or each preset."""
    if isinstance(vary, tuple):
        yield from vary[:most]
    else:
        for values in itertools.islice(itertools.product(*vary.values()), most):
            yield dict(zip(vary, values, strict=True))


def drawn(
    vary: dict[str, tuple[Scalar, ...]] | tuple[dict[str, Scalar], ...],
) -> dict[str, tuple[Scalar, ...]]:
    """The names that are drawn, each with all its values."""
    if isinstance(vary, dict):
        return vary
    names = dict.fromkeys(name for preset in vary for name in preset)
    return {name: tuple(preset[name] for preset in vary if name in preset) for name in names}


class Numeric(_Item):
    kind: Literal["numeric"]
    vary: Vary
    """Values to draw from: a list for each name, or a list of presets; at least 50 different draws."""
    answer_from: ClaimId
    """The claim whose run, with the drawn values, gives the answer."""
    rel_tol: Annotated[float, Field(gt=0, lt=1)]
    unit: str = "1"


class Predict(_Item):
    kind: Literal["predict"]
    claim: ClaimId
    ask: Literal["direction", "value"]


class Cloze(_Item):
    kind: Literal["cloze"]
    setup: str
    """Code that runs first: imports and the values of the names."""
    code: str
    """Shown to the reader, with one or two ___."""
    holes: tuple[tuple[Option, ...], ...] = Field(min_length=1, max_length=2)
    check: str = Field(alias="assert")
    """Code that passes with the right options and fails with each wrong one."""

    @model_validator(mode="after")
    def _holes(self) -> Cloze:
        if self.code.count("___") != len(self.holes):
            raise ValueError(f"code has {self.code.count('___')} ___ and holes {len(self.holes)} lists of options")
        for n, options in enumerate(self.holes):
            if len(options) < 2 or sum(o.right for o in options) != 1:
                raise ValueError(f"hole {n} wants at least two options, exactly one of them right")
        return self


class Shape(_Item):
    kind: Literal["shape", "count"]
    vary: Vary
    answer: str
    """An expression of the drawn sizes; for a shape a tuple of them: (batch, n_heads, seq_len, d_k)."""


Item = Annotated[Choice | Numeric | Predict | Cloze | Shape, Field(discriminator="kind")]


# --------------------------------------------------------------------------------------------------------------------
# The card


class Card(Model):
    """One question, everything that is said about it, and the runs that show it."""

    id: Id
    """The file's name, and an entry of its topic in topics.yaml."""
    topic: Id
    """The folder's name."""
    level: Literal["core", "deep", "trap"]
    """core, deep, or trap: the usual answer is wrong."""
    version: Annotated[int, Strict(), Field(ge=1)]
    asked: Asked | None = None
    minutes: Annotated[int, Strict(), Field(ge=1, le=120)]
    """Time to read it."""
    tracks: tuple[Id, ...] = ()
    """The tracks of tracks.yaml that list this card."""
    prerequisites: tuple[Id, ...] = ()
    related: tuple[Id, ...] = ()
    sources: tuple[Cite, ...] = Field(min_length=1)
    question: Text
    """As an interviewer would say it."""
    intent: Text
    """What the interviewer is after, and what makes the question hard."""
    short_answer: Text
    """Two to four sentences that say every key point with must: true."""
    spoken: Text
    """The 30-second answer, made for the ear: 75 words, 130 units in Chinese."""
    key_points: tuple[KeyPoint, ...] = Field(min_length=1)
    derivation: tuple[Step, ...] = ()
    labs: tuple[Lab, ...] = Field(min_length=1)
    """The first opens with the card."""
    claims: tuple[Claim, ...] = Field(min_length=1)
    mistakes: tuple[Mistake, ...] = Field(min_length=1)
    follow_ups: tuple[FollowUp, ...] = Field(min_length=1)
    alternatives: Alternatives = Alternatives()
    in_practice: tuple[InPractice, ...] = ()
    resume: tuple[ResumeLine, ...] = ()
    quiz: tuple[Item, ...] = Field(min_length=1)
    changes: tuple[Change, ...] = ()
    """Dated corrections, shown as errata."""

    def claim(self, claim_id: str) -> Claim:
        return next(c for c in self.claims if c.id == claim_id)

    def built_on(self) -> dict[int, tuple[int, ...]]:
        """The steps that can be put in order, by their place from 0, each with those that it builds on.

        Left out are steps that build on none and on which none builds; empty where fewer than three are left.
        """
        needs = {
            place: tuple(n - 1 for n in step.builds_on) if step.builds_on is not None else (place - 1,) * (place > 0)
            for place, step in enumerate(self.derivation)
        }
        needed = {place for places in needs.values() for place in places}
        linked = {place: places for place, places in needs.items() if places or place in needed}
        return linked if len(linked) >= 3 else {}

    def lab(self, lab_id: str) -> Lab:
        return next(lab for lab in self.labs if lab.id == lab_id)


class LooseClaims(Model):
    """content/claims/<experiment>.yaml: claims of an experiment whose card is not written yet."""

    claims: tuple[Claim, ...] = Field(min_length=1)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a card, for completion in the author's editor."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Card.model_json_schema()}
    schema["title"] = "Card of the Attention Interview Lab"
    return schema


# --------------------------------------------------------------------------------------------------------------------
# The files beside the cards


def _family(authors: str) -> str:
    """Vaswani et al.; Henry and Chen; Bernhard."""
    names = [n.split()[-1] for n in re.split(r",? and |, ", authors) if n.strip()]
    return names[0] + (" et al." if len(names) > 2 else f" and {names[1]}" if len(names) == 2 else "")


class Source(Model):
    """One entry of sources.yaml."""

    authors: Prose
    title: Prose
    year: Annotated[int, Strict(), Field(ge=1900, le=2100)]
    link: Prose
    """An https address, arXiv:1706.03762 or doi:10.1000/1 (both read as addresses), or a page of docs/."""
    short: str = ""
    """As cited in a sentence; without it made of the authors: Vaswani et al., 2017. Organizations want it written."""
    note: Text | None = None

    @field_validator("link")
    @classmethod
    def _address(cls, link: str) -> str:
        if match := re.fullmatch(r"arXiv:(\d{4}\.\d{4,5}|[a-z-]+/\d{7})", link):
            return f"https://arxiv.org/abs/{match[1]}"
        if match := re.fullmatch(r"doi:(10\.\S+/\S+)", link):
            return f"https://doi.org/{match[1]}"
        if re.fullmatch(r"https://[A-Za-z0-9.-]+\.[a-z]{2,}(/[^\s()<>\"]*)?", link):
            return link
        if re.fullmatch(r"docs/[A-Za-z0-9/_-]+\.md", link):
            return link
        raise ValueError(
            f"got {shown(link)}; wanted an https:// address, arXiv:1706.03762, doi:10.1000/1, or a page of docs/"
        )

    @model_validator(mode="after")
    def _fill_short(self) -> Source:
        if not self.short:
            object.__setattr__(self, "short", f"{_family(self.authors)}, {self.year}")
        return self


class Term(Model):
    """One entry of glossary.yaml."""

    term: Text
    meaning: Text
    paper: Prose | None = None
    """The paper's own word for it."""


class Topic(Model):
    title: Text
    cards: tuple[Id, ...] = ()
    """The syllabus: every card of the topic that is written or planned, in the order of study."""


class Track(Model):
    title: Text
    about: Text
    cards: tuple[Id, ...] = Field(min_length=1)
    """In the order of the walk; a card may be not written yet."""


class NameText(Model):
    """Words for one name of the engine (a parameter, metric or column). ``label`` may hold ``$math$``; charts and
    option lists, which can't typeset it, take ``plain``."""

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
    units: dict[str, Text]  # "1", of pure numbers, has no words
    experiments: dict[Name, ExperimentText]
