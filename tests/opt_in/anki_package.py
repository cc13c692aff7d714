"""The deck's file in the real Anki, which is no dependency of ours (64 MB, AGPL) and so not part of `make test`:

pip install anki && pytest tests/opt_in/anki_package.py
"""

from anki.collection import Collection, ImportAnkiPackageOptions, ImportAnkiPackageRequest

from content.loader import load_deck
from export import anki

DECK = load_deck()


def imported(collection, folder, cards):
    path = folder / "deck.apkg"
    path.write_bytes(anki.apkg(cards, ["zh", "en"], DECK.sources))
    options = ImportAnkiPackageOptions(merge_notetypes=True)
    log = collection.import_anki_package(ImportAnkiPackageRequest(package_path=str(path), options=options)).log
    return len(log.new), len(log.updated), len(log.duplicate)


def test_a_newer_export_updates_in_place_and_keeps_reviews(tmp_path):
    collection = Collection(str(tmp_path / "collection.anki2"))
    notes = sum(1 + len(card.follow_ups) + len(card.mistakes) for card in DECK.cards.values())
    assert imported(collection, tmp_path, DECK.cards.values()) == (notes, 0, 0)
    known = {card: collection.get_card(card).nid for card in collection.find_cards("")}
    changed = {name: card.model_copy(update={"short_answer": card.intent}) for name, card in DECK.cards.items()}
    new, updated, _ = imported(collection, tmp_path, changed.values())
    assert (new, updated) == (0, notes)
    assert {card: collection.get_card(card).nid for card in collection.find_cards("")} == known
    collection.close()
