"""charts.py: what a plot's declaration becomes in Vega-Lite."""

import dataclasses

import numpy as np
import pytest

from engine.base import Plot
from ui import charts, text

WORDS = charts._Words(
    x="x",
    y="y",
    by="series",
    theory="law",
    value="",
    series=("a", "b"),
    facets=(),
    by_is_number=False,
    x_is_text=False,
    x_is_whole=False,
    x_is_long=False,
    x_places=(),
    single=False,
    signed=False,
    colour="#000000",
)


@pytest.mark.parametrize("one_law", [True, False])
def test_a_law_is_drawn_once_for_all_series_or_once_for_each(one_law):
    plot = Plot("p", table="t", x="x", y="y", by="series", theory="law", mark="point", one_law=one_law)
    points, law = charts.spec(plot, WORDS)["layer"]
    assert points["encoding"]["color"]["field"] == "series"
    assert law["encoding"]["y"]["field"] == "law"
    assert points["encoding"]["y"]["axis"].get("format") is None
    assert ("detail" in law["encoding"]) is not one_law


def test_a_line_through_one_place_is_drawn_as_points():
    plot = Plot("p", table="t", x="x", y="y")
    for single in (True, False):
        mark = charts.spec(plot, dataclasses.replace(WORDS, single=single))["mark"]
        assert bool(mark["point"]) is single


def test_more_lines_than_colours_differ_in_their_dashes():
    plot = Plot("p", table="t", x="x", y="y", by="series")
    words = dataclasses.replace(WORDS, series=tuple("abcdefghijkl"))
    dashes = charts.spec(plot, words)["encoding"]["strokeDash"]["scale"]["range"]
    colours = len(charts.DASHES)  # the theme has as many
    assert all(a != b for a, b in zip(dashes, dashes[colours:], strict=False))


def test_a_heat_map_of_signed_values_has_two_hues_that_meet_at_zero():
    plot = Plot("p", table="t", x="x", y="y", mark="heat", value="v")
    table = {"x": np.arange(3), "y": np.zeros(3), "v": np.array([-2.0, 0.0, 1.0])}
    assert not charts._is_signed(dataclasses.replace(plot, value="v_log10"), {**table, "v_log10": table["v"]})
    for values, signed in ((table["v"], True), (np.abs(table["v"]), False)):
        assert charts._prepare(plot, {**table, "v": values})[1].signed is signed
        colour = charts.spec(plot, dataclasses.replace(WORDS, signed=signed))["encoding"]["color"]
        assert (colour.get("scale", {}).get("domainMid") == 0) is signed
    # all of them 0: the palest colour, not the one in the middle
    assert charts._prepare(plot, {**table, "v": np.zeros_like(table["v"])})[1].all_zero
    colour = charts.spec(plot, dataclasses.replace(WORDS, all_zero=True))["encoding"]["color"]
    assert colour["scale"] == {"domain": [0, 1]}


@pytest.mark.parametrize(("scale", "stacked"), [("linear", True), ("log10", False)])
def test_bars_over_a_logarithm_are_not_stacked_from_zero(scale, stacked):
    plot = Plot("p", table="t", x="x", y="y", by="series", mark="bar", y_scale=scale)
    y = charts.spec(plot, dataclasses.replace(WORDS, x_is_text=True))["encoding"]["y"]
    assert ("stack" not in y) is stacked
    assert y.get("stack") is None


def test_rates_have_prefixes():
    plot = Plot("p", table="t", x="x", y="y", y_scale="log10", y_unit="flop/s")
    assert charts.spec(plot, WORDS)["encoding"]["y"]["axis"]["format"] == "~s"


@pytest.mark.parametrize(("x", "step"), [(np.arange(3), 1), (np.arange(3) / 2, None)])
def test_there_is_no_tick_between_two_layers(x, step):
    plot = Plot("p", table="t", x="x", y="y")
    words = charts._prepare(plot, {"x": x, "y": np.zeros(3)})[1]
    assert charts.spec(plot, words)["encoding"]["x"]["axis"].get("tickMinStep") == step


