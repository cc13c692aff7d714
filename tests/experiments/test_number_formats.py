"""number_formats against the bits: numpy's float16, the upper half of a float32, and all 256 numbers of 8 bits."""

import math

import numpy as np
import pytest

from engine.registry import Experiment, get
from tests.experiments.test_precision import rounded
from tests.harness import assert_law_catches, recorded, run

NAME = "number_formats"


def all_of_8_bits(exponent_bits: int) -> np.ndarray:
    """Every finite number that is not below 0, in order, by the definition of the format."""
    fraction_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    numbers = []
    for code in range(128):
        exponent, fraction = code >> fraction_bits, code % 2**fraction_bits
        if exponent_bits == 4 and code == 127:
            continue  # its one NaN; it has no infinity
        if exponent_bits == 5 and exponent == 31:
            continue  # infinity and NaN, as in IEEE 754
        if exponent == 0:
            numbers.append(fraction * 2.0 ** (1 - bias - fraction_bits))
        else:
            numbers.append((1 + fraction / 2**fraction_bits) * 2.0 ** (exponent - bias))
    return np.array(numbers)


EIGHT_BITS = {"float8_e4m3fn": all_of_8_bits(4), "float8_e5m2": all_of_8_bits(5)}


def stored(x: np.ndarray, name: str) -> np.ndarray:
    if name not in EIGHT_BITS:
        return rounded(x, name)
    numbers = EIGHT_BITS[name]
    distance = np.abs(x[:, None] - numbers)
    nearest = distance.argmin(axis=1)
    ties = np.isclose(
        distance[np.arange(len(x)), nearest],
        distance[np.arange(len(x)), np.minimum(nearest + 1, len(numbers) - 1)],
        rtol=0,
        atol=0,
    )
    return numbers[np.where(ties & (nearest % 2 == 1), np.minimum(nearest + 1, len(numbers) - 1), nearest)]


def law(experiment: Experiment) -> None:
    for name in ("float16", "bfloat16", "float32", *EIGHT_BITS):
        for value, times in ((1e-8, 0), (3.1e-8, 0), (1e-8, 10), (1.003, 0), (37.3, 3), (0.0021, 0), (1e-5, 4)):
            given = {"given_value": value, "stored_format": name, "times_log2": times}
            result, (drawn,) = recorded(experiment, seed=1, **given)
            wanted = stored(np.array([np.float32(value * 2.0**times)], dtype=np.float64), name)[0] * 2.0**-times
            assert result.metrics["stored_value"] == wanted, given
            assert result.metrics["stored_error"] == pytest.approx(abs(wanted - value) / value, abs=1e-15)
            if wanted > 0:  # the next number above it, found by trying
                step = result.metrics["spacing_there"]
                neighbours = np.array([wanted + step, wanted + 0.75 * step, wanted + 0.25 * step]) * 2.0**times
                assert stored(neighbours, name) * 2.0**-times == pytest.approx(
                    [wanted + step, wanted + step, wanted], rel=1e-12
                )
        table = result.tables["errors"]
        if name == "float32":
            continue
        mine = table["stored_format"] == name
        for size, error in zip(table["magnitude"][mine], table["rounding_error"][mine], strict=True):
            x = size * (1 + drawn[round(math.log2(size)) + 32])
            relative = (stored(np.float32(x * 2.0**4).astype(np.float64), name) * 2.0**-4 - x) / x
            # float32 stands between: 24 digits against at most 11
            assert error == pytest.approx(np.sqrt(np.mean(relative**2)), rel=1e-3), (name, size)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(x * 2.0**times_log2).float()", "x.float()"),  # not scaled, but divided
        ("limits.eps * 2.0 ** (exponent - params.times_log2)", "limits.eps * 2.0**exponent"),
        ("abs(kept - params.given_value) / params.given_value", "abs(kept - params.given_value)"),
        (".square().mean(dim=1).sqrt()", ".abs().mean(dim=1)"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(
    ("name", "largest", "smallest", "at_one", "octaves"),
    [
        ("float16", 65504, 2.0**-24, 2.0**-10, 39),
        ("bfloat16", (2 - 2.0**-7) * 2.0**127, 2.0**-133, 2.0**-7, 260),
        ("float32", (2 - 2.0**-23) * 2.0**127, 2.0**-149, 2.0**-23, 276),
        ("float8_e4m3fn", 448, 2.0**-9, 2.0**-3, 17),
        ("float8_e5m2", 57344, 2.0**-16, 2.0**-2, 31),
    ],
)
def test_the_ends_of_a_format(name, largest, smallest, at_one, octaves):
    found = run(get(NAME), stored_format=name).metrics
    assert found["largest_number"] == largest
    assert found["smallest_positive"] == smallest
    assert found["spacing_at_one"] == at_one
    assert found["octaves"] == octaves


def test_above_the_largest_number():
    assert run(get(NAME), given_value=65519).metrics["becomes_infinite"] == 0  # less than half a distance above 65504
    infinite = run(get(NAME), given_value=65520).metrics
    assert infinite["becomes_infinite"] == 1
    assert infinite["stored_value"] == 65504
