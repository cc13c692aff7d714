"""Arithmetic that an author or a reader types: numbers, names, + - * / // % **, min, max, sqrt. Nothing is executed."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction

Value = int | float | Fraction

MAX_LENGTH = 120
MAX_EXPONENT = 64
MAX_SIZE = 1e300
_ALLOWED = re.compile(r"[0-9A-Za-z_.,+\-*/%() ]*")


def evaluate(text: str, values: Mapping[str, Value] | None = None) -> Value | tuple[Value, ...]:
    """The value of an expression, or of each part of a tuple of them. Whole numbers stay exact: 7/2 is a fraction.

    Raises: ValueError that names what was not understood.
    """
    names = dict(values or {})
    node = _parse(text)
    if isinstance(node, ast.Tuple):
        return tuple(_value(part, names, text) for part in node.elts)
    return _value(node, names, text)


def whole(value: Value) -> int:
    """A count as an int.

    Raises: ValueError where it is none.
    """
    if value != int(value):
        raise ValueError(f"{float(value):g} is not a whole number")
    return int(value)


def equal(left: str, right: str, draws: Collection[Mapping[str, Value]]) -> bool:
    """Whether two expressions have the same value at every draw (``2*n*d`` and ``d*(n+n)`` do).

    Raises: ValueError when one of them is not understood.
    """
    return all(evaluate(left, draw) == evaluate(right, draw) for draw in draws)


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"an expression has at most {MAX_LENGTH} characters")
    if not _ALLOWED.fullmatch(text) or text.count("(") > 20:
        raise ValueError(f"{text!r}: only numbers, names, + - * / // % **, min, max, sqrt and brackets are read here")
    if re.search(r"(?<![A-Za-z_\d])\d[\d.]*(?:[A-Za-z]|_(?!\d))", re.sub(r"\d[eE][-+]?\d", "0", text)):
        raise ValueError(f"{text!r}: a name can't begin with a digit; write the product with *")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{text!r} can't be read as arithmetic") from None


def _value(node: ast.expr, names: Mapping[str, Value], text: str) -> Value:
    try:
        result = _step(node, names, text)
    except ZeroDivisionError:
        raise ValueError(f"{text!r} divides by zero") from None
    except OverflowError:
        raise ValueError(f"{text!r} is too large") from None
    if isinstance(result, Fraction) and result.denominator == 1:
        return int(result)
    return result


def _step(node: ast.expr, names: Mapping[str, Value], text: str) -> Value:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value, text)
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ValueError(
                f"{text!r}: no such name as {node.id!r}" + (f"; there is {', '.join(sorted(names))}" if names else "")
            )
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, names, text)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, names, text), _value(node.right, names, text)
        return _bounded(_OPERATORS[type(node.op)](left, right), text)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in (*_FUNCTIONS, "sqrt")
        and node.args
        and not node.keywords
    ):
        given = [_value(a, names, text) for a in node.args]
        if node.func.id == "sqrt":
            return _root(given, text)
        return _FUNCTIONS[node.func.id](given)
    raise ValueError(f"{text!r}: only numbers, names, + - * / // % **, min, max, sqrt and brackets are read here")


def _bounded(value: Value, text: str) -> Value:
    if isinstance(value, complex) or not -MAX_SIZE <= value <= MAX_SIZE:  # NaN is not between them either
        raise ValueError(f"{text!r} is not a finite number below 1e300")
    if isinstance(value, Fraction) and value.denominator > MAX_SIZE:
        raise ValueError(f"{text!r} needs a denominator above 1e300")
    return value


def _root(given: list[Value], text: str) -> Value:
    """The square root; of a square of whole numbers it is exact."""
    if len(given) != 1 or given[0] < 0:
        raise ValueError(f"{text!r}: sqrt takes one number that is not negative")
    (value,) = given
    if not isinstance(value, float):
        exact = Fraction(math.isqrt(Fraction(value).numerator), math.isqrt(Fraction(value).denominator))
        if exact**2 == value:
            return exact
    return math.sqrt(value)


def _divide(left: Value, right: Value) -> Value:
    if isinstance(left, float) or isinstance(right, float):
        return left / right
    return Fraction(left) / Fraction(right)


def _power(base: Value, exponent: Value) -> Value:
    if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
        raise ValueError(f"an exponent above {MAX_EXPONENT} is not read here")
    if isinstance(exponent, Fraction):
        exponent = float(exponent)
    if isinstance(base, int) and exponent < 0:
        base = Fraction(base)
    result: Value = base**exponent
    return result


_OPERATORS: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: _divide,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[[Iterable[Value]], Value]] = {"min": min, "max": max}
