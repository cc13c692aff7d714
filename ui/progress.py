"""The Progress page: the plan for a date, what is remembered, what was done, and the log itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, tzinfo
from pathlib import Path

import numpy as np
import streamlit as st
from streamlit.components import v2

from engine.base import Table
from study import desk, plan, schedule, stats
from study.events import BadLine, Event, Setting, now, write_line
from study.items import Item
from study.log import FILE, LARGEST_IMPORT, Log, MemoryLog, data_folder, export_lines, import_lines
from study.plan import Chosen
from study.progress import Progress
from ui import asking, charts, deck, frame, learner, prose, quiz, sheets, state
from ui.boundary import fragment, guarded
from ui.text import item_kind, say, t

SHOWN_ANSWERS = 200
WRITTEN = ("numeric", "shape", "count", "recall")  # kinds whose answers are the reader's words
HERE = Path(__file__).parent
LARGEST_IN_BROWSER = 4_000_000  # characters of a log
VIEWS = {
    "plan": ":material/event:",
    "memory": ":material/psychology:",
    "history": ":material/history:",
    "log": ":material/database:",
}

# declared once a process: a declaration in a script run would be a new component each time
_file_picker = v2.component(
    "file_picker",
    html='<div class="file-picker"></div>',
    css=(HERE / "file_picker.css").read_text("utf-8"),
    js=(HERE / "file_picker.js").read_text("utf-8"),
    isolate_styles=False,
)


def draw() -> None:
    """The view stands in the link."""
    st.header(t("page_progress"), anchor=False)
    learner.warning()
    view = st.segmented_control(
        t("progress_view"),
        VIEWS,
        default=state.link_value("view", VIEWS) or "plan",
        key="progress_view",
        format_func=lambda v: f"{VIEWS[v]} {t(f'progress_{v}')}",
        # t("progress_plan") t("progress_memory") t("progress_history") t("progress_log")
        label_visibility="collapsed",
        required=True,
    )
    state.set_link(view=view)
    fragment(_kept)({"plan": _plan, "memory": _memory, "history": _history, "log": _log}[view])


def _kept(view: Callable[[], None]) -> None:
    with guarded(view.__name__):
        view()
    learner.keep()  # also what was recorded before something failed


# -- the plan ---------------------------------------------------------------------------------------------------------


def _plan() -> None:
    progress, items = learner.progress(), quiz.known()
    at, zone = now(), learner.zone()
    _settings(progress)
    interview = desk.interview_date(progress)
    if interview is None:
        st.info(t("plan_no_date"), icon=":material/event:")
        return
    days = (interview - schedule.day(at, zone)).days
    if days < 0:
        st.info(t("plan_over"), icon=":material/event_available:")
        return
    today = quiz.day_of_plan()
    assert today is not None
    left = [c for c in today.chosen if c.item in today.left]
    st.subheader(t("plan_today", days=days), anchor=False)
    if not left:
        st.success(t("plan_nothing"), icon=":material/task_alt:")
    else:
        minutes = sum(c.seconds for c in left) / 60
        st.markdown(t("plan_sum", items=len(left), new=sum(c.is_new for c in left), minutes=f"{minutes:.0f}"))
    if st.button(t("plan_begin"), key="plan-begin", type="primary", icon=":material/play_arrow:"):
        frame.go("quiz", mode="plan")
    _outlook(items, progress, left, at, interview)
    if left:
        with st.expander(t("plan_list", n=len(left))):
            _list(items, left)


def _list(items: Mapping[str, Item], left: Sequence[Chosen]) -> None:
    """What today holds, by card: how many of each kind, and what the card gains."""
    of_card: dict[str, list[Chosen]] = {}
    for c in left:
        of_card.setdefault(items[c.item].card, []).append(c)
    for card, some in of_card.items():
        frame.link("cards", say(deck.deck().cards[card].question).strip(), icon=":material/style:", card=card)
        counts = Counter(items[c.item].kind for c in some)
        kinds = " · ".join(f"{item_kind(kind)} {n}" for kind, n in counts.items())
        before, after = (
            sum(values) / len(some) for values in zip(*((c.without, c.with_it) for c in some), strict=True)
        )
        gain = t("plan_gain", without=f"{before:.0%}", with_it=f"{after:.0%}")
        st.caption(f"{kinds} · {gain}")


def _settings(progress: Progress) -> None:
    held, today = deck.deck(), schedule.day(now(), learner.zone())
    tracks = [name for name, track in held.tracks.items() if any(card in held.cards for card in track.cards)]
    _fill("set-interview", desk.interview_date(progress))
    _fill("set-track", progress.setting("track") if progress.setting("track") in tracks else None)
    open_at_first = "settings-open"  # as it was at first: one answer must not fold the others away
    if state.value_of(open_at_first) is None:
        state.set_value(open_at_first, desk.interview_date(progress) is None)
    with st.expander(t("settings"), icon=":material/tune:", expanded=state.value_of(open_at_first)):
        left, right = st.columns(2)
        with left:
            st.date_input(
                t("set_interview"),
                None,  # by its key: a field that has a default can't be emptied
                min_value=min(today, desk.interview_date(progress) or today),
                key="set-interview",
                on_change=lambda: _set("interview", _iso(state.value_of("set-interview"))),
                help=t("set_interview_help"),
            )
            st.number_input(
                t("set_minutes"),
                5,
                480,
                int(float(progress.setting("minutes_a_day") or 30)),
                5,
                key="set-minutes",
                on_change=lambda: _set("minutes_a_day", float(state.value_of("set-minutes"))),
            )
            st.selectbox(
                t("track"),
                tracks,
                index=None,
                key="set-track",
                format_func=lambda v: say(held.tracks[v].title),
                placeholder=t("set_no_track"),
                on_change=lambda: _set("track", state.value_of("set-track")),
            )
            if chosen := held.tracks.get(str(progress.setting("track"))):
                written = sum(card in held.cards for card in chosen.cards)
                st.caption(f"{say(chosen.about).strip()} {t('track_written', n=written, of=len(chosen.cards))}")
        with right:
            low, high = schedule.RETENTION
            st.slider(
                t("set_retention"),
                round(100 * low),
                round(100 * high),
                round(100 * desk.retention(progress)),
                key="set-retention",
                format="%d%%",
                help=t("set_retention_help"),
                on_change=lambda: _set("retention", state.value_of("set-retention") / 100),
            )
            st.number_input(
                t("set_new"),
                0,
                200,
                int(float(progress.setting("new_a_day") or 0)),
                key="set-new",
                help=t("set_new_help"),
                on_change=lambda: _set("new_a_day", float(state.value_of("set-new"))),
            )
            st.toggle(
                t("set_practice"),
                bool(progress.setting("practice_counts")),
                key="set-practice",
                help=t("set_practice_help"),
                on_change=lambda: _set("practice_counts", bool(state.value_of("set-practice"))),
            )


def _fill(key: str, value: object) -> None:
    """Fill a field that was not drawn yet, or was emptied by what it shows."""
    if value is not None and state.value_of(key) is None:
        state.set_value(key, value)


def _iso(value: object) -> str | None:
    return value.isoformat() if isinstance(value, date) else None


def _set(name: str, value: str | float | bool | None) -> None:
    if learner.progress().setting(name) != value:
        learner.record(Setting(at=now(), name=name, value=value))


def _outlook(items: dict[str, Item], progress: Progress, left: Sequence[Chosen], at: datetime, interview: date) -> None:
    """The recall predicted for the date, by topic, without and with today's list."""
    when = desk.morning(interview, learner.zone())
    without = dict(zip(items, plan.predicted(desk.candidates(items, progress), at, when), strict=True))
    with_list = without | {c.item: c.with_it for c in left}
    cards, topics = deck.deck().cards, deck.deck().topics
    rows = []
    groups: dict[str, list[str]] = {}
    for item in items:
        groups.setdefault(cards[items[item].card].topic, []).append(item)
    for topic, of_topic in [*groups.items(), ("", list(items))]:
        label = say(topics[topic].title) if topic else t("plan_all")
        before, after = (float(np.mean([some[item] for item in of_topic])) for some in (without, with_list))
        rows.append({t("topic"): label, t("plan_without"): f"{before:.0%}", t("plan_with"): f"{after:.0%}"})
    st.table(rows, border="horizontal")


