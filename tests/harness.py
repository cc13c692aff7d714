"""What the tests of experiments share: run one, and load one with its code broken on purpose."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine.base import BaseParams, Result, Run, Stopped, make_run
from engine.registry import Experiment, get


def run(
    experiment: Experiment, *, seed: int = 0, dtype: str = "float32", device: str = "cpu", **params: object
) -> Result:
    """Run an experiment by itself, without the runner's queue and limits."""
    return experiment.run(experiment.Params(**params), make_run(seed, device, dtype))


def small(experiment: Experiment) -> dict[str, object]:
    """The defaults, but few steps of training."""
    specs = experiment.Params.specs()
    return {"steps": max(5, int(specs["steps"].low))} if experiment.trains and "steps" in specs else {}


@dataclass
class RecordingRun(Run):
    """A Run that keeps what it drew, so that a test can compute the same by other means."""

    draws: list[np.ndarray] = field(default_factory=list)

    def randn(self, *shape: int) -> torch.Tensor:
        return self._keep(super().randn(*shape))

    def rand(self, *shape: int) -> torch.Tensor:
        return self._keep(super().rand(*shape))

    def _keep(self, drawn: torch.Tensor) -> torch.Tensor:
        self.draws.append(drawn.double().numpy().copy())
        return drawn


def recorded(
    experiment: Experiment, *, seed: int = 0, dtype: str = "float64", **params: object
) -> tuple[Result, list[np.ndarray]]:
    """The result of a run and the random numbers it was computed from, in the order in which they were drawn."""
    plain = make_run(seed, dtype=dtype)
    recording = RecordingRun(plain.generator, plain.device, plain.dtype)
    return experiment.run(experiment.Params(**params), recording), recording.draws


def mutant(name: str, old: str, new: str) -> Experiment:
    """The experiment ``name`` with one piece of its source replaced; the file itself is untouched."""
    original = get(name)
    source = original.path.read_text("utf-8")
    if source.count(old) != 1:
        raise ValueError(f"{original.path.name}: {old!r} occurs {source.count(old)} times, wanted once")
    module = types.ModuleType(f"mutant_of_{name}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source.replace(old, new), str(original.path), "exec"), module.__dict__)
    return dataclasses.replace(original, Params=module.Params, run=module.run, memory_bytes=module.memory_bytes)


@functools.cache
def _holds(law: Callable[[Experiment], None], name: str) -> None:
    """Run a law once for the experiment as it stands, however many ways of breaking it follow."""
    law(get(name))


def assert_law_catches(law: Callable[[Experiment], None], name: str, old: str, new: str) -> None:
    """The law holds for the experiment and fails for the broken one."""
    _holds(law, name)
    with pytest.raises(AssertionError):
        law(mutant(name, old, new))


def assert_stops_at_once(experiment: Experiment, params: BaseParams) -> None:
    """A stop that is asked for is the last thing that a run hears of."""
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise Stopped("stop")

    with pytest.raises(Stopped):
        experiment.run(params, make_run(0, check_stop=stop))
    assert calls == 7
