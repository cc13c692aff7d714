"""The parts of a Markdown text that are code or formulas, and what draws otherwise than it reads."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from content.strict_yaml import HAN, POINT

_SPAN = re.compile(
    r"""
    (?P<fence>^[ ]*(?P<mark>```+|~~~+)[^\n]*\n(?:.*?\n)??[ ]*(?P=mark)[`~]*[ ]*$|^[ ]*(?:```|~~~).*\Z)
  | (?P<code>(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=ticks)(?!`))
  | (?P<escape>\\[$`\\*])
  | (?P<display>\$\$(?:(?!\n\n).)*?\$\$)
  | (?P<math>\$(?:\\.|[^$\\\n]|\n(?!\n))+?\$)
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
BLANK = "\ufffc"  # stands for a character of code or of a formula


@dataclass(frozen=True)
class Span:
    """A piece of code or a formula. ``kind`` is "fence", "code", "display", "math" or "escape"."""

    kind: str
    start: int
    end: int
    text: str

    @property
    def is_math(self) -> bool:
        return self.kind in ("display", "math")

    @property
    def tex(self) -> str:
        """The formula without its dollar signs."""
        return self.text.strip("$")


@dataclass(frozen=True)
class Fault:
    """What would be drawn otherwise than it reads, at a character of the text."""

    offset: int
    message: str


@functools.lru_cache(4096)  # each check looks at the same texts
def spans(text: str) -> tuple[Span, ...]:
    """Code and formulas of a text, in order."""
    kinds = ("fence", "code", "escape", "display", "math")
    return tuple(Span(next(k for k in kinds if m[k]), m.start(), m.end(), m[0]) for m in _SPAN.finditer(text))


@functools.lru_cache(4096)
def outside(text: str) -> str:
    """The text with code and formulas blanked; every other character keeps its place."""
    for span in spans(text):
        if span.kind != "escape":
            text = text[: span.start] + BLANK * (span.end - span.start) + text[span.end :]
    return text


def blanked(text: str, pattern: str, blank: str = BLANK) -> str:
    """The text with what matches blanked; every other character keeps its place."""
    return re.sub(pattern, lambda m: blank * len(m[0]), text)


def formulas(text: str) -> list[str]:
    """The formulas of a text, without what may differ between languages: spaces, and words in \\text."""
    return [
        re.sub(r"\s+", "", re.sub(r"\\(text|mathrm|operatorname)\{[^{}]*\}", r"\\\1{}", s.tex))
        for s in spans(text)
        if s.is_math
    ]


# --------------------------------------------------------------------------------------------------------------------
# What draws otherwise than it reads


def faults(text: str, language: str) -> Iterator[Fault]:
    """Traps of Markdown, and punctuation of the wrong width."""
    yield from _dollars(text)
    yield from _tables(text)
    yield from _emphasis(text)
    plain = outside(text)
    for m in re.finditer(r"(?<!\\)\\[()\[\]]", plain):
        yield Fault(m.start(), f"{m[0]} is not drawn as a formula; write $...$, or $$ on lines of its own")
    for m in re.finditer(
        r"</?(?:a|b|br|center|details|div|em|font|h[1-6]|i|iframe|img|li|ol|p|pre|script|span|strong|style|sub|summary|sup|svg|table|td|tr|u|ul)\b[^<>]*>",
        plain,
        re.I,
    ):
        yield Fault(m.start(), f"{m[0]} is HTML, which is shown as text; write Markdown")
    for paragraph in re.finditer(r"(?:[^\n]|\n(?!\n))+", plain):
        tildes = [m.start() for m in re.finditer(r"(?<!\\)~+", paragraph[0])]
        if len(tildes) > 1:
            yield Fault(
                paragraph.start() + tildes[0],
                "two ~ in a paragraph strike out what is between them; write a range as 3–5, in Chinese 3 到 5, "
                "and 'about' in words",
            )
    yield from _chinese(plain) if language == "zh" else _english(plain)
    for m in re.finditer(r"[\uff10-\uff19\uff21-\uff3a\uff41-\uff5a]+", plain):
        yield Fault(
            m.start(), f"{m[0]} is in full-width letters or digits; write {unicodedata.normalize('NFKC', m[0])}"
        )


def _dollars(text: str) -> Iterator[Fault]:
    for span in spans(text):
        if span.kind == "display":
            alone = (
                text[text.rfind("\n", 0, span.start) + 1 : span.start].strip() == ""
                and text[span.end :].split("\n")[0].strip() == ""
            )
            if not (alone and span.tex.startswith("\n") and span.tex.rstrip(" ").endswith("\n")):
                yield Fault(
                    span.start,
                    "$$ inside a line is drawn small or not at all; put each $$ on a line of its own, or write $...$",
                )
        if span.kind == "fence" and not re.search(r"\n *(?:```|~~~) *$", span.text):
            yield Fault(span.start, "a code block that is never closed; end it with ``` on a line of its own")
        elif span.kind == "math":
            tex, after = span.tex, text[span.end : span.end + 1]
            if (
                re.match(r"\d[\d.,]*(?:\s+[A-Za-z\u4e00-\u9fff]|[\u4e00-\u9fff，。、])", tex)
                or after.isdigit()
                or tex != tex.strip()
            ):
                yield Fault(
                    span.start,
                    f"{span.text} is read as a formula; a price is written \\$5, and a formula has no space next "
                    "to its $",
                )
            elif "{{" in tex:
                yield Fault(
                    span.start,
                    "{{ inside a formula: a measured value stands outside the dollar signs ($x \\approx$ "
                    "{{claim-id}}), and TeX can write { {",
                )
    for m in re.finditer(r"(?<!\\)\$+", outside(text)):
        yield Fault(m.start(), "a $ without its partner in this paragraph; a price is written \\$5")


def _tables(text: str) -> Iterator[Fault]:
    for span in spans(text):
        line = text[text.rfind("\n", 0, span.start) + 1 :].split("\n")[0]
        if span.kind == "math" and "|" in span.tex and line.lstrip().startswith("|"):
            yield Fault(span.start, "| in a formula ends the table's cell; write \\vert, \\Vert or \\mid")


def _emphasis(text: str) -> Iterator[Fault]:
    """Bold and italics that CommonMark would print with their asterisks: each run opens or closes by its neighbours."""
    plain = outside(text)
    opened: dict[str, int] = {}
    for m in re.finditer(r"(?<![\\*])\*+", plain):
        if len(m[0]) > 3:
            yield Fault(m.start(), f"{m[0]} is printed; emphasis has one to three asterisks on each side")
            continue
        before, after = text[m.start() - 1 : m.start()] or "\n", text[m.end() : m.end() + 1] or "\n"
        line = plain[plain.rfind("\n", 0, m.start()) + 1 : m.start()]
        if m[0] == "*" and ((not line.strip() and after == " ") or (before.isspace() and after.isspace())):
            continue  # a list's bullet, or a star between spaces
        left = not after.isspace() and (not _is_punctuation(after) or before.isspace() or _is_punctuation(before))
        right = not before.isspace() and (not _is_punctuation(before) or after.isspace() or _is_punctuation(after))
        if m[0] in opened:
            start = opened.pop(m[0])
            if re.match(f"[{POINT}”’…—]", before):
                yield Fault(
                    m.start() - 1,
                    f"emphasis ends on {before}, and then its asterisks are printed; move {before} behind them",
                )
            elif not right or "\n\n" in plain[start : m.start()]:
                yield Fault(
                    m.start(),
                    f"these asterisks are printed, not drawn: they stand between {before!r} and {after!r}; end "
                    "the emphasis on a letter, or put a space behind it",
                )
        else:
            opened[m[0]] = m.start()
            if not left:
                yield Fault(
                    m.start(),
                    f"these asterisks are printed, not drawn: they stand between {before!r} and {after!r}; begin "
                    "the emphasis with a letter, or put a space before it",
                )
                opened.pop(m[0])
    for start in opened.values():
        yield Fault(start, "asterisks without their partner; a star is written \\*, a product in $...$")


def _is_punctuation(char: str) -> bool:
    return unicodedata.category(char)[0] in "PS" or char in "$+<=>^`|~"


_HALF = {",": "，", ";": "；", ":": "：", "?": "？", "!": "！", ".": "。", "(": "（", ")": "）", '"': "“ ”", "'": "‘ ’"}


def _chinese(plain: str) -> Iterator[Fault]:
    for m in re.finditer(rf"(?<![\\*])\*(?![*\s])[^*\n]*[{HAN}][^*\n]*\*(?!\*)", plain):
        yield Fault(m.start(), f"{m[0]} slants Chinese characters, which is hard to read; write **bold**")
    for m in re.finditer(
        rf"(?<=[{HAN}])[,;:?!](?![/\d])|[,;:?!] "
        rf"?(?=[{HAN}])|(?<=[{HAN}])\.(?!\w)|(?<=[{HAN}])[()\"']|[()\"'](?=[{HAN}])",
        plain,
    ):
        mark = m[0].strip()
        if mark == ":" and plain[m.start() - 1 : m.start()] == ":":
            continue
        yield Fault(m.start(), f"{mark} next to Chinese; write {_HALF[mark]}")
    for m in re.finditer(rf"(?<=[^\s.{HAN}])[.?!](?=\s*(?:\n\n|\Z)| ?[{HAN}])", plain):
        line = plain[plain.rfind("\n", 0, m.start()) + 1 : m.start()]
        if re.search(rf"[{HAN}]", line) or (m[0] != "." and re.search(rf"[{HAN}]", plain)):
            yield Fault(m.start(), f"{m[0]} ends a Chinese sentence; write {_HALF[m[0]]}")
    for m in re.finditer(rf"(?<=[{HAN}])\.\.\.|\.\.\.(?=[{HAN}])", plain):
        yield Fault(m.start(), "... next to Chinese; write ……")


def _english(plain: str) -> Iterator[Fault]:
    for m in re.finditer(rf"[{POINT}]", plain):
        yield Fault(
            m.start(),
            f"{m[0]} is full-width, in English; write "
            f"{unicodedata.normalize('NFKC', m[0]).replace('。', '.').replace('、', ',')}",
        )
    for m in re.finditer(rf"[{HAN}]+", plain):
        yield Fault(m.start(), f"{m[0]} is Chinese, in English")
