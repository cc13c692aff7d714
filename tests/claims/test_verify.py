"""verify.py: every kind of expectation at its edges, ratios, seeds, and a real claim that a broken engine refutes."""

import math

import pytest

from claims.verify import Unfinished, interval, under_fails_when, verify
from engine import registry, runner
from engine.base import ParamsError, Stopped, make_run
from tests.claims.pretended import claim, install
from tests.harness import mutant

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _empty_cache():
    runner.cache.clear()


# Each expectation with values that it accepts and values that it refuses; the edges belong to what is accepted.
CASES = [
    ({"approx": 8, "rel_tol": 0.25}, (6, 10), [6, 8, 10], [5.999, 10.001]),
    ({"approx": -8, "rel_tol": 0.25}, (-10, -6), [-10, -8, -6], [-10.001, -5.999, 8]),
    ({"approx": 0, "abs_tol": 0.5}, (-0.5, 0.5), [-0.5, 0, 0.5], [-0.501, 0.501]),
    ({"between": [1, 2]}, (1, 2), [1, 1.5, 2], [0.999, 2.001]),
    ({"at_least": 3}, (3, None), [3, 1e9], [2.999]),
    ({"at_most": 3}, (None, 3), [3, -1e9], [3.001]),
    ({"equals": "40 * 2**30"}, (42949672960, 42949672960), [42949672960.0], [42949672961.0, 42949672959.0]),
    ({"equals": 0}, (0, 0), [0.0, -0.0], [1e-300]),
]
RATIO_CASES = [  # value of params ÷ value of versus, which is 2 throughout
    ({"ratio_approx": 4, "rel_tol": 0.5}, (2, 6), [4, 8, 12], [3.99, 12.01]),
    ({"ratio_approx": 4, "abs_tol": 1}, (3, 5), [6, 10], [5.99, 10.01]),
    ({"ratio_equals": 8}, (8, 8), [16], [16.001, 4]),
    ({"ratio_at_least": 40}, (40, None), [80, 1e6], [79.99, 0.05]),
    ({"ratio_at_most": 0.5}, (None, 0.5), [1, 0.1, -4], [1.001]),
    ({"greater": True}, (1, None), [2.001, 100], [2, 1.999, -100]),
    ({"less": True}, (None, 1), [1.999, 0, -100], [2, 2.001]),
]


@pytest.mark.parametrize(("expect", "bounds", "accepted", "refused"), CASES)
def test_expectations_of_one_run(monkeypatch, expect, bounds, accepted, refused):
    given = accepted + refused + [NAN, INF, -INF]
    install(monkeypatch, lambda params, seed: {"value": given[seed], "second": 0.0})
    verdict = verify(claim(expect, seeds=tuple(range(len(given)))), "card")
    assert verdict.failed_seeds == tuple(range(len(accepted), len(given)))
    assert (verdict.low, verdict.high) == interval(claim(expect).expect) == bounds


@pytest.mark.parametrize(("expect", "bounds", "accepted", "refused"), RATIO_CASES)
def test_expectations_of_two_runs(monkeypatch, expect, bounds, accepted, refused):
    given = accepted + refused + [NAN, INF]
    install(monkeypatch, lambda params, seed: {"value": 2.0 if params.other else given[seed], "second": 0.0})
    verdict = verify(claim(expect, versus={"other": 1}, seeds=tuple(range(len(given)))), "card")
    assert verdict.failed_seeds == tuple(range(len(accepted), len(given)))
    assert verdict.values[: len(accepted)] == tuple(value / 2 for value in accepted)
    assert (verdict.low, verdict.high) == interval(claim(expect, versus={"other": 1}).expect) == bounds


def test_a_ratio_to_another_metric_of_the_same_run(monkeypatch):
    calls = install(monkeypatch, lambda params, seed: {"value": 10.0 + seed, "second": 2.0})
    verdict = verify(claim({"ratio_at_least": 5}, versus={"metric": "second"}), "card")
    assert verdict.values == (5.0, 5.5, 6.0)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "expect", [{"ratio_equals": 0}, {"ratio_at_least": -9}, {"ratio_at_most": 9}, {"greater": True}, {"less": True}]
)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_a_ratio_to_zero_fails_without_a_crash(monkeypatch, expect, value):
    install(monkeypatch, lambda params, seed: {"value": 0.0 if params.other else value, "second": 0.0})
    verdict = verify(claim(expect, versus={"other": 1}), "card")
    assert not verdict.holds
    assert math.isnan(verdict.value)
    assert verdict.failed_seeds == (0, 1, 2)


@pytest.mark.parametrize("expect", [{"greater": True}, {"less": True}])
@pytest.mark.parametrize("value", [-1.0, -3.0, 5.0])
def test_greater_and_less_want_a_divisor_above_zero(monkeypatch, expect, value):
    # -3 ÷ -2 is more than 1 although -3 is less than -2: the ratio on the receipt would contradict the words
    install(monkeypatch, lambda params, seed: {"value": -2.0 if params.other else value, "second": 0.0})
    assert not verify(claim(expect, versus={"other": 1}), "card").holds


def test_the_value_is_the_median_and_every_seed_must_hold(monkeypatch):
    given = {3: 9.0, 5: 1.0, 8: 2.0, 9: 100.0, 11: 3.0}
    install(monkeypatch, lambda params, seed: {"value": given[seed], "second": 0.0})
    verdict = verify(claim({"at_most": 9}, seeds=tuple(given)), "card")
    assert (verdict.value, verdict.values) == (3.0, (9.0, 1.0, 2.0, 100.0, 3.0))
    assert (verdict.holds, verdict.failed_seeds, verdict.seeds) == (False, (9,), (3, 5, 8, 9, 11))
    assert verify(claim({"at_most": 100}, seeds=tuple(given)), "card").holds


