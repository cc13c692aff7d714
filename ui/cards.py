"""The Cards page: find a card, and read one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import streamlit as st

from claims.verify import interval
from content.loader import BrokenFile
from content.schema import Card, Claim, FollowUp, Lab, Mistake
from engine import registry
from engine.runner import RunSpec
from study import desk
from study.desk import Status
from study.events import now
from ui import (
    bench,
    deck,
    frame,
    learner,
    ledger,
    prose,
    quiz,
    runs,
    sheets,
    speaking,
    state,
    tables,
    text,
    verifying,
    widgets,
)
from ui.text import say, t

LEVELS = ("core", "deep", "trap")
STATUSES = ("new", "due", "later")
_FILLED = "labs_filled"  # how often a lab was filled in from the text on this visit


def draw() -> None:
    """One card when the link names one, a sheet of several to print, else the list."""
    wanted = state.link_value("card")
    cards = deck.deck().cards
    if wanted is None and (which := state.link_value("sheet", sheets.choices())):
        sheets.draw(which)
    elif wanted is None:
        _list()
    elif wanted in cards:
        _card(cards[wanted])
    else:
        st.warning(t("no_such_card", card=re.sub(r"[^\w-]", "?", wanted)[:60]), icon=":material/search_off:")
        _list()
    frame.turned_to(wanted or "cards", filled=state.value_of(_FILLED) or 0)


# -- the list ---------------------------------------------------------------------------------------------------------


def _list() -> None:
    held = deck.deck()
    st.header(t("page_cards"), anchor=False)
    query = (
        st.text_input(t("search"), key="card_search", placeholder=t("search_hint"), icon=":material/search:", live=True)
        or ""
    )
    with st.container(horizontal=True):
        topics = list(dict.fromkeys(c.topic for c in held.cards.values()))
        topic = st.pills(t("topic"), topics, key="card_topic", format_func=lambda v: say(held.topics[v].title))
        level = st.pills(t("level"), LEVELS, key="card_level", format_func=lambda v: t(f"level_{v}"))
        # t("level_core") t("level_deep") t("level_trap")
        tracks = sorted(i for i, track in held.tracks.items() if any(c in held.cards for c in track.cards))
        track = st.pills(t("track"), tracks, key="card_track", format_func=lambda v: say(held.tracks[v].title))
        status = st.pills(t("status"), STATUSES, key="card_status", format_func=lambda v: t(f"status_{v}"))
        # t("status_new") t("status_due") t("status_later")
    standing = _standing()
    found = [
        c
        for c in held.cards.values()
        if _matches(c, query, topic, level, track) and (not status or standing[c.id].name == status)
    ]
    if not found:
        st.info(t("no_card_found") if held.cards else t("no_cards"), icon=":material/search_off:")
    for card in found:
        with st.container(border=True):
            st.markdown(f"**{say(card.question).strip()}**")
            st.caption(
                f"{say(held.topics[card.topic].title)} · {t(f'level_{card.level}')} · {t('minutes', n=card.minutes)}"
            )
            _badges(card, standing[card.id])
            frame.link("cards", t("open_card"), icon=":material/arrow_forward:", card=card.id)
    _broken(held.broken)


def _standing() -> Mapping[str, Status]:
    """Where the reader stands with each card; as if nothing was met while the log is not at hand."""
    found: dict[str, Status] = defaultdict(Status)
    if learner.is_at_hand():
        found.update(desk.statuses(quiz.known(), learner.progress(), now(), learner.zone()))
    return found


def _matches(card: Card, query: str, topic: str | None, level: str | None, track: str | None) -> bool:
    if (topic and card.topic != topic) or (level and card.level != level):
        return False
    if track and card.id not in deck.deck().tracks[track].cards:
        return False
    haystack = deck.searchable(card.id)
    return all(word in haystack for word in query.lower().split())


def _broken(files: Iterable[BrokenFile]) -> None:
    for file in files:
        with st.expander(t("broken_card", file=file.path.name), icon=":material/error:"):
            st.code("\n".join(map(str, file.problems)), language=None, wrap_lines=True)


# -- one card ---------------------------------------------------------------------------------------------------------


def _card(card: Card) -> None:
    _top(card)
    reading, working = st.columns([6, 5], gap="large")
    with reading:
        _head(card)
        if _hidden(card):
            st.button(
                t("show_answers"), icon=":material/visibility:", on_click=state.reader().revealed.add, args=(card.id,)
            )
        else:
            st.subheader(t("short_answer"), anchor=False)
            st.markdown(prose.markdown(card, card.short_answer))
            _sections(card)
    with working:
        _lab(card)
    _receipts(card)


def _top(card: Card) -> None:
    held = deck.deck()
    ids = list(held.cards)
    place = ids.index(card.id)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(
            f"{say(held.topics[card.topic].title)} › {t(f'level_{card.level}')} › {t('minutes', n=card.minutes)}"
        )
        frame.link("cards", t("all_cards"), icon=":material/list:")
        if place > 0:
            frame.link("cards", t("previous_card"), icon=":material/chevron_left:", card=ids[place - 1])
        if place + 1 < len(ids):
            frame.link("cards", t("next_card"), icon=":material/chevron_right:", card=ids[place + 1])
        frame.link("quiz", t("practise_card"), icon=":material/quiz:", mode="practice", card=card.id)


def _head(card: Card) -> None:
    st.header(say(card.question).strip(), anchor=False)
    _badges(card, _standing()[card.id])
    st.markdown(f"**{t('intent')}**　{prose.markdown(card, card.intent).strip()}")
    st.toggle(t("think_first"), key="think_first", help=t("think_first_help"), persist_state="session")


def _hidden(card: Card) -> bool:
    return bool(state.value_of("think_first")) and card.id not in state.reader().revealed


def _badges(card: Card, standing: Status) -> None:
    with st.container(horizontal=True, gap="small"):
        if standing.due:
            st.badge(t("card_due", n=standing.due), icon=":material/event:", color="orange")
        elif standing.next:
            st.badge(t("card_next", day=standing.next), icon=":material/event:", color="gray")
        if card.asked:
            asked = t("asked", banks=card.asked.banks, of=card.asked.of)
            st.badge(asked, icon=":material/local_fire_department:", color="orange")
        counts = ledger.counts([(card.id, claim) for claim in card.claims])
        colour = "orange" if counts["fails"] else "green" if counts["holds"] == len(card.claims) else "gray"
        st.badge(ledger.standing(counts), icon=":material/verified:", color=colour)


def _sections(card: Card) -> None:
    """Tabs that are drawn when open; the link holds the id of the open one."""
    sections: dict[str, tuple[str, Callable[[Card], None]]] = {
        "spoken": (t("tab_spoken"), speaking.draw),
        "derivation": (t("tab_derivation"), _derivation),
        "follow-ups": (f"{t('tab_follow_ups')} {len(card.follow_ups)}", _follow_ups),
        "mistakes": (f"{t('tab_mistakes')} {len(card.mistakes)}", _mistakes),
        "trade-offs": (t("tab_trade_offs"), _trade_offs),
        "practice": (t("tab_practice"), _practice),
        "resume": (t("tab_resume"), _resume),
        "sources": (t("tab_sources"), _sources),
    }
    labels = [label for label, _ in sections.values()]
    # The state of tabs is their label, so their key holds the language. Their default must stay what it was at first:
    # Streamlit resets tabs whose default changes, and the link changes with every tab that is opened.
    first = f"sections-{card.id}-first"
    if state.value_of(first) is None or state.value_of(first)[0] != state.language():
        state.set_value(first, (state.language(), state.link_value("section", sections) or "spoken"))
    default = sections[state.value_of(first)[1]][0]
    tabs = st.tabs(labels, key=f"sections-{card.id}-{state.language()}", default=default, on_change="rerun")
    for (section, (_, body)), tab in zip(sections.items(), tabs, strict=True):
        if tab.open:
            state.set_link(card=card.id, section=section)
            with tab:
                body(card)


def _verify_button(card: Card, claim_id: str, label: str, icon: str, key: str, mistake: str | None = None) -> None:
    st.button(
        label,
        key=key,
        icon=icon,
        disabled=verifying.busy(),
        on_click=verifying.start,
        args=([(card.id, card.claim(claim_id))], mistake),
    )


def _derivation(card: Card) -> None:
    for n, step in enumerate(card.derivation, 1):
        with st.container(border=True):
            st.markdown(f"**{n}. {say(step.step).strip()}**")
            st.latex(step.tex)
            st.markdown(prose.markdown(card, step.because))
            if step.check:
                with st.container(horizontal=True, vertical_alignment="center"):
                    _verify_button(card, step.check, t("check_step"), ":material/play_arrow:", f"check-{n}")
                    _outcome(card, card.claim(step.check))


def _outcome(card: Card, claim: Claim) -> None:
    """Value and verdict of a claim in one line, with a link to its receipt."""
    result = prose.measured(card.id).get(claim.id)
    if result is None:
        st.caption(t("not_measured"))
        return
    colour = prose.ground(card.id, claim.id, result)
    sign = ":material/check:" if result.holds else ":material/close:"
    number = f":{colour}-background[[{text.number(result.value)}](#{prose.anchor(claim.id)})]"
    where = t("here") if claim.id in state.reader().verdicts else t("reference_run")
    about = " · ".join((ledger.measure(claim), f"{t('accepted')} {ledger.bounds(*interval(claim.expect))}", where))
    st.markdown(f"{sign} {number} :small[:gray[{about}]]", width="content")


def _follow_ups(card: Card) -> None:
    for f in card.follow_ups:
        with st.expander(say(f.question).strip(), key=f"follow-{f.id}", on_change="rerun") as fold:
            if fold.open:
                _follow_up(card, f)


def _follow_up(card: Card, f: FollowUp) -> None:
    st.markdown(prose.markdown(card, f.answer))
    st.caption("\n".join(f"- {say(p).strip()}" for p in f.key_points))
    if f.claim:
        _outcome(card, card.claim(f.claim))
    if f.lab:
        st.button(
            t("open_in_lab"),
            key=f"lab-{f.id}",
            icon=":material/science:",
            on_click=_set_lab,
            args=(card, f.lab.use, dict(f.lab.params)),
        )


def _mistakes(card: Card) -> None:
    for m in card.mistakes:
        with st.container(border=True):
            _mistake(card, m)


def _mistake(card: Card, m: Mistake) -> None:
    st.markdown(f":red[:material/close:] {t('quoted', text=say(m.wrong).strip())}")
    st.markdown(f":green[:material/check:] {prose.markdown(card, m.right).strip()}")
    st.markdown(prose.markdown(card, m.why))
    if m.refuted_by is None:
        return
    claim = card.claim(m.refuted_by)
    _verify_button(card, claim.id, t("refute"), ":material/gavel:", f"refute-{m.id}", mistake=m.id)
    if m.id in state.reader().refuted and claim.id in state.reader().verdicts:
        st.markdown(f"{prose.statement(claim).strip()}")
        _outcome(card, claim)


def _trade_offs(card: Card) -> None:
    for a in card.alternatives.items:
        with st.container(border=True):
            st.markdown(f"**{say(a.name).strip()}**")
            st.latex(a.formula)
            st.markdown(f":green[:material/add:] {prose.markdown(card, a.buys).strip()}")
            st.markdown(f":orange[:material/remove:] {prose.markdown(card, a.costs).strip()}")
            if a.claim:
                _outcome(card, card.claim(a.claim))
    if card.alternatives.table:
        tables.draw(card)


def _practice(card: Card) -> None:
    for i in card.in_practice:
        with st.container(border=True):
            st.markdown(f"**{prose.markdown(card, i.symptom).strip()}**")
            for label, part in ((t("cause"), i.cause), (t("mend"), i.mend), (t("detect"), i.detect)):
                st.markdown(f":gray[{label}]　{prose.markdown(card, part).strip()}")


def _resume(card: Card) -> None:
    st.caption(t("resume_help"))
    for r in card.resume:
        with st.container(border=True):
            st.markdown(f"**{t('background_' + r.background.replace('-', '_'))}**")
            # t("background_experienced") t("background_classic") t("background_new_grad")
            st.markdown(prose.markdown(card, r.line, only_own=True))
    own = [c for c in card.claims if c.id in state.reader().verdicts]
    if len(own) < len(card.claims):
        _verify_all(card, "resume")


def _sources(card: Card) -> None:
    for cite in card.sources:
        source = deck.deck().sources[cite.key]
        st.markdown(f"- {source.authors}, **{prose.linked(source.title, source)}**, {source.year}. :gray[{cite.where}]")
    for change in card.changes:
        st.caption(f"{change.date} · {say(change.what)}")
    ids = [*card.prerequisites, *card.related]
    if ids:
        st.markdown(f"**{t('see_also')}**")
        for other in ids:
            if other in deck.deck().cards:
                frame.link("cards", say(deck.deck().cards[other].question).strip(), icon=":material/style:", card=other)
            else:
                st.caption(f"`{other}` · {t('not_written_yet')}")


# -- the lab of the card ----------------------------------------------------------------------------------------------


def _slot(card: Card, lab: str) -> str:
    return f"{card.id}/{lab}"


def _set_lab(card: Card, lab: str, params: dict[str, object]) -> None:
    """Bring a lab to the front with a follow-up's parameters filled in."""
    state.set_value(f"lab-{card.id}", lab)
    state.set_controls(_slot(card, lab), _opening(card.lab(lab), params))
    state.set_value(_FILLED, (state.value_of(_FILLED) or 0) + 1)
    st.toast(t("lab_is_set"), icon=":material/science:")


