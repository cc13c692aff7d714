"""The example of docs/cards.md, and one edit of it at a time."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from content.loader import HOME, PROJECT, Problem
from tools.check_content import check

CARD_ID = "dot-product-spread"


@functools.cache
def example() -> str:
    """The card that stands in the documentation."""
    page = (PROJECT / "docs" / "cards.md").read_text("utf-8")
    (card,) = re.findall(r"```yaml\n(# yaml-language-server.*?)```", page, re.DOTALL)
    return card


def edited(*edits: tuple[str, str]) -> str:
    """The example with pieces replaced; each old piece stands in it once, or the test is about something else."""
    text = example()
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} occurs {text.count(old)} times, wanted once")
        text = text.replace(old, new)
    return text


def folder(root: Path, *cards: str, **beside: str) -> Path:
    """A content folder with the example's id in its topics, these cards, and these files beside them."""
    topics = (HOME / "topics.yaml").read_text("utf-8").replace("  cards:\n", f"  cards:\n    - {CARD_ID}\n", 1)
    for name, text in {"topics": topics, **beside}.items():
        (root / f"{name}.yaml").write_text(text, "utf-8")
    for text in cards:
        found = re.search(r"^id: (\S+)\ntopic: (\S+)", text, re.MULTILINE)
        card_id, topic = found.groups() if found else (CARD_ID, "scaling")
        place = root / "cards" / topic
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{card_id}.yaml").write_text(text, "utf-8")
    return root


def problems(root: Path, *edits: tuple[str, str]) -> list[Problem]:
    """What the check says of the edited example."""
    return check(folder(root, edited(*edits)))


def line_of(piece: str, text: str) -> int:
    """The line on which a piece of a text begins."""
    if text.count(piece) != 1:
        raise ValueError(f"{piece!r} occurs {text.count(piece)} times, wanted once")
    return text[: text.index(piece)].count("\n") + 1
