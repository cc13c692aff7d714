"""Checks of single texts of a card: traps of Markdown, parity of the languages, bindings, numbers nobody measured."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from content import markdown, numbers
from content.bindings import Binding, Hole, citations, scan
from content.markdown import BLANK, Fault, blanked, formulas, outside
from content.problems import Path, Problem, choices
from content.schema import LANGUAGES, Card, Claim, Numeric, Scalar, Shape, Text, drawn, texts
from content.strict_yaml import Document

TO_WRITE = "TODO"  # new_card.py puts it where an author has to write

_MORE_TIMES = re.compile(
    rf"(?:(?<![最至放扩])[多高大快长]|增加|增长|增大|提高|提升|上升)(?:了|出)?\s*(?:约|大约)?\s*(?:\d[\d.,]*|{numbers.HAN_NUMBER}|{BLANK}+)\s*倍"
)
_TIMES_MORE = re.compile(
    rf"(?:\d[\d.,]*|{numbers.EN_NUMBER}|{BLANK}+)\s+times\s+(?:more|larger|greater|higher|bigger)\b", re.IGNORECASE
)


@dataclass
class Page:
    """The problems of one file, collected."""

    document: Document
    problems: list[Problem] = field(default_factory=list)

    def error(self, path: Path, message: str, *, offset: int = 0) -> None:
        self.problems.append(self.document.problem(path, message, offset=offset))

    def warn(self, path: Path, message: str, *, offset: int = 0) -> None:
        self.problems.append(self.document.problem(path, message, offset=offset, warning=True))


def check_text(page: Page, path: Path, text: Text) -> None:
    """What holds for every pair of texts: nothing draws otherwise than it reads, and both say the same formulas."""
    for language in LANGUAGES:
        for fault in markdown.faults(text.get(language), language):
            page.error((*path, language), fault.message, offset=fault.offset)
    for of, what in ((formulas, "formula"), (_keys, "citation")):
        en, zh = set(of(text.en)), set(of(text.zh))
        for missing, language in ((en - zh, "zh"), (zh - en, "en")):
            if missing:
                page.error(
                    (*path, language),
                    f"{_listed(missing)}: a {what} of the other language that is not here; both say the same",
                )


def check_card_texts(page: Page, card: Card, defaults: Mapping[str, Mapping[str, Scalar]]) -> None:
    """Every text of a card."""
    free = numbers.scene(_scene(card, defaults))
    for path, text in texts(card):
        if TO_WRITE in text.en or TO_WRITE in text.zh or role(path) == "code":
            continue  # what is still to be written is reported by itself; code is run
        check_text(page, path, text)
        _check_pieces(page, card, path, text)
        for language in LANGUAGES:
            side = (*path, language)
            _check_times_more(page, side, text.get(language), language)
            if role(path) == "statement":
                _check_statement(page, side, text.get(language), language, card.claims[int(path[1])], defaults)
            elif role(path) in ("prose", "question"):
                _check_numbers(page, side, text.get(language), language, free, question=role(path) == "question")


def check_loose_texts(page: Page, claims: Sequence[Claim], defaults: Mapping[str, Mapping[str, Scalar]]) -> None:
    """The statements of claims that have no card yet."""
    for n, claim in enumerate(claims):
        path = ("claims", n, "statement")
        check_text(page, path, claim.statement)
        for language in LANGUAGES:
            _check_statement(page, (*path, language), claim.statement.get(language), language, claim, defaults)


def role(path: Path) -> str:
    """How the numbers of a text are judged: "statement", "exempt", "code", "question" (it may suppose), "prose"."""
    names = [p for p in path if isinstance(p, str)]
    if names[0] == "claims":
        return "statement"
    if names == ["quiz", "holes", "text"]:
        return "code"
    if names in (["mistakes", "wrong"], ["quiz", "options", "text"]) or names[0] == "changes":
        return "exempt"
    return "question" if names[-1] in ("question", "prompt") else "prose"


def _keys(text: str) -> list[str]:
    return [key for key, _ in citations(text)]


def _listed(found: Iterable[str]) -> str:
    return ", ".join(f"${f}$" if re.search(r"[\\_^{}=]|^\W", f) else f for f in sorted(found)[:4])


# --------------------------------------------------------------------------------------------------------------------
# Bindings and holes


def _check_pieces(page: Page, card: Card, path: Path, text: Text) -> None:
    cited = [s.key for s in card.sources]
    named: dict[str, set[str]] = {}  # claims and holes of each language
    written: dict[str, set[str]] = {}  # how its measured values are written
    for language in LANGUAGES:
        side, pieces = (*path, language), list(scan(text.get(language)))
        for piece in pieces:
            if isinstance(piece, (Fault, Binding, Hole)) and (message := _piece_message(card, path, piece)):
                page.error(side, message, offset=piece.offset)
        for key, offset in citations(text.get(language)):
            if key not in cited:
                page.error(side, f"[@{key}]: not among the card's sources; it has {choices(key, cited)}", offset=offset)
        bound = [p for p in pieces if isinstance(p, Binding)]
        named[language] = {b.claim for b in bound} | {p.name for p in pieces if isinstance(p, Hole)}
        written[language] = {b.source.replace(" ", "") for b in bound}
    for here, there in (("zh", "en"), ("en", "zh")):
        for name in sorted(named[there] - named[here]):
            page.error((*path, here), f"{{{{{name}}}}} stands in the other language and not here; both say the same")
    if named["en"] == named["zh"] and (other := sorted(written["en"] ^ written["zh"])):
        page.warn(path, f"the languages write a measured value in different ways: {', '.join(other)}")


def _piece_message(card: Card, path: Path, piece: Fault | Binding | Hole) -> str | None:
    """What is wrong with one pair of braces at its place, if anything."""
    if isinstance(piece, Fault):
        return piece.message
    if isinstance(piece, Hole):
        holes = _holes(card, path)
        if piece.name in holes:
            return None
        if holes:
            return f"{piece.source}: this item varies {choices(piece.name, sorted(holes))}; a claim's id has a hyphen"
        return f"{piece.source}: only prompts of numeric, shape and count items have holes; a claim's id has a hyphen"
    if role(path) in ("statement", "exempt"):
        return f"{piece.source}: no measured value in a statement, a wrong sentence or an option; write the number"
    claims = [c.id for c in card.claims]
    if piece.claim not in claims:
        return f"{piece.source}: no such claim on this card; it has {choices(piece.claim, claims)}"
    return None


def _holes(card: Card, path: Path) -> Collection[str]:
    if path[0] != "quiz" or path[2] != "prompt":
        return ()
    vary = getattr(card.quiz[int(path[1])], "vary", None)
    return () if vary is None else drawn(vary)


# --------------------------------------------------------------------------------------------------------------------
# Numbers


def _scene(card: Card, defaults: Mapping[str, Mapping[str, Scalar]]) -> Iterator[object]:
    """Everything that sets the scene: the parameters of all runs of a card."""
    for claim in card.claims:
        yield from (
            *defaults.get(claim.experiment, {}).values(),
            *claim.params.values(),
            *(claim.versus or {}).values(),
        )
        yield from (claim.fails_when or {}).values()
    for lab in card.labs:
        yield from (*defaults.get(lab.experiment, {}).values(), *lab.params.values())
    for follow_up in card.follow_ups:
        yield from follow_up.lab.params.values() if follow_up.lab else ()
    if table := card.alternatives.table:
        yield from (*table.params.values(), *next(iter(table.over.values())))
    for item in card.quiz:
        if isinstance(item, (Numeric, Shape)):
            yield from drawn(item.vary).values()


def _check_numbers(page: Page, path: Path, text: str, language: str, free: set[float], *, question: bool) -> None:
    structure = {float(d) for f in formulas(text) for d in re.findall(r"(?<![\d.])\d+(?![\d.])", f)}  # 2 of $2 n d$
    for n in numbers.numbers(text, language):
        if numbers.cited(text, n.start):
            continue
        if n.kind == "times" and not question:
            page.error(
                path,
                f"{n.text!r} is a result; bind it to a claim, {{{{claim-id:.0f}}}}, or cite it in its sentence, [@key]",
                offset=n.start,
            )
        elif not n.stands_in(free) and not (n.kind == "plain" and n.value in structure and n.value <= 10):
            page.error(
                path,
                f"{n.text!r} stands in the params of no run here; if it is a result, bind it, {{{{claim-id}}}}, "
                "or cite it in its sentence, [@key]; "
                "a name or a constant stands in backticks",
                offset=n.start,
            )


def _check_statement(
    page: Page, path: Path, text: str, language: str, claim: Claim, defaults: Mapping[str, Mapping[str, Scalar]]
) -> None:
    """Each number of a statement stands in params, versus or expect; of a ratio the inverse too: 40 times smaller."""
    e = claim.expect
    expected = numbers.scene(v for v in (getattr(e, name) for name in type(e).model_fields) if v is not None)
    found = list(numbers.numbers(text, language, counts=True))
    if e.is_ratio or any(n.kind == "times" for n in found):
        expected |= {1 / v for v in expected if v}
    own = numbers.scene(
        [
            *defaults.get(claim.experiment, {}).values(),
            *claim.params.values(),
            *(claim.versus or {}).values(),
        ]
    )
    for n in found:
        known = expected if n.kind == "times" else expected | own
        if not n.stands_in(known) and not numbers.cited(text, n.start):
            where = "expect" if n.kind == "times" else "params, versus or expect"
            page.error(
                path,
                f"{n.text!r} stands in neither {where} of this claim; a statement says no more than its run",
                offset=n.start,
            )


def _check_times_more(page: Page, path: Path, text: str, language: str) -> None:
    pattern, report, instead = {
        "en": (_TIMES_MORE, page.warn, "8 times as much"),
        "zh": (_MORE_TIMES, page.error, "是……的 N 倍"),
    }[language]
    for m in pattern.finditer(blanked(outside(text), r"\{\{[^{}]*\}\}")):
        message = f"{text[m.start() : m.end()]!r} is read as 8 or as 9 times as much; write {instead}"
        report(path, message, offset=m.start())
