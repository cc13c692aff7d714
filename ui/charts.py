"""Plot → Vega-Lite, once: charts are written with Altair, which checks them; their spec is kept, rows are sent as data.

Streamlit's own ``st.altair_chart`` checks and converts a chart at every rerun, under one lock of the whole process; a
kept spec drawn with ``st.vega_lite_chart`` costs about a twentieth of that.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any
from unicodedata import east_asian_width

import numpy as np
import pandas as pd
import streamlit as st

from engine.base import Plot, Table
from ui import text

HEIGHT = 330  # titles and a legend of two rows included; some 240 are left for the plot
LEGEND_ROW = 22  # px that each further row of the legend adds
SLANTED = 80  # px that slanted names below the plot add
TITLE = 28  # letters of a line beside the plot
FEW = 6  # so many places of a logarithmic axis are its ticks
MAX_ROWS = 4000
BAR_ROOM = 14  # px
FITS = 44  # Latin letters below a chart on a phone
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [10, 4])  # a second sign beside the colour
PREFIXED = ("flop/s", "bytes/s", "flop")  # 30G, not 30000000000
TEXT_COLOUR = {"light": "#1F2328", "dark": "#E6E4DF"}


@dataclass(frozen=True)
class _Words:
    """All that a spec depends on besides the plot; hashable, so that the spec can be kept by it."""

    x: str
    y: str
    by: str
    theory: str
    value: str
    series: tuple[str, ...]
    facets: tuple[str, ...]
    by_is_number: bool
    x_is_text: bool
    x_is_whole: bool  # no tick between 1 and 2
    x_is_long: bool  # of text: its names do not fit beside each other on a phone
    x_places: tuple[float, ...]  # of a logarithmic axis, where they are few
    single: bool  # one place on the x axis only
    signed: bool  # of a heat map: values on both sides of 0
    colour: str
    all_zero: bool = False  # of a heat map: it would get the colour in the middle


def draw(plot: Plot, table: Table, *, key: str, description: str) -> None:
    """Draw one plot in the reader's language.

    ``description`` is what a screen reader says of it. It must not change with the numbers: a changed one makes the
    browser build the whole chart anew (some 80 ms) where new rows only move its marks.
    """
    frame, words = _prepare(plot, table)
    st.vega_lite_chart(frame, spec(plot, words), key=key, alt=description, width="stretch")
    if plot.theory:
        st.caption(text.t("dashed_is", name=words.theory))


def as_frame(plot: Plot, table: Table) -> pd.DataFrame:
    """The rows behind a chart under their names in the reader's language, for the data table."""
    frame = _labelled(plot, table)
    return frame.rename(columns={c: text.name(c, plain=True) for c in frame.columns})


def _labelled(plot: Plot, table: Table) -> pd.DataFrame:
    columns: dict[str, Any] = {name: _small(column) for name, column in table.items()}
    # the cells of a heat map are named by what the reader typed
    for name in (plot.facet,) if plot.mark == "heat" else (plot.by, plot.facet, plot.x):
        if name and table[name].dtype.kind not in "iuf":
            ids = table[name].tolist()
            words = {value: text.choice(value, plain=True) for value in dict.fromkeys(ids)}
            columns[name] = [words[value] for value in ids]
    return pd.DataFrame(columns)


def _prepare(plot: Plot, table: Table) -> tuple[pd.DataFrame, _Words]:
    frame = _labelled(plot, table).head(MAX_ROWS)
    x_is_text = frame[plot.x].dtype.kind not in "iuf"
    words = _Words(
        x=text.with_unit(plot.x, plot.x_unit),
        y=text.with_unit(plot.y, plot.y_unit),
        by=text.name(plot.by, plain=True) if plot.by else "",
        theory=text.name(plot.theory, plain=True) if plot.theory else "",
        value=text.name(plot.value, plain=True) if plot.value else "",
        series=_in_order(frame[plot.by]) if plot.by else (),
        facets=_in_order(frame[plot.facet]) if plot.facet else (),
        by_is_number=bool(plot.by) and frame[plot.by].dtype.kind in "iuf",
        x_is_text=x_is_text,
        x_is_whole=frame[plot.x].dtype.kind in "iu",
        x_places=_few_places(frame[plot.x]) if not x_is_text and plot.x_scale != "linear" else (),
        x_is_long=x_is_text and sum(_width(name) + 2 for name in frame[plot.x].unique()) > FITS,
        single=frame[plot.x].nunique() == 1,
        signed=_is_signed(plot, table),
        colour=TEXT_COLOUR[st.context.theme.type or "light"],
        all_zero=bool(plot.value) and not frame[plot.value].any(),
    )
    if plot.by and frame[plot.by].dtype.kind in "iuf":  # a legend of numbers is read as names, not as a ramp
        frame[plot.by] = frame[plot.by].map(str)
    return frame, words


