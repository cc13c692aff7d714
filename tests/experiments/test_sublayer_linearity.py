"""sublayer_linearity against Jacobians written out, and against the spans that follow from the formulas."""

import numpy as np
import pytest
import torch

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "sublayer_linearity"
SETTINGS = [
    {"seq_len": 8, "d_model": 16, "token_rank": 2, "n_heads": 2, "d_ff": 32},
    {"seq_len": 4, "d_model": 8, "token_rank": 4, "n_heads": 4, "d_ff": 16, "unit_function": "relu_unit"},
    {"seq_len": 8, "d_model": 8, "token_rank": 1, "n_heads": 1, "d_ff": 16, "causal": True},
    {"seq_len": 4, "d_model": 8, "token_rank": 2, "n_heads": 1, "d_ff": 16, "norm_in_front": "norm_by_token"},
    {"seq_len": 4, "d_model": 8, "token_rank": 2, "n_heads": 1, "d_ff": 16, "norm_in_front": "norm_over_tokens"},
]
ROUNDING = 1e-10  # float64 on both sides, sums of some hundred terms in another order


def reference(p: dict, draws: list[np.ndarray]):
    """Both layers as functions of the tokens, written out for one output at a time; the drawn x, y and probes."""
    basis, a, b, probes, W_q, W_k, W_v, W_o, W_up, W_down = (torch.tensor(d, dtype=torch.float64) for d in draws)
    d, h = p["d_model"], p["n_heads"]
    x, y = (c @ basis / p["token_rank"] ** 0.5 for c in (a, b))

    def norm(x):
        if p.get("norm_in_front") == "norm_by_token":
            return torch.nn.functional.layer_norm(x, (d,))
        if p.get("norm_in_front") == "norm_over_tokens":
            return torch.nn.functional.batch_norm(x, None, None, training=True)
        return x

    def rows(x):
        made, x = [], norm(x)
        for head in range(h):
            q, k = (x @ W[head].T / d**0.5 for W in (W_q, W_k))
            scores = q @ k.T / (d // h) ** 0.5
            if p.get("causal"):
                scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
            made.append(scores.softmax(-1))
        return made

    def mix(weights, x):
        return sum(w @ norm(x) @ W_v[head].T @ W_o[head].T for head, w in enumerate(weights)) / d

    def ffn(x):
        unit = torch.relu if p.get("unit_function") == "relu_unit" else torch.nn.functional.gelu
        return unit(norm(x) @ W_up.T / d**0.5) @ W_down.T / p["d_ff"] ** 0.5

    return x, y, probes, rows, mix, ffn


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, draws = recorded(experiment, seed=4, **p)
        x, y, probes, rows, mix, ffn = reference(p, draws)
        frozen = rows(x)
        layers = {"attention": lambda z, rows=rows, mix=mix: mix(rows(z), z), "ffn": ffn}
        for name, layer in layers.items():
            jacobian = torch.autograd.functional.jacobian(layer, x)  # (i, d, j, d)
            influence = torch.einsum("id,idje->ije", probes, jacobian).square().sum(-1)
            other = 1 - influence.diagonal().sum() / influence.sum()
            assert abs(result.metrics[f"{name}_other_influence"] - other) < ROUNDING, (p, name)
            table = result.tables["influence"]
            shown = table["influence_share"][table["sublayer"] == f"{name}_sublayer"]
            shares = (influence / influence.sum(-1, keepdim=True)).flatten()
            np.testing.assert_allclose(shown, shares, atol=1e-6)  # kept as float32
            whole = layer(x + y)
            error = (whole - layer(x) - layer(y)).norm() / whole.norm()
            assert abs(result.metrics[f"{name}_additivity_error"] - error) < ROUNDING, (p, name)
            assert result.metrics[f"{name}_out_rank"] == np.linalg.matrix_rank(layer(x).numpy()), (p, name)
        assert result.metrics["tokens_rank"] == np.linalg.matrix_rank(x.numpy())
        both = (mix(frozen, x + y) - mix(frozen, x) - mix(frozen, y)).norm() / mix(frozen, x + y).norm()
        assert abs(result.metrics["frozen_additivity_error"] - both) < ROUNDING
        assert (both < ROUNDING) == ("norm_in_front" not in p)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mix(frozen, x), x, y)", "mix(rows(x), x), x, y)"),  # weights not frozen
        (".masked_fill(~keep, -math.inf)", ".masked_fill(keep & ~keep, -math.inf)"),  # the mask is forgotten
        ("influence.masked_fill(own, 0).sum()", "influence.sum()"),  # the token's own influence counted as others'
        ("along = -1 if", "along = -2 if"),
        ("(outs * probes).sum()", "outs.sum()"),
        ("_unit(normed(x) @ W_up.mT, params.unit_function) @ W_down.mT", "x @ W_up.mT @ W_down.mT"),
        ("whole - layer(x) - layer(y)", "whole - layer(x)"),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_over_one_token_attention_is_a_matrix_and_the_ffn_is_not():
    m = run(get(NAME), seq_len=1).metrics
    assert m["attention_additivity_error"] < 1e-12  # rounding of float64
    assert m["ffn_additivity_error"] > 0.1
    assert m["attention_other_influence"] == 0


def test_without_its_function_the_ffn_keeps_the_span():
    assert run(get(NAME), unit_function="linear_unit").metrics["ffn_out_rank"] == 4
    assert run(get(NAME)).metrics["ffn_out_rank"] == 32
