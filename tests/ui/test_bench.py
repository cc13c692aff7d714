"""bench.py, on the Lab page: what a reader sees of runs that go on, were stopped, or hold no number."""

import time
from types import SimpleNamespace

import pytest
from streamlit.testing.v1 import AppTest

from content.loader import load_deck
from engine.base import Result
from tests.ui.test_pages import opened
from ui import bench, cards, engine, state, text

LONG = {"experiment": "skip_training", "n_layers": "8", "steps": "600", "n_seeds": "1"}  # some 20 s: it is stopped


@pytest.fixture(autouse=True)
def _warm():
    engine.warm_up().start()
    assert engine.warm_up().ready.wait(60)


def button(app: AppTest, label: str):
    (found,) = [b for b in app.button if b.label == label]
    return found


def labels(app: AppTest) -> list[str]:
    return [b.label for b in app.button]


def until(app: AppTest, true, seconds: float = 60) -> None:
    """Look at the page again until something is true of it, as its polling would."""
    ends = time.monotonic() + seconds
    while not true(app):
        assert time.monotonic() < ends
        time.sleep(0.1)
        app.run()


def stopped(app: AppTest) -> None:
    button(app, "Stop").click().run()
    until(app, lambda app: "Stop" not in labels(app))


def said(app: AppTest) -> str:
    return "\n".join(str(e.value) for e in (*app.warning, *app.info, *app.error, *app.caption))


def test_a_refused_setting_does_not_hide_the_run_that_goes_on():
    app = opened("lab", "en", **LONG)
    button(app, "Train on this device").click().run()
    for label, value in (("number of seeds", 5), ("training steps", 2000)):
        (slider,) = [s for s in app.slider if s.label == label]
        slider.set_value(value).run()
    assert app.error
    stopped(app)


def test_a_prediction_waits_for_a_whole_run_and_is_kept_once(monkeypatch):
    setup, spec, kept, told = bench.Setup("s", "skip_training", {}, ()), SimpleNamespace(), [], []
    reader = SimpleNamespace(shown={})
    monkeypatch.setattr(state, "reader", lambda: reader)
    values = {"s:pending": (spec, "loss", 0.5)}
    monkeypatch.setattr(state, "value_of", values.get)
    monkeypatch.setattr(state, "set_value", values.__setitem__)
    monkeypatch.setattr(engine, "active_job", lambda purpose: None)
    monkeypatch.setattr(bench.learner, "predicted", lambda *prediction: kept.append(prediction))
    monkeypatch.setattr(bench.st, "info", told.append)
    monkeypatch.setattr(bench, "t", lambda name, **_: name)
    monkeypatch.setattr(text, "number", str)
    for done, loss, words in ((0.2, 2.0, "prediction_waits"), (1.0, 1.0, "prediction_outcome")):
        reader.shown["s"] = SimpleNamespace(spec=spec, result=Result({"loss": loss}, {}, done))
        for _ in range(2):
            bench._prediction_outcome(setup)
            assert told.pop() == words
    assert kept == [("skip_training", "loss", 0.5, 1.0)]
    monkeypatch.setattr(engine, "active_job", lambda purpose: object())
    bench._prediction_outcome(setup)
    assert not told  # what is on show while a run goes on is the one before it


def test_what_ended_is_said_in_the_language_of_whoever_reads_it_and_not_beside_the_next_run():
    app = opened("lab", "en", **LONG)
    button(app, "Train on this device").click().run()
    stopped(app)
    assert "Stopped at" in said(app)
    button(app, "Train on this device").click().run()
    assert "Stopped at" not in said(app)
    stopped(app)
    app.query_params["lang"] = "zh"
    app.run()
    assert "Stopped at" not in said(app)
    assert "停止" in said(app)


def test_a_moved_control_does_not_end_a_run_elsewhere(monkeypatch):
    app = opened("lab", "en", **LONG)
    button(app, "Train on this device").click().run()
    monkeypatch.setattr(engine, "quick", lambda spec: None)  # as on a busy machine
    (box,) = [s for s in app.selectbox if s.label == text_of("experiment")]
    box.set_value("depth_signal").run()
    assert text_of("busy_elsewhere") in said(app)
    stopped(app)  # at the foot of the page: it went on
    until(app, lambda app: text_of("busy_elsewhere") not in said(app))


def test_what_is_no_number_is_explained_and_not_printed():
    app = opened("lab", "en", experiment="depth_signal", n_layers="48", weight_gain="2.0", layers_shared="True")
    until(app, lambda app: "leave the range of float32" in said(app))
    assert "nan" not in bench.summary(
        bench.registry.get("depth_signal"), Result({"gradient_kept_plain_stack": float("nan")}, {})
    )


@pytest.mark.parametrize(("raw", "shown"), [("-3", "n_layers=-3"), ("9" * 99, "n_layers=99"), ("`", "n_layers")])
def test_a_link_that_asks_in_vain_is_told_what_it_asked_and_what_there_is(raw, shown):
    (warning,) = opened("lab", "en", experiment="depth_signal", n_layers=raw).warning[:1]
    assert shown in warning.value
    assert "1 … 48" in warning.value
    assert len(warning.value) < 300


@pytest.mark.parametrize("experiment", ["skip_training", "norm_placement", "qk_norm_training"])
def test_a_number_can_be_stepped_both_ways(experiment):
    app = opened("lab", "en", experiment=experiment)
    numbers = [n for n in app.number_input if n.label != text_of("seed")]
    assert numbers
    for number in numbers:
        assert number.min <= number.value - number.step
        assert number.value + number.step <= number.max


def text_of(name: str) -> str:
    return bench.text.deck().strings.ui[name].en


def _controls_of_all_labs() -> None:
    from content.loader import load_deck
    from engine import registry
    from ui import cards, widgets

    for card in load_deck().cards.values():
        for lab in card.labs:
            experiment = registry.get(lab.experiment)
            widgets.params_controls(experiment, lab.controls, cards._opening(lab), f"{card.id}/{lab.id}")


def test_a_follow_up_fills_in_what_the_controls_take():
    for card in load_deck().cards.values():
        for lab in (f.lab for f in card.follow_ups if f.lab):
            opening = cards._opening(card.lab(lab.use), lab.params)
            defaults = bench.registry.get(card.lab(lab.use).experiment).Params.defaults()
            assert {name: type(value) for name, value in opening.items()} == {n: type(v) for n, v in defaults.items()}


def test_the_controls_of_every_lab_are_those_of_its_experiment():
    """A card may open a fraction at 1: that is no whole number."""
    app = AppTest.from_function(_controls_of_all_labs, default_timeout=120).run()
    assert not app.exception
    numbers = {slider.key: slider.value for slider in (*app.slider, *app.number_input)}
    assert len(numbers) > 100
    for card in load_deck().cards.values():
        for lab in card.labs:
            defaults = bench.registry.get(lab.experiment).Params.defaults()
            for name in lab.controls:
                value = numbers.get(state.control_key(f"{card.id}/{lab.id}", name))
                assert value is None or type(value) is type(defaults[name])
