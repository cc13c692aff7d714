"""rope_precision against rounding written out by hand, in numpy float64."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.positions import rotary_angles
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "rope_precision"
BITS = {"bfloat16": 8, "float16": 11, "float32": 24}
SETTINGS = [
    {"low_dtype": "bfloat16"},
    {"low_dtype": "float16", "rounded": "product"},
    {"low_dtype": "float32", "position": 100_003},
    {"low_dtype": "bfloat16", "rounded": "position", "position": 777},
    {"low_dtype": "bfloat16", "rounded": "frequency", "key_distance": 100},
    {"low_dtype": "bfloat16", "rounded": "product", "position_scaling": 8.0},
    {"low_dtype": "float32", "stored_in": "bfloat16"},
    {"low_dtype": "float16", "stored_in": "float32", "position_scaling": 3.0},
]


def fl(x, name: str):
    """Nearest number of the format, ties to even; normal numbers only."""
    if name == "float64":
        return x
    mantissa, exponent = np.frexp(x)
    bits = BITS[name]
    return np.ldexp(np.round(mantissa * 2.0**bits), exponent - bits)


def whiteboard(p: dict, draws: list[np.ndarray], d_k: int) -> dict[str, float]:
    position, name, rounded = p.get("position", 4001), p["low_dtype"], p.get("rounded", "all")
    scaling, stored = p.get("position_scaling", 1.0), p.get("stored_in", "float64")
    exact_f = np.array([10_000.0 ** (-2 * j / d_k) for j in range(d_k // 2)])
    float32_f = rotary_angles(torch.ones(1), d_k)[0].double().numpy()  # the model's own, of which tests/engine knows

    def angles(at: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        t = np.atleast_1d(at)[:, None] / scaling
        low = {
            "all": lambda: fl(fl(t, name) * fl(float32_f, name), name),
            "position": lambda: fl(t, name) * exact_f,
            "frequency": lambda: t * fl(float32_f, name),
            "product": lambda: fl(t * exact_f, name),
        }[rounded]()
        return low, t * exact_f

    def turned(x: np.ndarray, angle: np.ndarray, format_: str) -> np.ndarray:
        a, b = x[:, : d_k // 2], x[:, d_k // 2 :]
        cos, sin = fl(np.cos(angle), format_), fl(np.sin(angle), format_)
        first = fl(fl(a * cos, format_) - fl(b * sin, format_), format_)
        return np.concatenate((first, fl(fl(a * sin, format_) + fl(b * cos, format_), format_)), axis=1)

    distance = p.get("key_distance", 7)
    q, k = (fl(x, stored) for x in draws)
    places = np.maximum(position - np.arange(len(q)) % 16, distance)
    (low_q, exact_q), (low_k, exact_k) = angles(places), angles(places - distance)
    kept = turned(q, low_q, stored), turned(k, low_k, stored)
    wanted = turned(q, exact_q, "float64"), turned(k, exact_k, "float64")
    errors = (kept[0] * kept[1]).sum(axis=1) - (wanted[0] * wanted[1]).sum(axis=1)
    low, exact = (a[0] for a in angles(position))
    off = [abs((e + math.pi) % (2 * math.pi) - math.pi) for e in low - exact]
    every = {float(fl(t / scaling, name)) for t in range(position + 1)}
    return {
        "angle_error_max": abs(low - exact).max(),
        "pairs_off_by_one": sum(o > 1 for o in off),
        "pairs_off_by_tenth": sum(o > 0.1 for o in off),
        "logits_error": math.sqrt((errors**2).mean() / d_k),
        "vector_error": np.linalg.norm(kept[0] - wanted[0]) / np.linalg.norm(wanted[0]),
        "position_error": abs(float(fl(position / scaling, name)) - position / scaling) * scaling,
        "distinct_positions": len(every),
    }


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=5, n_pairs=32, d_k=32, **p)
        # float64 differences of nearly equal numbers: 1e-10 of angles of up to 1e5
        assert result.metrics == pytest.approx(whiteboard(p, draws, 32), rel=1e-6, abs=1e-9), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(k, places - params.key_distance)", "(k, places)"),  # the key where the query is
        ("x = x.to(stored)", "x = x"),
        ("torch.remainder(errors + math.pi, 2 * math.pi) - math.pi", "errors"),  # full turns left in
        ("params.position / params.position_scaling], dtype", "params.position], dtype"),
        ("(off > 0.1)", "(off > 0.2)"),
        ("- torch.arange(len(q)) % N_PLACES", "- torch.arange(len(q)) % 8"),
        ("(every[1:] != every[:-1]).sum().item() + 1", "(every[1:] != every[:-1]).sum().item()"),
        ("/ math.sqrt(params.d_k)", ""),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_bfloat16_counts_to_256_and_float16_to_2048():
    for low_dtype, whole in (("bfloat16", 256), ("float16", 2048), ("float32", 2**20)):
        assert run(get(NAME), position=whole, low_dtype=low_dtype).metrics["distinct_positions"] == whole + 1
    for low_dtype, spacing in (("bfloat16", 2), ("float16", 2)):
        metrics = run(get(NAME), position={"bfloat16": 257, "float16": 2049}[low_dtype], low_dtype=low_dtype).metrics
        assert metrics["position_error"] == spacing / 2


def test_storage_alone_costs_the_same_everywhere_and_angles_do_not():
    near, far = (
        run(get(NAME), seed=2, position=at, low_dtype="float32", stored_in="bfloat16", rounded="position").metrics
        for at in (65, 100_003)
    )
    # float32 has both positions; 256 errors of one size: 5 · sqrt(1 / 128) for their ratio
    assert near["logits_error"] == pytest.approx(far["logits_error"], rel=0.45)
    near, far = (run(get(NAME), seed=2, position=at, low_dtype="bfloat16").metrics for at in (65, 4001))
    assert far["logits_error"] > 10 * near["logits_error"]


def test_refuses_what_makes_no_sense():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="beyond_float16"):
        params(position=70_000, low_dtype="float16")
    params(position=70_000, low_dtype="float16", position_scaling=2.0)
    with pytest.raises(ParamsError, match="key_before_query"):
        params(position=5, key_distance=6)
    with pytest.raises(ParamsError, match="width_is_even"):
        params(d_k=7)