# -- what is remembered -----------------------------------------------------------------------------------------------


def _memory() -> None:
    items, progress = quiz.known(), learner.progress()
    at, zone = now(), learner.zone()
    if not progress.reviews:
        _nothing_yet()
        return
    cards, topics = deck.deck().cards, deck.deck().topics
    st.subheader(t("mastery"), anchor=False, help=t("mastery_help"))
    for row in stats.mastery(items, progress, at, {name: card.topic for name, card in cards.items()}):
        label = t(
            "mastery_row", topic=say(topics[row.name].title), recall=f"{row.recall:.0%}", met=row.met, of=row.items
        )
        st.progress(row.recall, text=label)
    _chart("forecast", stats.forecast(items, progress, at, zone))
    _chart("retention", stats.retention(progress, at, zone))
    worst = desk.leeches(items, progress)
    if worst:
        st.subheader(t("leeches"), anchor=False, help=t("leeches_help"))
        for item in worst:
            card = cards[desk.card_of(item)]
            with st.container(horizontal=True, vertical_alignment="center"):
                st.markdown(f"{say(card.question).strip()} :gray[{item_kind(items[item].kind)}]")
                frame.link("cards", t("open_card"), icon=":material/arrow_forward:", card=card.id)


def _nothing_yet() -> None:
    st.info(t("progress_empty"), icon=":material/hourglass_empty:")
    frame.link("quiz", t("progress_begin"), icon=":material/play_arrow:", mode="review")


