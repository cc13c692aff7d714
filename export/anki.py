"""The deck for Anki: a note for each card, follow-up and wrong answer, with formulas that Anki's MathJax sets.

Notes keep their ids: importing a newer export changes them in place, and what was reviewed stays. Numbers in the text
are the reference receipts'.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from content.schema import LANGUAGES, Card, Source, Text
from export.rich import Values, as_html, display, markdown, reference_values

PROJECT = "attention-interview-lab"
NAME = "Attention Interview Lab"
CSS = """
.card { font-family: "Source Sans 3", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif; font-size: 19px;
        line-height: 1.5; text-align: left; max-width: 46em; margin: 0 auto; }
.about { color: #777; font-size: 15px; }
.wrong::before { content: "✗ "; color: #c33; }
.right::before { content: "✓ "; color: #2a7; }
"""

# Words of the notes, by language.
WORDS = {
    "points": {"en": "A complete answer says", "zh": "完整的回答会说到"},
    "derivation": {"en": "Derivation", "zh": "推导"},
    "true": {"en": "A candidate says the following. What is wrong with it?", "zh": "候选人这样说，错在哪里？"},
    "follow_up": {"en": "Follow-up to", "zh": "追问，承接"},
}


@dataclass(frozen=True)
class Note:
    """One note. ``id`` never changes: Anki knows the note by it."""

    id: str
    front: str  # HTML
    back: str
    tags: tuple[str, ...]


def notes(
    card: Card, languages: Sequence[str], sources: Mapping[str, Source], values: Mapping[str, float]
) -> list[Note]:
    """The notes of a card: its question, its follow-ups, its wrong answers; languages one below the other."""
    tags = (PROJECT, f"topic::{card.topic}", f"level::{card.level}", f"card::{card.id}")

    def prose(text: Text, language: str) -> str:
        return as_html(markdown(text.get(language), values, language, sources))

    def note(name: str, front: list[str], back: list[str]) -> Note:
        # the languages belong to the id: both may be studied, each with dates of its own
        return Note(f"{card.id}/{name}/{'+'.join(sorted(languages))}", "<hr>".join(front), "<hr>".join(back), tags)

    def answer(language: str) -> str:
        points = "".join(f"<li>{prose(point.point, language)}</li>" for point in card.key_points)
        steps = "".join(
            f"<li>{prose(step.step, language)}{display(step.tex)}{prose(step.because, language)}</li>"
            for step in card.derivation
        )
        parts = [prose(card.short_answer, language), f"<p><b>{WORDS['points'][language]}</b></p><ul>{points}</ul>"]
        if steps:
            parts.append(f"<p><b>{WORDS['derivation'][language]}</b></p><ol>{steps}</ol>")
        return "".join(parts)

    made = [note("question", [prose(card.question, lang) for lang in languages], [answer(lang) for lang in languages])]
    for follow_up in card.follow_ups:
        front = [
            f'<p class="about">{WORDS["follow_up"][lang]}</p>{_about(prose(card.question, lang))}'
            f"{prose(follow_up.question, lang)}"
            for lang in languages
        ]
        made.append(note(follow_up.id, front, [prose(follow_up.answer, lang) for lang in languages]))
    for mistake in card.mistakes:
        front = [
            f'<p class="about">{WORDS["true"][lang]}</p><div class="wrong">{prose(mistake.wrong, lang)}</div>'
            for lang in languages
        ]
        back = [
            f'<div class="right">{prose(mistake.right, lang)}</div>{prose(mistake.why, lang)}' for lang in languages
        ]
        made.append(note(mistake.id, front, back))
    return made


def _about(question: str) -> str:
    return f'<div class="about">{question}</div>'


def apkg(
    cards: Iterable[Card], languages: Sequence[str], sources: Mapping[str, Source], values: Values = reference_values
) -> bytes:
    """A file that Anki imports. ``values(card)`` are the measured values of its claims.

    Raises: ValueError for no language, or one that cards lack.
    """
    import genanki

    if not languages or not set(languages) <= set(LANGUAGES):
        raise ValueError(f"got the languages {list(languages)}; there is {', '.join(LANGUAGES)}")
    model = genanki.Model(
        _number("model"),
        NAME,
        fields=[{"name": "Front"}, {"name": "Back"}],
        templates=[
            {"name": "Card", "qfmt": "{{Front}}", "afmt": '{{FrontSide}}<hr id="answer">{{Back}}'},
        ],
        css=CSS,
    )
    deck = genanki.Deck(_number("deck"), NAME)
    for card in cards:
        for note in notes(card, languages, sources, values(card.id)):
            guid = genanki.guid_for(PROJECT, note.id)
            deck.add_note(genanki.Note(model, [note.front, note.back], guid=guid, tags=list(note.tags)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deck.apkg"
        genanki.Package(deck).write_to_file(path)
        return path.read_bytes()


def _number(what: str) -> int:
    """An id that Anki takes, the same for ever."""
    return int.from_bytes(hashlib.sha256(f"{PROJECT} {what}".encode()).digest()[:4]) | 1 << 30
