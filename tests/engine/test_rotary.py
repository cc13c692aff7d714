"""Exact angles, both pairings and rounded angles, against rotations written as complex numbers."""

import cmath

import pytest
import torch

from engine.positions import rotary_angles, rotate
from engine.rotary import PAIRINGS, complex_pairs, exact_angles, rotate_interleaved, rounded_angles, turn

D_K, BASE = 16, 500.0
PAIRS = {
    "half_split": [(j, j + D_K // 2) for j in range(D_K // 2)],
    "interleaved": [(2 * j, 2 * j + 1) for j in range(D_K // 2)],
}


def vector(seed: int = 5) -> torch.Tensor:
    return torch.randn(D_K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_each_pair_is_multiplied_by_its_own_power_of_a_unit_number(pairing):
    x, at = vector(), 1234
    out = turn(x, exact_angles(torch.tensor(at), D_K, BASE), pairing)
    for j, (first, second) in enumerate(PAIRS[pairing]):
        wanted = complex(x[first], x[second]) * cmath.exp(1j * at * BASE ** (-2 * j / D_K))
        # float64: the angle of 1234 radians is rounded to 1e-13
        assert complex(out[first], out[second]) == pytest.approx(wanted, abs=1e-12)
        assert complex(complex_pairs(out, pairing)[j]) == complex(out[first], out[second])


def test_the_two_pairings_are_one_rotation_in_another_order_of_the_coordinates():
    x, angles = vector(), exact_angles(torch.tensor(77), D_K, BASE)
    order = torch.tensor([i for pair in PAIRS["interleaved"] for i in pair])  # 0, 1, 2, ...
    to_half = torch.tensor([pair[side] for side in (0, 1) for pair in PAIRS["interleaved"]])
    assert torch.equal(order, torch.arange(D_K))
    assert torch.equal(rotate_interleaved(x, angles)[to_half], rotate(x[to_half], angles))  # the same operations


def test_exact_angles_are_those_of_the_model_up_to_float32():
    at = torch.tensor([0, 1, 500, 100_000])
    # float32 keeps 24 bits of the frequency's exponent (times ln 500), of the frequency and of the product
    assert torch.allclose(rotary_angles(at, D_K, BASE).double(), exact_angles(at, D_K, BASE), rtol=1e-6)


def test_in_float32_the_rounded_angles_are_those_of_the_model():
    at = torch.tensor([0.0, 1.0, 4001.0, 1e6], dtype=torch.float64)
    assert torch.equal(rounded_angles(at, D_K, BASE, torch.float32), rotary_angles(at, D_K, BASE).double())


def test_each_rounding_by_itself_and_bfloat16_has_no_4001():
    at = torch.tensor([4001.0], dtype=torch.float64)
    exact = exact_angles(at, D_K, BASE)
    by_position = rounded_angles(at, D_K, BASE, torch.bfloat16, "position")
    assert torch.equal(by_position, exact_angles(torch.tensor([4000.0]), D_K, BASE))
    product = rounded_angles(at, D_K, BASE, torch.bfloat16, "product")
    assert torch.equal(product, exact.to(torch.bfloat16).double())
    frequency = rounded_angles(at, D_K, BASE, torch.bfloat16, "frequency")
    # 8 bits: a relative error of 1/256 at most after two roundings, float32 and bfloat16; the first frequency is 1
    assert frequency[0, 0] == 4001
    assert ((frequency / exact - 1).abs() < 2**-8).all()
    assert not torch.allclose(frequency, exact, rtol=1e-4)
