"""The deck, read once and shared by all readers."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from claims import receipts
from claims.receipts import CardReceipts, LabReceipt
from content.checks import TO_LINK, TO_NAME
from content.loader import HOME as CONTENT
from content.loader import BrokenFile, Deck, Document, Problem, load_deck
from content.prose import TO_WRITE
from content.schema import Card, Claim, Lab
from engine import registry
from engine.base import ParamsError
from study import desk
from study.items import Item

log = logging.getLogger("attention_interview_lab")


@functools.cache
def deck() -> Deck:
    """Cards, strings, glossary, sources; what is broken is in ``deck().broken``. Asked for every label: it is quick."""
    return _usable(load_deck())


def _usable(read: Deck) -> Deck:
    """The deck without the files that a page could not draw: those join the broken ones, each with its lines."""
    refused = {card.id: tuple(_refusals(card, read)) for card in read.cards.values()}
    for name, claims in read.loose.items():
        refused[f"claims/{name}"] = tuple(_not_runnable(read.documents[f"claims/{name}"], "claims", claims))
    broken = tuple(BrokenFile(read.paths[name], problems) for name, problems in refused.items() if problems)
    cards = {name: card for name, card in read.cards.items() if not refused[name]}
    loose = {name: claims for name, claims in read.loose.items() if not refused[f"claims/{name}"]}
    return dataclasses.replace(read, cards=cards, loose=loose, broken=(*read.broken, *broken))


def _refusals(card: Card, read: Deck) -> Iterator[Problem]:
    """What a page needs to draw a card and does not find. tools/check_content.py finds much more, and takes longer."""
    document = read.documents[card.id]
    if any(mark in card.model_dump_json() for mark in (TO_WRITE, TO_NAME, TO_LINK)):
        yield document.problem((), "a part is still to be written; tools/check_content.py lists each by its line")
    if card.topic not in read.topics:
        yield document.problem(("topic",), f"got {card.topic!r}; content/topics.yaml has {', '.join(read.topics)}")
    yield from _not_runnable(document, "labs", card.labs)
    yield from _not_runnable(document, "claims", card.claims)


def _not_runnable(document: Document, part: str, runs: Sequence[Lab | Claim]) -> Iterator[Problem]:
    for i, run in enumerate(runs):
        try:
            experiment = registry.get(run.experiment)
            experiment.Params.from_mapping(run.params)
            if isinstance(run, Claim):
                experiment.metric(run.metric)
        except (registry.UnknownExperiment, ParamsError, KeyError) as error:
            yield document.problem((part, i), str(error.args[0]))


@functools.lru_cache(maxsize=32)
def items(track: str | None) -> dict[str, Item]:
    """All quiz items, in the order in which new ones are met: that of a track of tracks.yaml, then that of study."""
    held = deck()
    return desk.items(held.cards, held.topics, held.tracks.get(track or ""))


_seen: list[tuple[str, int, int]] = []  # the files that the deck was read from: name, time of change, size


def refresh() -> None:
    """Forget what was read when a file of content or receipts has changed: edits show at the next page."""
    files = [*CONTENT.rglob("*.yaml"), *receipts.FOLDER.rglob("*.json")]
    seen = sorted(_stamp(file) for file in files if not file.name.startswith("."))  # an editor's own files begin so
    if seen != _seen:
        _seen[:] = seen
        for cached in (deck, items, searchable, card_receipts, staleness):
            cached.cache_clear()


def _stamp(file: Path) -> tuple[str, int, int]:
    try:
        status = file.stat()
    except OSError:  # a link to nowhere, or a file that went between the listing and now
        return str(file), 0, 0
    return str(file), status.st_mtime_ns, status.st_size


@functools.cache
def searchable(card: str) -> str:
    """All prose of a card in both languages, in lower case."""
    return deck().cards[card].model_dump_json().lower().replace("\\\\", "\\")


@functools.cache
def card_receipts(card: str) -> CardReceipts:
    """The committed receipts of a card; none when their file can't be read, which the log then says.

    A card without receipts can be read, and measured anew; a damaged file must not take the card with it.
    """
    try:
        return receipts.load(card)
    except receipts.ReceiptsError as error:
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
    """Claims of a card, or of claims/<experiment>, without a fresh receipt; why: "claim", "code" or "missing"."""
    held = card_receipts(card).claims
    found = {}
    for claim in deck().claims[card]:
        reason = receipts.staleness(held[claim.id], claim) if claim.id in held else "missing"
        if reason:
            found[claim.id] = reason
    return found
