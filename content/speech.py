"""A text as it is heard: how long it takes to say, and which points it makes."""

from __future__ import annotations

import re

from content.bindings import scan
from content.markdown import BLANK, Fault, spans
from content.schema import KeyPoint, Phrases
from content.strict_yaml import HAN

LIMIT = {"en": 75, "zh": 130}  # of the 30-second answer: words; units
SECONDS = 30
TOLERANCE = 1.2  # up to here a longer answer is a warning

_CITATION = re.compile(r"\[@[^\]]*\]")
_EN_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_'’.,·/-]*|\ufffc")
_ZH_UNIT = re.compile(rf"(?P<han>[{HAN}])|[A-Za-z0-9][A-Za-z0-9_'’.,/-]*|\ufffc")


def spoken_units(text: str, language: str) -> int:
    """Length of a spoken text: words in English; in Chinese a Han character is 1, a Latin word, number or formula 2.

    A formula or a measured number counts as one word.
    """
    pieces = [p for p in scan(_CITATION.sub("", text)) if not isinstance(p, Fault)]
    text = "".join(p if isinstance(p, str) else f" {BLANK} " for p in pieces)
    for span in reversed(spans(text)):
        if span.kind != "escape":
            text = f"{text[: span.start]} {BLANK} {text[span.end :]}"
    if language == "zh":
        return sum(1 if m["han"] else 2 for m in _ZH_UNIT.finditer(text))
    return len(_EN_WORD.findall(text))


def spoken_seconds(text: str, language: str) -> float:
    """Seconds that a text takes to say, at the pace of 75 words or 130 units in 30 seconds."""
    return spoken_units(text, language) * SECONDS / LIMIT[language]


def heard(text: str) -> str:
    """A text as phrases are looked for in it: small letters, no marks of Markdown or TeX, no spaces next to Han."""
    text = _CITATION.sub(" ", text).lower().replace("’", "'")
    text = re.sub(r"\\([a-z]+)|[{}]", r" \1 ", re.sub(r"[$*`]+", "", text))
    text = re.sub(r"[\s\-‑–]+", " ", text)
    return re.sub(rf"(?<=[{HAN}]) | (?=[{HAN}])", "", text).strip()


def says(text: str, groups: Phrases) -> bool:
    """Whether each group has a phrase in the text. A Latin phrase begins where a word begins; it may be a stem."""
    said = heard(text)
    return all(any(_stands_in(heard(phrase), said) for phrase in group) for group in groups)


def _stands_in(phrase: str, said: str) -> bool:
    begins = r"(?<![a-z0-9])" if re.match("[a-z0-9]", phrase) else ""
    return bool(phrase) and bool(re.search(begins + re.escape(phrase), said))


def makes(text: str, point: KeyPoint, language: str) -> bool:
    """Whether a text makes a key point, and does not take it back."""
    return says(text, point.says.get(language)) and not (point.not_says and says(text, point.not_says.get(language)))
