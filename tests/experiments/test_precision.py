"""precision against the same draws in numpy: float64, and each step rounded to the format by numpy or by bits."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "precision"
FORMATS = {  # largest number, digits after the point of 1, smallest normal number
    "float16": (65504.0, 10, 2.0**-14),
    "bfloat16": ((2 - 2.0**-7) * 2.0**127, 7, 2.0**-126),
    "float32": ((2 - 2.0**-23) * 2.0**127, 23, 2.0**-126),
}
SETTINGS = [
    {},
    {"low_dtype": "bfloat16", "scale": "none", "kv_len": 512},
    {"low_dtype": "bfloat16", "scale": "inv_d_k", "softmax_in": "full"},
    {"scale": "none", "d_k": 64},
    {"scale_position": "before", "softmax_in": "full", "kv_len": 512, "q_len": 600},  # several chunks
    {"q_std": 32, "k_std": 48, "d_k": 256},  # the product overflows in most rows, the scaled logits would not
    {"q_std": 32, "k_std": 48, "d_k": 256, "scale_position": "before"},
    {"low_dtype": "float32", "scale": "none"},
]


def rounded(x: np.ndarray, low_dtype: str) -> np.ndarray:
    """To the nearest number of the format, ties to even; back in float64. bfloat16: the upper half of a float32."""
    with np.errstate(over="ignore", under="ignore"):
        if low_dtype != "bfloat16":
            return x.astype(low_dtype).astype(np.float64)
        bits = x.astype(np.float32).view(np.uint32)
        finite = np.isfinite(x)
        bits = np.where(finite, (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000, bits).astype(np.uint32)
        return bits.view(np.float32).astype(np.float64)


def reference(p: dict, q: np.ndarray, k: np.ndarray) -> dict[str, float]:
    largest, digits, smallest_normal = FORMATS[p["low_dtype"]]
    scale = {"none": 1, "inv_sqrt_d_k": 1 / math.sqrt(p["d_k"]), "inv_d_k": 1 / p["d_k"]}[p["scale"]]

    def low(x: np.ndarray) -> np.ndarray:
        return rounded(x, p["low_dtype"])

    def step(x: np.ndarray) -> np.ndarray:  # a step of the softmax
        return rounded(x, p["low_dtype"] if p["softmax_in"] == "low" else "float32")

    q, k = low(q * p["q_std"]), low(k * p["k_std"])
    exact = q @ k.T * scale
    before = p["scale_position"] == "before"
    product = low(q * scale) @ k.T if before else q @ k.T
    logits = low(product) if before else low(low(product) * scale)
    with np.errstate(invalid="ignore", over="ignore"):
        powers = step(np.exp(step(logits - logits.max(axis=-1, keepdims=True))))
        weights = low(step(powers / step(powers.sum(axis=-1, keepdims=True))))
        naive = step(step(np.exp(logits)).sum(axis=-1))
    weights_exact = np.exp(exact - exact.max(axis=-1, keepdims=True))
    weights_exact /= weights_exact.sum(axis=-1, keepdims=True)

    lost = ~np.isfinite(logits).all(axis=-1)
    resolved = weights_exact >= smallest_normal
    relative = (np.abs(weights - weights_exact) / np.where(resolved, weights_exact, np.inf)).max(axis=-1)
    peak = np.abs(exact).max()
    return {
        "logits_abs_max": peak,
        "qk_abs_max": np.abs(q @ k.T * (scale if before else 1)).max(),
        "dtype_max": largest,
        "spacing_at_max": 2.0 ** (math.floor(math.log2(min(peak, largest))) - digits),
        "overflow_count": np.count_nonzero(~np.isfinite(logits)),
        "overflow_share": np.count_nonzero(~np.isfinite(logits)) / logits.size,
        "lost_row_share": lost.mean(),
        "logits_error_max": np.abs(logits - exact)[np.isfinite(logits)].max(),
        "weights_error_mean": np.where(lost, 1, np.abs(weights - weights_exact).sum(axis=-1) / 2).mean(),
        "weights_error_relative_max": np.where(lost, 1, relative).max(),
        "zero_weight_share": np.count_nonzero(weights == 0) / weights.size,
        "naive_exp_overflow_share": np.count_nonzero(~np.isfinite(naive)) / len(naive),
    }


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | given
        result, (q, k) = recorded(experiment, seed=3, **p)
        assert (q.shape, k.shape) == ((p["q_len"], p["d_k"]), (p["kv_len"], p["d_k"]))
        want, got = reference(p, q, k), result.metrics
        for name in ("logits_abs_max", "qk_abs_max", "dtype_max", "spacing_at_max"):
            assert got[name] == pytest.approx(want[name], rel=1e-12), (given, name)  # float64 on both sides
        # The device adds the products up in float32, numpy in float64: of the numbers in a 16-bit format one in some
        # hundred is then the neighbour of numpy's. float32 itself errs more for it, by the root of the number of terms.
        high = 2 * math.sqrt(p["d_k"]) if p["low_dtype"] == "float32" else 1.03
        for name in ("logits_error_max", "weights_error_mean", "weights_error_relative_max"):
            assert 0.97 * want[name] <= got[name] <= high * want[name], (given, name)
        for name in ("overflow_share", "zero_weight_share", "lost_row_share", "naive_exp_overflow_share"):
            assert got[name] == pytest.approx(want[name], abs=2e-3), (given, name)
        assert got["overflow_count"] == got["overflow_share"] * p["q_len"] * p["kv_len"]
        table = result.tables["weights_error"]
        median = table["weights_error"][table["dtype"] == p["low_dtype"]].mean()
        assert 0.5 * got["weights_error_mean"] < median <= max(2 * got["weights_error_mean"], 1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(scale, 1.0) if params", "(1.0, scale) if params"),  # the position of the scale ignored
        ("k_low) * after", "k_low)"),  # scale dropped
        ("softmax(logits.float()).to(dtype)", "softmax(logits)"),  # softmax always in the low format
        ("qk_product(q_low * before, k_low)", "qk_product(q_low.float() * before, k_low.float())"),  # nothing overflows
        ("amax(dim=-1).where(~lost, 1)", "amax(dim=-1).nan_to_num(0)"),
        ("(difference.sum(dim=-1) / 2)", "difference.sum(dim=-1)"),
        (".where(resolved, 0)", ""),  # underflow counted as rounding
        ("q_exact, k_exact = q_low.cpu().double(), k_low.cpu().double()", "q_exact, k_exact = q.double(), k.double()"),
        ("(weights == 0)", "(weights_exact == 0)"),
        ("math.frexp(max(magnitude, limits.smallest_normal))[1] - 1", "math.frexp(magnitude)[1]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=2, **params).metrics


@pytest.mark.parametrize("d_k", [64, 128, 4096])
def test_independent_unit_variance_never_comes_near_the_range_of_float16(d_k):
    """The largest of N normal logits lies near √d_k · √(2 ln 2N), hundreds of times below 65504."""
    found = metrics(d_k=d_k, scale="none")
    want = math.sqrt(d_k) * math.sqrt(2 * math.log(2 * 64 * 256))
    assert found["logits_abs_max"] == pytest.approx(want, rel=0.25)  # the maximum of 16384 varies by some 10 %
    assert found["overflow_count"] == 0
    assert found["logits_abs_max"] < found["dtype_max"] / 200


def test_scaling_before_the_product_saves_what_scaling_after_it_loses():
    large = {"q_std": 64, "k_std": 64, "d_k": 256}
    after, before = metrics(**large), metrics(**large, scale_position="before")
    assert after["overflow_share"] > 0.1
    assert after["weights_error_mean"] == pytest.approx(1, abs=0.05)
    assert before["overflow_count"] == before["lost_row_share"] == 0
    assert before["qk_abs_max"] == pytest.approx(after["qk_abs_max"] / 16, rel=1e-12)
    assert metrics(**large, low_dtype="bfloat16")["overflow_count"] == 0  # the range of float32


def test_naive_exp_overflows_from_the_logarithm_of_the_largest_number():
    assert metrics(scale="none")["naive_exp_overflow_share"] == 1  # 256 logits spread by 11.3 pass ln 65504 = 11.09
    assert metrics()["naive_exp_overflow_share"] == 0
    assert metrics(scale="none", softmax_in="full")["naive_exp_overflow_share"] == 0  # float32 goes to 88.7
    huge = metrics(scale="none", softmax_in="full", q_std=4, k_std=4)  # spread by 181
    assert huge["naive_exp_overflow_share"] == 1
    assert huge["lost_row_share"] == 0  # with the maximum subtracted all is finite


def test_weights_of_float16_underflow_where_those_of_bfloat16_do_not():
    unscaled = {"scale": "none", "kv_len": 1024, "d_k": 64}
    assert metrics(**unscaled)["zero_weight_share"] > 0.5
    assert metrics(**unscaled, low_dtype="bfloat16")["zero_weight_share"] == 0
    assert metrics(kv_len=1024, d_k=64)["zero_weight_share"] == 0


@pytest.mark.parametrize("low_dtype", ["float16", "bfloat16"])
def test_smaller_logits_are_told_apart_better(low_dtype):
    scaled, unscaled = metrics(low_dtype=low_dtype), metrics(low_dtype=low_dtype, scale="none")
    digits = FORMATS[low_dtype][1]
    for found in (scaled, unscaled):
        spacing = 2.0 ** (math.floor(math.log2(found["logits_abs_max"])) - digits)
        assert found["spacing_at_max"] == spacing
        # the product is stored once and scaled once: half a spacing each
        assert 0.25 * spacing < found["logits_error_max"] <= spacing
    # 11.3 times larger logits are 3 to 4 binary digits coarser
    assert 4 < unscaled["logits_error_max"] / scaled["logits_error_max"] < 23


def test_a_power_of_two_may_be_put_before_or_after_the_product():
    same = metrics(d_k=256, scale_position="before")
    assert metrics(d_k=256) == same | {"qk_abs_max": same["qk_abs_max"] * 16}
    assert metrics(d_k=128)["weights_error_mean"] != metrics(d_k=128, scale_position="before")["weights_error_mean"]


def test_spacing_is_the_distance_to_the_next_number():
    table = run(get(NAME)).tables["spacing"]
    for low_dtype in ("float16", "float32"):
        rows = table["dtype"] == low_dtype
        assert table["spacing"][rows].tolist() == np.spacing(table["logits_abs"][rows].astype(low_dtype)).tolist()
    rows = table["dtype"] == "bfloat16"
    assert table["spacing"][rows].tolist() == (table["logits_abs"][rows] * 2.0**-7).tolist()  # powers of two


def test_refusals():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="too_many_key_numbers"):
        params(d_k=4096, kv_len=1024)
    with pytest.raises(ParamsError, match="too_many_logits"):
        params(q_len=1024, kv_len=2048)
    with pytest.raises(ParamsError, match="float16, bfloat16, float32"):
        params(low_dtype="float8")
