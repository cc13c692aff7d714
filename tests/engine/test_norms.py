"""The norms against torch.nn's modules in float64, in training and in evaluation, and padding left out by hand."""

import pytest
import torch
from torch import nn

from engine.norms import KEEP_RUNNING, NORM_AXES, NormStatistics, norm_statistics, normalize, update_running

BATCH, SEQ_LEN, D_MODEL = 3, 5, 8
EXACT = 1e-12  # float64: some ten operations on numbers near 1


def texts(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 + 3 * torch.randn(BATCH, SEQ_LEN, D_MODEL, generator=generator, dtype=torch.float64)


def modules(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each norm by PyTorch's own module, which wants (batch, channels, length) for all but the first two."""
    per_position = nn.BatchNorm1d(SEQ_LEN * D_MODEL, affine=False, dtype=x.dtype)
    return {
        "layer_norm": nn.LayerNorm(D_MODEL, dtype=x.dtype)(x),
        "rms_norm": nn.RMSNorm(D_MODEL, eps=1e-5, dtype=x.dtype)(x),
        "whole_text_norm": nn.GroupNorm(1, D_MODEL, dtype=x.dtype)(x.mT).mT,
        "instance_norm": nn.InstanceNorm1d(D_MODEL)(x.mT).mT,
        "batch_norm": nn.BatchNorm1d(D_MODEL, dtype=x.dtype)(x.mT).mT,
        "position_batch_norm": per_position(x.flatten(1)).view_as(x),
    }


@pytest.mark.parametrize("normalization", NORM_AXES)
def test_each_norm_is_that_of_the_library(normalization):
    x = texts()
    out = normalize(x, norm_statistics(x, normalization))
    assert torch.allclose(out, modules(x)[normalization], rtol=0, atol=EXACT)


def test_no_two_norms_are_the_same():
    outs = list(modules(texts()).values())
    assert all((a - b).abs().max() > 0.1 for i, a in enumerate(outs) for b in outs[:i])


def test_running_statistics_are_those_of_the_module_and_evaluation_uses_them():
    module = nn.BatchNorm1d(D_MODEL, momentum=0.3, dtype=torch.float64)
    running = NormStatistics(
        torch.zeros(1, 1, D_MODEL, dtype=torch.float64), torch.ones(1, 1, D_MODEL, dtype=torch.float64)
    )
    for seed in range(4):
        module(texts(seed).mT)
        running = update_running(running, norm_statistics(texts(seed), "batch_norm", unbiased=True), 0.3)
    assert torch.allclose(running.mean.flatten(), module.running_mean, rtol=0, atol=EXACT)
    assert torch.allclose(running.variance.flatten(), module.running_var, rtol=0, atol=EXACT)
    x = texts(9)
    assert torch.allclose(normalize(x, running), module.eval()(x.mT).mT, rtol=0, atol=EXACT)


@pytest.mark.parametrize("normalization", [name for name, axes in NORM_AXES.items() if axes != (-1,)])
def test_tokens_that_are_left_out_change_no_statistic(normalization):
    x, keep = texts(), torch.ones(BATCH, SEQ_LEN, 1)
    keep[:, -2:] = 0
    other = x.clone()
    other[:, -2:] = 1e3
    left_out = norm_statistics(x, normalization, keep)
    assert all(torch.equal(a, b) for a, b in zip(left_out, norm_statistics(other, normalization, keep), strict=True))
    cut = normalize(x[:, :-2], norm_statistics(x[:, :-2], normalization))
    kept = NormStatistics(*(part[..., : SEQ_LEN - 2, :] for part in left_out))
    assert torch.allclose(normalize(x[:, :-2], kept), cut, rtol=0, atol=EXACT)


@pytest.mark.parametrize("normalization", ["layer_norm", "rms_norm"])
def test_a_norm_of_single_tokens_has_nothing_to_leave_out(normalization):
    x = texts()
    plain, masked = (norm_statistics(x, normalization, keep) for keep in (None, torch.zeros(BATCH, SEQ_LEN, 1)))
    assert all(torch.equal(a, b) for a, b in zip(plain, masked, strict=True))


def test_a_place_without_any_token_stays_finite():
    keep = torch.ones(BATCH, SEQ_LEN, 1)
    keep[:, 0] = 0
    x = texts()
    assert normalize(x, norm_statistics(x, "position_batch_norm", keep)).isfinite().all()


def test_axes_in_front_are_kept_apart():
    x = torch.stack((texts(0), texts(1)))
    for normalization in NORM_AXES:
        both = normalize(x, norm_statistics(x, normalization))
        one = normalize(x[1], norm_statistics(x[1], normalization))
        assert torch.allclose(both[1], one, rtol=0, atol=EXACT)


def test_those_that_look_at_other_texts_are_those_with_running_statistics():
    for normalization, axes in NORM_AXES.items():
        assert (-3 in axes) == (normalization in KEEP_RUNNING)
