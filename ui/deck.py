"""The deck, read once and shared by all readers."""

from __future__ import annotations

import functools
import logging

from claims import receipts
from claims.receipts import CardReceipts, LabReceipt
from content.loader import HOME as CONTENT
from content.loader import Deck, load_deck

log = logging.getLogger("attention_interview_lab")


@functools.cache
def deck() -> Deck:
    """Cards, strings, glossary, sources; what is broken is in ``deck().broken``. Asked for every label: it is quick."""
    return load_deck()


_seen: list[float] = []  # when the files were changed that the deck was read from


def refresh() -> None:
    """Forget what was read when a file of content or receipts has changed: edits show at the next page."""
    files = [*CONTENT.rglob("*.yaml"), *receipts.FOLDER.glob("*.json")]
    times = [file.stat().st_mtime for file in files]
    if times != _seen:
        _seen[:] = times
        for cached in (deck, card_receipts, staleness):
            cached.cache_clear()


@functools.cache
def card_receipts(card: str) -> CardReceipts:
    """The committed receipts of a card; none when their file can't be read, which the log then says.

    A card without receipts can be read, and measured anew; a damaged file must not take the card with it.
    """
    try:
        return receipts.load(card)
    except (receipts.ReceiptsError, OSError) as error:
        log.error("receipts of %s: %s", card, error)
        return CardReceipts()


def lab_receipt(card: str, lab: str) -> LabReceipt | None:
    """The committed run of a lab; None when there is none, or it is no longer about this lab and this code."""
    held = card_receipts(card).labs.get(lab)
    if held is None or receipts.lab_staleness(held, deck().cards[card].lab(lab)):
        return None
    return held


def receipts_date(card: str) -> str:
    """The day of a card's newest receipt; empty without receipts."""
    return max((r.date for r in card_receipts(card).claims.values()), default="")


@functools.cache
def staleness(card: str) -> dict[str, str]:
    """Claims of a card whose receipt is stale or missing, with the reason: "claim", "code" or "missing"."""
    held = card_receipts(card).claims
    found = {}
    for claim in deck().cards[card].claims:
        reason = receipts.staleness(held[claim.id], claim) if claim.id in held else "missing"
        if reason:
            found[claim.id] = reason
    return found
