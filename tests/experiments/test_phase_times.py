"""phase_times: what is timed is the pass it says, and its counts; the times themselves are this machine's."""

from __future__ import annotations

import contextlib

import pytest
from torch.utils.flop_counter import FlopCounterMode

from engine import ceilings, timing
from engine.base import ParamsError
from engine.ceilings import Ceilings
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "phase_times"
ROOF = Ceilings(
    "cpu", "any", copy_bytes_per_s=8e9, matmul_flop_per_s=64e9, copy_bytes=1, matmul_size=1, torch="", threads=1
)


@contextlib.contextmanager
def pretended():
    """Ceilings as given; a pass takes a nanosecond an operation, which torch counts while it runs."""
    counted = []

    def times_s(work, device, check_stop, *, repeats, before):
        check_stop()
        before()
        work()
        with FlopCounterMode(display=False) as flops:
            work()  # again: the cache has to be where it was
        counted.append(flops.get_total_flops())
        slow = 3 if len(counted) > len(set(counted)) else 1  # what is timed again takes longer
        return [slow * 1e-9 * counted[-1]] * repeats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "known_ceilings", lambda device, dtype, check_stop: ROOF)
        patch.setattr(timing, "times_s", times_s)
        yield counted


def law(experiment: Experiment) -> None:
    layers, width, prompt, batch = 3, 128, 40, 6
    with pretended() as counted:
        result = run(experiment, prompt_len=prompt, batch=batch, n_layers=layers, d_model=width)
    table, metrics = result.tables["by_tokens"], result.metrics
    assert counted[:5] * (len(counted) // 5) == counted  # in rounds
    passes = dict(zip(zip(table["phase"], table["tokens_in_pass"].tolist(), strict=True), counted[:5], strict=True))
    assert set(passes) == {("prefill", 16), ("prefill", 40), ("decode", 1), ("decode", 4), ("decode", 6)}
    for (phase, n), flop in passes.items():
        tokens, keys = (n, n) if phase == "prefill" else (n, prompt + 1)
        assert flop == layers * (24 * width**2 * tokens + 4 * width * tokens * keys), (phase, n)
        cache = (n if phase == "prefill" else n * (prompt + 1)) * layers * 2 * width * 4
        least = max(flop / 64e9, (layers * 12 * width**2 * 4 + cache) / 8e9)
        row = (table["phase"] == phase) & (table["tokens_in_pass"] == n)
        assert table["least_pass_ms"][row] == pytest.approx(1e3 * least, rel=1e-12), (phase, n)
        assert table["measured_pass_ms"][row] == pytest.approx(1e-6 * flop, rel=1e-12)  # the fastest
    first, step, alone = passes["prefill", prompt], passes["decode", batch], passes["decode", 1]
    expected = {
        "first_token_s": 1e-9 * first,
        "step_s": 1e-9 * step,
        "prompt_token_share": first / prompt / alone,
        "batch_gain": batch * alone / step,
        "step_stretch": step / alone,
        "step_flop_per_prompt_token": alone / (first / prompt),
        "ridge_flop_per_byte": 8,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-12), name
    points = result.tables["points"]
    rows = {name: points["flop_per_byte"][points["pass_part"] == name] for name in set(points["pass_part"])}
    assert 8 in rows["roofline"]
    assert (len(rows["prefill"]), len(rows["decode"])) == (2, 3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cache.truncate(before)", "cache.truncate(0)"),  # a decode step that forgets its prompt
        ('(1, 0, n) if phase == "prefill"', '(n, 0, 1) if phase == "prefill"'),
        ("params.batch * alone.seconds / step.seconds", "alone.seconds / step.seconds"),
        ("prefill.seconds / params.prompt_len / alone.seconds", "prefill.seconds / alone.seconds"),
        ("new).flop, weight_bytes + cache_bytes", "new).flop, weight_bytes"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_model_stands_on_the_roofline_by_its_counts():
    """Llama 3 8B in float32 at 8 GB/s and 64 GFLOP/s: a step is bound by its 30 GB of weights, a prompt by products."""
    with pretended():
        metrics = run(get(NAME), prompt_len=256, batch=1, d_model=64, n_layers=1).metrics
    weights = 4 * (8_030_261_248 - 128256 * 4096)
    assert metrics["model_step_s"] == pytest.approx(weights / 8e9, rel=0.01)  # the cache and activations are small
    linear = 2 * (8_030_261_248 - 2 * 128256 * 4096) * 256
    assert metrics["model_first_token_s"] == pytest.approx(linear / 64e9, rel=0.03)  # the head and scores are small


def test_on_the_real_device_times_are_possible():
    metrics = run(get(NAME), prompt_len=8, batch=1, d_model=64, n_layers=1).metrics
    assert 1e-7 < metrics["first_token_s"] < 1
    assert 1e-7 < metrics["step_s"] < 1
    assert metrics["batch_gain"] == metrics["step_stretch"] == 1  # it is batch 1


def test_refuses_what_would_take_long():
    with pytest.raises(ParamsError, match="too_slow_to_time"):
        get(NAME).Params(prompt_len=512, d_model=1024)
