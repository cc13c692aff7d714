"""skip_training against models trained one at a time by PyTorch's own Adam, in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm

from engine.base import make_run
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, assert_stops_at_once, run

NAME = "skip_training"
D = 32
STACKS = ("plain_stack", "skip_stack", "scaled_stack")
SETTINGS = [
    {"n_layers": 2, "steps": 10, "n_seeds": 2},
    {"n_layers": 2, "steps": 10, "n_seeds": 1, "skip_norm": "unnormed", "learning_rate": 0.01},
]
# float64 on both sides, sums in another order, and 10 steps of Adam, which divides by gradients that may be small:
# measured below 1e-9
ROUNDING = 1e-6


def generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))


def sequences(g: torch.Generator, batch: int) -> torch.Tensor:
    start = torch.randint(8, (batch, 2), generator=g)
    tokens = torch.zeros(batch, 13, dtype=torch.int64)
    tokens[:, :2] = start
    for t in range(2, 13):
        tokens[:, t] = (tokens[:, t - 2] + 3) % 8
    return tokens


class Model:
    def __init__(self, seed: int, stack: str, depth: int, norm: str) -> None:
        g = generator(seed, 0)

        def drawn(*shape: int, std: float = 1.0) -> torch.Tensor:
            return std * torch.randn(*shape, generator=g).double()

        outer = [drawn(8, D), drawn(12, D), drawn(D, 8, std=D**-0.5)]
        shapes = [(depth, D, D)] * 4 + [(depth, D, 64), (depth, 64, D)]
        W = [drawn(*shape, std=shape[1] ** -0.5) for shape in shapes]
        if stack == "scaled_stack":
            W[3], W[5] = (w / math.sqrt(2 * depth) for w in (W[3], W[5]))
        self.weights = [w.clone().requires_grad_() for w in (*outer, *W)]
        self.stack, self.depth, self.norm = stack, depth, norm

    def out(self, tokens: torch.Tensor) -> torch.Tensor:
        embedding, places, _, q, k, v, o, up, down = self.weights
        x = embedding[tokens] + places
        hidden = torch.ones(12, 12).triu(1).bool()
        for layer in range(self.depth):
            for kind in "af":
                read = layer_norm(x, (D,)) if self.norm == "normed_input" else x
                if kind == "a":
                    logits = (read @ q[layer]) @ (read @ k[layer]).mT / math.sqrt(D)
                    f = logits.masked_fill(hidden, -math.inf).softmax(-1) @ (read @ v[layer]) @ o[layer]
                else:
                    f = gelu(read @ up[layer]) @ down[layer]
                x = f if self.stack == "plain_stack" else x + f
        return x

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = layer_norm(self.out(tokens[:, :-1]), (D,)) @ self.weights[2]
        return cross_entropy(logits[:, 1:].flatten(0, 1), tokens[:, 2:].flatten())


def reference(seed: int, stack: str, depth: int, p: dict) -> tuple[float, float]:
    """Loss at the end, and the spread of the tokens at the start."""
    model = Model(seed, stack, depth, p.get("skip_norm", "normed_input"))
    held_out, g = sequences(generator(seed, 2), 64), generator(seed, 1)
    with torch.no_grad():
        x = model.out(held_out[:, :-1])
        spread = float((x - x.mean(1, keepdim=True)).norm() / x.norm())
    adam = torch.optim.AdamW(model.weights, p.get("learning_rate", 0.003), weight_decay=0)
    for _ in range(p["steps"]):
        adam.zero_grad()
        model.loss(sequences(g, 16)).backward()
        adam.step()
    with torch.no_grad():
        return float(model.loss(held_out)), spread


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        m = run(experiment, seed=3, dtype="float64", **p).metrics
        for stack in STACKS:
            found = {
                depth: np.array([reference(3 + i, stack, depth, p) for i in range(p["n_seeds"])]) for depth in (1, 2)
            }
            for name, value in (
                ("deepest_loss", found[2][:, 0].mean()),
                ("shallowest_loss", found[1][:, 0].mean()),
                ("deepest_worst_loss", found[2][:, 0].max()),
                ("deepest_best_loss", found[2][:, 0].min()),
                ("start_spread", found[2][:, 1].mean()),
            ):
                if (name, stack) != ("start_spread", "scaled_stack"):
                    assert m[f"{name}_{stack}"] == pytest.approx(value, rel=ROUNDING), (p, name, stack)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(columns[t - BACK] + STEP)", "(columns[t - 1] + STEP)"),
        ("(2 * depth) ** -0.5", "depth**-0.5"),
        ("x.new_tensor((0.0, 1.0, 1.0))", "x.new_tensor((1.0, 1.0, 1.0))"),
        ("[:, :, BACK - 1 :]", "[:, :, BACK - 1 :].flip(2)"),
        ("keep=keep_causal(SEQ_LEN, device=x.device)", "keep=None"),
        ("first + i for i", "first for i"),
        ("last[-1, i].max()", "last[-1, i].min()"),
        ("if step == 0 and depth == depths[-1]", "if step == 0 and depth == depths[0]"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_every_depth_is_trained_and_the_deepest_named():
    table = run(get(NAME), n_layers=4, steps=10, n_seeds=1).tables["by_depth"]
    assert sorted(set(table["n_layers"])) == [1, 2, 4]


def test_a_stop_takes_effect_at_once_and_partial_results_are_drawn():
    seen, experiment = [], get(NAME)
    params = experiment.Params(steps=20, n_layers=2, n_seeds=1)
    experiment.run(params, make_run(0, on_progress=lambda fraction, partial: seen.append(partial)))
    assert {p.done for p in seen if p is not None} >= {0.0, 0.5}
    assert_stops_at_once(experiment, params)
