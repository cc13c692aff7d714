"""What belongs to one reader's visit, and the link in the address bar.

The only module that touches ``st.session_state`` and ``st.query_params``.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

from claims.verify import Verdict
from content.schema import LANGUAGES
from engine.base import Result
from engine.runner import Job, RunSpec
from study.events import Event
from study.log import Log
from study.plan import Chosen
from study.progress import Progress


@dataclass
class Shown:
    """What a lab panel shows now: kept, so that the chart stays while a new run goes on."""

    spec: RunSpec
    result: Result
    where: str  # "reference" or "here"
    seconds: float | None = None
    spread: dict[str, float] = field(default_factory=dict)  # metric to the half-width over seeds
    n_seeds: int = 1


@dataclass
class Folded:
    """What a log says, the state of the log that says so, and when that was last looked at.

    The events are kept: reading ten thousand of them takes longer than an answer may.
    """

    mark: tuple[int, object]
    progress: Progress
    events: list[Event]
    looked: float = -math.inf
    recorded: list[Event] = field(default_factory=list)  # here, since then


@dataclass
class InBrowser:
    """What this visit has recorded for the log in the visitor's browser, where that is its place."""

    lines: list[str] = field(default_factory=list)  # recorded here, and not acknowledged yet
    sent: int = 0  # acknowledged before those
    imported: list[str] = field(default_factory=list)  # from a file: kept whatever was forgotten before
    read: bool = False  # the browser has said what it held
    forget: str = ""  # until the browser has done it: what it holds is to be deleted, as of this time
    forgotten: str = ""  # when the browser's log was last forgotten, as far as this visit knows
    failed: str = ""
    lost: int = 0  # lines of the log that are no events


@dataclass
class Asking:
    """A question on the table. What is not here (which item, which attempt) follows from the log."""

    item: str
    attempt: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # of its controls and its run
    began: float = field(default_factory=time.monotonic)
    hints: int = 0
    answer: str | None = None  # once it was given
    at: datetime | None = None  # when the answer was shown: the time of its grade, so that a preview comes true
    seconds: float = 0.0
    measured: float | None = None  # what the engine said, where the answer wants a run
    fault: tuple[str, dict[str, Any]] | None = None  # why an answer could not be read


