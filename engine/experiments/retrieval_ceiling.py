r"""How sharp bounded logits can be: for one favourite key, and when each of n keys has a query that must find it.

q_i and k_j have norm √B each, so that \|q_i·k_j\| ≤ B, the bound that a norm on q and k sets. Query i looks for key i.

*One favourite*: a single key aligned with the query and all others opposed to it have B and -B, the weight
1 / (1 + (n-1) exp(-2B)). Not all keys can be favourites: Cauchy and Schwarz allow the mean margin of a key over the
others no more than B n/(n-1), and -ln of the weight is convex in the margins, so the geometric mean of the weights is
at most

    1 / (1 + (n-1) exp(-B n/(n-1)))

which keys in the corners of a regular simplex reach; it takes n-1 dimensions. Measured are one favourite, and keys
that are drawn at random, orthogonal, the corners of a simplex, or found by gradient descent (Adam) on the mean of -ln
weight, q and k free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import qk_product, unit_norm
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.chunks import oversize
from engine.training import Adam

if TYPE_CHECKING:
    import torch

LENGTHS = tuple(2**power for power in range(1, 18))
MAX_MEASURED = 1024  # of random keys in the table
SEARCH_RATE = 0.1
MOST_QUERIES = 64  # of those that are measured; keys are drawn alike, so these stand for all
MOST_SEARCHED = 256


@dataclass(frozen=True)
class Params(BaseParams):
    key_placement: str = choice("random_keys", "orthogonal_keys", "simplex_keys", "searched_keys", "one_favourite")
    logits_limit: float = number(8.0, low=0.5, high=64)
    d_k: int = number(64, low=2, high=512, log2=True)
    kv_len: int = number(64, low=2, high=16384, log2=True)
    search_steps: int = number(200, low=10, high=1000, step=10)

    def rules(self) -> Iterator[Problem]:
        needed = {"orthogonal_keys": self.kv_len, "simplex_keys": self.kv_len - 1}.get(self.key_placement, 0)
        if needed > self.d_k:
            values = {"needed": needed}
            yield Problem("rule", "d_k", self.d_k, rule="too_few_dimensions_for_keys", values=values)
        yield from oversize(q_len=min(self.kv_len, MOST_QUERIES), kv_len=self.kv_len, width=self.d_k)
        if self.key_placement == "searched_keys" and self.kv_len > MOST_SEARCHED:
            yield Problem("rule", "kv_len", self.kv_len, rule="too_many_searched_keys", values={"limit": MOST_SEARCHED})

    def unread(self) -> frozenset[str]:
        return frozenset({"search_steps"} if self.key_placement != "searched_keys" else ())


METRICS = (
    Metric("found_weight"),
    Metric("found_ceiling"),
    Metric("favourite_ceiling"),
    Metric("found_logits_max"),
    Metric("margin_mean"),
)
PLOTS = (
    Plot("weight_by_length", table="by_length", x="kv_len", y="found_weight", by="ceiling", x_scale="log2"),
    Plot("weight_by_limit", table="by_limit", x="logits_limit", y="found_weight", by="ceiling", x_scale="log2"),
)
BUDGET_S = 0.05


def memory_bytes(params: Params) -> int:
    """q and k of the chosen placement and of the table, one chunk of logits, and the search with its gradients."""
    n = max(params.kv_len, MAX_MEASURED)
    search = 12 * (params.kv_len * params.d_k + params.kv_len**2) if params.key_placement == "searched_keys" else 0
    corners = 4 * params.kv_len**2 if params.key_placement == "simplex_keys" else 0
    return 8 * (6 * n * params.d_k + 6 * MOST_QUERIES * n + corners + search) + 2**20


def run(params: Params, run: Run) -> Result:
    """``found_weight``: geometric mean over the queries of the weight on the own key, the one in the query's place.
    ``margin_mean``: how far, on average, a query's logit with its own key lies above the mean of those with the others.
    Of more than 64 queries the first 64 are measured, save where they were searched.

    Shapes: q (at most kv_len, d_k), k (kv_len, d_k), of norm √limit.
    """
    q, k = _place(params, run)
    run.progress(0.5)
    log_weight, largest, margin = _read(q, k)
    metrics = {
        "found_weight": math.exp(log_weight),
        "found_ceiling": _ceiling(params.logits_limit, params.kv_len),
        "favourite_ceiling": _favourite(params.logits_limit, params.kv_len),
        "found_logits_max": largest,
        "margin_mean": margin,
    }
    return Result(metrics, {"by_length": _by_length(params, run), "by_limit": _by_limit(params)})


def _ceiling(limit: float, n: int) -> float:
    return 1 / (1 + (n - 1) * math.exp(-limit * n / (n - 1)))


def _favourite(limit: float, n: int) -> float:
    return 1 / (1 + (n - 1) * math.exp(-2 * limit))


def _place(params: Params, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of norm √limit, the query of a key its copy, except where both are searched."""
    import torch

    n, d_k, root = params.kv_len, params.d_k, math.sqrt(params.logits_limit)
    if params.key_placement == "searched_keys":
        return _search(params, run)
    if params.key_placement == "one_favourite":
        first = unit_norm(run.randn(1, d_k))
        k = -first.repeat(n, 1)
        k[0] = first[0]
        return root * first, root * k
    if params.key_placement == "random_keys":
        k = unit_norm(run.randn(n, d_k))
    elif params.key_placement == "orthogonal_keys":
        k = torch.eye(n, d_k, device=run.device, dtype=run.dtype)
    else:
        corners = torch.eye(n, dtype=torch.float64) - 1 / n
        # in n - 1 dimensions: coordinates along the singular vectors, the last of which is the direction they lack
        left, values, _ = torch.linalg.svd(corners)
        flat = (left * values)[:, : n - 1]
        padded = torch.nn.functional.pad(flat, (0, d_k - (n - 1)))
        k = unit_norm(padded).to(run.device, run.dtype)
    return root * k[:MOST_QUERIES], root * k


