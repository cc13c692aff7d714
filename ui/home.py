"""The Home page: what this is, where to begin, and what is in the deck."""

from __future__ import annotations

import streamlit as st

from content.schema import Card
from study import desk, schedule
from study.events import now
from ui import deck, frame, learner, ledger, quiz
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
            st.markdown(say(card.intent).strip().split("{{")[0])
            if st.button(t("open_card"), key="open_flagship", type="primary", icon=":material/arrow_forward:"):
                frame.go("cards", card=card.id)
    # the first page of a process does not wait for the log
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
    progress, at, zone = learner.progress(), now(), learner.zone()
    if not progress.reviews:
        return
    today = desk.today(quiz.known(), progress, at, zone)
    interview = desk.interview_date(progress)
    days = (interview - schedule.day(at, zone)).days if interview else -1
    with st.container(border=True, key="today"):
        st.caption(t("home_today"))
        st.markdown(t("home_due", due=len(today.due), new=len(today.new)))
        if days >= 0:
            st.markdown(t("home_days", days=days))
        if st.button(t("home_go_on"), key="go-on", icon=":material/play_arrow:"):
            frame.go("quiz", mode="plan" if days >= 0 else "review")


def _map(cards: list[Card]) -> None:
    topics = deck.deck().topics
    for topic in topics:
        of_topic = [c for c in cards if c.topic == topic]
        if not of_topic:
            continue
        with st.container(border=True):
            st.markdown(f"**{say(topics[topic].title)}**")
            for card in of_topic:
                st.markdown(say(card.question).strip())
                counts = ledger.counts([(card.id, claim) for claim in card.claims])
                st.caption(f"{ledger.standing(counts)} · {t('minutes', n=card.minutes)}")
                frame.link("cards", t("open_card"), icon=":material/arrow_forward:", card=card.id)
