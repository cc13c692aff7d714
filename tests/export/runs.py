"""What the tests of exports share: parameters other than the defaults, and a run of exported code in this process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import types
from typing import Any

from engine import registry
from engine.base import ChoiceSpec, FlagSpec, NumberSpec, ParamsError, Result, Spec, TextSpec
from engine.runner import RunSpec, run_spec
from tests.harness import small

WORDS: dict[str, Any] = {"title": "A title", "about": "What it shows, in words.", "language": "en"}


def other(spec: Spec, default: Any) -> Any:
    """An allowed value that is not the default; of a number a smaller one, so that the run is no longer than usual."""
    if isinstance(spec, ChoiceSpec):
        return spec.values[-1]
    if isinstance(spec, FlagSpec):
        return not default
    if isinstance(spec, TextSpec):
        return default[1:] or "a"
    assert isinstance(spec, NumberSpec)
    value = type(default)(default / 2)
    if not spec.low <= value < default:
        value = type(default)(min(spec.high, 2 * default or spec.step or 1))
    return value


def other_params(name: str) -> dict[str, object]:
    """As many parameters off their defaults as the rules allow together; few steps of training."""
    experiment = registry.get(name)
    specs, defaults = experiment.Params.specs(), experiment.Params.defaults()
    params = small(experiment)
    for field in [field for field in specs if field not in params]:  # in their order: some exclude others
        with contextlib.suppress(ParamsError):
            tried = params | {field: other(specs[field], defaults[field])}
            experiment.Params.from_mapping(tried)
            params = tried
    return params


def expected(spec: RunSpec) -> list[str]:
    """The lines that an export of the run must print, from the app's own runner."""
    return metric_lines(spec.experiment, run_spec(spec))


def metric_lines(name: str, result: Result) -> list[str]:
    metrics = [m for m in registry.get(name).metrics if m.name in result.metrics]
    return [f"{m.name} = {result.metrics[m.name]!r}" + (f" {m.unit}" if m.unit != "1" else "") for m in metrics]


def executed(text: str, name: str = "exported") -> tuple[dict[str, Any], list[str]]:
    """The names that code leaves behind when it is run here, and the lines that it prints."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module.__dict__, printed.getvalue().splitlines()


def code_cells(text: str) -> list[str]:
    """The sources of a notebook's code cells."""
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
