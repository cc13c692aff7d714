"""One suite for every experiment of the registry: what the contract in engine/base.py promises."""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from bench import bare
from content.schema import LANGUAGES, Strings
from engine import registry
from engine.base import BaseParams, ChoiceSpec, FlagSpec, NumberSpec, ParamsError, Result, Stopped, TextSpec, make_run
from engine.registry import Experiment
from tests.harness import small

ROOT = Path(registry.__file__).parents[1]
NAMES = registry.names()
UNITS = {"1", "nats", "bytes", "s", "flop", "flop/byte", "flop/s", "bytes/s", "%"}  # engine.base.Metric

# Budgets are for one idle core of the reference machine. A test may run beside another process on the same core, which
# halves its share of cache and execution units, and on a core half as fast without its vector instructions.
BUDGET_FACTOR = 10
CAP_S = 5.0 * 2  # CPU seconds that a run at a bound may take: five on the reference machine, twice that on a slow one
TRAINING_S = 2.0  # CPU seconds after which a training is stopped: it has reported many of its steps by then
RECORDED_S = 3.0  # CPU seconds after which a run whose memory is recorded is stopped: recorded, it takes longer
CHUNK_S = 0.2 * BUDGET_FACTOR  # CPU seconds between two reports of progress

# Metrics that float32 and float64 need not agree on, each with the reason.
DTYPE_MATTERS: dict[str, dict[str, str]] = {
    "roofline": {
        "least_bytes": "a number of float64 has twice the bytes",
        "eager_bytes": "a number of float64 has twice the bytes",
        "intensity_flop_per_byte": "operations for each byte: half as many",
        "eager_intensity_flop_per_byte": "operations for each byte: half as many",
    },
}

# How many times the usual tolerance float32 may be off, with the reason.
AMPLIFIED = {
    # the bare path multiplies gradients by 4,500, through rows that are nearly one-hot: so it does their rounding
    ("depth_signal", "gradient_kept_skip_stack"): 4,
}


# Measured once and then kept for as long as the process lives.
ONCE_A_PROCESS = {"copy_bytes_per_s", "matmul_flop_per_s", "ridge_flop_per_byte", "least_time_s"}


@functools.cache
def default_run(name: str, seed: int = 0, dtype: str = "float32") -> Result:
    experiment = registry.get(name)
    return experiment.run(experiment.Params(**small(experiment)), make_run(seed, dtype=dtype))


def equal(name: str, one: Result, other: Result) -> bool:
    """Whether two results of an experiment agree in all that a seed decides: in everything but measured times."""
    experiment = registry.get(name)
    decided = [m.name for m in experiment.metrics if not m.measured]
    columns = [(t, c) for t in one.tables for c in one.tables[t] if c not in experiment.measured_columns(t)]
    return all(one.metrics.get(m) == other.metrics.get(m) for m in decided) and all(
        np.array_equal(one.tables[t][c], other.tables[t][c]) for t, c in columns
    )


every_experiment = pytest.mark.parametrize("name", NAMES)


# --------------------------------------------------------------------------------------------------------------------
# Declarations


@every_experiment
def test_the_benchmark_knows_its_bare_operations(name):
    assert registry.get(name).trains or hasattr(bare, name), f"bench/bare.py has no function {name}"


