"""What stands in double braces: a measured value ``{{claim-id}}`` or a hole of a quiz item ``{{d_k}}``; and ``[@key]``.

===========================  =========================================================================================
``{{claim-id}}``             the claim's measured value; of a ``versus`` claim the ratio
``{{claim-id:.1f}}``         how it is written: see docs/formats.md
``{{claim-id / 4096:.0f}}``  one operation, + - * or /, with a number
``{{d_k}}``                  a hole, filled with the value that was drawn; it may have a format as well
``[@key]``                   a source
===========================  =========================================================================================

A claim's id holds a hyphen, a hole's name does not. Between dollar signs and in code braces are TeX or code and stay.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from content.expressions import evaluate
from content.markdown import Fault, outside

FORMAT = re.compile(r"\+?,?(?:d|(?:\.\d{1,2})?[efg%]?)|bytes")
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}

_BRACES = re.compile(r"\{\{(?P<inside>[^{}\n]*)\}\}")
_INSIDE = re.compile(
    r"\s*(?P<name>[A-Za-z0-9_-]+?)(?:\s+(?P<op>[-+*/])\s*(?P<operand>[^:]+?)|\s*(?P<glued>[+*/])\s*(?P<number>[^:]+?))?\s*(?::(?P<format>[^:]*))?"
)
_CLAIM = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+")
_HOLE = re.compile(r"[a-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*")
_CITATION = re.compile(r"\[@([a-z0-9]+(?:-[a-z0-9]+)*)\]")


@dataclass(frozen=True)
class Binding:
    """A claim's value in a text. ``op`` and ``operand`` change it first; ``source`` is what the author wrote."""

    claim: str
    op: str | None
    operand: float | None
    format: str
    source: str
    offset: int = field(default=0, compare=False)

    def apply(self, value: float) -> float:
        """The value after the operation."""
        return value if self.op is None or self.operand is None else OPERATIONS[self.op](value, self.operand)

    def write(self, value: float, language: str) -> str:
        """The claim's value as the text shows it."""
        return format_number(self.apply(value), self.format, language)


@dataclass(frozen=True)
class Hole:
    """A drawn value in a quiz item's prompt."""

    name: str
    format: str
    source: str
    offset: int = field(default=0, compare=False)


class BindingError(ValueError):
    """A text whose braces can't be read; ``faults`` holds all of them."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(f.message for f in faults))
        self.faults = faults


Piece = str | Binding | Hole


def parse(text: str) -> list[Piece]:
    """The text in pieces: words, bindings, holes.

    Raises: BindingError.
    """
    found = list(scan(text))
    if faults := [piece for piece in found if isinstance(piece, Fault)]:
        raise BindingError(faults)
    return [piece for piece in found if not isinstance(piece, Fault)]


def scan(text: str) -> Iterator[Piece | Fault]:
    """As :func:`parse`, with a Fault in the place of what can't be read."""
    readable = outside(text)  # code and formulas blanked, each character in its place
    end = 0
    for match in _BRACES.finditer(readable):
        if match.start() > end:
            yield from _words(text, readable, end, match.start())
        yield _piece(match["inside"], match.start(), match[0])
        end = match.end()
    if end < len(text) or not text:
        yield from _words(text, readable, end, len(text))


def bindings(text: str) -> list[Binding]:
    """The bindings of a text, in order; what can't be read is left out."""
    return [p for p in scan(text) if isinstance(p, Binding)]


def citations(text: str) -> list[tuple[str, int]]:
    """The keys cited in a text, each with its offset."""
    return [(m[1], m.start()) for m in _CITATION.finditer(outside(text))]


