"""head_training against models trained one at a time, head by head, by PyTorch's own Adam, in float64."""

import functools
import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from engine.base import make_run
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, assert_stops_at_once, run

NAME = "head_training"
D = 32
SETTINGS = [
    {"n_heads": 2, "kv_len": 4, "steps": 20, "n_seeds": 2},
    {"n_heads": 4, "kv_len": 8, "steps": 10, "n_seeds": 1, "learning_rate": 0.01, "own_share": 0.25},
    {"n_heads": 2, "kv_len": 4, "steps": 10, "n_seeds": 1, "n_lookups": 1},
]
# float64 on both sides, summed in another order, and up to 20 steps of Adam, which divides by gradients that may be
# small: measured below 1e-11
ROUNDING = 1e-8


def generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))


def sequences(g: torch.Generator, p: dict, *shape: int):
    answers = torch.randint(8, (*shape, p["kv_len"]), generator=g)
    asked = torch.rand(*shape, p["kv_len"], generator=g).argsort(-1)[..., :2]
    if p.get("n_lookups") == 1:
        asked[..., 1] = asked[..., 0]
    return answers, asked


class Model:
    """One model, its heads a list of (W_q, W_k, W_v, W_o)."""

    def __init__(self, seed: int, variant: str, p: dict) -> None:
        g = generator(seed, 0)
        self.cue, self.first, self.second, self.answer = (
            torch.randn(n, D, generator=g) for n in (*[p["kv_len"]] * 3, 8)
        )
        q, k, v, o = (torch.randn(n, D, generator=g).double() / math.sqrt(D) for n in (D, D, D, 16))
        n = 1 if variant == "one_head" else p["n_heads"]
        width = D // n
        own = [slice(h * width, (h + 1) * width) for h in range(n)]
        self.heads = [[q[at], k[at], v[at], o[:, at]] for at in own]
        if variant == "same_start":
            share = p.get("own_share", 0)
            self.heads = [
                [(1 - share) * first + share * W for first, W in zip(self.heads[0], head, strict=True)]
                for head in self.heads
            ]
        for name in ("cue", "first", "second", "answer"):
            setattr(self, name, getattr(self, name).double().requires_grad_())
        self.heads = [[W.double().clone().requires_grad_() for W in head] for head in self.heads]

    def parameters(self):
        return [self.cue, self.first, self.second, self.answer, *(W for head in self.heads for W in head)]

    def __call__(self, answers, asked):
        """Loss, accuracy, mean cosine of two heads' rows and their largest difference, of sequences (batch, ...)."""
        x = layer_norm(self.cue + self.answer[answers], (D,))
        x_q = layer_norm(self.first[asked[:, 0]] + self.second[asked[:, 1]], (D,))
        rows, logits = [], 0
        for W_q, W_k, W_v, W_o in self.heads:
            scores = torch.einsum("bd,bnd->bn", x_q @ W_q.T, x @ W_k.T) / math.sqrt(len(W_q))
            rows.append(scores.softmax(-1))
            logits = logits + torch.einsum("bn,bnd->bd", rows[-1], x @ W_v.T) @ W_o.T
        wanted = answers.gather(1, asked)
        classes = logits.view(-1, 2, 8)
        loss = (cross_entropy(classes[:, 0], wanted[:, 0]) + cross_entropy(classes[:, 1], wanted[:, 1])) / 2
        accuracy = (classes.argmax(-1) == wanted).all(-1).double().mean()
        pairs = [(i, j) for i in range(len(rows)) for j in range(i)]
        cosines = [((rows[i] * rows[j]).sum(-1) / rows[i].norm(dim=-1) / rows[j].norm(dim=-1)).mean() for i, j in pairs]
        differences = [(rows[i] - rows[j]).abs().max() for i, j in pairs]
        return loss, accuracy, sum(cosines) / max(1, len(pairs)), max(differences, default=torch.zeros(()))


