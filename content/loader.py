"""YAML → Card, and the folder → Deck. What is wrong is said all at once, as ``file:line:column: where: message``.

A file is parsed once and kept until its time or size changes; cards are frozen, so all readers may share one.
"""

from __future__ import annotations

import os
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from content.problems import ContentError, Problem, choices, shown
from content.problems import Path as Place
from content.schema import Card, Claim, Id, LooseClaims, Source, Strings, Term, Topic, Track
from content.strict_yaml import MAX_BYTES, Document, read

__all__ = ["BrokenFile", "ContentError", "Deck", "Problem", "display", "load_card", "load_deck", "parse"]

HOME = Path(__file__).resolve().parent
PROJECT = HOME.parent


@dataclass(frozen=True)
class BrokenFile:
    """A card that can't be read, and why."""

    path: Path
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Deck:
    """Everything in a content folder. ``documents`` say where each part of a file stands: of a card by its id, of the
    files beside by their name without ending."""

    folder: Path
    cards: Mapping[str, Card]  # in the order of topics.yaml, in which they can be studied
    broken: tuple[BrokenFile, ...]
    topics: Mapping[str, Topic]
    tracks: Mapping[str, Track]
    glossary: Mapping[str, Term]
    sources: Mapping[str, Source]
    strings: Strings
    loose: Mapping[str, tuple[Claim, ...]] = field(default_factory=dict)  # experiment → claims without a card
    paths: Mapping[str, Path] = field(default_factory=dict)  # of cards and loose claims
    documents: Mapping[str, Document] = field(default_factory=dict)

    @property
    def claims(self) -> dict[str, tuple[Claim, ...]]:
        """All claims by whose they are: a card's id, or ``claims/<experiment>`` where there is no card."""
        of_cards = {name: card.claims for name, card in self.cards.items()}
        return of_cards | {f"claims/{name}": claims for name, claims in self.loose.items()}


BESIDE: dict[str, Any] = {
    "topics": dict[Id, Topic],
    "tracks": dict[Id, Track],
    "glossary": dict[Id, Term],
    "sources": dict[Id, Source],
    "strings": Strings,
}


def load_card(path: str | os.PathLike[str]) -> Card:
    """Read one card.

    Raises: ContentError.
    """
    card: Card = _load(Path(path), Card)[0]
    return card


def load_deck(folder: str | os.PathLike[str] = HOME) -> Deck:
    """Read a content folder. A bad card is listed in ``broken``; the others load. A file beside the cards that the
    folder lacks is the project's own.

    Raises: ContentError for a folder that does not exist, and for a bad topics, tracks, glossary, sources or strings.
    """
    folder = Path(folder)
    if not folder.is_dir():
        got = "got a file" if folder.exists() else "no such folder"
        raise ContentError([Problem(display(folder), 1, 1, "", f"{got}; wanted a folder with cards/<topic>/<id>.yaml")])
    cards: dict[str, Card] = {}
    loose: dict[str, tuple[Claim, ...]] = {}
    broken: list[BrokenFile] = []
    paths: dict[str, Path] = {}
    documents: dict[str, Document] = {}
    beside = _beside(folder, documents)
    for path in _files(folder / "cards"):
        try:
            card, document = _load(path, Card)
            if card.id in cards:
                first = display(paths[card.id])
                raise ContentError(
                    [
                        document.problem(
                            ("id",), f"got {card.id!r}, which is the id of {first} as well; ids are unique in the deck"
                        )
                    ]
                )
        except ContentError as error:
            broken.append(BrokenFile(path, error.problems))
        else:
            cards[card.id], paths[card.id], documents[card.id] = card, path, document
    for path in _files(folder / "claims"):
        try:
            claims, document = _load(path, LooseClaims)
            if path.stem in loose:
                first = display(paths[f"claims/{path.stem}"])
                raise ContentError([document.problem((), f"{first} has claims of {path.stem} as well; keep one file")])
        except ContentError as error:
            broken.append(BrokenFile(path, error.problems))
        else:
            loose[path.stem], paths[f"claims/{path.stem}"], documents[f"claims/{path.stem}"] = (
                claims.claims,
                path,
                document,
            )
    planned = [card_id for topic in beside["topics"].values() for card_id in topic.cards]
    in_order = {card_id: cards[card_id] for card_id in [*planned, *cards] if card_id in cards}
    return Deck(folder, in_order, tuple(broken), **beside, loose=loose, paths=paths, documents=documents)


