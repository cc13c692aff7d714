"""Does a claim hold? Run its experiment on every seed and judge what comes out by its expectation.

The value of a claim with ``versus`` is a ratio: the metric with ``params`` ÷ the same metric with the one change, or ÷
another metric of the same run. Every seed must hold; the value shown is the median over the seeds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from content.schema import Claim, Expect
from engine import registry, runner


@dataclass(frozen=True)
class Verdict:
    """What was measured for one claim, and whether it is what the claim expects.

    ``value`` is the median of ``values``, one for each of ``seeds``. A value that does not exist (a ratio to 0, a run
    that diverged) is nan and holds in no interval. ``low`` and ``high`` bound what is accepted; None is no bound.
    """

    claim: str
    card: str
    value: float
    values: tuple[float, ...]
    low: float | None
    high: float | None
    holds: bool
    failed_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    device: str
    dtype: str
    torch: str
    seconds: float


class Unfinished(Exception):
    """A run of a claim ended before its work was done, so that its numbers are not those of the claim."""

    def __init__(self, claim: str, experiment: str, done: float) -> None:
        super().__init__(f"{claim}: the run of {experiment} ended at {done:.0%} of its work; give it a longer budget")
        self.claim, self.experiment, self.done = claim, experiment, done

    def __reduce__(self) -> tuple[object, ...]:  # exceptions cross process borders too
        return Unfinished, (self.claim, self.experiment, self.done)


def verify(
    claim: Claim,
    card: str,
    *,
    seeds: Sequence[int] | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    on_progress: Callable[[float], None] | None = None,
    check_stop: Callable[[], None] | None = None,
    cached: bool = False,
) -> Verdict:
    """Measure a claim on its own seeds, or on those given; one in which nothing is random runs once, with seed 0.

    Results that are already known are measured again unless ``cached``: a verdict is about this device, now.

    Raises: what ``runner.run`` raises; KeyError for a metric that the experiment lacks; Unfinished.
    """
    import torch

    registry.get(claim.experiment).metric(claim.metric)
    used = tuple((claim.seeds if seeds is None else seeds) if claim.seeds else ()) or (0,)
    settings = _settings(claim)
    started = time.monotonic()
    values = []
    for position, seed in enumerate(used):
        results = []
        for number, params in enumerate(settings):
            before = position * len(settings) + number

            def report(fraction: float, partial: object, before: int = before) -> None:
                if on_progress:
                    on_progress((before + fraction) / (len(used) * len(settings)))

            report(0.0, None)
            result = runner.run(
                claim.experiment,
                params,
                seed=seed,
                device=device,
                dtype=dtype,
                on_progress=report,
                check_stop=check_stop,
                cached=cached,
            )
            if result.done < 1:
                raise Unfinished(claim.id, claim.experiment, result.done)
            results.append(result.metrics)
        values.append(_value(claim, results))
    if on_progress:
        on_progress(1.0)
    low, high = interval(claim.expect)
    failed = tuple(seed for seed, value in zip(used, values, strict=True) if not holds(claim.expect, value))
    return Verdict(
        claim=claim.id,
        card=card,
        value=math.nan if any(map(math.isnan, values)) else statistics.median(values),
        values=tuple(values),
        low=low,
        high=high,
        holds=not failed,
        failed_seeds=failed,
        seeds=used,
        device=device,
        dtype=dtype,
        torch=str(torch.__version__),
        seconds=time.monotonic() - started,
    )


def interval(expect: Expect) -> tuple[float | None, float | None]:
    """What is accepted, as (low, high) with both ends included; None is no bound.

    For ``greater`` and ``less`` the bound is a ratio of 1, which itself is not accepted.

    Raises: ValueError for a tuple, since a metric is one number.
    """
    kind, wanted = expect.kind, getattr(expect, expect.kind)
    if kind == "between":
        return float(wanted[0]), float(wanted[1])
    if kind == "greater":
        return 1.0, None
    if kind == "less":
        return None, 1.0
    if isinstance(wanted, tuple):
        raise ValueError(f"equals: got the tuple {wanted}; a metric is one number")
    wanted = float(wanted)
    if kind in ("at_least", "ratio_at_least"):
        return wanted, None
    if kind in ("at_most", "ratio_at_most"):
        return None, wanted
    if kind in ("equals", "ratio_equals"):
        return wanted, wanted
    tolerance = expect.abs_tol if expect.abs_tol is not None else abs(wanted) * (expect.rel_tol or 0.0)
    return wanted - tolerance, wanted + tolerance


def holds(expect: Expect, value: float) -> bool:
    """Whether one measured value is accepted; nan and infinity never are."""
    low, high = interval(expect)
    if not math.isfinite(value) or (expect.kind in ("greater", "less") and value == 1):
        return False
    return (low is None or low <= value) and (high is None or value <= high)


def under_fails_when(claim: Claim) -> Claim | None:
    """The claim with its ``fails_when`` applied to its params: it must hold on no seed. None without such a change."""
    if claim.fails_when is None:
        return None
    return claim.model_copy(update={"params": {**claim.params, **claim.fails_when}})


def _settings(claim: Claim) -> list[dict[str, object]]:
    """The parameters of the one or two runs that a value takes."""
    if claim.versus is None or "metric" in claim.versus:
        return [dict(claim.params)]
    return [dict(claim.params), {**claim.params, **claim.versus}]


def _value(claim: Claim, results: list[dict[str, float]]) -> float:
    """The metric, or its ratio to what it is compared with.

    There is no ratio to 0; nor is one of which less or greater could be read off when the divisor is negative.
    """
    value = results[0][claim.metric]
    if claim.versus is None:
        return value
    metric = str(claim.versus.get("metric", claim.metric))
    divisor = results[-1][metric]
    if divisor == 0 or (divisor < 0 and claim.expect.kind in ("greater", "less")):
        return math.nan
    return value / divisor
