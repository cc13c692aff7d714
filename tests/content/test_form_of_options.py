"""Whoever knows nothing gains nothing by the look of the options: over the deck, the longest, the most careful or the
most sweeping one is right about as often as chance has it.

The check of content compares the lengths within one item; a habit of the authors shows only over many.
"""

import re

import pytest

from content.loader import load_deck
from content.schema import Choice

SWEEPING = {
    "en": r"\b(?:always|never|only|all|every|none|no|must|cannot|can't|nothing|any|exactly|completely|impossible)\b",
    "zh": "总是|永远|从不|只|所有|全部|每个|必须|不可能|完全|一定|都|任何",
}
CAREFUL = {
    "en": r"\b(?:about|usually|often|mostly|may|can|some|roughly|nearly|almost|depends|unless|at most|at least)\b",
    "zh": "通常|大约|可能|往往|多半|一般|几乎|取决于|除非|至多|至少|部分|有些",
}
LOOKS = {
    "longest": lambda text, lang: len(text),
    "shortest": lambda text, lang: -len(text),
    "most sweeping": lambda text, lang: len(re.findall(SWEEPING[lang], text.lower())),
    "least sweeping": lambda text, lang: -len(re.findall(SWEEPING[lang], text.lower())),
    "most careful": lambda text, lang: len(re.findall(CAREFUL[lang], text.lower())),
    "most clauses": lambda text, lang: len(re.findall("[,;:，；：]", text)),
    "most digits": lambda text, lang: len(re.findall(r"\d", text)),
}
ITEMS = [
    item for card in load_deck().cards.values() for item in card.quiz if isinstance(item, Choice) and not item.multi
]


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("look", LOOKS)
def test_the_look_of_an_option_says_nothing(look, lang):
    hits = expected = variance = 0.0
    for item in ITEMS:
        values = [LOOKS[look](option.text.get(lang), lang) for option in item.options]
        if values.count(max(values)) == 1:  # a guesser by this look has a favourite
            chance = 1 / len(values)
            hits += bool(item.options[values.index(max(values))].right)
            expected, variance = expected + chance, variance + chance * (1 - chance)
    assert len(ITEMS) > 20
    # three standard deviations of a guesser by chance, and half a hit, since hits are whole
    assert hits <= expected + 3 * variance**0.5 + 0.5, f"{hits:.0f} hits, {expected:.1f} by chance"