def parse(text: str | bytes, file: str, kind: Any = Card) -> tuple[Any, Document]:
    """Text of a file → what ``kind`` says it is, and where its parts stand. Everything wrong is reported together.

    Raises: ContentError.
    """
    if isinstance(text, bytes):
        text = _decode(text, file)
    document, problems = read(text, file, short=kind not in (Card, LooseClaims))
    if document is None:
        raise ContentError(problems)
    refused = {p.where for p in problems}
    try:
        value = TypeAdapter(kind).validate_python(document.data)
    except ValidationError as error:
        said = list(_schema_problems(error, document, kind))
        problems += [
            p for p in said if not any(p.where == w or p.where.startswith((f"{w}.", f"{w}[")) for w in refused if w)
        ]
        raise ContentError(problems) from None
    if problems:
        raise ContentError(problems)
    return value, document


def display(path: Path) -> str:
    """A path as messages show it: from the project's root where it lies inside."""
    try:
        return path.resolve().relative_to(PROJECT).as_posix()
    except (ValueError, OSError, RuntimeError):  # outside the project, or a loop of links
        return path.as_posix()


# --------------------------------------------------------------------------------------------------------------------
# Files


def _beside(folder: Path, documents: dict[str, Document]) -> dict[str, Any]:
    """The files beside the cards, all their problems together."""
    found: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, kind in BESIDE.items():
        path = folder / f"{name}.yaml"
        try:
            found[name], documents[name] = _load(path if os.path.lexists(path) else HOME / f"{name}.yaml", kind)
        except ContentError as error:
            problems += error.problems
    if problems:
        raise ContentError(problems)
    return found


def _files(folder: Path) -> Iterator[Path]:
    """YAML files at any depth, in order; an editor's hidden copies are none."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".yaml", ".yml") and not path.name.startswith("."):
            yield path


_Outcome = tuple[Any, Document] | ContentError
_kept: dict[tuple[Path, str], tuple[tuple[int, int], _Outcome]] = {}
_lock = threading.Lock()


def _load(path: Path, kind: Any) -> tuple[Any, Document]:
    """Parse a file, or take what was made of it while its time and size are the same."""
    file = display(path)
    try:
        status = path.stat()
    except OSError as error:
        raise _unreadable(file, error) from None
    stamp, name = (status.st_mtime_ns, status.st_size), (path.resolve(), repr(kind))
    with _lock:
        kept = _kept.get(name)
    if kept is None or kept[0] != stamp:
        made: _Outcome
        try:
            made = parse(_bytes(path, file, status.st_size), file, kind)
        except ContentError as error:
            made = error
        kept = stamp, made
        with _lock:
            _kept[name] = kept
    outcome = kept[1]
    if isinstance(outcome, ContentError):
        raise ContentError(outcome.problems)  # a new one: readers would share, and lengthen, the traceback of one
    return outcome


def _bytes(path: Path, file: str, size: int) -> bytes:
    if not path.is_file():
        raise ContentError(
            [Problem(file, 1, 1, "", f"got a {'folder' if path.is_dir() else 'special file'}; wanted a file")]
        )
    if path.suffix != ".yaml":
        raise ContentError([Problem(file, 1, 1, "", f"got the ending {path.suffix!r}; wanted .yaml")])
    too_large = f"larger than {MAX_BYTES // 1_000_000} MB, not read; one file is one card"
    if size > MAX_BYTES:
        raise ContentError([Problem(file, 1, 1, "", f"got {size / 1e6:.1f} MB; {too_large}")])
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(file, error) from None
    if len(raw) > MAX_BYTES:
        raise ContentError([Problem(file, 1, 1, "", too_large)])
    return raw


def _unreadable(file: str, error: OSError) -> ContentError:
    mend = {FileNotFoundError: "no such file", PermissionError: "no permission to read it; chmod +r"}.get(
        type(error), error.strerror or str(error)
    )
    return ContentError([Problem(file, 1, 1, "", f"can't be read: {mend}")])


def _decode(raw: bytes, file: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        message = f"got the byte 0x{raw[error.start]:02x}, which is not UTF-8; save the file as UTF-8"
        raise ContentError([Problem(file, line, column, "", message)]) from None


# --------------------------------------------------------------------------------------------------------------------
# The schema's errors in plain words


def _schema_problems(error: ValidationError, document: Document, kind: Any) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]:
            continue  # long enough, but for its entries with problems of their own
        path = _path(detail["loc"], document)
        yield document.problem(path, _plain(detail, kind))


def _path(loc: tuple[str | int, ...], document: Document) -> Place:
    """The place in the file, without pydantic's names of union branches; what is missing keeps its name at the end."""
    path: Place = ()
    for n, part in enumerate(loc):
        if (*path, part) in document.marks or n == len(loc) - 1:
            path = (*path, part)
    if path and path not in document.marks and path[-1] in ("lists", "presets"):
        path = path[:-1]
    return path


