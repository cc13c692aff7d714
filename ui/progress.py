"""The Progress page: the plan for a date, what is remembered, what was done, and the log itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from functools import partial
from pathlib import Path

import numpy as np
import streamlit as st
from streamlit.components import v2

from content.schema import LANGUAGES, Card
from engine.base import Table
from export import anki, sheet
from study import desk, plan, schedule, stats
from study.events import BadLine, Setting, now
from study.items import Item
from study.log import LARGEST_IMPORT, export_lines, import_lines
from study.plan import Chosen
from study.progress import Progress
from ui import charts, deck, frame, learner, quiz, state
from ui.boundary import fragment
from ui.text import say, t

SHOWN_OF_PLAN = 12
HERE = Path(__file__).parent
WEAKEST = 5  # cards
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
    view()
    learner.keep()


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
    chosen = desk.planned(items, progress, at, interview, zone)
    st.subheader(t("plan_today", days=days), anchor=False)
    if not chosen:
        st.success(t("plan_nothing"), icon=":material/task_alt:")
    else:
        minutes = sum(c.seconds for c in chosen) / 60
        st.markdown(t("plan_sum", items=len(chosen), new=sum(c.is_new for c in chosen), minutes=f"{minutes:.0f}"))
        if st.button(t("plan_begin"), key="plan-begin", type="primary", icon=":material/play_arrow:"):
            frame.go("quiz", mode="plan")
    _outlook(items, progress, chosen, at, interview)
    with st.expander(t("plan_list", n=len(chosen))):
        for c in chosen[:SHOWN_OF_PLAN]:
            item = items[c.item]
            question = say(deck.deck().cards[item.card].question).strip()
            gain = t("plan_gain", without=f"{c.without:.0%}", with_it=f"{c.with_it:.0%}")
            st.markdown(f"- {question} :gray[{quiz.kind(item.kind)} · {gain}]")
        if len(chosen) > SHOWN_OF_PLAN:
            st.caption(t("plan_more", n=len(chosen) - SHOWN_OF_PLAN))


def _settings(progress: Progress) -> None:
    held = deck.deck()
    tracks = [name for name, track in held.tracks.items() if any(card in held.cards for card in track.cards)]
    with st.expander(t("settings"), icon=":material/tune:", expanded=desk.interview_date(progress) is None):
        left, right = st.columns(2)
        with left:
            st.date_input(
                t("set_interview"),
                desk.interview_date(progress),
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
                index=tracks.index(str(progress.setting("track"))) if progress.setting("track") in tracks else None,
                key="set-track",
                format_func=lambda v: say(held.tracks[v].title),
                placeholder=t("set_no_track"),
                on_change=lambda: _set("track", state.value_of("set-track")),
            )
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


def _iso(value: object) -> str | None:
    return value.isoformat() if isinstance(value, date) else None


def _set(name: str, value: str | float | bool | None) -> None:
    if learner.progress().setting(name) != value:
        learner.record(Setting(at=now(), name=name, value=value))


def _outlook(
    items: dict[str, Item], progress: Progress, chosen: tuple[Chosen, ...], at: datetime, interview: date
) -> None:
    """The recall predicted for the date, by topic, without and with today's list."""
    when = desk.morning(interview, learner.zone())
    without = dict(zip(items, plan.predicted(desk.candidates(items, progress), at, when), strict=True))
    with_list = without | {c.item: c.with_it for c in chosen}
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
                st.markdown(f"{say(card.question).strip()} :gray[{quiz.kind(items[item].kind)}]")
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
    st.markdown(t("history_sum", n=len(progress.reviews), days=days, hours=f"{minutes / 60:.1f}", back=stats.DAYS_BACK))
    _chart("calendar", calendar)
    _chart("minutes", calendar)
    _chart("calibration", stats.calibration(progress))


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
    log, progress = learner.reader_log(), learner.progress()
    st.markdown(t(f"log_in_{learner.place()}"))  # t("log_in_file") t("log_in_database") t("log_in_browser")
    st.caption(t("log_size", n=log.size(), reviews=len(progress.reviews)))
    st.download_button(
        t("log_export"),
        lambda: export_lines(log),
        f"attention-interview-lab-{schedule.day(now(), learner.zone())}.jsonl",
        "application/x-ndjson",
        key="log-export",
        icon=":material/download:",
        disabled=not log.size(),
    )
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
    if message := state.reader().messages.get("log"):
        st.markdown(message)
    _take_away()
    with st.popover(t("forget"), icon=":material/delete_forever:"):
        st.markdown(t("forget_help", n=log.size()))
        word = t("forget_word")
        st.text_input(t("forget_type", word=word), key="forget-word")
        st.button(
            t("forget_now"),
            key="forget-now",
            disabled=str(state.value_of("forget-word") or "").strip().lower() != word,
            on_click=_forget,
        )


