"""length_training against one model at a time, trained by torch.optim on torch's own operations."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from engine.base import make_run
from engine.encodings import alibi_slopes
from engine.registry import Experiment, get
from tests.engine.test_context import written_out
from tests.harness import assert_law_catches, run

NAME = "length_training"
D, V, BATCH, TUNE_BATCH, SCORED, N_EVALUATION, ASKING = 32, 8, 16, 8, 8, 64, 16
TRAINED = ("rope", "alibi", "no_positions", "sinusoidal", "learned_table")
SCALED = {"rope_interpolation": "interpolation", "rope_ntk_aware": "ntk_aware", "rope_yarn": "yarn"}
RATIOS = {"trained_len": 1, "double": 2, "fourfold": 4, "eightfold": 8, "sixteenfold": 16, "thirtytwofold": 32}
SETTINGS = [
    {"task": "copy_back", "trained_len": 16, "n_heads": 2},
    {"task": "needle", "trained_len": 16, "n_heads": 1, "base": 1000.0},
    {"task": "last_marker", "trained_len": 16, "n_heads": 2, "tune_steps": 10, "context_factor": 2.0},
]


def sequences(g: torch.Generator, task: str, batch: int, n: int) -> tuple[torch.Tensor, list[list[int | None]]]:
    """Tokens as the run draws them, and the target of each place by hand; None where it can't be known."""
    drawn = torch.randint(V, (batch, n), generator=g)
    marked = torch.zeros(batch, n, dtype=torch.bool)
    if task == "last_marker":
        marked = torch.rand(batch, n, generator=g) < 1 / 8
    elif task == "needle":
        marked[torch.arange(batch), torch.randint(n - SCORED, (batch, 1), generator=g)[:, 0]] = True
    targets: list[list[int | None]] = []
    for row, marks in zip(drawn.tolist(), marked.tolist(), strict=True):
        wanted: list[int | None] = []
        for t in range(n):
            if task == "copy_back":
                wanted.append(row[t - 3] if t >= 3 else None)
            else:
                before = [u for u in range(t + 1) if marks[u]]
                wanted.append(row[before[-1]] if before else None)
        targets.append(wanted)
    return drawn + V * marked, targets


