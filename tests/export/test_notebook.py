"""notebook.py: cells in reading order, the same bytes every time, and a chart of the numbers in the table."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from typing import Any

import nbformat
import numpy as np
import pytest

from content.loader import load_deck
from content.schema import LANGUAGES
from engine import registry
from engine.base import Plot, Result, Table
from engine.runner import RunSpec
from export import notebook as module
from export.notebook import drawing, notebook
from tests.export.runs import code_cells, executed, expected

SPEC = RunSpec("softmax_saturation", {"d_k": 16, "batch": 1}, seed=3)
WORDS: dict[str, Any] = {"title": "A title", "about": "About it.", "formula": r"\sum_i w_i", "language": "en"}


@pytest.mark.parametrize("name", registry.names())
def test_a_notebook_is_valid_and_always_the_same(name):
    spec = RunSpec(name, {}, seed=3)
    text = notebook(spec, **WORDS)
    nbformat.validate(nbformat.reads(text, as_version=4))
    assert text == notebook(spec, **WORDS)
    ids = [cell["id"] for cell in json.loads(text)["cells"]]
    assert len({*ids}) == len(ids)
    changed = [cell["id"] for cell in json.loads(notebook(RunSpec(name, {}, seed=4), **WORDS))["cells"]]
    assert [i for i, (a, b) in enumerate(zip(ids, changed, strict=True)) if a != b] == [1]  # the cell with the seed


def test_cells_stand_in_reading_order():
    cells = json.loads(notebook(SPEC, **WORDS))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown"] + ["code"] * (len(cells) - 1)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    words, settings, *sections, run, chart = ("".join(cell["source"]) for cell in cells)
    assert words.startswith("# A title\n\nAbout it.\n\n$$\n\\sum_i w_i\n$$\n\n")
    assert "PARAMETERS = {" in settings
    headings = [section.splitlines()[1] for section in sections]
    assert headings[0].startswith("# engine/attention.py")
    assert headings[-1].startswith("# engine/experiments/softmax_saturation.py")
    assert run.startswith("torch.set_num_threads(1)")
    assert "plt.show()" in chart


@pytest.mark.parametrize("language", LANGUAGES)
def test_its_words_are_the_reader_s(language):
    words = "".join(json.loads(notebook(SPEC, **WORDS | {"language": language}))["cells"][0]["source"])
    strings = load_deck().strings.ui
    assert strings["notebook_change"].get(language) in words
    assert strings["notebook_needs"].get(language).split("{")[0] in words
    assert "{" not in words.replace(WORDS["formula"], "")


def test_cells_run_one_by_one_as_jupyter_runs_them():
    # Jupyter compiles each cell by itself, and keeps in mind what earlier ones imported from __future__
    cells = code_cells(notebook(SPEC, **WORDS))
    source = "import codeop\ncompiler = codeop.Compile()\n" + "".join(
        f"exec(compiler({cell!r}, 'cell', 'exec'), globals())\n" for cell in cells[:-1]
    )
    assert executed(source)[1][1:] == expected(SPEC)


def test_a_file_that_it_reads_is_named_and_found_beside_it(monkeypatch, tmp_path):
    flat_run = module.flat_run
    files = ("trained/model.npz",)
    monkeypatch.setattr(module, "flat_run", lambda *given: dataclasses.replace(flat_run(*given), files=files))
    text = notebook(SPEC, **WORDS)
    assert "put `model.npz` into the same folder" in text
    names, _ = executed(code_cells(text)[0])
    assert names["__file__"] == "notebook.ipynb"  # engine.base.data_file looks in the folder of this name


# --------------------------------------------------------------------------------------------------------------------
# The chart


class Axes:
    """Notes what it is told to draw; knows no more of matplotlib's calls than what is drawn with."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, list[Any], dict[str, Any]]] = []
        self.settings: dict[str, Any] = {}
        self.shown = False

    def _note(self, mark: str) -> Any:
        return lambda *columns, **style: self.drawn.append((mark, [*map(np.ndarray.tolist, columns)], style))

    def __getattr__(self, name: str) -> Any:
        if name in ("scatter", "bar", "fill_between"):
            return self._note(name)
        raise AttributeError(name)

    def plot(self, x: np.ndarray, y: np.ndarray, *form: str, **style: Any) -> None:
        self._note("dashes" if form else "plot")(x, y, **style)

    def set(self, **settings: str) -> None:
        self.settings |= settings

    def imshow(self, cells: np.ndarray) -> str:
        self._note("imshow")(cells)
        return "image"

    def set_xticks(self, places: range, labels: list[Any]) -> None:
        self.settings["xticks"] = list(places), labels

    def set_yticks(self, places: range, labels: list[Any]) -> None:
        self.settings["yticks"] = list(places), labels

    def colorbar(self, image: str) -> None:
        self.settings["colorbar"] = image == "image"

    def set_xscale(self, kind: str, *, base: int) -> None:
        self.settings["xscale"] = kind, base

    def set_yscale(self, kind: str, *, base: int) -> None:
        self.settings["yscale"] = kind, base

    def legend(self) -> None:
        self.settings["legend"] = True