def _search(params: Params, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Directions of q and k that gradient descent on the mean of -ln weight finds."""
    import torch
    from torch.nn.functional import cross_entropy

    dtype = torch.float64 if run.dtype == torch.float64 else torch.float32  # lower ones would round the updates away
    free = [run.randn(params.kv_len, params.d_k).to(dtype).requires_grad_() for _ in range(2)]
    own = torch.arange(params.kv_len, device=run.device)
    adam = Adam(free, SEARCH_RATE)
    for step in range(params.search_steps):
        run.progress(0.5 * step / params.search_steps)
        adam.learning_rate = SEARCH_RATE * (1 - step / params.search_steps)
        for x in free:
            x.grad = None
        q, k = (unit_norm(x) for x in free)
        cross_entropy(params.logits_limit * qk_product(q, k), own).backward()
        adam.step()
    q, k = (math.sqrt(params.logits_limit) * unit_norm(x.detach()) for x in free)
    return q, k


def _read(q: torch.Tensor, k: torch.Tensor) -> tuple[float, float, float]:
    """Mean log weight on the own key, largest |logit|, mean margin."""
    logits = qk_product(q, k)
    below = logits - logits.diagonal()[:, None]  # 0 for the own key
    log_weight = -below.logsumexp(dim=-1).cpu().double().mean().item()
    margin = -below.cpu().double().sum(dim=-1).mean().item() / (len(k) - 1)
    return log_weight, logits.abs().max().item(), margin


def _by_length(params: Params, run: Run) -> Table:
    """Both ceilings at every length, and random keys as far as they are measured."""
    rows = [(n, "favourite", _favourite(params.logits_limit, n)) for n in LENGTHS]
    rows += [(n, "each_found", _ceiling(params.logits_limit, n)) for n in LENGTHS]
    keys = math.sqrt(params.logits_limit) * unit_norm(run.randn(MAX_MEASURED, params.d_k))
    for n in (n for n in LENGTHS if n <= MAX_MEASURED):
        first = keys[:n]
        run.progress(0.9)
        rows.append((n, "random_keys", math.exp(_read(first[:MOST_QUERIES], first)[0])))
    return _table(("kv_len", "ceiling", "found_weight"), rows)


def _by_limit(params: Params) -> Table:
    limits = [2.0 ** (power / 2) for power in range(-2, 13)]
    rows = [(limit, "favourite", _favourite(limit, params.kv_len)) for limit in limits]
    rows += [(limit, "each_found", _ceiling(limit, params.kv_len)) for limit in limits]
    return _table(("logits_limit", "ceiling", "found_weight"), rows)


def _table(names: tuple[str, ...], rows: list[tuple[float, str, float]]) -> Table:
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}
