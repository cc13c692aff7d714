"""The committed receipts against the deck: what is missing, stale, does not hold or belongs to nothing. No run is made.

A stale receipt is a warning: whether its claim still holds is for the tests of claims, which run it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from claims import receipts
from content.loader import Deck, Problem, display
from content.schema import Claim, Lab

RENEW = "run tools/run_claims.py --write"
CHANGED = {"claim": "the claim changed", "code": "the code of its experiment changed", "lab": "the lab changed"}


def check_receipts(deck: Deck, folder: Path = receipts.FOLDER) -> list[Problem]:
    """Problems at the claims and labs that they are about, and at receipts whose card is gone."""
    problems: list[Problem] = []
    for card, claims in deck.claims.items():
        labs = deck.cards[card].labs if card in deck.cards else ()
        try:
            found = receipts.load(card, folder)
        except receipts.ReceiptsError as error:
            problems.append(_at_file(folder, card, str(error).split(": ", 1)[1]))  # the place names the file already
            continue
        document = deck.documents[card]
        for n, claim in enumerate(claims):
            for message in _claim(claim, found.claims):
                problems.append(document.problem(("claims", n), message, warning=True))
        for n, lab in enumerate(labs):
            for message in _lab(lab, found.labs):
                problems.append(document.problem(("labs", n), message, warning=True))
        known = {claim.id for claim in claims} | {lab.id for lab in labs}
        for name in sorted({*found.claims, *found.labs} - known):
            problems.append(_at_file(folder, card, f"{name}: the card has no such claim or lab; {RENEW}"))
    broken = {broken.path.stem for broken in deck.broken}
    for path in sorted(folder.rglob("*.json")):
        card = path.relative_to(folder).with_suffix("").as_posix()
        if card not in deck.claims and path.stem not in broken:
            problems.append(_at_file(folder, card, "receipts of a card that the deck does not have; delete the file"))
    return problems


def _claim(claim: Claim, found: Mapping[str, receipts.Receipt]) -> Iterator[str]:
    if claim.id not in found:
        yield f"{claim.id} has no receipt; {RENEW}"
        return
    reason = receipts.staleness(found[claim.id], claim)
    if reason:
        yield f"the receipt of {claim.id} is stale: {CHANGED[reason]}; {RENEW}"
    elif not found[claim.id].holds:
        seeds = ", ".join(map(str, found[claim.id].failed_seeds))
        yield f"by its receipt {claim.id} does not hold on the seeds {seeds}"


def _lab(lab: Lab, found: Mapping[str, receipts.LabReceipt]) -> Iterator[str]:
    if lab.id not in found:
        yield f"the lab {lab.id} has no receipt; {RENEW}"
        return
    reason = receipts.lab_staleness(found[lab.id], lab)
    if reason:
        yield f"the receipt of the lab {lab.id} is stale: {CHANGED[reason]}; {RENEW}"


def _at_file(folder: Path, card: str, message: str) -> Problem:
    return Problem(display(folder / f"{card}.json"), 1, 1, "", message)
