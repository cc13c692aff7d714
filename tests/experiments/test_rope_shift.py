"""rope_shift against rotation matrices written out in full, one token at a time, float64."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "rope_shift"
SCHEMES, ROTATIONS = (get(NAME).Params.specs()[field].values for field in ("scheme", "rotation"))
PAIRS = [(scheme, rotation) for scheme in SCHEMES for rotation in ROTATIONS]
D_K, SEQ_LEN = 8, 5


def planes(angles: list[float]) -> np.ndarray:
    """The rotation by these angles in the planes (j, j + d_k/2)."""
    half = len(angles)
    R = np.zeros((2 * half, 2 * half))
    for j, angle in enumerate(angles):
        R[j, j] = R[j + half, j + half] = math.cos(angle)
        R[j + half, j], R[j, j + half] = math.sin(angle), -math.sin(angle)
    return R


def power(generator: np.ndarray, t: float) -> np.ndarray:
    return torch.linalg.matrix_exp(torch.from_numpy(t * generator)).numpy()


def whiteboard(
    scheme: str, rotation: str, draws: list[np.ndarray], shift: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, weights and context with all positions moved."""
    x, W, square, mixed = draws
    W = W / math.sqrt(D_K)
    A, B = (square - square.transpose(0, 2, 1)) / math.sqrt(2 * D_K)
    frequencies = [10_000 ** (-2 * j / D_K) for j in range(D_K // 2)]
    side = math.ceil(math.sqrt(SEQ_LEN))
    q, k, v, R = [], [], [], []
    for n in range(SEQ_LEN):
        t, across, down = shift + n, shift + n % side, shift + n // side
        half = [10_000 ** (-2 * j / (D_K // 2)) for j in range(D_K // 4)]
        if rotation == "planes":
            R.append(planes([t * f for f in frequencies]))
        elif rotation == "one_rotation":
            R.append(power(A, t))
        elif rotation == "grid_axial":
            R.append(planes([across * f for f in half] + [down * f for f in half]))
        elif rotation == "grid_mixed":
            R.append(planes(list(across * mixed[0] + down * mixed[1])))
        else:
            R.append(power(A, across) @ power(B, down))
        turn = R[n] if scheme.startswith("rotate_qk") else np.eye(D_K)
        token = x[n]
        if scheme == "rotate_x":
            token = R[n] @ token
        if scheme == "add_to_x":
            token = token + np.array([math.sin(t * f) for f in frequencies] + [math.cos(t * f) for f in frequencies])
        q.append(turn @ (token @ W[0]))
        k.append(turn @ (token @ W[1]))
        v.append(R[n] @ (token @ W[2]) if scheme in ("rotate_qkv", "rotate_qkvo") else token @ W[2])
    logits = np.array([[a @ b for b in k] for a in q]) / math.sqrt(D_K)
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    context = weights @ np.array(v)
    if scheme == "rotate_qkvo":
        context = np.array([R[n].T @ context[n] for n in range(SEQ_LEN)])
    return logits, weights, context


def change(before: np.ndarray, after: np.ndarray) -> float:
    return float(np.sqrt(((after - before) ** 2).mean() / (before**2).mean()))


def law(experiment: Experiment) -> None:
    for scheme, rotation in PAIRS:
        params = {"scheme": scheme, "rotation": rotation, "position_shift": 37, "d_k": D_K, "seq_len": SEQ_LEN}
        result, draws = recorded(experiment, seed=3, **params)
        before, after = (whiteboard(scheme, rotation, draws, shift) for shift in (0, 37))
        x, W = draws[0], draws[1] / math.sqrt(D_K)
        plain = (x @ W[0]) @ (x @ W[1]).T / math.sqrt(D_K)
        wanted = {
            "logits_change": change(before[0], after[0]),
            "weights_change_tv": float((abs(after[1] - before[1]).sum(axis=1) / 2).mean()),
            "context_change": change(before[2], after[2]),
            "position_effect": change(before[0], plain),
        }
        # float64: angles of up to 80 radians, powers by eigenvectors here and by matrix_exp there
        assert result.metrics == pytest.approx(wanted, rel=1e-8, abs=1e-11), (scheme, rotation)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("read = turn(read, back=True)", "read = turn(read)"),  # turned on, not back
        (
            "_turn_freely(_turn_freely(x, head, 0, -across), head, 1, -down)",
            "_turn_freely(_turn_freely(x, head, 1, -down), head, 0, -across)",
        ),
        ('if scheme in ("rotate_qkv", "rotate_qkvo"):', 'if scheme == "rotate_qkvo":'),
        ("torch.polar(torch.ones_like(turned), -turned)", "torch.polar(torch.ones_like(turned), turned.abs())"),
        ("_turn_freely(x, head, 1, down)", "_turn_freely(x, head, 0, down)"),  # one rotation twice
        ("for along in (across, down)]", "for along in (across, across)]"),  # one axis twice
        ("(square - square.mT)", "(square + square.mT)"),  # not a rotation
        ("        x = turn(x)\n", "        x = x\n"),
        ("values[0].square().mean().sqrt()", "values[0].abs().mean()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(("scheme", "rotation"), PAIRS)
def test_what_is_relative_stays_and_nothing_else(scheme, rotation):
    metrics = run(get(NAME), seed=1, scheme=scheme, rotation=rotation, position_shift=1000).metrics
    relative = scheme.startswith("rotate_qk") and rotation != "grid_two_rotations"
    # float64 at angles of up to 2 · 1015 radians
    assert (metrics["logits_change"] < 1e-10) is relative
    assert (metrics["context_change"] < 1e-10) is (relative and scheme != "rotate_qkv")
    assert metrics["position_effect"] > 0.1  # nowhere is it constant because positions do nothing


def test_tables_show_each_series_at_every_shift():
    result = run(get(NAME), seed=2, scheme="rotate_qkv", position_shift=64)
    values = result.tables["values"]
    chosen = (values["scheme"] == "rotate_qkv") & (values["position_shift"] == 64)
    # the table is float32
    assert values["context_change"][chosen] == pytest.approx(result.metrics["context_change"], rel=1e-6)
    assert set(result.tables["rotations"]["rotation"]) == set(ROTATIONS)


def test_refuses_a_width_that_two_axes_can_not_share():
    with pytest.raises(ParamsError, match="width_is_four_times"):
        get(NAME).Params(d_k=6)
