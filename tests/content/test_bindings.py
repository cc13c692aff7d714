"""The grammar of double braces, and how a number is written."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from content.bindings import Binding, BindingError, Hole, bindings, citations, format_number, parse, scan
from content.loader import PROJECT
from content.markdown import Fault


def test_pieces():
    assert parse("at {{a-b}}, {{a-b:.1f}} and {{a-b / 4096:,.0f}} of {{d_k:,d}}.") == [
        "at ",
        Binding("a-b", None, None, "", "{{a-b}}"),
        ", ",
        Binding("a-b", None, None, ".1f", "{{a-b:.1f}}"),
        " and ",
        Binding("a-b", "/", 4096.0, ",.0f", "{{a-b / 4096:,.0f}}"),
        " of ",
        Hole("d_k", ",d", "{{d_k:,d}}"),
        ".",
    ]


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        ("{{a-b / 2**30}}", ("/", 2.0**30)),
        ("{{a-b*100}}", ("*", 100.0)),
        ("{{ a-b + 1e-3 : .2f }}", ("+", 1e-3)),
        ("{{a-b - 3}}", ("-", 3.0)),
    ],
)
def test_one_operation(text, operation):
    (piece,) = parse(text)
    assert (piece.op, piece.operand) == operation


def test_an_id_may_hold_digits_and_is_no_subtraction():
    assert bindings("{{rows-at-512-3}}")[0].claim == "rows-at-512-3"


def test_code_and_formulas_keep_their_braces():
    text = "`{{a-b}}` and $x_{{i}}$ and\n\n```\nf'{{c-d}}'\n```\n\n$$\n{{e-f}}\n$$"
    assert parse(text) == [text]


@pytest.mark.parametrize(
    ("text", "offset", "words"),
    [
        ("a {{a b}}", 2, "wanted {{claim-id}}"),
        ("{{A-b}}", 0, "kebab-case with a hyphen"),
        ("{{a-b:zz}}", 0, "the format 'zz'"),
        ("{{a-b:.3}}", 0, None),
        ("{{a-b:x}}", 0, "wanted one such as"),
        ("{{a-b:!r}}", 0, "wanted one such as"),
        ("{{a-b / 0}}", 0, "not 0 to divide by"),
        ("{{a-b / x}}", 0, "no such name as 'x'"),
        ("{{a-b / 2 / 2}}", 0, None),
        ("{{d_k * 2}}", 0, "a hole takes no operation"),
        ("12 {{a-b", 3, "without its partner"),
        ("12 a-b}}", 6, "without its partner"),
        ("{{a-b\n}}", 0, "without its partner"),
        ("{{}}", 0, "wanted {{claim-id}}"),
        ("see [@ x]", 4, "a citation is [@key]"),
        ("see [@x; @y]", 4, "a citation is [@key]"),
        ("see [@X1]", 4, "a citation is [@key]"),
    ],
)
def test_fault(text, offset, words):
    if words is None:  # a Python number format, and arithmetic in the operand
        assert parse(text)
        return
    faults = [piece for piece in scan(text) if isinstance(piece, Fault)]
    assert faults[0].offset == offset
    assert any(words in f.message for f in faults), faults
    with pytest.raises(BindingError):
        parse(text)


def test_citations():
    assert citations("a [@vaswani2017], `[@code]` [@t5-code].") == [("vaswani2017", 2), ("t5-code", 28)]


@given(st.text("ab-_{} :/.$`\n[@]中", max_size=40))
def test_pieces_are_the_text(text):
    """Put together again they give what was written, each where it said."""
    offset = 0
    for piece in scan(text):
        if isinstance(piece, Fault):
            continue
        source = piece if isinstance(piece, str) else piece.source
        if not isinstance(piece, str):
            assert text[piece.offset :].startswith(source)
        assert source in text[offset:] or not source
        offset = text.index(source, offset) + len(source)
    if not any(isinstance(p, Fault) for p in scan(text)):
        assert "".join(p if isinstance(p, str) else p.source for p in parse(text)) == text


# --------------------------------------------------------------------------------------------------------------------
# Formats


def documented() -> list[tuple[str, str, str, str]]:
    """(written, value, English, Chinese) of each line of docs/formats.md."""
    page = (PROJECT / "docs" / "formats.md").read_text("utf-8")
    return re.findall(r"^\| `(\{\{.*?\}\})` \| (\S+) \| (.+?) \| (.+?) \|", page, re.MULTILINE)


@pytest.mark.parametrize(("written", "value", "english", "chinese"), documented())
def test_documented_format(written, value, english, chinese):
    (piece,) = parse(written)
    assert isinstance(piece, Binding)
    assert piece.write(float(value), "en") == english
    assert piece.write(float(value), "zh") == chinese


def test_the_documentation_shows_every_kind_of_format():
    specs = {bindings(written)[0].format for written, *_ in documented()}
    assert specs >= {"", "%", "bytes", "d", ".0f", ".1f", ",.0f", "+.2f", ".3g", ".1e", ".0%"}
    assert len(documented()) >= 20


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "%", "bytes", ".1f", ",.0f", ".3g", ".2e", "d", ".1%", "+.2f"]),
)
def test_every_number_can_be_written(value, spec):
    for language in ("en", "zh"):
        text = format_number(value, spec, language)
        assert text
        assert "nan" not in text
        assert "e+" not in text
        assert "e-" not in text
        assert text != "-0"


@given(st.floats(1e-4, 999_999))
def test_three_digits_say_the_value(value):
    """Without a format: right to half a unit of the third digit, or of the ones."""
    written = float(format_number(value).replace(",", ""))
    unit = max(10.0 ** (math.floor(math.log10(value)) - 2), 0 if value < 100 else 1)
    assert abs(written - value) <= 0.5 * unit * (1 + 1e-9)


@given(st.integers(0, 2**59))
def test_bytes_say_the_value(size):
    number, unit = format_number(size, "bytes").split(" ")
    factor = {
        "byte": 1,
        "bytes": 1,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "PiB": 2**50,
        "EiB": 2**60,
    }[unit]
    said = float(number.replace(",", "")) * factor
    assert abs(said - size) <= max(0.005 * size, 0.5)  # three digits
    assert size < 1024 or float(number.replace(",", "")) < 1024


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_has_a_word(value):
    assert format_number(value, ".1f", "en") in ("undefined", "∞", "-∞")
    assert format_number(value, "bytes", "zh") in ("无定义", "∞", "-∞")


def test_a_whole_number_has_no_decimals_to_ask_for():
    with pytest.raises(BindingError):
        parse("{{a-claim:.1d}}")
    assert parse("{{a-claim:,d}}")[0].write(4096, "en") == "4,096"
