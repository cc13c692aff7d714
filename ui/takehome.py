"""What a reader takes home from a run: the drawn chart, its rows, a script and a notebook, the link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import streamlit as st
from streamlit.components import v2

from engine.base import Table, data_file
from engine.registry import Experiment
from engine.runner import RunSpec
from export import notebook, script, table
from ui import state, text
from ui.text import say, t

HERE = Path(__file__).parent
CSV = ("text/csv", ":material/table_rows:")
PYTHON = ("text/x-python", ":material/code:")
DATA = ("application/octet-stream", ":material/database:")
NOTEBOOK = ("application/x-ipynb+json", ":material/book_2:")

# declared once a process: a declaration in a script run would be a new component each time
_chart_files = v2.component(
    "chart_files",
    html='<div class="chart-files"></div>',
    css=(HERE / "chart_files.css").read_text("utf-8"),
    js=(HERE / "chart_files.js").read_text("utf-8"),
    isolate_styles=False,
)


def draw(experiment: Experiment, spec: RunSpec, tables: Mapping[str, Table], *, place: str, whole: bool) -> None:
    """One button that opens all that can be taken home from the run on show; ``place`` is its container's key."""
    words = text.experiment(experiment.name)
    with st.popover(t("take_home"), icon=":material/download:"):
        _chart(experiment.name, place)
        titles = {plot.table: say(words.plots[plot.name]) for plot in reversed(experiment.plots)}
        for name in sorted(titles.keys() & tables.keys()):
            rows = partial(table.csv, tables[name])
            _button(f"{t('rows_csv')}: {titles[name]}", f"{experiment.name}-{name}.csv", CSV, rows, place)
        about = {"title": say(words.title), "about": say(words.about)}
        made = partial(script.script, spec, **about, language=state.language())
        _button(t("script_py"), f"{experiment.name}.py", PYTHON, made, place)
        made = partial(notebook.notebook, spec, **about, formula=words.formula, language=state.language())
        _button(t("notebook_ipynb"), f"{experiment.name}.ipynb", NOTEBOOK, made, place)
        for file in script.flat_run(spec).files:
            read = data_file(file).read_bytes
            _button(t("data_file", file=Path(file).name), Path(file).name, DATA, read, place)
        # a median over seeds, or a part of a training, is not what one run from end to end prints
        st.caption(t("take_home_help") if whole else t("take_home_other"))


def draw_table(name: str, rows: Table, *, place: str) -> None:
    """The same for a chart that no script makes: the drawing and its rows."""
    with st.popover(t("take_home"), icon=":material/download:"):
        _chart(name, place)
        _button(t("rows_csv"), f"{name}.csv", CSV, partial(table.csv, rows), place)


def _chart(name: str, place: str) -> None:
    _chart_files(
        data={"png": t("chart_png"), "svg": t("chart_svg"), "none": t("no_chart"), "name": name, "place": place},
        key=f"{place}-chart-files",
        height="content",
    )


def _button(label: str, file: str, kind: tuple[str, str], made: Callable[[], str | bytes], place: str) -> None:
    """A download that is made when it is asked for."""
    mime, icon = kind
    st.download_button(label, made, file, mime, key=f"{place}-{file}", icon=icon, on_click="ignore", width="stretch")
