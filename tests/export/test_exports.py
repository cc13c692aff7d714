"""Exports of every experiment: they stand by themselves, and print the numbers of the app to the last digit."""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import registry
from engine.base import data_file
from engine.runner import RunSpec, run_spec
from export.notebook import notebook
from export.script import flat_run, script
from tests.export.runs import WORDS, code_cells, expected, metric_lines, other_params

NAMES = registry.names()
NOTEBOOK_WORDS = WORDS | {"formula": "x^2"}
ROOMS = ("app", "pages", "ui", "study", "export", "tools", "claims", "content", "engine", "bench", "tests")
ABSENT = ("streamlit", "pandas", "yaml", "altair", "pydantic", "nbformat", "matplotlib")

# Runs files as if each were started, and tells what they print: importing torch takes longer than most of them. What
# the project is and uses can't be imported. A line of paths is answered by a line of outputs, or by what went wrong.
DRIVER = f"""
import contextlib, io, json, os, runpy, sys, traceback
sys.modules.update(dict.fromkeys({ROOMS + ABSENT}))
for line in sys.stdin:
    try:
        answer = []
        for path in json.loads(line):
            os.chdir(os.path.dirname(path))
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                runpy.run_path(path, run_name="__main__")
            answer.append(printed.getvalue())
    except BaseException:
        answer = traceback.format_exc()
    print(json.dumps(answer), flush=True)
"""


def exported(name: str) -> dict[str, str]:
    """Both exports of a run that is not the default one, as Python."""
    spec = RunSpec(name, other_params(name), seed=5)
    cells = code_cells(notebook(spec, **NOTEBOOK_WORDS))
    return {"script.py": script(spec, **WORDS), "notebook.py": "\n\n".join(cells) + "\n"}


def isolated(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A Python by itself; it may use as many threads as there are cores."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-I", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


@pytest.fixture(scope="module")
def driver() -> Iterator[Callable[[list[Path]], list[str]]]:
    """``driver(paths)`` is what each file prints."""
    with isolated("-c", DRIVER, stdin=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout

        def answer(paths: list[Path]) -> list[str]:
            print(json.dumps([str(path) for path in paths]), file=process.stdin, flush=True)
            told = json.loads(process.stdout.readline())
            assert isinstance(told, list), told
            return told

        yield answer
        process.stdin.close()


def test_the_driver_starts_each_file_anew_and_tells_what_went_wrong(driver, tmp_path):
    (tmp_path / "one.py").write_text("x = 1\nprint(__name__, 'x' in dir())", "utf-8")
    (tmp_path / "two.py").write_text("print('x' in dir())", "utf-8")
    (tmp_path / "three.py").write_text("import yaml", "utf-8")
    assert driver([tmp_path / "one.py", tmp_path / "two.py"]) == ["__main__ True\n", "False\n"]
    with pytest.raises(AssertionError, match="import of yaml halted"):
        driver([tmp_path / "three.py"])
    assert driver([tmp_path / "two.py"]) == ["False\n"]


@pytest.mark.parametrize("name", NAMES)
def test_an_export_prints_what_the_app_measures(name, tmp_path, driver):
    params = other_params(name)
    assert sum(params[p] != d for p, d in registry.get(name).Params.defaults().items() if p in params) >= 2
    first = RunSpec(name, params, seed=5)
    second = RunSpec(name, params, seed=6)
    third = RunSpec(name, params, seed=7, dtype="float64")
    for file in flat_run(first).files:  # as the script tells its reader to
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(data_file(file).read_bytes())
    text = script(first, **WORDS)
    assert text.count("\nSEED = 5\n") == 1
    (tmp_path / "first.py").write_text(text, "utf-8")
    (tmp_path / "second.py").write_text(text.replace("\nSEED = 5\n", "\nSEED = 6\n"), "utf-8")
    (tmp_path / "third.py").write_text("\n\n".join(code_cells(notebook(third, **NOTEBOOK_WORDS))), "utf-8")
    outputs = driver([tmp_path / file for file in ("first.py", "second.py", "third.py")])
    lines = [output.splitlines()[1:] for output in outputs]  # behind the run's own
    assert settled(name, lines[0]) == settled(name, expected(first))
    assert settled(name, lines[1]) == settled(name, expected(second))
    result = run_spec(third)
    wanted = metric_lines(name, result)
    metrics, (header, *printed_rows) = lines[2][: len(wanted)], lines[2][len(wanted) :]
    assert settled(name, metrics) == settled(name, wanted)
    plot = registry.get(name).plots[0]
    table = result.tables[plot.table]  # without matplotlib the numbers behind the chart are printed
    rows = ["\t".join(map(str, row)) for row in zip(*table.values(), strict=True)]
    assert header == "\t".join(table)
    assert len(printed_rows) == len(rows)
    if not plot.measured:
        assert printed_rows == rows


def settled(name, lines):
    """Printed metrics without the values of times that were taken, which are others at every run."""
    measured = {metric.name for metric in registry.get(name).metrics if metric.measured}
    return [line.partition(" = ")[0] if line.partition(" = ")[0] in measured else line for line in lines]


def test_a_bare_python_runs_the_script(tmp_path):
    # no machine has a hundredth GPU: the run falls back to the CPU, and says so
    spec = RunSpec("qk_variance", {"d_k": 16, "n_pairs": 512}, seed=3, device="cuda:99")
    (tmp_path / "script.py").write_text(script(spec, **WORDS), "utf-8")
    with isolated("script.py", cwd=tmp_path) as process:
        run, *metrics = process.communicate()[0].splitlines()
    assert process.returncode == 0
    assert run.startswith("# seed 3, cpu, float32, torch 2.")
    assert metrics == expected(RunSpec("qk_variance", {"d_k": 16, "n_pairs": 512}, seed=3))
    assert os.listdir(tmp_path) == ["script.py"]


@pytest.mark.parametrize("name", NAMES)
def test_exported_code_is_whole_and_tidy(name, tmp_path):
    spec = RunSpec(name, other_params(name), seed=5)
    (tmp_path / "script.py").write_text(script(spec, **WORDS), "utf-8")
    (tmp_path / "notebook.ipynb").write_text(notebook(spec, **NOTEBOOK_WORDS), "utf-8")
    for command in (["check", "--select", "F,E,W,I"], ["format", "--check"]):  # F: no name is missing, none is unused
        ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", "--line-length", "120", "."]
        done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_exported_code_imports_torch_and_numpy_alone(name):
    for file, text in exported(name).items():
        tree = ast.parse(text)
        imported = {
            module.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for module in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
        }
        optional = {"matplotlib"} if file == "notebook.py" else set()
        assert imported - sys.stdlib_module_names == {"numpy", "torch"} | optional
        at_top = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
        assert not at_top & {"matplotlib", "matplotlib.pyplot"}
        assert not {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)} & {
            "exec",
            "eval",
            "__import__",
        }


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_exported_that_nothing_uses(name):
    tree = ast.parse(exported(name)["script.py"])
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert defined - used == set()
    assert not {"memory_bytes", "BUDGET_S", "PLOTS", "Stopwatch", "Plot"} & (defined | used)
    assert not defined & set(dir(builtins))
