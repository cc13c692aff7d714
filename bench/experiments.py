"""Each experiment with its default parameters, against the tensor operations that it can't do without."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench import bare
from bench.measure import Row
from engine import registry
from engine.base import make_run

AIM = 1.2  # what checking, cutting into chunks and tables may add


def rows() -> Iterator[Row]:
    import torch
    from torch.utils.benchmark import Timer

    torch.set_num_threads(1)
    ratios = []
    for name in registry.names():
        experiment = registry.get(name)
        params = experiment.Params()
        necessary = getattr(bare, name, None)
        if experiment.trains:  # it runs for as long as its budget says
            yield Row("experiment", name, experiment.budget_s, "s", "trains: the budget of a run")
            continue
        if necessary is None:
            raise LookupError(
                f"bench/bare.py has no function {name}: add the bare tensor operations of that experiment"
            )
        scope = {"run": experiment.run, "make_run": make_run, "p": params, "necessary": necessary}
        # alternately, so that a busy moment falls on both
        whole, least = [], []
        for _ in range(5):
            whole.append(Timer("run(p, make_run(0))", globals=scope).blocked_autorange(min_run_time=0.2).median)
            least.append(Timer("necessary(p, make_run(0))", globals=scope).blocked_autorange(min_run_time=0.2).median)
        ours, floor = sorted(whole)[2], sorted(least)[2]
        note = f"bare {floor * 1000:.2f} ms, ratio {ours / floor:.2f}"
        ratios.append(ours / floor)
        yield Row("experiment", name, ours * 1000, "ms", note, aim=experiment.budget_s * 1000)
    yield Row("experiment", "÷ bare, median of all", statistics.median(ratios), "×", aim=AIM)
