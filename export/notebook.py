"""A run as a Jupyter notebook: the cells of the script, with words, and its first chart."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine import registry
from engine.base import Plot
from engine.runner import RunSpec
from export.script import RUN, flat_run, preamble, say, section_text, versions

# Without a file of its own, a notebook looks for what it reads in the folder it runs in.
BESIDE = '\n__file__ = "notebook.ipynb"  # files are looked for beside it\n'


TABLE = """\
table = result.tables["{table}"]
try:
    import matplotlib.pyplot as plt
except ImportError:  # the numbers do without
    print(*table, sep="\\t")
    for row in zip(*table.values(), strict=True):
        print(*row, sep="\\t")
else:
"""


def notebook(spec: RunSpec, *, title: str, about: str, formula: str, language: str) -> str:
    """The text of an .ipynb file that runs an experiment, prints its metrics and draws its first plot.

    ``title``, ``about`` and ``formula`` (TeX) open it, ``language`` is that of its other words. matplotlib draws where
    it is installed; elsewhere the table is printed. The same arguments give the same bytes.

    Raises: UnknownExperiment, ParamsError; ExportError where the code does not fit into one namespace.
    """
    import nbformat
    from nbformat import v4

    draw = drawing(registry.get(spec.experiment).plots[0])
    flat = flat_run(spec, draw)
    torch, numpy = versions()
    paragraphs = [
        f"# {title}",
        about,
        f"$$\n{formula}\n$$",
        say("notebook_change", language),
        say("notebook_needs", language, experiment=spec.experiment, torch=torch, numpy=numpy),
        *(say("notebook_file", language, file=file, name=Path(file).name) for file in flat.files),
    ]
    codes = [
        preamble(spec, flat) + (BESIDE if flat.files else ""),
        *map(section_text, flat.sections),
        RUN,
        draw,
    ]
    cells = [v4.new_markdown_cell("\n\n".join(paragraphs)), *(v4.new_code_cell(code.rstrip("\n")) for code in codes)]
    for number, cell in enumerate(cells):  # nbformat draws ids at random
        cell.id = hashlib.sha256(f"{number} {cell.source}".encode()).hexdigest()[:12]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    nbformat.validate(made)
    return str(nbformat.writes(made)) + "\n"


def drawing(plot: Plot) -> str:
    """Code that draws a plot of ``result`` with matplotlib, or prints its table.

    Axes and series bear the names of the columns: matplotlib's own fonts have no Chinese.
    """
    if plot.mark == "heat":
        return TABLE.format(table=plot.table) + _indented(_heat(plot))
    splits = [column for column in (plot.facet, plot.by) if column]  # small multiples become series of one chart
    columns = {name: f'table["{name}"]' + ("[rows]" if splits else "") for name in plot.columns}
    x = columns[plot.x] + (".astype(str)" if plot.mark == "bar" else "")  # one bar beside the other, at any distance
    marks = {
        "line": "plot(x, y{})",
        "point": "scatter(x, y{})",
        "bar": "bar(x, y, alpha=0.7{})",
        "area": "fill_between(x, y, alpha=0.7{})",
    }
    series = [f"x, y = {x}, {columns[plot.y]}", "axes." + marks[plot.mark].format(", label=name" if splits else "")]
    if plot.low and plot.high:
        series.append(f"axes.fill_between(x, {columns[plot.low]}, {columns[plot.high]}, alpha=0.2)")
    if plot.theory:
        series.append(f'axes.plot(x, {columns[plot.theory]}, "k--", linewidth=1)')

    lines = ['figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")']
    if splits:
        named = [f'table["{column}"]' for column in splits]
        joined = f'np.array([f"{{a}}, {{b}}" for a, b in zip({", ".join(named)}, strict=True)])'
        lines.append(f"names = {named[0] if len(named) == 1 else joined}")
        lines += ["for name in dict.fromkeys(names.tolist()):", "    rows = names == name"]
    lines += [f"    {line}" if splits else line for line in series]
    for axis, scale in (("x", plot.x_scale), ("y", plot.y_scale)):
        if scale != "linear" and (axis, plot.mark) != ("x", "bar"):
            lines.append(f'axes.set_{axis}scale("log", base={scale.removeprefix("log")})')
    x_label, y_label = _with_unit(plot.x, plot.x_unit), _with_unit(plot.y, plot.y_unit)
    lines.append(f'axes.set(xlabel="{x_label}", ylabel="{y_label}")')
    if plot.theory:
        lines.append(f'axes.set(title="- - -  {plot.theory}")')
    lines += ["axes.legend()", "plt.show()"] if splits else ["plt.show()"]
    return TABLE.format(table=plot.table) + _indented(lines)


def _heat(plot: Plot) -> list[str]:
    """A cell for each x and y, in the order of the rows; of a name, "place character", the axis shows the character."""
    return [
        f'across, down = (list(dict.fromkeys(table[name].tolist())) for name in ("{plot.x}", "{plot.y}"))',
        "cells = np.full((len(down), len(across)), np.nan)",
        f'for x, y, value in zip(table["{plot.x}"], table["{plot.y}"], table["{plot.value}"], strict=True):',
        "    cells[down.index(y), across.index(x)] = value",
        "figure, axes = plt.subplots(figsize=(8, 7))",
        "figure.colorbar(axes.imshow(cells))",
        "axes.set_xticks(range(len(across)), [name[-1] if isinstance(name, str) else name for name in across])",
        "axes.set_yticks(range(len(down)), [name[-1] if isinstance(name, str) else name for name in down])",
        f'axes.set(xlabel="{_with_unit(plot.x, plot.x_unit)}", ylabel="{_with_unit(plot.y, plot.y_unit)}", '
        f'title="{plot.value}")',
        "plt.show()",
    ]


def _indented(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _with_unit(name: str, unit: str) -> str:
    return name if unit == "1" else f"{name} ({unit})"
