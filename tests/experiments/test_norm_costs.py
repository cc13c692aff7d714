"""norm_costs against counts written out by hand, and against PyTorch's own modules."""

import pytest
from torch import nn

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "norm_costs"
D, N = 256, 32


def law(experiment: Experiment) -> None:
    for form, size in (("bfloat16", 2), ("float32", 4)):
        for bias in (False, True):
            p = {"d_model": D, "normed_tokens": N, "number_format": form, "norm_bias": bias}
            numbers, rows = N * D, N
            counts = {
                # square: 1 in, 1 out; mean: 1 in; epsilon and root: 4 of a row's; two products: 2 in, 2 out; gain
                "rms_norm": (7 * numbers + 6 * rows + D, 4 * numbers + 2 * rows, 1, 6),
                # mean: 1 in; minus: 1 in, 1 out, and as above
                "layer_norm": (10 * numbers + 8 * rows + D, 6 * numbers + 2 * rows, 2, 8),
            }
            for kind, (moved, operations, reductions, steps) in counts.items():
                metrics = run(experiment, normalization=kind, **p).metrics
                if bias:
                    moved, operations, steps = moved + 2 * numbers + D, operations + numbers, steps + 1
                assert metrics["norm_moved_bytes"] == size * moved, (kind, form, bias)
                assert metrics["operations_per_number"] == pytest.approx(operations / numbers, rel=1e-12)
                assert metrics["norm_reductions"] == reductions
                assert metrics["norm_steps"] == steps
                flop = 2 * N * D * 3 * D
                assert metrics["norm_flop_share"] == pytest.approx(operations / (operations + flop), rel=1e-12)
                product = size * (N * D + 3 * D * D + 3 * N * D)
                share = size * moved / (size * moved + product)
                assert metrics["norm_byte_share"] == pytest.approx(share, rel=1e-12)
            one = run(experiment, normalization="rms_norm", norm_computed="one_kernel", **p).metrics
            assert one["norm_kept_bytes"] == size * (numbers + D) + 4 * rows
            one = run(experiment, normalization="layer_norm", norm_computed="one_kernel", **p).metrics
            call = run(experiment, normalization="layer_norm", norm_computed="torch_call", **p).metrics
            assert one["norm_kept_bytes"] == size * (numbers + D) + 2 * 4 * rows
            if form == "float32":  # else the call keeps its statistics in the input's format
                assert call["norm_moved_bytes"] == one["norm_moved_bytes"]
                assert call["norm_kept_bytes"] == one["norm_kept_bytes"] + (size * D if bias else 0)  # and the bias


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("centred = x - x.mean(dim=-1, keepdim=True)", "centred = x"),
        ("torch.empty(params.d_model, 3 * params.d_model", "torch.empty(params.d_model, params.d_model"),
        ("out = x * (mean_square + EPSILON).rsqrt() * gain", "out = x * (mean_square + EPSILON).rsqrt()"),
        ("for t in (*args, *outs)", "for t in args"),
        ("range(1 if kind", "range(0 if kind"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_one_kernel_keeps_a_number_less():
    kept = {
        kind: run(get(NAME), normalization=kind, norm_computed="one_kernel", d_model=D, normed_tokens=N).metrics
        for kind in ("rms_norm", "layer_norm")
    }
    assert kept["layer_norm"]["norm_kept_bytes"] - kept["rms_norm"]["norm_kept_bytes"] == 4 * N  # float32


def test_parameters_are_those_of_the_modules():
    for kind, module in (("rms_norm", nn.RMSNorm(D)), ("layer_norm", nn.LayerNorm(D, bias=False))):
        counted = sum(p.numel() for p in module.parameters())
        assert run(get(NAME), normalization=kind, d_model=D).metrics["norm_parameters"] == counted
    with_bias = sum(p.numel() for p in nn.LayerNorm(D).parameters())
    assert run(get(NAME), normalization="layer_norm", norm_bias=True, d_model=D).metrics["norm_parameters"] == with_bias


def test_the_table_has_both_norms_in_every_way():
    table = run(get(NAME)).tables["ways"]
    assert len(table["norm_computed"]) == 6
    assert set(table["normalization"]) == {"rms_norm", "layer_norm"}
