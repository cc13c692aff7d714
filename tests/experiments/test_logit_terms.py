"""logit_terms against sums over coordinates, one pair at a time, and against the law of a sine and its cosine."""

import itertools
import math

import numpy as np
import pytest

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "logit_terms"
POSITIONS, PROJECTIONS = (get(NAME).Params.specs()[field].values for field in ("positions", "qk_matrices"))
N, D, SHIFT, RMS = 5, 8, 13, 0.5


def projection(kind: str, drawn: np.ndarray) -> np.ndarray:
    if kind == "random":
        return drawn / math.sqrt(D)
    if kind == "identity":
        return np.eye(D)
    W = np.zeros((D, D))
    for j in range(D // 2):
        z = complex(drawn[0, 2 * j], drawn[0, 2 * j + 1]) / math.sqrt(2)
        W[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[z.real, z.imag], [-z.imag, z.real]]
    return W


def place(t: int, table: np.ndarray | None) -> np.ndarray:
    if table is not None:
        return RMS * table[t]
    angles = [t * 10_000 ** (-2 * i / D) for i in range(D // 2)]
    return RMS * math.sqrt(2) * np.array([f(a) for a in angles for f in (math.sin, math.cos)])


def turn(x: np.ndarray, t: int) -> np.ndarray:
    z = (x[: D // 2] + 1j * x[D // 2 :]) * [np.exp(1j * t * 10_000 ** (-2 * j / D)) for j in range(D // 2)]
    return np.concatenate((z.real, z.imag))


def whiteboard(positions: str, projections: str, draws: list[np.ndarray]) -> dict[str, float]:
    table = draws[4] if positions == "learned_table" else None
    terms, read, seen, sizes = [], [], [], []
    for x, W_q, W_k, W_v in zip(*draws[:4], strict=True):
        W_q, W_k, W_v = projection(projections, W_q), projection(projections, W_k), W_v / math.sqrt(D)
        both, values = [], []
        for shift in (0, SHIFT):
            p = np.array([place(n + shift, table) for n in range(N)])
            four = np.zeros((4, N, N))
            for m, n in itertools.product(range(N), range(N)):
                if positions == "rope":
                    four[0, m, n] = turn(x[m] @ W_q, m + shift) @ turn(x[n] @ W_k, n + shift)
                else:
                    pairs = ((x[m], x[n]), (x[m], p[n]), (p[m], x[n]), (p[m], p[n]))
                    four[:, m, n] = [a @ W_q @ W_k.T @ b for a, b in pairs]
            both.append(four / math.sqrt(D))
            values.append(p @ W_v if positions != "rope" else np.zeros((N, D)))
        terms.append(both)
        w, w_new = (np.exp(four.sum(axis=0)) for four in both)
        w, w_new = w / w.sum(axis=1, keepdims=True), w_new / w_new.sum(axis=1, keepdims=True)
        v = x @ W_v
        read.append((w @ (v + values[0]), w_new @ (v + values[0]), w @ (v + values[1])))
        seen.append((values[0], v))
        sizes.append((w @ values[0], w @ v))
    terms = np.array(terms).transpose(1, 2, 0, 3, 4)  # (2, 4, batch, N, N)
    terms -= terms.mean(axis=-1, keepdims=True)
    squares = (terms[0] ** 2).mean(axis=(1, 2, 3))
    apart, size = terms[1] - terms[0], math.sqrt((terms[0].sum(axis=0) ** 2).mean())

    def rms(x: np.ndarray) -> float:
        return math.sqrt((np.asarray(x) ** 2).mean())

    def part(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
        places, tokens = (rms([pair[i] for pair in pairs]) ** 2 for i in (0, 1))
        return places / (places + tokens)

    still, weights, values = (np.array([r[i] for r in read]) for i in range(3))
    return {
        "logits_change": rms(apart.sum(axis=0)) / size,
        "position_terms_share": squares[1:].sum() / squares.sum(),
        "position_position_share": squares[3] / squares.sum(),
        "position_position_change": rms(apart[3]) / size,
        "cross_terms_change": rms(apart[1] + apart[2]) / size,
        "context_change_weights": rms(weights - still) / rms(still),
        "context_change_values": rms(values - still) / rms(still),
        "value_position_share": part(seen),
        "context_position_share": part(sizes),
    }


def law(experiment: Experiment) -> None:
    sizes = {"seq_len": N, "d_model": D, "batch": 2, "position_shift": SHIFT}
    for positions, projections in itertools.product(POSITIONS, PROJECTIONS):
        own = {} if positions == "rope" else {"position_rms": RMS}
        result, draws = recorded(experiment, seed=4, positions=positions, qk_matrices=projections, **sizes, **own)
        # float64, sums of 64 products
        wanted = whiteboard(positions, projections, draws)
        assert result.metrics == pytest.approx(wanted, rel=1e-9, abs=1e-12), (positions, projections)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(q, place_k), (place_q, k)", "(q, place_k), (q, place_k)"),  # one cross term twice
        ("return logits - logits.mean(dim=-1, keepdim=True)", "return logits - logits.mean(dim=-2, keepdim=True)"),
        ("torch.stack((-b, a), dim=-1)", "torch.stack((b, -a), dim=-1)"),  # mirrors instead of rotations
        ('added = params.positions != "rope"', "added = True"),
        ("new_weights - weights, token_values", "new_weights, token_values"),
        ("rotate(q, angles), rotate(k, angles)", "rotate(q, angles), k"),
        ("params.position_rms * moved)", "moved)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_matrix_that_keeps_rotations_keeps_the_last_term_and_no_other():
    metrics = run(get(NAME), qk_matrices="keeps_rotation", position_shift=16384).metrics
    assert metrics["position_position_change"] < 1e-10  # float64 at angles of 16384 radians
    assert metrics["cross_terms_change"] > 0.3
    assert run(get(NAME), qk_matrices="random").metrics["position_position_change"] > 0.1


def test_at_equal_sizes_each_whole_term_is_a_quarter():
    table = run(get(NAME), positions="learned_table", batch=64, seq_len=48).tables["by_term"]
    whole = table["term_share"][table["counted"] == "whole_term"]
    assert whole == pytest.approx(0.25, abs=0.04)  # over 60 seeds the terms spread by at most 0.006
    assert whole.sum() == pytest.approx(1)


def test_shares_by_size_pass_through_the_chosen_size():
    result = run(get(NAME), position_rms=2, seed=3)
    table = result.tables["by_rms"]
    chosen = (table["position_rms"] == 2) & (table["term"] == "position_position")
    assert table["term_share"][chosen] == pytest.approx(result.metrics["position_position_share"], rel=1e-9)