@every_experiment
def test_public_names_are_those_of_the_contract(name):
    tree = ast.parse(registry.get(name).path.read_text("utf-8"))
    assert ast.get_docstring(tree)
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name[0] != "_"}
    assert defined == {"Params", "memory_bytes", "run"}, "helpers begin with an underscore"
    assigned = {
        name.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    assert {"METRICS", "PLOTS", "BUDGET_S"} <= assigned
    assert all(n.isupper() or n[0] == "_" for n in assigned)  # whatever else a module names is a constant


def test_declarations_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing it fails from here on
        "from engine import registry\n"
        "for name in registry.names():\n"
        "    e = registry.get(name); p = e.Params(); print(name, e.memory_bytes(p), e.Params.specs(), e.plots)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(NAMES)


@every_experiment
def test_parameters_do_not_take_the_names_of_a_run(name):
    # a run's own settings stand beside the parameters in a link and among the controls of the lab
    assert not {"experiment", "seed", "device", "dtype", "lang", "pin", "sweep", "by", "metric", "seeds"} & set(
        registry.get(name).Params.specs()
    )


@every_experiment
def test_metrics_and_plots_are_well_declared(name):
    experiment = registry.get(name)
    assert len(set(experiment.metric_names)) == len(experiment.metrics) > 0
    assert {m.unit for m in experiment.metrics} <= UNITS
    assert len({p.name for p in experiment.plots}) == len(experiment.plots) > 0
    assert {unit for p in experiment.plots for unit in (p.x_unit, p.y_unit)} <= UNITS
    assert {column for p in experiment.plots for column in p.measured if column not in p.columns} == set()
    # a measured time is the exception that has to be needed: something is left that a seed decides
    assert not all(m.measured for m in experiment.metrics)
    assert experiment.measures_time or not any(p.measured for p in experiment.plots)
    assert 0 < experiment.budget_s <= (10 if experiment.trains else 0.3)  # above that a run is a job, not a repaint


# --------------------------------------------------------------------------------------------------------------------
# The default run


@every_experiment
def test_default_run_keeps_its_budget(name):
    experiment = registry.get(name)
    default_run(name)  # first uses of torch's operations are dearer
    start = time.process_time()
    experiment.run(experiment.Params(**small(experiment)), make_run(1))
    assert time.process_time() - start < experiment.budget_s * BUDGET_FACTOR


class Draws(TorchFunctionMode):
    """Notices whether any operation of torch was given a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.any = self.any or "generator" in (kwargs or {})
        return func(*args, **(kwargs or {}))


@every_experiment
def test_a_seed_decides_everything(name):
    experiment = registry.get(name)
    with Draws() as draws:
        again = experiment.run(experiment.Params(**small(experiment)), make_run(0))
    assert equal(name, again, default_run(name))
    # an experiment that draws no random number is deterministic by nature, and only such a one
    assert equal(name, default_run(name, seed=1), again) is not draws.any


@pytest.mark.parametrize("name", [n for n in NAMES if registry.get(n).measures_time])
def test_what_is_declared_as_measured_is_not_decided_by_a_seed(name):
    experiment = registry.get(name)
    again = experiment.run(experiment.Params(**small(experiment)), make_run(0)).metrics
    measured = [m.name for m in experiment.metrics if m.measured and m.name not in ONCE_A_PROCESS]
    # one time may come out the same twice, to the last digit of the clock; if all do, no clock was read
    assert {m for m in measured if again[m] != default_run(name).metrics[m]}


@every_experiment
def test_metrics_are_those_declared_as_finite_floats(name):
    experiment, result = registry.get(name), default_run(name)
    assert tuple(result.metrics) == experiment.metric_names
    assert {n: type(v) for n, v in result.metrics.items() if type(v) is not float} == {}
    assert {n: v for n, v in result.metrics.items() if not math.isfinite(v)} == {}


@every_experiment
def test_tables_are_plain_columns_of_equal_length(name):
    for table in default_run(name).tables.values():
        assert {len(column) for column in table.values()} == {len(next(iter(table.values())))}
        for column_name, column in table.items():
            assert type(column) is np.ndarray, column_name
            assert column.ndim == 1
            assert column.dtype.kind in "fiU", column_name
            assert column.dtype not in (np.float16, object)
            assert column.dtype.kind != "f" or np.isfinite(column).all(), column_name


@every_experiment
def test_plots_find_their_columns(name):
    experiment, result = registry.get(name), default_run(name)
    assert {p.table for p in experiment.plots} == set(result.tables)
    for plot in experiment.plots:
        table = result.tables[plot.table]
        named = [c for c in (plot.x, plot.y, plot.by, plot.facet, plot.low, plot.high, plot.theory, plot.value) if c]
        assert set(named) <= set(table), plot.name
        assert len(table[plot.x]) > 0
        measured = (plot.value,) if plot.mark == "heat" else (plot.y, plot.low, plot.high, plot.theory)
        numbers = [(c, plot.y_scale) for c in measured if c]
        if table[plot.x].dtype.kind != "U":
            numbers.append((plot.x, plot.x_scale))
        for column, scale in numbers:
            assert table[column].dtype.kind in "fi", (plot.name, column)
            assert scale == "linear" or table[column].min() > 0, (plot.name, column)  # a logarithmic axis has no 0


@every_experiment
def test_float32_is_near_float64(name):
    single, double = default_run(name).metrics, default_run(name, dtype="float64").metrics
    measured = {m.name for m in registry.get(name).metrics if m.measured}
    for metric in sorted(set(single) - measured - set(DTYPE_MATTERS.get(name, {}))):
        # float32 keeps seven digits; sums over some thousand terms, exp of logits near 100 and a few optimizer steps
        # cost up to four of them, and a row on a threshold may fall on either side
        rel = 2e-3 * AMPLIFIED.get((name, metric), 1)
        near = pytest.approx(double[metric], rel=rel, abs=2e-3 if metric.endswith("_share") else 1e-5)
        assert single[metric] == near, metric


# --------------------------------------------------------------------------------------------------------------------
# Memory, time and progress, at the defaults and at every bound


@dataclass
class Watch:
    """Progress and stop hooks of a run: the longest CPU time between two reports, and an end at the cap."""

    cap_s: float
    start: float = field(default_factory=time.process_time)
    last: float = field(default_factory=time.process_time)
    longest: float = 0.0
    fractions: list[float] = field(default_factory=list)

    def report(self, fraction: float, partial: Result | None) -> None:
        self.longest = max(self.longest, time.process_time() - self.last)
        self.last = time.process_time()
        self.fractions.append(fraction)

    def check_stop(self) -> None:
        if time.process_time() - self.start > self.cap_s:
            raise Stopped("deadline")


@functools.cache
def _load_profiler() -> None:
    """Its first use imports modules, whose objects tracemalloc would count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        torch.ones(1)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that torch and numpy held at once, each by itself: together an upper bound of both.

    torch's CPU allocator reports to the profiler, numpy's to tracemalloc.
    """
    _load_profiler()
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
        _, by_numpy = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return int(max(sizes, default=0)) + by_numpy


def test_peak_bytes_sees_torch_and_numpy():
    def work() -> None:
        tensor = torch.ones(1000, 1000)
        (tensor + tensor).sum()
        del tensor
        np.ones(10**6).sum()

    # 8 MB of torch at once, 8 MB of numpy; some of Python's own
    assert 16e6 <= peak_bytes(work) < 17e6


def attempt(experiment: Experiment, params: BaseParams, dtype: str, cap_s: float) -> tuple[Watch, Result | None]:
    """A run that is stopped after so many CPU seconds. There is no result where it was."""
    watch, result = Watch(cap_s), None
    with contextlib.suppress(Stopped):
        run = make_run(3, dtype=dtype, on_progress=watch.report, check_stop=watch.check_stop)
        result = experiment.run(params, run)
    watch.report(1.0, None)
    return watch, result


def within_limits(
    experiment: Experiment, params: BaseParams, dtype: str = "float32", *, to_its_end: bool
) -> tuple[Result | None, int, bool]:
    """What a run gives, the most bytes that it held, and whether it was recorded to its end; its reports are checked.

    Recording only adds to the time: a run that reports often enough nevertheless is not made again, unless it was
    stopped and is wanted ``to_its_end``. Of the others the best of three counts, for what else the machine does adds
    to it too.
    """
    recorded: list[tuple[Watch, Result | None]] = []
    needed = peak_bytes(lambda: recorded.append(attempt(experiment, params, dtype, RECORDED_S)))
    watch, result = recorded[0]
    whole = result is not None
    if watch.longest >= CHUNK_S or (to_its_end and not whole):
        for _ in range(3):
            watch, result = attempt(experiment, params, dtype, TRAINING_S if experiment.trains else CAP_S)
            if watch.longest < CHUNK_S:
                break
    assert watch.longest < CHUNK_S, f"{watch.longest} CPU seconds between two reports"
    assert watch.fractions == sorted(watch.fractions)
    assert 0 <= watch.fractions[0] <= watch.fractions[-1] <= 1
    return result, needed, whole


def bounds(name: str) -> Iterator[tuple[str, object]]:
    """Every field at both ends of its range, or at each of its values."""
    experiment = registry.get(name)
    for field_name, spec in experiment.Params.specs().items():
        if isinstance(spec, NumberSpec):
            whole = isinstance(experiment.Params.defaults()[field_name], int)
            yield from ((field_name, int(v) if whole else float(v)) for v in (spec.low, spec.high))
        elif isinstance(spec, ChoiceSpec):
            yield from ((field_name, value) for value in spec.values)
        elif isinstance(spec, FlagSpec):
            yield from ((field_name, value) for value in (False, True))
        elif isinstance(spec, TextSpec):
            yield from ((field_name, value) for value in ("x", "ab" * (spec.most // 2)))


def unread(name: str) -> Iterator[tuple[dict[str, object], str, object]]:
    """Settings that leave a field unread, beside another value for it."""
    experiment = registry.get(name)
    for field_name, value in [(None, None), *bounds(name)]:
        setting = small(experiment) | ({field_name: value} if field_name else {})
        with contextlib.suppress(ParamsError):
            params = experiment.Params(**setting)
            for idle in sorted(params.unread()):
                yield setting, idle, next(v for f, v in bounds(name) if f == idle and v != getattr(params, idle))


@pytest.mark.parametrize("name", [name for name in NAMES if any(unread(name))])
def test_what_is_called_unread_changes_nothing(name):
    experiment = registry.get(name)
    seen = set()
    for setting, idle, value in unread(name):
        decides = tuple(v for k, v in setting.items() if isinstance(v, (str, bool)))
        if (idle, decides) not in seen:  # one of the settings in which the same rules hold
            seen.add((idle, decides))
            with contextlib.suppress(ParamsError):
                one, other = (
                    experiment.run(experiment.Params(**setting | more), make_run(3)) for more in ({}, {idle: value})
                )
                assert equal(name, one, other), f"{idle} is read under {setting}"


# Read, and yet of no effect at some settings: what they change is rounded away, or none of the numbers reach it.
OF_NO_EFFECT = {
    ("attention_gradients", "dead_below"),  # a threshold that every row, or none, is below
    ("softmax_saturation", "dead_below"),
    ("head_rank", "n_kv_heads"),  # ranks that are full either way, where positions fill them
    ("key_separation", "qk_dtype"),  # no key of the suite's sizes is lost to rounding
    ("rope_bugs", "decoded_tokens"),  # bfloat16 loses more than what they would show
    ("softmax_loss_gradient", "log_epsilon"),  # float16 rounds it to 0
    ("softmax_temperature_curve", "shift"),  # of all logits: that softmax does not feel it is what is shown
}


def settings(experiment: Experiment) -> Iterator[dict[str, object]]:
    """The parameters of the suite, and those with one choice or switch changed: other branches of the code."""
    yield small(experiment)
    for field_name, spec in experiment.Params.specs().items():
        values = spec.values if isinstance(spec, ChoiceSpec) else (False, True) if isinstance(spec, FlagSpec) else ()
        for value in values:
            if value != experiment.Params.defaults()[field_name]:
                with contextlib.suppress(ParamsError):  # values that a rule refuses beside the others
                    experiment.Params(**small(experiment) | {field_name: value})
                    yield small(experiment) | {field_name: value}


def others(experiment: Experiment, setting: Mapping[str, object], field_name: str) -> Iterator[dict[str, object]]:
    """The setting with another value of a field: its lowest, half and twice of a number, one less and one more.

    The smaller ones come first, since they usually take less time and one that changes something is enough.
    """
    spec, now = experiment.Params.specs()[field_name], getattr(experiment.Params(**setting), field_name)
    if isinstance(spec, NumberSpec):
        values = [type(now)(value) for value in (spec.low, now / 2, now - 1, now + 1, 2 * now)]
    elif isinstance(spec, TextSpec):
        values = ["another text, of a cat and a dog"]
    else:
        values = list(spec.values) if isinstance(spec, ChoiceSpec) else [not now]
    for value in dict.fromkeys(values):
        with contextlib.suppress(ParamsError):
            if value != now:
                experiment.Params(**setting | {field_name: value})
                yield {**setting, field_name: value}


@pytest.mark.parametrize("name", [name for name in NAMES if not registry.get(name).measures_time])
def test_what_changes_nothing_is_called_unread(name):
    experiment, known = registry.get(name), {}

    def result(params: BaseParams) -> Result:
        if params not in known:  # a setting is also one of the others of the suite's own parameters
            known[params] = experiment.run(params, make_run(3))
        return known[params]

    for setting in settings(experiment):
        params = experiment.Params(**setting)
        one = result(params)
        for field_name in set(experiment.Params.specs()) - params.unread() - {"steps"}:
            tried = list(others(experiment, setting, field_name))
            changes = (not equal(name, one, result(experiment.Params(**some))) for some in tried)
            assert any(changes) or not tried or (name, field_name) in OF_NO_EFFECT, f"{field_name} at {setting}"


def at_bounds(name: str) -> Iterator[dict[str, object]]:
    """The parameters of the suite, and each field at a bound where it does not stand already."""
    experiment = registry.get(name)
    params = experiment.Params(**small(experiment)).as_dict()
    yield {}
    yield from ({field_name: value} for field_name, value in bounds(name) if value != params[field_name])


@pytest.mark.parametrize(
    ("name", "changed"),
    [(name, changed) for name in NAMES for changed in at_bounds(name)],
    ids=lambda v: v if isinstance(v, str) else "-".join(f"{f}-{value}" for f, value in v.items()),
)
def test_a_bound_is_refused_or_runs_within_limits(name, changed):
    experiment = registry.get(name)
    params, refused = None, []
    try:
        params = experiment.Params(**small(experiment) | changed)
    except ParamsError as error:
        refused = error.problems
    assert all(p.kind == "rule" for p in refused)  # a bound is in range: only a rule may refuse it
    if params is None:
        return
    result, needed, whole = within_limits(experiment, params, to_its_end=True)
    assert result is not None or experiment.trains, f"more than {CAP_S} CPU seconds"  # only a training has a deadline
    estimate = experiment.memory_bytes(params)
    assert type(estimate) is int
    if whole and estimate > 20 * needed + 2**24:  # on a busy machine the profiler may lose its records: once more
        needed = max(needed, peak_bytes(lambda: experiment.run(params, make_run(3))))
    overhead = 2**19  # Python's own objects, among them those of the profiler
    assert needed <= estimate + overhead
    assert not whole or estimate <= 20 * needed + 2**24  # an estimate far above refuses runs that would fit
    if result is not None:
        assert all(math.isfinite(v) for v in result.metrics.values()), result.metrics
        for table in result.tables.values():
            for column in table.values():
                assert column.dtype.kind != "f" or np.isfinite(column).all()


def corners(name: str, wanted: int = 6) -> list[dict[str, object]]:
    """Parameters with every field at an end of its range, drawn until that many are accepted by the rules."""
    experiment, draw = registry.get(name), np.random.default_rng(7)
    ends: dict[str, list[object]] = {}
    for field_name, value in bounds(name):
        ends.setdefault(field_name, []).append(value)
    found = []
    for _ in range(2000):
        values = {field_name: choices[draw.integers(len(choices))] for field_name, choices in ends.items()}
        with contextlib.suppress(ParamsError):
            experiment.Params(**values)
            if values not in found:
                found.append(values)
        if len(found) == wanted:
            break
    return found


@pytest.mark.parametrize("name", [n for n in NAMES if not registry.get(n).trains])
def test_the_estimate_holds_where_several_bounds_meet(name):
    experiment = registry.get(name)
    met = corners(name)
    assert met
    for number, values in enumerate(met):
        params = experiment.Params(**values)
        dtype, factor = (("float32", 1), ("float64", 2))[number % 2]  # the runner doubles the estimate for float64
        _, needed, _ = within_limits(experiment, params, dtype, to_its_end=False)
        assert needed <= factor * experiment.memory_bytes(params) + 2**19, (values, dtype)


def test_numbers_become_float64_on_the_cpu():
    # Apple's GPUs and some of Intel's have no float64
    for path in sorted((ROOT / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "double":
                assert ast.unparse(node.func.value).endswith(".cpu()"), f"{path.name}:{node.lineno}"


# --------------------------------------------------------------------------------------------------------------------
# Words


@pytest.fixture(scope="module")
def strings() -> Strings:
    return Strings(**yaml.safe_load((ROOT / "content" / "strings.yaml").read_text("utf-8")))


@every_experiment
def test_every_name_has_words(name, strings):
    experiment, result = registry.get(name), default_run(name)
    columns = {c for table in result.tables.values() for c in table}
    wanted = set(experiment.Params.specs()) | set(experiment.metric_names) | columns
    assert wanted - set(strings.names) == set()
    cells = {(p.table, axis) for p in experiment.plots if p.mark == "heat" for axis in (p.x, p.y)}  # named by the text
    series = {
        str(v)
        for table_name, table in result.tables.items()
        for column, values in table.items()
        if values.dtype.kind == "U" and (table_name, column) not in cells
        for v in values
    }
    values = {v for s in experiment.Params.specs().values() if isinstance(s, ChoiceSpec) for v in s.values}
    spoken = {value for value in series | values if not value[0].isupper()}  # W_q is a symbol, the same in any language
    assert spoken - set(strings.choices) == set(), "words under `choices` in content/strings.yaml"


@every_experiment
def test_every_plot_has_a_title_and_the_summary_can_be_filled(name, strings):
    experiment, result, words = registry.get(name), default_run(name), strings.experiments[name]
    assert set(words.plots) == {p.name for p in experiment.plots}
    for language in LANGUAGES:
        summary = words.summary.get(language)
        filled = summary.format(**result.metrics)
        assert not set("{}") & set(filled)
        assert filled != summary  # it tells numbers


def test_every_rule_has_words(strings):
    used = set()
    for path in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "rule" and isinstance(node.value, ast.Constant):
                used.add(node.value.value)
    assert used
    assert used - set(strings.rules) - {""} == set()
