"""token_collapse: exact cases, a stack written out, and what a law of cubes and of factors must show."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import gelu, layer_norm

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "token_collapse"
SMALL = {"n_layers": 3, "d_model": 8, "seq_len": 4}
SETTINGS = [SMALL, SMALL | {"causal": True}, SMALL | {"n_heads": 2, "weight_gain": 1.5, "n_layers": 2}]
STACKS = ("pure_attention", "with_norm", "with_ffn", "with_skip", "whole_block", "whole_block_scaled")


def reference(draws: list, p: dict) -> dict[str, list[float]]:
    *drawn, x = (torch.from_numpy(d) for d in draws)
    heads, found = p.get("n_heads", 1), {}
    for name in STACKS:
        W = [p.get("weight_gain", 1) * w / math.sqrt(w.shape[1]) for w in drawn]
        if name == "whole_block_scaled":
            W[3], W[5] = (w / math.sqrt(2 * p["n_layers"]) for w in (W[3], W[5]))
        y, spreads = x[0, 0], []
        for layer in range(p["n_layers"]):
            for kind in "af" if name in ("with_ffn", "whole_block", "whole_block_scaled") else "a":
                normed = name in ("with_norm", "whole_block", "whole_block_scaled")
                read = layer_norm(y, y.shape[-1:]) if normed else y
                if kind == "a":
                    q, k, v = ((read @ w[layer]).unflatten(-1, (heads, -1)).transpose(0, 1) for w in W[:3])
                    logits = q @ k.mT / math.sqrt(q.shape[-1])
                    if p.get("causal"):
                        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -math.inf)
                    f = (logits.softmax(-1) @ v).transpose(0, 1).flatten(1) @ W[3][layer]
                else:
                    f = gelu(read @ W[4][layer]) @ W[5][layer]
                y = y + f if name in ("with_skip", "whole_block", "whole_block_scaled") else f
            spreads.append(float((y - y.mean(0)).norm() / y.norm()))
        found[name] = spreads
    return found


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=2, **p)
        table = result.tables["by_layer"]
        for name, spreads in reference(draws, p).items():
            mine = table["token_spread_log10"][table["token_stack"] == name][1:]
            # a spread of 1e-9 is a difference of numbers near 1, rounded at 1e-16
            np.testing.assert_allclose(mine, np.log10(spreads), atol=1e-6, err_msg=f"{p} {name}")
            assert result.metrics[f"token_spread_log10_{name}"] == mine[-1]
        logs = np.log10(reference(draws, p)["pure_attention"])
        start = table["token_spread_log10"][0]
        falls = -np.diff([start, *logs])
        assert result.metrics["collapse_order"] == pytest.approx(falls[-1] / falls[-2], rel=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("falls[-1] / falls[-2]", "falls[-2] / falls[-1]"),
        ("mean(dim=-2", "mean(dim=-1"),  # the mean of a token, not of the tokens
        ("(2 * params.n_layers) ** -0.5", "params.n_layers**-0.5"),
        ("residual=parts.residual", "residual=False"),
        ("Wiring(parts.placement", 'Wiring("bare"'),
        ("keep=keep", "keep=None"),
        ('"with_ffn": _Parts(BRANCHES', '"with_ffn": _Parts(("attention",)'),
        ("params.weight_gain * w[None]", "w[None]"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_uniform_attention_makes_all_tokens_equal_at_once():
    from engine.residual_stream import Wiring, walk

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 6, 8, generator=generator).double()
    eye = torch.eye(8).double().expand(1, 1, 8, 8)
    weights = {"W_q": 0 * eye, "W_k": eye, "W_v": eye, "W_o": eye, "W_up": eye, "W_down": eye}
    (only,) = walk(weights, x, Wiring("bare", residual=False), branches=("attention",))
    assert torch.allclose(only.stream, x.mean(2, keepdim=True).expand_as(x), rtol=0, atol=1e-15)


def test_layers_to_one_percent_counts_layers():
    result = run(get(NAME), seed=0)
    table = result.tables["by_layer"]
    logs = table["token_spread_log10"][table["token_stack"] == "pure_attention"]
    n = int(result.metrics["layers_to_one_percent"])
    assert logs[n] < -2 <= logs[n - 1]
    assert run(get(NAME), causal=True, n_layers=2).metrics["layers_to_one_percent"] == 3
