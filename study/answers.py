"""What a reader types as an answer: a number with its unit, or sizes and expressions of them.

Numbers are read as people write them: ``1e-3``, ``1/8``, ``√64``, ``2^10``, ``12,288``, ``１２８``, ``1.5 GiB``,
``3 万``. Expressions may use the names of the question or the letters that the field uses for them: ``B*H*N*N`` and
``b·h·n²`` are ``batch * n_heads * seq_len ** 2``. Nothing is executed: ``content/expressions.py`` does the arithmetic.
"""

from __future__ import annotations

import contextlib
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from content.expressions import evaluate

LONGEST = 200

# Letters that people write for a size, in lower case. One that two sizes of a question share stands for neither.
LETTERS: dict[str, tuple[str, ...]] = {
    "batch": ("b",),
    "n_heads": ("h", "heads", "n_h", "nh"),
    "n_kv_heads": ("g", "kv_heads", "h_kv"),
    "n_layers": ("layers", "n_l"),
    "seq_len": ("n", "l", "s", "t", "length", "len"),
    "q_len": ("n_q", "l_q", "lq", "nq", "m"),
    "kv_len": ("n_k", "l_k", "lk", "nk", "n", "s"),
    "d_model": ("d", "dm", "dmodel", "width"),
    "d_k": ("dk", "d_h", "d_head", "head_dim"),
    "d_v": ("dv",),
}

_THOUSANDS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"s": 1, "sec": 1, "second": 1, "seconds": 1, "秒": 1, "min": 60, "minutes": 60, "分钟": 60}
_SMALL = {"ms": 1e-3, "毫秒": 1e-3, "us": 1e-6, "微秒": 1e-6, "μs": 1e-6, "ns": 1e-9, "纳秒": 1e-9}
_HAN = {"万": 1e4, "亿": 1e8}
_SIGNS = {"−": "-", "–": "-", "·": "*", "⋅": "*", "×": "*", "÷": "/", "^": "**"}
_FULL_WIDTH = {"，": ",", "、": ",", "（": "(", "）": ")", "。": "."}


def _with_prefixes(*units: str, binary: bool = False) -> dict[str, float]:
    factors = dict.fromkeys(units, 1.0)
    for prefix, factor in (*_THOUSANDS.items(), *(_BINARY.items() if binary else ())):
        factors |= {prefix + unit: factor for unit in units}
    return factors


# Unit of a question (engine.base.Metric) to what may be written after the number, in lower case, and its size.
UNITS: dict[str, dict[str, float]] = {
    "1": {
        "": 1,
        "%": 0.01,
        "b": 1e9,
        "倍": 1,
        "个": 1,
        "times": 1,
        "x": 1,
        "token": 1,
        "tokens": 1,
        **_THOUSANDS,
        **_HAN,
    },
    "%": {"": 1, "%": 1},
    "nats": {"": 1, "nat": 1, "nats": 1, "bit": math.log(2), "bits": math.log(2), "比特": math.log(2)},
    "bytes": {"": 1, "字节": 1, "byte": 1, "bytes": 1, **_with_prefixes("b", binary=True), **_HAN},
    "s": {"": 1, **_SECONDS, **_SMALL},
    "flop": {"": 1, **_with_prefixes("flop", "flops"), **_THOUSANDS, **_HAN},
    "flop/byte": {"": 1, **_with_prefixes("flop/byte", "flop/b", "flops/byte")},
    "flop/s": {"": 1, **_with_prefixes("flop/s", "flops", "flops/s")},
    "bytes/s": {"": 1, **_with_prefixes("b/s", "bytes/s", "byte/s", binary=True)},
}


class Unreadable(ValueError):
    """An answer that can't be read. ``reason`` is a name of strings.yaml, ``values`` fill its sentence."""

    def __init__(self, reason: str, **values: Any) -> None:
        super().__init__(f"{reason}: {values}" if values else reason)
        self.reason, self.values = reason, values


def number(text: str, unit: str = "1") -> float:
    """The number that a text says, in the unit of the question.

    Raises: Unreadable.
    """
    plain = _without_thousands(_plain(text))
    value, written = _split(plain)
    factors = UNITS[unit]
    if written not in factors:
        raise Unreadable("answer_unit", written=written, units=", ".join(u for u in factors if u) or "1")
    try:
        result = evaluate(value)
    except ValueError:
        raise Unreadable("answer_not_a_number", written=text.strip()) from None
    if isinstance(result, tuple):
        raise Unreadable("answer_not_one_number", written=text.strip())
    in_unit = float(result) * factors[written]
    if not math.isfinite(in_unit):
        raise Unreadable("answer_not_a_number", written=text.strip())
    return in_unit


