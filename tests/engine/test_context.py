"""engine/context.py against each method written out pair by pair."""

import math

import pytest
import torch

from engine.context import METHODS, attention_factor, scaled_frequencies

SETTINGS = [
    {"d_k": 128, "base": 10_000.0, "factor": 8.0, "trained_len": 4096},
    {"d_k": 128, "base": 500_000.0, "factor": 8.0, "trained_len": 8192, "fast_turns": 4.0},
    {"d_k": 16, "base": 100.0, "factor": 3.0, "trained_len": 32, "slow_turns": 0.5, "fast_turns": 4.0},
    {"d_k": 4, "base": 10.0, "factor": 2.0, "trained_len": 16},
]


def written_out(method: str, p: dict) -> list[float]:
    d, b, s, length = p["d_k"], p["base"], p["factor"], p["trained_len"]
    slow, fast = p.get("slow_turns", 1.0), p.get("fast_turns", 32.0)
    if method == "ntk_aware":
        b *= s ** (d / (d - 2))
    if method == "larger_base":
        b = 500_000.0
    found = []
    for j in range(d // 2):
        theta = 1 / b ** (2 * j / d)
        if method == "interpolation":
            theta /= s
        elif method in ("by_parts", "yarn", "yarn_code"):
            kept = (length / (2 * math.pi / theta) - slow) / (fast - slow)
            if method == "yarn_code":
                low = math.floor(d * math.log(length / (fast * 2 * math.pi)) / (2 * math.log(b)))
                high = math.ceil(d * math.log(length / (slow * 2 * math.pi)) / (2 * math.log(b)))
                low, high = max(low, 0), min(high, d - 1)
                kept = 1 - (j - low) / (high - low + (0.001 if high == low else 0))
            kept = min(max(kept, 0), 1)
            theta = theta / s * (1 - kept) + theta * kept
        found.append(theta)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", SETTINGS)
def test_each_method_is_its_formula(method, p):
    scaled = scaled_frequencies(method, **p)
    assert scaled.dtype == torch.float64
    # float64, a power and some products
    assert scaled.tolist() == pytest.approx(written_out(method, p), rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_many_factors_at_once_are_each_by_itself(method):
    factors = [1.0, 2.0, 7.5]
    together = scaled_frequencies(method, 16, 100.0, torch.tensor(factors, dtype=torch.float64)[:, None], 32)
    for row, factor in zip(together.expand(3, 8), factors, strict=True):
        assert torch.allclose(row, scaled_frequencies(method, 16, 100.0, factor, 32), rtol=1e-12, atol=0)


def test_a_factor_of_one_changes_nothing():
    plain = scaled_frequencies("unscaled", 64, 10_000.0, 8.0, 4096)
    for method in set(METHODS) - {"larger_base"}:
        assert torch.allclose(scaled_frequencies(method, 64, 10_000.0, 1.0, 4096), plain, rtol=1e-12, atol=0)
        assert attention_factor(method, 1.0) == 1


def test_the_temperature_belongs_to_yarn():
    assert attention_factor("yarn", 8.0) == attention_factor("yarn_code", 8.0) == pytest.approx(1.2079, abs=1e-4)
    assert {attention_factor(m, 8.0) for m in METHODS if not m.startswith("yarn")} == {1.0}


def test_the_rule_of_llama_is_by_parts():
    """Wavelengths against lengths, as Llama 3.1 writes it."""
    theta = scaled_frequencies("unscaled", 128, 500_000.0, 8.0, 8192)
    expected = []
    for frequency in theta.tolist():
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected.append(frequency)
        elif wavelength > 8192 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    scaled = scaled_frequencies("by_parts", 128, 500_000.0, 8.0, 8192, slow_turns=1, fast_turns=4)
    assert scaled.tolist() == pytest.approx(expected, rel=1e-12)


def test_refuses_a_single_pair():
    with pytest.raises(ValueError, match="got 2, wanted 4"):
        scaled_frequencies("ntk_aware", 2, 10_000.0, 8.0, 4096)
