"""Receipts: one claim with what was measured, where and when; on a card and in the ledger."""

from __future__ import annotations

import streamlit as st

from claims.receipts import Receipt
from claims.verify import interval
from content.schema import Card, Claim
from ui import deck, prose, state, text, verifying
from ui.text import t


def verdict(card: Card, claim: Claim) -> str:
    """ "holds", "fails", "stale" or "missing": what stands for a claim now."""
    result = prose.measured(card).get(claim.id)
    if result is None:
        return "missing"
    return {prose.HOLDS: "holds", prose.FAILS: "fails", prose.STALE: "stale"}[prose.ground(card, claim.id, result)]


SIGNS = {
    "holds": (":green[:material/check_circle:]", "green"),
    "fails": (":orange[:material/cancel:]", "orange"),
    "stale": (":gray[:material/history:]", "gray"),
    "missing": (":gray[:material/help:]", "gray"),
}


def bounds(low: float | None, high: float | None) -> str:
    """The accepted interval, as printed on a receipt."""
    if low is not None and high is not None:
        return f"[{text.number(low)}, {text.number(high)}]" if low != high else f"= {text.number(low)}"
    return f"≥ {text.number(low)}" if low is not None else f"≤ {text.number(high or 0.0)}"


def measure(claim: Claim) -> str:
    """What the number of a claim is: its metric, or the ratio of it to what it is compared with."""
    name = text.name(claim.metric)
    return f"{name} · {t('ratio')}" if claim.expect.is_ratio else name


def receipt(card: Card, claim: Claim) -> None:
    """One row: verdict and statement; value, interval, seeds, device, dtype, version, date; a button that renews it."""
    state_of = verdict(card, claim)
    sign, colour = SIGNS[state_of]
    result = prose.measured(card).get(claim.id)
    with st.container(border=True):
        said, shown, renew = st.columns([11, 8, 3], vertical_alignment="center")
        with said.container(gap="xxsmall"):
            st.markdown(f"###### {claim.id}")
            limit = f" :blue-badge[{t('limit')}]" if claim.limit else ""
            st.markdown(f"{sign} {prose.statement(claim).strip()}{limit}")
        with shown.container(gap="xxsmall"):
            accepted = f"{t('accepted')} {bounds(*interval(claim.expect))}"
            if result is None:
                st.caption(accepted)
            else:
                st.markdown(f":{colour}-background[{text.number(result.value)}] :small[{measure(claim)} · {accepted}]")
                st.caption(" · ".join(_circumstances(claim, result)))
            why = _why_not(card, claim, state_of)
            if why:
                st.caption(f":material/info: {why}")
        renew.button(
            t("renew"),
            key=f"renew-{claim.id}",
            icon=":material/play_arrow:",
            disabled=verifying.busy(),
            help=f"{claim.experiment} · {claim.metric}",
            on_click=verifying.start,
            args=([(card.id, claim)],),
        )


def _circumstances(claim: Claim, result: object) -> list[str]:
    own = state.reader().verdicts.get(claim.id)
    seeds = getattr(result, "seeds", ())
    parts = [t("seeds_n", n=len(seeds)) if len(seeds) > 1 else t("seed_one")]
    parts += [f"{result.device} {result.dtype}", f"torch {result.torch}"]  # type: ignore[attr-defined]
    if own is not None:
        parts.append(t("just_now"))
    elif isinstance(result, Receipt):
        parts.append(result.date)
    return parts


def _why_not(card: Card, claim: Claim, state_of: str) -> str:
    if state_of == "missing":
        return t("why_missing")
    if state_of == "stale":
        return t(
            f"why_stale_{deck.staleness(card.id)[claim.id]}"
        )  # t("why_stale_claim") t("why_stale_code") t("why_stale_missing")
    if state_of == "fails":
        failed = prose.measured(card)[claim.id].failed_seeds
        return t("why_fails", seeds=", ".join(map(str, failed)))
    return ""
