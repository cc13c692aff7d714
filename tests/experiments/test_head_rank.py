"""head_rank against the same layer worked out in numpy, head by head, with numpy's own rank."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "head_rank"
SETTINGS = [
    {},
    {"d_k": 4, "d_v": 8, "seq_len": 40, "n_kv_heads": 1},
    {"d_k": 6, "d_v": 2, "d_model": 24, "seq_len": 30, "n_heads": 4, "n_kv_heads": 2, "positions": "rope"},
    {"d_k": 4, "d_v": 4, "d_model": 16, "seq_len": 24, "positions": "alibi_one_side"},
    {"d_k": 4, "d_v": 4, "d_model": 16, "seq_len": 24, "positions": "alibi_both_sides"},
    {"d_k": 4, "d_v": 4, "d_model": 16, "seq_len": 24, "positions": "distance_bias", "qk_size": 2.0},
]


def turned(x: np.ndarray) -> np.ndarray:
    """RoPE one position and one pair at a time."""
    out, d_k = x.copy(), x.shape[1]
    for position in range(len(x)):
        for pair in range(d_k // 2):
            z = (x[position, pair] + 1j * x[position, pair + d_k // 2]) * np.exp(
                1j * position * 10_000 ** (-2 * pair / d_k)
            )
            out[position, pair], out[position, pair + d_k // 2] = z.real, z.imag
    return out


def reference(p: dict, draws: list[np.ndarray]) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    x, W_q, W_k, W_v, W_o, by_distance = draws
    n, d_k = len(x), W_q.shape[1]
    root, kind = math.sqrt(x.shape[1]), p.get("positions", "no_positions")
    group = len(W_q) // len(W_k)
    bias = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            bias[i, j] = {
                "alibi_one_side": -0.25 * (i - j),
                "alibi_both_sides": -0.25 * abs(i - j),
                "distance_bias": by_distance[i - j + n - 1],
            }.get(kind, 0.0)
    logits, weights, contexts, out = [], [], [], np.zeros_like(x)
    for head in range(len(W_q)):
        q, k = (p.get("qk_size", 1.0) * x @ W.T / root for W in (W_q[head], W_k[head // group]))
        if kind == "rope":
            q, k = turned(q), turned(k)
        logits.append(q @ k.T / math.sqrt(d_k) + bias)
        e = np.exp(logits[-1] - logits[-1].max(1, keepdims=True))
        weights.append(e / e.sum(1, keepdims=True))
        contexts.append(weights[-1] @ x @ W_v[head // group].T / root)
        out += contexts[-1] @ W_o[head].T
    ranks = {
        "logits_rank": logits[0],
        "weights_rank": weights[0],
        "all_logits_rank": np.concatenate(logits),
        "value_map_rank": W_o[0] @ W_v[0],
        "context_rank": contexts[0],
        "layer_out_rank": out,
        "x_rank": x,
    }
    singular = np.linalg.svd(weights[0], compute_uv=False)
    found = {name: float(np.linalg.matrix_rank(matrix)) for name, matrix in ranks.items()}
    return found | {"weights_strong": float((singular > 0.01 * singular[0]).sum())}, {
        "logits": np.linalg.svd(logits[0], compute_uv=False),
        "weights": singular,
    }


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=5, **p)
        metrics, spectra = reference(p, draws)
        assert result.metrics == metrics, p
        table = result.tables["spectrum"]
        for name, singular in spectra.items():
            shares = table["singular_share"][table["matrix"] == name]
            strong = singular > 1e-9 * singular[0]  # float64 rounds singular values at 1e-16 of the largest
            assert shares[strong] == pytest.approx((singular / singular[0])[strong], rel=1e-6), (p, name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("logits = attention_logits(q, k) + bias", "logits = attention_logits(q, k)"),
        ("weights = softmax(logits)", "weights = softmax(logits.mT).mT"),
        ('q, k = turn(q, angles, "half_split"), turn(k, angles, "half_split")', "q = turn(q, angles, 'half_split')"),
        ('"all_logits": logits.flatten(0, 1)', '"all_logits": logits.flatten(1, 2)'),
        ('"value_map": W_o[0] @ W_v[0]', '"value_map": W_o.flatten(0, 1)[:, :1] @ W_v[0][:1]'),
        ("lead.abs().to(drawn.dtype)", "lead.to(drawn.dtype)"),
        ("return drawn[lead + params.seq_len - 1]", "return drawn[lead.abs()]"),
        (
            "(x @ W_k.mT).repeat_interleave(group, 0)",
            "(x @ W_k.mT)[:1].repeat(params.n_heads, 1, 1)",
        ),  # all heads share one key head
        ("strong > STRONG * strong[0]", "strong > STRONG"),
        ("longer * torch.finfo(singular.dtype).eps", "1e-3"),  # the rank of the weights would be cut short
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("d_k", [1, 2, 16, 64, 128])
def test_logits_have_the_rank_of_the_narrowest(d_k):
    found = run(get(NAME), seed=3, d_k=d_k, d_model=64, seq_len=96).metrics
    assert found["logits_rank"] == min(d_k, 64)  # tokens of 64 dimensions, of which 96 are seen
    assert found["all_logits_rank"] == min(4 * d_k, 64)


def test_rope_is_bounded_by_the_head_alone():
    # turned by its own angle, a token's q is no longer one linear map of it for all positions
    assert run(get(NAME), seed=3, d_k=128, d_model=64, positions="rope").metrics["logits_rank"] == 96
    assert run(get(NAME), seed=3, d_k=16, d_model=64, positions="rope").metrics["logits_rank"] == 16


def test_a_bias_adds_its_own_rank():
    ranks = {
        positions: run(get(NAME), seed=3, d_k=8, positions=positions).metrics["logits_rank"]
        for positions in ("alibi_one_side", "alibi_both_sides", "distance_bias")
    }
    assert ranks == {"alibi_one_side": 10, "alibi_both_sides": 96, "distance_bias": 96}


def test_a_layer_writes_with_the_heads_it_has():
    for n_heads, rank in ((1, 8), (4, 32), (16, 64)):
        found = run(get(NAME), seed=3, n_heads=n_heads, n_kv_heads=n_heads, d_v=8).metrics
        assert found["value_map_rank"] == found["context_rank"] == 8
        assert found["layer_out_rank"] == rank


def test_refuses_what_is_odd_or_too_large():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="width_is_even"):
        params(d_k=3, positions="rope")
    with pytest.raises(ParamsError, match="groups_divide_heads"):
        params(n_heads=4, n_kv_heads=8)
    with pytest.raises(ParamsError, match="too_large_projections"):
        params(n_heads=16, d_k=256, d_model=512)
