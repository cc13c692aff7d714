"""The deck for Anki, and the Markdown sheet: every part of every card, nothing left unresolved."""

import io
import json
import re
import sqlite3
import zipfile

import pytest

from content.loader import load_deck
from export import anki, sheet
from export.rich import as_html, markdown

DECK = load_deck()
CARD = next(iter(DECK.cards.values()))
UNRESOLVED = re.compile(r"\{\{|\[@|(?<!\\)\$[^ ]")


def opened(package: bytes, folder):
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        archive.extract("collection.anki2", folder)
    connection = sqlite3.connect(folder / "collection.anki2")
    rows = connection.execute("select guid, flds, tags from notes").fetchall()
    decks = json.loads(connection.execute("select decks from col").fetchone()[0])
    connection.close()
    return rows, decks


@pytest.mark.parametrize("languages", [["en"], ["zh"], ["zh", "en"]], ids="+".join)
def test_every_question_follow_up_and_wrong_answer_is_a_note(languages, tmp_path):
    rows, decks = opened(anki.apkg(DECK.cards.values(), languages, DECK.sources), tmp_path)
    wanted = sum(1 + len(card.follow_ups) + len(card.mistakes) for card in DECK.cards.values())
    assert len(rows) == len({guid for guid, _, _ in rows}) == wanted
    assert anki.NAME in {deck["name"] for deck in decks.values()}
    for _, fields, tags in rows:
        assert fields.count("\x1f") == 1
        assert anki.PROJECT in tags
        words = re.sub(r"<code>.*?</code>|\\\(.*?\\\)|\\\[.*?\\\]", "", fields, flags=re.DOTALL)
        assert not UNRESOLVED.search(words), words[:300]


def test_ids_stay_and_languages_have_their_own(tmp_path):
    def ids(languages, name):
        (tmp_path / name).mkdir()
        return {guid for guid, _, _ in opened(anki.apkg([CARD], languages, DECK.sources), tmp_path / name)[0]}

    assert ids(["en"], "a") == ids(["en"], "b")
    assert ids(["en"], "c").isdisjoint(ids(["zh"], "d"))
    assert ids(["en", "zh"], "e") == ids(["zh", "en"], "f")


def test_an_edited_answer_keeps_its_id():
    changed = CARD.model_copy(update={"short_answer": CARD.question})
    before, after = (anki.notes(card, ["en"], DECK.sources, {}) for card in (CARD, changed))
    assert [note.id for note in before] == [note.id for note in after]
    assert before[0].back != after[0].back


@pytest.mark.parametrize("languages", [[], ["fr"]])
def test_a_language_that_cards_lack_is_refused(languages):
    with pytest.raises(ValueError, match="languages"):
        anki.apkg([CARD], languages, DECK.sources)


def test_what_looks_like_html_stays_text_and_formulas_are_mathjaxs():
    written = as_html("A $\\sqrt{d_k} < 1$ & <script>x</script> **b** `c`")
    assert (
        written
        == "<p>A \\(\\sqrt{d_k} &lt; 1\\) &amp; &lt;script&gt;x&lt;/script&gt; <strong>b</strong> <code>c</code></p>"
    )


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_sheet_has_every_part_of_every_card(language):
    text = sheet.sheet("T", DECK.cards.values(), language, DECK.sources)
    for card in DECK.cards.values():
        assert card.question.get(language).strip().splitlines()[0][:20] in text
    assert text.count("\n## ") == len(DECK.cards)
    assert text.count("✗") == sum(len(card.mistakes) for card in DECK.cards.values())
    assert "{{" not in re.sub(r"`[^`]*`|\$[^$]*\$", "", text)
    assert "[@" not in text


def test_several_sources_side_by_side_share_a_bracket():
    some = dict(list(DECK.sources.items())[:2])
    one, two = some
    written = markdown(f"So it is [@{one}], [@{two}].", {}, "en", some)
    assert written.count("(") - written.count("](") == 1
