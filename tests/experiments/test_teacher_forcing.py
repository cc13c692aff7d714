"""teacher_forcing against the same decoder written one position at a time, and its gradient by finite differences."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, make_run, recorded, run

NAME = "teacher_forcing"
CHANGES = get(NAME).Params.specs()["pass_change"].values
D, HEADS, D_K, LAYERS, N, V = 16, 2, 8, 2, 5, 16
SIZES = {"seq_len": N, "n_layers": LAYERS, "n_heads": HEADS, "d_model": D}
UNRANDOM = [change for change in CHANGES if change != "dropout_on"]


def norm(x: np.ndarray, axis: int) -> np.ndarray:
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + 1e-5)


def turn(x: np.ndarray, t: int) -> np.ndarray:
    frequencies = np.array([np.float32(10_000.0 ** (-2 * j / D_K)) for j in range(D_K // 2)])
    z = (x[: D_K // 2] + 1j * x[D_K // 2 :]) * np.exp(1j * t * frequencies)
    return np.concatenate((z.real, z.imag))


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


class Decoder:
    """Position by position; which positions a position sees is a list of numbers."""

    def __init__(self, change: str, positions: str, draws: list[np.ndarray]) -> None:
        drawn = iter(draws)
        self.change, self.rotary = change, positions == "rotary_positions"
        self.E = next(drawn)
        self.P = None if self.rotary else next(drawn)
        names = ["W_q", "W_k", "W_v", "W_o", "W_up", "W_down"] + ["W_router"] * (change == "limited_experts")
        self.W = {name: W / math.sqrt(W.shape[-1]) for name, W in zip(names, drawn, strict=False)}

    def norm(self, x: np.ndarray) -> np.ndarray:
        return norm(x, 0 if self.change == "token_statistics" else 1)

    def read(self, tokens: list[int], masked: bool, padding: int = 0) -> np.ndarray:
        x = np.stack([self.E[t] + (0 if self.rotary else self.P[i]) for i, t in enumerate(tokens)])
        for layer in range(LAYERS):
            W = {name: matrix[layer] for name, matrix in self.W.items()}
            h, read = self.norm(x), []
            for t in range(len(x)):
                seen = [s for s in range(len(x)) if (s <= t or not masked) and (s >= padding or s == t)]
                parts = []
                for head in range(HEADS):
                    rows = slice(head * D_K, (head + 1) * D_K)
                    q = W["W_q"][rows] @ h[t]
                    keys = [W["W_k"][rows] @ h[s] for s in seen]
                    if self.rotary:
                        q, keys = turn(q, t), [turn(k, s) for k, s in zip(keys, seen, strict=True)]
                    weights = np.exp([q @ k / math.sqrt(D_K) for k in keys])
                    weights /= weights.sum()
                    values = (W["W_v"][rows] @ h[s] for s in seen)
                    parts.append(sum(w * v for w, v in zip(weights, values, strict=True)))
                read.append(W["W_o"] @ np.concatenate(parts))
            x = x + np.stack(read)
            h, taken, added = self.norm(x), [0, 0], []
            for row in h:
                expert, share = 0, 1.0
                if "W_router" in W:
                    shares = np.exp(W["W_router"] @ row)
                    shares /= shares.sum()
                    expert = int(shares.argmax())
                    taken[expert] += 1
                    share = shares[expert] if taken[expert] <= math.ceil(len(x) / 2) else 0.0
                added.append(share * W["W_down"][expert] @ gelu(W["W_up"][expert] @ row))
            x = x + np.stack(added)
        return self.norm(x) @ self.E.T / math.sqrt(D)


def loss(logits: np.ndarray, target: int) -> float:
    return float(np.log(np.exp(logits).sum()) - logits[target])


def by_hand(change: str, positions: str, draws: list[np.ndarray], tokens: list[int]) -> dict[str, float]:
    decoder = Decoder(change, positions, draws)
    read, targets = tokens[:-1], tokens[1:]
    one = decoder.read(read, masked="unmasked" not in change)
    each = []
    for n in range(1, N + 1):
        padding = N - n if change == "padded_left" else 0
        each.append(decoder.read([0] * padding + read[:n], change != "unmasked_everywhere", padding)[-1])
    by_prefix = np.stack(each)
    off = np.abs(one - by_prefix).max(axis=1) / np.sqrt((by_prefix**2).mean())
    scored = read if change == "targets_not_shifted" else targets
    return {
        "pass_logits_error": off.max(),
        "pass_loss_difference_nats": np.mean([loss(row, t) for row, t in zip(one, scored, strict=True)])
        - np.mean([loss(row, t) for row, t in zip(by_prefix, targets, strict=True)]),
        "positions_off": (off > 1e-6).sum(),
    }


def tokens_of(change: str, positions: str, seed: int) -> list[int]:
    """The tokens that a run draws behind its weights."""
    drawing = make_run(seed, dtype="float64")
    _, draws = recorded(get(NAME), seed=seed, pass_change=change, positions_from=positions, **SIZES)
    for drawn in draws:
        drawing.randn(*drawn.shape)
    return torch.randint(V, (N + 1,), generator=drawing.generator).tolist()


def law(experiment: Experiment) -> None:
    for change in UNRANDOM:
        for positions in ("position_table", "rotary_positions"):
            params = {"pass_change": change, "positions_from": positions} | SIZES
            result, draws = recorded(experiment, seed=2, **params)
            wanted = by_hand(change, positions, draws, tokens_of(change, positions, 2))
            got = {name: result.metrics[name] for name in wanted}
            # float64 in two layers; rotary angles are computed in float32 there, and so agree to 7 digits
            assert got == pytest.approx(wanted, rel=1e-5, abs=1e-7), (change, positions)
    for change in ("as_it_should_be", "targets_not_shifted", "unmasked_pass", "token_statistics"):
        metrics = run(experiment, seed=2, pass_change=change, **SIZES).metrics
        # nobody, each its own, and all whose target stands in the input
        wanted = {"as_it_should_be": 0, "targets_not_shifted": N}.get(change, N - 1)
        assert metrics["targets_read"] == wanted, change
        assert metrics["n_scored"] == N
        assert metrics["prefix_rows_ratio"] == (N + 1) / 2
        assert (metrics["pass_gradient_error"] < 1e-13) == (change == "as_it_should_be"), change


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("logits = model(x, masked=not unmasked)", "logits = model(x, masked=True)"),
        ('masked=params.pass_change != "unmasked_everywhere"', "masked=True"),
        ('scored = read if params.pass_change == "targets_not_shifted" else targets', "scored = targets"),
        ("at = t if params.pass_change", "at = t if not params.pass_change"),
        ("layer_norm(x.mT, x.shape[:1]).mT", "layer_norm(x, x.shape[1:])"),
        ("* (chosen.cumsum(dim=0) <= capacity)", "* (chosen.cumsum(dim=0) <= len(h))"),
        ("(torch.arange(n) >= n_padding) |", "(torch.arange(n) >= 0) |"),
        ('params.seq_len if params.pass_change == "padded_left" else n', "n"),
        ("self.rows += len(x)", "self.rows += 1"),
        ("for t in range(params.seq_len):", "for t in range(params.seq_len - 1):"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def gradient_law(experiment: Experiment) -> None:
    """Every position of every prefix: token t is scored n - t times, so the gradient is one of weighted losses."""
    sizes = {"n_layers": 1, "seq_len": 3}
    right = run(experiment, seed=1, **sizes).metrics
    whole = run(experiment, seed=1, pass_change="prefixes_scored_whole", **sizes).metrics
    assert right["pass_gradient_error"] < 1e-13  # float64, sums of a few hundred terms
    assert whole["pass_logits_error"] < 1e-13
    assert whole["pass_gradient_error"] > 0.1
    # unlike the logits, the gradients of a pass with fresh dropout differ although each pass is right by itself
    dropped = run(experiment, seed=1, pass_change="dropout_on", **sizes).metrics
    assert min(dropped["pass_gradient_error"], dropped["pass_logits_error"]) > 0.01


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("summed[name] += part", "summed[name] = part"),
        ("_gradient(losses.sum(), model.weights)", "_gradient(losses.mean(), model.weights)"),
        ("if whole else _losses(out[-1:], targets[n - 1 : n])", "if True else 0"),
        ("return x * (self.uniform(*x.shape) >= DROPPED) / (1 - DROPPED)", "return x"),
    ],
)
def test_gradient_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(gradient_law, NAME, old, new)


def test_one_layer_without_a_mask_is_right_at_the_last_position_only():
    off = run(get(NAME), seed=1, pass_change="unmasked_pass", n_layers=1, seq_len=6).tables["by_position"]
    assert (off["drawn_pass_error"] > 1e-3).tolist() == [True] * 5 + [False]
    two = run(get(NAME), seed=1, pass_change="unmasked_pass", n_layers=2, seq_len=6).metrics
    assert two["positions_off"] == 6


def test_padding_is_harmless_where_only_distances_count():
    rotary = run(get(NAME), seed=1, pass_change="padded_left", positions_from="rotary_positions").metrics
    assert rotary["pass_logits_error"] < 1e-6  # angles are computed in float32
    assert run(get(NAME), seed=1, pass_change="padded_left").metrics["pass_logits_error"] > 0.01


def test_refuses_heads_of_odd_width():
    with pytest.raises(ParamsError, match="heads_of_even_width"):
        get(NAME).Params(d_model=20, n_heads=8)
