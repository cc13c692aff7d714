"""Rotary positions: what they promise of any two vectors."""

import math

import pytest
import torch

from engine.positions import BASE, rotary_angles, rotate

D_K = 32


def vectors(n: int) -> torch.Tensor:
    return torch.randn(n, D_K, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def turned(x: torch.Tensor, at: int) -> torch.Tensor:
    return rotate(x, rotary_angles(torch.tensor([at]), D_K))


@pytest.mark.parametrize("shift", [1, 7, 200])
def test_a_product_depends_on_the_distance_alone(shift):
    q, k = vectors(2)
    one = turned(q, 12) @ turned(k, 5).T
    # angles are float32: at 212 one is off by 212 · 6e-8, and a product of 32 terms of size 1 by some 1e-4 at most
    assert (turned(q, 12 + shift) @ turned(k, 5 + shift).T).item() == pytest.approx(one.item(), abs=2e-4)
    assert (turned(q, 12 + shift) @ turned(k, 5).T).item() != pytest.approx(one.item(), abs=1e-2)


def test_lengths_stay_and_place_zero_changes_nothing():
    x = vectors(5)
    # cos² + sin² of float32 angles taken in float64 is 1 to 1e-7
    assert torch.allclose(turned(x, 99).norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
    assert torch.equal(turned(x, 0), x)


def test_each_pair_turns_by_its_own_angle():
    x = torch.zeros(1, D_K, dtype=torch.float64)
    x[0, 3] = 1  # the first half of pair 3, whose other half is coordinate 3 + 16
    angle = 5 * BASE ** (-2 * 3 / D_K)
    out = turned(x, 5)[0]
    assert out[3].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert out[3 + D_K // 2].item() == pytest.approx(math.sin(angle), abs=1e-6)
    assert out.count_nonzero() == 2