def _lab(card: Card) -> None:
    ids = [lab.id for lab in card.labs]
    key = f"lab-{card.id}"
    titles = lab_titles(card)
    with st.container(border=True, key=bench.PLACE):
        start = state.link_value("lab", ids) or ids[0]
        chosen = widgets.listed(t("lab"), ids, key, titles.__getitem__, start=start) or ids[0]
        state.set_link(lab=chosen if chosen != ids[0] else None)
        lab = card.lab(chosen)
        st.subheader(f":material/science: {titles[chosen]}", anchor=False)
        st.caption(prose.named(say(lab.look_for)).strip())
        start = _opening(lab)
        extra = {
            n: v
            for n in start
            if n not in lab.controls and (v := state.control_value(_slot(card, lab.id), n)) is not None
        }
        bench.panel(
            bench.Setup(
                slot=_slot(card, lab.id),
                experiment=lab.experiment,
                params=start,
                controls=(*lab.controls, *(n for n, v in extra.items() if v != start[n])),
                figures=lab.figures,
                reference=deck.lab_receipt(card.id, lab.id),
                reference_date=deck.receipts_date(card.id),
                claims=tuple(c for c in card.claims if c.experiment == lab.experiment),
                card=card.id,
            )
        )


def lab_titles(card: Card) -> dict[str, str]:
    """The labs of a card by their experiments' titles; those of one experiment also by the settings they open with."""
    runs_of = {lab.id: RunSpec(lab.experiment, _opening(lab), 0) for lab in card.labs}
    titles = {}
    for lab in card.labs:
        others = [runs_of[o.id] for o in card.labs if o.experiment == lab.experiment and o.id != lab.id]
        settings = runs.label(runs_of[lab.id], others, names=lab.params, most=2)
        titles[lab.id] = " · ".join(filter(None, (say(text.experiment(lab.experiment).title), settings)))
    return titles


def _opening(lab: Lab, also: Mapping[str, object] = MappingProxyType({})) -> dict[str, Any]:
    """All parameters that a lab opens with, ``also`` those of a follow-up; a fraction that the card calls 1 is 1.0."""
    return registry.get(lab.experiment).Params.from_mapping({**lab.params, **also}).as_dict()


# -- receipts ---------------------------------------------------------------------------------------------------------


def _verify_all(card: Card, key: str) -> None:
    st.button(
        t("verify_card", n=len(card.claims)),
        key=f"verify-all-{key}",
        icon=":material/play_arrow:",
        disabled=verifying.busy(),
        on_click=verifying.start,
        args=([(card.id, c) for c in card.claims],),
    )


def _receipts(card: Card) -> None:
    st.divider()
    st.subheader(t("receipts"), anchor="receipts")
    st.caption(t("receipts_help", machine=deck.card_receipts(card.id).machine))
    _verify_all(card, "receipts")
    ledger.receipts([(card.id, claim) for claim in card.claims], key=f"receipts-{card.id}")
