"""head_merging against the errors that independent draws must have, and exact cases."""

import math

import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "head_merging"


def law(experiment: Experiment) -> None:
    for likeness in (0.0, 0.5, 0.75):
        for n_kv_heads, m in ((2, 4), (4, 2)):
            for pooling, wanted in (
                # own shares with variance 1-a around what is common: their mean is off by (1-a)(1-1/m), one of them by
                # twice that (nothing for itself); a fresh draw by 2
                ("pooled_mean", (1 - likeness) * (1 - 1 / m)),
                ("pooled_first", 2 * (1 - likeness) * (1 - 1 / m)),
                ("pooled_random", 2.0),
            ):
                p = {"likeness": likeness, "n_kv_heads": n_kv_heads, "pooling": pooling}
                metrics = run(experiment, **p).metrics
                # relative error of a mean square over 16 · 128 numbers and more, of which 2 · 2048 are common: 3 %
                assert metrics["merged_weights_error"] == pytest.approx(math.sqrt(wanted), rel=0.15), p
                assert metrics["grouped_with_family_share"] == 1
    # nothing is lost where heads of a group are the same, or every head keeps its own
    for p in ({"likeness": 1.0}, {"n_kv_heads": 8}, {"likeness": 1.0, "turned": True, "aligned": True}):
        assert run(experiment, **p).metrics["merged_output_error"] < 1e-13, p
    for p in (
        {"likeness": 1.0, "family_layout": "strided"},  # heads that are not alike share
        {"likeness": 1.0, "turned": True},  # or have different bases
        {"likeness": 1.0, "n_kv_heads": 1},
    ):
        assert run(experiment, **p).metrics["merged_output_error"] > 0.5, p
    for p in (
        {"likeness": 1.0, "family_layout": "strided", "grouping": "strided"},
        {"likeness": 1.0, "family_layout": "strided", "grouping": "most_alike"},
        {"likeness": 1.0, "family_layout": "strided", "grouping": "most_alike", "turned": True, "aligned": True},
    ):
        m = run(experiment, **p).metrics
        assert m["merged_output_error"] < 1e-13, p
        assert m["turning_error"] < 1e-13
    assert run(experiment, family_layout="strided").metrics["grouped_with_family_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('source[group].mean(dim=0), "first"', 'source[group].sum(dim=0), "first"'),
        ("vo @ layer.W_v, vo @ layer.W_o", "vo @ layer.W_v, layer.W_o"),  # W_o is forgotten
        ("turns.append(u @ vh)", "turns.append((u @ vh).mT)"),  # turned the other way
        ("-float(alike[left[0], head])", "float(alike[left[0], head])"),
        ("math.sqrt(params.likeness), math.sqrt(1 - params.likeness)", "params.likeness, 1 - params.likeness"),
        ("W[group] = pooled[pooling]", "W[group[:1]] = pooled[pooling]"),  # the others keep what they had
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_likeness_sees_through_bases_only_when_aligned():
    for turned, aligned, seen in ((False, False, True), (True, False, False), (True, True, True)):
        table = run(get(NAME), likeness=1.0, turned=turned, aligned=aligned).tables["pairs"]
        alike = table["head_likeness"].reshape(8, 8)
        assert (alike[0, 1] > 0.99) == seen
        assert alike[0, 4] < 0.9  # another family


def test_refuses_families_that_do_not_divide_the_heads():
    with pytest.raises(ParamsError, match="families_divide_heads"):
        get(NAME).Params(n_families=16)
