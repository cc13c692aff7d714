"""YAML as far as it is allowed here, read in one pass: plain data, and where each piece of it stands.

YAML has ways to say something else than one sees. They are refused, each with its mend: anchors, aliases and tags; a
key twice; a backslash in double quotes (``"\\frac"`` is a form feed and ``rac``); prose in scalars that a comma or a
colon would cut; control characters. ``yes``, dates and ``12:30``, which elsewhere turn into something else, stay text.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from content.problems import Path, Problem, dotted

MAX_BYTES = 2_000_000
MAX_DEPTH = 12
MAX_NODES = 200_000

INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,39})")
FLOAT = re.compile(
    r"[-+]?(?:[0-9]{1,40}\.[0-9]{0,40}|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,4})?|[-+]?[0-9]{1,40}[eE][-+]?[0-9]{1,4}"
)
# Nobody sees them: controls but the line feed, soft hyphen, zero width, separators, bidirectional overrides, BOM.
INVISIBLE = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
HEADING = re.compile(r"^ {0,3}#{1,6}(?: |$)", re.MULTILINE)
FENCE = re.compile(r"^\s*(```|~~~)")
_BLOCK = re.compile(
    r"\s*(?:[-*+]\s|>|#|\d+[.)]\s)"
)  # begins a list item, a quotation or a heading: never joined to what is before
HAN = r"\u2e80-\u2fdf\u3005-\u3007\u31c0-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
POINT = (
    r"\u3001-\u3003\u3008-\u301b\u30fb\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"  # full-width punctuation
)
_EITHER = r"\u2014\u2018\u2019\u201c\u201d\u2026"  # quotes, dash, ellipsis: of both languages
_JOINS = re.compile(
    rf"(?<=[{POINT}])\n *(?=\S)|(?<=\S)\n *(?=[{POINT}])"
    rf"|(?<=[{HAN}])\n *(?=[{HAN}{_EITHER}])|(?<=[{_EITHER}])\n *(?=[{HAN}])"
)

# What libyaml says, and what an author should do.
_MENDS = (
    (
        "mapping values are not allowed",
        "a second `: ` on this line, or a line indented too far; put text that holds `: ` in single quotes or "
        "under `|`",
    ),
    (
        "could not find expected ':'",
        "a line that is no `key: value`; indent text under `|`, or put it in single quotes",
    ),
    (
        "did not find expected ',' or",
        "text in { } or [ ] that holds a comma, a colon or a bracket must stand in single quotes",
    ),
    (
        "did not find expected key",
        "something stands after a value that is already complete, or a line is indented differently from its "
        "neighbours; inside single quotes write '' for an apostrophe; text that begins with [, { or a quote must "
        "stand in quotes or under `|`",
    ),
    ("did not find expected '-' indicator", "a list item and a key stand at the same depth"),
    (
        "cannot start any token",
        "text can't begin with this character (@ ` % or a tab); put it in single quotes or under `|`",
    ),
    (
        "unknown escape character",
        "a backslash in double quotes; use single quotes or `|`, where a backslash is a backslash",
    ),
    (
        "nesting depth",
        f"more than {MAX_DEPTH} brackets or indents in each other; text with {{{{ stands in single quotes or under `|`",
    ),
    ("unexpected end of stream", "a quote that is never closed"),
    ("document start", "text goes on after the end of the document; put it in single quotes or under `|`"),
)


@dataclass(frozen=True)
class _Prose:
    """Where the lines of one text stand: ``starts`` are their first characters' offsets in the value."""

    line: int
    starts: tuple[int, ...]
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Document:
    """The data of one file, and where each part of it stands.

    ``marks`` maps a path to (line, column), counted from 1: of the key, or of a list item's beginning.
    """

    file: str
    data: Any
    marks: dict[Path, tuple[int, int]]
    prose: dict[Path, _Prose]

    def place(self, path: Path, offset: int = 0) -> tuple[int, int]:
        """Line and column of a path, or of the nearest part above it; of a text, of its character ``offset``."""
        if found := self.prose.get(path):
            n = bisect.bisect_right(found.starts, offset) - 1
            return found.line + n, found.columns[n] + offset - found.starts[n]
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, (1, 1))

    def problem(self, path: Path, message: str, *, offset: int = 0, warning: bool = False) -> Problem:
        """A problem at a path."""
        line, column = self.place(path, offset)
        return Problem(self.file, line, column, dotted(path), message, warning)


def is_prose(path: Path) -> bool:
    """Whether a text is a language's side of a pair: its key is ``en`` or ``zh``."""
    return bool(path) and path[-1] in ("en", "zh")


