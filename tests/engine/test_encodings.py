"""Encodings against their formulas, number by number, and against what they promise."""

import math

import pytest
import torch

from engine.encodings import alibi_bias, alibi_slopes, from_table, sinusoidal


def places(*positions: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(positions, dtype=dtype)


def test_sine_and_cosine_alternate_as_in_the_paper():
    encoded = sinusoidal(places(0, 1, 37), 6)
    for row, t in zip(encoded, (0, 1, 37), strict=True):
        for i in range(3):
            angle = t / 10_000 ** (2 * i / 6)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-12)  # float64, one product and one power
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_wavelengths_run_from_two_pi_to_near_ten_thousand_times_that():
    d_model = 512
    slopes = sinusoidal(places(0, 1e-3), d_model)[1, ::2] / 1e-3  # near 0 a sine is its angle
    assert 2 * math.pi / slopes[0].item() == pytest.approx(2 * math.pi, rel=1e-6)
    # the last pair has the exponent (d_model - 2) / d_model and not 1: the paper's 10000 · 2π is the limit
    assert 2 * math.pi / slopes[-1].item() == pytest.approx(2 * math.pi * 10_000 ** (510 / 512), rel=1e-6)


def test_every_position_has_the_same_length_and_a_product_depends_on_the_distance_alone():
    encoded = sinusoidal(torch.arange(200, dtype=torch.float64), 64)
    assert torch.allclose(encoded.square().sum(-1), torch.full((200,), 32.0, dtype=torch.float64))  # sin² + cos²
    products = encoded @ encoded.T
    assert products[50, 43].item() == pytest.approx(products[150, 143].item(), abs=1e-10)
    assert products[50, 43].item() != pytest.approx(products[50, 44].item(), abs=1e-3)


def test_whole_positions_are_encoded_in_float32():
    encoded = sinusoidal(places(3, dtype=torch.int64), 8)
    assert encoded.dtype == torch.float32
    assert torch.allclose(encoded, sinusoidal(places(3), 8).float())


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="got 7"):
        sinusoidal(places(1), 7)


def test_a_table_has_nothing_for_positions_beyond_it():
    table = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(from_table(table, places(3, 0, dtype=torch.int64)), table[[3, 0]])
    for beyond in (4, -1):
        with pytest.raises(IndexError, match="wanted 0 to 3"):
            from_table(table, places(0, beyond, dtype=torch.int64))


def test_slopes_of_eight_heads_are_those_of_the_paper():
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(16) == pytest.approx([2 ** (-half / 2) for half in range(1, 17)])
    assert alibi_slopes(1) == [1 / 256]


@pytest.mark.parametrize("n_heads", [3, 5, 6, 7, 12, 20, 25])
def test_other_numbers_of_heads_borrow_every_second_slope_of_the_next_power(n_heads):
    power = 2 ** math.floor(math.log2(n_heads))
    expected = alibi_slopes(power) + alibi_slopes(2 * power)[::2][: n_heads - power]
    assert alibi_slopes(n_heads) == pytest.approx(expected, rel=1e-12)
    assert len(set(alibi_slopes(n_heads))) == n_heads


def test_the_bias_falls_with_the_distance_and_is_the_same_before_and_behind():
    bias = alibi_bias(2, places(5, dtype=torch.int64), places(0, 3, 5, 7, dtype=torch.int64))
    assert bias.shape == (2, 1, 4)
    assert bias[0, 0].tolist() == [-5 / 16, -2 / 16, 0, -2 / 16]  # the first slope of two heads is 2⁻⁴
    assert bias[1, 0].tolist() == [-5 / 256, -2 / 256, 0, -2 / 256]


def test_only_differences_of_positions_count():
    at = torch.arange(6)
    assert torch.equal(alibi_bias(4, at, at), alibi_bias(4, at + 1000, at + 1000))
