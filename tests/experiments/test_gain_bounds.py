"""gain_bounds against the singular values of the whole matrices, and against vectors that reach what it says."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "gain_bounds"
SETTINGS = [
    {"d_k": 8, "rope_distance": 3, "gains_differ_by": "channel"},
    {"d_k": 8, "rope_distance": 0, "channel_gain_std": 1.5, "gains_differ_by": "channel"},
    {"d_k": 4, "rope_distance": 2, "channel_gain_std": 2.0, "gains_differ_by": "channel"},
    {"d_k": 4, "rope_distance": 11, "gains_differ_by": "crossed", "channel_gain_std": 1.0, "base": 100.0},
    {"d_k": 8, "rope_distance": 5, "gains_differ_by": "pair"},
    {"d_k": 8, "rope_distance": 5, "gains_differ_by": "one_number"},
]


def rotation(d_k: int, base: float, distance: float) -> np.ndarray:
    """The whole matrix: pair j is (j, j + d_k/2)."""
    R, half = np.zeros((d_k, d_k)), d_k // 2
    for j in range(half):
        a = distance * base ** (-2 * j / d_k)
        R[j, j] = R[j + half, j + half] = math.cos(a)
        R[j, j + half], R[j + half, j] = -math.sin(a), math.sin(a)
    return R


def gains_of(p: dict, drawn: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    d_k, std, kind = p["d_k"], p.get("channel_gain_std", 0.5), p["gains_differ_by"]
    if kind == "crossed":
        first = np.repeat([1 + std, 1 / (1 + std)], d_k // 2)
        return first, 1 / first
    gains = []
    for x in drawn[:2]:
        if kind == "pair":
            x = np.tile(x[: d_k // 2], 2)
        if kind == "one_number":
            x = np.full(d_k, x[0])
        gains.append(1 + std * x)
    return gains[0], gains[1]


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, drawn = recorded(experiment, seed=5, **p)
        d_k, m, base = p["d_k"], p["rope_distance"], p.get("base", 10000.0)
        gain_q, gain_k = gains_of(p, drawn)
        root = math.sqrt(d_k)

        def largest(distance, gain_q=gain_q, gain_k=gain_k, d_k=d_k, base=base, root=root):
            whole = np.diag(gain_q) @ rotation(d_k, base, distance) @ np.diag(gain_k)
            return root * np.linalg.svd(whole, compute_uv=False)[0]

        pairs = [(np.abs(g[j]), np.abs(g[j + d_k // 2])) for g in (gain_q, gain_k) for j in range(d_k // 2)]
        half = d_k // 2
        metrics = result.metrics
        assert metrics["largest_logit"] == pytest.approx(largest(m), rel=1e-12)
        assert metrics["channel_bound"] == pytest.approx(root * np.abs(gain_q * gain_k).max())
        assert metrics["pair_bound"] == pytest.approx(
            root * max(max(pairs[j]) * max(pairs[half + j]) for j in range(half))
        )
        assert metrics["global_bound"] == pytest.approx(root * np.abs(gain_q).max() * np.abs(gain_k).max())
        # over all angles of a pair the supremum is the pair's bound, reached at 0 or at a right angle
        assert metrics["largest_logit_any_distance"] == pytest.approx(metrics["pair_bound"], rel=1e-12)
        table = result.tables["by_distance"]
        rows = table["bound"] == "largest_logit"
        wanted = [largest(distance) for distance in table["rope_distance"][rows]]
        np.testing.assert_allclose(table["largest_or_bound"][rows], wanted, rtol=1e-12)
        assert max(wanted) <= metrics["pair_bound"] * (1 + 1e-12) <= metrics["global_bound"] * (1 + 2e-12)

        q, k = (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) for x in drawn[-2:])
        R = rotation(d_k, base, m)
        turned = drawn[-1] @ R.T
        behind = turned / np.sqrt((turned**2).mean(-1, keepdims=True) + 1e-6)
        first = (gain_q * q) @ (gain_k * k @ R.T).T / root
        second = (gain_q * q) @ (gain_k * behind).T / root
        assert metrics["rope_order_difference"] == pytest.approx(np.abs(first - second).max(), rel=1e-9, abs=1e-12)
        assert metrics["random_logit_max"] == pytest.approx(np.abs(first).max(), rel=1e-9)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-q_first * sin * k_second", "q_first * sin * k_second"),  # no rotation any more
        ("(channel_q * channel_k).max()", "(gain_q * gain_k).max()"),  # the sign of a gain counts
        ("(pair_q * pair_k).max()", "(pair_q.max() * pair_k.max())"),
        ("drawn[: params.d_k // 2].repeat(2)", "drawn[: params.d_k // 2].repeat_interleave(2)"),  # the other pairing
        ("gain_k * _rms(rotate(k, angles))", "rotate(gain_k * _rms(k), angles)"),
        ("halves = torch.tensor([i * math.pi / 2 for i in range(2)]", "halves = torch.tensor([0.0 for i in range(2)]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_vectors_of_root_mean_square_one_reach_the_supremum_and_none_exceeds_it():
    p = {"d_k": 8, "rope_distance": 4, "gains_differ_by": "channel"}
    result, drawn = recorded(get(NAME), seed=6, **p)
    gain_q, gain_k = gains_of(p, drawn)
    whole = np.diag(gain_q) @ rotation(8, 10000.0, 4) @ np.diag(gain_k) / math.sqrt(8)
    left, _, right = np.linalg.svd(whole)
    reached = (math.sqrt(8) * left[:, 0]) @ whole @ (math.sqrt(8) * right[0])
    assert reached == pytest.approx(result.metrics["largest_logit"], rel=1e-12)
    vectors = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0)).double().numpy()
    unit = vectors / np.sqrt((vectors**2).mean(-1, keepdims=True))
    assert np.abs(unit @ whole @ unit.T).max() < reached


def test_equal_gains_within_a_pair_commute_and_crossed_ones_quadruple_the_bound():
    assert run(get(NAME), gains_differ_by="pair").metrics["rope_order_difference"] < 1e-4  # rounding of float32
    crossed = run(get(NAME), gains_differ_by="crossed", channel_gain_std=1.0, rope_distance=11).metrics
    # 11 radians are 3π/2 but for 0.0044: the cosine of the fastest pair is that small
    assert crossed["largest_logit"] == pytest.approx(4 * crossed["channel_bound"], rel=1e-4)


def test_an_odd_width_has_no_pairs():
    with pytest.raises(ParamsError, match="rope_needs_pairs"):
        get(NAME).Params(d_k=3)
