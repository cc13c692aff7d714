"""pattern_fit against single heads fitted by PyTorch's own Adam, with the divergence from its definition."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "pattern_fit"
SETTINGS = [
    {"target_pattern": "one_key", "d_k": 2, "kv_len": 8, "steps": 20},
    {"target_pattern": "two_keys", "d_k": 3, "kv_len": 12, "steps": 20, "learning_rate": 0.1},
    {"target_pattern": "blocks", "d_k": 4, "kv_len": 8, "steps": 10},
    {"target_pattern": "soft", "d_k": 8, "kv_len": 16, "steps": 20, "target_logits_std": 2.0},
]


def target(p: dict, drawn: np.ndarray) -> np.ndarray:
    n = len(drawn)
    P = np.zeros((n, n))
    if p["target_pattern"] == "soft":
        P = np.exp(p["target_logits_std"] * drawn)
        return P / P.sum(1, keepdims=True)
    for i in range(n):
        if p["target_pattern"] == "one_key":
            P[i, np.argsort(drawn[0])[i]] = 1
        elif p["target_pattern"] == "two_keys":
            P[i, np.argsort(drawn[i])[:2]] = 0.5
        else:
            own = [j for j in range(n) if j * 4 // n == i * 4 // n]
            P[i, own] = 1 / len(own)
    return P


def divergence(P: np.ndarray, W: np.ndarray) -> float:
    rows = [sum(p * math.log(p / w) for p, w in zip(*row, strict=True) if p > 0) for row in zip(P, W, strict=True)]
    return sum(rows) / len(rows)


def fitted(p: dict, P: np.ndarray, draws: list[np.ndarray], d_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, logits and coordinates of a single head of this width."""
    q, k = (torch.tensor(x[:, :d_k]).requires_grad_() for x in draws)
    optimizer = torch.optim.Adam([q, k], lr=p.get("learning_rate", 0.05))
    wanted = torch.tensor(P)
    for _ in range(p["steps"]):
        optimizer.zero_grad()
        weights = torch.softmax(torch.einsum("id,jd->ij", q, k) / math.sqrt(d_k), -1)
        (-(wanted * weights.log()).sum() / len(P)).backward()
        optimizer.step()
    logits = (q @ k.T / math.sqrt(d_k)).detach()
    return torch.softmax(logits, -1).numpy(), logits.numpy(), torch.cat((q, k)).detach().numpy()


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=5, **p)
        P, n = target(p, draws[0]), p["kv_len"]
        equal = divergence(P, np.full((n, n), 1 / n))
        # float64 on both sides, and up to 20 steps of Adam, which divides by gradients that may be small
        close = {"rel": 1e-7, "abs": 1e-9}
        W, logits, coordinates = fitted(p, P, draws[1:], p["d_k"])
        assert result.metrics == pytest.approx(
            {
                "kl_share": divergence(P, W) / equal,
                "kl_nats": divergence(P, W),
                "overlap_mean": np.minimum(P, W).sum(1).mean(),
                "top_key_share": np.mean([P[i, W[i].argmax()] == P[i].max() for i in range(n)]),
                "svd_missed_share": (np.linalg.svd(P)[1][p["d_k"] :] ** 2).sum() / (P**2).sum(),
                "logits_abs_max": np.abs(logits).max(),
                "coordinate_size_mean": math.sqrt((coordinates**2).mean()),
            },
            **close,
        ), p
        table = result.tables["by_width"]
        of_head = table["approximation"] == "fitted_head"
        for d_k, share in zip(table["d_k"][of_head], table["missed_share"][of_head], strict=True):
            assert share == pytest.approx(divergence(P, fitted(p, P, draws[1:], d_k)[0]) / equal, **close), (p, d_k)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[1 / math.sqrt(width) for width in widths]", "[1.0 for width in widths]"),
        ("read = torch.arange(max(widths)) < ", "read = torch.arange(max(widths)) <= "),  # one coordinate too many
        ("logits.log_softmax(dim=-1)", "logits.log_softmax(dim=-2)"),  # over the queries
        ("softmax(params.target_logits_std * drawn)", "softmax(drawn)"),
        ("drawn.argsort(dim=-1)[:, :2], 0.5", "drawn.argsort(dim=-1)[:, :3], 0.5"),
        ("same / same.sum(dim=-1, keepdim=True)", "same"),
        ("weights.minimum(pattern)", "weights.maximum(pattern)"),
        ("squares[width:].sum()", "squares[:width].sum()"),
        ("kl.sum().backward()", "kl.max().backward()"),  # only the worst head is fitted
        ("pattern.gather(-1, weights.argmax(dim=-1, keepdim=True))", "pattern.gather(-1, logits[0].argmin(-1, True))"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_head_that_is_wide_enough_reaches_any_soft_pattern():
    near = run(
        get(NAME), dtype="float64", target_pattern="soft", kv_len=12, d_k=11, steps=2000, learning_rate=0.02
    ).metrics
    narrow = run(
        get(NAME), dtype="float64", target_pattern="soft", kv_len=12, d_k=10, steps=2000, learning_rate=0.02
    ).metrics
    assert near["kl_nats"] < 1e-6  # 11 numbers for rows whose logarithms have rank 11, less their means
    assert narrow["kl_nats"] > 1e-4


def test_a_matrix_of_low_rank_can_not_be_a_permutation_and_a_head_can():
    found = run(get(NAME), target_pattern="one_key", d_k=4).metrics
    assert found["svd_missed_share"] == pytest.approx(1 - 4 / 32)  # all singular values are 1
    assert found["top_key_share"] == 1
    assert found["overlap_mean"] > 0.98


def test_four_blocks_have_rank_four():
    assert run(get(NAME), target_pattern="blocks", d_k=4, steps=10).metrics["svd_missed_share"] < 1e-20
    assert run(get(NAME), target_pattern="blocks", d_k=2, steps=10).metrics["svd_missed_share"] == pytest.approx(0.5)


def test_curves_begin_alike_and_end_at_the_metrics():
    result = run(get(NAME), target_pattern="soft", d_k=8, steps=50)
    curves = result.tables["curves"]
    mine = curves["d_k"] == 8
    assert curves["step"][mine][0] == 0
    assert curves["step"][mine][-1] == 50
    assert curves["kl_share"][mine][-1] == pytest.approx(result.metrics["kl_share"])


def test_refuses_a_head_wider_than_the_keys():
    with pytest.raises(ParamsError, match="width_within_keys"):
        get(NAME).Params(d_k=64, kv_len=32)
