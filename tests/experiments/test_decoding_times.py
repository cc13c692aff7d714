"""decoding_times: what is timed is right, and its count; the times themselves are this machine's."""

import pytest

from engine import timing
from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, mutant, run

NAME = "decoding_times"


def law(experiment: Experiment) -> None:
    for n, length in ((2, 16), (3, 64)):
        metrics = run(experiment, n_layers=n, seq_len=length, d_model=64).metrics
        assert metrics["step_flop_ratio"] == length  # each row of a full pass takes what the row of the step takes
        assert metrics["step_time_ratio"] == metrics["full_pass_time_s"] / metrics["cached_step_time_s"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bill.flop / count_pass(sizes, params.batch, 1,", "bill.flop / count_pass(sizes, params.batch, 2,"),
        ("full[-1] / cached[-1]", "full[0] / cached[-1]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def timed_outputs(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> dict[str, list]:
    """The outputs of what is timed, by the name of the function: twice each, as it is repeated."""
    seen: dict[str, list] = {}

    def keep(work, device, check_stop, *, repeats):
        module = experiment.run.__globals__
        extend, outputs = module["extend"], []
        module["extend"] = lambda *args, **more: outputs.append(extend(*args, **more)) or outputs[-1]
        work(), work()
        module["extend"] = extend
        seen.setdefault(work.__name__, []).append(outputs)
        return [1.0] * repeats

    monkeypatch.setattr(timing, "times_s", keep)
    run(experiment, dtype="float64", seq_len=32, d_model=64)
    return seen


def same_token(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = timed_outputs(experiment, monkeypatch)
    assert len(seen["step"]) == len(seen["whole"]) == 3  # 8, 16 and 32 tokens
    for steps, wholes in zip(seen["step"], seen["whole"], strict=True):
        for step, whole in zip(steps, wholes, strict=True):
            assert step.shape[1] == 1
            assert (step[:, 0] - whole[:, -1]).abs().max() < 1e-12  # float64, two layers


def test_both_ways_read_the_same_token(monkeypatch):
    same_token(get(NAME), monkeypatch)
    with pytest.raises(AssertionError):
        same_token(
            mutant(NAME, "tokens[:, length - 1 : length], cache", "tokens[:, length - 2 : length - 1], cache"),
            monkeypatch,
        )


def test_refuses_a_pass_that_takes_too_long():
    with pytest.raises(ParamsError, match="too_long_a_pass"):
        get(NAME).Params(seq_len=512, d_model=1024)