def _plain(detail: ErrorDetails, kind: Any) -> str:
    got, ctx = shown(detail["input"]), detail.get("ctx", {})
    name = str(detail["loc"][-1]) if detail["loc"] else ""
    match detail["type"]:
        case "missing":
            return _missing(detail, kind, name)
        case "extra_forbidden":
            model = _model_at(kind, detail["loc"][:-1])
            names = [f.alias or n for n, f in model.model_fields.items()] if model else []
            return f"no such field; {model.__name__ if model else 'this'} has {choices(name, names, most=40)}"
        case "literal_error" | "union_tag_invalid":
            wanted = ctx.get("expected") or ctx.get("expected_tags", "")
            got = shown(ctx["tag"]) if "tag" in ctx else got
            words = [w.strip(" '") for w in str(wanted).replace(" or ", ", ").split(", ")]
            prefix = "kind: " if "tag" in ctx else ""
            return f"{prefix}got {got}; wanted one of {choices(got.strip(chr(39)), words)}"
        case "union_tag_not_found":
            return "kind is missing; wanted one of choice, numeric, predict, cloze, shape, count"
        case "value_error":
            return str(ctx["error"])
        case "string_pattern_mismatch":
            return (
                f"got {got}; wanted {_PATTERNS.get(str(ctx.get('pattern')), 'the pattern ' + str(ctx.get('pattern')))}"
            )
        case "string_too_short" | "too_short":
            least = ctx.get("min_length", 1)
            return (
                "is empty"
                if detail["type"] == "string_too_short"
                else f"got {len(detail['input']) or 'no'} entries; at least {least} wanted"
            )
        case "string_too_long" | "too_long":
            return f"longer than {ctx.get('max_length')}; cut it or split it"
        case other:
            wanted = next((w for words, w in _WANTED if words in other), None)
            limits = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
            bound = ", ".join(f"{limits[k]} {ctx[k]:g}" for k in limits if k in ctx)
            if bound:
                return f"got {got}; wanted a number {bound}"
            if wanted == "a mapping" and (model := _model_at(kind, detail["loc"])):
                wanted = f"a mapping with {', '.join(f.alias or n for n, f in model.model_fields.items())}"
            if wanted == "text" and isinstance(detail["input"], (bool, int, float)):
                return f"got {got}; wanted text, so put it in single quotes"
            return f"got {got}; wanted {wanted or detail['msg']}"


def _missing(detail: ErrorDetails, kind: Any, name: str) -> str:
    if name in ("en", "zh"):
        beside = sorted(k for k in detail["input"] if k in ("en", "zh")) if isinstance(detail["input"], dict) else []
        language = {"en": "English", "zh": "Chinese"}[name]
        return f"missing; wanted the {language} text" + (f" beside {beside[0]}" if beside else "")
    model = _model_at(kind, detail["loc"][:-1])
    note = next((f.description for n, f in model.model_fields.items() if name in (n, f.alias)), None) if model else None
    return f"missing; add `{name}:`" + (f" ({note.rstrip('.').replace(chr(10), ' ')})" if note else "")


_PATTERNS = {
    r"^[a-z0-9]+(-[a-z0-9]+)*$": "kebab-case: small letters, digits and hyphens, as in sdpa-scale-sqrt-dk",
    r"^[a-z0-9]+(-[a-z0-9]+)+$": "kebab-case of at least two words, as in variance-is-dk",
    r"^[a-z][A-Za-z0-9]*(_[A-Za-z0-9]+)*$": "snake_case, as in kv_len or qk_variance",
    r"^\d{4}-\d{2}-\d{2}$": "a date as 2026-01-31",
}
_WANTED = (
    ("string", "text"),
    ("bool", "true or false"),
    ("int", "a whole number"),
    ("float", "a number"),
    ("finite_number", "a finite number"),
    ("tuple", "a list"),
    ("model", "a mapping"),
    ("dict", "a mapping"),
)


def _model_at(kind: Any, loc: Sequence[str | int]) -> type[BaseModel] | None:
    """The model that stands at a place inside ``kind``, following pydantic's names of union branches."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if loc and any(_tagged(a, loc[0]) for a in args):
            args, loc = tuple(a for a in args if _tagged(a, loc[0])), loc[1:]
        return next((m for a in args if (m := _model_at(a, loc)) is not None), None)
    if origin in (tuple, dict):
        return _model_at(args[0] if origin is tuple else args[1], loc[1:]) if loc else None
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return None
    if not loc:
        return kind
    named = next((f for n, f in kind.model_fields.items() if loc[0] in (n, f.alias)), None)
    return _model_at(named.annotation, loc[1:]) if named else None


def _tagged(kind: Any, tag: str | int) -> bool:
    """Whether a union's branch is the one that pydantic calls ``tag``."""
    if isinstance(kind, type) and issubclass(kind, BaseModel) and "kind" in kind.model_fields:
        return tag in typing.get_args(kind.model_fields["kind"].annotation)
    return False
