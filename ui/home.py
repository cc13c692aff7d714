"""The Home page: what this is, where to begin, and what is in the deck."""

from __future__ import annotations

import streamlit as st

from content.schema import Card
from study import desk, schedule, stats
from study.events import now
from study.progress import Progress
from study.stats import Mastery
from ui import deck, frame, learner, ledger, quiz, state
from ui.boundary import fragment
from ui.text import say, t

FLAGSHIP = "sdpa-scale-sqrt-dk"


def draw() -> None:
    """A first visit is one click from the flagship card."""
    held = deck.deck()
    st.header(t("app_title"), anchor=False)
    st.markdown(f"#### {t('home_promise')}")
    st.markdown(t("home_how"))
    if FLAGSHIP in held.cards:
        with st.container(border=True, key="flagship"):
            card = held.cards[FLAGSHIP]
            st.caption(t("start_here"))
            st.subheader(say(card.question).strip(), anchor=False)
            st.markdown(f"**{t('intent')}**　{say(card.intent).strip().split('{{')[0]}")
            if st.button(t("open_card"), key="open_flagship", type="primary", icon=":material/arrow_forward:"):
                frame.go("cards", card=card.id)
    # the first page of a process does not wait for the log
    state.reader().home_is_whole = learner.is_at_hand()
    fragment(_today, run_every=None if learner.is_at_hand() else 1.0)()
    st.subheader(t("deck_map"), anchor=False)
    if not held.cards:
        st.info(t("no_cards"), icon=":material/search_off:")
    _map(list(held.cards.values()))
    st.subheader(t("what_else"), anchor=False)
    quizzed, followed = st.columns(2)
    with quizzed, st.container(border=True):
        frame.link("quiz", t("page_quiz"), icon=":material/quiz:")
        st.caption(t("home_quiz"))
    with followed, st.container(border=True):
        frame.link("progress", t("page_progress"), icon=":material/monitoring:")
        st.caption(t("home_progress"))
    left, right = st.columns(2)
    with left, st.container(border=True):
        frame.link("lab", t("page_lab"), icon=":material/science:")
        st.caption(t("home_lab"))
    with right, st.container(border=True):
        frame.link("claims", t("page_claims"), icon=":material/fact_check:")
        st.caption(t("home_claims"))


def _today() -> None:
    """For who has begun: what is due, the days left, and what waits for an answer."""
    if not learner.is_at_hand():
        return
    if not state.reader().home_is_whole:  # the map below shows what is remembered, too
        state.reader().home_is_whole = True
        st.rerun()
    progress, at, zone = learner.progress(), now(), learner.zone()
    if not progress.reviews:
        return
    interview, today = desk.interview_date(progress), quiz.day_of_plan()
    with st.container(border=True, key="today"):
        st.caption(t("home_today"))
        if interview is not None and today is not None:
            st.markdown(t("home_plan", n=len(today.left), days=(interview - schedule.day(at, zone)).days))
        else:
            due = desk.today(quiz.known(), progress, at, zone)
            st.markdown(t("home_due", due=len(due.due), new=len(due.new)))
        _next_card(progress)
        if st.button(t("home_go_on"), key="go-on", icon=":material/play_arrow:"):
            frame.go("quiz", mode="plan" if today else "review")


def _mastery() -> dict[str, Mastery]:
    """What would be recalled now, by topic; of topics of which something was asked."""
    if not learner.is_at_hand() or not learner.progress().past:
        return {}
    topics = {name: card.topic for name, card in deck.deck().cards.items()}
    rows = stats.mastery(quiz.known(), learner.progress(), now(), topics)
    return {row.name: row for row in rows if row.met}


def _next_card(progress: Progress) -> None:
    """The first card of the chosen track of which nothing was asked yet."""
    held = deck.deck()
    track = held.tracks.get(str(progress.setting("track")))
    begun = {desk.card_of(item) for item in progress.past}
    new = next((c for c in track.cards if c in held.cards and c not in begun), None) if track else None
    if new:
        label = t("home_next", question=say(held.cards[new].question).strip())
        frame.link("cards", label, icon=":material/style:", card=new)


def _map(cards: list[Card]) -> None:
    topics = deck.deck().topics
    mastery = _mastery()
    for topic in topics:
        of_topic = [c for c in cards if c.topic == topic]
        if not of_topic:
            continue
        with st.container(border=True):
            st.markdown(f"**{say(topics[topic].title)}**")
            if topic in mastery:
                row = mastery[topic]
                st.progress(row.recall, t("home_mastery", recall=f"{row.recall:.0%}", met=row.met, of=row.items))
            for card in of_topic:
                st.markdown(say(card.question).strip())
                counts = ledger.counts([(card.id, claim) for claim in card.claims])
                st.caption(f"{ledger.standing(counts)} · {t('minutes', n=card.minutes)}")
                frame.link("cards", t("open_card"), icon=":material/arrow_forward:", card=card.id)
