"""A sweep as the Lab runs it, against the notebook way: loops over values, seeds and rows, one numpy call at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.measure import Row
from engine import runner

EXPERIMENT = "softmax_saturation"
VALUES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
SEEDS = (0, 1, 2, 3, 4)
RULES = {"none": 0.0, "inv_sqrt_d_k": -0.5, "inv_d_k": -1.0}  # the power of d_k
PARAMS = {"kv_len": 64, "scale": "none", "batch": 4, "q_len": 64}
AIM = 1 / 3  # of the notebook's time
REPEATS = 3


def notebook_way() -> dict[tuple[int, int], dict[str, Any]]:
    """What the Lab measures at each d_k and seed: of all three rules norms and sorted weights, of one the rest too."""
    found = {}
    for d_k in VALUES:
        for seed in SEEDS:
            draw = np.random.default_rng(seed)
            norms: dict[str, list[float]] = {rule: [] for rule in RULES}
            by_rank: dict[str, list[np.ndarray]] = {rule: [] for rule in RULES}
            largest, entropies, spreads = [], [], []
            for _ in range(PARAMS["batch"]):
                q = draw.standard_normal((PARAMS["q_len"], d_k))
                k = draw.standard_normal((PARAMS["kv_len"], d_k))
                for query in q:
                    qk = k @ query
                    for rule, power in RULES.items():
                        logits = qk * d_k**power
                        weights = np.exp(logits - logits.max())
                        weights /= weights.sum()
                        norms[rule].append(float(np.linalg.norm(np.diag(weights) - np.outer(weights, weights))))
                        by_rank[rule].append(np.sort(weights)[::-1])
                        if rule == PARAMS["scale"]:
                            largest.append(weights.max())
                            entropies.append(-(weights * np.log(weights.clip(1e-300))).sum())
                            spreads.append(logits.std())
            found[d_k, seed] = {
                "weight_max": (np.mean(largest), np.median(largest)),
                "norm": {rule: np.quantile(values, [0.1, 0.5, 0.9]) for rule, values in norms.items()},
                "by_rank": {rule: np.mean(rows, axis=0) for rule, rows in by_rank.items()},
                "entropy": np.mean(entropies),
                "spread": np.mean(spreads),
            }
    return found


def labs_way() -> runner.Sweep:
    """The same by the runner, nothing known yet."""
    runner.cache.clear()
    return runner.sweep(EXPERIMENT, PARAMS, "d_k", VALUES, SEEDS)


def rows() -> Iterator[Row]:
    def timed(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    labs_way()  # first uses of torch's operations are dearer
    ours, theirs = [], []
    for _ in range(REPEATS):  # alternately, so that a busy moment falls on both
        ours.append(timed(labs_way))
        theirs.append(timed(notebook_way))
    lab, notebook = sorted(ours)[REPEATS // 2], sorted(theirs)[REPEATS // 2]
    what = f"{len(VALUES)} d_k × {len(SEEDS)} seeds"
    yield Row("sweep", f"{what}, the Lab", lab * 1000, "ms")
    yield Row("sweep", f"{what}, loops over numpy", notebook * 1000, "ms")
    yield Row("sweep", "Lab ÷ loops", lab / notebook, "×", aim=AIM)
