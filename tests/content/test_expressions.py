"""Arithmetic that is read and never executed."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from content.expressions import equal, evaluate, whole
from content.schema import arithmetic


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("40 * 2**30", 40 * 2**30),
        ("1e-9", 1e-9),
        ("37/192", Fraction(37, 192)),
        ("6/3", 2),
        ("-(2 + 3) * 4", -20),
        ("7 // 2", 3),
        ("7 % 4", 3),
        ("2**-2", Fraction(1, 4)),
        ("2**0.5", 2**0.5),
        ("1_000_000", 10**6),
        ("6 * 10**23 / 7", Fraction(6 * 10**23, 7)),  # exact beyond what a float holds
        ("min(3, 2) + max(1, 5)", 7),
        ("(n, 2*n)", (5, 10)),
        ("(n,)", (5,)),
        ("n*d/2", Fraction(15, 2)),
    ],
)
def test_value(text, value):
    found = evaluate(text, {"n": 5, "d": 3})
    assert (found, type(found)) == (value, type(value))


BAD = [
    "",
    " ",
    "x",
    "n d",
    "2n",
    "__import__('os')",
    "n.bit_length()",
    "n[0]",
    "lambda: 1",
    "True",
    "None",
    "'a'",
    '"a"',
    "n if n else 1",
    "1 < 2",
    "n and d",
    "[1]",
    "{1}",
    "1/0",
    "1//0",
    "1%0",
    "0**-1",
    "9**9**9",
    "2**65",
    "2**-65",
    "1e999",
    "1e308*10",
    "((((9**64)**64)**64)**64)**64",
    "(((1/3)**64)**64)**64",
    "(-8)**0.5",
    "(" * 200,
    "1" * 200,
    "min()",
    "min(n, key=d)",
    "open(n)",
    "n=1",
    "*n",
    "1\n2",
    "１",
    "n\u200b",
    "0x10",
    "1e",
    "1if n else 2",
    "n(2)",
    "~n",
    "n@d",
    "n<<2",
    "print(1)",
]


@pytest.mark.parametrize("text", BAD)
def test_refused(text):
    with pytest.raises(ValueError, match=r"."):
        evaluate(text, {"n": 5, "d": 3})


@given(st.text("0123456789 ()+-*/%.,enmdix_", max_size=40))
def test_any_text_is_a_value_or_a_value_error(text):
    try:
        value = evaluate(text, {"n": 5, "d": 3})
    except ValueError:
        return
    assert isinstance(value, (int, float, Fraction, tuple))


INTS = st.integers(-1000, 1000)


@given(INTS, INTS, st.integers(1, 50))
def test_agrees_with_python_on_whole_numbers(a, b, c):
    text = f"({a}) * ({b}) + {c} // 7 - ({a}) % {c}"
    assert evaluate(text) == a * b + c // 7 - a % c


def test_equal_expressions():
    draws = [{"n": n, "d": d} for n in (1, 2, 7) for d in (3, 64)]
    assert equal("2*n*d", "d*(n + n)", draws)
    assert equal("(n, 2*d)", "(n, d + d)", draws)
    assert not equal("2*n*d", "2*n + d", draws)
    assert not equal("(n, d)", "(d, n)", draws)
    assert not equal("(n, d)", "n*d", draws)


def test_whole_numbers():
    assert whole(Fraction(4)) == 4
    with pytest.raises(ValueError, match=r"3\.5 is not a whole number"):
        whole(Fraction(7, 2))


def test_an_expectation_is_one_number():
    assert arithmetic("1/16") == 0.0625
    assert isinstance(arithmetic("4/2"), int)
    with pytest.raises(ValueError, match="one number"):
        arithmetic("1, 2")
