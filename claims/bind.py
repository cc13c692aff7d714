"""Measured numbers into prose. How a number is written, in both languages, stands in ``content/bindings.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from content.bindings import Binding, BindingError, format_number, parse

__all__ = ["NOT_MEASURED", "bind", "format_number"]

NOT_MEASURED = "—"


def bind(text: str, values: Mapping[str, float], language: str, draw: Callable[[str, Binding], str]) -> str:
    """The text with each ``{{claim-id}}`` replaced by the claim's value, as ``draw`` decorates it.

    ``draw`` is given the written number and the binding, and :data:`NOT_MEASURED` for a claim without a value. Holes
    of quiz items stay as they are; so does a text whose braces can't be read, which the content check reports.
    """
    try:
        pieces = parse(text)
    except BindingError:
        return text
    return "".join(
        draw(_number(piece, values, language), piece)
        if isinstance(piece, Binding)
        else piece
        if isinstance(piece, str)
        else piece.source
        for piece in pieces
    )


def _number(binding: Binding, values: Mapping[str, float], language: str) -> str:
    value = values.get(binding.claim)
    return NOT_MEASURED if value is None else binding.write(value, language)