TABLE = {
    "x": np.array([1, 2, 1, 2]),
    "y": np.array([1.0, 2.0, 3.0, 4.0]),
    "kind": np.array(["a", "a", "b", "b"]),
    "place": np.array(["p", "q", "p", "q"]),
    "least": np.array([0.5, 1.5, 2.5, 3.5]),
    "most": np.array([1.5, 2.5, 3.5, 4.5]),
    "law": np.array([1.1, 2.1, 3.1, 4.1]),
}


def drawn(monkeypatch, plot: Plot, table: Table = TABLE) -> Axes:
    axes = Axes()
    pyplot: Any = types.ModuleType("matplotlib.pyplot")
    pyplot.subplots = lambda **style: (axes, axes)  # a figure and its axes
    pyplot.show = lambda: setattr(axes, "shown", True)
    package: Any = types.ModuleType("matplotlib")
    package.pyplot = pyplot
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    exec(drawing(plot), {"np": np, "result": Result({}, {"t": table})})
    assert axes.shown
    return axes


@pytest.mark.parametrize(
    ("mark", "call"),
    [("line", "plot"), ("point", "scatter"), ("bar", "bar"), ("area", "fill_between")],
)
def test_each_mark_draws_the_columns(monkeypatch, mark, call):
    axes = drawn(monkeypatch, Plot("p", "t", "x", "y", mark=mark))
    ((kind, (x, y), _),) = axes.drawn
    assert kind == call
    assert [*map(int, x)] == [1, 2, 1, 2]  # bars stand side by side, named by their numbers
    assert y == [1.0, 2.0, 3.0, 4.0]
    assert axes.settings == {"xlabel": "x", "ylabel": "y"}


def test_series_bands_and_laws_belong_together(monkeypatch):
    plot = Plot("p", "t", "x", "y", by="kind", low="least", high="most", theory="law", y_unit="nats", x_scale="log2")
    axes = drawn(monkeypatch, plot)
    assert axes.drawn == [
        ("plot", [[1, 2], [1.0, 2.0]], {"label": "a"}),
        ("fill_between", [[1, 2], [0.5, 1.5], [1.5, 2.5]], {"alpha": 0.2}),
        ("dashes", [[1, 2], [1.1, 2.1]], {"linewidth": 1}),
        ("plot", [[1, 2], [3.0, 4.0]], {"label": "b"}),
        ("fill_between", [[1, 2], [2.5, 3.5], [3.5, 4.5]], {"alpha": 0.2}),
        ("dashes", [[1, 2], [3.1, 4.1]], {"linewidth": 1}),
    ]
    assert axes.settings["ylabel"] == "y (nats)"
    assert axes.settings["xscale"] == ("log", 2)
    assert "yscale" not in axes.settings
    assert axes.settings["legend"]
    assert axes.settings["title"].endswith("law")


def test_a_heat_map_has_a_cell_for_each_pair(monkeypatch):
    table = {
        "row": np.array(["0 a", "0 a", "1 b"]),
        "column": np.array([5, 7, 7]),
        "weight": np.array([0.1, 0.2, 0.3], np.float32),
    }
    axes = drawn(monkeypatch, Plot("p", "t", "column", "row", mark="heat", value="weight"), table)
    ((kind, (cells,), _),) = axes.drawn
    assert kind == "imshow"
    np.testing.assert_array_equal(np.array(cells, np.float32), np.array([[0.1, 0.2], [np.nan, 0.3]], np.float32))
    assert axes.settings == {
        "xlabel": "column",
        "ylabel": "row",
        "title": "weight",
        "xticks": ([0, 1], [5, 7]),
        "yticks": ([0, 1], ["a", "b"]),
        "colorbar": True,
    }


def test_small_multiples_become_series(monkeypatch):
    axes = drawn(monkeypatch, Plot("p", "t", "x", "y", by="kind", facet="place", y_scale="log10"))
    assert [(style["label"], y) for _, (_, y), style in axes.drawn] == [
        ("p, a", [1.0]),
        ("q, a", [2.0]),
        ("p, b", [3.0]),
        ("q, b", [4.0]),
    ]
    assert axes.settings["yscale"] == ("log", 10)