@dataclass
class Reader:
    """One visit. Ids and small numbers only; results live in the shared cache."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    language: str | None = None  # chosen here, by the link or by the saved choice
    spoken: str = ""  # the language of the current script run
    chose_language: bool = False  # pressed the switch on this visit: worth saving in the browser
    verdicts: dict[str, Verdict] = field(default_factory=dict)  # receipts of this reader's own device, by claim id
    jobs: dict[str, Job[Any]] = field(default_factory=dict)  # what was started, by purpose: "lab:<slot>", "claims", ...
    drawn_jobs: set[str] = field(default_factory=set)  # purposes whose progress the page itself draws
    seen: float = field(default_factory=time.monotonic)  # when a script run of this visit last asked for its jobs
    connected: float = field(default_factory=time.monotonic)  # when its browser was last known to be there
    shown: dict[str, Shown] = field(default_factory=dict)
    history: dict[str, list[Shown]] = field(default_factory=dict)  # runs of a lab, the newest first, without tables
    pins: dict[str, list[tuple[RunSpec, Result | None]]] = field(default_factory=dict)  # by slot
    slow: list[RunSpec] = field(default_factory=list)  # pinned runs that were not quick enough to run unasked
    # what came of something, by place: colour, name of the words, what fills them
    told: dict[str, tuple[str, str, dict[str, Any]]] = field(default_factory=dict)
    # says what happened to the last run, by slot, in the language of whoever reads it
    messages: dict[str, Callable[[], str]] = field(default_factory=dict)
    refused_links: dict[str, dict[str, str]] = field(default_factory=dict)  # what no run could be made of, by slot
    revealed: set[str] = field(default_factory=set)  # answers that were asked for
    refuted: set[str] = field(default_factory=set)  # mistakes whose counter-example was run
    timer_started: float | None = None
    log: Log | None = None  # of the reader's progress: ui/learner.py
    log_file: int | None = None  # which file it was when it was opened
    log_failed: str = ""  # the kind of error that keeps progress from being kept
    progress: Folded | None = None  # what the log says
    browser: InBrowser = field(default_factory=InBrowser)
    restored: int = 0  # own receipts in the log when they were last taken out of it
    home_is_whole: bool = False  # the log was at hand when it was drawn
    more_minutes: tuple[date | None, float] = (None, 0.0)  # asked for beyond the list of that day
    plan: tuple[object, tuple[Chosen, ...]] | None = None  # the list of a day, and all that it follows from
    exam_runs: dict[str, dict[int, float]] = field(default_factory=dict)  # what the engine said, by exam and place
    asking: dict[str, Asking] = field(default_factory=dict)  # the question on the table, by mode of the quiz


_here = threading.local()  # the context of the script run in this thread, and the visit it belongs to


def reader() -> Reader:
    """The state of this visit, made at its first use.

    Asked for with every label, a thousand times for a page, and Streamlit's session state takes three locks each time:
    so it is looked up once for a script run. And it is made only where it is missing: a default made each time would
    draw a new id, which lets go of Python's lock, and a page beside a training would wait for it at each label.
    """
    context = get_script_run_ctx(suppress_warning=True)
    if context is not None and getattr(_here, "context", None) is context:
        known: Reader = _here.reader
        return known
    if "reader" not in st.session_state:
        st.session_state["reader"] = Reader()
    found: Reader = st.session_state["reader"]
    _here.context, _here.reader = context, found
    return found


# -- the link ---------------------------------------------------------------------------------------------------------


def link_value(name: str, allowed: Any = None) -> str | None:
    """A value of the link; None when absent or, with ``allowed``, not one of those."""
    value = st.query_params.get(name)
    return value if value is not None and (allowed is None or value in allowed) else None


def link_values() -> dict[str, str]:
    """The whole link."""
    return dict(st.query_params)


def link_list(name: str) -> list[str]:
    """All values of one name in the link."""
    return list(st.query_params.get_all(name))


def set_link_list(name: str, values: list[str]) -> None:
    """Have one name in the link as often as there are values."""
    if values != st.query_params.get_all(name):
        st.query_params[name] = values


def set_link(**values: str | None) -> None:
    """Change the link; None removes. Writes only what differs, since each write is a message to the browser."""
    for name, value in values.items():
        if value is None:
            if name in st.query_params:
                del st.query_params[name]
        elif st.query_params.get(name) != value:
            st.query_params[name] = value


# -- language ---------------------------------------------------------------------------------------------------------


def settle_language() -> str:
    """The language of this script run: by link, else by choice, else by the browser, else English."""
    state = reader()
    by_link = link_value("lang", LANGUAGES)
    if by_link:
        state.language = by_link
    locale = "zh" if (st.context.locale or "").lower().startswith("zh") else "en"
    state.spoken = state.language or locale
    return state.spoken


def language() -> str:
    """The language of this script run; a fragment speaks that of its page. Asked for every label, so it only looks."""
    return reader().spoken or settle_language()


def language_is_open() -> bool:
    """Whether nobody has said a language yet on this visit, so that the saved choice decides."""
    return reader().language is None


def choose_language(value: str, *, by_reader: bool) -> None:
    """Set the language of this visit; a choice of the reader is put into the link and saved in the browser."""
    state = reader()
    state.language = state.spoken = value
    if by_reader:
        state.chose_language = True
        set_link(lang=value)


# -- controls ---------------------------------------------------------------------------------------------------------


def control_key(slot: str, name: str) -> str:
    """Key of one control of a lab panel."""
    return f"{slot}.{name}"


def control_value(slot: str, name: str) -> Any:
    """What stands in a control; None before it was drawn."""
    return st.session_state.get(control_key(slot, name))


def set_controls(slot: str, values: Mapping[str, Any]) -> None:
    """Fill controls; only from a callback or before they are drawn."""
    for name, value in values.items():
        st.session_state[control_key(slot, name)] = value


def value_of(key: str) -> Any:
    """What a keyed widget holds; None before it was drawn."""
    return st.session_state.get(key)


def set_value(key: str, value: Any) -> None:
    """Fill a keyed widget; only from a callback or before it is drawn."""
    st.session_state[key] = value
