"""A reader's own receipts in their log: a verdict becomes an event, and an event a verdict again while it is still
about the claim and the code as they stand."""

from __future__ import annotations

import math
from datetime import datetime

from claims.receipts import claim_hash
from claims.verify import Verdict, interval
from content.schema import Claim
from engine import registry
from engine.fingerprint import code_hash
from study.events import Measured


def event_of(verdict: Verdict, claim: Claim, at: datetime) -> Measured:
    """The event that keeps a verdict."""
    return Measured(
        at=at,
        card=verdict.card,
        claim=verdict.claim,
        claim_hash=claim_hash(claim),
        code_hash=code_hash(claim.experiment),
        values=tuple(value if math.isfinite(value) else None for value in verdict.values),
        value=verdict.value if math.isfinite(verdict.value) else None,
        holds=verdict.holds,
        seeds=verdict.seeds,
        failed_seeds=verdict.failed_seeds,
        device=verdict.device,
        dtype=verdict.dtype,
        torch=verdict.torch,
        seconds=verdict.seconds,
    )


def verdict_of(event: Measured, claim: Claim) -> Verdict | None:
    """The verdict that an event keeps; None when the claim or the code behind it has changed since."""
    try:
        now = code_hash(claim.experiment)
    except registry.UnknownExperiment:
        return None
    if (event.claim_hash, event.code_hash) != (claim_hash(claim), now):
        return None
    low, high = interval(claim.expect)
    return Verdict(
        claim=claim.id,
        card=event.card,
        value=math.nan if event.value is None else event.value,
        values=tuple(math.nan if value is None else value for value in event.values),
        low=low,
        high=high,
        holds=event.holds,
        failed_seeds=event.failed_seeds,
        seeds=event.seeds,
        device=event.device,
        dtype=event.dtype,
        torch=event.torch,
        seconds=event.seconds,
    )
