"""rope_logits against rotations written out in complex numbers, pair by pair, float64."""

import cmath
import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "rope_logits"
SETTINGS = [
    {"vectors": "random_qk"},
    {"vectors": "random_qk", "pairing": "interleaved", "base": 50.0},
    {"vectors": "equal_qk", "far_distance": 64},
    {"vectors": "all_ones", "d_k": 16},
    {"vectors": "peak_at_distance", "peak_distance": 11, "far_distance": 32},
    {"vectors": "peak_at_distance", "peak_distance": 5, "far_distance": 32, "pairing": "interleaved"},
    {"vectors": "one_pair", "pair": 2},
    {"vectors": "random_qk", "encoding": "add_to_qk"},
    {"vectors": "random_qk", "pairing": "mixed_pairing"},
]


def pairs_of(pairing: str, d_k: int) -> list[tuple[int, int]]:
    half = d_k // 2
    return [(j, j + half) if pairing == "half_split" else (2 * j, 2 * j + 1) for j in range(half)]


def turned(x: np.ndarray, at: float, pairing: str, base: float) -> np.ndarray:
    out = np.empty_like(x)
    for j, (first, second) in enumerate(pairs_of(pairing, len(x))):
        z = complex(x[first], x[second]) * cmath.exp(1j * at * base ** (-2 * j / len(x)))
        out[first], out[second] = z.real, z.imag
    return out


