"""Claims per second: the whole deck but for what trains, once, in one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.measure import Row, p95
from claims.verify import verify
from content.loader import load_deck
from engine import registry


def rows() -> Iterator[Row]:
    import torch

    torch.set_num_threads(1)
    todo = [
        (claim, owner)
        for owner, claims in load_deck().claims.items()
        for claim in claims
        if not registry.get(claim.experiment).trains
    ]
    verify(*todo[0])  # what is imported once is not the claims' cost
    seconds = []
    for claim, card in todo:
        began = time.perf_counter()
        verify(claim, card)
        seconds.append(time.perf_counter() - began)
    yield Row("claims", "verified a second", len(todo) / sum(seconds), "1/s", f"{len(todo)} claims, all their seeds")
    yield Row("claims", "dearest 5 %, from", 1000 * p95(seconds), "ms", f"slowest {1000 * max(seconds):.0f} ms")
