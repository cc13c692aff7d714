"""The numbers of a text, in digits and in words, so that each result can be asked for its measurement or its source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from content.markdown import BLANK, blanked, outside, spans

Kind = Literal["plain", "times", "share", "size"]  # 64 keys · eight times, 8 倍 · 7 %, a fifth, 五分之一 · 40 GiB


@dataclass(frozen=True)
class Number:
    """A number in a text: ``value`` is what it says (40 GiB in bytes, 7 % as 0.07), ``unit`` its last digit's worth."""

    value: float
    kind: Kind
    start: int
    text: str
    unit: float = 0.0
    about: bool = False

    def stands_in(self, values: Iterable[float]) -> bool:
        """Whether one of the values, rounded as this number is, is it; of ``about`` 5 % are allowed."""
        slack = max(0.05 * abs(self.value) if self.about else 0.0, 0.5 * self.unit, 1e-9 * abs(self.value))
        return any(abs(abs(v) - abs(self.value)) <= slack for v in values if math.isfinite(v))


_NUM = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_DIGITS = re.compile(rf"(?<![A-Za-z0-9_.])(?<![A-Za-z][-‑]){_NUM}")
_EN = {
    w: n
    for n, w in enumerate(
        (
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
            "thirteen",
            "fourteen",
            "fifteen",
            "sixteen",
            "seventeen",
            "eighteen",
            "nineteen",
            "twenty",
        )
    )
} | {
    "thirty": 30,
    "forty": 40,
    "fifty": 50,
    "sixty": 60,
    "seventy": 70,
    "eighty": 80,
    "ninety": 90,
    "hundred": 100,
    "thousand": 1000,
}
_PARTS = {
    "third": 3,
    "quarter": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "hundredth": 100,
    "thousandth": 1000,
}
_HAN = {
    "零": 0,
    "一": 1,
    "二": 2,
    "两": 2,
    "三": 3,
    "四": 4,
    "五": 5,
    "六": 6,
    "七": 7,
    "八": 8,
    "九": 9,
    "十": 10,
    "百": 100,
    "千": 1000,
    "万": 10000,
}
HAN_NUMBER = f"[{''.join(_HAN)}]+"
EN_NUMBER = rf"(?:{'|'.join(w for w in _EN if w != 'zero')})(?:[- ](?:{'|'.join(w for w in _EN if w != 'zero')}))?"

_SIZES = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SCALES = {
    "thousand": 1e3,
    "million": 1e6,
    "billion": 1e9,
    "trillion": 1e12,
    "千": 1e3,
    "万": 1e4,
    "百万": 1e6,
    "亿": 1e8,
    "万亿": 1e12,
}
_SCALE = re.compile(r"\s*(thousand|million|billion|trillion|万亿|百万|亿|万|千)")
_SIZE = re.compile(r"\s*(?:([KMGTP])(i?)B\b|(bytes?)\b|(字节))")
_SHARE = re.compile(r"\s*(?:%|percent\b|per cent\b|个百分点)")
_PRODUCT = rf"(?!\s*(?:[\d(]|{BLANK}))"  # not the sign of a product: 32 × 4096, 2 times $1/\sqrt{d_k}$
_TIMES = re.compile(
    rf"\s*(?:times\b{_PRODUCT}|[x×](?![A-Za-z]){_PRODUCT}|[-‑ ]?fold\b|多?倍|(?P<orders>个数量级|orders? of "
    rf"magnitude\b))"
)
_FORMATS = re.compile(r"[-‑ ]?bits?\b|\s?位(?![置数移])")
_QUANTILE = re.compile(r"\s?(?:分位|百分位)")
_ABOUT = re.compile(
    r"(?:about|around|roughly|some|nearly|almost|approximately|约|大约|左右|近|接近)\s*(?:a\s+)?$", re.IGNORECASE
)
_PLACE = re.compile(
    r"(?:(?:sections?|§+|tables?|figures?|fig\.|footnotes?|eqs?\.|equations?|chapters?|appendix|steps?|versions?|layers?"
    r"|theorem|definition|algorithm|lecture|page)\s?"
    r"|(?:BERT|Claude|CUDA|DeepSeek|Gemma|GPT|Granite|Grok|Keras|Llama|Mistral|OPT|PaLM|Phi|Python|PyTorch|Qwen|Swin"
    r"|torch|ViT)[- ]?[Vv]?"
    r"|第\s?|[图表式节层]\s?|脚注\s?|附录\s?)$",
    re.IGNORECASE,
)
_YEAR = re.compile(r"(?:\b(?:in|since|from|until|of|by)\s|et al\.,?\s|[(（])$", re.IGNORECASE)
_IN_WORDS = (
    (re.compile(rf"\b({EN_NUMBER})(?:[- ]?fold\b| times\b{_PRODUCT}| orders? of magnitude\b)", re.IGNORECASE), "times"),
    (re.compile(r"\b(twice|thrice)\b(?= (?:as|the|that|what)\b)", re.IGNORECASE), "times"),
    (re.compile(rf"({HAN_NUMBER})\s?(?:多?倍|个数量级)"), "times"),
    (
        re.compile(
            rf"\b(?:(an?|{EN_NUMBER}|\d+)[- ])({'|'.join(_PARTS)})(?:s\b|\b(?= (?:of|the|as)\b))", re.IGNORECASE
        ),
        "parts",
    ),
    (re.compile(r"\b(half)\b(?= (?:of|the|as)\b)", re.IGNORECASE), "half"),
    (re.compile(rf"(?<![前后末])({HAN_NUMBER}|\d+)\s?分之\s?({HAN_NUMBER}|\d+(?:\.\d+)?)"), "分之"),
    (re.compile(r"一半"), "half"),
    (re.compile(r"(?<![完构组变造做作当成])([一二三四五六七八九])成(?=[的以左上多，。、；）]|$)"), "成"),
    (re.compile(rf"\b({EN_NUMBER}) ?(?:percent|per cent|%)", re.IGNORECASE), "percent"),
)
_COUNTS = re.compile(
    rf"\b(three|{'|'.join(w for w in _EN if _EN[w] > 3)})\b|({HAN_NUMBER})(?=\s?[个条层份维头次种行步位组倍])",
    re.IGNORECASE,
)


