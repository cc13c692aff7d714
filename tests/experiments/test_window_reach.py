"""window_reach against paths counted one by one, and against a transformer in numpy whose inputs are nudged."""

import itertools
import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "window_reach"
WIDTH, HEADS, D_K = 12, 2, 6


def sees(p: dict, layer: int, query: int, key: int) -> bool:
    """Layers count from 1."""
    is_global = p.get("global_every", 0) and layer % p["global_every"] == 0
    return key <= query and bool(is_global or query - key < p.get("window", 8))


def row(p: dict, layer: int, query: int, logits: np.ndarray | None = None) -> np.ndarray:
    """Weights of a query over all keys."""
    n = p["seq_len"]
    logits = np.zeros(n) if logits is None else logits
    slope = p.get("distance_slope", 0.0)
    e = [math.exp(logits[j] + slope * (query - j)) if sees(p, layer, query, j) else 0.0 for j in range(n)]
    return np.array(e) / sum(e)


def by_paths(p: dict, skip: bool) -> np.ndarray:
    """Shares of the tokens in the last one, nearest first: every path back through the layers is followed."""
    n, share = p["seq_len"], {p["seq_len"] - 1: 1.0}
    for layer in range(p["n_layers"], 0, -1):
        back: dict[int, float] = dict(share) if skip else {}
        for query, weight in share.items():
            for key, w in enumerate(row(p, layer, query)):
                if w:
                    back[key] = back.get(key, 0.0) + weight * w
        share = back
    found = np.array([share.get(n - 1 - d, 0.0) for d in range(n)])
    return found / found.sum()


def norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5)


def turn(x: np.ndarray, position: int) -> np.ndarray:
    z = np.array([complex(x[i], x[i + 3]) for i in range(3)])
    z *= [np.exp(1j * position * 10000 ** (-i / 3)) for i in range(3)]
    return np.concatenate([z.real, z.imag])


def transformer(p: dict, layers: list[dict[str, np.ndarray]], text: np.ndarray) -> np.ndarray:
    """The last token's output, token by token and head by head."""
    x = list(text)
    for depth, layer in enumerate(layers, start=1):
        heads: list[tuple[list, list, list]] = []
        for h in range(HEADS):
            part = slice(h * D_K, (h + 1) * D_K)
            q, k = ([turn(layer[name][part] @ norm(t), i) for i, t in enumerate(x)] for name in ("W_q", "W_k"))
            heads.append((q, k, [layer["W_v"][part] @ norm(t) for t in x]))
        out = []
        for i, t in enumerate(x):
            read = []
            for q, k, v in heads:
                logits = np.array([q[i] @ key / math.sqrt(D_K) for key in k])
                read.append(sum(w * value for w, value in zip(row(p, depth, i, logits), v, strict=True)))
            t = t + layer["W_o"] @ np.concatenate(read)
            up = layer["W_up"] @ norm(t)
            out.append(t + layer["W_down"] @ np.array([u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in up]))
        x = out
    return x[-1]


def by_nudges(p: dict, draws: list[np.ndarray]) -> np.ndarray:
    """The same shares of a random transformer, from differences of outputs."""
    names, layers = ("W_q", "W_k", "W_v", "W_o", "W_up", "W_down"), []
    for i in range(p["n_layers"]):
        layers.append({n: w / math.sqrt(w.shape[1]) for n, w in zip(names, draws[6 * i : 6 * i + 6], strict=True)})
    text, step, influence = draws[-1], 1e-5, []
    for token in range(p["seq_len"]):
        squares = 0.0
        for coordinate in range(WIDTH):
            nudge = np.zeros_like(text)
            nudge[token, coordinate] = step
            there, back = (transformer(p, layers, text + sign * nudge) for sign in (1, -1))
            squares += (((there - back) / (2 * step)) ** 2).sum()
        influence.append(math.sqrt(squares))
    return np.array(influence[::-1]) / sum(influence)


