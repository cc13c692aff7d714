"""tools/check_receipts.py: every way in which committed receipts and the deck can disagree."""

import json
import shutil

import pytest

from claims import receipts
from content.loader import load_deck
from tests.claims import DECK
from tools import run_claims
from tools.check_receipts import check_receipts

CARD = "cards/scaling/spread-of-qk.yaml"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Receipts of the whole deck, made once."""
    folder = tmp_path_factory.mktemp("receipts")
    assert run_claims.main(["--deck", str(DECK), "--write", "--receipts", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy of them to spoil."""
    return shutil.copytree(written, tmp_path / "receipts")


@pytest.fixture
def deck(tmp_path):
    return shutil.copytree(DECK, tmp_path / "deck")


def said(deck, folder) -> list[tuple[str, str, bool]]:
    return [(problem.where, problem.message, problem.warning) for problem in check_receipts(load_deck(deck), folder)]


def spoil(path, old, new):
    text = path.read_text("utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), "utf-8")


def test_fresh_receipts_have_no_problems(folder):
    assert said(DECK, folder) == []


def test_a_deck_without_receipts_is_warned_of_each(tmp_path):
    found = said(DECK, tmp_path)
    assert len(found) == 10  # seven claims and two labs of the card, one claim without a card
    assert all("has no receipt; run tools/run_claims.py --write" in message for _, message, _ in found)
    assert all(warning for _, _, warning in found)
    assert found[0][0] == "claims[0]"


def test_a_changed_claim_and_a_changed_lab_are_stale(deck, folder):
    spoil(deck / CARD, "expect: {equals: 8}", "expect: {at_most: 8}")
    spoil(deck / CARD, "params: {d_k: 512, scale: inv_sqrt_d_k}\n", "params: {d_k: 256, scale: inv_sqrt_d_k}\n")
    assert said(deck, folder) == [
        (
            "claims[3]",
            "the receipt of formula-at-64 is stale: the claim changed; run tools/run_claims.py --write",
            True,
        ),
        ("labs[1]", "the receipt of the lab scaled is stale: the lab changed; run tools/run_claims.py --write", True),
    ]


def test_changed_code_makes_everything_stale(folder, monkeypatch):
    monkeypatch.setattr(receipts, "code_hash", lambda experiment: "mended")
    found = said(DECK, folder)
    assert len(found) == 10
    assert all("the code of its experiment changed" in message for _, message, _ in found)


def test_a_receipt_that_does_not_hold_is_told(folder):
    path = folder / "spread-of-qk.json"
    data = json.loads(path.read_text())
    data["claims"]["formula-at-64"] |= {"holds": False, "failed_seeds": [0]}
    path.write_text(json.dumps(data))
    assert said(DECK, folder) == [("claims[3]", "by its receipt formula-at-64 does not hold on the seeds 0", True)]


def test_receipts_that_belong_to_nothing_are_errors(deck, folder):
    spoil(deck / CARD, "  - id: scaled-extremes-are-smaller", "  - id: extremes-are-smaller")
    (folder / "gone-card.json").write_text("{}")
    found = said(deck, folder)
    assert ("claims[5]", "extremes-are-smaller has no receipt; run tools/run_claims.py --write", True) in found
    errors = [message for _, message, warning in found if not warning]
    assert len(found) == 3
    assert errors == [
        "scaled-extremes-are-smaller: the card has no such claim or lab; run tools/run_claims.py --write",
        "receipts of a card that the deck does not have; delete the file",
    ]


def test_a_broken_file_of_receipts_is_an_error(folder):
    (folder / "spread-of-qk.json").write_text("{")
    (problem,) = check_receipts(load_deck(DECK), folder)
    assert problem.file.endswith("spread-of-qk.json")
    assert problem.message.startswith("can't be read")
    assert "spread-of-qk.json" not in problem.message  # it stands before the message already
    assert not problem.warning


def test_receipts_of_a_card_that_can_not_be_read_are_left_alone(deck, folder):
    (deck / CARD).write_text("id: [")
    assert said(deck, folder) == []
