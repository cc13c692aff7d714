"""phase_bounds and engine/passes.py against a bill by hand, and against operations counted while a layer runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.base import ParamsError
from engine.model_shapes import PLAIN_SHAPES, SHAPES
from engine.passes import ATTENTION, LINEAR, pass_work
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "phase_bounds"
P, B = 989e12, 3350e9
SETTINGS = [
    {"batch": 1, "seq_len": 1024},
    {"batch": 48, "seq_len": 3000, "cache_dtype": "float8"},
    {"batch": 512, "seq_len": 512, "weight_dtype": "float8"},
    {"batch": 3, "seq_len": 700, "tokens_per_step": 64},
    {"phase": "prefill", "seq_len": 100},
    {"phase": "prefill", "seq_len": 4000, "batch": 2},
    {"phase": "prefill", "seq_len": 20000, "matmul_tflop_per_s": 100, "memory_gb_per_s": 1000},
]


def bill(model: str, p: dict) -> dict[str, float]:
    """By hand, from the sizes: what a whiteboard would show, with every term."""
    s = SHAPES[model]
    batch, length = p.get("batch", 1), p["seq_len"]
    new = length if p.get("phase") == "prefill" else p.get("tokens_per_step", 1)
    rows = batch * new
    peak, bandwidth = p.get("matmul_tflop_per_s", 989) * 1e12, p.get("memory_gb_per_s", 3350) * 1e9
    size = {"bfloat16": 2, "float8": 1}
    weight, cache = size[p.get("weight_dtype", "bfloat16")], size[p.get("cache_dtype", "bfloat16")]
    q, kv = s.n_heads * s.d_k, s.n_kv_heads * s.d_k
    matrices = [(q, s.d_model), (kv, s.d_model), (kv, s.d_model), (s.d_model, q)]
    matrices += [(s.d_ff, s.d_model)] * 2 + [(s.d_model, s.d_ff)]
    ops = [(s.n_layers, rows, a, b) for a, b in matrices] + [(1, batch, s.vocabulary, s.d_model)]
    flop = [n * 2 * t * a * b for n, t, a, b in ops]
    read = [n * weight * a * b for n, t, a, b in ops]
    moved = [n * 2 * t * (a + b) for n, t, a, b in ops]
    vectors = s.norms_per_layer * s.d_model + (q + 2 * kv if s.qkv_bias else 0) + (2 * s.d_k if s.qk_norm else 0)
    small = (
        weight * (s.n_layers * vectors + s.d_model),
        rows * weight * s.d_model,
    )  # gains and biases; rows of the table
    pairs = batch * sum(length - new + i + 1 for i in range(new))
    scores = s.n_layers * pairs * s.n_heads * 4 * s.d_k
    kept = s.n_layers * batch * (length + new) * 2 * kv * cache
    around = s.n_layers * 2 * rows * q * 2
    linear_s = [max(f / peak, (r + m) / bandwidth) for f, r, m in zip(flop, read, moved, strict=True)]
    attention_s = max(scores / peak, (kept + around) / bandwidth)
    weights = sum(read) + small[0]
    return {
        "pass_bound_ms": 1e3 * (sum(linear_s) + sum(small) / bandwidth + attention_s),
        "tokens_per_s": rows / (sum(linear_s) + sum(small) / bandwidth + attention_s),
        "weight_read_bytes": weights,
        "cache_moved_bytes": kept,
        "activation_bytes": sum(moved) + around + small[1],
        "linear_flop": sum(flop),
        "attention_flop": scores,
        "flop_per_token": (sum(flop) + scores) / rows,
        "memory_over_compute": (
            (weights + kept + sum(moved) + around + small[1]) / bandwidth / ((sum(flop) + scores) / peak)
        ),
        "attention_memory_over_compute": (kept + around) / bandwidth / (scores / peak),
        "tokens_equal_reads": weights / (s.n_layers * 2 * kv * cache),
        "held_bytes": weights
        + (0 if s.tied_embedding else weight * s.vocabulary * s.d_model)
        + batch * length * s.n_layers * 2 * kv * cache,
    }


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        for model in ("llama_3_8b", "qwen2_5_7b", "qwen3_4b") if p["seq_len"] < 4000 else ("llama_3_8b",):
            metrics = run(experiment, model=model, **p).metrics
            for name, value in bill(model, p).items():
                assert metrics[name] == pytest.approx(value, rel=1e-12), (model, p, name)  # sums of doubles
    turning = int(run(experiment).metrics["compute_bound_from_tokens"])
    ratios = [
        run(experiment, phase="prefill", seq_len=n).metrics["linear_memory_over_compute"]
        for n in (turning - 1, turning)
    ]
    assert ratios[1] <= 1 < ratios[0]
    metrics = run(experiment, phase="prefill", seq_len=2048).metrics
    assert metrics["pass_over_two_n"] == pytest.approx(
        metrics["pass_bound_ms"] / (2e3 * 8_030_261_248 * 2048 / P), rel=1e-12
    )
    # nothing but the head, which has one row, and what is looked up waits for memory there
    assert 0.98 < metrics["compute_bound_share"] < 1
    assert run(experiment, phase="prefill", seq_len=16).metrics["compute_bound_share"] == 0


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1, *dtypes), P, B) > 1:", "1, *dtypes), P, B) > 2:"),
        ("per_token = written / 2", "per_token = written"),
        ("if w.compute_s(P) > w.memory_s(B))", "if w.compute_s(P) < w.memory_s(B))"),
        ("tokens = params.batch * q_len", "tokens = q_len"),
        ("P, B = params.matmul_tflop_per_s * 1e12, params.memory_gb_per_s * 1e9", "P, B = 989e12, 3350e9"),
        ('"memory_over_compute": _memory_over_compute(works', '"memory_over_compute": _memory_over_compute(linear'),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 5, 5), (3, 1, 7), (1, 4, 9)])
def test_a_layer_that_really_runs_takes_as_many_operations(batch, q_len, kv_len):
    """One small layer in torch: products counted by torch, and the pairs that a causal mask keeps."""
    shape = SHAPES["llama_3_8b"]
    tiny = type(shape)("", 1, 32, 4, 2, 8, 48, 40)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, q_len, 32, generator=generator)
    past = torch.randn(2, batch, 2, kv_len - q_len, 8, generator=generator)
    W = [torch.randn(*size, generator=generator) for size in ((32, 32), (16, 32), (16, 32), (32, 32))]
    up, gate, down = (torch.randn(48, 32, generator=generator) for _ in range(3))
    head = torch.randn(40, 32, generator=generator)
    with FlopCounterMode(display=False) as linear:
        q, k, v = (x @ w.mT for w in W[:3])
        x = x + q @ W[3].mT
        x = x + (torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)) @ down
        x[:, -1] @ head.mT
    k, v = (
        torch.cat((old, new.unflatten(-1, (2, 8)).transpose(1, 2)), 2) for old, new in zip(past, (k, v), strict=True)
    )
    with FlopCounterMode(display=False) as attention:
        scores = q.unflatten(-1, (4, 8)).transpose(1, 2) @ k.repeat_interleave(2, 1).mT
        _ = scores @ v.repeat_interleave(2, 1)
    kept = torch.ones(q_len, kv_len).tril(kv_len - q_len).mean().item()
    works = pass_work(
        tiny,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        weight_dtype=torch.float32,
        cache_dtype=torch.float32,
        activation_dtype=torch.float32,
    )
    flop = {part: sum(work.flop for work in works if work.part == part) for part in (LINEAR, ATTENTION)}
    assert flop[LINEAR] == linear.get_total_flops()
    assert flop[ATTENTION] == round(kept * attention.get_total_flops())
    cache = sum(work.cache_bytes for work in works)
    assert cache == k.nbytes + v.nbytes + 2 * batch * 2 * q_len * 8 * 4  # all read, the new ones written


def test_models_are_those_that_the_count_fits():
    assert {"llama_3_8b", "llama_2_7b", "llama_3_70b"} <= set(PLAIN_SHAPES)
    assert not {"mistral_7b", "gemma_3_27b", "deepseek_v3"} & set(PLAIN_SHAPES)


def test_refuses_more_new_tokens_than_the_sequence_has():
    with pytest.raises(ParamsError, match=r"new_within_sequence.*'seq_len': 16"):
        get(NAME).Params(seq_len=16, tokens_per_step=32)
    get(NAME).Params(seq_len=16, tokens_per_step=32, phase="prefill")


def test_charts_show_the_chosen_pass():
    result = run(get(NAME), batch=24, seq_len=3000)
    table = result.tables["by_batch"]
    whole = (table["batch"] == 24) & (table["pass_part"] == "decode_pass")
    assert table["part_time_ms"][whole] == pytest.approx(result.metrics["pass_bound_ms"], rel=1e-12)
    table = result.tables["throughput"]
    chosen = (table["batch"] == 24) & (table["kv_len"] == 3000)
    assert table["tokens_per_s"][chosen] == pytest.approx(result.metrics["tokens_per_s"], rel=1e-12)
    prefill = run(get(NAME), phase="prefill", seq_len=3000)
    table = prefill.tables["by_prompt"]
    chosen = (table["prompt_len"] == 3000) & (table["estimate"] == "least_time")
    assert table["first_pass_ms"][chosen] == pytest.approx(prefill.metrics["pass_bound_ms"], rel=1e-12)
    table = result.tables["by_tokens"]
    chosen = (table["tokens_in_pass"] == 24) & (table["pass_part"] == "decode_pass")
    metrics = result.metrics
    moved = metrics["weight_read_bytes"] + metrics["cache_moved_bytes"] + metrics["activation_bytes"]
    assert table["flop_per_byte"][chosen] == pytest.approx(24 * metrics["flop_per_token"] / moved, rel=1e-12)
    assert (table["turning_flop_per_byte"] == P / B).all()
