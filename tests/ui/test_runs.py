"""Runs as links and as layers of one chart."""

import numpy as np
import pytest

from engine import registry, runner
from engine.base import Plot
from engine.runner import RunSpec
from ui import runs


def spec_of(name, seed=0, device="cpu", dtype="float32", **params):
    return RunSpec(name, registry.get(name).Params.from_mapping(params).as_dict(), seed, device, dtype)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("qk_variance"),
        spec_of("qk_variance", seed=7, dtype="float64", d_k=128, scale="inv_d_k", q_mean=-0.3),
        spec_of("attention_gradients", seed=2**31 - 1, d_k=8, dead_below=1e-9, scale="cosine"),
        spec_of("scale_training", with_inv_d_k=False, steps=20),
    ],
)
def test_a_link_brings_back_exactly_the_run_it_was_made_of(spec):
    said = {name: value for name, value in runs.link_of(spec).items() if value is not None}
    assert runs.from_link(registry.get(spec.experiment), said) == (spec, [])


def test_a_link_says_only_what_differs():
    said = runs.link_of(spec_of("qk_variance", d_k=128))
    assert {name: value for name, value in said.items() if value} == {"d_k": "128"}


def test_what_a_link_asks_in_vain_is_named_and_left_at_its_default():
    experiment = registry.get("qk_variance")
    spec, refused = runs.from_link(experiment, {"d_k": "many", "scale": "nonne", "seed": "-1", "k_std": "0.5"})
    assert sorted(refused) == ["d_k", "scale", "seed"]
    assert spec == spec_of("qk_variance", k_std=0.5)


def test_layers_hold_all_rows_of_all_runs_and_their_series_become_small_charts():
    plots = registry.get("softmax_saturation").plots
    results = [runner.run("softmax_saturation", {"d_k": d_k, "batch": 1}) for d_k in (8, 64)]
    for plot in plots:
        tables = [result.tables[plot.table] for result in results]
        laid, table = runs.overlay(plot, [("one", tables[0]), ("two", tables[1])])
        assert (laid.by, laid.facet) == ("run", "scale")
        for name, of in (("one", tables[0]), ("two", tables[1])):
            for column, values in of.items():
                assert np.array_equal(table[column][table["run"] == name], values)


def test_a_plot_in_small_charts_keeps_them_and_its_series_are_named_by_run():
    plot = Plot("p", table="t", x="x", y="y", by="rule", facet="part")
    table = {"x": np.arange(2), "y": np.arange(2.0), "rule": np.array(["a", "b"]), "part": np.array(["l", "r"])}
    laid, joined = runs.overlay(plot, [("one", table), ("two", table)])
    assert (laid.by, laid.facet) == ("run", "part")
    assert joined["run"].tolist() == ["a · one", "b · one", "a · two", "b · two"]
