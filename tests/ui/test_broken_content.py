"""Content and receipts that can't be read: each page says so in words, and what can be read stays."""

import shutil
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from claims import receipts
from content import loader
from ui import deck

ROOT = Path(__file__).parents[2]
APP = str(ROOT / "app.py")
CARD = "sdpa-scale-sqrt-dk"


@pytest.fixture(autouse=True)
def _read_again():
    """What the pages keep is read from the real files again after each test."""
    yield
    for kept in (deck.deck, deck.card_receipts, deck.staleness):
        kept.cache_clear()


def opened(page: str, **query: str) -> AppTest:
    for kept in (deck.deck, deck.card_receipts, deck.staleness):
        kept.cache_clear()
    app = AppTest.from_file(APP, default_timeout=60)
    app.switch_page(f"pages/{page}.py")
    for name, value in {"lang": "en", **query}.items():
        app.query_params[name] = value
    return app.run()


@pytest.fixture
def content(tmp_path, monkeypatch):
    """A copy of the content, from which the pages read."""
    folder = tmp_path / "content"
    shutil.copytree(ROOT / "content", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(deck, "load_deck", lambda: loader.load_deck(folder))
    monkeypatch.setattr(deck, "CONTENT", folder)
    return folder


@pytest.mark.parametrize(
    "text",
    ["", "a: [b", 'question: "\\frac{1}{2}"', "a: &x [1]\nb: *x", "id: twice\nid: twice", "x" * 10_000_000],
    ids=["empty", "yaml", "backslash", "alias", "duplicate", "ten-megabytes"],
)
def test_a_broken_card_is_listed_and_the_others_load(content, text):
    (content / "cards" / "scaling" / "broken-card.yaml").write_text(text, "utf-8")
    app = opened("cards")
    assert not app.exception
    assert not app.error
    assert any("broken-card.yaml" in e.label for e in app.expander)
    assert any("broken-card.yaml:" in c.value for c in app.code)
    assert not opened("cards", card=CARD).exception


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("topic: scaling", "topic: nonsense"),
        ("experiment: softmax_saturation", "experiment: softmax_saturated"),
        ("metric: logits_mean", "metric: logits_meen"),
        ("d_k: 64, n_pairs: 8192", "d_k: 0, n_pairs: 8192"),
        ("because: 'standard error 8", "because: 'TODO standard error 8"),  # as tools/new_card.py leaves it
    ],
)
def test_a_card_that_the_engine_refuses_is_listed_and_the_others_load(content, old, new):
    text = (content / "cards" / "scaling" / f"{CARD}.yaml").read_text("utf-8")
    assert old in text
    other = text.replace(old, new).replace(f"id: {CARD}", "id: other-card")
    (content / "cards" / "scaling" / "other-card.yaml").write_text(other, "utf-8")
    for app in (opened("cards"), opened("claims")):
        assert not app.exception
        assert not app.error
    assert any("other-card.yaml" in e.label for e in opened("cards").expander)
    assert not opened("cards", card=CARD).exception


def test_an_editors_lock_file_does_no_harm(content):
    (content / "cards" / "scaling" / f".#{CARD}.yaml").symlink_to("nobody@nowhere:1")
    (content / "cards" / "scaling" / "gone.yaml").symlink_to("/nowhere")
    app = opened("cards", card=CARD)
    assert not app.exception
    assert any("Short answer" in h.value for h in app.subheader)


def test_broken_words_of_the_interface_are_told_with_their_line(content):
    (content / "strings.yaml").write_text("ui:\n  tagline: {en: only}\n", "utf-8")
    app = opened("cards")
    assert not app.exception
    assert len(app.error) == 1
    assert "strings.yaml:" in app.code[0].value


@pytest.mark.parametrize("damage", ["{", '{"machine": 3}', "[]"])
def test_a_damaged_file_of_receipts_leaves_the_card(tmp_path, monkeypatch, damage):
    (tmp_path / f"{CARD}.json").write_text(damage, "utf-8")
    monkeypatch.setattr(receipts.load, "__defaults__", (tmp_path,))
    app = opened("cards", card=CARD)
    assert not app.exception
    assert not app.error
    assert any("Short answer" in h.value for h in app.subheader)


def test_a_missing_or_misshapen_label_shows_as_it_is(content):
    strings = content / "strings.yaml"
    text = strings.read_text("utf-8")
    assert "  tagline:\n" in text
    strings.write_text(
        text.replace("  tagline:\n", "  another_tagline:\n").replace("about {n} min", "about {m} min"), "utf-8"
    )
    app = opened("cards", card=CARD)
    assert not app.exception
    assert not app.error
    assert any(c.value == "tagline" for c in app.caption)
    assert any("about {m} min" in c.value for c in app.caption)


def test_claims_without_a_card_stand_in_the_ledger_unless_they_can_not_run(content):
    (content / "claims/roofline.yaml").write_text(
        (content / "claims/roofline.yaml").read_text("utf-8").replace("n_heads: 8", "n_heads: 0"), "utf-8"
    )
    app = opened("claims")
    assert not app.exception
    listed = {(card, claim.experiment) for card, claims in deck.deck().claims.items() for claim in claims}
    assert ("claims/attention_maps", "attention_maps") in listed
    assert "claims/roofline" not in {card for card, _ in listed}
    assert any(file.path.name == "roofline.yaml" for file in deck.deck().broken)
    n = sum(map(len, deck.deck().claims.values()))
    assert any(button.label.endswith(f"{n} here") or str(n) in button.label for button in app.button)
