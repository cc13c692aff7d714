"""path_spectrum against the Jacobian of the whole stack, taken at once by torch, in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "path_spectrum"
SMALL = {"n_layers": 3, "d_model": 4, "seq_len": 3}
SETTINGS = [
    {"n_layers": 3, "d_model": 4, "seq_len": 4},
    {"n_layers": 2, "d_model": 8, "seq_len": 2, "skip_norm": "normed_input", "weight_gain": 1.5},
    {"n_layers": 2, "d_model": 8, "seq_len": 2, "skip_norm": "normed_output", "stack_branches": "ffn_alone"},
    {"n_layers": 2, "d_model": 8, "seq_len": 2, "stack_branches": "attention_alone"},
]
# float64 on both sides, one product of Jacobians against one Jacobian: measured below 1e-12
ROUNDING = 1e-8


def whole(draws: list, p: dict, name: str) -> tuple[torch.Tensor, int]:
    _, *drawn, x = (torch.from_numpy(d) for d in draws)
    W = [p.get("weight_gain", 1) * w / math.sqrt(w.shape[1]) for w in drawn]
    kinds = {"attention_alone": "a", "ffn_alone": "f"}.get(p.get("stack_branches"), "af")
    if name == "scaled_stack":
        W[3], W[5] = (w / math.sqrt(len(kinds) * p["n_layers"]) for w in (W[3], W[5]))
    norm = p.get("skip_norm", "unnormed")

    def stack(y: torch.Tensor) -> torch.Tensor:
        for layer in range(p["n_layers"]):
            for kind in kinds:
                read = layer_norm(y, y.shape[-1:]) if norm == "normed_input" else y
                if kind == "a":
                    q, k, v = (read @ w[layer] for w in W[:3])
                    f = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v @ W[3][layer]
                else:
                    f = gelu(read @ W[4][layer]) @ W[5][layer]
                f = layer_norm(f, f.shape[-1:]) if norm == "normed_output" else f
                y = f if name == "plain_stack" else y + f
        return y

    size = x.numel()
    return torch.autograd.functional.jacobian(stack, x[0]).reshape(size, size), size


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=4, **p)
        for name in ("plain_stack", "skip_stack", "scaled_stack"):
            J, size = whole(draws, p, name)
            s = torch.linalg.svdvals(J).numpy()
            assert result.metrics[f"jacobian_rms_{name}"] == pytest.approx(np.sqrt((s**2).mean()), rel=ROUNDING), p
            directions = (s**2).sum() ** 2 / (s**4).sum()
            assert result.metrics[f"directions_{name}"] == pytest.approx(directions, rel=ROUNDING), (p, name)
            table = result.tables["spectrum"]
            drawn = table["stretch_log10"][table["skip_wiring"] == name]
            np.testing.assert_allclose(drawn, np.log10((s / s[0]).clip(1e-9)), atol=1e-5)
        assert result.metrics["input_numbers"] == size


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("rows.flatten(2).cpu().double() @ product", "rows.flatten(2).cpu().double()"),  # the last layer alone
        ("n_branches**-0.5", "n_branches**-1.0"),
        ("squares.sum(axis=2) ** 2 / np.square(squares)", "squares.sum(axis=2) ** 2 / squares"),
        ("carried=carried", "carried=1.0"),
        ("params.weight_gain * scaled * drawn", "scaled * drawn"),
        ("x = last.stream.detach()[:, :1]", "x = x"),  # every Jacobian at the first input
        ("singular[-1] / singular[-1][:, :1]", "singular[0] / singular[0][:, :1]"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_one_token_without_a_skip_has_a_jacobian_of_full_size_and_a_skip_of_nothing_is_the_identity():
    m = run(get(NAME), n_layers=1, weight_gain=0.25, stack_branches="attention_alone", dtype="float64").metrics
    assert m["directions_scaled_stack"] == pytest.approx(m["input_numbers"], rel=0.05)  # branches of 1/16
    assert m["jacobian_rms_scaled_stack"] == pytest.approx(1, rel=0.05)
