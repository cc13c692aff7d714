"""key_separation against queries found by numpy's least squares and weights written out, on the same drawn numbers."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "key_separation"
SETTINGS = [
    {"d_k": 16, "kv_len": 32, "weight_to_reach": 0.75},
    {"d_k": 64, "kv_len": 32, "n_wanted": 3},
    {"d_k": 8, "kv_len": 64, "n_wanted": 2, "coordinate_size": 2.0, "qk_dtype": "float16"},
    {"d_k": 2, "kv_len": 64, "keys": "curve", "coordinate_size": 20.0},
    {"d_k": 4, "kv_len": 16, "keys": "curve", "n_wanted": 2, "coordinate_size": 8.0},
    {"d_k": 32, "kv_len": 16, "keys": "curve", "n_wanted": 3},
    {"d_k": 2, "kv_len": 32, "keys": "curve", "n_wanted": 2},
    {"d_k": 2, "kv_len": 256, "keys": "curve"},
]
DEFAULTS = {"keys": "random", "n_wanted": 1, "coordinate_size": 1.0, "weight_to_reach": 0.9, "qk_dtype": "bfloat16"}
CAP = 2.0**24


def gap(cosines: np.ndarray, own: np.ndarray) -> float:
    return cosines[own].min() - np.delete(cosines, own).max()


def query(k: np.ndarray, own: np.ndarray, on_curve: bool) -> np.ndarray:
    """The shortest vector with products as equal as can be; on the curve also the one of the product of factors."""
    n, d_k = k.shape
    found = [np.linalg.lstsq(k[own], np.ones(len(own)), rcond=1e-9)[0]]
    if on_curve and d_k >= 2 * len(own):
        product = [-math.prod(1 - math.cos(2 * math.pi * (j - a) / n) for a in own) for j in range(n)]
        low = k[:, : 2 * len(own)]
        coefficients = np.linalg.lstsq(np.c_[low, np.ones(n)], product, rcond=None)[0]  # and a constant
        found.append(np.r_[coefficients[:-1], np.zeros(d_k - low.shape[1])])
    found = [q / max(np.linalg.norm(q), 1e-12) for q in found]
    return max(found, key=lambda q: gap(k @ q, own))


def logit_needed(cosines: np.ndarray, own: np.ndarray, weight: float) -> float:
    """Newton's method on the odds against the wanted keys, instead of bisection on their weight."""
    if gap(cosines, own) <= 0:
        return CAP
    lead = cosines[own].min() - np.delete(cosines, own)  # the wanted ones are equal
    size = 0.0
    for _ in range(500):
        terms = np.exp(-size * lead) / len(own)
        excess, slope = math.log(terms.sum() * weight / (1 - weight)), (terms * lead).sum() / terms.sum()
        size += excess / slope
        if abs(excess) < 1e-12:
            break
    return min(size, CAP)


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = DEFAULTS | given
        n, d_k, on_curve = p["kv_len"], p["d_k"], p["keys"] == "curve"
        result, draws = recorded(experiment, seed=5, **p)
        wanted = draws[0].argsort(1)[:, : p["n_wanted"]]
        if on_curve:
            angles = 2 * math.pi * np.arange(n)[:, None] * np.arange(1, d_k // 2 + 1) / n
            k = np.stack((np.cos(angles), np.sin(angles)), -1).reshape(n, d_k)
        else:
            k = draws[1]
        k = k / np.linalg.norm(k, axis=1, keepdims=True)
        q = np.array([query(k, own, on_curve) for own in wanted])
        cosines = q @ k.T
        gaps = np.array([gap(row, own) for row, own in zip(cosines, wanted, strict=True)])
        short = [torch.tensor(x).to(getattr(torch, p["qk_dtype"])).double().numpy() for x in (q, k)]
        rounded = np.array([gap(row, own) for row, own in zip(short[0] @ short[1].T, wanted, strict=True)])
        pairs = zip(cosines, wanted, strict=True)
        needed = np.array([logit_needed(row, own, p["weight_to_reach"]) for row, own in pairs])
        weights = np.exp(p["coordinate_size"] ** 2 * math.sqrt(d_k) * cosines)
        weights /= weights.sum(1, keepdims=True)
        m = result.metrics
        assert m["top_share"] == (gaps > 1e-13).mean(), p
        # of 64 queries two may differ where a rounded coordinate lies between two numbers, or two products are equal
        assert abs(m["top_share_rounded"] - (rounded > 1e-13).mean()) <= 2 / 64, p
        assert m["worst_cosine_gap"] == pytest.approx(gaps.min(), abs=1e-9), p
        assert m["wanted_weight_mean"] == pytest.approx(
            np.mean([row[own].sum() for row, own in zip(weights, wanted, strict=True)]), rel=1e-9
        ), p
        # bisection ends within 1e-5 of a logit; a gap of 1e-5 is known to 1e-16, and what follows from it to 1e-9
        median = np.sort(needed)[31]  # torch takes the lower one of the two in the middle
        assert m["logit_needed_median"] == pytest.approx(median, rel=3e-5), p
        assert m["logit_needed_max"] == pytest.approx(needed.max(), rel=3e-5), p
        assert m["coordinate_needed_max"] ** 2 * math.sqrt(d_k) == pytest.approx(needed.max(), rel=3e-5), p
        row = result.tables["row"]
        logits = p["coordinate_size"] ** 2 * math.sqrt(d_k) * cosines[0]
        shown = logits[(wanted[0, 0] + row["key_offset"]) % n] - logits.max()
        np.testing.assert_allclose(row["logits"], shown, atol=1e-9)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("params.coordinate_size**2 * math.sqrt(params.d_k)", "params.coordinate_size * math.sqrt(params.d_k)"),
        ("math.sqrt(needed.max().item() / math.sqrt(params.d_k))", "math.sqrt(needed.max().item() / params.d_k)"),
        (".prod(dim=1)", ".sum(dim=1)"),  # a sum of factors is 0 nowhere
        ("shortest = normalize((torch.linalg.pinv(own @ own.mT, hermitian=True) @ own)", "shortest = normalize((own)"),
        ("others = cosines.scatter(-1, wanted, -math.inf)", "others = cosines"),
        (">= params.weight_to_reach", ">= 0.9"),
        ("k.to(dtype).to(k.dtype).mT", "k.mT"),  # only q is rounded
        ("return unit_norm(torch.stack", "return (torch.stack"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("kv_len", [16, 64, 256])
def test_a_circle_puts_any_key_first_at_a_price(kv_len):
    found = run(get(NAME), d_k=2, keys="curve", kv_len=kv_len).metrics
    assert found["top_share"] == 1
    assert found["worst_cosine_gap"] == pytest.approx(1 - math.cos(2 * math.pi / kv_len), rel=1e-9)
    # the nearest two keys on either side are what competes: 9 (2 e^-g + 2 e^-4g + ...) = 1 at g = 2.893
    nearest = 2.893 * kv_len**2 / (2 * math.pi**2)
    assert found["logit_needed_max"] == pytest.approx(nearest, rel=0.02)  # 1 - cos x is x²/2 to 1 % at 16 keys


@pytest.mark.parametrize("n_wanted", [1, 2, 3, 4])
def test_twice_as_many_dimensions_as_wanted_keys_are_enough(n_wanted):
    found = run(get(NAME), d_k=8, keys="curve", n_wanted=n_wanted, kv_len=32).metrics
    assert found["top_share"] == 1


def test_two_keys_of_a_circle_come_first_only_if_they_are_neighbours():
    runs = [run(get(NAME), seed=seed, d_k=2, keys="curve", n_wanted=2, kv_len=64).metrics for seed in range(20)]
    share = np.mean([m["top_share"] for m in runs])
    # 1280 pairs, each neighbours with probability 2/63: standard error 0.0049, five of them
    assert abs(share - 2 / 63) < 0.025


def test_size_does_not_decide_the_order():
    one, other = (run(get(NAME), seed=2, d_k=8, coordinate_size=s).metrics for s in (0.5, 8.0))
    assert one["wanted_weight_mean"] < 0.1 < 0.9 < other["wanted_weight_mean"]
    for metric in ("top_share", "top_share_rounded", "coordinate_needed_max"):
        assert one[metric] == other[metric]


def test_refuses_half_a_circle():
    with pytest.raises(ParamsError, match="curve_has_pairs"):
        get(NAME).Params(d_k=3, keys="curve")
    get(NAME).Params(d_k=3)
