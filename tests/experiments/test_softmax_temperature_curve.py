"""softmax_temperature_curve against its closed form in decimal arithmetic, and numpy's half and single precision."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "softmax_temperature_curve"
DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}  # binary digits after the point of 1
SMALLEST = {"float64": 5e-324, "float32": 1.4e-45, "float16": 6e-8, "bfloat16": 1e-40}  # smallest number above 0
STEP = 1 / 256  # of the search for one_from


def closed_form(a: float) -> tuple[float, float, float]:
    """Weight, slope and 1 - weight, with 80 digits."""
    with localcontext() as arithmetic:
        arithmetic.prec = 80
        rest = 2 * (-Decimal(a)).exp()
        weight = 1 / (1 + rest)
        return float(weight), float(weight * (1 - weight)), float(1 - weight)


def law(experiment: Experiment) -> None:
    for dtype, digits in DIGITS.items():
        eps = 2.0**-digits
        for a in (0.0, 0.5, 1.0, 2.5, 8.0, 10.0, 30.0, 100.0):  # multiples of a half: exact in every format
            got = run(experiment, a=a, number_format=dtype).metrics
            weight, slope, rest = closed_form(a)
            # a handful of operations, each right to half a unit in the last place
            assert got["weight_max"] == pytest.approx(weight, rel=3 * eps), (dtype, a)
            assert got["one_minus_weight"] == pytest.approx(rest, rel=1e-14), (dtype, a)
            # the slope is a product of two weights; numbers this small come in multiples of the smallest one
            small = 8 * SMALLEST[dtype]
            assert got["weight_max_derivative"] == pytest.approx(slope, rel=8 * eps, abs=small), (dtype, a)
            # 1 + 2e^-a rounds to 1 once 2e^-a is half a unit; a itself is rounded to a's grid, of at most 8 eps near 8
            grid = 2 * eps * 2 ** math.ceil(math.log2(digits + 2))
            assert got["one_from"] == pytest.approx((digits + 2) * math.log(2), abs=STEP + grid), (dtype, a)
    tables = run(experiment, number_format="float16").tables
    near, far, distance = tables["near"], tables["far"], tables["distance"]
    for table, end in ((near, 10), (far, 100)):
        assert (table["a"][0], table["a"][-1]) == (0, end)
        assert np.all(np.abs(table["weight_max"] - table["theory_weight_max"]) <= 2**-10 * 4)
        assert table["theory_weight_max"] == pytest.approx([closed_form(float(a))[0] for a in table["a"]], rel=1e-6)
        assert table["theory_derivative"] == pytest.approx([closed_form(float(a))[1] for a in table["a"]], rel=1e-5)
    for dtype, digits in DIGITS.items():
        rows = distance["dtype"] == dtype
        assert rows.sum() == pytest.approx((digits + 2) * math.log(2) / 0.5, abs=2)  # ends where the weight becomes 1
        # 1 - w is a multiple of half a unit; rounding w costs half of one and the sum before it as much; the columns
        # themselves are float32
        error = np.abs(distance["distance"] - distance["theory_distance"])[rows]
        assert np.all(error <= 1.5 * 2.0**-digits + 2.0**-23 * distance["theory_distance"][rows])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("np.array([1.0, 1.0, 2.0]) + shift)", "np.array([1.0, 1.0, 1.0]) + shift)"),
        ("weights.new_tensor([1.0, 1.0, 2.0])", "weights.new_tensor([1.0, 1.0, 1.0])"),
        ("softmax(exact.to(getattr(torch, dtype)).to(device))", "softmax(exact).to(getattr(torch, dtype))"),
        ("below[-1] + 1", "below[0] + 1"),  # the first instead of the last that is told from 1
        ("2 * np.exp(-a) / (1", "np.exp(-a) / (1"),
        ("told = weights[:, 2] < 1", "told = weights[:, 2] < 0.5"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), **params).metrics


def test_the_interviewers_three_values():
    """softmax([a, a, 2a]) for a = 1, 10, 100, from numpy's own exp."""
    for a in (1.0, 10.0, 100.0):
        powers = np.exp(np.array([a, a, 2 * a]) - 2 * a)
        assert metrics(a=a)["weight_max"] == pytest.approx(powers[2] / powers.sum(), rel=1e-15)
    assert metrics(a=100.0)["weight_max"] == 1
    assert 0 < metrics(a=100.0)["weight_max_derivative"] < 1e-43  # the weight says 1, the derivative is not yet 0
    assert metrics(a=0.0)["weight_max"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_where_the_weight_becomes_one_in_numpys_arithmetic(dtype):
    number = np.dtype(dtype).type
    a = np.arange(0, 25, STEP).astype(number)
    small = np.exp(a - number(2) * a)
    weight = number(1) / (small + small + number(1))
    last_below = np.flatnonzero(weight < 1)[-1]
    assert metrics(number_format=dtype)["one_from"] == pytest.approx(float(a[last_below + 1]), abs=2 * STEP)


def test_a_shift_changes_nothing_but_digits():
    for dtype, digits in DIGITS.items():
        plain, moved = metrics(number_format=dtype), metrics(number_format=dtype, shift=1000)
        assert moved["one_minus_weight"] == plain["one_minus_weight"]
        # the logits are rounded to multiples of 512 eps (numbers from 512 to 1023): a gap may be wrong by that much
        gap = 512 * 2.0**-digits
        assert abs(moved["weight_max"] - plain["weight_max"]) <= 0.25 * gap + 2.0**-digits  # the slope is at most 1/4
    assert (
        metrics(number_format="bfloat16", shift=1000)["weight_max"] != metrics(number_format="bfloat16")["weight_max"]
    )


def test_the_seed_and_the_dtype_of_the_run_do_not_matter():
    assert run(get(NAME), seed=0).metrics == run(get(NAME), seed=9, dtype="float64").metrics


def test_refusals():
    for bad in ({"a": -1}, {"a": 100.5}, {"shift": -1}, {"number_format": "float8"}):
        with pytest.raises(ParamsError):
            get(NAME).Params(**bad)
