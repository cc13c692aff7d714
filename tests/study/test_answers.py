"""Answers as people type them; what can't be read is said so, and nothing is run."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from content.schema import Strings
from study import answers
from study.answers import Unreadable, is_count, is_shape, number

SIZES = {"batch": 2, "n_heads": 4, "seq_len": 128, "d_k": 64}
OTHERS = [{"batch": 3, "n_heads": 5, "seq_len": 7, "d_k": 11}]
LOGITS, SHAPE = "batch * n_heads * seq_len ** 2", "(batch, n_heads, seq_len, d_k)"


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1e-3", "1", 1e-3),
        ("0.001", "1", 1e-3),
        (".001", "1", 1e-3),
        ("1/8", "1", 1 / 8),
        ("sqrt(64)", "1", 8),
        ("√64", "1", 8),
        ("√ 64", "1", 8),
        ("√(4·16)", "1", 8),
        ("sqrt 2", "1", math.sqrt(2)),
        ("12,288", "1", 12288),
        ("1,234,567.5", "1", 1234567.5),
        ("１２８", "1", 128),
        ("１２，２８８", "1", 12288),
        ("2^10", "1", 1024),
        ("2¹⁰", "1", 1024),
        ("2×10⁻³", "1", 2e-3),
        ("2·10^-3", "1", 2e-3),
        ("−3", "1", -3),
        ("≈ 8", "1", 8),
        ("约 8", "1", 8),
        ("$8$", "1", 8),
        ("3 万", "1", 30_000),
        ("8 倍", "1", 8),
        ("50%", "1", 0.5),
        ("50 %", "%", 50),
        ("50", "%", 50),
        ("1.5 GiB", "bytes", 1.5 * 2**30),
        ("8GB", "bytes", 8e9),
        ("512 字节", "bytes", 512),
        ("200 ms", "s", 0.2),
        ("3 µs", "s", 3e-6),
        ("2 GFLOP", "flop", 2e9),
        ("1 bit", "nats", math.log(2)),
    ],
)
def test_numbers_are_read_as_people_write_them(text, unit, value):
    assert number(text, unit) == pytest.approx(value, rel=1e-12)  # a few roundings of one product


@pytest.mark.parametrize(
    ("text", "unit", "reason"),
    [
        ("", "1", "answer_empty"),
        ("  ", "1", "answer_empty"),
        ("9" * 300, "1", "answer_too_long"),
        ("about eight", "1", "answer_not_a_number"),
        ("1,5", "1", "answer_not_one_number"),  # a comma that is no thousands mark: nobody guesses
        ("1/0", "1", "answer_not_a_number"),
        ("1e999", "1", "answer_not_a_number"),
        ("9**9**9", "1", "answer_not_a_number"),
        ("√(0-1)", "1", "answer_not_a_number"),
        ("__import__('os')", "1", "answer_not_a_number"),
        ("().__class__", "1", "answer_not_a_number"),
        ("3 parsecs", "s", "answer_unit"),
        ("3 s", "bytes", "answer_unit"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_reason(text, unit, reason):
    with pytest.raises(Unreadable) as refused:
        number(text, unit)
    assert refused.value.reason == reason


@given(st.text(max_size=250))
def test_any_text_is_a_number_or_refused(text):
    for unit in answers.UNITS:
        with contextlib.suppress(Unreadable):
            assert math.isfinite(number(text, unit))


@given(st.text(alphabet="bhnld_k0123456789+-*/(),[]×·²√ ", max_size=60))
def test_any_text_is_a_size_or_refused(text):
    for judge, wanted in ((is_count, LOGITS), (is_shape, SHAPE)):
        with contextlib.suppress(Unreadable):
            assert judge(text, wanted, SIZES, OTHERS) in (True, False)


@pytest.mark.parametrize(
    "text",
    [
        "B*H*N*N",
        "b·h·n²",
        "h*b*n^2",
        "batch * n_heads * seq_len ** 2",
        "131072",
        "131,072",
        "2·4·128²",
        "2**17",
        "b*h*l*l",
    ],
)
def test_counts_are_compared_by_value(text):
    assert is_count(text, LOGITS, SIZES, OTHERS)


def test_an_expression_must_agree_at_other_sizes_too():
    assert 2 * 4 * 128 * 128 == 2048 * 64  # right by accident at the sizes that were drawn
    assert not is_count("2048 * d_k", LOGITS, SIZES, OTHERS)
    assert not is_count("b*h*n*128", LOGITS, SIZES, OTHERS)
    assert not is_count("131073", LOGITS, SIZES, OTHERS)


@pytest.mark.parametrize(
    "text",
    [
        "(2, 4, 128, 64)",
        "2,4,128,64",
        "[2, 4, 128, 64]",
        "torch.Size([2, 4, 128, 64])",
        "2×4×128×64",
        "2x4x128x64",
        "2 4 128 64",
        "（2，4，128，64）",
        "(B, H, N, d_k)",
        "(b, h, l, dk)",
        "((2), 4, 2*64, 64)",
        "(2, 4, 128, 64,)",
    ],
)
def test_shapes_are_read_in_any_brackets(text):
    assert is_shape(text, SHAPE, SIZES, OTHERS)


@pytest.mark.parametrize("text", ["(2, 4, 64, 128)", "(2, 128, 4, 64)", "(2, 4, 128)", "65536", "(b, h, dk, n)"])
def test_another_shape_is_wrong(text):
    assert not is_shape(text, SHAPE, SIZES, OTHERS)


def test_a_letter_that_two_sizes_share_stands_for_neither():
    both = {"seq_len": 8, "kv_len": 16}
    with pytest.raises(Unreadable, match="answer_not_an_expression"):
        is_count("n * n", "seq_len * kv_len", both, [])
    assert is_count("l * n_k", "seq_len * kv_len", both, [])


def test_units_of_the_table_are_those_of_the_interface(strings: Strings):
    assert set(answers.UNITS) <= {"1", *strings.units}


@pytest.mark.parametrize("text", ["1,5", "2,8,128,64", "(3, 4)"])
def test_several_numbers_are_no_count(text):
    with pytest.raises(Unreadable) as refused:
        is_count(text, "n_heads * seq_len", SIZES, OTHERS)
    assert refused.value.reason == "answer_not_one_number"


def test_a_count_may_be_said_in_chinese_thousands():
    sizes = {"n_heads": 30, "seq_len": 1000}
    assert is_count("3 万", "n_heads * seq_len", sizes, [])
    assert not is_count("4万", "n_heads * seq_len", sizes, [])


def test_a_number_beyond_all_numbers_is_none():
    with pytest.raises(Unreadable):
        number("1e300 t", "1")
