"""expert_reads: limit cases, and the expected number of experts."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "expert_reads"


def law(experiment: Experiment) -> None:
    for n, k, batch in ((256, 8, 32), (64, 2, 100), (16, 4, 3)):
        metrics = [run(experiment, seed=s, n_experts=n, experts_per_token=k, batch=batch).metrics for s in range(4)]
        missed = (1 - k / n) ** batch
        expected = n * (1 - missed)
        # of 32 routings; whether experts are read is negatively correlated, so independent ones are the worst case
        error = (n * missed * (1 - missed) / 32) ** 0.5
        mean = np.mean([m["experts_read"] for m in metrics])
        assert abs(mean - expected) < 5 * error, (n, k, batch)
        for m in metrics:
            assert m["experts_read_share"] == m["experts_read"] / n
            assert m["tokens_per_expert"] == pytest.approx(k * batch / m["experts_read"], rel=1e-12)
    one = run(experiment, batch=1)
    assert one.metrics["experts_read"] == 8  # never one of them twice
    assert one.tables["by_batch"]["experts_read"][0] == 8
    whole = run(experiment, n_experts=16, experts_per_token=16, batch=5)
    assert (whole.tables["by_batch"]["experts_read"] == 16).all()
    assert whole.metrics["tokens_per_expert"] == 5  # as a dense FFN
    skewed = run(experiment, popularity=1.0).metrics["experts_read"]
    assert skewed < run(experiment).metrics["experts_read"] - 20


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(first < batch).sum()", "(first <= batch).sum()"),  # a token too many
        ("gumbel - params.popularity", "gumbel + 0 * params.popularity"),
        ("scores.topk(params.experts_per_token", "scores.topk(1"),
        ("k * params.batch / float(chosen)", "params.batch / float(chosen)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_unequal_experts_are_chosen_by_their_popularity():
    """One expert a token: Gumbel noise draws it with its share of the popularity."""
    from engine.base import make_run
    from engine.experiments import expert_reads

    params = get(NAME).Params(n_experts=4, experts_per_token=1, popularity=1.0, batch=1)
    first = np.stack([expert_reads._first_tokens(params, make_run(seed), 1) for seed in range(2000)])
    shares = (first == 0).mean(0)
    expected = np.array([12, 6, 4, 3]) / 25
    assert np.abs(shares - expected).max() < 5 * 0.5 / 2000**0.5  # five standard errors of a share, at the most


def test_refuses_more_experts_for_a_token_than_there_are():
    with pytest.raises(ParamsError, match=r"experts_for_a_token.*'n_experts': 4"):
        get(NAME).Params(n_experts=4, experts_per_token=8)
