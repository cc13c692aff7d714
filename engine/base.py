"""The contract of an experiment: Params, Metric, Plot, Result, Run.

An experiment is one module in ``engine/experiments``; its file name is its identity. It has a docstring and exactly
these public names:

=================  ====================================================================================================
``Params``         frozen dataclass derived from :class:`BaseParams`, fields declared with number/choice/flag/text
``METRICS``        tuple of :class:`Metric`
``PLOTS``          tuple of :class:`Plot`
``BUDGET_S``       seconds that the default parameters may take on one CPU core
``memory_bytes``   ``(params) -> int``: an upper estimate of what a run holds at once
``run``            ``(params, run) -> Result``
=================  ====================================================================================================

A module that trains also says ``TRAINS = True``: it runs under a time budget and its partial results are drawn. A
module, also one that experiments share, that reads a file says ``FILES = ("trained/model.npz",)``, below ``engine/``,
and finds it with :func:`data_file`.

Everything but ``run`` must work without torch. This module never imports it at the top for that reason.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

# --------------------------------------------------------------------------------------------------------------------
# Parameters


@dataclass(frozen=True)
class NumberSpec:
    """Bounds of a numeric parameter; ``log2`` asks for a control that moves by powers of two."""

    low: float
    high: float
    step: float | None
    log2: bool
    unit: str


@dataclass(frozen=True)
class ChoiceSpec:
    """The allowed values of a parameter that names a variant."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class FlagSpec:
    """An on/off parameter."""


@dataclass(frozen=True)
class TextSpec:
    """What a reader may type: up to ``most`` characters."""

    most: int


Spec = NumberSpec | ChoiceSpec | FlagSpec | TextSpec


def number(
    default: float, *, low: float, high: float, step: float | None = None, log2: bool = False, unit: str = "1"
) -> Any:
    """Declare a number. An int default makes it a whole number. ``unit`` is "1" for pure numbers and counts."""
    return field(default=default, metadata={"spec": NumberSpec(low, high, step, log2, unit)})


def choice(default: str, *others: str) -> Any:
    """Declare a named variant; the first value is the default."""
    return field(default=default, metadata={"spec": ChoiceSpec((default, *others))})


def flag(default: bool) -> Any:
    """Declare an on/off switch."""
    return field(default=default, metadata={"spec": FlagSpec()})


def text(default: str, *, most: int) -> Any:
    """Declare a text of 1 to ``most`` characters."""
    return field(default=default, metadata={"spec": TextSpec(most)})


@dataclass(frozen=True)
class Problem:
    """One refused parameter, as data, so that the interface can say it in the reader's language.

    ``kind`` is "range", "whole", "finite", "choice", "flag", "text", "unknown" or "rule"; for "rule" ``rule`` names a
    sentence in strings.yaml and ``values`` fills it.
    """

    kind: str
    name: str
    got: object
    low: float | None = None
    high: float | None = None
    allowed: tuple[str, ...] = ()
    rule: str = ""
    values: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.kind == "range":
            wanted = f"a value from {self.low:g} to {self.high:g}"
        elif self.kind == "whole":
            wanted = "a whole number"
        elif self.kind == "finite":
            wanted = "a finite number"
        elif self.kind in ("choice", "unknown"):
            near = nearest(str(self.got), self.allowed)
            wanted = f"one of {', '.join(self.allowed)}" + (f" (did you mean {near}?)" if near else "")
        elif self.kind == "flag":
            wanted = "true or false"
        elif self.kind == "text":
            wanted = f"a text of at most {self.high:g} characters"
        else:
            wanted = f"{self.rule} {dict(self.values)}"
        return f"{self.name}: got {self.got!r}, wanted {wanted}"


