"""The deck, read once and shared by all readers."""

from __future__ import annotations

import streamlit as st

from claims import receipts
from claims.receipts import CardReceipts
from content.loader import Deck, load_deck


@st.cache_resource(show_spinner=False)
def _deck() -> Deck:
    return load_deck()


def deck() -> Deck:
    """Cards, strings, glossary, sources; what is broken is in ``deck().broken``."""
    return _deck()


@st.cache_resource(show_spinner=False)
def card_receipts(card: str) -> CardReceipts:
    """The committed receipts of a card."""
    return receipts.load(card)


@st.cache_resource(show_spinner=False)
def staleness(card: str) -> dict[str, str]:
    """Claims of a card whose receipt is stale or missing, with the reason: "claim", "code" or "missing"."""
    held = card_receipts(card).claims
    found = {}
    for claim in deck().cards[card].claims:
        reason = receipts.staleness(held[claim.id], claim) if claim.id in held else "missing"
        if reason:
            found[claim.id] = reason
    return found