def numbers(text: str, language: str, *, counts: bool = False) -> Iterator[Number]:
    """Every number that says something about size, in order of kind. Names (GPT-3, float32), places (section 3.2),
    years, code, bindings and citations are left out.

    ``counts``: also small counts in words ("eight heads", "八个 head"), which elsewhere are free.
    """
    plain = _readable(text)
    taken: list[tuple[int, int]] = []
    for pattern, how in _IN_WORDS:
        for m in pattern.finditer(plain):
            if not any(a < m.end() and m.start() < b for a, b in taken):
                taken.append(m.span())
                yield _worded(m, how, plain)
    for m in _DIGITS.finditer(plain):
        if not any(a < m.end() and m.start() < b for a, b in taken) and (found := _digits(m, plain)):
            yield found
    for span in spans(text):
        if span.is_math and not re.fullmatch(_NUM, span.tex.strip()):
            yield from _in_formula(span.tex, span.start + span.text.index(span.tex))
    if counts:
        for m in _COUNTS.finditer(plain):
            if _word(m[0]) > 2 and not any(a < m.end() and m.start() < b for a, b in taken):
                yield Number(_word(m[0]), "plain", m.start(), m[0])


def cited(text: str, offset: int) -> bool:
    """Whether the sentence around a character cites a source."""
    plain = outside(text)
    ends = [m.end() for m in re.finditer(r"[.!?](?=\s|$)|[。！？；]|\n\n", plain)]
    start = max((e for e in ends if e <= offset), default=0)
    end = min((e for e in ends if e > offset), default=len(plain))
    return bool(re.search(r"\[@[^\]]+\]", plain[start:end]))


def scene(values: Iterable[object]) -> set[float]:
    """The numbers in parameters: 64, and the 16 of "fp16"."""
    found: set[float] = set()
    for value in values:
        if isinstance(value, bool):
            continue
        if isinstance(value, (int, float)):
            found.add(float(value))
        elif isinstance(value, str):
            found |= {float(d) for d in re.findall(r"\d+", value)}
        elif isinstance(value, (tuple, list)):
            found |= scene(value)
    return found


def _readable(text: str) -> str:
    """Code, bindings, citations and links' addresses blanked; a formula that is only a number is that number."""
    plain = outside(text)
    for span in spans(text):
        if span.is_math and re.fullmatch(_NUM, span.tex.strip()):
            plain = plain[: span.start] + f" {span.text[1:-1]} " + plain[span.end :]
    for pattern, blank in (
        (r"\{\{[^{}]*\}\}", BLANK),
        (r"\[@[^\]]*\]", " "),
        (r"\]\([^)]*\)", " "),
        (r"https?://\S+", " "),
        (r"(?m)^ *\d+[.)] ", " "),
    ):
        plain = blanked(plain, pattern, blank)
    return plain


