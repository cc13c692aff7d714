"""length_times: the ways agree, what is counted is known, and what is timed is what it says."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from engine import timing
from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "length_times"
HEADS, WIDTH, N, BLOCK = 2, 16, 128, 32


@contextlib.contextmanager
def pretended():
    """A time is a nanosecond an operation, which torch counts while it runs; fused attention on a CPU counts as none,
    so its time is that of a thousand.
    """

    def times_s(work, device, check_stop, *, repeats, before):
        check_stop()
        with FlopCounterMode(display=False) as flops:
            work()
        time_s = 1e-9 * (flops.get_total_flops() or 1000)
        return [2 * time_s] * (repeats - 1) + [time_s]  # the fastest counts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "times_s", times_s)
        yield


def law(experiment: Experiment) -> None:
    with pretended():
        result = run(experiment, seq_len=N, n_heads=HEADS, d_k=WIDTH, q_tile=BLOCK)
    m, d = result.metrics, HEADS * WIDTH
    attention = {n: 2 * 2 * HEADS * n * n * WIDTH for n in (16, 32, 64, 128)}
    weights = {n: 2 * 12 * d * d * n for n in attention}
    table = result.tables["by_length"]
    times = dict(zip(zip(table["way"], table["seq_len"].tolist(), strict=True), table["time_ms"], strict=True))
    assert len(times) == 4 * len(attention)
    for n in attention:
        assert times["whole_rows", n] == times["query_blocks", n] == pytest.approx(1e-6 * attention[n])
        assert times["timed_weight_products", n] == pytest.approx(1e-6 * weights[n])
    assert m["attention_to_weights_flop"] == attention[N] / weights[N]
    assert m["whole_rows_over_flop"] == pytest.approx(1)  # times that are operations
    assert m["fused_call_over_flop"] == pytest.approx(1000 / attention[N])
    assert m["whole_rows_growth"] == pytest.approx(4)
    assert m["fused_call_growth"] == pytest.approx(1)
    growth = result.tables["growth"]
    assert set(growth["time_growth"][growth["way"] == "timed_weight_products"].round(6)) == {2}
    matrix, rows = 4 * HEADS * N * N, 4 * HEADS * N * WIDTH  # a matrix of logits, and an output, in float32
    # q·k, its scaled copy, the difference to the maximum: three matrices at the most, with a number a row beside them
    assert 2 * matrix <= m["whole_rows_live_bytes"] <= 3 * matrix + rows
    assert 2 * BLOCK / N * matrix + rows <= m["query_blocks_live_bytes"] <= 3 * BLOCK / N * matrix + 2 * rows
    assert rows <= m["fused_call_live_bytes"] <= 2 * rows
    assert m["ways_difference"] < 1e-5  # float32, sums of 128 in other orders


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("attention(q[:, rows], k, v)", "attention(q[:, rows], k[:, rows], v[:, rows])"),  # blocks that see themselves
        ("*(x @ square for _ in range(4))", "*(x @ square for _ in range(3))"),  # W_o forgotten
        ("count_live(q, k, v) as counted", "count_live() as counted"),
        ('times["whole_rows", n] / times[WEIGHTS, n] / flop', 'times["whole_rows", n] / times[WEIGHTS, n]'),
        ("range(0, q.shape[-2], q_tile)", "range(0, q.shape[-2], q.shape[-2] + 0 * q_tile)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_outputs_are_those_of_pytorch():
    from engine.experiments.length_times import WAYS, _attend

    q, k, v = (torch.randn(HEADS, 100, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(3))
    reference = scaled_dot_product_attention(*(x.double() for x in (q, k, v)))
    for way in WAYS:
        assert (_attend(way, q, k, v, 32)() - reference).abs().max() < 1e-5, way  # rounding of float32


def test_memory_doubles_or_quadruples():
    """The output and a number a row are linear in the length, so the ratio stays a little below."""
    short, long = (run(get(NAME), seq_len=n, n_heads=1, q_tile=32).metrics for n in (256, 512))
    assert 3.9 < long["whole_rows_live_bytes"] / short["whole_rows_live_bytes"] <= 4
    for way in ("query_blocks", "fused_call"):
        assert long[f"{way}_live_bytes"] / short[f"{way}_live_bytes"] == pytest.approx(2, rel=0.01)


def test_on_the_real_device_times_are_possible():
    m = run(get(NAME), seq_len=32, n_heads=1, d_k=8).metrics
    assert 1e-7 < m["fused_call_s"] < 1
    assert 1e-7 < m["whole_rows_s"] < 1
    assert 0.1 < m["whole_rows_growth"] < 40


def test_refuses_what_would_take_long():
    with pytest.raises(ParamsError, match="too_many_logits_to_time"):
        get(NAME).Params(seq_len=2048, n_heads=2)
    with pytest.raises(ParamsError, match="too_many_weight_products_to_time"):
        get(NAME).Params(seq_len=512, n_heads=16, d_k=128)