class ParamsError(ValueError):
    """Parameters that an experiment refuses; ``problems`` holds all of them, not only the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems

    def __reduce__(self) -> Any:  # exceptions cross process borders too
        return ParamsError, (self.problems,)


def nearest(word: str, candidates: tuple[str, ...] | list[str]) -> str | None:
    """The candidate most like ``word``, or None when none comes near."""
    import difflib

    found = difflib.get_close_matches(word, candidates, n=1)
    return found[0] if found else None


@dataclass(frozen=True)
class BaseParams:
    """Base of every ``Params``: checks each field against its declaration, all problems at once.

    Raises: ParamsError.
    """

    def __post_init__(self) -> None:
        fields = dataclasses.fields(self)
        checked = (_check(f.name, getattr(self, f.name), f.metadata["spec"], f.default) for f in fields)
        problems = [problem for problem in checked if problem]
        if not problems:
            problems = list(self.rules())
        if problems:
            raise ParamsError(problems)
        for f in fields:  # 64.0 for a whole number and 1 for a real one are the same value: keep one form
            if isinstance(f.metadata["spec"], NumberSpec):
                kind = int if isinstance(f.default, int) else float
                object.__setattr__(self, f.name, kind(getattr(self, f.name)))

    def rules(self) -> Iterator[Problem]:
        """Conditions between fields; override and yield ``Problem(kind="rule", ...)``. Fields are in range by then."""
        return iter(())

    def unread(self) -> frozenset[str]:
        """Fields that a run with these values does not read; override where one field decides whether others count."""
        return frozenset()

    @classmethod
    def specs(cls) -> dict[str, Spec]:
        """Field name to its declaration, in the order of the module."""
        return {f.name: f.metadata["spec"] for f in dataclasses.fields(cls)}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Field name to default value."""
        return {f.name: f.default for f in dataclasses.fields(cls)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> BaseParams:
        """Build from a mapping; names that do not exist are reported with the nearest that does.

        Raises: ParamsError, with the bad values of known names beside the unknown names.
        """
        specs = cls.specs()
        problems = [Problem("unknown", name, name, allowed=tuple(specs)) for name in values if name not in specs]
        try:
            params = cls(**{name: value for name, value in values.items() if name in specs})
        except ParamsError as error:
            problems += error.problems
        if problems:
            raise ParamsError(problems)
        return params

    def as_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        return dataclasses.asdict(self)


def _check(name: str, value: object, spec: Spec, default: object) -> Problem | None:
    if isinstance(spec, ChoiceSpec):
        return None if value in spec.values else Problem("choice", name, value, allowed=spec.values)
    if isinstance(spec, FlagSpec):
        return None if isinstance(value, bool) else Problem("flag", name, value)
    if isinstance(spec, TextSpec):
        fits = isinstance(value, str) and len(value) <= spec.most
        return None if fits else Problem("text", name, value, 0, spec.most)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Problem("finite", name, value)
    if isinstance(value, float) and not math.isfinite(value):  # a whole number is finite, even too large for a float
        return Problem("finite", name, value)
    if isinstance(default, int) and value != int(value):
        return Problem("whole", name, value)
    if not spec.low <= value <= spec.high:
        return Problem("range", name, value, spec.low, spec.high)
    return None


# --------------------------------------------------------------------------------------------------------------------
# What comes out


@dataclass(frozen=True)
class Metric:
    """One number that a run measures.

    ``unit`` is "1", "nats", "bytes", "s", "flop", "flop/byte", "flop/s", "bytes/s" or "%".

    ``measured``: a time that was taken, or follows from one. It is of this device at that moment, and no seed decides
    it. So such a result is measured anew for everyone who asks, here and by itself; and a claim about it must be an
    ``observation``, bounded on one side with a large margin: a narrow bound would fail on the next machine, and with no
    claim at all a sentence on speed would stand without its measurement.
    """

    name: str
    unit: str = "1"
    measured: bool = False


@dataclass(frozen=True)
class Plot:
    """What to draw from one table of a Result, as data; ``ui/charts.py`` makes the chart.

    ``table``   key of ``Result.tables``; every other name is a column of it
    ``mark``    "line", "point", "bar", "area" or "heat": a cell for each x and y, coloured by ``value``
    ``by``      column that splits the rows into series; ``facet`` column that splits them into small multiples
    ``low``, ``high``   columns of a band around y
    ``theory``  column with the law to compare with, drawn as a dashed line
    ``one_law``  the law is the same for all series: one line through all rows, not one for each of them
    ``measured``  columns with times that were taken, or what follows from them, as in :class:`Metric`; columns that
                are called like a measured metric are so by themselves
    """

    name: str
    table: str
    x: str
    y: str
    mark: Literal["line", "point", "bar", "area", "heat"] = "line"
    by: str | None = None
    facet: str | None = None
    low: str | None = None
    high: str | None = None
    theory: str | None = None
    value: str | None = None
    x_scale: Literal["linear", "log2", "log10"] = "linear"
    y_scale: Literal["linear", "log2", "log10"] = "linear"
    x_unit: str = "1"
    y_unit: str = "1"
    one_law: bool = False
    measured: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the table that it draws."""
        named = (self.x, self.y, self.by, self.facet, self.low, self.high, self.theory, self.value)
        return tuple(column for column in named if column)


Table = dict[str, np.ndarray]


@dataclass(frozen=True)
class Result:
    """Metrics as plain floats, tables as named numpy columns of equal length. Nothing of torch leaves the engine.

    Columns hold float32/float64, int or strings; ``done`` is the share of the work behind a partial result.
    """

    metrics: dict[str, float]
    tables: dict[str, Table] = field(default_factory=dict)
    done: float = 1.0


# --------------------------------------------------------------------------------------------------------------------
# What goes in


class Stopped(Exception):
    """The reader pressed Stop or went away, a newer job replaced this one, or the time budget ran out (``reason``)."""

    def __init__(self, reason: Literal["stop", "replaced", "deadline", "abandoned"]) -> None:
        super().__init__(reason)
        self.reason = reason


def _never() -> None:
    return None


@dataclass
class Run:
    """What a run is given: randomness, device, precision, and a way to report.

    Random inputs are drawn on the CPU in float32 from ``generator`` and then moved, so a seed means the same numbers on
    every device.
    """

    generator: torch.Generator
    device: torch.device
    dtype: torch.dtype
    on_progress: Callable[[float, Result | None], None] = lambda fraction, partial: None
    check_stop: Callable[[], None] = _never  # raises Stopped

    def randn(self, *shape: int) -> torch.Tensor:
        """Standard normal numbers. Shapes: as asked."""
        import torch

        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def rand(self, *shape: int) -> torch.Tensor:
        """Uniform numbers in [0, 1). Shapes: as asked."""
        import torch

        return torch.rand(*shape, generator=self.generator).to(self.device, self.dtype)

    def progress(self, fraction: float, partial: Result | None = None) -> None:
        """Report how far the run is and, if there is one, what is known so far.

        Call it at every chunk (at most 0.2 s of work apart): a stop and a deadline take effect here, and only here.

        Raises: Stopped.
        """
        self.on_progress(fraction, partial)
        self.check_stop()


def make_run(seed: int, device: str = "cpu", dtype: str = "float32", **hooks: Any) -> Run:
    """A Run for ``seed`` on ``device``, computing in ``dtype``.

    Source of randomness: a CPU generator of its own; torch's global generator is never touched.
    """
    import torch

    return Run(torch.Generator().manual_seed(seed), torch.device(device), getattr(torch, dtype), **hooks)


def data_file(name: str) -> Path:
    """Where a file of ``FILES`` lies: below the engine's folder, or beside an export, there also without its folder.

    Raises: FileNotFoundError that says where it is looked for.
    """
    here = Path(__file__).parent
    found = next((path for path in (here / name, here / Path(name).name) if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"{here / name} is missing; put {Path(name).name} beside {Path(__file__).name}")
    return found


class Stopwatch:
    """Seconds since it was made; for deadlines, not for benchmarks."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._start