def test_one_undefined_value_leaves_no_median(monkeypatch):
    install(monkeypatch, lambda params, seed: {"value": NAN if seed == 1 else 5.0, "second": 0.0})
    verdict = verify(claim({"at_least": 1}), "card")
    assert math.isnan(verdict.value)
    assert verdict.failed_seeds == (1,)


@pytest.mark.parametrize(
    ("own", "asked", "run"),
    [((0, 1, 2), None, (0, 1, 2)), ((0, 1), (4, 5, 6), (4, 5, 6)), ((), None, (0,)), ((), (4, 5), (0,))],
)
def test_seeds(monkeypatch, own, asked, run):
    calls = install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 0.0})
    assert verify(claim({"equals": 1}, seeds=own), "card", seeds=asked).seeds == run
    assert tuple(seed for _, seed in calls) == run


def test_what_is_written_on_a_verdict(monkeypatch):
    import torch

    install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 0.0})
    verdict = verify(claim({"equals": 1}), "some-card", dtype="float64")
    assert (verdict.claim, verdict.card) == ("a-claim", "some-card")
    assert (verdict.device, verdict.dtype, verdict.torch) == ("cpu", "float64", torch.__version__)
    assert 0 < verdict.seconds < 60


def test_the_run_computes_where_and_how_it_was_asked_to(monkeypatch):
    seen = []
    monkeypatch.setattr(
        runner,
        "make_run",
        lambda seed, device, dtype, **hooks: (
            seen.append((seed, device, dtype)) or make_run(seed, device, dtype, **hooks)
        ),
    )
    install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 0.0})
    verify(claim({"ratio_equals": 1}, versus={"other": 1}, seeds=(7,)), "card", dtype="float64")
    assert seen == [(7, "cpu", "float64")] * 2


def test_versus_is_one_change_of_the_claims_own_run(monkeypatch):
    calls = install(monkeypatch, lambda params, seed: {"value": float(params.size), "second": 0.0})
    verify(claim({"ratio_equals": 7}, params={"size": 7, "other": 3}, versus={"size": 1}, seeds=(4,)), "card")
    assert calls == [({"size": 7, "other": 3}, 4), ({"size": 1, "other": 3}, 4)]


def test_under_fails_when_both_runs_change(monkeypatch):
    made = claim({"ratio_at_least": 2}, params={"size": 7}, versus={"size": 1}, fails_when={"other": 5}, seeds=(0,))
    calls = install(
        monkeypatch, lambda params, seed: {"value": 1.0 if params.other else float(params.size), "second": 0.0}
    )
    assert verify(made, "card").holds
    changed = under_fails_when(made)
    assert not verify(changed, "card").holds
    assert calls[2:] == [({"size": 7, "other": 5}, 0), ({"size": 1, "other": 5}, 0)]
    assert under_fails_when(claim({"at_least": 1})) is None


def test_a_verdict_is_measured_now_unless_known_results_will_do(monkeypatch):
    calls = install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 0.0})
    made = claim({"equals": 1}, seeds=(0,))
    verify(made, "card")
    verify(made, "card")
    assert len(calls) == 2
    verify(made, "card", cached=True)
    assert len(calls) == 2


def test_progress_rises_to_one_and_a_stop_gets_through(monkeypatch):
    install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 1.0})
    made = claim({"ratio_equals": 1}, versus={"other": 1}, seeds=(0, 1))
    seen = []
    verify(made, "card", on_progress=seen.append)
    assert seen == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]

    def check_stop():
        if len(seen) > 3:
            raise Stopped("stop")

    seen.clear()
    with pytest.raises(Stopped):
        verify(made, "card", on_progress=seen.append, check_stop=check_stop)
    assert len(seen) == 4


def test_bad_claims_say_what_is_wrong(monkeypatch):
    install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 0.0})
    with pytest.raises(KeyError, match=r"pretended has value, second; got 'values'"):
        verify(claim({"equals": 1}, metric="values"), "card")
    with pytest.raises(registry.UnknownExperiment):
        verify(claim({"equals": 1}, experiment="pretended_not"), "card")
    with pytest.raises(ParamsError, match="size"):
        verify(claim({"equals": 1}, params={"size": 5000}), "card")
    with pytest.raises(ValueError, match="a metric is one number"):
        verify(claim({"equals": [1, 2]}), "card")


def test_a_run_that_did_not_finish_proves_nothing(monkeypatch):
    install(monkeypatch, lambda params, seed: {"value": 1.0, "second": 0.0}, done=0.4)
    with pytest.raises(Unfinished, match="a-claim: the run of pretended ended at 40%"):
        verify(claim({"equals": 1}), "card")


VARIANCE = {
    "experiment": "qk_variance",
    "params": {"d_k": 256, "n_pairs": 16384},
    "metric": "logits_variance",
    "expect": {"ratio_equals": 256},  # the same numbers on both sides, and a scale of 1/16, which rounds nothing
    "versus": {"scale": "inv_sqrt_d_k"},
}


def test_a_real_claim_holds_and_a_broken_engine_refutes_it(monkeypatch):
    made = claim(**VARIANCE)
    verdict = verify(made, "card")
    assert verdict.holds
    assert verdict.values == (256.0, 256.0, 256.0)
    get = registry.get
    broken = mutant("qk_variance", "(q * k).sum(dim=-1) * scale", "(q * k).sum(dim=-1)")
    monkeypatch.setattr(registry, "get", lambda name: broken if name == "qk_variance" else get(name))
    assert not verify(made, "card").holds
