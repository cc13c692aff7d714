"""attention_gradients against autograd through PyTorch's own operations, on the same draws in float64."""

import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "attention_gradients"
SMALL = {"batch": 3, "q_len": 8, "kv_len": 12, "d_k": 16, "d_v": 8, "d_model": 32}
SETTINGS = [
    {},
    {"scale": "none", "d_k": 4},
    {"scale": "inv_d_k", "d_model": 16, "d_k": 64},
    {"scale": "factor", "factor": 2.0},
    {"scale": "learnable_tau", "tau": 3.0, "dead_below": 0.1},
    {"scale": "cosine", "tau": 0.2},
    {"kv_len": 512, "d_model": 1024, "batch": 2},  # several chunks
]


def autograd(p: dict, draws: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Forward with PyTorch's softmax and matmul, gradients by backward; draws: W_q, W_k, W_v, then chunk by chunk."""
    W_q, W_k, W_v = (torch.tensor(w / math.sqrt(p["d_model"]), requires_grad=True) for w in draws[:3])
    assert [tuple(W.shape) for W in (W_q, W_k, W_v)] == [(p["d_model"], p[w]) for w in ("d_k", "d_k", "d_v")]
    x_q, x_k, x_v, g = (torch.tensor(np.concatenate(draws[3 + i :: 4])) for i in range(4))
    assert x_q.shape == (p["batch"], p["q_len"], p["d_model"])
    assert x_k.shape == x_v.shape == (p["batch"], p["kv_len"], p["d_model"])
    q, k, v = x_q @ W_q, x_k @ W_k, x_v @ W_v
    if p["scale"] == "cosine":
        product = torch.nn.functional.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    else:
        product = torch.einsum("bqd,bkd->bqk", q, k)
    root = math.sqrt(p["d_k"])
    scales = {"none": 1.0, "inv_sqrt_d_k": 1 / root, "inv_d_k": 1 / p["d_k"], "factor": p.get("factor", 1.0) / root}
    scale = scales.get(p["scale"], 1 / p.get("tau", 1.0))
    logits = product * scale
    weights = torch.softmax(logits, dim=-1)
    loss = (torch.einsum("bqk,bkd->bqd", weights, v) * g).sum()
    names = ["q", "k", "v", "product", "logits"]
    found = dict(zip(names, torch.autograd.grad(loss, [q, k, v, product, logits], retain_graph=True), strict=True))
    mean_loss = loss / (p["batch"] * p["q_len"])
    found |= dict(
        zip(["W_q", "W_k", "W_v"], torch.autograd.grad(mean_loss, [W_q, W_k, W_v], retain_graph=True), strict=True)
    )
    # the product's own gradient to q, the scale left out: start the backward pass at the product
    found["q_unscaled"] = torch.autograd.grad(product, q, grad_outputs=found["logits"], retain_graph=True)[0]
    rows = logits.detach().flatten(0, 1)
    found["jacobian"] = torch.vmap(torch.func.jacrev(lambda z: torch.softmax(z, dim=-1)))(rows)
    return found | {"scale": torch.tensor(scale)}


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = {"scale": "inv_sqrt_d_k", "dead_below": 1e-3} | SMALL | given
        result, draws = recorded(experiment, seed=7, **p)
        found = autograd(p, draws)
        norms = {name: found[name].norm(dim=-1).flatten().numpy() for name in ("q", "k", "v", "logits", "q_unscaled")}
        p10, p90 = np.percentile(norms["q"], [10, 90])
        squares = np.sort(norms["logits"] ** 2)
        metrics = {
            "scale_value": found["scale"].item(),
            "grad_logits_norm_mean": norms["logits"].mean(),
            "grad_logits_norm_median": np.percentile(norms["logits"], 50),
            "grad_q_unscaled_median": np.percentile(norms["q_unscaled"], 50),
            "grad_q_norm_mean": norms["q"].mean(),
            "grad_q_norm_median": np.percentile(norms["q"], 50),
            "grad_q_norm_p10": p10,
            "grad_q_norm_p90": p90,
            "grad_q_spread": p90 / p10,
            "grad_k_norm_mean": norms["k"].mean(),
            "grad_k_norm_median": np.percentile(norms["k"], 50),
            "grad_v_norm_mean": norms["v"].mean(),
            "grad_W_q_norm": found["W_q"].norm().item(),
            "grad_W_k_norm": found["W_k"].norm().item(),
            "grad_W_v_norm": found["W_v"].norm().item(),
            "dead_share": (found["jacobian"].flatten(1).norm(dim=-1) < p["dead_below"]).double().mean().item(),
            "top_decile_share": squares[-(len(squares) // 10) :].sum() / squares.sum(),
        }
        # float64 on both sides; autograd itself cancels on the saturated rows of `none`: 1e-16 of gradients near 1e-9
        assert result.metrics == pytest.approx(metrics, rel=1e-7, abs=1e-12), p
        effects = result.tables["effects"]
        mine = effects["scale"] == p["scale"]
        medians = [metrics[f"{name}_median"] for name in ("grad_logits_norm", "grad_q_unscaled", "grad_q_norm")]
        assert effects["grad_norm"][mine] == pytest.approx(medians, rel=1e-6)  # float32 columns
        assert list(effects["gradient"][mine]) == ["grad_logits", "grad_q_unscaled", "grad_q"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('rows[rule]["grad_q"].append(scale * rows', 'rows[rule]["grad_q"].append(rows'),  # the scale's second effect
        ("else qk * scale)", "else qk)"),  # the scale's first effect
        ("grad_qk_q * (scale * largest)", "grad_qk_q * largest"),  # missing in the matrix only
        ("k, q, rule) * scale", "k, q, rule)"),  # missing in the gradient to k only
        ("(grad - along * direction)", "grad"),  # the cosine's projection
        ("/ q.norm(dim=-1, keepdim=True)", ""),  # the cosine's length
        ("softmax_gradient(weights, grad_weights)", "weights * grad_weights"),  # the Jacobian's rank-one part dropped
        ("x_v @ W_v", "x_k @ W_v"),
        ("_matrix_gradient(x_k, grad_k)", "_matrix_gradient(x_v, grad_k)"),
        ("grad_W_q += ", "grad_W_q = "),  # only the last chunk
        ("len(squares) // 10", "len(squares) // 5"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=1, **params).metrics


def test_both_effects_multiply():
    for scale in ("none", "inv_sqrt_d_k", "inv_d_k"):
        found = metrics(scale=scale, d_k=256)
        assert found["grad_q_norm_median"] == pytest.approx(found["scale_value"] * found["grad_q_unscaled_median"])


def test_scaled_gradients_do_not_depend_on_d_k():
    """The point of 1/√d_k: the same distribution of gradients to logits and to q at every width."""
    small, large = metrics(d_k=16, batch=32), metrics(d_k=1024, batch=32)
    for name in ("grad_logits_norm_mean", "grad_logits_norm_median", "grad_q_norm_mean", "grad_q_norm_median"):
        # two means over 2048 rows whose norms vary by 0.4 of their mean: 5 × 0.4 × √(2 / 2048) = 0.063; the length of
        # a q of 16 coordinates varies by a sixth, and that moves mean and median by up to 0.04
        assert small[name] == pytest.approx(large[name], rel=0.0625 + 0.04), name


def test_one_key_that_takes_all_leaves_no_gradient():
    hot = metrics(scale="learnable_tau", tau=2**-7, d_k=4096, batch=2)
    assert hot["grad_q_norm_median"] == hot["grad_logits_norm_median"] == 0
    assert hot["dead_share"] > 0.95
    assert math.isfinite(hot["grad_q_spread"])
    assert hot["grad_v_norm_mean"] > 1  # the values' own path keeps its gradient


def test_gradient_to_v_follows_from_the_weights():
    """∂L/∂v_j = Σ_i w_ij g_i: with uniform weights its expected square is d_v q_len / kv_len²."""
    uniform = metrics(scale="cosine", tau=128, d_v=256, q_len=64, kv_len=16)
    # |∂L/∂v|² is chi-square with d_v degrees: the mean of its root lies 1/(4 d_v) below √d_v, the spread is 1/√(2 d_v)
    # over 16 × 16 keys (the keys of one item share their queries, so count the 16 items only); weights vary by 1/128
    want = math.sqrt(256 * 64) / 16
    assert uniform["grad_v_norm_mean"] == pytest.approx(want, rel=5 / math.sqrt(2 * 256 * 16) + 1 / 64)


def test_small_gradients_keep_their_digits_in_float32():
    settings = {"seed": 4, "d_k": 1024, "scale": "none", "batch": 8}
    single, double = run(get(NAME), **settings).metrics, run(get(NAME), dtype="float64", **settings).metrics
    assert double["grad_q_norm_p10"] < 1e-7
    for name in ("grad_q_norm_p10", "grad_q_norm_median", "grad_logits_norm_median", "grad_W_q_norm", "grad_q_spread"):
        # a logit of 100 is wrong by some ten roundings of 6e-8 × 100, and so, relatively, is a small gradient
        assert single[name] == pytest.approx(double[name], rel=2e-3), name


def test_refuses_what_would_not_answer_a_stop_in_time():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="too_many_key_numbers") as caught:
        params(kv_len=4096, d_model=1024)
    assert caught.value.problems[0].values["width"] == "d_model"
    with pytest.raises(ParamsError, match="too_many_key_numbers") as caught:
        params(kv_len=4096, d_k=1024)
    assert caught.value.problems[0].values["width"] == "d_k"
    with pytest.raises(ParamsError, match="too_many_logits"):
        params(kv_len=4096, q_len=512)
