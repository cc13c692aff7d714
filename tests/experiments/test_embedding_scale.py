"""embedding_scale against norms and cosines written out, and against PyTorch's own initializations."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "embedding_scale"
INITS = ("normal_unit", "normal_inv_d", "xavier_uniform", "normal_002")


def rows(p: dict, draws: list[np.ndarray]) -> np.ndarray:
    normal, uniform = draws
    d = p["d_model"]
    drawn = {
        "normal_unit": normal,
        "normal_inv_d": normal / math.sqrt(d),
        "normal_002": 0.02 * normal,
        "xavier_uniform": (2 * uniform - 1) * math.sqrt(6 / (p["n_tokens"] + d)),
    }[p["embedding_init"]]
    return drawn * math.sqrt(d) if p["times_sqrt_d"] else drawn


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return a @ b / math.sqrt((a @ a) * (b @ b))


def law(experiment: Experiment) -> None:
    for init in INITS:
        for scaled in (False, True):
            p = {"embedding_init": init, "times_sqrt_d": scaled, "d_model": 16, "n_tokens": 64, "n_drawn": 4}
            result, draws = recorded(experiment, seed=3, **p)
            E = rows(p, draws)
            turn = [10_000 ** (-2 * i / 16) for i in range(8)]
            P = np.array([[f(at * t) for t in turn for f in (math.sin, math.cos)] for at in range(4)])
            other = [(i + 2) % 4 for i in range(4)]
            token, position = np.mean([math.hypot(*e) for e in E]), np.mean([math.hypot(*x) for x in P])
            expected = {
                "token_norm": token,
                "position_norm": position,
                "position_over_token": position / token,
                "same_token_cosine": np.mean([cosine(E[i] + P[i], E[i] + P[j]) for i, j in enumerate(other)]),
                "same_position_cosine": np.mean([cosine(E[i] + P[i], E[j] + P[i]) for i, j in enumerate(other)]),
            }
            # positions are computed in float32 there: 2^-24 a coordinate
            assert result.metrics == pytest.approx(expected, rel=1e-5, abs=1e-6), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("factor = params.d_model**0.5 if scaled", "factor = params.d_model if scaled"),
        ("params.d_model**-0.5,", "1 / params.d_model,"),  # the variance for the standard deviation
        ("math.sqrt(6 / (params.n_tokens + params.d_model))", "math.sqrt(6 / params.d_model)"),
        ("2 * uniform - 1", "uniform"),
        ("one, other = tokens + positions, tokens + positions.roll(half, 0)", "one, other = tokens, positions"),
        ("tokens.roll(half, 0) + positions", "tokens.roll(half, 0)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_initializations_are_those_of_pytorch():
    torch.manual_seed(0)
    table = torch.nn.Embedding(4096, 64)
    # standard error of a standard deviation of 2^18 numbers: 0.14 %, five of them
    assert table.weight.std().item() == pytest.approx(1, rel=0.007)
    torch.nn.init.xavier_uniform_(table.weight)
    metrics = run(get(NAME), embedding_init="xavier_uniform", times_sqrt_d=False, d_model=64, n_tokens=4096).metrics
    # 128 norms of 64 coordinates: the mean norm is known to 0.4 %
    assert metrics["token_norm"] == pytest.approx(table.weight.norm(dim=1).mean().item(), rel=0.03)


def test_the_chart_holds_the_metric():
    result = run(get(NAME), embedding_init="normal_unit", times_sqrt_d=True)
    table = result.tables["by_init"]
    at = (table["embedding_init"] == "normal_unit") & (table["embedding"] == "times_root_d")
    assert table["position_over_token"][at] == pytest.approx([result.metrics["position_over_token"]])


def test_refuses_an_odd_width():
    with pytest.raises(ParamsError, match="model_width_is_even"):
        get(NAME).Params(d_model=7)
