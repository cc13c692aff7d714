r"""How often the running maximum moves, and with it how often what was summed so far has to be rescaled.

In random order the j-th of j tiles holds the largest logit so far with probability 1/j, whatever the distribution. So a
row moves :math:`\sum_{j=2}^{T}1/j=H_T-1` times over T tiles. A kernel that works on many rows at once and asks for the
whole tile whether any row moved is asked something else: with R independent rows the probability is
:math:`1-(1-1/j)^R`.

``drifting`` lets later logits lie higher, by ``drift`` standard deviations from the first key to the last: as if near
tokens count more and the keys are met from the oldest on. ``receding`` is the same from the newest on, the direction of
FlashAttention's loop.

Counted from the references themselves, tile by tile.

Source: flash-attention-code, ``softmax_loop`` in flash_fwd_sm100.py (the order of the keys).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.tiled import next_reference, tile_slices

MAX_LOGITS = 2**22


@dataclass(frozen=True)
class Params(BaseParams):
    kv_len: int = number(2048, low=1, high=16384, log2=True)
    tile_len: int = number(64, low=1, high=4096, log2=True)
    rows_together: int = number(32, low=1, high=256, log2=True)
    logits_order: str = choice("random", "ascending", "descending", "drifting", "receding")
    drift: float = number(4.0, low=0.5, high=32, step=0.5)
    slack_log2: float = number(0.0, low=0, high=32, step=1)
    logits_std: float = number(2.0, low=0.5, high=64, step=0.5)
    n_groups: int = number(16, low=1, high=64, log2=True)

    def unread(self) -> frozenset[str]:
        idle = set() if self.logits_order in ("drifting", "receding") else {"drift"}
        if self.logits_order == "descending":  # never a move, whatever the rest
            idle |= {"rows_together", "n_groups", "logits_std", "slack_log2"}
        elif self.slack_log2 == 0:  # only the order of the logits counts
            idle |= {"logits_std"} | ({"rows_together", "n_groups"} if self.logits_order == "ascending" else set())
        return frozenset(idle)

    def rules(self) -> Iterator[Problem]:
        logits = self.kv_len * self.rows_together * self.n_groups
        if logits > MAX_LOGITS:
            values = {"product": logits, "limit": MAX_LOGITS}
            yield Problem("rule", "n_groups", self.n_groups, rule="too_many_logits_of_groups", values=values)


METRICS = (
    Metric("rescales_per_row"),
    Metric("theory_rescales"),
    Metric("group_rescale_share"),
    Metric("row_rescale_share"),
    Metric("rescales_std"),
    Metric("rescales_max"),
    Metric("tiles"),
)
PLOTS = (
    Plot(
        "by_tile",
        table="by_tile",
        x="tile_number",
        y="rescale_share",
        by="rescaled_unit",
        theory="one_over_tile",
        x_scale="log2",
        one_law=True,
    ),
    Plot(
        "total",
        table="total",
        x="tile_number",
        y="rescales_so_far",
        theory="theory_rescales",
        x_scale="log2",
    ),
)
BUDGET_S = 0.03


def memory_bytes(params: Params) -> int:
    """Logits as drawn and as ordered with their places, and a column of moves a tile."""
    rows = params.rows_together * params.n_groups
    tiles = -(-params.kv_len // params.tile_len)
    return 4 * 6 * rows * params.kv_len + 2 * rows * tiles + 8 * 16 * tiles + 2**16


def run(params: Params, run: Run) -> Result:
    """Independent rows in groups; the first tile only sets the reference and does not count.

    ``rescales_per_row``: mean over rows, ``theory_rescales`` for random order and no slack. ``row_rescale_share``: of
    all later tiles and rows, how many moved. ``group_rescale_share``: of all later tiles and groups, how many had at
    least one row that moved.

    Shapes: logits (rows, kv_len), moves (rows, tiles).
    """
    import torch

    rows = params.rows_together * params.n_groups
    logits = run.randn(rows, params.kv_len)
    run.progress(0.2)
    if params.logits_order in ("drifting", "receding"):
        upwards = 1 if params.logits_order == "drifting" else -1
        logits += upwards * params.drift * torch.linspace(0, 1, params.kv_len, device=logits.device, dtype=logits.dtype)
    elif params.logits_order != "random":
        logits = logits.sort(dim=-1, descending=params.logits_order == "descending").values
    logits *= params.logits_std
    run.progress(0.4)

    slack = params.slack_log2 * math.log(2)
    slices = tile_slices(params.kv_len, params.tile_len)
    m = logits[:, slices[0]].amax(dim=-1)
    moves = torch.zeros(rows, len(slices), dtype=torch.bool, device=logits.device)
    for n, keys in enumerate(slices[1:], start=1):
        before, m = m, next_reference(m, logits[:, keys].amax(dim=-1), slack)
        moves[:, n] = m != before
        if n % 64 == 0:
            run.progress(0.4 + 0.5 * n / len(slices))

    moved = moves.cpu().numpy()
    grouped = moved.reshape(params.n_groups, params.rows_together, -1).any(axis=1)
    per_row = moved.sum(axis=1)
    later = max(1, len(slices) - 1)
    number = np.arange(1, len(slices) + 1)
    theory = np.cumsum(1 / number) - 1
    metrics = {
        "rescales_per_row": per_row.mean(),
        "theory_rescales": theory[-1],
        "group_rescale_share": grouped.sum() / (later * params.n_groups),
        "row_rescale_share": moved.sum() / (later * rows),
        "rescales_std": per_row.std(),
        "rescales_max": per_row.max(),
        "tiles": len(slices),
    }
    tables = {
        "by_tile": _by_tile(moved, grouped, number),
        "total": {
            "tile_number": number,
            "rescales_so_far": np.cumsum(moved.mean(axis=0)),
            "theory_rescales": theory,
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _by_tile(moved: np.ndarray, grouped: np.ndarray, number: np.ndarray) -> Table:
    """The share of rows, and of groups, that move at each tile after the first."""
    shares = [moved.mean(axis=0)[1:], grouped.mean(axis=0)[1:]]
    return {
        "tile_number": np.tile(number[1:], 2),
        "rescale_share": np.concatenate(shares),
        "rescaled_unit": np.repeat(["one_row", "any_row_of_group"], len(number) - 1),
        "one_over_tile": np.tile(1 / number[1:], 2),
    }
