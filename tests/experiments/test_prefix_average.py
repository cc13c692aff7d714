"""prefix_average against running sums in numpy, and against 1/(t+1)."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "prefix_average"
SETTINGS = [
    {"position": 7},
    {"position": 20, "logits_std": 1.0, "seq_len": 40},
    {"position": 0, "logits_std": 0.5, "d_v": 3},
    {"position": 99, "n_heads": 3, "seq_len": 100, "logits_std": 1.5},
    {"position": 700, "n_heads": 64, "seq_len": 1024, "d_v": 2, "logits_std": 0.25},  # several chunks
]


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, (z, v) = recorded(experiment, seed=6, **p)
        exponentials = np.exp(p.get("logits_std", 0.0) * z)
        totals = exponentials.cumsum(axis=1)  # of the prefix: what the mask leaves
        share = exponentials[:, :1] / totals
        averages = (exponentials[..., None] * v).cumsum(axis=1) / totals[..., None]
        read, t = 1 / share - 1, p["position"]
        expected = {
            "bos_share": np.median(share[:, t]),
            "position_read": np.median(read[:, t]),
            "context_std": math.sqrt((averages[:, t] ** 2).mean()),
            "position_read_error": np.median(abs(read[:, t] - t)) / (t + 1),
            "first_tie": p.get("seq_len", 128),
        }
        # shares are rounded to float32 (6e-8), and a position far out is 1/share
        assert result.metrics == pytest.approx(expected, rel=1e-6, abs=1e-6), p
        table = result.tables["by_position"]
        assert table["bos_share"] == pytest.approx(np.median(share, axis=0), rel=1e-6), p
        assert table["context_std"] == pytest.approx(np.sqrt((averages**2).mean(axis=(0, 2))), rel=1e-6), p
        assert np.all(table["position_read_low"] <= table["position_read_high"]), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "keep = places <= places[start : start + rows, None]",
            "keep = places >= 0 * places[start : start + rows, None]",
        ),  # no mask
        ("start : start + rows, None]", "start : start + rows, None] + 1"),  # one key too many
        ("weights[..., 0]", "weights.amax(dim=-1)"),  # another token than the first
        ("params.logits_std * run.randn", "run.randn"),  # the head is never uniform
        ("1 / share - 1\n", "1 / share\n"),  # counted from 1
        ("square().mean(dim=(0, 2))", "square().sum(dim=(0, 2))"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_uniform_head_holds_one_over_the_count():
    table = run(get(NAME), seed=1, dtype="float64").tables["by_position"]
    assert table["bos_share"] == pytest.approx(table["one_over_count"], rel=1e-7)  # rounded to float32
    assert table["bos_share_low"].tolist() == table["bos_share_high"].tolist()
    assert table["position_read"] == pytest.approx(table["true_position"], abs=1e-5)
    # 16 heads of width 64: 1024 averages a position, a standard error of 2.2 % for their spread
    assert table["context_std"] == pytest.approx(table["one_over_root_count"], rel=5 / math.sqrt(2 * 1024))


@pytest.mark.parametrize(("number_format", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_neighbours_tie_first_where_their_gap_is_below_the_spacing_of_the_format(number_format, bits):
    tie = run(get(NAME), number_format=number_format, seq_len=1024, n_heads=1).metrics["first_tie"]
    # 1/n and 1/(n+1) differ by 1/n of themselves; numbers of a format with so many bits by 2^-bits to 2^(1-bits)
    if number_format == "float16":
        assert tie >= 2 ** (bits - 1)  # beyond the longest sequence here, or at its end
    else:
        assert 2 ** (bits - 1) <= tie <= 2 ** (bits + 1)
    exact = [float(np.float32(1 / n)) for n in range(1, 1025)]
    if number_format == "bfloat16":
        import torch

        rounded = torch.tensor(exact).bfloat16().tolist()
        assert tie == next(t for t in range(1, 1024) if rounded[t] == rounded[t - 1])


def test_the_position_has_to_be_in_the_sequence():
    with pytest.raises(ParamsError, match="position_within_length"):
        get(NAME).Params(position=128)
