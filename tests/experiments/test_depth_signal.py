"""depth_signal against a stack written layer by layer in float64, with gradients by finite steps of autograd's own."""

import math

import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "depth_signal"
# float64 on both sides, sums in another order: measured below 1e-12
ROUNDING = 1e-9
SETTINGS = [
    {"n_layers": 3, "d_model": 8, "seq_len": 4},
    {"n_layers": 2, "d_model": 16, "seq_len": 2, "skip_norm": "normed_input", "weight_gain": 1.5},
    {"n_layers": 3, "d_model": 8, "seq_len": 4, "skip_norm": "normed_output", "layers_shared": True},
    {"n_layers": 3, "d_model": 8, "seq_len": 4, "residual_scaled_by": "number_of_layers"},
    {"n_layers": 3, "d_model": 8, "seq_len": 4, "stack_branches": "attention_alone"},
    {"n_layers": 3, "d_model": 8, "seq_len": 4, "stack_branches": "ffn_alone", "skip_norm": "normed_input"},
]


def heads_of(x, W, layer):
    q, k, v = ((x @ W[n][layer]).unflatten(-1, (4, -1)).transpose(0, 1) for n in range(3))
    mixed = ((q @ k.mT) / math.sqrt(q.shape[-1])).softmax(-1) @ v
    return mixed.transpose(0, 1).flatten(1) @ W[3][layer]


def reference(draws: list, p: dict) -> dict[str, float]:
    """The metrics, from the recorded numbers: one, six weights, the input and the gradient."""
    _, *drawn = (torch.from_numpy(d) for d in draws)
    gain, norm = p.get("weight_gain", 1.0), p.get("skip_norm", "unnormed")
    kinds = {"attention_alone": "a", "ffn_alone": "f"}.get(p.get("stack_branches"), "af")
    count = p["n_layers"] * (1 if p.get("residual_scaled_by") == "number_of_layers" else len(kinds))
    found = {}
    for name in ("plain_stack", "skip_stack", "scaled_stack"):
        W = [gain * w / math.sqrt(w.shape[1]) for w in drawn[:6]]
        if name == "scaled_stack":
            W[3], W[5] = W[3] / math.sqrt(count), W[5] / math.sqrt(count)
        start = x = drawn[6][0].clone().requires_grad_()
        written = []
        for i in range(p["n_layers"]):
            layer = 0 if p.get("layers_shared") else i
            for kind in kinds:
                read = layer_norm(x, x.shape[-1:]) if norm == "normed_input" else x
                f = heads_of(read, W, layer) if kind == "a" else gelu(read @ W[4][layer]) @ W[5][layer]
                f = layer_norm(f, f.shape[-1:]) if norm == "normed_output" else f
                written.append(f.square().mean().item())
                x = f if name == "plain_stack" else x + f
        (gradient,) = torch.autograd.grad((x * drawn[7][0]).sum(), start)
        found[f"gradient_kept_{name}"] = (gradient.norm() / drawn[7].norm()).item()
        found[f"stream_square_{name}"] = (x.square().mean() / start.square().mean()).item()
        if name != "plain_stack":
            whole = start.square().mean().item() + sum(written)
            found[f"square_to_sum_{name}"] = x.square().mean().item() / whole
            found[f"branch_square_{name}"] = sum(written) / len(written)
    return found


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=5, **p)
        for name, value in reference(draws, p).items():
            assert result.metrics[name] == pytest.approx(value, rel=ROUNDING), (p, name)
        table = result.tables["by_depth"]
        first = dict(zip(table["skip_wiring"][:3], table["gradient_kept"][:3], strict=True))
        for stack, kept in first.items():
            assert kept == pytest.approx(result.metrics[f"gradient_kept_{stack}"])
        assert table["gradient_kept"][-3:] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n_scaled**-0.5", "n_scaled**-1.0"),
        ('("W_o", "W_down")', '("W_o",)'),  # only attention is scaled
        ("new_tensor((0.0, 1.0, 1.0))", "new_tensor((0.0, 1.0, 0.5))"),
        ("squares[0, i] + branch_squares[:, i].sum()", "branch_squares[:, i].sum()"),  # the input is forgotten
        ("params.weight_gain * drawn", "drawn"),
        ("1 if params.layers_shared else n_layers", "n_layers"),
        ("carried=carried", "carried=1.0"),
        ("n_scaled *= len(", "n_scaled += len("),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_deep_stack_without_a_path_or_with_huge_branches_still_gives_a_result():
    m = run(get(NAME), n_layers=48, weight_gain=0.25).metrics
    assert m["gradient_kept_plain_stack"] < 1e-20
    assert m["gradient_kept_skip_stack"] == pytest.approx(1, rel=0.5)  # small branches: nearly the identity
    table = run(get(NAME), n_layers=48, weight_gain=0.25).tables["by_depth"]
    assert table["gradient_kept"].min() > 0
