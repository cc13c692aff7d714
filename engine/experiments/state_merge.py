r"""The keys of a row dealt out to workers, each with its own softmax, and what the partial results are merged to.

``states``        (m, l, o) merged as states
``means_by_lse``  normalized outputs, weighted by the exponentials of their log-sum-exps
``plain_mean``    normalized outputs, averaged: as a rule right only where all log-sum-exps are the same
``lse_in_base_2`` the log-sum-exps are given to base 2, the merge takes them for natural ones
``sum_only``      the sums l and o are added although their maxima differ

An empty worker has no key of its own: its state is (-inf, 0, 0), its log-sum-exp -inf. With ``guarded`` off the merge
subtracts -inf from -inf where both sides are empty.

The reference is the softmax of whole rows; all in float64 on the CPU, so what remains of a right merge is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, flag, number
from engine.tiled import State, absorb, empty_state, finish, merge, merge_means

if TYPE_CHECKING:
    import torch

MERGES = ("states", "means_by_lse", "plain_mean", "lse_in_base_2", "sum_only")
TREES = ("left_to_right", "right_to_left", "pairwise", "shuffled")
MAX_NUMBERS = 2**19
ERROR_FLOOR = 1e-17


@dataclass(frozen=True)
class Params(BaseParams):
    merged_by: str = choice(*MERGES)
    n_workers: int = number(8, low=1, high=64, log2=True)
    merge_tree: str = choice(*TREES)
    logits_std: float = number(2.0, low=0, high=64, step=0.5)
    empty_workers: int = number(0, low=0, high=64)
    guarded: bool = flag(True)
    kv_len: int = number(1024, low=64, high=8192, log2=True)
    n_rows: int = number(32, low=1, high=256, log2=True)
    d_v: int = number(16, low=1, high=128, log2=True)

    def unread(self) -> frozenset[str]:
        if self.merged_by != "states":  # the others are sums over all workers at once
            return frozenset({"merge_tree", "guarded"})
        return frozenset({"guarded"} if self.empty_workers < 2 else ())  # only two empty sides make a NaN

    def rules(self) -> Iterator[Problem]:
        if self.kv_len * max(self.n_rows, self.d_v) > MAX_NUMBERS:
            values = {"limit": MAX_NUMBERS}
            yield Problem("rule", "kv_len", self.kv_len, rule="too_many_rows_or_values", values=values)


METRICS = (
    Metric("output_error"),
    Metric("lse_error"),
    Metric("undefined_rows"),
    Metric("lse_std"),
    Metric("tree_spread"),
    Metric("largest_worker_weight"),
)
PLOTS = (
    Plot("shares", table="shares", mark="bar", x="worker", y="worker_weight", by="weight_rule"),
    Plot("merges", table="merges", mark="bar", x="merged_by", y="output_error", y_scale="log10"),
)
BUDGET_S = 0.01


def memory_bytes(params: Params) -> int:
    """Logits and values as drawn and in float64, the weights of whole rows and of workers, and all states."""
    numbers = params.kv_len * (params.n_rows + params.d_v)
    states = (params.n_workers + params.empty_workers) * params.n_rows * (params.d_v + 2)
    return 8 * (6 * numbers + 12 * states) + 2**18


def run(params: Params, run: Run) -> Result:
    """Every way of merging the same partial results; the metrics are those of the chosen one.

    ``output_error``: distance of a row's output from the reference by the reference's length, on average; a row with
    NaN counts as wholly wrong (1). ``lse_error``: the largest, of those that are finite; the plain mean has no
    log-sum-exp of its own and is given the mean of theirs. ``lse_std``: how far the log-sum-exps of the workers with
    keys spread, within a row. ``tree_spread``: the largest difference of an output between any tree and
    the one from left to right, where both are finite, by the mean size of an output.
    ``largest_worker_weight``: what the worker with most weight holds of it, on average over rows.

    Shapes: logits (n_rows, kv_len), v (kv_len, d_v).
    """
    import torch

    logits = (params.logits_std * run.randn(params.n_rows, params.kv_len)).cpu().double()
    v = run.randn(params.kv_len, params.d_v).cpu().double()
    shuffled = torch.randperm(params.n_workers + params.empty_workers, generator=run.generator).tolist()
    reference, reference_lse = softmax(logits) @ v, logits.logsumexp(dim=-1)
    run.progress(0.2)

    empty = empty_state(logits, v)
    states = [empty] * params.empty_workers
    for keys in torch.arange(params.kv_len).tensor_split(params.n_workers):
        states.append(absorb(empty, logits[:, keys], v[keys]))
    with_keys = states[params.empty_workers :]
    run.progress(0.4)
    by_states = params.merged_by == "states"
    guarded, tree = (params.guarded, params.merge_tree) if by_states else (True, TREES[0])
    by_tree = {name: finish(_merge_states(states, name, shuffled, guarded)) for name in TREES}
    run.progress(0.6)
    parts = [finish(state) for state in states]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    results = {
        "states": by_tree[tree],
        "means_by_lse": merge_means(outs, lses),
        "plain_mean": (outs.mean(dim=0), lses[params.empty_workers :].mean(dim=0)),
        "lse_in_base_2": merge_means(outs, lses / math.log(2)),
        "sum_only": finish(State(*(torch.stack(part).sum(dim=0) for part in zip(*with_keys, strict=True)))),
    }
    run.progress(0.8)

    out, lse = results[params.merged_by]
    defined = out.isfinite().all(dim=-1)
    lse_error = (lse - reference_lse).abs()[lse.isfinite()]
    first = by_tree["left_to_right"][0]
    spread = max(float((other - first).abs().nan_to_num(0).max()) for other, _ in by_tree.values())
    shares = (lses - reference_lse).exp()  # (workers, n_rows)
    metrics = {
        "output_error": _mean_error(out, reference),
        "lse_error": lse_error.max() if len(lse_error) else 0.0,
        "undefined_rows": (~defined).sum(),
        "lse_std": lses[params.empty_workers :].std(dim=0, correction=0).mean(),
        "tree_spread": spread / reference.abs().mean(),
        "largest_worker_weight": shares.amax(dim=0).mean(),
    }
    errors = [max(_mean_error(results[name][0], reference), ERROR_FLOOR) for name in MERGES]
    tables = {"shares": _shares(lses), "merges": {"merged_by": np.array(MERGES), "output_error": np.array(errors)}}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _merge_states(states: list[State], tree: str, shuffled: list[int], guarded: bool) -> State:
    two = merge if guarded else _merge_unguarded
    if tree == "pairwise":
        while len(states) > 1:
            pairs = [two(*states[i : i + 2]) for i in range(0, len(states) - 1, 2)]
            states = pairs + states[len(pairs) * 2 :]
        return states[0]
    orders = {"left_to_right": states, "right_to_left": states[::-1], "shuffled": [states[i] for i in shuffled]}
    return reduce(two, orders[tree])


def _merge_unguarded(one: State, other: State) -> State:
    m = one.reference.maximum(other.reference)
    a, b = (one.reference - m).exp(), (other.reference - m).exp()
    return State(m, one.total * a + other.total * b, one.weighted * a[:, None] + other.weighted * b[:, None])


def _mean_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    error = (out - reference).norm(dim=-1) / reference.norm(dim=-1)
    return float(error.where(out.isfinite().all(dim=-1), 1).mean())


def _shares(lses: torch.Tensor) -> dict[str, np.ndarray]:
    """What each worker weighs in the first row, under three rules."""
    n = len(lses)
    rules = {
        "means_by_lse": lses[:, 0].softmax(dim=0),
        "lse_in_base_2": (lses[:, 0] / math.log(2)).softmax(dim=0),
        "plain_mean": lses.new_full((n,), 1 / n),
    }
    return {
        "worker": np.tile([f"W{number}" for number in range(1, n + 1)], len(rules)),
        "worker_weight": np.concatenate([weights.numpy() for weights in rules.values()]),
        "weight_rule": np.repeat(list(rules), n),
    }
