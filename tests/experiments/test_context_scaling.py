"""context_scaling against frequencies and rotations written out in complex numbers, pair by pair."""

import cmath
import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.engine.test_context import written_out
from tests.harness import assert_law_catches, recorded, run

NAME = "context_scaling"
N_KEYS = 64
SETTINGS = [
    {"method": "unscaled"},
    {"method": "interpolation", "length_ratio": 4.0},
    {"method": "ntk_aware"},
    {"method": "ntk_aware", "context_factor": 3.0, "length_ratio": 2.5},
    {"method": "by_parts", "slow_turns": 2.0, "fast_turns": 6.0},
    {"method": "yarn"},
    {"method": "yarn_code", "context_factor": 4.0},
    {"method": "larger_base", "larger_base": 500_000.0},
]


def whiteboard(p: dict, draws: list[np.ndarray]) -> dict[str, float]:
    """Every metric, in loops."""
    method, d_k, base, length = p["method"], 16, 50.0, 128
    s, ratio = p.get("context_factor", 8.0), p.get("length_ratio", 8.0)

    def scaled_by(factor: float) -> list[float]:
        q = {"d_k": d_k, "base": base, "factor": factor, "trained_len": length}
        return written_out(method, q | {name: p[name] for name in ("slow_turns", "fast_turns") if name in p})

    theta = [base ** (-2 * j / d_k) for j in range(d_k // 2)]
    scaled = scaled_by(s)
    slow = [j for j in range(d_k // 2) if theta[j] * length < 2 * math.pi]
    reach = [scaled[j] * length * ratio / (theta[j] * length) for j in slow]
    unseen = [
        max(0.0, min(1, f * length * ratio / (2 * math.pi)) - min(1, t * length / (2 * math.pi)))
        for t, f in zip(theta, scaled, strict=True)
    ]

    def step(frequencies: list[float]) -> float:
        return math.sqrt(sum(abs(cmath.exp(1j * f) - 1) ** 2 for f in frequencies))

    kept = sum(abs(f / t - 1) < 1e-9 for t, f in zip(theta, scaled, strict=True))
    divided = sum(abs(f / t - 1 / s) < 1e-9 and abs(f / t - 1) >= 1e-9 for t, f in zip(theta, scaled, strict=True))
    gain = (0.1 * math.log(s) + 1) ** 2 if method.startswith("yarn") else 1.0

    q, keys = draws
    half, last = d_k // 2, round(length * ratio)

    def turned(x: np.ndarray, at: float, frequencies: list[float]) -> list[complex]:
        return [complex(x[j], x[j + half]) * cmath.exp(1j * at * frequencies[j]) for j in range(half)]

    fresh, stale = [], []
    for number, k in enumerate(keys):
        at = math.floor(number * last / N_KEYS)
        new, old = scaled_by(last / length), scaled_by(max(1.0, (at + 1) / length))
        for found, own in ((fresh, new), (stale, old)):
            pairs = zip(turned(q, last - 1, new), turned(k, at, own), strict=True)
            found.append(sum((a * b.conjugate()).real for a, b in pairs))
    fresh, stale = np.array(fresh), np.array(stale)
    return {
        "pairs_beyond": sum(r > 1 + 1e-9 for r in reach),
        "reach_max": max(reach, default=0.0),
        "neighbour_distance_ratio": step(scaled) / step(theta),
        "slow_pairs": len(slow),
        "unseen_turns_max": max(unseen),
        "fastest_frequency_ratio": scaled[0] / theta[0],
        "middle_frequency_ratio": scaled[4] / theta[4],
        "slowest_frequency_ratio": scaled[-1] / theta[-1],
        "unchanged_pairs": kept,
        "divided_pairs": divided,
        "blended_pairs": d_k // 2 - kept - divided,
        "logits_factor": gain,
        "stale_logits_change": np.linalg.norm(stale - fresh) / np.linalg.norm(fresh),
    }


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=2, d_k=16, base=50.0, trained_len=128, **p)
        # float64 in another order; angles of up to 1024 radians are rounded to 1e-13
        assert result.metrics == pytest.approx(whiteboard(p, draws), rel=1e-9, abs=1e-10), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("reach = scaled / theta * params.length_ratio", "reach = scaled / theta * params.context_factor"),
        ("theta * params.trained_len < 2 * math.pi", "theta * params.trained_len > 2 * math.pi"),
        ("(2 * (theta / 2).sin()).norm()", "(2 * (theta / 2).sin()).norm() ** 2"),  # squared: not a distance
        ("tested.clamp(max=full) - trained.clamp(max=full)", "tested - trained"),  # the circle never closes
        ("context_factor) for x in (q, k)", "context_factor) ** 0.5 for x in (q, k)"),  # on the logits once
        ("for theta in (now, then)", "for theta in (now, now)"),
        ("((positions + 1) / params.trained_len).clamp(min=1)", "((positions + 1) / params.trained_len)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_textbook_case():
    """Width 128, base 10000, 4096 positions, eight times as many."""
    found = {p: run(get(NAME), method=p).metrics for p in ("unscaled", "interpolation", "ntk_aware", "yarn")}
    assert [found[p]["pairs_beyond"] for p in found] == [18, 0, 17, 0]
    assert [round(found[p]["reach_max"], 2) for p in found] == [8, 1, 1.75, 1]
    assert [found["yarn"][name] for name in ("unchanged_pairs", "divided_pairs", "blended_pairs")] == [21, 18, 25]


def test_the_charts_show_all_methods_and_the_chosen_one():
    for method, n in (("yarn", 5), ("by_parts", 6)):
        tables = run(get(NAME), method=method).tables
        for table in tables.values():
            assert len(set(table["method"])) == n
            assert method in table["method"]
    pairs = tables["pairs"]
    plain = pairs["method"] == "unscaled"
    assert (pairs["frequency_ratio"][plain] == 1).all()
    assert (pairs["unseen_turns"][plain] > 0).sum() == 18


def test_refuses_a_ramp_without_width():
    with pytest.raises(ParamsError, match="slow_turns_below_fast"):
        get(NAME).Params(slow_turns=4, fast_turns=4)
