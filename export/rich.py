"""Prose of a card outside the app: bindings become numbers, citations words; as Markdown, or as HTML with formulas that
MathJax sets."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable, Mapping
from typing import Any

from claims import receipts
from claims.bind import bind
from content.schema import Source

_CITATION = re.compile(r"\s?\[@([a-z0-9-]+)\](?:[,、]\s?\[@([a-z0-9-]+)\])*")
_KEY = re.compile(r"\[@([a-z0-9-]+)\]")


Values = Callable[[str], Mapping[str, float]]


def reference_values(card: str) -> dict[str, float]:
    """What the reference run measured for the claims of a card."""
    return {claim: receipt.value for claim, receipt in receipts.load(card).claims.items()}


def markdown(text: str, values: Mapping[str, float], language: str, sources: Mapping[str, Source]) -> str:
    """Prose with measured values filled in, and sources as links."""
    bound = bind(text, values, language, lambda number, binding: number)

    def cite(match: re.Match[str]) -> str:
        labels = [_link(sources[key]) if key in sources else key for key in _KEY.findall(match[0])]
        return f"（{'；'.join(labels)}）" if language == "zh" else f" ({'; '.join(labels)})"

    return _CITATION.sub(cite, bound).strip()


def _link(source: Source) -> str:
    return f"[{source.short}]({source.link})" if source.link.startswith("https://") else source.short


def as_html(text: str) -> str:
    """Markdown as HTML; ``$x$`` becomes ``\\(x\\)``, and what looks like HTML in the text stays text."""
    return str(_parser().render(text)).strip()


@functools.cache
def _parser() -> Any:
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.use(dollarmath_plugin, allow_space=False, allow_digits=True, double_inline=False)
    parser.add_render_rule("math_inline", lambda self, tokens, at, *_: f"\\({html.escape(tokens[at].content)}\\)")
    parser.add_render_rule("math_block", lambda self, tokens, at, *_: display(tokens[at].content))
    return parser


def display(tex: str) -> str:
    """A formula on a line of its own."""
    return f"\\[{html.escape(tex.strip())}\\]"
