"""Receipts: claims with what was measured, where and when; on a card and in the ledger.

A claim comes with whose it is: the id of its card, or ``claims/<experiment>`` while it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import streamlit as st
from streamlit.components import v2

from claims.bind import format_number
from claims.receipts import Receipt
from claims.verify import Verdict, interval
from content.schema import Claim
from ui import deck, prose, state, text, verifying
from ui.text import t

VERDICTS = {prose.HOLDS: "holds", prose.FAILS: "fails", prose.STALE: "stale"}
SIGNS = {
    "holds": ":green[:material/check_circle:]",
    "fails": ":orange[:material/cancel:]",
    "stale": ":gray[:material/history:]",
    "missing": ":gray[:material/help:]",
}
HERE = Path(__file__).parent

# One element for the whole list, see receipts.js. Not isolated: a link to a receipt must find its id on the page.
_list = v2.component(
    "receipts",
    html='<ol class="receipts"></ol>',
    css=(HERE / "receipts.css").read_text("utf-8"),
    js=(HERE / "receipts.js").read_text("utf-8"),
    isolate_styles=False,
)


def verdict(card: str, claim: Claim) -> str:
    """ "holds", "fails", "stale" or "missing": what stands for a claim now."""
    result = prose.measured(card).get(claim.id)
    return "missing" if result is None else VERDICTS[prose.ground(card, claim.id, result)]


def counts(claims: Sequence[tuple[str, Claim]]) -> dict[str, int]:
    """How many of the claims have each verdict."""
    found = [verdict(card, claim) for card, claim in claims]
    return {name: found.count(name) for name in SIGNS}


def standing(found: Mapping[str, int]) -> str:
    """The counts in words: what holds, and what does not or waits to be measured again."""
    words = [t("claims_hold", held=found["holds"], total=sum(found.values()))]
    if found["fails"]:
        words.append(t("claims_fail", n=found["fails"]))
    if found["stale"] + found["missing"]:
        words.append(t("claims_to_renew", n=found["stale"] + found["missing"]))
    return " · ".join(words)


def bounds(low: float | None, high: float | None) -> str:
    """The accepted interval, as printed on a receipt."""
    if low is not None and high is not None:
        if low == high:
            return f"= {_exactly(low)}"
        return "[{}, {}]".format(*_apart(low, high))
    return f"≥ {text.number(low)}" if low is not None else f"≤ {text.number(high or 0.0)}"


def _exactly(value: float) -> str:
    """A number that another has to equal: a whole one with all its digits, as long as float64 tells them."""
    if value == int(value) and abs(value) < 2**53:
        return format_number(value, ",.0f", state.language())
    return text.number(value)


def _apart(low: float, high: float) -> tuple[str, str]:
    """Both ends of an interval with digits enough that rounding moves neither by a tenth of its width."""
    digits = 3
    while digits < 12 and any(abs(float(f"{end:.{digits}g}") - end) > (high - low) / 10 for end in (low, high)):
        digits += 1
    first, last = (format_number(end, f".{digits}g", state.language()) for end in (low, high))
    return first, last


def _value(claim: Claim, value: float) -> str:
    low, high = interval(claim.expect)
    return _exactly(value) if low == high else text.number(value)


def measure(claim: Claim, *, plain: bool = False) -> str:
    """What the number of a claim is: its metric, or the ratio of it to what it is compared with."""
    name = text.name(claim.metric, plain=plain)
    return f"{name} · {t('ratio')}" if claim.expect.is_ratio else name


def receipts(claims: Sequence[tuple[str, Claim]], key: str) -> None:
    """The receipts of these claims, always drawn, each with a button that measures it here."""
    labels = {name: t("verdict_" + name) for name in SIGNS} | {"renew": t("renew"), "limit": t("limit")}
    answer = _list(
        data={
            "receipts": [_row(card, claim) for card, claim in claims],
            "labels": labels,
            "busy": verifying.busy(),
        },
        key=key,
        on_renew_change=lambda: None,
    )
    wanted = [pair for pair in claims if pair[1].id == answer.renew]
    if wanted and not verifying.busy():
        verifying.start(wanted)
        st.rerun()


def _row(card: str, claim: Claim) -> dict[str, object]:
    result = prose.measured(card).get(claim.id)
    state_of = verdict(card, claim)
    return {
        "id": claim.id,
        "verdict": state_of,
        "statement": prose.plain(claim.statement.get(state.language())),
        "limit": claim.limit,
        "value": "" if result is None else _value(claim, result.value),
        "about": f"{measure(claim, plain=True)} · {t('accepted')} {bounds(*interval(claim.expect))}",
        "where": "" if result is None else " · ".join(_circumstances(claim, result)),
        "why": _why_not(card, claim, state_of),
    }


def _circumstances(claim: Claim, result: Verdict | Receipt) -> list[str]:
    parts = [t("seeds_n", n=len(result.seeds)) if len(result.seeds) > 1 else t("seed_one")]
    if isinstance(result, Receipt) and result.tried > len(result.seeds):
        parts.append(t("tried_n", n=result.tried))
    parts += [f"{result.device} {result.dtype}", f"torch {result.torch}"]
    if claim.id in state.reader().verdicts:
        parts.append(t("just_now"))
    elif isinstance(result, Receipt):
        parts.append(result.date)
    return parts


def _why_not(card: str, claim: Claim, state_of: str) -> str:
    if state_of == "missing":
        return t("why_missing")
    if state_of == "stale":
        # t("why_stale_claim") t("why_stale_code") t("why_stale_missing")
        return t(f"why_stale_{deck.staleness(card)[claim.id]}")
    if state_of == "fails":
        failed = prose.measured(card)[claim.id].failed_seeds
        return t("why_fails", seeds=", ".join(map(str, failed)))
    return ""
