"""What is wrong in a content file, and where: ``file:line:column: where: message``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Problem:
    """One thing to mend. ``where`` is the path inside the file, such as ``claims[0].metric``."""

    file: str
    line: int
    column: int
    where: str
    message: str
    warning: bool = False

    def __str__(self) -> str:
        kind = "warning: " if self.warning else ""
        where = f"{self.where}: " if self.where else ""
        return f"{self.file}:{self.line}:{self.column}: {kind}{where}{self.message}"


class ContentError(ValueError):
    """A file that can't be used; ``problems`` holds everything that is wrong with it, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(sorted(set(problems)))
        super().__init__("\n".join(map(str, self.problems)))

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)


def dotted(path: Path) -> str:
    """``("claims", 0, "metric")`` as ``claims[0].metric``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`` (did you mean b?)`` for the candidate most like ``word``; empty when none comes near."""
    import difflib

    found = difflib.get_close_matches(word, list(candidates), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def choices(word: str, candidates: Sequence[str], *, most: int = 12) -> str:
    """``a, b, c (did you mean b?)``: what could have been written, the likeliest last."""
    more = len(candidates) - most
    listed = ", ".join(candidates[:most]) + (f" and {more} more" if more > 0 else "")
    return (listed or "nothing yet") + did_you_mean(word, candidates)


def shown(value: object) -> str:
    """A value as an author would recognize it, at most 60 characters of it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + "...'"