def _digits(m: re.Match[str], plain: str) -> Number | None:
    digits, before, after = m[0], plain[: m.start()], plain[m.end() :]
    value = float(digits.replace(",", ""))
    unit = _unit(digits)
    about = bool(_ABOUT.search(before)) or after.lstrip().startswith("左右")
    if re.match(r"\.\d", after) or _PLACE.search(before):
        return None
    if re.fullmatch(r"(?:19|20)\d\d", digits) and (after.lstrip().startswith("年") or _YEAR.search(before)):
        return None
    if _QUANTILE.match(after):
        return None
    if value in (1, 2, 4, 8, 16, 32, 64) and _FORMATS.match(after):
        return None
    if share := _SHARE.match(after):
        return Number(value / 100, "share", m.start(), digits + share[0], unit / 100, about)
    if size := _SIZE.match(after):
        factor = float((1024 if size[2] else 1000) ** _SIZES[size[1].lower()]) if size[1] else 1.0
        return Number(value * factor, "size" if size[1] else "plain", m.start(), digits + size[0], unit * factor, about)
    if scale := _SCALE.match(after):
        factor = _SCALES[scale[1]]
        value, unit, after, digits = (
            value * factor,
            (unit or 1.0) * factor if factor > 1 else unit,
            after[scale.end() :],
            digits + scale[0],
        )
    if times := _TIMES.match(after):
        if times["orders"]:
            return Number(10.0**value, "times", m.start(), digits + times[0], about=about)
        product = times[0].strip() in ("倍",) and re.search(rf"{BLANK}\s*的\s*(?:约|大约)?\s*$", before)
        return Number(value, "plain" if product else "times", m.start(), digits + times[0], unit, about)
    if re.match(r"[A-Za-z]", after) or value in (0, 1):
        return None
    return Number(value, "plain", m.start(), digits, unit, about)


def _unit(digits: str) -> float:
    """What the last decimal is worth: 0.1 of 16.0, 1e-4 of 1.5e-3; 0 where there are no decimals."""
    mantissa, _, exponent = digits.lower().partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) if "." in mantissa else 0.0


def _worded(m: re.Match[str], how: str, plain: str) -> Number:
    about = bool(_ABOUT.search(plain[: m.start()]))
    kind: Kind = "times" if how == "times" else "share"
    if how == "times":
        value = {"twice": 2.0, "thrice": 3.0}.get(m[1].lower()) or _word(m[1])
        value = 10.0**value if re.search("magnitude|数量级", m[0]) else value
    elif how == "parts":
        value = (1.0 if m[1].lower() in ("a", "an") else _word(m[1])) / _PARTS[m[2].lower()]
    elif how == "half":
        value = 0.5
    elif how == "分之":
        value = _word(m[2]) / _word(m[1])
    elif how == "成":
        value = _word(m[1]) / 10
    else:
        value = _word(m[1]) / 100
    return Number(value, kind, m.start(), m[0], about=about)


def _in_formula(tex: str, start: int) -> Iterator[Number]:
    """Sizes in a formula: decimals and whole numbers above 10; smaller ones, indices, exponents are its structure."""
    words = blanked(tex, r"\\(?:text|mathrm|operatorname)\{[^{}]*\}", " ")
    for m in re.finditer(rf"(?<![A-Za-z0-9_.]){_NUM}", words):
        value, unit, after = float(m[0].replace(",", "")), _unit(m[0]), words[m.end() :]
        share, times = re.match(r"\s*\\%", after), re.match(r"\s*\\times\s*$", after)
        is_structure = "." not in m[0] and value <= 10 and not share and not times
        if is_structure or re.search(r"[\^_]\{?-?$", words[: m.start()]):
            continue
        if share:
            yield Number(value / 100, "share", start + m.start(), m[0] + "%", unit / 100)
        else:
            yield Number(value, "times" if times else "plain", start + m.start(), m[0], unit)


def _word(word: str) -> float:
    """eight, twenty-five, 五, 十二, 三百; digits as they are."""
    if re.fullmatch(r"\d+(?:\.\d+)?", word):
        return float(word)
    if word[0] in _HAN:
        total = current = 0
        for char in word:
            n = _HAN[char]
            if n < 10:
                current = n
            else:
                total, current = total + (current or 1) * n, 0
        return float(total + current)
    total = 0
    for part in re.split(r"[- ]", word.lower()):
        n = _EN[part]
        total = total * n if n >= 100 and total else total + n
    return float(total)