@functools.cache
def reference(seed: int, variant: str, items: tuple) -> np.ndarray:
    """Loss, accuracy, cosine and difference at every step. Shapes: (steps + 1, 4)."""
    p = dict(items)
    model = Model(seed, variant, p)
    adam = torch.optim.AdamW(model.parameters(), p.get("learning_rate", 0.003), weight_decay=0)
    evaluation = sequences(generator(seed, 2), p, 256)
    g, curve = generator(seed, 1), []
    for step in range(p["steps"] + 1):
        with torch.no_grad():
            curve.append([float(value) for value in model(*evaluation)])
        if step % 10 == 0:
            block = sequences(g, p, 10, 32)
        adam.zero_grad()
        model(*(part[step % 10] for part in block))[0].backward()
        adam.step()
    return np.array(curve)


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = run(experiment, seed=3, dtype="float64", **p)
        curves, cosines = result.tables["curves"], result.tables["cosines"]
        for variant in ("one_head", "several_heads", "same_start"):
            expected = np.stack([reference(3 + i, variant, tuple(p.items())) for i in range(p["n_seeds"])], axis=1)
            rows = curves["variant"] == variant
            at = curves["step"][rows]
            close = {"rtol": ROUNDING, "atol": ROUNDING, "err_msg": f"{p} {variant}"}
            for column, values in (("loss", expected[at, :, 0]), ("accuracy", expected[at, :, 1])):
                for suffix, of_seeds in (("mean", np.mean), ("low", np.min), ("high", np.max)):
                    np.testing.assert_allclose(curves[f"{column}_{suffix}"][rows], of_seeds(values, axis=1), **close)
            for suffix, of_seeds in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                measured = result.metrics[f"accuracy_{suffix}_{variant}"]
                np.testing.assert_allclose(measured, of_seeds(expected[-1, :, 1]), **close)
            if variant != "one_head":
                measured = cosines["row_cosine"][cosines["variant"] == variant]
                np.testing.assert_allclose(measured, expected[at, :, 2].mean(axis=1), **close)
            if variant == "same_start":
                np.testing.assert_allclose(
                    result.metrics["row_difference_same_start"], expected[-1, :, 3].max(), **close
                )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weight[:, :1].lerp(weight", "weight[:, -1:].lerp(weight"),  # the last head repeated, not the first
        ("order[..., params.n_lookups - 1]", "order[..., 1]"),  # always two lookups
        ("softmax(attention_logits(q, k))", 'softmax(attention_logits(q, k, "none"))'),  # scale dropped
        (
            "weight.unflatten(2, (n_heads, -1)).transpose(1, 2)",
            "weight.unflatten(2, (n_heads, -1)).transpose(1, 2).flip(1)",
        ),
        ('asked[:, :, 1] @ weights["E_second"]', 'asked[:, :, 0] @ weights["E_second"]'),  # the second cue is left out
        ("first_seed + i for i", "first_seed for i"),  # every seed the same model
        (
            "loss.view(class_logits.shape[:3]).mean(dim=(1, 2))",
            "loss.view(class_logits.shape[:3])[:, :, 0].mean(dim=1)",
        ),
        (".all(dim=-1)", ".any(dim=-1)"),  # one answer right is enough
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_seed_has_its_own_curve_whatever_trains_beside_it():
    small = {"kv_len": 4, "steps": 20, "dtype": "float64"}
    together = run(get(NAME), seed=5, n_seeds=3, **small).tables["curves"]
    alone = [run(get(NAME), seed=5 + i, n_seeds=1, **small).tables["curves"] for i in range(3)]
    np.testing.assert_allclose(together["loss_mean"], np.mean([t["loss_mean"] for t in alone], axis=0), rtol=1e-9)
    assert np.abs(alone[0]["loss_mean"] - alone[1]["loss_mean"]).max() > 0.01


def test_a_stop_takes_effect_at_once_and_partial_results_are_drawn():
    seen, experiment = [], get(NAME)
    params = experiment.Params(steps=50, kv_len=4)
    experiment.run(params, make_run(0, on_progress=lambda fraction, partial: seen.append(partial)))
    assert {p.done for p in seen if p is not None} >= {0.0, 0.4}
    assert_stops_at_once(experiment, params)


@pytest.mark.slow
def test_it_shows_in_the_setting_where_it_shows():
    m = run(get(NAME), seed=20).metrics  # three seeds
    assert m["accuracy_min_several_heads"] > 0.9
    assert m["accuracy_max_one_head"] < 0.6
    assert m["accuracy_max_same_start"] < 0.6
    assert m["row_difference_same_start"] < 1e-4
