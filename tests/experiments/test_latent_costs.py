"""latent_costs against the operations written out by hand, and the published sizes and saving."""

import pytest
import torch

from engine.base import ParamsError
from engine.experiments import latent_costs
from engine.model_shapes import weights
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "latent_costs"
HEADS, RANK, D_K, D_ROPE, Q_RANK = 128, 512, 128, 64, 1536  # of both models
D_MODEL = {"deepseek_v2": 5120, "deepseek_v3": 7168}
LAYERS = {"deepseek_v2": 60, "deepseek_v3": 61}
# KV heads of width 128, query heads and layers of those compared with
OTHERS = {
    "llama_3_70b": (8, 64, 80),
    "llama_3_8b": (8, 32, 32),
    "llama_2_7b": (32, 32, 32),
    "deepseek_67b": (8, 64, 95),
}


def law(experiment: Experiment) -> None:
    for model in D_MODEL:
        for other, (kv_heads, other_heads, other_layers) in OTHERS.items():
            for p in (
                {"q_len": 1, "kv_len": 4096},
                {"q_len": 300, "kv_len": 1000, "n_gpus": 8, "latent_bits": 6},
                {"q_len": 64, "kv_len": 64, "n_gpus": 32},
            ):
                found = run(experiment, model=model, compared_with=other, **p).metrics
                gpus, q, n = p.get("n_gpus", 1), p["q_len"], p["kv_len"]
                heads = HEADS // gpus
                kv_on_one = max(1, kv_heads // gpus)
                # a multiply-add is two operations
                pairs = 2 * heads * q * n
                wanted = {
                    "latent_numbers": RANK + D_ROPE,
                    "expanded_numbers": heads * (D_K + D_ROPE + D_K),
                    "own_mha_numbers": heads * 2 * D_K,
                    "compared_numbers": kv_on_one * 2 * 128,
                    "absorbed_flop": pairs * (2 * RANK + D_ROPE) + 2 * heads * q * RANK * 2 * D_K,
                    "expanded_flop": pairs * (2 * D_K + D_ROPE) + 2 * heads * n * RANK * 2 * D_K,
                    "expanded_cached_flop": pairs * (2 * D_K + D_ROPE),
                    "separate_weights": HEADS * D_K * (Q_RANK + 2 * RANK + D_MODEL[model]),
                    "merged_weights": HEADS * RANK * (Q_RANK + D_MODEL[model]),
                }
                assert {name: found[name] for name in wanted} == wanted, (model, other, p)
                exact = {
                    "absorbed_over_expanded": wanted["absorbed_flop"] / wanted["expanded_flop"],
                    "latent_flop_per_cache_byte": heads * q * 1088 / 576,
                    "compared_flop_per_cache_byte": other_heads // gpus / kv_on_one * q,
                    "cache_saved": 1
                    - 576 * LAYERS[model] * p.get("latent_bits", 16) / (2 * kv_heads * 128 * other_layers * 16),
                }
                for name, value in exact.items():
                    assert found[name] == pytest.approx(value, rel=1e-12), (model, other, p, name)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q_latent = q @ W_uk", "pass"),  # the query's share of the absorbed form
        ("out = out @ W_uv.mT", "pass"),
        ("k, v = latent @ W_uk.mT, latent @ W_uv.mT", "k = latent @ W_uk.mT"),
        ("qk_product(q, k) + qk_product(q_rope, k_rope)", "qk_product(q, k)"),
        ("(W_uk.mT @ W_uq).numel()", "W_uk.numel()"),
        ("dataclasses.replace(shape, kv_rank=0, d_rope=0)", "dataclasses.replace(shape, kv_rank=0)"),
        ("whole * params.latent_bits / (whole_other * 16)", "whole / whole_other"),
        ("m.n_layers * _numbers(m, 1)", "_numbers(m, 1)"),  # a layer against a layer
        ("shape.n_heads // n_gpus, q_len", "shape.n_heads, q_len"),
        ("shape.n_heads // n_gpus // n_kv_heads", "shape.n_heads // n_kv_heads"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_published_saving_needs_six_bits_and_fewer_layers():
    found = run(get(NAME), model="deepseek_v2", compared_with="deepseek_67b", latent_bits=6).metrics
    assert round(found["cache_saved"], 3) == 0.933  # "reduces the KV cache by 93.3%"


def test_the_charts_hold_the_metrics():
    result = run(get(NAME), q_len=8, n_gpus=4)
    queries = result.tables["by_q_len"]
    row = (queries["q_len"] == 8) & (queries["way"] == "absorbed")
    assert queries["flop_per_query"][row] == result.metrics["absorbed_flop"] / 8
    gpus = result.tables["by_gpus"]
    row = (gpus["n_gpus"] == 4) & (gpus["model"] == "deepseek_v3")
    assert gpus["flop_per_cache_byte"][row] == result.metrics["latent_flop_per_cache_byte"]
    assert gpus["cached_numbers"][row] == 576


def test_sixty_seven_billion_parameters():
    shape = latent_costs.COMPARED["deepseek_67b"]
    assert round(sum(n * t.numel() for _, n, t in weights(shape, torch.bfloat16)) / 1e9) == 67


def test_refuses_more_queries_than_tokens():
    with pytest.raises(ParamsError, match="queries_among_tokens"):
        get(NAME).Params(q_len=64, kv_len=32)
    with pytest.raises(ParamsError, match="gpus_divide_heads"):
        get(NAME).Params(n_gpus=3)
