"""norm_placement against one stack at a time in float64, its placements written out, and limit cases."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, gelu, layer_norm

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "norm_placement"
PLACEMENTS = ("pre_norm", "post_norm", "output_norm", "sandwich", "deep_norm")
SETTINGS = [
    {"n_layers": 3, "d_model": 8, "seq_len": 4, "n_draws": 2, "weight_step": 0.001},
    {"n_layers": 2, "d_model": 16, "seq_len": 3, "qk_init_gain": 0.5, "final_norm": False, "weight_step": 0.001},
    {"n_layers": 2, "d_model": 8, "seq_len": 2, "step_direction": "random_direction", "norm_placement": "deep_norm"},
    {"n_layers": 2, "d_model": 8, "seq_len": 2, "step_direction": "along_gradient", "norm_placement": "post_norm"},
]


def norm(x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, x.shape[-1:])


def forward(placement: str, layers: list[dict[str, torch.Tensor]], x: torch.Tensor, alpha: float):
    """Streams after each layer and the share of the feed-forward network, one sentence of code a placement."""
    streams, shares = [], []
    for W in layers:

        def attend(y, W=W):
            q, k, v = ((y @ W[n]).unflatten(-1, (2, -1)).transpose(1, 2) for n in ("W_q", "W_k", "W_v"))
            weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
            return (weights @ v).transpose(1, 2).flatten(2) @ W["W_o"]

        def feed(y, W=W):
            return gelu(y @ W["W_up"]) @ W["W_down"]

        for f in (attend, feed):
            if placement == "pre_norm":
                branch, skip = f(norm(x)), x
                after = skip + branch
            elif placement == "post_norm":
                branch, skip = f(x), x
                after = norm(skip + branch)
            elif placement == "output_norm":
                branch, skip = norm(f(x)), x
                after = skip + branch
            elif placement == "sandwich":
                branch, skip = norm(f(norm(x))), x
                after = skip + branch
            else:
                branch, skip = f(x), alpha * x
                after = norm(skip + branch)
            x = after
        streams.append(x)
        shares.append((branch.square().mean() / skip.square().mean()).sqrt().item())
    return streams, shares


def reference(p: dict, draws: list[np.ndarray]) -> dict[str, np.ndarray]:
    """By name: (placement, layer), geometric mean over the draws."""
    n, d, per_draw = p["n_layers"], p["d_model"], []
    names, random_too = ("W_q", "W_k", "W_v", "W_o", "W_up", "W_down"), p["step_direction"] == "random_direction"
    pieces = [torch.tensor(draw) for draw in draws]
    alpha, beta = (2 * n) ** 0.25, (8 * n) ** -0.25
    while pieces:
        stack = {name: pieces.pop(0) / math.sqrt(4 * d if name == "W_down" else d) for name in names}
        random = {}
        if random_too:
            random = {name: pieces.pop(0) / math.sqrt(4 * d if name == "W_down" else d) for name in names}
        W_u, x, u = pieces.pop(0) / math.sqrt(d), pieces.pop(0), pieces.pop(0)
        target = (u * 16).long().flatten()
        rows = []
        for placement in PLACEMENTS:
            small = beta if placement == "deep_norm" else 1.0
            gain = {name: p["qk_init_gain"] if name in ("W_q", "W_k") else small for name in names}
            layers = [{m: (gain[m] * stack[m][i]).requires_grad_() for m in names} for i in range(n)]
            streams, shares = forward(placement, layers, x, alpha)
            read = norm(streams[-1]) if p["final_norm"] else streams[-1]
            logits = read @ W_u
            weights = [layer[m] for layer in layers for m in names]
            gradients = torch.autograd.grad(cross_entropy(logits.flatten(0, 1), target), weights)
            moved = []
            for i in range(n):
                moved.append({})
                for j, m in enumerate(names):
                    g = gradients[i * len(names) + j]
                    way = random[m][i] if random_too else g.sign() if p["step_direction"] == "gradient_sign" else g
                    moved[-1][m] = layers[i][m].detach() - p["weight_step"] * way
            after, _ = forward(placement, moved, x, alpha)
            rows.append(
                {
                    "stream_variance": [s.square().mean().item() for s in streams],
                    "branch_to_stream": shares,
                    "layer_gradient": [gradients[i * len(names) + 5].norm().item() for i in range(n)],
                    "output_moved": [
                        (norm(a) - norm(b)).square().mean().sqrt().item() for a, b in zip(after, streams, strict=True)
                    ],
                    "class_logits_std": [logits.square().mean().sqrt().item()] * n,
                }
            )
        per_draw.append(rows)
    return {
        name: np.exp([np.mean([np.log(rows[i][name]) for rows in per_draw], axis=0) for i in range(len(PLACEMENTS))])
        for name in per_draw[0][0]
    }


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = experiment.Params.defaults() | given
        result, draws = recorded(experiment, seed=4, **given)
        wanted = reference(p, draws)
        table = result.tables["by_layer"]
        for name in ("stream_variance", "branch_to_stream", "layer_gradient", "output_moved"):
            for i, placement in enumerate(PLACEMENTS):
                rows = table["norm_placement"] == placement
                assert table["layer_from_1"][rows].tolist() == list(range(1, p["n_layers"] + 1))
                # float64 on both sides; a change of 1e-4 of numbers near 1 keeps ten digits
                np.testing.assert_allclose(table[name][rows], wanted[name][i], rtol=1e-7, err_msg=f"{given} {name}")
        chosen = PLACEMENTS.index(p["norm_placement"])
        for name in ("stream_variance", "branch_to_stream", "layer_gradient"):
            assert result.metrics[f"{name}_first"] == pytest.approx(wanted[name][chosen][0], rel=1e-7)
            assert result.metrics[f"{name}_last"] == pytest.approx(wanted[name][chosen][-1], rel=1e-7)
        assert result.metrics["output_moved"] == pytest.approx(wanted["output_moved"][chosen][-1], rel=1e-7)
        assert result.metrics["class_logits_std"] == pytest.approx(wanted["class_logits_std"][chosen][0], rel=1e-7)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('gradients["W_down"].flatten(2)', 'gradients["W_up"].flatten(2)'),
        ("return gradient.sign() if", "return gradient if"),
        ("weight - params.weight_step", "weight + 2 * params.weight_step"),
        ("if params.final_norm else stream", "if not params.final_norm else stream"),
        ('gain * (small if placement == "deep_norm" else 1.0)', "gain * small"),
        ('Wiring("post_norm", skip_scale=alpha)', 'Wiring("post_norm")'),
        ("(_mean_square(step.branch) / _mean_square(skipped)).sqrt()", "_mean_square(step.branch).sqrt()"),
        ("streams.append(bare_layer_norm(step.stream.detach()))", "streams.append(step.stream.detach())"),
        (".log().mean(dim=0).exp()", ".mean(dim=0)"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_normalized_stream_has_a_mean_square_of_1():
    for placement in ("post_norm", "deep_norm"):
        metrics = run(get(NAME), dtype="float64", norm_placement=placement, n_layers=4).metrics
        # the variance stands beside an epsilon of 1e-5
        assert metrics["stream_variance_first"] == pytest.approx(1, abs=2e-5)
        assert metrics["stream_variance_last"] == pytest.approx(1, abs=2e-5)


def test_placements_start_from_the_same_numbers_and_draws_differ():
    one, two = (run(get(NAME), norm_placement=p, n_draws=1).tables["by_layer"] for p in ("pre_norm", "sandwich"))
    assert all(np.array_equal(one[column], two[column]) for column in one)
    assert not np.array_equal(run(get(NAME), seed=1).tables["by_layer"]["layer_gradient"], one["layer_gradient"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_placement_alone_gives_the_numbers_that_it_has_among_all(placement):
    p = {
        "norm_placement": placement,
        "n_layers": 3,
        "n_draws": 3,
        "dtype": "float64",
        "step_direction": "gradient_sign",
    }
    among, alone = (run(get(NAME), all_placements=all_of_them, **p) for all_of_them in (True, False))
    assert alone.metrics == pytest.approx(among.metrics, rel=1e-9)  # float64, in products of other sizes
    assert set(alone.tables["by_layer"]["norm_placement"]) == {placement}