def read(text: str, file: str, *, short: bool = False) -> tuple[Document | None, list[Problem]]:
    """Parse a file's text. The document is None when it can't be understood to its end.

    ``short``: a list of words, where one in plain letters may go without quotes.
    """
    text = text.replace("\r\n", "\n")
    if problems := list(itertools.islice(_invisible(text, file), 20)):
        return None, problems
    builder = _Builder(text, file, short)
    try:
        data = builder.document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        said = getattr(error, "problem", None) or str(error)
        mend = next(
            (m for words, m in _MENDS if words in said), "check quotes, colons and indentation here and one line above"
        )
        builder.problems.append(Problem(file, line, column, "", f"not YAML: {said}; {mend}"))
        return None, builder.problems
    except _Refused:
        return None, builder.problems
    return Document(file, data, builder.marks, builder.prose), builder.problems


def join_wrapped(text: str) -> tuple[str, list[int]]:
    """Wrapped lines put together without a space where Chinese would not have one, and where each line now begins.

    A line break next to full-width punctuation, or between two Han characters, would be drawn as a space. Fenced code,
    tables and display maths keep their lines.
    """
    fenced = False
    kept, lines = [], text.split("\n")
    for line in lines:
        fence = bool(FENCE.match(line)) or line.strip() == "$$"
        kept.append(fenced or fence or line.lstrip().startswith("|"))
        fenced ^= fence
    joined, starts = lines[0], [0]
    for n, line in enumerate(lines[1:], 1):
        if not kept[n] and not kept[n - 1] and not _BLOCK.match(line) and _JOINS.search(f"{lines[n - 1][-1:]}\n{line}"):
            starts.append(len(joined))
            joined += line.lstrip(" ")
        else:
            starts.append(len(joined) + 1)
            joined += "\n" + line
    return joined, starts


class _Refused(Exception):
    """The rest of the file is not worth reading; the problem is already noted."""


def _invisible(text: str, file: str) -> Iterator[Problem]:
    for match in INVISIBLE.finditer(text):
        line, column = text.count("\n", 0, match.start()) + 1, match.start() - text.rfind("\n", 0, match.start())
        mend = (
            "a tab; wanted spaces" if match[0] == "\t" else f"an invisible character, U+{ord(match[0]):04X}; delete it"
        )
        yield Problem(file, line, column, "", mend)


def _place(event: Any) -> tuple[int, int]:
    return event.start_mark.line + 1, event.start_mark.column + 1


