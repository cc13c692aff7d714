"""Rounding against numpy, by the bits, and in the mean."""

import numpy as np
import pytest
import torch

from engine.rounding import round_stochastically, round_to_nearest
from tests.experiments.test_precision import rounded


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_to_nearest_is_that_of_the_bits(name):
    x = torch.randn(2000, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(-20, 15).repeat(58)[:2000]
    expected = rounded(x.numpy().astype(np.float64), name)
    np.testing.assert_array_equal(round_to_nearest(x, getattr(torch, name)).numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_keeps_what_is_there_and_the_mean_of_what_is_between(dtype):
    held = torch.tensor([0.0, 1.0, -1.0, 3.140625, -0.0078125, 65280.0]).to(dtype).float()
    chances = torch.rand(len(held), generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_stochastically(held, chances, dtype), held)
    eps = torch.finfo(dtype).eps
    x = torch.tensor([1 + 0.3 * eps, -1 - 0.3 * eps, 2 - 0.1 * eps, 2.0**-14 * (1 + 0.7 * eps)])[:, None].expand(
        -1, 20000
    )
    drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    out = round_stochastically(x.contiguous(), drawn, dtype)
    assert torch.equal(round_to_nearest(out, dtype), out)
    # a distance d or nothing: at most half a d of spread, 20000 of them; five standard errors
    spacing = torch.tensor([eps, eps, eps, 2.0**-14 * eps])[:, None]
    assert (((out - x) / spacing).mean(dim=1).abs() < 5 * 0.5 / 20000**0.5).all()
    assert ((out - x).abs() < spacing).all()


def test_float32_is_left_alone():
    x = torch.tensor([0.1, -3.3])
    assert round_stochastically(x, torch.tensor([0.5, 0.5]), torch.float32) is x
