"""The Lab as a reader uses it: pins, history, sweeps, downloads, and links that bring all of it back."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
from urllib.parse import parse_qs, urlsplit

import pytest

from engine import runner
from engine.base import data_file
from tests.browser.test_flagship import bench, engine_ready, figures
from tools.browser import assert_clean

EXPERIMENT = "qk_variance"


def open_lab(visit, **query):
    visit.goto("lab", **{"experiment": EXPERIMENT, "lang": "en", **query})
    bench(visit).wait_for()
    engine_ready(visit)


def button(visit, name):
    return visit.page.get_by_role("button", name=name, exact=True)


def link(visit):
    return parse_qs(urlsplit(visit.page.url).query, keep_blank_values=True)


def choose(visit, title):
    """In the first list of the page, which draws only the options near the chosen one: so it is typed."""
    visit.page.get_by_role("combobox").first.fill(title)
    visit.page.get_by_role("option", name=title).first.click()


def move_first_slider(visit, key="ArrowRight"):
    slider = bench(visit).get_by_role("slider").first
    slider.focus()
    visit.act(lambda: slider.press(key))


def downloaded(visit, press):
    with visit.page.expect_download() as coming:
        press.click()
    return coming.value.suggested_filename, coming.value.path().read_bytes()


def series(visit):
    """The names in the legend of the panel's chart."""
    legend = bench(visit).locator('[data-testid="stVegaLiteChart"] .role-legend-label text')
    return [text for text in legend.all_text_contents() if text]


def test_a_pinned_run_stays_on_the_chart_and_the_link_brings_it_back(app, open_reader):
    visit = open_reader(app)
    open_lab(visit)
    visit.act(lambda: button(visit, "Pin").click())
    button(visit, "Unpin").wait_for()
    assert series(visit) == []  # one run, not the same line twice
    move_first_slider(visit)
    bench(visit).locator(".role-legend-label text").nth(1).wait_for()
    assert series(visit) == ["now · head width d_k = 128", "head width d_k = 64"]
    assert link(visit)["pin"] == ["seed=0"]
    assert link(visit)["d_k"] == ["128"]

    other = open_reader(app)
    other.page.goto(visit.page.url)
    bench(other).locator(".role-legend-label text").nth(1).wait_for()
    assert series(other) == series(visit)
    assert figures(other) == figures(visit)
    other.act(lambda: button(other, "head width d_k = 64").click())
    assert "pin" not in link(other)
    assert series(other) == []
    assert_clean(other)
    assert_clean(visit)


def test_a_run_of_the_history_comes_back_with_its_settings(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, d_k="8", seed="3")
    before = figures(visit)
    move_first_slider(visit)
    assert figures(visit) != before
    visit.act(lambda: visit.page.get_by_text("Runs of this visit").click())
    grid = visit.page.get_by_test_id("stDataFrame").last
    grid.wait_for()
    box = grid.bounding_box()
    # the table is drawn on a canvas: the tick of the second row stands in the first column
    visit.act(lambda: visit.page.mouse.click(box["x"] + 16, box["y"] + 2.5 * 35))
    visit.act(lambda: button(visit, "Bring back").click())
    assert figures(visit) == before
    assert (link(visit)["d_k"], link(visit)["seed"]) == (["8"], ["3"])
    assert_clean(visit)