def test_few_rates_are_the_ticks_of_their_axis():
    plot = Plot("p", table="t", x="x", y="y", x_scale="log2")
    rates = np.array([0.003, 0.012, 0.048])
    words = charts._prepare(plot, {"x": np.repeat(rates, 2), "y": np.zeros(6)})[1]
    assert charts.spec(plot, words)["encoding"]["x"]["axis"]["values"] == rates.tolist()
    many = charts._prepare(plot, {"x": 2.0 ** np.arange(9), "y": np.zeros(9)})[1]
    assert "values" not in charts.spec(plot, many)["encoding"]["x"]["axis"]


def test_a_heat_map_for_each_facet():
    plot = Plot("p", table="t", x="x", y="y", value="v", mark="heat", facet="f")
    words = dataclasses.replace(WORDS, facets=("attention", "ffn"))
    made = charts.spec(plot, words)
    assert made["facet"]["field"] == "f"
    assert made["spec"]["mark"]["type"] == "rect"


@pytest.mark.parametrize(
    "title", ["loss without the table, given one row (nats)", "删去之后的损失，按层数、按方案分别给出（nats）", "loss"]
)
def test_a_long_title_stands_in_lines_and_loses_nothing(title):
    lines = charts._lines(title)
    assert all(charts._width(line) <= charts.TITLE for line in lines)
    assert "".join(lines).replace(" ", "") == title.replace(" ", "")


def test_a_legend_of_many_rows_takes_no_room_from_the_plot():
    plot = Plot("p", table="t", x="x", y="y", by="s")
    heights = [
        charts.spec(plot, dataclasses.replace(WORDS, series=tuple(f"a long name of a series {i}" for i in range(n))))[
            "height"
        ]
        for n in (2, 6)
    ]
    assert heights[1] - heights[0] == 4 * charts.LEGEND_ROW


def test_no_name_below_a_chart_is_left_out():
    """Vega leaves out names that would overlap: bars without a name say nothing."""
    plot = Plot("bars", table="bars", x="way", y="n_due", mark="bar")
    for names, angle in ((("a", "b", "c"), 0), (tuple("a rather long name"[:9] + str(n) for n in range(9)), -40)):
        table = {"way": np.array(names), "n_due": np.arange(len(names))}
        axis = charts.spec(plot, charts._prepare(plot, table)[1])["encoding"]["x"]["axis"]
        assert axis["labelOverlap"] is False
        assert axis["labelAngle"] == angle


def test_the_smallest_bar_of_a_logarithm_has_a_height():
    plot = Plot("bars", table="bars", x="way", y="n_due", mark="bar", y_scale="log10")
    table = {"way": np.array(["a", "b"]), "n_due": np.array([1e-16, 1.0])}
    assert charts.spec(plot, charts._prepare(plot, table)[1])["encoding"]["y"]["scale"]["padding"] > 0


def test_a_legend_of_numbers_says_what_they_are_of():
    plot = Plot("lines", table="lines", x="n_due", y="minutes", by="d_k")
    table = {"n_due": np.arange(2), "minutes": np.arange(2.0), "d_k": np.array([8, 64])}
    legend = charts.spec(plot, charts._prepare(plot, table)[1])["encoding"]["color"]["legend"]
    assert legend["title"] == text.name("d_k", plain=True)


def test_bars_over_days_begin_at_the_first_day():
    plot = Plot("days", table="days", x="days_from_today", y="n_due", mark="bar")
    table = {"days_from_today": np.arange(30), "n_due": np.arange(30)}
    assert charts.spec(plot, charts._prepare(plot, table)[1])["encoding"]["x"]["scale"]["nice"] is False


@pytest.mark.parametrize("of", ["n", "长"])
def test_a_legend_is_no_wider_than_the_plot_on_a_phone(of):
    """Measured in Chromium: a sign 22 px, a Latin letter 6.2 and a Han one twice that, 16 between columns."""
    for length in range(1, 31):
        columns = charts._legend_columns((of * length, "b"))
        assert columns == 1 or columns * (22 + 6.2 * charts._width(of * length)) + 16 * (columns - 1) <= 250
    assert charts._legend_columns(("float32", "float64", "bfloat")) == 3