class _Builder:
    """Events of the parser → plain data, marks and problems."""

    def __init__(self, text: str, file: str, short: bool) -> None:
        self.text, self.file, self.short = text, file, short
        self.lines = text.split("\n")
        self.problems: list[Problem] = []
        self.marks: dict[Path, tuple[int, int]] = {}
        self.prose: dict[Path, _Prose] = {}
        self.n_nodes = 0
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))

    def document(self) -> Any:
        """The one document of the file."""
        next(self.events)  # stream start
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            self.refuse(event, (), "the file is empty; wanted `key: value` lines")
        self.marks[()] = (1, 1)
        data = self.node(next(self.events), ())
        next(self.events)  # document end
        event = next(self.events)
        if not isinstance(event, yaml.StreamEndEvent):
            self.note(event, (), "a second document begins; one file is one document, delete the line `---`")
        return data

    def note(self, event: Any, path: Path, message: str) -> None:
        self.problems.append(Problem(self.file, *_place(event), dotted(path), message))

    def refuse(self, event: Any, path: Path, message: str) -> None:
        self.note(event, path, message)
        raise _Refused

    def node(self, event: Any, path: Path) -> Any:
        """The value that begins with this event."""
        self.n_nodes += 1
        if self.n_nodes > MAX_NODES:
            self.refuse(event, path, f"more than {MAX_NODES} values; one file is one card")
        if isinstance(event, yaml.AliasEvent):
            self.note(
                event,
                path,
                f"an alias (*{event.anchor}); write the value out. Text that begins with * stands in single quotes",
            )
            return None
        if event.anchor is not None:
            self.note(
                event, path, f"an anchor (&{event.anchor}); delete it. Text that begins with & stands in single quotes"
            )
        if event.tag is not None:
            self.note(event, path, f"a tag ({event.tag}); delete it. Text that begins with ! stands in single quotes")
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, path)
        if len(path) >= MAX_DEPTH:
            self.refuse(event, path, f"nested more than {MAX_DEPTH} deep")
        return self.mapping(path) if isinstance(event, yaml.MappingStartEvent) else self.sequence(path)

    def sequence(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            here = (*path, len(items))
            self.marks[here] = _place(event)
            items.append(self.node(event, here))
        return items

    def mapping(self, path: Path) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self.note(
                    event,
                    path,
                    "a list or mapping stands where a key is wanted; text with { or [ stands in single quotes or "
                    "under `|`",
                )
                self.node(event, (*path, "?"))  # one deeper, so that {{{{... ends at the limit
                self.node(next(self.events), (*path, "?"))
                continue
            here = (*path, event.value)
            if event.anchor is not None or event.tag is not None or event.value == "<<":
                self.note(event, here, "an anchor, tag or merge (<<) at a key; write the fields out")
            if event.value in items:
                first = self.marks[here][0]
                self.note(
                    event, here, f"the key stands here a second time, first in line {first}; delete or rename one"
                )
                self.node(next(self.events), (*path, f"{event.value} (again)"))
                continue
            self.marks[here] = _place(event)
            items[event.value] = None  # a value that is refused leaves its key
            items[event.value] = self.node(next(self.events), here)
        return items

    def scalar(self, event: Any, path: Path) -> Any:
        if event.style == '"' and "\\" in self.text[event.start_mark.index : event.end_mark.index]:
            self.note(
                event,
                path,
                "a backslash in double quotes, where \\f, \\t, \\b and \\n are control characters; use single "
                "quotes or `|`",
            )
        if is_prose(path):
            return self.prose_scalar(event, path)
        if not event.style:
            return self.plain(event, path)
        return event.value

    def plain(self, event: Any, path: Path) -> Any:
        """true, false, null and decimal numbers; all else is text."""
        value = event.value
        if " " in value and re.match(r" +#", self.text[event.end_mark.index : event.end_mark.index + 80]):
            self.note(event, path, "text without quotes that ends before ` #`; put it in single quotes")
        if value in ("true", "false"):
            return value == "true"
        if value in ("", "null", "~"):
            return None
        if INT.fullmatch(value):
            return int(value)
        if FLOAT.fullmatch(value):
            number = float(value)
            if number in (float("inf"), float("-inf")):
                self.note(event, path, f"got {value}; the largest number is 1.8e308")
            return number
        return value

    def prose_scalar(self, event: Any, path: Path) -> str:
        if not event.style and not (
            self.short and re.fullmatch(r"[^\s:#,\[\]{}&*!|>'\"%@`\\?][^\n:#,\[\]{}&*!|>'\"%@`\\]*", event.value)
        ):
            self.note(
                event,
                path,
                "prose without quotes, where a comma, `: `, ` #` or {{ cuts the sentence; put it under `|` or in "
                "single quotes",
            )
        if event.style == '"':
            self.note(
                event,
                path,
                "prose in double quotes, where \\t in a formula is a tab; put it under `|` or in single quotes",
            )
        if event.style == ">":
            self.note(event, path, "prose under `>`, which puts spaces between Chinese lines; write `|`")
        value, line = event.value, event.start_mark.line + 1
        if event.style == "|":
            line += 1
        elif event.start_mark.line != event.end_mark.line and event.style == "'":
            raw = self.text[event.start_mark.index + 1 : event.end_mark.index - 1].replace("''", "'")
            value = "\n".join(part.strip() for part in raw.split("\n"))
        value, starts = join_wrapped(value.rstrip())
        if not value:
            return value
        columns = [self.column(line + n, value, start, event) for n, start in enumerate(starts)]
        self.prose[path] = _Prose(line, tuple(starts), tuple(columns))
        if event.style == "|" and (found := self.heading(value)) is not None:
            message = (
                "a line of prose begins with `# `, which makes it a heading; a comment is indented less than the "
                "text, or deleted"
            )
            read_so_far = Document(self.file, None, self.marks, self.prose)
            self.problems.append(read_so_far.problem(path, message, offset=found))
        return value

    def column(self, line: int, value: str, start: int, event: Any) -> int:
        """Column of the first character of a text's line."""
        source = self.lines[line - 1] if line <= len(self.lines) else ""
        if event.style != "|":
            first = line == event.start_mark.line + 1
            return event.start_mark.column + 1 + bool(event.style) if first else len(source) - len(source.lstrip()) + 1
        return max(1, source.find(value[start : start + 20].split("\n")[0]) + 1)

    @staticmethod
    def heading(value: str) -> int | None:
        fenced, offset = False, 0
        for line in value.split("\n"):
            fenced ^= bool(FENCE.match(line))
            if not fenced and HEADING.match(line):
                return offset
            offset += len(line) + 1
        return None