# -- what was done ----------------------------------------------------------------------------------------------------


def _history() -> None:
    progress, at, zone = learner.progress(), now(), learner.zone()
    if not progress.reviews and not progress.predictions:
        _nothing_yet()
        return
    calendar = stats.calendar(progress, at, zone)
    days, minutes = int((calendar["n_reviews"] > 0).sum()), float(calendar["minutes"].sum())
    time = t("span_minutes", n=f"{minutes:.0f}") if minutes < 60 else t("span_hours", n=f"{minutes / 60:.1f}")
    st.markdown(t("history_sum", n=len(progress.reviews), days=days, time=time, back=stats.DAYS_BACK))
    _chart("calendar", calendar)
    _chart("minutes", calendar)
    _chart("calibration", stats.calibration(progress))
    _answers(progress, zone)


def _answers(progress: Progress, zone: tzinfo) -> None:
    """The last answers, the newest first."""
    st.subheader(t("history_answers"), anchor=False)
    only_wrong = st.toggle(t("history_only_wrong"), key="only-wrong")
    items, cards = deck.items(None), deck.deck().cards
    # of what only the reader has judged older logs hold other scores
    kept = [r for r in progress.reviews if r.item in items and not (only_wrong and (r.score == 1 or r.rating > 2))]
    rows = [
        {
            t("history_when"): f"{review.at.astimezone(zone):%Y-%m-%d %H:%M}",
            t("page_cards"): prose.plain(say(cards[desk.card_of(review.item)].question)),
            t("quiz_kind"): item_kind(items[review.item].kind),
            t("history_score"): f"{review.score:.0%}",
            t("history_answer"): review.answer if items[review.item].kind in WRITTEN else "",
        }
        for review in reversed(kept[-SHOWN_ANSWERS:])
    ]
    if rows:
        st.dataframe(rows, hide_index=True)
    else:
        st.caption(t("history_none"))


def _chart(name: str, table: Table) -> None:
    """A chart, or a word why there is none yet; with a sentence and its table."""
    plot = stats.PLOTS[name]
    title = t(f"chart_{name}")
    # t("chart_calendar") t("chart_minutes") t("chart_retention") t("chart_forecast") t("chart_calibration")
    st.subheader(title, anchor=False, help=t(f"chart_{name}_help"))
    # t("chart_calendar_help") t("chart_minutes_help") t("chart_retention_help") t("chart_forecast_help")
    # t("chart_calibration_help")
    if not len(table[plot.x]) or not np.any(table[plot.y]):
        st.caption(t("chart_empty"))
        return
    charts.draw(plot, table, key=f"progress-{name}", description=t("chart_of", name=title))
    with st.expander(t("table_and_summary")):
        st.dataframe(charts.as_frame(plot, table), hide_index=True)


