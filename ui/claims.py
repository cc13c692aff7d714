"""The Claims page: the ledger of all claims with their receipts."""

from __future__ import annotations

import dataclasses
import json

import streamlit as st

from content.schema import Claim
from ui import deck, ledger, prose, state, verifying, widgets
from ui.text import say, t

PER_PAGE = 100


def draw() -> None:
    """Filters, *Verify all*, the receipts, and a report to take away."""
    everything = [(card, claim) for card, claims in deck.deck().claims.items() for claim in claims]
    st.header(t("page_claims"), anchor=False)
    st.caption(t("claims_help"))
    if not everything:
        st.info(t("no_claims"), icon=":material/search_off:")
        return
    found = _filtered(everything)
    counts = ledger.counts(found)
    st.markdown("　".join(f"{ledger.SIGNS[v]} {t('verdict_' + v)} {n}" for v, n in counts.items() if n))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            t("verify_all", n=len(found)),
            type="primary",
            icon=":material/play_arrow:",
            disabled=verifying.busy() or not found,
            on_click=verifying.start,
            args=(found,),
        )
        st.download_button(
            t("report"),
            data=_report(everything),
            file_name="claims.json",
            mime="application/json",
            icon=":material/download:",
            on_click="ignore",
        )
    if not found:
        st.info(t("no_claim_found"), icon=":material/search_off:")
    pages = max(1, -(-len(found) // PER_PAGE))
    page = st.pagination(pages, key="claims_page") if pages > 1 else 1
    ledger.receipts(found[(page - 1) * PER_PAGE : page * PER_PAGE], key="ledger")


def _filtered(everything: list[tuple[str, Claim]]) -> list[tuple[str, Claim]]:
    cards = {card: deck.deck().cards[card] for card, _ in everything if card in deck.deck().cards}
    query = (
        st.text_input(
            t("search"), key="claims_search", placeholder=t("claims_search_hint"), icon=":material/search:", live=True
        )
        or ""
    )
    with st.container(horizontal=True):
        verdict = st.pills(
            t("verdict"), list(ledger.SIGNS), key="claims_verdict", format_func=lambda v: t("verdict_" + v), wrap=True
        )
        # t("verdict_holds") t("verdict_fails") t("verdict_stale") t("verdict_missing")
        experiments = sorted({claim.experiment for _, claim in everything})
        experiment = widgets.listed(
            t("experiment"), experiments, "claims_experiment", _title, start=None, placeholder=t("any")
        )
        card_id = None
        if len(cards) > 1:
            card_id = widgets.listed(
                t("card"),
                list(cards),
                "claims_card",
                lambda c: say(cards[c].question).strip(),
                start=None,
                placeholder=t("any"),
            )
    words = query.lower().split()

    def matches(card: str, claim: Claim) -> bool:
        prose_of = f"{claim.id} {claim.statement.en} {claim.statement.zh}".lower()
        return (
            all(w in prose_of for w in words)
            and (verdict is None or ledger.verdict(card, claim) == verdict)
            and (experiment is None or claim.experiment == experiment)
            and (card_id is None or card == card_id)
        )

    return [pair for pair in everything if matches(*pair)]


def _title(experiment: str) -> str:
    return say(deck.deck().strings.experiments[experiment].title)


def _report(everything: list[tuple[str, Claim]]) -> str:
    """What stands for each claim now, with where it was measured."""
    own = state.reader().verdicts
    rows = []
    for card, claim in everything:
        result = prose.measured(card).get(claim.id)
        row: dict[str, object] = {
            "card": card,
            "claim": claim.id,
            "verdict": ledger.verdict(card, claim),
            "here": claim.id in own,
        }
        row["statement"] = claim.statement.model_dump()
        if result is not None:
            row["receipt"] = dataclasses.asdict(result)
        rows.append(row)
    return json.dumps(rows, ensure_ascii=False, indent=1)