SETTINGS = [
    {"window": 3, "n_layers": 3, "seq_len": 10},
    {"window": 2, "n_layers": 3, "seq_len": 9, "global_every": 2},
    {"window": 4, "n_layers": 2, "seq_len": 8, "distance_slope": 0.5},
    {"window": 16, "n_layers": 1, "seq_len": 8, "distance_slope": -0.25},
]


def law(experiment: Experiment) -> None:
    for p, kind in itertools.product(SETTINGS, ("moving_means", "moving_means_and_skip")):
        result = run(experiment, layer_kind=kind, **p)
        wanted, n = by_paths(p, skip=kind.endswith("skip")), p["seq_len"]
        table = result.tables["by_distance"]
        shown = table["influence_share"][table["layer_kind"] == kind]
        assert shown == pytest.approx(wanted, rel=1e-9, abs=1e-14), (p, kind)  # float64, sums of some thousand paths
        distance = np.arange(n)
        mean = (wanted * distance).sum()
        assert result.metrics == pytest.approx(
            {
                "reach_tokens": max(d for d in range(n) if wanted[d]) + 1,
                "beyond_window_share": sum(wanted[d] for d in range(n) if d >= p["window"]),
                "influence_mean_distance": mean,
                "influence_distance_std": math.sqrt((wanted * (distance - mean) ** 2).sum()),
                "tokens_with_90_percent": next(m for m in range(1, n + 1) if wanted[:m].sum() > 0.9 - 1e-12),
                "edge_over_largest": wanted[np.flatnonzero(wanted)[-1]] / wanted.max(),
            },
            rel=1e-9,
            abs=1e-12,
        ), (p, kind)
    for p in SETTINGS[1:3]:
        result, draws = recorded(experiment, seed=3, layer_kind="random_layers", **p)
        table = result.tables["by_distance"]
        shown = table["influence_share"][table["layer_kind"] == "random_layers"]
        # differences of steps of 1e-5 have an error of 1e-10, and angles are computed in float32
        assert shown == pytest.approx(by_nudges(p, draws), rel=1e-4, abs=1e-8), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("window=params.window)", "window=params.window + 1)"),
        ("place % params.global_every == 0", "(place - 1) % params.global_every == 0"),
        ("params.distance_slope * (order[:, None] - order)", "params.distance_slope * (order - order[:, None])"),
        ("x = x + mean if", "x = mean if"),
        ("out[:, -1].diagonal()", "out[:, -2].diagonal()"),
        ("share[params.window :]", "share[params.window + 1 :]"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(("window", "n_layers"), [(1, 4), (2, 5), (8, 4), (5, 3)])
def test_each_layer_adds_the_window_less_one(window, n_layers):
    result = run(get(NAME), window=window, n_layers=n_layers, seq_len=40)
    assert result.metrics["reach_tokens"] == n_layers * (window - 1) + 1
    table = result.tables["by_depth"]
    reached = table["tokens_back"][table["window_extent"] == "reached"]
    assert reached.tolist() == [depth * (window - 1) + 1 for depth in range(1, n_layers + 1)]


@pytest.mark.parametrize(("window", "n_layers"), [(8, 4), (4, 12), (2, 7)])
def test_moving_means_have_the_moments_of_sums_of_uniform_steps(window, n_layers):
    metrics = run(get(NAME), layer_kind="moving_means", window=window, n_layers=n_layers, seq_len=64).metrics
    assert metrics["influence_mean_distance"] == pytest.approx(n_layers * (window - 1) / 2)
    assert metrics["influence_distance_std"] == pytest.approx(math.sqrt(n_layers * (window**2 - 1) / 12))


def test_one_global_layer_anywhere_reaches_everything():
    for every in (1, 2, 3, 4):
        assert run(get(NAME), global_every=every, window=2, n_layers=4, seq_len=20).metrics["reach_tokens"] == 20


def test_refuses_slopes_whose_weights_vanish():
    with pytest.raises(ParamsError, match="influence_vanishes"):
        get(NAME).Params(distance_slope=1.0, window=64, n_layers=12, seq_len=128)
