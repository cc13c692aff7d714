"""joined_streams against the sums written out."""

import pytest

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "joined_streams"


def law(experiment: Experiment) -> None:
    for n_layers, d in ((1, 16), (3, 32), (12, 768)):
        m = run(experiment, n_layers=n_layers, d_model=d).metrics if d != 768 else run(experiment).metrics
        added = n_layers * 12 * d * d
        # layer l (from 0) reads (2 l + 1) d numbers in attention and (2 l + 2) d in the feed-forward network
        concatenated = sum((3 * (2 * i + 1) + 1 + 4 * (2 * i + 2) + 4) * d * d for i in range(n_layers))
        assert m["addition_parameters"] == added
        assert m["concatenation_parameters"] == concatenated
        assert m["concatenated_to_added"] == concatenated / added
        assert m["last_width_concatenated"] == (2 * n_layers + 1) * d
        assert m["last_width_added"] == d


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("width + matrices[-1].shape[1]", "width + 1"),
        ("D_FF = 4", "D_FF = 2"),
        ("concatenated / added", "added / concatenated"),
        ("_matrix(d_model, d_model)]", "_matrix(d_read, d_model)]"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_curve_ends_with_the_metrics():
    result = run(get(NAME), n_layers=7)
    table = result.tables["by_depth"]
    last = dict(zip(table["joining"], table["million_parameters"], strict=True))
    assert last["addition"] * 1e6 == pytest.approx(result.metrics["addition_parameters"])
    assert last["concatenation"] * 1e6 == pytest.approx(result.metrics["concatenation_parameters"])
