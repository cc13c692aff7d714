"""Length of what is spoken, and which points a text makes."""

from __future__ import annotations

import pytest

from content.schema import KeyPoint
from content.speech import heard, makes, says, spoken_seconds, spoken_units


@pytest.mark.parametrize(
    ("language", "text", "units"),
    [
        ("en", "One two three.", 3),
        ("en", "It's a well-known, 30-second answer: q·k.", 6),
        ("en", "about $\\sqrt{2 \\ln n}$ or {{a-b:.1f}}, see [@x2017].", 5),
        ("en", "", 0),
        ("zh", "两行中文。", 4),
        ("zh", "softmax 的 key 有 64 个", 2 + 1 + 2 + 1 + 2 + 1),
        ("zh", "标准差是 $\\sqrt{d_k}$，实测 {{a-b:.1f}}", 4 + 2 + 2 + 2),
        ("zh", "用 `q` 和 d_k", 1 + 2 + 1 + 2),
    ],
)
def test_units(language, text, units):
    assert spoken_units(text, language) == units


def test_seventy_five_words_and_a_hundred_and_thirty_units_take_thirty_seconds():
    assert spoken_seconds("word " * 75, "en") == pytest.approx(30)
    assert spoken_seconds("字" * 130, "zh") == pytest.approx(30)


SAID = [
    ("The variances add up.", [["variances add"]], True),
    ("VARIANCES   add", [["variances add"]], True),
    ("the head-width", [["head width"]], True),
    ("it saturates", [["saturat"]], True),  # a stem
    ("a number of rows", [["umber"]], False),  # not from the middle of a word
    ("$\\sqrt{d_k}$ and **bold**", [["d_k"], ["bold"]], True),
    ("only one of them", [["one"], ["two"]], False),
    ("only one of them", [["two", "one"]], True),
    ("标准差是 $\\sqrt{d_k}$", [["标准差"], ["d_k"]], True),
    ("用 KV head 数", [["KV head"]], True),
    ("用KV head数", [["KV head 数"]], True),
    ("梯度不会消失", [["梯度消失"]], False),
]


@pytest.mark.parametrize(("text", "groups", "expected"), SAID)
def test_says(text, groups, expected):
    assert says(text, groups) is expected


def test_a_point_can_be_taken_back():
    point = KeyPoint.model_validate(
        {
            "id": "a",
            "must": True,
            "point": {"en": "x", "zh": "x"},
            "says": {"en": [["overflow"]], "zh": [["溢出"]]},
            "not_says": {"en": [["main reason", "because of"], ["overflow"]], "zh": [["主要原因"]]},
        }
    )
    assert makes("It is not overflow.", point, "en")
    assert not makes("Overflow is the main reason.", point, "en")
    assert not makes("主要原因是溢出", point, "zh")


def test_what_is_heard_has_no_marks():
    assert heard("A **bold** `d_k` – is  it's [@x2017] 中文 key 值") == "a bold d_k is it's中文key值"
