"""Cards as one Markdown sheet, to read or print elsewhere: questions, answers, follow-ups, wrong answers, sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from content.schema import Card, Source, Text
from export.rich import Values, markdown, reference_values

WORDS = {
    "points": {"en": "A complete answer says", "zh": "完整的回答会说到"},
    "derivation": {"en": "Derivation", "zh": "推导"},
    "follow_ups": {"en": "Follow-ups", "zh": "追问"},
    "mistakes": {"en": "Wrong answers", "zh": "常见错误"},
    "sources": {"en": "Sources", "zh": "来源"},
}


def sheet(
    title: str, cards: Iterable[Card], language: str, sources: Mapping[str, Source], values: Values = reference_values
) -> str:
    """The text of a Markdown file. ``values(card)`` are the measured values of its claims."""
    return "\n\n".join([f"# {title}", *(card_sheet(c, language, sources, values(c.id)) for c in cards)]) + "\n"


def card_sheet(card: Card, language: str, sources: Mapping[str, Source], values: Mapping[str, float]) -> str:
    """One card's part of it."""

    def prose(text: Text) -> str:
        return markdown(text.get(language), values, language, sources)

    def title(name: str) -> str:
        return f"### {WORDS[name][language]}"

    parts = [f"## {prose(card.question)}", prose(card.short_answer), title("points")]
    parts.append("\n".join(f"- {prose(point.point)}" for point in card.key_points))
    if card.derivation:
        parts.append(title("derivation"))
        for number, step in enumerate(card.derivation, 1):
            parts += [f"{number}. {prose(step.step)}", f"$$\n{step.tex.strip()}\n$$", prose(step.because)]
    parts.append(title("follow_ups"))
    for follow_up in card.follow_ups:
        parts += [f"**{prose(follow_up.question)}**", prose(follow_up.answer)]
    parts.append(title("mistakes"))
    for mistake in card.mistakes:
        parts.append(f"- ✗ {prose(mistake.wrong)}\n- ✓ {prose(mistake.right)}\n\n{prose(mistake.why)}")
    parts.append(title("sources"))
    cited = [(sources[cite.key], cite.where) for cite in card.sources]
    parts.append("\n".join(f"- {s.authors}. {s.title}. {s.year}. <{s.link}> ({where})" for s, where in cited))
    return "\n\n".join(parts)