# -- the log ----------------------------------------------------------------------------------------------------------


def _log() -> None:
    st.markdown(t(f"log_in_{learner.place()}"))  # t("log_in_file") t("log_in_database") t("log_in_browser")
    if learner.place() == "file":
        st.caption(f"`{data_folder() / FILE}`")
    standing = st.container()  # filled when an import is done
    st.subheader(t("log_import"), anchor=False)
    st.markdown(t("log_import_help"))
    given = _file_picker(
        data={"label": t("log_import_choose"), "accept": ".jsonl,.txt", "most": LARGEST_IMPORT},
        key="log-import",
        on_file_change=lambda: None,
        height="content",
    ).file
    if given:
        take(given["text"], int(given["size"]))
    log, progress = learner.reader_log(), learner.progress()
    with standing:
        st.caption(t("log_size", n=log.size(), reviews=len(progress.reviews)))
        st.download_button(
            t("log_export"),
            lambda: export_lines(log),
            f"attention-interview-lab-{schedule.day(now(), learner.zone())}.jsonl",
            "application/x-ndjson",
            key="log-export",
            on_click="ignore",
            icon=":material/download:",
            disabled=not log.size(),
        )
    _told("log")
    sheets.controls()
    st.subheader(t("forget"), anchor=False)
    st.markdown(t("forget_help", n=log.size()))
    word = t("forget_word")
    with st.popover(t("forget"), icon=":material/delete_forever:", disabled=not log.size()):
        st.text_input(t("forget_type", word=word), key="forget-word", live=True)
        st.button(
            t("forget_now"),
            key="forget-now",
            icon=":material/delete_forever:",
            disabled=str(state.value_of("forget-word") or "").strip().lower() != word,
            on_click=_forget,
        )
    _told("forget")


def _told(place: str) -> None:
    """What came of the last thing that was done here."""
    if told := state.reader().told.get(place):
        colour, key, values = told
        st.markdown(f":{colour}[{t(key, **values)}]")
        # t("log_imported") t("log_holds_nothing") t("log_too_large") t("forgotten")
        # t("log_line_too_long") t("log_line_newer") t("log_line_damaged")


def take(text: str, size: int) -> None:
    """Import a file's text into the log, and say what came of it."""
    told, log = state.reader().told, learner.reader_log()
    told.pop("forget", None)
    if size > LARGEST_IMPORT:
        told["log"] = "red", "log_too_large", {"most": f"{LARGEST_IMPORT / 1e6:.0f} MB"}
        return
    try:
        read = MemoryLog()
        import_lines(read, text.removeprefix("\ufeff"))
    except BadLine as error:
        told["log"] = "red", error.reason, {"line": error.line, "detail": asking.as_typed(error.detail)}
        return
    if learner.place() == "browser" and (room := _room(log, read.events())) < 0:
        told["log"] = (
            "red",
            "log_no_room",
            {"most": f"{LARGEST_IN_BROWSER / 1e6:.0f} MB", "over": f"{-room / 1e6:.1f} MB"},
        )
        return
    new = learner.imported(read.events())
    if new is None:
        return
    if read.size():
        told["log"] = "green", "log_imported", {"new": new, "known": read.size() - new}
    else:
        told["log"] = "orange", "log_holds_nothing", {}


def _room(log: Log, events: Sequence[Event]) -> int:
    """Characters that a browser has left when the union of the two is in it."""
    union = {event.id: event for event in (*log.events(), *events)}
    return LARGEST_IN_BROWSER - sum(len(write_line(event)) + 1 for event in union.values())


def _forget() -> None:
    state.reader().told.pop("log", None)
    if not learner.forget():
        return
    state.reader().told["forget"] = "green", "forgotten", {}
