r"""A number that grows by small steps and is kept in few bits: a weight that is trained, or the sum of many terms.

After each store the number is rounded to the format. Rounded to nearest, a step is lost where it is less than half the
distance to the next number; where it is more, a whole distance is taken. So what arrives is too little or too much, and
a sum of equal terms stops where half the distance has become as large as a term.

``rounded_nearest``     :math:`x \leftarrow \mathrm{fl}(x + s)`
``rounded_stochastic``  up or down at random, with probabilities that make the mean right
``compensated``         a second number of the same format keeps what the first one did not take (Kahan)
``float32_kept``        x stays in float32 (a master copy, a float32 accumulator) and is rounded only where it is read

``steps_per_store`` steps are summed in float32 before each store: accumulated gradients, or a tile of a matrix product.
With ``spread_starts`` the starts are spread evenly over one power of two, [start, 2 start), since the distance between
neighbours is one and the same there, while the number doubles.

Source: zamirai2021, abstract (updates cancelled by nearest rounding; stochastic rounding and Kahan summation).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.rounding import round_stochastically, round_to_nearest

if TYPE_CHECKING:
    import torch

FORMATS = ("bfloat16", "float16", "float32")
WAYS = ("rounded_nearest", "rounded_stochastic", "compensated", "float32_kept")
MAX_DRAWN = 2**22  # steps of all numbers together: 30 ms to draw


@dataclass(frozen=True)
class Params(BaseParams):
    start_value: float = number(1.0, low=0, high=1024)
    step_mean: float = number(0.001, low=1e-8, high=16)
    n_stores: int = number(128, low=1, high=4096, log2=True)
    low_dtype: str = choice(*FORMATS)
    step_noise: float = number(1.0, low=0, high=16, step=0.5)
    steps_per_store: int = number(1, low=1, high=256, log2=True)
    spread_starts: bool = flag(False)
    n_kept_numbers: int = number(64, low=1, high=1024, log2=True)

    def rules(self) -> Iterator[Problem]:
        drawn = self.n_stores * self.steps_per_store * self.n_kept_numbers
        if drawn > MAX_DRAWN:
            yield Problem(
                "rule",
                "n_stores",
                self.n_stores,
                rule="too_many_steps_drawn",
                values={"drawn": drawn, "limit": MAX_DRAWN},
            )

    def unread(self) -> frozenset[str]:
        return frozenset({"spread_starts"} if self.start_value == 0 else ())


METRICS = (
    *(Metric(f"arrived_share_{way}") for way in WAYS),
    Metric("stores_without_change"),
    *(Metric(f"end_mean_{way}") for way in WAYS),
    Metric("exact_end_mean"),
    *(Metric(f"end_spread_{way}") for way in ("rounded_nearest", "rounded_stochastic")),
)
PLOTS = (
    Plot("path", table="path", x="steps_made", y="moved_mean", by="way_kept", theory="moved_exact", one_law=True),
    Plot(
        "unchanged",
        table="unchanged",
        x="relative_step",
        y="unchanged_share",
        by="number_format",
        x_scale="log10",
    ),
)
BUDGET_S = 0.02

N_RECORDS = 32  # points of a path
RELATIVE_STEPS = tuple(2.0 ** (power / 4) for power in range(-4 * 14, -4 * 5 + 1))
N_PROBES = 512  # numbers of one power of two behind each point
PROBED = ("bfloat16", "float16")


def memory_bytes(params: Params) -> int:
    """The steps that are drawn, with a copy; the thresholds of the stochastic rounding; the probes of the chart."""
    stores = params.n_stores * params.n_kept_numbers
    return 4 * (3 * stores * params.steps_per_store + 12 * stores + 160 * params.n_kept_numbers) + 2**20


def run(params: Params, run: Run) -> Result:
    """The same steps added in all four ways; the metrics are means over the numbers.

    ``arrived_share``: how far the number came, over how far the steps lead. ``stores_without_change``: share of the
    nearest-rounded stores that left the number as it was. ``end_spread``: standard deviation over the numbers.

    Shapes: steps (n_stores, n_kept_numbers), start (n_kept_numbers,).
    """
    import torch

    dtype = getattr(torch, params.low_dtype)
    start = torch.full((params.n_kept_numbers,), params.start_value, device=run.device)
    if params.spread_starts:
        start = start * (1 + torch.arange(params.n_kept_numbers, device=run.device) / params.n_kept_numbers)
    start = start.to(dtype).float()
    steps = _draw_steps(params, run)
    run.progress(0.1)
    chances = run.rand(params.n_stores, params.n_kept_numbers).float()
    records, unchanged = _add_up(start, steps, chances, dtype, run)

    begun = start.cpu().double()
    moved = steps.cpu().double().cumsum(dim=0)
    wanted = moved[-1].mean().item()
    ends = {way: at[-1].cpu().double() for way, at in records.items()}
    metrics = {f"arrived_share_{way}": (ends[way] - begun).mean().item() / wanted for way in WAYS}
    metrics["stores_without_change"] = unchanged / params.n_stores
    metrics |= {f"end_mean_{way}": ends[way].mean().item() for way in WAYS}
    metrics["exact_end_mean"] = (begun + moved[-1]).mean().item()
    for way in ("rounded_nearest", "rounded_stochastic"):
        metrics[f"end_spread_{way}"] = ends[way].std(correction=0).item()
    path = _path(params, records, begun, moved)
    return Result(metrics, {"path": path, "unchanged": _unchanged(run)})


def _draw_steps(params: Params, run: Run) -> torch.Tensor:
    """What each store adds. Shapes: (n_stores, n_kept_numbers)."""
    noise = run.randn(params.n_stores, params.steps_per_store, params.n_kept_numbers).float()
    return (params.step_mean * (1 + params.step_noise * noise)).sum(dim=1)


def _recorded(n_stores: int) -> list[int]:
    return sorted({0, *(math.ceil(n_stores * i / N_RECORDS) for i in range(1, N_RECORDS + 1))})


def _add_up(
    start: torch.Tensor, steps: torch.Tensor, chances: torch.Tensor, dtype: torch.dtype, run: Run
) -> tuple[dict[str, list[torch.Tensor]], float]:
    """The numbers of each way after the recorded stores, and how many stores left a nearest-rounded one as it was."""
    import torch

    nearest = stochastic = compensated = kept = start
    rest = torch.zeros_like(start)
    unchanged = torch.zeros_like(start)
    due = _recorded(len(steps))
    records: dict[str, list[torch.Tensor]] = {way: [start] for way in WAYS}
    for n, (step, chance) in enumerate(zip(steps, chances, strict=True), start=1):
        before, nearest = nearest, round_to_nearest(nearest + step, dtype)
        unchanged = unchanged + (nearest == before)
        stochastic = round_stochastically(stochastic + step, chance, dtype)
        wanted = compensated + (step + rest)
        compensated = round_to_nearest(wanted, dtype)
        rest = round_to_nearest(wanted - compensated, dtype)
        kept = kept + step
        if n in due:
            run.progress(0.1 + 0.8 * n / len(steps))
            values = (nearest, stochastic, compensated, round_to_nearest(kept, dtype))
            for way, value in zip(WAYS, values, strict=True):
                records[way].append(value)
    return records, unchanged.mean().item()


def _path(params: Params, records: dict[str, list[torch.Tensor]], begun: torch.Tensor, moved: torch.Tensor) -> Table:
    """How far the mean has come after the recorded stores, in each way, and how far the steps lead."""
    import torch

    due = _recorded(params.n_stores)
    exact = torch.cat((torch.zeros(1, dtype=torch.float64), moved.mean(dim=1)))[due].numpy()
    means = [[(at.cpu().double() - begun).mean().item() for at in records[way]] for way in WAYS]
    return {
        "steps_made": np.tile(np.array(due) * params.steps_per_store, len(WAYS)),
        "way_kept": np.repeat(WAYS, len(due)),
        "moved_mean": np.concatenate(means).astype(np.float32),
        "moved_exact": np.tile(exact, len(WAYS)).astype(np.float32),
    }


def _unchanged(run: Run) -> Table:
    """The share of the numbers in [1, 2) that one step of a given relative size leaves as they are."""
    import torch

    relative = torch.tensor(RELATIVE_STEPS)[:, None].to(run.device)
    shares = []
    for name in PROBED:
        dtype = getattr(torch, name)
        probes = round_to_nearest(1 + torch.arange(N_PROBES, device=run.device) / N_PROBES, dtype)
        same = round_to_nearest(probes * (1 + relative), dtype) == probes
        shares.append(same.float().mean(dim=1).cpu().numpy())
    return {
        "relative_step": np.tile(RELATIVE_STEPS, len(PROBED)),
        "number_format": np.repeat(PROBED, len(RELATIVE_STEPS)),
        "unchanged_share": np.concatenate(shares),
    }