def predict(name: str, w: dict, p: dict, tokens: torch.Tensor) -> torch.Tensor:
    n, n_heads = tokens.shape[1], p["n_heads"]
    d_k = D // n_heads
    x = w["tokens"][tokens]
    if name == "sinusoidal":
        angles = torch.arange(n)[:, None] * 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        x = x + torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
    if name == "learned_table":
        x = x + w["table"][:n]
    h = layer_norm(x, (D,))
    W_q, W_k, W_v, W_o = w["layer"]
    out = 0
    for head in range(n_heads):
        part = slice(head * d_k, (head + 1) * d_k)
        q, k, v = h @ W_q[:, part], h @ W_k[:, part], h @ W_v[:, part]
        gain = 1.0
        if name.startswith("rope"):
            s = p.get("context_factor", 8.0)
            base = {"d_k": d_k, "base": p.get("base", 100.0), "factor": s, "trained_len": p["trained_len"]}
            theta = torch.tensor(written_out(SCALED.get(name, "unscaled"), base | {"fast_turns": 4.0}))
            turn = torch.polar(torch.ones(n, d_k // 2).double(), torch.arange(n)[:, None].double() * theta.double())
            q, k = (torch.view_as_complex(torch.stack(y.chunk(2, -1), -1).contiguous()) * turn for y in (q, k))
            logits = (q @ k.conj().mT).real
            gain = (0.1 * math.log(s) + 1) ** 2 if name == "rope_yarn" else 1.0
        else:
            logits = q @ k.mT
        distance = torch.arange(n)[:, None] - torch.arange(n)
        logits = gain * logits / math.sqrt(d_k)
        if name == "alibi":
            logits = logits - alibi_slopes(n_heads)[head] * distance
        out = out + logits.masked_fill(distance < 0, -math.inf).softmax(-1) @ v @ W_o[part]
    return layer_norm(x + out, (D,)) @ w["unembedding"].T


def loss_of(name, w, p, tokens, targets, asking):
    logits = predict(name, w, p, tokens)
    places = [(b, t) for b, row in enumerate(targets) for t in range(len(row) - asking, len(row)) if row[t] is not None]
    rows, columns = zip(*places, strict=True)
    return cross_entropy(logits[rows, columns], torch.tensor([targets[b][t] for b, t in places]))


@functools.cache
def reference(number: int, seed: int) -> dict[str, float]:
    """Accuracies, and the loss at step 9, of each model of a setting after ten steps."""
    p = SETTINGS[number]
    n, tune = p["trained_len"], p.get("tune_steps", 0)
    g = make_run(seed).generator
    shapes = {"tokens": (2 * V, D), "layer": (4, D, D), "unembedding": (V, D), "table": (32 * n, D)}
    drawn = {name: torch.randn(*shape, generator=g).double() for name, shape in shapes.items()}
    for name in ("layer", "unembedding"):
        drawn[name] /= math.sqrt(D)
    found, models = {}, {}
    batches = [sequences(g, p["task"], BATCH, n) for _ in range(10)]
    tunings = [sequences(g, p["task"], TUNE_BATCH, round(n * p.get("context_factor", 8.0))) for _ in range(tune)]

    def train(name, start, data, asking):
        w = {key: x.detach().clone().requires_grad_() for key, x in start.items()}
        optimizer = torch.optim.Adam(w.values(), lr=0.01)
        for tokens, targets in data:
            optimizer.zero_grad()
            loss = loss_of(name, w, p, tokens, targets, asking)
            loss.backward()
            optimizer.step()
        return w, loss.item() if data else 0.0

    for name in TRAINED:
        models[name], found[f"loss_{name}"] = train(name, drawn, batches, n)
    rope = models["rope"]
    for name in ("rope", *SCALED):
        models[name] = train(name, rope, tunings, ASKING)[0] if tune else rope
    for length, ratio in RATIOS.items():
        if length in ("fourfold", "sixteenfold", "thirtytwofold"):
            sequences(g, p["task"], N_EVALUATION, ratio * n)  # drawn, and left out here for their cost
            continue
        tokens, targets = sequences(g, p["task"], N_EVALUATION, ratio * n)
        for name in (*TRAINED, *SCALED):
            with torch.no_grad():
                named = predict(name, models[name], p, tokens)[:, -SCORED:].argmax(-1)
            wanted = [(b, t) for b in range(N_EVALUATION) for t in range(SCORED) if targets[b][t - SCORED] is not None]
            right = [named[b, t].item() == targets[b][t - SCORED] for b, t in wanted]
            found[f"accuracy_{name}_{length}"] = float(np.mean(right))
    return found


def law(experiment: Experiment) -> None:
    for number, p in enumerate(SETTINGS):
        result = run(experiment, seed=3, dtype="float64", steps=10, **p)
        training = result.tables["training"]
        for name, wanted in reference(number, 3).items():
            if name.startswith("loss_"):
                last = (training["step"] == 9) & (training["positions"] == name.removeprefix("loss_"))
                # the column is float32
                assert training["loss_nats"][last] == pytest.approx([wanted], rel=1e-6), (p, name)
            else:
                # float64 on both sides: an argmax of 8 logits turns on none of 512 places
                assert result.metrics[name] == pytest.approx(wanted, abs=1e-12), (p, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("drawn.roll(OFFSET, dims=1)", "drawn.roll(-OFFSET, dims=1)"),  # the token three places ahead
        ("places >= OFFSET", "places >= 0"),
        ("last.clamp(min=0)", "(last - 1).clamp(min=0)"),  # the token before the marked one
        ("positions.angles[..., n - asking :, :]", "positions.angles[..., :asking, :]"),  # queries at the start
        ("** 2 for name in names", "for name in names"),  # the temperature once instead of on q and on k
        ("self.bias = (of_alibi * bias)", "self.bias = (0 * of_alibi * bias)"),
        ("places <= places[n - asking :, None]", "places <= n"),  # no mask
        (
            "params.context_factor, params.trained_len, **turns",
            "2 * params.context_factor, params.trained_len, **turns",
        ),
        ("range(steps)", "range(steps - 1)"),
    ],
)
def test_law_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_law_holds():
    law(get(NAME))


def test_the_models_start_alike():
    training = run(get(NAME), steps=10, trained_len=16).tables["training"]
    start = training["step"] == 0
    # positions add little to untrained models: losses of random models, near each other
    assert np.ptp(training["loss_nats"][start]) < 0.5


def test_a_short_training_is_at_chance_everywhere():
    metrics = run(get(NAME), steps=10, trained_len=16, task="needle").metrics
    # 512 places; neighbouring ones share a target, so that some 64 are independent: five standard errors of 0.041
    assert all(abs(value - 1 / 8) < 0.25 for name, value in metrics.items() if name.endswith("thirtytwofold"))
