"""charts.py: what a plot's declaration becomes in Vega-Lite."""

import dataclasses

import numpy as np
import pytest

from engine.base import Plot
from ui import charts

WORDS = charts._Words(
    x="x",
    y="y",
    by="series",
    theory="law",
    value="",
    series=("a", "b"),
    facets=(),
    x_is_text=False,
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
