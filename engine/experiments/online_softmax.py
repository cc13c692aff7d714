r"""Online softmax: rows of logits met tile by tile, the recurrence written rightly and in six other ways.

The reference is the softmax of whole rows in float64, times the values. The slips:

``o_not_rescaled``     l follows the new maximum, the accumulator does not
``nothing_rescaled``   neither does
``tile_max``           the exponentials of a tile are taken from the tile's own maximum, the factor from the running one
``starts_at_zero``     the running maximum begins at 0, not at -inf
``unguarded``          -inf is subtracted from -inf where no key has been seen
``follows_tile``       no slip: the reference is the maximum of the last tile with a visible key, even if it is lower

Logits and values are rounded to the number format first and the reference takes the rounded ones: what is measured is
the error of the computation. A row with NaN or an infinity counts as wholly wrong (error 1).

Sources: online-softmax-code; flash-attention-code, ``update_row_max`` (the slack).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.tiled import State, absorb, empty_state, finish, finite_or_zero, next_reference, tile_slices

if TYPE_CHECKING:
    import torch

SLIPS = ("correct", "o_not_rescaled", "nothing_rescaled", "tile_max", "starts_at_zero", "unguarded", "follows_tile")
MAX_TILES = 256
MAX_NUMBERS = 2**20  # of logits, or of values
ERROR_FLOOR = 1e-17  # drawn where there is no error at all


@dataclass(frozen=True)
class Params(BaseParams):
    kv_len: int = number(1024, low=1, high=8192, log2=True)
    tile_len: int = number(128, low=1, high=8192, log2=True)
    slip: str = choice(*SLIPS)
    logits_std: float = number(2.0, low=0, high=64, step=0.5)
    logits_mean: float = number(0.0, low=-400, high=400, step=50)
    logits_order: str = choice("random", "ascending", "descending")
    tiles_taken: str = choice("forward", "backward", "shuffled")
    masked_first: int = number(0, low=0, high=8191, step=64)
    slack_log2: float = number(0.0, low=0, high=32, step=1)
    works_in: str = choice("float64", "float32", "bfloat16", "float16")
    n_rows: int = number(16, low=1, high=256, log2=True)
    d_v: int = number(16, low=1, high=128, log2=True)

    def unread(self) -> frozenset[str]:
        first_is_largest = self.logits_order == "descending" and self.tiles_taken == "forward"
        return frozenset({"slack_log2"} if first_is_largest else ())  # the maximum never moves

    def rules(self) -> Iterator[Problem]:
        if self.masked_first >= self.kv_len:
            values = {"kv_len": self.kv_len}
            yield Problem("rule", "masked_first", self.masked_first, rule="some_key_visible", values=values)
        tiles = -(-self.kv_len // self.tile_len)
        if tiles > MAX_TILES:
            values = {"tiles": tiles, "limit": MAX_TILES}
            yield Problem("rule", "tile_len", self.tile_len, rule="too_many_tiles", values=values)
        if self.kv_len * max(self.n_rows, self.d_v) > MAX_NUMBERS:
            values = {"limit": MAX_NUMBERS}
            yield Problem("rule", "kv_len", self.kv_len, rule="too_many_rows_or_values", values=values)


METRICS = (
    Metric("output_error"),
    Metric("lse_error"),
    Metric("undefined_rows"),
    Metric("zero_rows"),
    Metric("rescales_per_row"),
    Metric("largest_power"),
    Metric("whole_row_error"),
)
PLOTS = (
    Plot("trace", table="trace", x="keys_seen", y="state_value", by="state_part"),
    Plot("slips", table="slips", mark="bar", x="slip", y="output_error", y_scale="log10"),
)
BUDGET_S = 0.015


def memory_bytes(params: Params) -> int:
    """Logits and values as drawn, sorted, rounded and in float64, with the weights of whole rows."""
    logits, values = params.n_rows * params.kv_len, params.kv_len * params.d_v
    return 8 * (8 * logits + 3 * values + 16 * params.n_rows * (params.d_v + 4)) + 2**18


def run(params: Params, run: Run) -> Result:
    """The same rows through every variant; the metrics are those of the chosen one.

    ``output_error``: distance of a row's output from the reference by the reference's length, on average over rows.
    ``lse_error``: the largest error of a log-sum-exp, of those that are finite. ``zero_rows``: rows with an output of
    exactly 0. ``rescales_per_row``: how often the reference moved once a key had been seen. ``largest_power``: the
    largest exponential of all tiles. ``whole_row_error``: output_error of a softmax of whole rows in the format.

    Shapes: logits (n_rows, kv_len), v (kv_len, d_v).
    """
    import torch

    logits = _logits(params, run)
    v = run.randn(params.kv_len, params.d_v)
    slices = tile_slices(params.kv_len, params.tile_len)
    if params.tiles_taken == "backward":
        slices.reverse()
    elif params.tiles_taken == "shuffled":
        order = torch.randperm(len(slices), generator=run.generator).tolist()
        slices = [slices[i] for i in order]
    logits, v = (_in_format(x, params.works_in) for x in (logits, v))
    exact_logits, exact_v = logits.cpu().double(), v.cpu().double()
    reference, reference_lse = softmax(exact_logits) @ exact_v, exact_logits.logsumexp(dim=-1)
    run.progress(0.05)

    slack = 0.0 if "slack_log2" in params.unread() else params.slack_log2 * math.log(2)
    errors = {}
    for n, slip in enumerate(dict.fromkeys((params.slip, *SLIPS))):
        states = _states(slip, logits, v, slices, slack, run, n)
        out, lse = (x.cpu().double() for x in finish(states[-1]))
        errors[slip] = _row_errors(out, reference)
        if slip == params.slip:
            chosen, found, found_lse = states, out, lse
    whole = (softmax(logits) @ v).cpu().double()
    defined = errors[params.slip] >= 0
    lse_error = (found_lse - reference_lse).abs()[defined & found_lse.isfinite()]
    metrics = {
        "output_error": _mean(errors[params.slip]),
        "lse_error": lse_error.max() if len(lse_error) else 0.0,
        "undefined_rows": (~defined).sum(),
        "zero_rows": (found == 0).all(dim=-1).sum(),
        "rescales_per_row": _moves(chosen).mean(),
        "largest_power": _largest_power(chosen, logits, slices),
        "whole_row_error": _mean(_row_errors(whole, reference)),
    }
    tables = {
        "trace": _trace(chosen, slices),
        "slips": {
            "slip": np.array(SLIPS),
            "output_error": np.array([max(_mean(errors[slip]), ERROR_FLOOR) for slip in SLIPS]),
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _logits(params: Params, run: Run) -> torch.Tensor:
    logits = params.logits_std * run.randn(params.n_rows, params.kv_len)
    if params.logits_order != "random":
        logits = logits.sort(dim=-1, descending=params.logits_order == "descending").values
    logits = logits + params.logits_mean
    logits[:, : params.masked_first] = -math.inf
    return logits


def _in_format(x: torch.Tensor, works_in: str) -> torch.Tensor:
    """Float64 on the CPU, for not every device has it; the other formats where the run is."""
    import torch

    return x.cpu().double() if works_in == "float64" else x.to(getattr(torch, works_in))


def _states(
    slip: str, logits: torch.Tensor, v: torch.Tensor, slices: list[slice], slack: float, run: Run, n: int
) -> list[State]:
    """The state after each tile, beginning with the empty one."""
    state = empty_state(logits, v)
    if slip == "starts_at_zero":
        state = state._replace(reference=state.total)
    states = [state]
    for keys in slices:
        states.append(_step(slip, states[-1], logits[:, keys], v[keys], slack))
    run.progress(0.05 + 0.9 * (n + 1) / (len(SLIPS) + 1))
    return states


def _step(slip: str, state: State, logits: torch.Tensor, v: torch.Tensor, slack: float) -> State:
    if slip in ("correct", "starts_at_zero"):
        return absorb(state, logits, v, slack)
    largest = logits.amax(dim=-1)
    m = largest if slip == "follows_tile" else next_reference(state.reference, largest, slack)
    m = m.where(m > -math.inf, state.reference)  # a tile without a visible key has no maximum to follow
    base = m if slip == "unguarded" else finite_or_zero(m)
    factor = (state.reference - base).exp()
    powers = (logits - (finite_or_zero(largest) if slip == "tile_max" else base)[:, None]).exp()
    if slip == "nothing_rescaled":
        factor = factor.new_ones(factor.shape)
    o_factor = factor.new_ones(factor.shape) if slip == "o_not_rescaled" else factor
    return State(m, state.total * factor + powers.sum(dim=-1), state.weighted * o_factor[:, None] + powers @ v)


def _row_errors(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative error of each row; -1 for a row that is not finite."""
    error = (out - reference).norm(dim=-1) / reference.norm(dim=-1)
    return error.where(out.isfinite().all(dim=-1), -1)


