"""shifted_stack against a decoder that reads one token at a time, with a cache, in numpy."""

import itertools
import math

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "shifted_stack"
POSITIONS, MOVES = (get(NAME).Params.specs()[field].values for field in ("positions", "move"))
SIZES = {"seq_len": 6, "d_model": 16, "n_heads": 2, "n_layers": 2, "n_before": 3, "position_shift": 21}
SEQ_LEN, D, HEADS, D_K, SHIFT = 6, 16, 2, 8, 21
FREQUENCIES = np.array([10_000 ** (-2 * j / D_K) for j in range(D_K // 2)])


def norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5)


def turn(x: np.ndarray, t: float) -> np.ndarray:
    z = (x[:, : D_K // 2] + 1j * x[:, D_K // 2 :]) * np.exp(1j * t * FREQUENCIES)
    return np.concatenate((z.real, z.imag), axis=1)


def bucket(distance: int) -> int:
    """T5's, in a decoder: one a distance up to 15, then as wide as the logarithm says."""
    if distance < 16:
        return max(distance, 0)
    return min(31, 16 + int(16 * math.log(distance / 16) / math.log(128 / 16)))


class Decoder:
    """One encoding; keys and values wait in ``cache``, with the ids that a bias sees."""

    def __init__(self, positions: str, draws: list[np.ndarray], window: int) -> None:
        self.positions, self.window = positions, window
        matrices = iter(draws[2:-2])
        self.layers = [[next(matrices) / math.sqrt(rows) for rows in (D, D, D, D, D, 4 * D)] for _ in range(2)]
        self.biases, self.table = draws[-2], draws[-1] / math.sqrt(2)
        self.cache = [[], []]

    def read(self, token: np.ndarray, t: int) -> tuple[list[np.ndarray], np.ndarray]:
        x = token.copy()
        if self.positions == "learned_table":
            x = x + self.table[t]
        elif self.positions == "sinusoidal":
            angles = [t * 10_000 ** (-2 * i / D) for i in range(D // 2)]
            x = x + np.array([f(a) for a in angles for f in (math.sin, math.cos)])
        rows = []
        for (W_q, W_k, W_v, W_o, W_up, W_down), cached in zip(self.layers, self.cache, strict=True):
            q, k, v = (norm(x) @ W for W in (W_q, W_k, W_v))
            q, k, v = (y.reshape(HEADS, D_K) for y in (q, k, v))
            if self.positions == "rope":
                q, k = turn(q, t), turn(k, t)
            cached.append((t, k, v))
            seen = cached[-self.window :]
            logits = np.array([[q[h] @ key[h] / math.sqrt(D_K) for _, key, _ in seen] for h in range(HEADS)])
            for h, (place, (s, _, _)) in itertools.product(range(HEADS), enumerate(seen)):
                if self.positions == "relative_bias":
                    logits[h, place] += self.biases[bucket(t - s), h]
                if self.positions == "alibi":
                    logits[h, place] -= 2 ** (-8 * (h + 1) / HEADS) * abs(t - s)
            weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            read = np.concatenate(
                [sum(w * value[h] for w, (_, _, value) in zip(weights[h], seen, strict=True)) for h in range(HEADS)]
            )
            x = x + read @ W_o
            up = norm(x) @ W_up
            x = x + np.array([u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in up]) @ W_down
            rows.append(logits)
        return rows, x


def whiteboard(positions: str, move: str, draws: list[np.ndarray], window: int) -> dict[str, float]:
    tokens, before = draws[0], draws[1]
    still = Decoder(positions, draws, window)
    plain = [still.read(token, t) for t, token in enumerate(tokens)]
    other = Decoder(positions, draws, window)
    if move in ("all_ids", "all_but_first"):
        moved = [other.read(x, t + (0 if t == 0 and move == "all_but_first" else SHIFT)) for t, x in enumerate(tokens)]
    elif move == "text_before":
        moved = [other.read(x, t) for t, x in enumerate([*before, *tokens])][len(before) :]
        moved = [([row[:, -(t + 1) :] for row in rows], x) for t, (rows, x) in enumerate(moved)]
    else:
        for t, token in enumerate(tokens[:-1]):
            other.read(token, t + SHIFT)
        back = SHIFT if move == "cache_turned" and positions == "rope" else 0
        other.cache = [[(i, turn(k, -back), v) for i, (_, k, v) in enumerate(c)] for c in other.cache]
        moved = [other.read(tokens[-1], SEQ_LEN - 1)]
    n = len(moved)
    metrics = {}
    for name, layer in (("first", 0), ("last", 1)):
        apart = [(new[0][layer] - old[0][layer]).ravel() for new, old in zip(moved, plain[-n:], strict=True)]
        # the spread is that of all heads' visible pairs together
        spread = np.concatenate([rows[layer].ravel() for rows, _ in plain]).std(ddof=1)
        metrics[f"logits_change_{name}"] = math.sqrt((np.concatenate(apart) ** 2).mean()) / spread
    old, new = (np.array([x for _, x in part]) for part in (plain[-n:], moved))
    metrics["output_change"] = math.sqrt(((new - old) ** 2).sum() / (old**2).sum())
    metrics["last_output_change"] = math.sqrt(((new[-1] - old[-1]) ** 2).sum() / (old[-1] ** 2).sum())
    return metrics


def law(experiment: Experiment) -> None:
    for positions, move, window in itertools.product(POSITIONS, MOVES, (64, 3)):
        result, draws = recorded(experiment, seed=5, positions=positions, move=move, window=window, **SIZES)
        wanted = whiteboard(positions, move, draws, window)
        # float64, two layers of sums over at most 64 terms, angles of up to 26 radians
        assert result.metrics == pytest.approx(wanted, rel=1e-9, abs=1e-12), (positions, move, window)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-shift), d_k", "shift), d_k"),  # turned on instead of back
        ("alibi_bias(model.n_heads, q, kv)", "alibi_bias(model.n_heads, q + 1, kv)"),
        ("ids[:, :, None] - kv_ids[:, None, :]", "kv_ids[:, None, :] - ids[:, :, None]"),
        ('angles[ENCODINGS.index("rope"), :, 0]', 'angles[ENCODINGS.index("alibi"), :, 0]'),
        ('vectors[ENCODINGS.index("sinusoidal")]', 'vectors[ENCODINGS.index("no_positions")]'),
        ("order + shift * (order > 0)", "order + shift * (order < 1)"),
        (" if past else ids\n", " if past else torch.arange(ids.shape[1]).expand(len(ids), -1)\n"),
        ("still[..., visible].cpu().double().std", "still[..., visible].cpu().double().abs().mean"),
        ("window=model.window", "window=model.window + 1"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_buckets_are_those_of_t5():
    from engine.experiments.shifted_stack import _buckets

    distances = torch.arange(-3, 400)
    # the function computes in float32: where the logarithm is a whole number it may fall on either side
    apart = [abs(int(b) - bucket(int(d))) for d, b in zip(distances, _buckets(distances), strict=True)]
    assert max(apart) <= 1
    assert sum(apart) <= 2
    assert _buckets(torch.tensor([0, 15, 16, 127, 128, 10**6])).tolist() == [0, 15, 16, 31, 31, 31]


@pytest.mark.parametrize("positions", POSITIONS)
def test_what_sees_distances_alone_keeps_every_layer(positions):
    metrics = run(get(NAME), seed=1, positions=positions, position_shift=1000, n_layers=4, seq_len=24).metrics
    relative = positions not in ("learned_table", "sinusoidal")
    assert all((value < 1e-10) is relative for value in metrics.values())  # angles of up to 1023 radians in float64


def test_biases_stay_to_the_last_digit_and_rotations_do_not():
    change = {
        positions: run(get(NAME), positions=positions, position_shift=16384, number_format="float32").metrics[
            "output_change"
        ]
        for positions in ("relative_bias", "alibi", "rope")
    }
    assert change["rope"] > 1e-6  # float32 spaces angles near 16384 by 1e-3
    assert max(change["relative_bias"], change["alibi"]) < 1e-6  # the same differences of whole numbers


def test_tables_hold_the_chosen_values():
    result = run(get(NAME), seed=2, positions="sinusoidal", move="all_but_first", position_shift=64)
    table = result.tables["by_positions"]
    chosen = (table["positions"] == "sinusoidal") & (table["move"] == "all_but_first")
    assert table["last_output_change"][chosen] == result.metrics["last_output_change"]
    layers = result.tables["by_layer"]
    of_sinusoids = layers["logits_change"][layers["positions"] == "sinusoidal"]
    assert of_sinusoids.tolist() == [result.metrics["logits_change_first"], result.metrics["logits_change_last"]]
    shifts = result.tables["by_shift"]
    chosen = (shifts["positions"] == "sinusoidal") & (shifts["position_shift"] == 64)
    moved = run(get(NAME), seed=2, positions="sinusoidal", position_shift=64).metrics["output_change"]
    assert shifts["output_change"][chosen] == pytest.approx(moved, rel=1e-12)  # another row of the same batch
