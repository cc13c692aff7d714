"""init_variance against the weights that PyTorch's own initializers and modules draw."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "init_variance"
D_MODEL, D_K = 256, 32


def library_weights(init: str) -> list[torch.Tensor]:
    """Sixteen draws of one head's W_q by PyTorch. Shapes: (d_k, d_model) each."""
    torch.manual_seed(11)  # nn.Module's constructors take no generator
    if init == "xavier_square":
        return [nn.init.xavier_uniform_(torch.empty(D_MODEL, D_MODEL))[:D_K] for _ in range(16)]
    if init == "xavier_per_head":
        return [nn.init.xavier_uniform_(torch.empty(D_K, D_MODEL)) for _ in range(16)]
    if init == "xavier_packed":
        return [nn.MultiheadAttention(D_MODEL, D_MODEL // D_K).in_proj_weight.detach()[:D_K] for _ in range(16)]
    if init == "linear_default":
        return [nn.Linear(D_MODEL, D_K).weight.detach() for _ in range(16)]
    return [nn.init.normal_(torch.empty(D_K, D_MODEL), std=0.02) for _ in range(16)]


def law(experiment: Experiment) -> None:
    for init in ("xavier_square", "xavier_per_head", "xavier_packed", "linear_default", "normal_002"):
        p = {"init": init, "d_model": D_MODEL, "d_k": D_K}
        weights = torch.stack(library_weights(init)).double()
        library = D_MODEL * weights.var().item()
        metrics = [run(experiment, seed=s, **p).metrics for s in range(16)]
        # 131072 weights: a variance of uniform numbers has relative error √(0.8/N) = 0.25 %, of normal ones √(2/N)
        # = 0.4 %
        assert metrics[0]["theory_q_variance"] == pytest.approx(library, rel=5 * 0.004), init
        assert metrics[0]["theory_logits_std"] == pytest.approx(
            math.sqrt(D_K) * metrics[0]["theory_q_variance"], rel=1e-12
        )
        for name, theory in (
            ("q_variance", library),
            ("logits_std", math.sqrt(D_K) * library),
            ("scaled_logits_std", library),
        ):
            seeds = np.array([m[name] for m in metrics])
            error = (
                seeds.std(ddof=1) / math.sqrt(len(seeds)) + 0.004 * theory
            )  # of the runs, and of the library's own draws
            assert abs(seeds.mean() - theory) <= 5 * error, (init, name)

        # the largest weight, from PyTorch's weights on LayerNormed tokens
        g = torch.Generator().manual_seed(5)
        tokens = [nn.functional.layer_norm(torch.randn(64, D_MODEL, generator=g).double(), (D_MODEL,)) for _ in weights]
        pairs = [(x @ W_q.T) @ (x @ W_k.T).T for x, W_q, W_k in zip(tokens, weights, weights.roll(1, 0), strict=True)]
        largest = np.array([logits.softmax(-1).amax(-1).mean().item() for logits in pairs])
        ours = np.array([m["weight_max_mean"] for m in metrics])
        error = math.hypot(largest.std(ddof=1), ours.std(ddof=1)) / 4
        assert abs(ours.mean() - largest.mean()) <= 5 * error, init


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"xavier_packed": 3 * d_model', '"xavier_packed": d_model'),  # packed taken for square
        ('"xavier_per_head": d_k', '"xavier_per_head": d_model'),
        ("1 / (3 * d_model)", "1 / d_model"),  # Linear's bound taken for its standard deviation
        ("* math.sqrt(3)", "* 2"),  # uniform numbers of another variance
        ("softmax(logits * variance[params.init])", "softmax(logits)"),  # weights of another initialization
        ("variance[init] ** 2", "variance[init]"),
        (
            "layer_norm(run.randn(params.seq_len, params.d_model), (params.d_model,))",
            "2 * run.randn(params.seq_len, params.d_model)",
        ),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_table_holds_the_metrics_of_the_chosen_initialization():
    for init in ("xavier_packed", "normal_002"):
        result = run(get(NAME), seed=1, init=init)
        table = result.tables["by_init"]
        row = table["init"] == init
        for name in ("q_variance", "theory_q_variance", "scaled_logits_std"):
            assert table[name][row] == result.metrics[name]


def test_normal_002_grows_with_the_width():
    small, large = (
        run(get(NAME), init="normal_002", d_model=d_model).metrics["theory_q_variance"] for d_model in (512, 2048)
    )
    assert large == pytest.approx(4 * small, rel=1e-12)


def test_refuses_a_head_wider_than_the_model():
    with pytest.raises(ParamsError, match=r"head_within_model.*'d_model': 32"):
        get(NAME).Params(d_k=64, d_model=32)