def whiteboard(p: dict, draws: list[np.ndarray], seq_len: int) -> dict[str, float]:
    """Every metric from q and k as drawn, in loops."""
    d_k, base, far = p.get("d_k", 8), p.get("base", 10_000.0), p.get("far_distance", 16)
    pairing = p.get("pairing", "half_split")
    of_q, of_k = ("half_split", "interleaved") if pairing == "mixed_pairing" else (pairing, pairing)
    frequencies = [base ** (-2 * j / d_k) for j in range(d_k // 2)]
    qs, ks = draws
    if p["vectors"] == "equal_qk":
        ks = qs
    elif p["vectors"] == "all_ones":
        qs, ks = np.ones_like(qs), np.ones_like(ks)
    elif p["vectors"] == "peak_at_distance":
        ks = np.array([turned(q, p["peak_distance"], of_k, base) for q in qs])
    elif p["vectors"] == "one_pair":
        qs, ks = (
            np.array([x * [i in pairs_of(of_q, d_k)[p["pair"]] for i in range(d_k)] for x in xs]) for xs in (qs, ks)
        )

    def at(x: np.ndarray, position: float, own: str) -> np.ndarray:
        if p.get("encoding") == "add_to_qk":
            sines = [math.sin(position * f) for f in frequencies] + [math.cos(position * f) for f in frequencies]
            return x + np.array(sines)
        return turned(x, position, own, base)

    def logit(q, k, m, n):
        return at(q, m, of_q) @ at(k, n, of_k)

    q, k = qs[0], ks[0]
    size = np.linalg.norm(q) * np.linalg.norm(k)
    matrix = np.array([[logit(q, k, m, n) for n in range(seq_len)] for m in range(seq_len)])
    h = [
        complex(*q[list(one)]) * complex(*k[list(other)]).conjugate()
        for one, other in zip(pairs_of(of_q, d_k), pairs_of(of_k, d_k), strict=True)
    ]

    def relative(r: float) -> float:
        return sum(one * cmath.exp(1j * r * f) for one, f in zip(h, frequencies, strict=True)).real

    def partial(r: int) -> float:
        return sum(abs(sum(cmath.exp(1j * r * f) for f in frequencies[: j + 1])) for j in range(d_k // 2))

    largest_step = max(abs(b - a) for a, b in zip(h, [*h[1:], 0], strict=True))
    cosines = {
        r: np.array([logit(q, k, r, 0) / (np.linalg.norm(q) * np.linalg.norm(k)) for q, k in zip(qs, ks, strict=True)])
        for r in (0, far)
    }
    lines = [np.diagonal(matrix, offset) for offset in range(1 - seq_len, seq_len)]
    return {
        "diagonal_spread": max(line.max() - line.min() for line in lines) / size,
        "matrix_spread": (matrix.max() - matrix.min()) / size,
        "norm_change": max(abs(np.linalg.norm(at(q, m, of_q)) / np.linalg.norm(q) - 1) for m in range(seq_len)),
        "complex_difference": max(abs(matrix[m, n] - relative(m - n)) for m in range(seq_len) for n in range(seq_len))
        / size,
        "zero_distance_change": max(abs(matrix[m, m] - q @ k) for m in range(seq_len)) / size,
        "cosine_near_mean": cosines[0].mean(),
        "cosine_far_mean": cosines[far].mean(),
        "cosine_near_rms": math.sqrt((cosines[0] ** 2).mean()),
        "cosine_far_rms": math.sqrt((cosines[far] ** 2).mean()),
        "peak_found": int(np.argmax([logit(q, k, r, 0) for r in range(far + 1)])),
        "decay_bound_far_share": partial(far) / partial(0),
        "decay_bound_over_plain_min": min(partial(r) for r in range(far + 1)) * largest_step / sum(map(abs, h)),
        "slow_pairs": sum(far * f < 2 * math.pi for f in frequencies),
    }


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        values = {"d_k": 8, "far_distance": 16, "n_pairs": 4, "seq_len": 5} | p
        result, draws = recorded(experiment, seed=2, **values)
        # float64 in another order: angles up to 64 radians are rounded to 1e-14
        assert result.metrics == pytest.approx(whiteboard(p, draws, 5), rel=1e-9, abs=1e-12), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("relative = by_distance[diagonal]", "relative = by_distance[diagonal.mT]"),  # the distance the wrong way round
        ("steps = torch.cat((h[1:], torch.zeros_like(h[:1]))) - h", "steps = h[1:] - h[:-1]"),  # the last step left out
        (".cumsum(dim=-1)", ""),  # single terms for partial sums
        ("wavelengths > params.far_distance", "wavelengths < params.far_distance"),
        ('return "half_split" if name == "q" else "interleaved"', 'return "half_split"'),  # nothing is mixed
        ("torch.cat((angles.sin(), angles.cos()), dim=-1)", "torch.cat((angles, angles), dim=-1)"),
        ("return q, turn(q, angles,", "return q, turn(q, -angles,"),  # the peak in front of the query
        ("near.square().mean().sqrt()", "near.abs().mean()"),
        ("(highest - lowest).max()", "highest.max()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("pairing", ["half_split", "interleaved"])
def test_rotated_logits_depend_on_the_distance_alone_and_on_nothing_less(pairing):
    metrics = run(get(NAME), seed=1, seq_len=64, pairing=pairing).metrics
    # a sum of 64 products in float64, at angles of up to 63 radians
    for name in ("diagonal_spread", "norm_change", "complex_difference", "zero_distance_change"):
        assert metrics[name] < 1e-13
    assert metrics["matrix_spread"] > 0.1
    for broken in ({"encoding": "add_to_qk"}, {"pairing": "mixed_pairing"}):
        assert run(get(NAME), seed=1, **broken).metrics["diagonal_spread"] > 0.1


def test_any_distance_can_be_the_peak():
    for distance in (1, 2, 100, 1000):
        metrics = run(get(NAME), seed=3, vectors="peak_at_distance", peak_distance=distance, far_distance=1024).metrics
        assert metrics["peak_found"] == distance


def test_one_pair_is_a_cosine_of_its_own_wavelength():
    result = run(get(NAME), seed=3, vectors="one_pair", pair=0, d_k=8, seq_len=2)
    logits = result.tables["matrix"]["logit"]
    assert result.metrics["cosine_near_rms"] <= 1
    # q at 0 and k at 1, q at 1 and k at 0: the pair turns by 1 radian, so their sum is 2 cos(1) times the diagonal
    assert logits[1] + logits[2] == pytest.approx(2 * math.cos(1) * logits[0], rel=1e-5)  # the table is float32


def test_the_curves_are_the_logits_and_the_bounds_hold():
    result = run(get(NAME), seed=4, vectors="random_qk")
    curves = result.tables["by_distance"]
    for kind, start in (("equal_qk", 1), ("all_ones", 1)):
        assert curves["cosine"][curves["vectors"] == kind][0] == pytest.approx(start)
    peaked = curves["vectors"] == "peak_at_distance"
    assert curves["token_distance"][peaked][curves["cosine"][peaked].argmax()] == 100
    bounds = result.tables["bounds"]
    series = {name: bounds["logit_bound"][bounds["series"] == name] for name in set(bounds["series"])}
    assert (series["abs_logit"] <= series["plain_bound"] * (1 + 1e-6)).all()
    assert (series["abs_logit"] <= series["decay_bound"] * (1 + 1e-6)).all()


def test_refuses_what_makes_no_sense():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="width_is_even"):
        params(d_k=7)
    with pytest.raises(ParamsError, match="pair_within_head"):
        params(d_k=8, vectors="one_pair", pair=4)