def test_a_sweep_over_two_parameters_runs_from_its_link_alone(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, sweep="d_k", by="scale", metric="logits_std", seeds="2")
    panel = visit.page.locator(".st-key-sweep")
    panel.locator(".role-legend-label text").nth(3).wait_for(timeout=60_000)
    assert len(panel.locator(".role-legend-label text").all()) == 4  # one line a scale rule
    panel.get_by_text("mean and range, seeds: 2").wait_for()
    panel.get_by_role("button", name="Run the sweep").and_(visit.page.locator(":enabled")).wait_for()
    visit.idle()
    panel.get_by_role("button", name="Take it home").click()
    name, written = downloaded(visit, visit.page.get_by_role("button", name="Rows, CSV"))
    rows = list(csv.DictReader(io.StringIO(written.decode())))
    assert name == f"{EXPERIMENT}-sweep.csv"
    first = next(row for row in rows if row["d_k"] == "64" and row["scale"] == "none")
    alone = [runner.run(EXPERIMENT, {"d_k": 64, "scale": "none"}, seed=s).metrics["logits_std"] for s in (0, 1)]
    assert float(first["logits_std"]) == pytest.approx(sum(alone) / 2, rel=1e-12)  # a mean of the same two floats
    assert (float(first["low"]), float(first["high"])) == (min(alone), max(alone))
    assert_clean(visit)


def test_settings_that_exclude_a_line_of_the_sweep_are_told(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, sweep="d_k", by="distribution", seeds="1", qk_correlation="0.5")
    visit.page.get_by_text(re.compile("Left out.*uniform")).wait_for(timeout=60_000)
    assert_clean(visit)


def test_chart_rows_script_and_notebook_are_downloaded_as_the_page_shows_them(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, d_k="16", seed="5")
    bench(visit).get_by_role("button", name="Take it home").click()
    name, picture = downloaded(visit, button(visit, "Chart, PNG"))
    assert name == f"{EXPERIMENT}.png"
    width, height = struct.unpack(">II", picture[16:24])
    drawn = bench(visit).locator("svg.marks").bounding_box()
    assert (width, height) == (pytest.approx(2 * drawn["width"], abs=2), pytest.approx(2 * drawn["height"], abs=2))
    name, drawing = downloaded(visit, button(visit, "Chart, SVG"))
    assert drawing.startswith(b"<svg")
    assert drawing.count(b"<path") == bench(visit).locator("svg.marks path").count()
    assert b"@font-face" in drawing  # the words as wide as they were measured
    assert b"data:font/" in drawing
    assert app.url.encode() not in drawing
    _, script = downloaded(visit, visit.page.get_by_role("button", name="Script, Python"))
    assert b"SEED = 5" in script
    assert b"import streamlit" not in script
    _, book = downloaded(visit, visit.page.get_by_role("button", name="Notebook"))
    assert json.loads(book)["nbformat"] == 4
    _, rows = downloaded(visit, visit.page.get_by_role("button", name="Rows, CSV"))
    table = runner.run(EXPERIMENT, {"d_k": 16}, seed=5).tables["histogram"]
    assert len(rows.decode().splitlines()) == 1 + len(table["logits"])
    assert_clean(visit)


def test_a_saved_heat_map_keeps_its_colour_scale_and_no_address(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, experiment="attention_maps", source="text", text="To be or not to be")
    bench(visit).locator(".role-legend-gradient").first.wait_for()
    bench(visit).get_by_role("button", name="Take it home").click()
    _, drawing = downloaded(visit, button(visit, "Chart, SVG"))
    text = drawing.decode()
    (gradient,) = re.findall(r'<linearGradient[^>]* id="([^"]+)"', text)
    assert f"url(#{gradient})" in text
    assert "http" not in text.replace("http://www.w3.org/", "")
    name, weights = downloaded(visit, visit.page.get_by_role("button", name=re.compile("The weights that both read")))
    assert (name, weights) == ("model.npz", data_file("trained/model.npz").read_bytes())
    assert_clean(visit)


def test_a_text_that_the_model_can_not_read_is_said_to_be_so(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, experiment="attention_maps", source="text", text="今天天气很好", lang="zh")
    visit.page.get_by_text("你的文本里有 6 个字符模型不认识").wait_for()
    assert_clean(visit)


def test_a_quick_sweep_stands_in_the_link_at_once(app, open_reader):
    visit = open_reader(app)
    open_lab(visit)
    visit.page.get_by_text("Sweep", exact=True).first.click()
    visit.act(lambda: button(visit, "Run the sweep").click())
    visit.page.get_by_text("mean and range, seeds: 5").wait_for(timeout=60_000)
    assert link(visit)["sweep"] == ["d_k"]
    assert_clean(visit)


