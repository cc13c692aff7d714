"""Measuring claims on the reader's device: start, show how far, take what came, also after Stop."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from claims.verify import Verdict, verify
from content.schema import Claim
from engine.runner import Handle
from ui import engine, learner, state, text
from ui.text import t

PURPOSE = "claims"


def start(claims: Iterable[tuple[str, Claim]], mistake: str | None = None) -> None:
    """Verify claims, given with the id of their card, as one job. Made for callbacks."""
    todo = tuple(claims)
    if mistake:
        state.reader().refuted.add(mistake)

    def work(handle: Handle) -> tuple[Verdict, ...]:
        done: list[Verdict] = []
        for i, (card, claim) in enumerate(todo):
            handle.progress(i / len(todo), tuple(done))
            done.append(
                verify(
                    claim,
                    card,
                    on_progress=lambda fraction, i=i: handle.progress((i + fraction) / len(todo), tuple(done)),
                    check_stop=handle.check_stop,
                )
            )
        return tuple(done)

    engine.submit(PURPOSE, work)


def collect() -> None:
    """Put what a finished verification measured into this visit's receipts; say how it went."""
    job = engine.take_finished(PURPOSE)
    if job is None:
        return
    verdicts: tuple[Verdict, ...] = (job.result if job.state == "done" else job.partial) or ()
    learner.remember(verdicts)
    if job.state == "failed":
        st.error(text.error(job.error), icon=":material/error:")
        return
    held = sum(v.holds for v in verdicts)
    if job.state == "stopped":
        st.toast(t("verify_stopped", done=len(verdicts)), icon=":material/stop:")
    else:
        one = t("claim_holds") if held else t("claim_fails")
        done = one if len(verdicts) == 1 else t("verify_done", held=held, total=len(verdicts))
        st.toast(done, icon=":material/fact_check:")


def busy() -> bool:
    """Whether this reader's claims are being measured now."""
    return engine.active_job(PURPOSE) is not None
