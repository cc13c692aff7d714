"""A pretended experiment whose metrics are given, and claims about it: what the tests of claims share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from content.schema import Claim
from engine import registry, runner
from engine.base import BaseParams, Metric, Plot, Result, number


@dataclasses.dataclass(frozen=True)
class Params(BaseParams):
    size: int = number(1, low=-1000, high=1000)
    other: int = number(0, low=0, high=10)


def install(
    monkeypatch, values: Callable[[Params, int], dict[str, float]], *, done: float = 1.0, trains: bool = False
) -> list:
    """Let the registry know "pretended" with ``values(params, seed)`` as metrics; returns its calls: (params, seed)."""
    calls = []

    def run(params, run):
        seed = run.generator.initial_seed()
        calls.append((params.as_dict(), seed))
        run.progress(0.5)
        return Result(values(params, seed), done=done)

    metrics = (Metric("value"), Metric("second"))
    plots = (Plot("curve", table="curve", x="x", y="y"),)
    made = registry.Experiment("pretended", Params, metrics, plots, 0.1, trains, lambda params: 1, run, registry.FOLDER)
    get = registry.get
    monkeypatch.setattr(registry, "get", lambda name: made if name == "pretended" else get(name))
    monkeypatch.setattr(runner, "code_hash", lambda name: f"hash of {name}")
    runner.cache.clear()  # every pretended experiment has the same hash
    return calls


def claim(expect: dict[str, object], **fields: object) -> Claim:
    """A claim about it; what is not given is the least that the schema asks for."""
    return Claim.model_validate(
        {
            "id": "a-claim",
            "statement": {"en": "It is so.", "zh": "如此。"},
            "experiment": "pretended",
            "metric": "value",
            "seeds": (0, 1, 2),
            "because": "so",
            "expect": expect,
            **fields,
        }
    )
