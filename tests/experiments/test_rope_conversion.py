"""rope_conversion against a layer and a reordering of rows written out one number at a time, in numpy."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.experiments.rope_conversion import CONVERSIONS, SHOWN
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "rope_conversion"
SETTINGS = [
    {"n_heads": 4, "n_kv_heads": 1, "d_k": 16, "rotary_dims": 8, "d_model": 8, "seq_len": 4},
    {"n_heads": 8, "n_kv_heads": 2, "d_k": 8, "rotary_dims": 8, "d_model": 4, "seq_len": 3, "base": 100.0},
    {"n_heads": 2, "n_kv_heads": 2, "d_k": 8, "rotary_dims": 4, "d_model": 4, "seq_len": 5},
]


def rows_taken(n_rows: int, heads: int, dims: int, back: bool = False) -> list[int]:
    """For each row of the new matrix the row of the old one: within each head even ones first, then odd ones."""
    width = n_rows // heads
    new = []
    for h in range(heads):
        order = [*range(0, dims, 2), *range(1, dims, 2)]
        if back:
            order = [order.index(i) for i in range(dims)]
        new += [h * width + i for i in [*order, *range(dims, width)]]
    return new


def heads_of(x: np.ndarray, W: np.ndarray, b: np.ndarray, g: np.ndarray, dims: int, base: float, halves: bool):
    """Shapes: returns (n_heads, seq_len, d_k)."""
    d_k = len(g)
    out = np.zeros((len(W) // d_k, len(x), d_k))
    for h in range(len(out)):
        for t in range(len(x)):
            z = W[h * d_k : (h + 1) * d_k] @ x[t] + b[h * d_k : (h + 1) * d_k]
            z = z / math.sqrt((z**2).mean() + 1e-6) * g
            turned = z.copy()
            for j in range(dims // 2):
                a, c = (j, j + dims // 2) if halves else (2 * j, 2 * j + 1)
                cos, sin = math.cos(t * base ** (-2 * j / dims)), math.sin(t * base ** (-2 * j / dims))
                turned[a], turned[c] = z[a] * cos - z[c] * sin, z[a] * sin + z[c] * cos
            out[h, t] = turned
    return out


def layer(p: dict, x, q, k, W_v, halves: bool):
    qs, ks = (heads_of(x, W + B @ A, b, g, p["rotary_dims"], p["base"], halves) for W, B, A, b, g in (q, k))
    n, group = len(x), p["n_heads"] // p["n_kv_heads"]
    logits, out = np.full((p["n_heads"], n, n), np.nan), np.zeros_like(qs)
    for h in range(p["n_heads"]):
        v = x @ W_v[(h // group) * p["d_k"] : (h // group + 1) * p["d_k"]].T
        for i in range(n):
            logits[h, i, : i + 1] = ks[h // group, : i + 1] @ qs[h, i] / math.sqrt(p["d_k"])
            w = np.exp(logits[h, i, : i + 1])
            out[h, i] = (w / w.sum()) @ v[: i + 1]
    return logits, out


def convert(p: dict, name: str, part, heads: int):
    W, B, A, b, g = part
    dims = p["d_k"] if name == "whole_head" else p["rotary_dims"]
    claimed = 1 if name == "all_as_one_head" else p["n_heads"] // p["n_kv_heads"] if name == "ratio" else heads
    of_rows = dims if claimed == heads else len(W) // claimed
    taken = rows_taken(len(W), claimed, of_rows, name == "wrong_direction")
    gains = rows_taken(len(g), 1, dims, name == "wrong_direction")
    return (
        W[taken],
        B if name == "without_adapter" else B[taken],
        A,
        b if name == "without_bias" else b[taken],
        g if name == "without_gain" else g[gains],
    ), sum(new != old for new, old in enumerate(taken))


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        for name in CONVERSIONS:
            p = experiment.Params(conversion=name, **given).as_dict()
            result, draws = recorded(experiment, seed=4, conversion=name, **given)
            x, d, parts = draws[0], p["d_model"], []
            for W, B, A, b, g in (draws[1:6], draws[6:11]):
                parts.append((W / math.sqrt(d), B / 6, A / math.sqrt(d), b, np.exp(g / 2)))  # rank 4: 3 times its root
            W_v = draws[11] / math.sqrt(d)
            new, rows = list(parts), 0
            if name != "unconverted":
                new[0], rows = convert(p, "converted" if name == "ratio_for_k" else name, parts[0], p["n_heads"])
            if name not in ("unconverted", "q_only"):
                new[1], more = convert(p, "ratio" if name == "ratio_for_k" else name, parts[1], p["n_kv_heads"])
                rows += more
            new_v = W_v
            if name == "v_too":
                new_v = W_v[rows_taken(len(W_v), p["n_kv_heads"], p["rotary_dims"])]
            logits, read = layer(p, x, *parts, W_v, halves=False)
            got_logits, got_read = layer(p, x, *new, new_v, halves=True)
            past = np.isfinite(logits)
            size = math.sqrt((logits[past] ** 2).mean())
            error = got_logits - logits
            wanted = {
                "conversion_logits_error": np.linalg.norm(error[past]) / np.linalg.norm(logits[past]),
                "conversion_context_error": np.linalg.norm(got_read - read) / np.linalg.norm(read),
                "error_at_distance_zero": math.sqrt((np.diagonal(error, 0, 1, 2) ** 2).mean()) / size,
                "rows_moved": rows,
            }
            got = {metric: result.metrics[metric] for metric in wanted}
            # float64 on both sides, some hundred terms a sum
            assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12), (given, name)
            table = result.tables["distances"]
            assert set(table["conversion"]) == {name, *SHOWN}
            shown = table["logit_difference"][table["conversion"] == name]
            by_distance = [math.sqrt(np.nanmean(np.diagonal(error, -r, 1, 2) ** 2)) / size for r in range(p["seq_len"])]
            np.testing.assert_allclose(shown, by_distance, rtol=1e-9, atol=1e-12)
            if name in ("converted", "wrong_direction", "whole_head"):
                rows_table = result.tables["rows"]
                drawn = np.array(rows_table["row_taken"]).reshape(p["d_k"], p["d_k"])
                dims = p["d_k"] if name == "whole_head" else p["rotary_dims"]
                assert drawn.argmax(axis=1).tolist() == rows_taken(p["d_k"], 1, dims, name == "wrong_direction")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('x, "interleaved")', 'x, "half_split")'),
        ("view(-1, 2).T.flatten()", "view(2, -1).T.flatten()"),  # the other way round
        ("order.argsort() if back else order", "order"),
        ("moved = {name: _sort_rows(each, split", "moved = {name: _sort_rows(each, 1"),
        ('moved["gain"] = _sort_rows(part.gain, 1, dims, back)', 'moved["gain"] = part.gain'),
        ('{"without_bias": "bias", ', "{"),
        ('"without_adapter": "B"', '"without_adapter": "A"'),
        ("params.n_heads // params.n_kv_heads\n    split_q", "params.n_kv_heads\n    split_q"),
        ("convert(weights.k, split_k)", "convert(weights.k, 1)"),
        ('if conversion == "v_too" else weights.W_v', 'if conversion == "v_to" else weights.W_v'),
        ("part.matrix + part.B @ part.A", "part.matrix"),
        ('params.d_k if conversion == "whole_head" else params.rotary_dims', "params.rotary_dims"),
        ("part.matrix[:, 0] != torch", "part.matrix[:, 0] == torch"),
        (".diagonal(dim1=-2, dim2=-1)", ".tril(-1)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(
    "sizes", [{}, {"n_kv_heads": 8}, {"n_kv_heads": 1}, {"rotary_dims": 32}, {"d_k": 2, "rotary_dims": 2}]
)
def test_the_right_conversion_changes_nothing(sizes):
    for seed in range(5):
        metrics = run(get(NAME), seed=seed, conversion="converted", **sizes).metrics
        # the same products summed in another order, in float64
        assert metrics["conversion_logits_error"] < 1e-14
        assert metrics["conversion_context_error"] < 1e-14


@pytest.mark.parametrize("conversion", ["unconverted", "wrong_direction", "whole_head", "v_too"])
def test_what_sorts_q_and_k_alike_is_not_seen_at_distance_zero(conversion):
    metrics = run(get(NAME), conversion=conversion).metrics
    assert metrics["error_at_distance_zero"] < 1e-14  # as above
    assert metrics["conversion_context_error"] > 0.1


def test_sizes_at_which_a_slip_is_none():
    assert run(get(NAME), conversion="ratio_for_k", n_heads=4, n_kv_heads=2).metrics["conversion_context_error"] < 1e-14
    assert run(get(NAME), conversion="wrong_direction", rotary_dims=4).metrics["conversion_context_error"] < 1e-14
    assert run(get(NAME), conversion="whole_head", rotary_dims=32).metrics["conversion_context_error"] < 1e-14


@pytest.mark.parametrize("dims", [4, 8, 16, 32, 64, 128])
def test_evens_first_is_undone_by_as_many_as_the_width_has_halvings(dims):
    metrics = run(get(NAME), conversion="converted", d_k=128, rotary_dims=dims).metrics
    assert metrics["permutation_order"] == math.log2(dims)
    assert metrics["rows_moved"] == (8 + 2) * (dims - 2)  # the first and the last row of a head stay


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"n_heads": 4, "n_kv_heads": 8}, "groups_divide_heads"),
        ({"d_k": 8, "rotary_dims": 16}, "rotary_part_of_head"),
        (
            {"conversion": "ratio_for_k", "n_heads": 16, "n_kv_heads": 1, "d_k": 16, "rotary_dims": 16},
            "ratio_splits_rows",
        ),
    ],
)
def test_refuses(params, rule):
    with pytest.raises(ParamsError, match=rule):
        get(NAME).Params(**params)