def _is_signed(plot: Plot, table: Table) -> bool:
    """Whether the values of a heat map lie on both sides of 0; of a logarithm 0 is no middle."""
    if not plot.value or plot.value.endswith("_log10"):
        return False
    return bool(np.min(table[plot.value], initial=0) < 0 < np.max(table[plot.value], initial=0))


def _few_places(column: Any) -> tuple[float, ...]:
    places = column.unique()
    return tuple(float(f"{place:.6g}") for place in sorted(places)) if len(places) <= FEW else ()


_WORDS = re.compile(r"[\u2e80-\uffef][，、）]*\s*|[^\u2e80-\uffef\s]+\s*")  # a Chinese character is a word


def _lines(title: str) -> list[str]:
    """A title beside the plot, in as many lines as it takes: Vega cuts what is longer than its axis."""
    lines = [""]
    for word in _WORDS.findall(title):
        if lines[-1] and _width(lines[-1] + word.strip()) > TITLE:
            lines.append("")
        lines[-1] += word
    return [line.strip() for line in lines]


def _in_order(column: Any) -> tuple[str, ...]:
    return tuple(str(v) for v in dict.fromkeys(column))


def _width(name: str) -> int:
    """How wide a name is, in Latin letters; a Chinese one is about two."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in name)


def _names(are_long: bool) -> dict[str, Any]:
    """An axis of names: level, or slanted where they would push each other off it. None is left out."""
    return {"labelOverlap": False, "labelLimit": 180} | ({"labelAngle": -40} if are_long else {"labelAngle": 0})


def _small(column: np.ndarray) -> np.ndarray:
    """Smaller numbers, fewer bytes on the wire; a chart can't show more digits."""
    return column.astype(np.float32) if column.dtype == np.float64 else column


@functools.lru_cache(maxsize=256)
def spec(plot: Plot, words: _Words) -> dict[str, Any]:
    """The Vega-Lite spec of a plot, without data and theme."""
    import altair as alt

    source = alt.NamedData(name="rows")
    if words.x_is_text:
        x = alt.X(plot.x, type="nominal", sort=None, title=words.x, axis=alt.Axis(**_names(words.x_is_long)))
    else:  # half a bar beside the first number must not begin the axis at the round number before it
        scale = _scale(plot.x_scale, nice=plot.mark != "bar")
        axis = _axis(plot.x_scale)
        if words.x_is_whole and plot.x_scale == "linear":
            axis.tickMinStep = 1
        if words.x_places:
            axis = alt.Axis(values=list(words.x_places), format=",.4~g", grid=True)
        x = alt.X(plot.x, type="quantitative", title=words.x, scale=scale, axis=axis)
    y = alt.Y(
        plot.y,
        type="quantitative",
        title=_lines(words.y),
        scale=_scale(plot.y_scale, mark=plot.mark),
        axis=_axis(plot.y_scale, plot.y_unit),
        # stacked bars begin at 0, which has no logarithm; unstacked ones at the lower end of the axis
        **({"stack": None} if plot.mark == "bar" and plot.y_scale != "linear" else {}),
    )
    tooltip = [alt.Tooltip(plot.x, type="nominal" if words.x_is_text else "quantitative", title=words.x)]
    tooltip.append(alt.Tooltip(plot.y, type="quantitative", title=words.y, format=".4~g"))
    base = alt.Chart(source)
    if plot.mark == "heat":
        return _bare(_small_multiples(_heat(base, plot, words), plot, words))
    series: dict[str, Any] = {}
    if plot.by:
        legend = alt.Legend(
            orient="top",
            title=words.by if words.by_is_number else None,  # a number alone does not say what it is of
            columns=_legend_columns(words.series),
            labelLimit=300,
            symbolType="stroke" if plot.mark == "line" else "circle",  # a stroke of bars has no colour
            symbolSize=260,
            symbolStrokeWidth=3,
            symbolOpacity=1,  # a band beside the line would lend the symbols its faintness
        )
        series["color"] = alt.Color(plot.by, type="nominal", sort=list(words.series), legend=legend)
        if plot.mark == "line":
            dashes = [_dash(i) for i in range(len(words.series))]
            series["strokeDash"] = alt.StrokeDash(
                plot.by,
                type="nominal",
                sort=list(words.series),
                scale=alt.Scale(domain=list(words.series), range=dashes),
                legend=legend,
            )
        if plot.mark == "bar":  # beside each other: a stack would add up what does not add up
            series["xOffset"] = alt.XOffset(plot.by, type="nominal", sort=list(words.series))
        tooltip.insert(0, alt.Tooltip(plot.by, type="nominal", title=words.by))

    layers = []
    if plot.low and plot.high:
        band = {"color": series["color"]} if plot.by else {}
        area = base.mark_area(opacity=0.18)
        layers.append(
            area.encode(x=x, y=alt.Y(plot.low, type="quantitative", title=_lines(words.y)), y2=plot.high, **band)
        )
    layers.append(_mark(base, plot, words.single).encode(x=x, y=y, tooltip=tooltip, **series))
    if plot.theory:
        law = base.mark_line(strokeDash=[5, 4], strokeWidth=1.5, color=words.colour)
        detail = {"detail": alt.Detail(plot.by, type="nominal")} if plot.by and not plot.one_law else {}
        layers.append(law.encode(x=x, y=alt.Y(plot.theory, type="quantitative", title=_lines(words.y)), **detail))
    chart = alt.layer(*layers) if len(layers) > 1 else layers[0]
    rows = math.ceil(len(words.series) / _legend_columns(words.series)) if plot.by else 0
    room = LEGEND_ROW * max(0, rows - 2) + (SLANTED if words.x_is_long else 0)
    chart = chart.properties(height=HEIGHT + room)
    return _bare(_small_multiples(chart, plot, words))


