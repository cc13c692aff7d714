"""Which numbers of a text are seen, and what they say."""

from __future__ import annotations

import pytest

from content.numbers import Number, cited, numbers, scene


def said(text: str, language: str = "en", **options: bool) -> dict[str, tuple[float, str]]:
    return {n.text.strip(): (pytest.approx(n.value), n.kind) for n in numbers(text, language, **options)}


SEEN = [
    ("en", "at 64 keys", {"64": (64, "plain")}),
    ("en", "it is 0.125", {"0.125": (0.125, "plain")}),
    ("en", "122,500 tokens", {"122,500": (122500, "plain")}),
    ("en", "8.03 billion weights", {"8.03 billion": (8.03e9, "plain")}),
    ("en", "below 1e-3", {"1e-3": (1e-3, "plain")}),
    ("en", "40 times smaller", {"40 times": (40, "times")}),
    ("en", "eight times more", {"eight times": (8, "times")}),
    ("en", "twenty-five times", {"twenty-five times": (25, "times")}),
    ("en", "a tenfold and a 10-fold gain", {"tenfold": (10, "times"), "10-fold": (10, "times")}),
    ("en", "8x and 9× as large", {"8x": (8, "times"), "9×": (9, "times")}),
    ("en", "twice as large", {"twice": (2, "times")}),
    ("en", "two orders of magnitude", {"two orders of magnitude": (100, "times")}),
    ("en", "$8$ times the size, $40\\times$ it", {"8  times": (8, "times"), "40": (40, "times")}),
    ("en", "about a fifth of it", {"a fifth": (0.2, "share")}),
    ("en", "three quarters die", {"three quarters": (0.75, "share")}),
    ("en", "half of the rows", {"half": (0.5, "share")}),
    (
        "en",
        "7 % of rows, 45% there, ten percent",
        {"7 %": (0.07, "share"), "45%": (0.45, "share"), "ten percent": (0.1, "share")},
    ),
    (
        "en",
        "40 GiB, 1.5 MB, 16 bytes",
        {"40 GiB": (40 * 2**30, "size"), "1.5 MB": (1.5e6, "size"), "16 bytes": (16, "plain")},
    ),
    ("en", "$d_k = 512$ and $\\sigma = 0.5$", {"512": (512, "plain"), "0.5": (0.5, "plain")}),
    ("en", "the share is $45\\%$", {"45%": (0.45, "share")}),
    ("en", "2 times $1/\\sqrt{d_k}$", {"2": (2, "plain")}),
    ("en", "32 × 4096 tokens", {"32": (32, "plain"), "4096": (4096, "plain")}),
    ("zh", "至少小 40 倍", {"40 倍": (40, "times")}),
    ("zh", "是原来的八倍", {"八倍": (8, "times")}),
    ("zh", "大十二倍，三百倍", {"十二倍": (12, "times"), "三百倍": (300, "times")}),
    ("zh", "约为五分之一", {"五分之一": (0.2, "share")}),
    ("zh", "百分之七的行", {"百分之七": (0.07, "share")}),
    ("zh", "七成的行，一半的行", {"七成": (0.7, "share"), "一半": (0.5, "share")}),
    ("zh", "差两个数量级", {"两个数量级": (100, "times")}),
    (
        "zh",
        "占 40 GiB，80.3 亿个，12 万条",
        {"40 GiB": (40 * 2**30, "size"), "80.3 亿": (8.03e9, "plain"), "12 万": (12e4, "plain")},
    ),
    ("zh", "$1/\\sqrt{d_k}$ 的 2 倍", {"2 倍": (2, "plain")}),
    ("zh", "约40个key", {"40": (40, "plain")}),
]


@pytest.mark.parametrize(("language", "text", "expected"), SEEN)
def test_seen(language, text, expected):
    assert said(text, language) == expected


FREE = [
    ("en", "GPT-3, Llama 3 70B, T5, float32, fp16, E4M3, 2D, V-2"),
    ("en", "section 3.2.1, footnote 4, Table 2, step 3, layer 18, PyTorch 2.13"),
    ("en", "in 2017, Vaswani et al. 2017, (2022)"),
    ("en", "16 bits, 32-bit, 4 bit"),
    ("en", "mean 0 and variance 1, between 0 and 1"),
    ("en", "the 90th percentile, the 1st"),
    ("en", "`65504`, {{a-b:.1f}}, [@x2017], ```\n12345\n```"),
    ("en", "$2 \\cdot n d$, $x^{64}$, $a_{12}$, $\\frac{1}{10}$"),
    ("en", "1. first\n2. second\n12. twelfth"),
    ("en", "two points, three heads, a third option, many times, one at a time"),
    ("en", "see https://example.org/2024/12345"),
    ("zh", "第 3 节，图 12，2017 年，16 位，90 分位"),
    ("zh", "三个 head，一成不变，完成的，前十分之一"),
]


@pytest.mark.parametrize(("language", "text"), FREE)
def test_free(language, text):
    assert said(text, language) == {}


def test_counts_in_words_only_where_asked():
    assert said("five layers, two heads, eight of them") == {}
    assert set(said("five layers, two heads, eight of them", counts=True)) == {"five", "eight"}
    assert set(said("五层、两个 head、十二条序列", "zh", counts=True)) == {"五", "十二"}


@pytest.mark.parametrize(
    ("number", "values", "stands"),
    [
        (Number(64, "plain", 0, "64"), [64.0], True),
        (Number(64, "plain", 0, "64"), [65.0], False),
        (Number(0.193, "plain", 0, "0.193", unit=0.001), [0.1927], True),  # rounded as it is written
        (Number(0.193, "plain", 0, "0.193", unit=0.001), [0.1921], False),
        (Number(30, "plain", 0, "30", about=True), [31.0], True),
        (Number(30, "plain", 0, "30", about=True), [33.0], False),
        (Number(8.03e9, "plain", 0, "8.03 billion", unit=1e7), [8030261248.0], True),
        (Number(3, "plain", 0, "3"), [-3.0], True),
        (Number(3, "plain", 0, "3"), [float("inf")], False),
    ],
)
def test_a_number_stands_where_it_is_that_number_rounded(number, values, stands):
    assert number.stands_in(values) is stands


def test_the_scene_is_in_values_and_in_names_of_formats():
    assert scene([64, 0.5, "fp16", True, "none", (2, 3), "q4_k"]) == {64.0, 0.5, 16.0, 2.0, 3.0, 4.0}


def test_a_citation_covers_its_own_sentence():
    text = "It is 40 there [@x2017]. Here it is 50. 三成 [@y2018]。四成。"
    assert [cited(text, text.index(n)) for n in ("40", "50", "三成", "四成")] == [True, False, True, False]


def test_a_number_with_an_exponent_stands_in_only_what_its_digits_say():
    (number,) = numbers("below 1.5e-3", "en")
    assert number.stands_in({1.5e-3})
    assert number.stands_in({1.46e-3})  # written to two digits
    assert not number.stands_in({1.2e-3})
    assert not number.stands_in({0.02})
