"""attention_is_not_explanation against the model with one row replaced at a time, and against vertices of polytopes."""

import functools
import itertools

import numpy as np
import pytest
import torch

from engine.base import make_run
from engine.inputs import read_texts
from engine.language_model import D_K, HEADS, N_HEADS, Trace, forward, load_weights
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "attention_is_not_explanation"
SEED = 33  # its first two strings of 10 characters repeat
SETTINGS = [
    {"source": "repeats", "seq_len": 10, "n_texts": 2},
    {"source": "repeats", "seq_len": 2},
    {"source": "text", "text": "Ada, Ada", "heads": "one_head", "layer": 1, "head": 2},
]


@functools.cache
def model() -> dict[str, torch.Tensor]:
    return load_weights(dtype=torch.float64)


def texts(p: dict, seed: int) -> tuple[list[torch.Tensor], list[int]]:
    """Each text by itself, (1, seq_len), and its period."""
    kind, typed, n = p.get("source", "stories"), p.get("text", ""), p.get("n_texts", 1)
    drawn = read_texts(make_run(seed), kind, typed, n, p.get("seq_len", 96))
    return list(drawn.tokens.split(1)), drawn.period.tolist()


def traced(tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions (seq_len, n_tokens), weights (12, seq_len, seq_len) and values (12, seq_len, d_v) as they are."""
    trace = Trace()
    p = forward(model(), tokens, trace=trace)[0].softmax(-1)
    return p.numpy(), torch.cat(trace.weights, 1)[0].numpy(), torch.cat(trace.v, 1)[0].numpy()


def predictions(tokens: torch.Tensor, head: int, rows: np.ndarray) -> np.ndarray:
    """What the model says with other weights in one head. Shapes: rows (copies, seq_len, seq_len)."""

    def put(layer: int, weights: torch.Tensor) -> torch.Tensor:
        if layer == head // N_HEADS:
            weights[:, head % N_HEADS] = torch.tensor(rows)
        return weights

    return forward(model(), tokens.expand(len(rows), -1), edit_weights=put).softmax(-1).numpy()


def measured(p: np.ndarray, q: np.ndarray) -> tuple[float, float, float]:
    """Total variation, Jensen-Shannon divergence, and whether the top token is another, of two distributions."""
    m = (p + q) / 2
    js = sum(np.sum(x * np.log(x / m)) for x in (p, q)) / 2
    return np.abs(p - q).sum() / 2, js, float(p.argmax() != q.argmax())


def key_first(tokens: torch.Tensor, head: int, place: int, rows: np.ndarray, counted: range) -> bool:
    """Whether the largest weight is on the key whose removal moves the predictions most, by finite differences."""
    p, row = predictions(tokens, head, rows[None])[0], rows[place, : place + 1]
    copies = []
    for key in range(place + 1):
        removed = np.delete(row, key) / np.delete(row, key).sum()
        for sign in (1, -1):
            copies.append(rows.copy())
            copies[-1][place, : place + 1] += sign * 1e-4 * (np.insert(removed, key, 0) - row)
    after = np.log(predictions(tokens, head, np.array(copies)))
    said = sum(after[:, i, p[i].argmax()] for i in counted)
    return np.abs(said[::2] - said[1::2]).argmax() == row.argmax()


MEASURES = ("weights_moved_tv", "output_moved_tv", "output_moved_js_nats", "top_token_changed_share")


@functools.cache
def reference(number: int) -> tuple[dict[tuple[str, str], np.ndarray], float]:
    """For a setting the MEASURES of each head and change, and the share of rows with the first key on top."""
    p = SETTINGS[number]
    _, draws = recorded(get(NAME), seed=SEED, **p)
    orders = [drawn for drawn in draws if drawn.ndim == 3 and drawn.shape[-1] == drawn.shape[-2]]
    heads = [4 * p["layer"] + p["head"]] if p.get("heads") == "one_head" else range(12)
    found, first = {}, []
    for tokens, period, order in zip(*texts(p, SEED), orders, strict=True):
        before, rows, _ = traced(tokens)
        n = len(before)
        counted = range(max(1, period), n) or range(n - 1, n)
        for place_of, head in enumerate(heads):
            permuted, uniform = np.zeros((2, n, n))
            for i in range(n):
                keys = sorted(range(i + 1), key=lambda key, drawn=order[place_of, i]: drawn[key])
                permuted[i, : i + 1] = rows[head, i, keys]
                uniform[i, : i + 1] = 1 / (i + 1)
            after = predictions(tokens, head, np.array([permuted, uniform]))
            for change, new, q in zip(("permuted", "uniform"), (permuted, uniform), after, strict=True):
                outputs = [(np.abs(new[i] - rows[head, i]).sum() / 2, *measured(before[i], q[i])) for i in counted]
                found.setdefault((HEADS[head], change), []).append(np.mean(outputs, axis=0))
        first.append(np.mean([key_first(tokens, head, i, rows[head], counted) for head in heads for i in counted]))
    return {key: np.mean(of_texts, axis=0) for key, of_texts in found.items()}, float(np.mean(first))


def moved_law(experiment: Experiment) -> None:
    for number, p in enumerate(SETTINGS):
        found, first = reference(number)
        result = run(experiment, seed=SEED, dtype="float64", **p)
        table, metrics = result.tables["moved"], result.metrics
        for (head, change), wanted in found.items():
            at = (table["head"] == head) & (table["change"] == change)
            got = [table[name][at].item() for name in MEASURES]
            assert got == pytest.approx(wanted, rel=1e-5, abs=1e-9), (p, head, change)  # tables are float32
        permuted, uniform = (
            np.array([w for (_, c), w in found.items() if c == change]) for change in ("permuted", "uniform")
        )
        # float64 throughout; the divergence is a difference of numbers near 1
        assert [metrics[name] for name in MEASURES] == pytest.approx(permuted.mean(axis=0), rel=1e-8, abs=1e-12)
        assert metrics["output_moved_tv_max"] == pytest.approx(permuted[:, 1].max(), rel=1e-9)
        assert metrics["needed_heads_share"] == pytest.approx(np.mean(permuted[:, 3] > 0.1))
        assert metrics["uniform_output_moved_tv"] == pytest.approx(uniform[:, 1].mean(), rel=1e-9)
        assert metrics["top_key_first_share"] == pytest.approx(first)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(p - q).abs().sum(-1) / 2", "(p - q).abs().sum(-1)"),
        ("masked_fill(~seen, 2.0)", "masked_fill(~seen, -1.0)"),  # weights wander to keys that lie ahead
        ("edited[copy, head % N_HEADS]", "edited[copy, 0]"),  # another head
        ("head // N_HEADS == layer", "head // N_HEADS <= layer"),  # in later layers too
        ("max(1, period)", "max(1, period - 1)"),  # the first token that comes again can't be known
        ("even / even.sum(-1, keepdim=True)", "even / even.shape[-1]"),
        ("math.log(2)", "math.log(3)"),
        ("softmax_gradient(rows, gradients) / left", "softmax_gradient(rows, gradients)"),  # the logit's effect instead
        ("log_p.amax(-1).sum()", "log_p.logsumexp(-1).sum()"),  # the gradient of what is always 1
        ("(before.argmax(-1) != after.argmax(-1))", "(before.argmin(-1) != after.argmin(-1))"),
    ],
)
def test_moved_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(moved_law, NAME, old, new)


# --------------------------------------------------------------------------------------------------------------------
# The null space


def null_space(values: np.ndarray) -> np.ndarray:
    """An orthonormal basis of what keeps the context and the sum. Shapes: (n, d_v) to (n, dimensions)."""
    _, size, right = np.linalg.svd(np.c_[values, np.ones(len(values))].T)
    return right[(size > 1e-10 * size[0]).sum() :].T


def farthest(row: np.ndarray, values: np.ndarray) -> float:
    """How far the farthest row with the same context is: a convex function is largest at a vertex, so all are tried."""
    basis = null_space(values)
    best = 0.0
    for zeros in map(list, itertools.combinations(range(len(row)), basis.shape[1])):  # weights that are 0 at a vertex
        if abs(np.linalg.det(basis[zeros])) > 1e-12:
            vertex = row + basis @ np.linalg.solve(basis[zeros], -row[zeros])
            if vertex.min() > -1e-12:
                best = max(best, np.abs(vertex - row).sum() / 2)
    return best


@functools.cache
def exact(seq_len: int) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Tokens and last rows of a story, and how far the latter can move, a layer at a time and over random values."""
    _, draws = recorded(get(NAME), seed=SEED, seq_len=seq_len)
    (drawn,) = [d for d in draws if d.shape == (N_HEADS, seq_len, D_K)]
    (tokens,), _ = texts({"seq_len": seq_len}, SEED)
    _, rows, values = traced(tokens)
    found = {
        f"L{layer}": [farthest(rows[h, -1], values[h]) for h in range(4 * layer, 4 * layer + 4)] for layer in (1, 2)
    }
    found["random_values"] = [farthest(rows[8 + h, -1], drawn[h]) for h in range(4)]
    return tokens[0].numpy(), rows[:, -1], {name: float(np.mean(tv)) for name, tv in found.items()}


def null_space_law(experiment: Experiment) -> None:
    for seq_len in (D_K + 2, D_K + 3):  # one dimension, so two ends; two, so a polygon
        tokens, last, found = exact(seq_len)
        result = run(experiment, seed=SEED, dtype="float64", seq_len=seq_len)
        table, moved, metrics = result.tables["null_space"], result.tables["moved"], result.metrics
        for name, wanted in found.items():
            got = table["null_space_tv"][(table["values"] == name) & (table["kv_len"] == seq_len)].item()
            if seq_len == D_K + 2:
                assert got == pytest.approx(wanted, rel=1e-4), name  # weights range over ten powers of ten
            else:  # a climb may end at a lower vertex, and never beyond the highest
                assert 0.8 * wanted <= got <= wanted * (1 + 1e-4), name

        rows = zip(*(table[c] for c in ("values", "kv_len", "dimensions", "theory_dimensions")), strict=True)
        for name, kv_len, dimensions, theory in rows:
            assert theory == max(0, kv_len - D_K - 1)
            n_values = len(set(tokens[:kv_len])) if name == "L0" else kv_len  # there each character has one value
            assert dimensions == kv_len - min(n_values, D_K + 1), (name, kv_len)

        at = moved["change"] == "null_space"
        assert moved["weights_moved_tv"][at].min() > 0
        assert moved["output_moved_tv"][at].max() < 1e-9  # rounding of float64, through three layers
        assert moved["top_token_changed_share"][at].max() == 0
        assert metrics["null_space_output_moved"] < 1e-9
        assert metrics["top_weight"] == pytest.approx(last.max(axis=1).mean(), rel=1e-9)
        tv = table["null_space_tv"][(table["kv_len"] == seq_len) & (table["values"] != "random_values")]
        assert metrics["null_space_tv"] == pytest.approx(tv.mean(), rel=1e-9)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.ones_like(v[..., :1])", "torch.zeros_like(v[..., :1])"),  # the sum is not kept
        ("torch.where(farther[:, None], both[1], both[0])", "torch.where(farther[:, None], both[0], both[1])"),
        ("else row > start)", "else row < start)"),  # back to where it came from
        ("torch.linalg.qr(seen * row[..., None])", "torch.linalg.qr(seen)"),  # the projection of other coordinates
        ("STEP / shrinks", "0.1 / shrinks"),
    ],
)
def test_null_space_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(null_space_law, NAME, old, new)


