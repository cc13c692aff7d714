"""The files in ``engine/experiments`` are the registry: find an experiment by its name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base import BaseParams, Metric, Plot, Result, Run, nearest

FOLDER = Path(__file__).parent / "experiments"


class UnknownExperiment(LookupError):
    """No file of that name; the message says which names exist and which comes near."""

    def __init__(self, name: str) -> None:
        near = nearest(name, names())
        hint = f" (did you mean {near}?)" if near else ""
        super().__init__(f"got experiment {name!r}; engine/experiments has {', '.join(names())}{hint}")
        self.name, self.near = name, near

    def __reduce__(self) -> Any:  # exceptions cross process borders too
        return UnknownExperiment, (self.name,)


@dataclass(frozen=True)
class Experiment:
    """One module of ``engine/experiments``, with its declarations under their names of the contract."""

    name: str
    Params: type[BaseParams]
    metrics: tuple[Metric, ...]
    plots: tuple[Plot, ...]
    budget_s: float
    trains: bool
    memory_bytes: Callable[[BaseParams], int]
    run: Callable[[BaseParams, Run], Result]
    path: Path

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(m.name for m in self.metrics)

    @property
    def measures_time(self) -> bool:
        """Whether a result holds times that were taken, which another run would not repeat."""
        return any(m.measured for m in self.metrics)

    def measured_columns(self, table: str) -> frozenset[str]:
        """Columns of a table that no seed decides."""
        by_plots = {column for plot in self.plots if plot.table == table for column in plot.measured}
        return frozenset(by_plots | {m.name for m in self.metrics if m.measured})

    def metric(self, name: str) -> Metric:
        """The declaration of one metric; KeyError with the names when there is none."""
        for m in self.metrics:
            if m.name == name:
                return m
        raise KeyError(f"{self.name} has {', '.join(self.metric_names)}; got {name!r}")


@functools.cache
def names() -> tuple[str, ...]:
    """All experiments, in alphabetical order."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_")))


@functools.cache
def get(name: str) -> Experiment:
    """Load an experiment's declarations; torch is not imported.

    Raises: UnknownExperiment.
    """
    if name not in names():
        raise UnknownExperiment(name)
    module = importlib.import_module(f"engine.experiments.{name}")
    return Experiment(
        name=name,
        Params=module.Params,
        metrics=module.METRICS,
        plots=module.PLOTS,
        budget_s=module.BUDGET_S,
        trains=getattr(module, "TRAINS", False),
        memory_bytes=module.memory_bytes,
        run=module.run,
        path=FOLDER / f"{name}.py",
    )