def _take_away() -> None:
    """The deck for Anki, and as a sheet: all of it, a track, or the cards that are remembered worst."""
    held = deck.deck()
    st.subheader(t("away"), anchor=False)
    tracks = [name for name, track in held.tracks.items() if any(card in held.cards for card in track.cards)]
    which = st.selectbox(
        t("away_cards"),
        ["all", "weak", *tracks],
        key="away-cards",
        format_func=lambda v: say(held.tracks[v].title) if v in held.tracks else t(f"away_{v}"),
        # t("away_all") t("away_weak")
        help=t("away_weak_help", n=WEAKEST),
    )
    languages = st.pills(
        t("away_languages"),
        LANGUAGES,
        selection_mode="multi",
        default=[state.language()],
        key="away-languages",
        format_func=frame.LANGUAGE_NAMES.__getitem__,
    )
    cards = _cards_of(which)
    name = f"attention-interview-lab-{which}"
    with st.container(horizontal=True):
        st.download_button(
            t("away_anki"),
            partial(anki.apkg, cards, languages, held.sources),
            f"{name}.apkg",
            "application/octet-stream",
            key="away-anki",
            icon=":material/style:",
            disabled=not languages,
            help=t("away_anki_help"),
        )
        language = state.language()
        st.download_button(
            t("away_sheet"),
            partial(sheet.sheet, t("app_title"), cards, language, held.sources),
            f"{name}-{language}.md",
            "text/markdown",
            key="away-sheet",
            icon=":material/description:",
        )


def _cards_of(which: str) -> list[Card]:
    held = deck.deck()
    if which in held.tracks:
        return [held.cards[name] for name in held.tracks[which].cards if name in held.cards]
    if which == "weak":
        rows = stats.mastery(quiz.known(), learner.progress(), now(), {name: name for name in held.cards})
        return [held.cards[row.name] for row in sorted(rows, key=lambda row: row.recall)[:WEAKEST]]
    return list(held.cards.values())


def take(text: str, size: int) -> None:
    """Import a file's text into the log, and say what came of it."""
    try:
        if size > LARGEST_IMPORT:
            raise ValueError(f"{size} bytes")
        done = import_lines(learner.reader_log(), text.removeprefix("\ufeff"))
        learner.keep_all()
        if done.new or done.known:
            message = f":green[:material/check:] {t('log_imported', new=done.new, known=done.known)}"
        else:
            message = f":orange[:material/info:] {t('log_holds_nothing')}"
    except BadLine as error:
        message = f":red[:material/error:] {t(error.reason, line=error.line, detail=error.detail)}"
        # t("log_line_too_long") t("log_line_newer") t("log_line_damaged")
    except ValueError:  # larger than any log
        message = f":red[:material/error:] {t('log_too_large', most=f'{LARGEST_IMPORT / 1e6:.0f} MB')}"
    state.reader().messages["log"] = message


def _forget() -> None:
    learner.forget()
    state.reader().messages["log"] = f":material/delete_forever: {t('forgotten')}"
