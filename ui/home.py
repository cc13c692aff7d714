"""The Home page: what this is, where to begin, and what is in the deck."""

from __future__ import annotations

import streamlit as st

from content.schema import Card
from ui import deck, frame, ledger
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
    st.subheader(t("deck_map"), anchor=False)
    if not held.cards:
        st.info(t("no_cards"), icon=":material/search_off:")
    _map(list(held.cards.values()))
    st.subheader(t("what_else"), anchor=False)
    left, right = st.columns(2)
    with left, st.container(border=True):
        frame.link("lab", t("page_lab"), icon=":material/science:")
        st.caption(t("home_lab"))
    with right, st.container(border=True):
        frame.link("claims", t("page_claims"), icon=":material/fact_check:")
        st.caption(t("home_claims"))


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