def test_where_values_are_equal_no_weight_matters():
    result = run(get(NAME), dtype="float64", source="text", text="a" * 12)
    metrics = result.metrics
    assert metrics["weights_moved_tv"] > 0.01
    assert metrics["output_moved_tv_max"] < 1e-12
    assert metrics["uniform_output_moved_tv"] < 1e-12
    assert metrics["determined_share"] == 0
    assert set(result.tables["null_space"]["dimensions"][result.tables["null_space"]["values"] == "L2"]) == {7, 11}


def test_short_rows_are_determined_by_their_context():
    metrics = run(get(NAME), seed=2, source="text", text="The quick", heads="one_head", layer=2, head=1).metrics
    assert metrics["determined_share"] == 1
    assert metrics["null_space_tv"] == 0
    assert metrics["top_weight_null_space"] == metrics["top_weight"]


def test_unknown_characters_are_counted():
    assert run(get(NAME), source="text", text="Adaé 钥匙").metrics["n_unknown"] == 3
    assert run(get(NAME), source="stories", seq_len=8, text="钥匙").metrics["n_unknown"] == 0


def test_on_repeating_strings_one_head_is_needed_and_four_that_look_alike_are_not():
    """Which head is which is a property of the committed weights: see attention_maps."""
    for seed in range(3):
        table = run(get(NAME), seed=seed, source="repeats").tables["moved"]
        permuted = table["change"] == "permuted"
        changed = dict(zip(table["head"][permuted], table["top_token_changed_share"][permuted], strict=True))
        assert max(changed, key=changed.get) == "L1H1"
        assert changed["L1H1"] > 0.5
        assert max(changed[f"L2H{head}"] for head in (0, 2)) < 0.05  # the other induction heads do their work
        hidden = table["change"] == "null_space"
        reach = dict(zip(table["head"][hidden], table["weights_moved_tv"][hidden], strict=True))
        assert reach["L1H1"] < 0.001 < 0.2 < min(reach[f"L0H{head}"] for head in range(4))