def test_a_parameter_without_effect_is_not_swept_and_can_not_be_moved(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, experiment="trained_logits", source="text", sweep="seq_len", seeds="1")
    visit.page.get_by_text("has no effect with the other settings").wait_for(timeout=60_000)
    slider = bench(visit).get_by_role("slider", name="sequence length")
    assert slider.is_disabled()
    assert_clean(visit)


def test_an_experiment_is_found_as_it_was_left(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, d_k="16", seed="4")
    before = figures(visit)
    for title in ("Softmax of [a, a, 2a]", "Spread of q·k"):
        visit.act(lambda title=title: choose(visit, title))
    assert (link(visit)["d_k"], link(visit)["seed"]) == (["16"], ["4"])
    assert figures(visit) == before
    assert_clean(visit)


def test_a_filter_of_the_ledger_can_be_cleared_again(app, open_reader):
    visit = open_reader(app)
    visit.goto("claims", lang="en")
    verify = visit.page.get_by_role("button", name=re.compile("Verify all"))
    verify.wait_for()
    everything = verify.text_content()
    visit.act(lambda: choose(visit, "Spread of q·k"))
    assert verify.text_content() != everything
    visit.act(lambda: visit.page.get_by_role("button", name="Clear value").first.click())
    assert verify.text_content() == everything
    assert_clean(visit)


PINNED_SLOW = "steps=1000&d_model=512"


def test_a_slow_pinned_run_waits_until_it_is_asked_for_and_can_be_stopped(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, experiment="fold_scale", pin=PINNED_SLOW)
    bench(visit).locator("h3").nth(1).wait_for(timeout=60_000)  # the run on show has its figures
    visit.idle()
    assert not visit.page.get_by_role("button", name="Stop").count()
    visit.act(lambda: button(visit, "Run the pinned ones").click())
    stop = visit.page.get_by_role("button", name="Stop")
    stop.wait_for()
    stop.click()
    button(visit, "Run the pinned ones").wait_for()  # and it does not begin again by itself
    visit.page.wait_for_timeout(1500)
    assert not stop.count()
    assert_clean(visit)


@pytest.mark.parametrize(
    "pin",
    ["distribution=uniform&qk_correlation=0.5", "device=cuda:9", "dtype=garbage", "kind=additive&kv_len=32", ""],
)
def test_a_pin_that_can_not_run_is_refused_and_takes_nothing_down(app, open_reader, pin):
    logged = len(app.log_text())
    visit = open_reader(app)
    open_lab(visit, pin=pin)
    bench(visit).locator("h3").nth(1).wait_for(timeout=60_000)
    assert "page ran into an error" not in " ".join(visit.texts())
    assert series(visit) == []
    assert "Traceback" not in app.log_text()[logged:]
    assert_clean(visit)


def test_a_median_over_seeds_is_not_pinned_as_one_run(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, d_k="16", seed="5", q_mean="0.3")
    alone = figures(visit)
    visit.act(lambda: button(visit, "Run on this device").click())
    bench(visit).get_by_text("±").first.wait_for(timeout=60_000)
    visit.idle()
    assert figures(visit) != alone
    visit.act(lambda: button(visit, "Pin").click())
    other = open_reader(app)
    other.page.goto(visit.page.url)
    bench(other).locator("h3").nth(1).wait_for(timeout=60_000)
    other.idle()
    assert figures(other) == alone
    assert_clean(visit)


def test_a_link_with_values_that_do_not_exist_says_which(app, open_reader):
    visit = open_reader(app)
    open_lab(visit, d_k="many", seed="-1", pin="d_k=0&seed=1", sweep="no_such", metric="none", seeds="x")
    visit.page.get_by_text(
        re.compile("The link asks for.*d_k=many.*1 … .*seed=-1.*sweep=no_such.*metric=none.*seeds=x")
    ).wait_for()
    assert series(visit) == []
    assert_clean(visit)