def _words(text: str, readable: str, start: int, end: int) -> Iterator[Piece | Fault]:
    for braces in re.finditer(r"\{\{|\}\}", readable[start:end]):
        yield Fault(
            start + braces.start(),
            f"{braces[0]} without its partner on the same line; a binding is {{{{claim-id}}}} or {{{{claim-id:.1f}}}}",
        )
    for mark in re.finditer(r"\[@[^\]\n]*\]?", readable[start:end]):
        if not _CITATION.fullmatch(mark[0]):
            yield Fault(start + mark.start(), f"got {mark[0]}; a citation is [@key], one key of sources.yaml")
    yield text[start:end]


def _piece(inside: str, offset: int, source: str) -> Binding | Hole | Fault:
    match = _INSIDE.fullmatch(inside)
    if not match:
        return Fault(
            offset, f"got {source}; wanted {{{{claim-id}}}}, {{{{claim-id:format}}}} or {{{{claim-id / 4096:format}}}}"
        )
    name, spec = match["name"], (match["format"] or "").strip()
    if not FORMAT.fullmatch(spec):
        return Fault(
            offset,
            f"got the format {spec!r} in {source}; wanted one such as .1f, .3g, ,.0f, %, .1% or bytes "
            "(docs/formats.md)",
        )
    op, number = match["op"] or match["glued"], match["operand"] or match["number"]
    if _HOLE.fullmatch(name):
        if op:
            return Fault(offset, f"got {source}; a hole takes no operation")
        return Hole(name, spec, source, offset)
    if not _CLAIM.fullmatch(name):
        return Fault(
            offset,
            f"got {name!r} in {source}; a claim is kebab-case with a hyphen, a hole of a quiz item is snake_case",
        )
    if op is None:
        return Binding(name, None, None, spec, source, offset)
    try:
        operand = evaluate(number)
    except ValueError as error:
        return Fault(offset, f"{source}: {error}")
    if isinstance(operand, tuple) or (op == "/" and operand == 0):
        return Fault(offset, f"{source}: wanted one number that is not 0 to divide by")
    return Binding(name, op, float(operand), spec, source, offset)


# --------------------------------------------------------------------------------------------------------------------
# Formats


def format_number(value: float, spec: str = "", language: str = "en") -> str:
    """A number as a text shows it.

    ``spec`` is empty (whole numbers in full, else three digits), a Python number format, ``%`` (percent, three digits
    at most) or ``bytes`` (in the largest unit of 1024 that fits).
    """
    if math.isnan(value):
        return "无定义" if language == "zh" else "undefined"
    if math.isinf(value) or (spec.endswith("%") and math.isinf(100 * value)):
        return "∞" if value > 0 else "-∞"
    value += 0  # minus zero is written 0
    if spec == "bytes":
        return _bytes(value, language)
    if spec == "%":
        return f"{_digits(100 * value)}%"
    if spec == "":
        return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else _digits(value)
    text = format(round(value) if spec.endswith("d") else value, spec)
    return _tidy(text)


def _digits(value: float) -> str:
    """Three significant digits without idle zeros; powers of ten only where the zeros would be many."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return _tidy(f"{mantissa.rstrip('0').rstrip('.')}e{exponent}")
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _tidy(text: str) -> str:
    """``1.20e-07`` as ``1.2×10⁻⁷``; a minus before nothing but zeros goes."""
    if re.fullmatch(r"-[0.,]+%?", text):
        return text[1:]
    match = re.fullmatch(r"([-+]?\d(?:\.\d+)?)[eE]([-+])0*(\d+)", text)
    if not match:
        return text
    exponent = ("⁻" if match[2] == "-" else "") + match[3].translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"{match[1]}×10{exponent}"


def _bytes(value: float, language: str) -> str:
    size, unit = abs(value), 0
    units = ("", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    while unit < len(units) - 1 and round(size) >= 1024:
        size, unit = size / 1024, unit + 1
    number = f"{size:.0f}" if size >= 100 else _digits(size)
    word = units[unit] if unit else "字节" if language == "zh" else "byte" if number == "1" else "bytes"
    return f"{'-' if value < 0 and number != '0' else ''}{number} {word}"
