"""The deck to take away: for Anki, as a Markdown file, and as pages to print."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import streamlit as st
from streamlit.components import v2

from content.schema import LANGUAGES, Card
from export import anki, sheet
from study import stats
from study.events import now
from ui import deck, frame, learner, quiz, state
from ui.text import say, t

WEAKEST = 5  # cards

# declared once a process: a declaration in a script run would be a new component each time
_sheet_print = v2.component(
    "sheet_print", css=(Path(__file__).parent / "sheet_print.css").read_text("utf-8"), isolate_styles=False
)


def choices() -> list[str]:
    """What can be taken: all of it, what is remembered worst, or a track."""
    held = deck.deck()
    weak = ["weak"] if _weakest() else []
    return ["all", *weak, *(name for name, track in held.tracks.items() if any(c in held.cards for c in track.cards))]


def _name(which: str) -> str:
    tracks = deck.deck().tracks
    return say(tracks[which].title) if which in tracks else t(f"away_{which}")  # t("away_all") t("away_weak")


def _cards(which: str) -> list[Card]:
    held = deck.deck()
    if which in held.tracks:
        return [held.cards[name] for name in held.tracks[which].cards if name in held.cards]
    if which == "weak":
        return _weakest()
    return list(held.cards.values())


def _weakest() -> list[Card]:
    """Of the cards of which something was answered those that would be recalled worst."""
    held = deck.deck()
    rows = stats.mastery(quiz.known(), learner.progress(), now(), {name: name for name in held.cards})
    met = sorted((row for row in rows if row.met), key=lambda row: row.recall * row.items / row.met)
    return [held.cards[row.name] for row in met[:WEAKEST]]


def _values(card: str) -> dict[str, float]:
    """What stands in the texts of a card: a damaged file of receipts costs its numbers, not the download."""
    return {claim: receipt.value for claim, receipt in deck.card_receipts(card).claims.items()}


def controls() -> None:
    """Which cards, which languages, and the ways to take them."""
    held = deck.deck()
    st.subheader(t("away"), anchor=False)
    which = st.selectbox(
        t("away_cards"), choices(), key="away-cards", format_func=_name, help=t("away_weak_help", n=WEAKEST)
    )
    languages = st.pills(
        t("away_languages"),
        LANGUAGES,
        selection_mode="multi",
        default=[state.language()],
        key="away-languages",
        format_func=frame.LANGUAGE_NAMES.__getitem__,
    )
    cards, language = _cards(which), state.language()
    name = f"attention-interview-lab-{which}"
    with st.container(horizontal=True):
        st.download_button(
            t("away_anki"),
            partial(anki.apkg, cards, languages, held.sources, _values),
            f"{name}.apkg",
            "application/octet-stream",
            key="away-anki",
            on_click="ignore",
            icon=":material/style:",
            disabled=not languages,
            help=t("away_anki_help"),
        )
        st.download_button(
            t("away_sheet"),
            partial(sheet.sheet, t("app_title"), cards, language, held.sources, _values),
            f"{name}-{language}.md",
            "text/markdown",
            key="away-sheet",
            on_click="ignore",
            icon=":material/description:",
        )
        frame.link("cards", t("away_print"), icon=":material/print:", sheet=which)


def draw(which: str) -> None:
    """The sheet as a page of its own, which the browser prints or writes as a PDF."""
    st.header(f"{t('app_title')} · {_name(which)}", anchor=False)
    st.caption(t("print_how"))
    for card in _cards(which):
        st.markdown(sheet.card_sheet(card, state.language(), deck.deck().sources, _values(card.id)))
    _sheet_print(key="sheet-print", height=0)
    frame.link("cards", t("all_cards"), icon=":material/list:")
