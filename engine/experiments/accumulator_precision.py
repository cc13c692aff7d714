r"""The state of an online softmax kept in few bits: what is lost grows with the number of times it is stored.

Logits and values are rounded to the format; exponentials, and sums within a tile, are computed in float32, as matrix
units do. Maximum, sum and accumulator are rounded to the format after every tile. A sum of numbers of one size stops
where the next one is at most half the distance between neighbouring numbers of the format: with p bits of fraction at
:math:`2^{p+1}` times the increment (256 times in bfloat16, 2048 times in float16).

The reference takes the rounded logits and values, in float64. ``once_error`` is the same sum over whole rows in
float32, stored a single time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.tiled import State, absorb, empty_state, finish, tile_slices

if TYPE_CHECKING:
    import torch

FORMATS = ("bfloat16", "float16", "float32")
MAX_TILES = 512
ERROR_FLOOR = 1e-9


@dataclass(frozen=True)
class Params(BaseParams):
    kv_len: int = number(1024, low=1, high=8192, log2=True)
    tile_len: int = number(32, low=1, high=8192, log2=True)
    accumulated_in: str = choice(*FORMATS)
    logits_std: float = number(1.0, low=0, high=16, step=0.5)
    n_rows: int = number(16, low=1, high=64, log2=True)
    d_v: int = number(16, low=1, high=64, log2=True)

    def rules(self) -> Iterator[Problem]:
        tiles = -(-self.kv_len // self.tile_len)
        if tiles > MAX_TILES:
            values = {"tiles": tiles, "limit": MAX_TILES}
            yield Problem("rule", "tile_len", self.tile_len, rule="too_many_tiles", values=values)


METRICS = (
    Metric("output_error"),
    Metric("sum_share"),
    Metric("running_sum_mean"),
    Metric("exact_sum_mean"),
    Metric("lse_error"),
    Metric("once_error"),
)
PLOTS = (
    Plot(
        "by_length",
        table="by_length",
        x="keys_seen",
        y="output_error",
        by="accumulated_in",
        x_scale="log2",
        y_scale="log10",
    ),
    Plot(
        "sums",
        table="by_length",
        x="keys_seen",
        y="running_sum_mean",
        by="accumulated_in",
        theory="exact_sum_mean",
        x_scale="log2",
        y_scale="log2",
    ),
)
BUDGET_S = 0.03


def memory_bytes(params: Params) -> int:
    """Logits and values, in float32 and float64 and for each format, with the weights of whole rows."""
    numbers = params.kv_len * (params.n_rows + params.d_v)
    return 8 * (7 * numbers + 16 * 16 * params.n_rows * (params.d_v + 4)) + 2**18


def run(params: Params, run: Run) -> Result:
    """The same rows with the state in each format; the metrics are those of the chosen one, after the last key.

    ``running_sum_mean``, ``exact_sum_mean``: the sum of e^(z - m) as it is kept and as it should be, means over rows;
    ``sum_share`` is their ratio, row by row. ``output_error``: distance of a row's output from the reference by the
    reference's length, on average. ``lse_error``: the largest error of a log-sum-exp.

    Shapes: logits (n_rows, kv_len), v (kv_len, d_v).
    """
    logits, v = params.logits_std * run.randn(params.n_rows, params.kv_len), run.randn(params.kv_len, params.d_v)
    formats: list[str] = []
    measured: list[dict[str, float]] = []
    for n, name in enumerate(FORMATS):
        for values in _snapshots(name, logits, v, params, run, n):
            formats.append(name)
            measured.append(values)
        if name == params.accumulated_in:
            metrics = {m.name: values[m.name] for m in METRICS}
    table = {"accumulated_in": np.array(formats)}
    for column in ("keys_seen", "output_error", "running_sum_mean", "exact_sum_mean"):
        table[column] = np.array([values[column] for values in measured])
    table["output_error"] = np.maximum(table["output_error"], ERROR_FLOOR)
    return Result(metrics, {"by_length": table})


def _snapshots(
    name: str, logits: torch.Tensor, v: torch.Tensor, params: Params, run: Run, n: int
) -> Iterator[dict[str, float]]:
    """The measures of the keys seen so far, where the number of tiles is a power of two and after the last."""
    import torch

    dtype = getattr(torch, name)
    logits, v = logits.to(dtype).float(), v.to(dtype).float()
    empty = state = empty_state(logits, v)
    slices = tile_slices(params.kv_len, params.tile_len)
    for done, keys in enumerate(slices, start=1):
        state = _stored(absorb(state, logits[:, keys], v[keys]), dtype)
        if done & (done - 1) == 0 or done == len(slices):
            seen = keys.stop
            once = _stored(absorb(empty, logits[:, :seen], v[:seen]), dtype)
            yield {"keys_seen": float(seen)} | _measure(state, once, logits[:, :seen], v[:seen])
            run.progress((n + done / len(slices)) / len(FORMATS))


def _stored(state: State, dtype: torch.dtype) -> State:
    return State(*(x.to(dtype).float() for x in state))


def _measure(state: State, once: State, logits: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    logits, v = logits.cpu().double(), v.cpu().double()
    weighted = softmax(logits) @ v
    total = (logits - logits.amax(dim=-1, keepdim=True)).exp().sum(dim=-1)
    out, lse = (x.cpu().double() for x in finish(state))
    kept = state.total.cpu().double()
    values = {
        "output_error": _mean_error(out, weighted),
        "sum_share": (kept / total).mean(),
        "running_sum_mean": kept.mean(),
        "exact_sum_mean": total.mean(),
        "lse_error": (lse - logits.logsumexp(dim=-1)).abs().max(),
        "once_error": _mean_error(finish(once)[0].cpu().double(), weighted),
    }
    return {name: float(value) for name, value in values.items()}


def _mean_error(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return ((out - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean()
