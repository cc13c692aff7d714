"""bind.py: numbers into prose, decorated by whoever draws the page."""

import math

import pytest

from claims.bind import NOT_MEASURED, bind, format_number
from content.loader import load_deck
from tests.claims import DECK


def plain(number, binding):
    return number


def test_numbers_stand_where_the_bindings_stood_as_they_are_drawn():
    def draw(number, binding):
        return f"<{binding.claim} {number}>"

    text = "From {{first-claim:.1f}} to {{second-claim}}, that is {{first-claim / 4:.2f}}."
    values = {"first-claim": 10.0, "second-claim": 0.5}
    assert (
        bind(text, values, "en", draw) == "From <first-claim 10.0> to <second-claim 0.5>, that is <first-claim 2.50>."
    )


@pytest.mark.parametrize(
    ("binding", "value", "en", "zh"),
    [
        ("{{a-b}}", 122528.0, "122,528", "122,528"),
        ("{{a-b:bytes}}", 40 * 2**30, "40 GiB", "40 GiB"),
        ("{{a-b:bytes}}", 512, "512 bytes", "512 字节"),
        ("{{a-b:%}}", 0.1927, "19.3%", "19.3%"),
        ("{{a-b * 100:.0f}}", 0.5, "50", "50"),
        ("{{a-b - 1:.1f}}", 0.96, "0.0", "0.0"),  # not -0.0
    ],
)
def test_formats_in_both_languages(binding, value, en, zh):
    assert bind(binding, {"a-b": value}, "en", plain) == en
    assert bind(binding, {"a-b": value}, "zh", plain) == zh


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", ["", ":.1f", ":%", ":bytes", ":,.0f", " / 3:.2f"])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_reader_meets_a_nan(value, spec, language):
    written = bind(f"{{{{a-b{spec}}}}}", {"a-b": value}, language, plain)
    assert written
    assert "nan" not in written.lower()
    assert "{{" not in written


def test_a_claim_without_a_value_is_drawn_as_not_measured():
    drawn = []

    def draw(number, binding):
        drawn.append((number, binding.claim))
        return "run first"

    assert bind("It is {{a-b:.1f}}.", {}, "en", draw) == "It is run first."
    assert drawn == [(NOT_MEASURED, "a-b")]


def test_holes_formulas_code_and_broken_braces_stay_as_they_are():
    for text in ("width {{d_k}}", "$x_{{i}}$ and `{{a-b}}`", "a {{ that is not closed", "{{a-b ? 3}}"):
        assert bind(text, {"a-b": 1.0}, "en", plain) == text


def test_both_languages_of_a_card_show_the_same_numbers():
    card = load_deck(DECK).cards["spread-of-qk"]
    values = {claim.id: 64.4 for claim in card.claims}

    def draw(number, binding):
        return f"<{number}>"

    shown = {
        language: [
            piece.split(">")[0]
            for piece in bind(card.short_answer.get(language), values, language, draw).split("<")[1:]
        ]
        for language in ("en", "zh")
    }
    assert shown == {"en": ["64", "64.4"], "zh": ["64", "64.4"]}


def test_format_number_is_the_one_of_the_bindings():
    assert format_number(1234567.0, ",.0f", "en") == "1,234,567"