def is_count(text: str, wanted: str, draw: Mapping[str, Any], others: Collection[Mapping[str, Any]]) -> bool:
    """Whether a text is the count that ``wanted``, an expression of the drawn sizes, says.

    A number is compared at the draw; an expression of the sizes at other draws as well, where it must agree too.

    Raises: Unreadable.
    """
    plain = _without_thousands(_plain(text))
    value, unit = _split(plain)
    expression = _named(f"({value})*{_HAN[unit]:.0f}" if unit in _HAN else plain, draw)
    if _is_several(expression, draw):
        raise Unreadable("answer_not_one_number", written=text.strip())
    return _agree(expression, wanted, text, draw, others)


def _is_several(expression: str, draw: Mapping[str, Any]) -> bool:
    with contextlib.suppress(ValueError):
        return isinstance(evaluate(expression, draw), tuple)
    return False


def is_shape(text: str, wanted: str, draw: Mapping[str, Any], others: Collection[Mapping[str, Any]]) -> bool:
    """Whether a text is the shape that ``wanted``, a tuple of expressions, says; brackets may be any or none.

    Raises: Unreadable.
    """
    plain = re.sub(r"^torch\.size", "", _plain(text)).translate(str.maketrans("[]{}", "()()")).strip()
    while plain.startswith("(") and _closes_at_the_end(plain):
        plain = plain[1:-1].strip()
    if "," not in plain:  # 2×8×128×64: a shape has axes, not a product
        plain = re.sub(r"(?<=\w)\s*[*x]\s*(?=\w)|(?<=[\w)])\s+(?=[\w(])", ",", plain)
    expression = _named(f"({plain.rstrip(', ')},)", draw)
    return _agree(expression, wanted, text, draw, others)


def _closes_at_the_end(plain: str) -> bool:
    """Whether the bracket that opens a text is closed by its last character."""
    depth = 0
    for position, mark in enumerate(plain):
        depth += (mark == "(") - (mark == ")")
        if depth == 0:
            return position == len(plain) - 1
    return False


def _agree(
    expression: str, wanted: str, text: str, draw: Mapping[str, Any], others: Iterable[Mapping[str, Any]]
) -> bool:
    symbolic = re.search(r"[a-z_]", re.sub(r"\d[e][-+]?\d|min|max|sqrt", "", expression)) is not None
    for values in (draw, *(others if symbolic else ())):
        try:
            given = evaluate(expression, values)
        except ValueError:
            raise Unreadable("answer_not_an_expression", written=text.strip(), names=", ".join(draw)) from None
        if given != evaluate(wanted, values):
            return False
    return True


def _plain(text: str) -> str:
    """The text in the letters that the arithmetic reads.

    Raises: Unreadable for what is empty or too long.
    """
    if not text.strip():
        raise Unreadable("answer_empty")
    if len(text) > LONGEST:
        raise Unreadable("answer_too_long", most=LONGEST)
    # before the letters are made plain: ² would become 2, and n² n2
    plain = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda raised: f"**({unicodedata.normalize('NFKC', raised[0])})", text)
    plain = unicodedata.normalize("NFKC", plain).lower().replace("$", "").replace("\\", "")
    for written, read in (_SIGNS | _FULL_WIDTH).items():
        plain = plain.replace(written, read)
    plain = re.sub(r"^\s*(?:≈|~|=|约|大约|about)\s*", "", plain)
    plain = re.sub(r"(?:√|sqrt)\s*([\d.]+|[a-z_]\w*)", r"sqrt(\1)", plain)
    return plain.replace("√", "sqrt").strip()


def _without_thousands(plain: str) -> str:
    """12,288 without its comma. Only whole groups of three count: 1,5 is left and refused."""
    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda found: found[0].replace(",", ""), plain)


def _split(plain: str) -> tuple[str, str]:
    """A number, and the unit that is written after it."""
    found = re.fullmatch(r"(.*?[\d.)])\s*([a-zμ%/\u4e00-\u9fff]*)", plain)
    return (found[1], found[2]) if found else (plain, "")


def _named(plain: str, draw: Mapping[str, Any]) -> str:
    """An expression with the letters of the field replaced by the names of the question."""
    claims = [letter for name in draw for letter in LETTERS.get(name, ())]
    names = {letter: name for name in draw for letter in LETTERS.get(name, ()) if claims.count(letter) == 1}
    names |= {name.lower(): name for name in draw}
    return re.sub(r"[a-z_]\w*", lambda word: names.get(word[0], word[0]), plain)
