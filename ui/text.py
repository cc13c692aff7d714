"""Words in the reader's language: of the interface, of the engine's names, and of errors."""

from __future__ import annotations

import logging
import math
from datetime import timedelta

from claims.bind import format_number
from content.schema import ExperimentText, NameText, Text
from engine.base import ParamsError, Problem
from engine.executors import OtherCode, WorkersLost
from engine.runner import OutOfMemory, TooLarge
from ui import state
from ui.deck import deck

log = logging.getLogger("attention_interview_lab")


def t(key: str, **values: object) -> str:
    """An interface string, its {holes} filled.

    A string that strings.yaml lacks, or whose holes are other ones, shows as it is and is logged: one label must not
    take a page down. The content check finds those first.
    """
    try:
        text = deck().strings.ui[key].get(state.language())
    except KeyError:
        log.error("content/strings.yaml has no ui.%s", key)
        return key
    try:
        return text.format(**values) if values else text
    except (KeyError, IndexError, ValueError) as error:
        log.error("content/strings.yaml: ui.%s can't be filled: %s", key, error)
        return text


def say(text: Text) -> str:
    """Prose of a card or a list in the reader's language."""
    return text.get(state.language())


def item_kind(kind: str) -> str:
    """A kind of quiz item."""
    return t(f"kind_{kind}")
    # t("kind_choice") t("kind_numeric") t("kind_predict") t("kind_order") t("kind_cloze") t("kind_shape")
    # t("kind_count") t("kind_recall")


def name(key: str, *, plain: bool = False) -> str:
    """A parameter, metric or column. ``plain`` where math can't be typeset (charts, option lists)."""
    return _lookup(deck().strings.names, key, plain)


def help_of(key: str) -> str | None:
    """The help of a parameter, if it has one."""
    entry = deck().strings.names.get(key)
    return say(entry.help) if entry and entry.help else None


def choice(value: str, *, plain: bool = False) -> str:
    """A value of a choice parameter or of a series."""
    return _lookup(deck().strings.choices, value, plain)


def _lookup(entries: dict[str, NameText], key: str, plain: bool) -> str:
    entry = entries.get(key)
    return entry.text(state.language(), plain=plain) if entry else key


def experiment(key: str) -> ExperimentText:
    """Title, description, formula, plot titles and summary of an experiment."""
    return deck().strings.experiments[key]


def with_unit(key: str, unit: str, *, plain: bool = True) -> str:
    """A name with its unit in brackets, for axes and figures; pure numbers have none."""
    label = name(key, plain=plain)
    return label if unit == "1" else f"{label} ({say(deck().strings.units[unit])})"


def number(value: float) -> str:
    """A measured number with three significant digits, for figures and tables; small whole ones with all of theirs."""
    if not math.isfinite(value):
        return t("not_a_number")
    if value == int(value) and abs(value) < 1e7:
        return format_number(value, ",.0f", state.language())
    size = abs(value)
    if size >= 1e9:
        return format_number(value, ".2e", state.language())
    if size >= 1000:
        return format_number(value, ",.0f", state.language())
    if size < 1e-3:
        return format_number(value, ".1e", state.language())
    decimals = max(0, 2 - math.floor(math.log10(size)))
    return format_number(value, f".{decimals}f", state.language())


def problem(p: Problem) -> str:
    """One refused parameter, said to a reader: what, what was got, what is wanted."""
    label = name(p.name)
    if p.kind == "rule":
        return say(deck().strings.rules[p.rule]).format(**{k: _plain(v) for k, v in p.values.items()})
    if p.kind == "range":
        return t("problem_range", name=label, got=p.got, low=f"{p.low:g}", high=f"{p.high:g}")
    if p.kind in ("choice", "unknown"):
        return t("problem_choice", name=label, got=p.got, allowed=", ".join(p.allowed))
    if p.kind == "text":
        return t("problem_text", name=label, high=f"{p.high:g}", n=f"{len(str(p.got)):,}")
    return t(f"problem_{p.kind}", name=label, got=p.got)  # t("problem_whole") t("problem_finite") t("problem_flag")


def _plain(value: object) -> object:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value


def error(exception: BaseException) -> str:
    """What a run's failure means to a reader, and what to do."""
    if isinstance(exception, ParamsError):
        return "\n\n".join(problem(p) for p in exception.problems)
    if isinstance(exception, TooLarge):
        return t(
            "too_large", needed=size(exception.needed_bytes), limit=size(exception.limit_bytes), device=exception.device
        )
    if isinstance(exception, OutOfMemory):
        return t("out_of_memory", device=exception.device)
    if isinstance(exception, WorkersLost | OtherCode):
        return t("workers_failed")
    return t("run_failed", kind=type(exception).__name__)


def size(n_bytes: float) -> str:
    """Bytes in the largest binary unit that fits."""
    return format_number(n_bytes, "bytes", state.language())


def span(time: timedelta) -> str:
    """A time from now to a date: 10 min, 3 h, 8 d, 5 mo."""
    minutes = time / timedelta(minutes=1)
    for limit, size, unit in ((60, 1, "minutes"), (60 * 24, 60, "hours"), (60 * 24 * 60, 60 * 24, "days")):
        if minutes < limit:
            return t(f"span_{unit}", n=max(1, round(minutes / size)))
    return t("span_months", n=round(minutes / 60 / 24 / 30.4))
    # t("span_minutes") t("span_hours") t("span_days")
