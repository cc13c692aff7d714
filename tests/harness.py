"""What the tests of experiments share: run one, and load one with its code broken on purpose."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from engine.base import Result, make_run
from engine.registry import Experiment, get


def run(experiment: Experiment, *, seed: int = 0, dtype: str = "float32", device: str = "cpu", **params: object) -> Result:
    """Run an experiment by itself, without the runner's queue and limits."""
    return experiment.run(experiment.Params(**params), make_run(seed, device, dtype))


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


def assert_law_catches(law, name: str, old: str, new: str) -> None:
    """The law holds for the experiment and fails for the broken one."""
    law(get(name))
    with pytest.raises(AssertionError):
        law(mutant(name, old, new))