def _mean(errors: torch.Tensor) -> float:
    return float(errors.where(errors >= 0, 1).mean())


def _moves(states: list[State]) -> torch.Tensor:
    """How often the reference of each row moved once it had one. Shapes: returns (n_rows,)."""
    moves = states[0].total.cpu().double()  # zeros
    for before, after in pairwise(states):
        moves += ((after.reference != before.reference) & before.reference.isfinite()).cpu()
    return moves


def _largest_power(states: list[State], logits: torch.Tensor, slices: list[slice]) -> float:
    """The largest e^(z - m) that a tile met, with the reference of its own time, in float64."""
    found = 0.0
    for state, keys in zip(states[1:], slices, strict=True):
        over = logits[:, keys].amax(dim=-1).cpu().double() - finite_or_zero(state.reference).cpu().double()
        found = max(found, float(over.nan_to_num(nan=-math.inf).clamp_max(700).exp().max()))
    return found


def _trace(states: list[State], slices: list[slice]) -> Table:
    """Reference, log of the sum, and log-sum-exp of the first row after each tile, where they are finite."""
    keys, values, parts = [], [], []
    seen = 0
    for state, tile in zip(states[1:], slices, strict=True):
        seen += tile.stop - tile.start
        m, log_l = float(state.reference[0]), float(state.total[0].log())
        for part, value in (("running_max", m), ("log_of_sum", log_l), ("running_lse", m + log_l)):
            if math.isfinite(value):
                keys.append(seen)
                values.append(value)
                parts.append(part)
    return {"keys_seen": np.array(keys), "state_value": np.array(values), "state_part": np.array(parts, dtype=str)}
