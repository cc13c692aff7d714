"""product_training against models trained one at a time, head by head, by PyTorch's own Adam, in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, silu

from engine.base import make_run
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, assert_stops_at_once, run

NAME = "product_training"
D = 48
VARIANTS = ("one_attention_layer", "more_attention", "linear_ffn", "gelu_ffn", "swiglu_ffn")
SETTINGS = [
    {"n_products": 3, "steps": 10, "n_seeds": 2},
    {"n_products": 2, "steps": 10, "n_heads": 2, "features_in": "two_tokens", "ffn_params_in_layers": 1},
]
# float64 on both sides, summed in another order, and 10 steps of Adam, which divides by gradients that may be small
ROUNDING = 1e-8


def generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence([seed, number]).generate_state(1)[0]))


def matrices(seed: int, p: dict) -> dict[str, dict[str, torch.Tensor]]:
    g, n, layers = generator(seed, 0), p["n_products"], p.get("ffn_params_in_layers", 2)

    def draw(name, out, inputs):
        std = 1.0 if name == "p" else inputs**-0.5
        return std * (0.5 if name[-3:] == "W_o" or name == "W_down" else 1) * torch.randn(out, inputs, generator=g)

    sizes = {"E_a": (D, n), "E_b": (D, n), "p": (3, D), "W_out": (n, D)}
    sizes |= {f"0.{name}": (D, D) for name in ("W_q", "W_k", "W_v", "W_o")}
    common = {name: draw(name, *size) for name, size in sizes.items()}
    wide = 2 * D * layers
    own = {
        "one_attention_layer": {},
        "more_attention": {f"{i + 1}.{name}": (D, D) for i in range(layers) for name in ("W_q", "W_k", "W_v", "W_o")},
        "linear_ffn": {"W_up": (wide, D), "W_down": (D, wide)},
        "gelu_ffn": {"W_up": (wide, D), "W_down": (D, wide)},
        "swiglu_ffn": {"W_up": (wide * 2 // 3, D), "W_gate": (wide * 2 // 3, D), "W_down": (D, wide * 2 // 3)},
    }
    return {v: common | {name: draw(name, *size) for name, size in own[v].items()} for v in VARIANTS}


def logits(w: dict, variant: str, p: dict, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Shapes: a, b (batch, n_products)."""
    if p.get("features_in") == "two_tokens":
        x = [a @ w["E_a"].T + w["p"][0], b @ w["E_b"].T + w["p"][1], w["p"][2].expand(len(a), D)]
    else:
        x = [a @ w["E_a"].T + b @ w["E_b"].T + w["p"][2]]
    h = p.get("n_heads", 4)
    for layer in range(sum("W_q" in name for name in w)):
        q, k, v = ([t @ w[f"{layer}.{name}"].T for t in x] for name in ("W_q", "W_k", "W_v"))
        out = []
        for i in range(len(x)):
            heads = []
            for at in (slice(j * D // h, (j + 1) * D // h) for j in range(h)):
                scores = torch.stack([(q[i][:, at] * key[:, at]).sum(-1) for key in k], -1) / math.sqrt(D // h)
                row = scores.softmax(-1)
                heads.append(sum(row[:, j, None] * value[:, at] for j, value in enumerate(v)))
            out.append(x[i] + torch.cat(heads, -1) @ w[f"{layer}.W_o"].T)
        x = out
    r = x[-1]
    if variant == "linear_ffn":
        r = r + r @ w["W_up"].T @ w["W_down"].T
    elif variant == "gelu_ffn":
        r = r + gelu(r @ w["W_up"].T) @ w["W_down"].T
    elif variant == "swiglu_ffn":
        r = r + (silu(r @ w["W_gate"].T) * (r @ w["W_up"].T)) @ w["W_down"].T
    return r @ w["W_out"].T


def signs(g: torch.Generator, n: int, *shape: int) -> torch.Tensor:
    return (2.0 * torch.randint(2, (2, *shape, n), generator=g) - 1).double()


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result = run(experiment, seed=3, dtype="float64", **p)
        seeds = [3 + i for i in range(p.get("n_seeds", 1))]
        for variant in VARIANTS:
            losses, accuracies = [], []
            for seed in seeds:
                w = {k: t.double().requires_grad_() for k, t in matrices(seed, p)[variant].items()}
                assert result.metrics[f"n_parameters_{variant}"] == sum(t.numel() for t in w.values())
                adam = torch.optim.Adam(w.values(), 0.003)
                g, (a, b) = generator(seed, 1), signs(generator(seed, 2), p["n_products"], 512)
                block = signs(g, p["n_products"], 10, 32)
                for step in range(p["steps"]):
                    adam.zero_grad()
                    x, y = block[0][step], block[1][step]
                    torch.log1p(torch.exp(-x * y * logits(w, variant, p, x, y))).mean().backward()
                    adam.step()
                with torch.no_grad():
                    said = logits(w, variant, p, a, b)
                    losses.append(torch.log1p(torch.exp(-a * b * said)).mean().item())
                    accuracies.append((said * a * b > 0).double().mean().item())
            table = result.tables["curves"]
            last = (table["variant"] == variant) & (table["step"] == p["steps"])
            for column, fold in (("loss_mean", np.mean), ("loss_low", np.min), ("loss_high", np.max)):
                np.testing.assert_allclose(table[column][last], fold(losses), rtol=ROUNDING, err_msg=variant)
            for suffix, fold in (("mean", np.mean), ("min", np.min), ("max", np.max)):
                np.testing.assert_allclose(
                    result.metrics[f"accuracy_{suffix}_{variant}"], fold(accuracies), atol=ROUNDING, err_msg=variant
                )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("silu(x @ weights", "(x @ weights"),  # no function in the gate
        ("hidden = gelu(hidden)", "hidden = hidden"),
        ("-signs.a * signs.b * class_logits", "-signs.a * class_logits"),  # not a product
        ("x = (a + b + p[:, 2])", "x = (a - b + p[:, 2])"),
        ("first_seed + i for i", "first_seed for i"),  # every seed the same model
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_equally_many_parameters():
    m = run(get(NAME), steps=10, ffn_params_in_layers=3).metrics
    assert len({m[f"n_parameters_{variant}"] for variant in VARIANTS[1:]}) == 1


def test_a_stop_takes_effect_at_once_and_partial_results_are_drawn():
    seen, experiment = [], get(NAME)
    params = experiment.Params(steps=20, n_products=2)
    experiment.run(params, make_run(0, on_progress=lambda fraction, partial: seen.append(partial)))
    assert {p.done for p in seen if p is not None} >= {0.0, 0.5}
    assert_stops_at_once(experiment, params)