def _small_multiples(chart: Any, plot: Plot, words: _Words) -> Any:
    """A chart for each facet, where there are any: two beside each other fit a phone, and can't follow its width."""
    import altair as alt

    if not plot.facet:
        return chart
    facet = alt.Facet(plot.facet, type="nominal", title=None, sort=list(words.facets))
    return chart.properties(width=120, height=HEIGHT * 0.5).facet(facet=facet, columns=2)


def _bare(chart: Any) -> dict[str, Any]:
    """The spec alone: theme and rows come from Streamlit."""
    made: dict[str, Any] = chart.to_dict()
    for part in ("$schema", "config", "data", "datasets"):
        made.pop(part, None)
    return made


def _heat(base: Any, plot: Plot, words: _Words) -> Any:
    """A cell for each x and y, the first y on top. A name is "place character"; its axis shows the character."""
    import altair as alt

    last = "slice(datum.label, -1)"
    axis = {"labelAngle": 0, "labelOverlap": True, "ticks": False, "grid": False}
    if words.x_is_text:
        axis["labelExpr"] = last
    x = alt.X(plot.x, type="ordinal", sort=None, title=words.x, axis=alt.Axis(**axis))
    y = alt.Y(plot.y, type="ordinal", sort=None, title=words.y, axis=alt.Axis(**axis))
    # values on both sides of 0: two hues that meet there, which blind to red and green tell apart too
    scale = alt.Scale(scheme="blueorange", domainMid=0) if words.signed else alt.Undefined
    if words.all_zero:
        scale = alt.Scale(domain=[0, 1])
    legend = alt.Legend(orient="top", gradientLength=200, titleLimit=300)
    colour = alt.Color(plot.value, type="quantitative", title=words.value, scale=scale, legend=legend)
    named = ((plot.y, words.y, ""), (plot.x, words.x, ""), (plot.value, words.value, ".3~g"))
    tooltip = [
        alt.Tooltip(c, type="quantitative" if f else "nominal", title=w, **({"format": f} if f else {}))
        for c, w, f in named
    ]
    return base.mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltip).properties(height=HEIGHT + 60)


def _dash(i: int) -> list[int]:
    """Of the i-th series. Where the colours begin anew, the dashes are one further: no two series look the same."""
    return list(DASHES[(i + i // len(DASHES)) % len(DASHES)])


def _legend_columns(series: tuple[str, ...]) -> int:
    """As many as fit beside each other over the plot of a phone, of some 250 px: a sign, a name, and room between."""
    longest = max(map(_width, series), default=0)
    return 3 if longest <= 7 else 2 if longest <= 14 else 1


def _mark(base: Any, plot: Plot, single: bool) -> Any:
    if plot.mark == "line":
        return base.mark_line(strokeWidth=2, point=single)  # a line through one point is not to be seen
    if plot.mark == "bar":
        return base.mark_bar()
    if plot.mark == "area":
        return base.mark_area(opacity=0.6)
    if plot.mark == "heat":
        return base.mark_rect()
    return base.mark_point(filled=True, size=60, opacity=1)


def _scale(kind: str, mark: str = "line", *, nice: bool = True) -> Any:
    import altair as alt

    if kind == "linear":
        return alt.Scale(zero=mark in ("bar", "area"), nice=nice)
    # a logarithm has no 0 for bars to begin at: they begin a little below the smallest, which would have no height else
    room = {"padding": BAR_ROOM} if mark == "bar" else {}
    return alt.Scale(type="log", base=2 if kind == "log2" else 10, nice=False, **room)


def _axis(kind: str, unit: str = "1") -> Any:
    import altair as alt

    if unit in PREFIXED:
        return alt.Axis(format="~s", grid=True, tickCount=6)
    if kind == "log10":
        return alt.Axis(format="~g", grid=True, tickCount=6)
    return alt.Axis(grid=True, tickCount=6)
