"""Prose of a card → Markdown: measured numbers on their ground, linked to their receipts, and citations as links."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from claims.bind import bind
from claims.receipts import Receipt
from claims.verify import Verdict
from content.bindings import Binding
from content.schema import Card, Claim, Source, Text
from ui import deck, state
from ui.text import t

HOLDS, STALE, FAILS = "green", "gray", "orange"
_KEY = re.compile(r"\[@([a-z0-9-]+)\]")
_CITATION = re.compile(r"\s?\[@[a-z0-9-]+\](?:[,、]\s?\[@[a-z0-9-]+\])*")  # several side by side share one bracket


def measured(card: str) -> dict[str, Verdict | Receipt]:
    """What stands for each claim of a card, or of claims/<experiment>: measured on this visit, else the receipt."""
    found: dict[str, Verdict | Receipt] = dict(deck.card_receipts(card).claims)
    found.update({claim: v for claim, v in state.reader().verdicts.items() if v.card == card})
    return found


def ground(card: str, claim: str, result: Verdict | Receipt | None) -> str:
    """Colour behind a number: it holds, its receipt is stale, or it does not hold here."""
    if result is None:
        return STALE
    if not result.holds:
        return FAILS
    if claim not in state.reader().verdicts and claim in deck.staleness(card):
        return STALE
    return HOLDS


def anchor(claim: str) -> str:
    """Where a receipt stands on the card's page: the list of receipts gives each row the id of its claim."""
    return claim


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TEX: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\sqrt\{([^{}]*)\}"), r"√(\1)"),
    (re.compile(r"√\(([A-Za-z0-9_]+)\)"), r"√\1"),
    (re.compile(r"\\(?:mathrm|text|operatorname)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(ln|log|exp|max|min)\b ?"), r"\1 "),
    (re.compile(r"\\cdot ?"), "·"),
    (re.compile(r"\^\{?\\top\}?"), "ᵀ"),
    (re.compile(r"\^(?:\{(-?\d+)\}|(\d)(?!\d))"), lambda power: (power[1] or power[2]).translate(_RAISED)),
    (re.compile(r"\\(?:,|;|!|quad)"), " "),
    (re.compile(r"_\{([^{}]*)\}"), r"_\1"),
)


def plain(text: str) -> str:
    """A statement without Markdown, its formulas as text: for places that don't typeset."""

    def formula(match: re.Match[str]) -> str:
        tex = match[1]
        for pattern, words in _TEX:
            tex = pattern.sub(words, tex)
        return tex

    text = re.sub(r"\$([^$]+)\$", formula, text.replace("`", ""))
    return re.sub(r"\*([^*]+)\*", r"\1", _CITATION.sub("", text)).strip()


def markdown(card: Card, text: Text, *, only_own: bool = False) -> str:
    """Prose in the reader's language. ``only_own``: numbers not yet measured on this visit are left blank."""
    results = measured(card.id)
    if only_own:
        results = {claim: r for claim, r in results.items() if claim in state.reader().verdicts}
    values: Mapping[str, float] = {claim: r.value for claim, r in results.items()}

    def draw(number: str, binding: Binding) -> str:
        result = results.get(binding.claim)
        if result is None:
            return f":gray-background[{t('run_first') if only_own else t('not_measured')}]"
        return f":{ground(card.id, binding.claim, result)}-background[[{number}](#{anchor(binding.claim)})]"

    return _cards_linked(cited(bind(text.get(state.language()), values, state.language(), draw)))


def _cards_linked(text: str) -> str:
    """The ids of other cards, written as in code, as links to them. A page's address has the card in its query."""
    cards, language = deck.deck().cards, state.language()

    def link(match: re.Match[str]) -> str:
        return f"[{match[0]}](cards?card={match[1]}&lang={language})" if match[1] in cards else match[0]

    return re.sub(r"(?<!\[)`([a-z0-9]+(?:-[a-z0-9]+)+)`", link, text)


def linked(label: str, source: Source) -> str:
    """A source's label, as a link where it has an address; a page of our own docs/ is not served by the app."""
    return f"[{label}]({source.link})" if source.link.startswith("https://") else label


def cited(text: str) -> str:
    """[@key] → a link with the author's name and the year."""
    sources = deck.deck().sources
    chinese = state.language() == "zh"

    def replace(match: re.Match[str]) -> str:
        keys = _KEY.findall(match[0])
        labels = [linked(sources[key].short, sources[key]) if key in sources else key for key in keys]
        return f"（{'；'.join(labels)}）" if chinese else f" ({'; '.join(labels)})"

    return _CITATION.sub(replace, text)


def named(words: str) -> str:
    """Names of parameters and of their values, written as in code, by the labels that their controls have."""
    strings = deck.deck().strings

    def label(match: re.Match[str]) -> str:
        entry = strings.names.get(match[1]) or strings.choices.get(match[1])
        return f"**{entry.text(state.language())}**" if entry else match[0]

    return re.sub(r"`([A-Za-z][A-Za-z0-9_]*)`", label, words)


def statement(claim: Claim) -> str:
    """What a claim says."""
    return cited(claim.statement.get(state.language()))
