"""latent_attention against the layer worked out in numpy, one head, one query and one key at a time."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "latent_attention"
SETTINGS = [
    {},
    {"rope": "rope_on_keys", "n_heads": 2, "d_k": 4, "seq_len": 10, "d_model": 16, "kv_rank": 8},
    {"rope": "no_rope", "latent_norm": "norm_on_keys", "n_heads": 2, "d_k": 4, "seq_len": 10, "d_model": 32},
    {"latent_norm": "no_norm", "absorbed_scale": "latent_width", "n_heads": 4, "n_kv_heads": 2, "seq_len": 12},
]
DEFAULTS = get(NAME).Params.defaults()


def rotation(position: int, width: int) -> np.ndarray:
    """The matrix that turns a vector by its position, pair by pair."""
    matrix = np.zeros((width, width))
    half = width // 2
    for pair in range(half):
        angle = position * 10_000 ** (-2 * pair / width)
        i, j = pair, pair + half
        matrix[i, i] = matrix[j, j] = math.cos(angle)
        matrix[i, j], matrix[j, i] = -math.sin(angle), math.sin(angle)
    return matrix


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def reference(p: dict, draws: list[np.ndarray]) -> dict[str, float]:
    x, *matrices = draws
    W_q, W_o, W_down, W_uk, W_uv, W_k, _, W_qr, W_kr = (W / math.sqrt(W.shape[-1]) for W in matrices)
    n, heads, d_k, d_rope = len(x), p["n_heads"], p["d_k"], p["d_rope"]
    c = x @ W_down.T
    if p["latent_norm"] == "norm_on_latent":
        c = c / np.sqrt((c**2).mean(1, keepdims=True))
    expanded, fixed, stored = (np.zeros((n, x.shape[1])) for _ in range(3))
    logits = []
    keys, values = c @ W_uk.transpose(0, 2, 1), c @ W_uv.transpose(0, 2, 1)
    joined = d_rope if p["rope"] == "decoupled" else 0
    wrong_width = p["kv_rank"] if p["absorbed_scale"] == "latent_width" else d_k
    for h in range(heads):
        rows = np.zeros((n, n))
        for t in range(n):
            q = W_q[h] @ x[t]
            found = {"expanded": [], "fixed": [], "stored": []}
            for s in range(n):
                k, size = keys[h, s], 1.0
                if p["latent_norm"] == "norm_on_keys":
                    size = math.sqrt((k**2).mean())
                joint = q @ rotation(s - t, d_k) @ k if p["rope"] == "rope_on_keys" else q @ k
                content = (rotation(t, d_k) @ q if p["rope"] == "rope_on_keys" else q) @ W_uk[h] @ c[s]
                rotary = (W_qr[h] @ x[t]) @ rotation(s - t, d_rope) @ (W_kr @ x[s]) if joined else 0.0
                found["expanded"].append((joint / size + rotary) / math.sqrt(d_k + joined))
                found["fixed"].append((content + rotary) / math.sqrt(wrong_width + joined))
                found["stored"].append((content / size + rotary) / math.sqrt(wrong_width + joined))
            rows[t] = found["expanded"]
            for out, name in ((expanded, "expanded"), (fixed, "fixed"), (stored, "stored")):
                weights = softmax(np.array(found[name][: t + 1]))
                out[t] += W_o[h] @ (weights @ values[h, : t + 1])
        logits.append(rows)
    size = np.sqrt((expanded**2).mean())
    fixed_matrices = np.array([W_q[0].T @ W_uk[0]] * n)
    turned_matrices = np.array([W_q[0].T @ rotation(-lead, d_k) @ W_uk[0] for lead in range(n)])
    between = turned_matrices if p["rope"] == "rope_on_keys" else fixed_matrices
    rank = np.linalg.matrix_rank
    side = np.concatenate(list(keys), 1)
    return {
        "absorbed_difference": abs(fixed - expanded).max() / size,
        "stored_norms_difference": abs(stored - expanded).max() / size,
        "fixed_matrix_error": np.linalg.norm(between - between.mean(0)) / np.linalg.norm(between),
        "keys_rank": rank(side),
        "keys_values_rank": rank(np.concatenate([side, *values], 1)),
        "joint_logits_rank": rank(np.concatenate(logits)),
        "mha_keys_rank": rank(np.concatenate([x @ W.T for W in W_k], 1)),
        "gqa_keys_rank": rank(np.concatenate([x @ W.T for W in W_k[: p["n_kv_heads"]]], 1)),
        "matrix_difference": np.concatenate(
            [
                np.linalg.norm((m - m[0]).reshape(n, -1), axis=1) / np.linalg.norm(m[0])
                for m in (fixed_matrices, turned_matrices)
            ]
        ),
    }


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=4, **p)
        wanted = reference(DEFAULTS | p, draws)
        difference = wanted.pop("matrix_difference")
        # sums of some hundred products in float64 round at 1e-15; the differences of equal forms are such rounding
        for name, value in wanted.items():
            assert result.metrics[name] == pytest.approx(value, rel=1e-9, abs=3e-14), (p, name)
        assert result.tables["by_distance"]["matrix_difference"] == pytest.approx(difference, rel=1e-9, abs=1e-13)
        assert result.metrics["gqa_as_latent_difference"] < 1e-13
        assert result.metrics["same_distance_difference"] < 1e-13


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_queries(params, layer) @ layer.W_uk, latent)", "_queries(params, layer) @ layer.W_uv, latent)"),
        ("means @ layer.W_uv.mT @ layer.W_o.mT", "means @ layer.W_uk.mT @ layer.W_o.mT"),
        ("+ qk_product(q_rope, k_rope)) * scale", ") * scale"),  # the rotary part forgotten in the latent form
        ('"inv_sqrt_d_k", width + k_rope.shape[-1])', '"inv_sqrt_d_k", width)'),
        ("k = _turned(k)\n", "pass\n"),  # the expanded keys stay unturned
        ("return _turned(q) if", "return q if"),
        ("content / _rms(latent @ layer.W_uk.mT).mT", "content / _rms(latent).mT"),  # one length for all heads
        (
            '_rms_norm(latent) if params.latent_norm == "norm_on_latent"',
            '_rms_norm(latent) if params.latent_norm == ""',
        ),
        ("W_q[-1] @ W_uk.flip(0).mT", "W_q[-1] @ W_uk.mT"),  # other distances
        ("copies.repeat_interleave(group, dim=1)", "copies.repeat(1, group, 1, 1)"),  # heads of other groups
        ("(matrices - mean).norm()", "(matrices - matrices[0]).norm()"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_nothing_but_rounding_is_between_the_forms_and_it_grows_with_coarser_numbers():
    table = run(get(NAME), seed=2).tables["by_number_format"]
    found = dict(zip(table["number_format"].tolist(), table["absorbed_difference_log10"], strict=True))
    assert found["float64"] < -13 < found["float32"] < -5 < -3 < found["bfloat16"] < 0


def test_the_ranks_are_those_of_the_narrowest():
    for kv_rank in (8, 24, 64, 128):
        found = run(get(NAME), seed=1, kv_rank=kv_rank, d_model=128, seq_len=128).metrics
        assert found["keys_rank"] == min(kv_rank, 64)  # four heads of sixteen have no more dimensions
        assert found["keys_values_rank"] == min(kv_rank, 128)
        assert found["joint_logits_rank"] == min(kv_rank, 64) + 8
        assert found["mha_keys_rank"] == 64
        assert found["gqa_keys_rank"] == 16


def test_refuses_what_cannot_be_grouped_or_turned():
    with pytest.raises(ParamsError, match="groups_divide_heads"):
        get(NAME).Params(n_heads=4, n_kv_heads=8)
    with pytest.raises(ParamsError, match="width_is_even"):
        get(NAME).Params(d_k=3)
    with pytest.raises(ParamsError, match="width_is_even"):
        get(NAME).Params(d_rope=3)
