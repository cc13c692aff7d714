"""layer_roofline against a bill by hand, and against a small layer that really runs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.base import ParamsError
from engine.model_shapes import PLAIN_SHAPES, SHAPES
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "layer_roofline"
SETTINGS = [
    {"batch": 1, "seq_len": 1024},
    {"batch": 48, "seq_len": 3000, "cache_dtype": "float8", "n_kv_heads": 4},
    {"batch": 512, "seq_len": 512, "weight_dtype": "float8", "elementwise_path": "inside_kernels"},
    {"batch": 3, "seq_len": 700, "tokens_per_step": 64},
    {"batch": 6, "seq_len": 2000, "tokens_per_step": 3, "shared_prefix_len": 1536},
    {"batch": 5, "seq_len": 640, "logits_path": "stored_logits", "cache_dtype": "float8"},
    {"phase": "prefill", "seq_len": 1500, "batch": 2},
    {"phase": "prefill", "seq_len": 800, "batch": 2, "logits_path": "stored_logits", "model": "qwen3_4b"},
    {"batch": 1024, "seq_len": 4096, "matmul_tflop_per_s": 312, "memory_gb_per_s": 2039},
]


def bill(p: dict) -> dict[str, tuple[float, float]]:
    """Operations and bytes of each kernel, in all its layers: as on a whiteboard."""
    s = SHAPES[p.get("model", "llama_3_8b")]
    B, n, g, d, D = p["batch"], p["seq_len"], p.get("n_kv_heads", 8), s.d_k, s.d_model
    new = n if p.get("phase") == "prefill" else p.get("tokens_per_step", 1)
    T, L, h = B * new, s.n_layers, s.n_heads
    size = {"bfloat16": 2, "float8": 1}
    weight, cache = size[p.get("weight_dtype", "bfloat16")], size[p.get("cache_dtype", "bfloat16")]

    def product(rows: int, wide: int, k: int, times: int) -> tuple[float, float]:
        return times * 2 * rows * wide * k, times * (weight * wide * k + 2 * rows * (wide + k))

    found = {
        "qkv_kernel": product(T, (h + 2 * g) * d, D, L),
        "output_kernel": product(T, D, h * d, L),
        "up_gate_kernel": product(T, 2 * s.d_ff, D, L),
        "down_kernel": product(T, D, s.d_ff, L),
        "head_kernel": product(B, s.vocabulary, D, 1),
    }
    if p.get("elementwise_path") != "inside_kernels":
        norms = s.norms_per_layer * L + 1
        # square, sum, two products for each number; mean, ε and the root for each row
        found["norm_kernel"] = norms * (4 * T * D + 3 * T), norms * (4 * T * D + 2 * D)
        found["residual_kernel"] = 2 * L * T * D, 2 * L * 6 * T * D
        found["activation_kernel"] = L * 2 * T * s.d_ff, L * 6 * T * s.d_ff
    pairs, prefix = B * sum(n - new + i + 1 for i in range(new)), p.get("shared_prefix_len", 0)
    if p.get("logits_path") == "stored_logits":
        logits = B * h * new * n
        found["qk_kernel"] = L * 2 * logits * d, L * (2 * B * h * new * d + cache * B * g * n * d + 2 * logits)
        found["softmax_kernel"] = L * 5 * logits, L * 4 * logits  # maximum, difference, exponential, sum, quotient
        found["sum_kernel"] = found["qk_kernel"]
    elif prefix:
        through = B * h * new * (2 * d + 4 * (d + 1))  # a query in, a partial output and its logarithm out
        found["prefix_kernel"] = L * 4 * h * d * T * prefix, L * (through + 2 * cache * g * prefix * d)
        found["attention_core"] = (
            L * 4 * h * d * (pairs - T * prefix),
            L * (through + 2 * cache * B * g * (n - prefix) * d),
        )
        found["merge_kernel"] = L * B * h * new * (3 * d + 2), L * B * h * new * (2 * 4 * (d + 1) + 2 * d)
    else:
        found["attention_core"] = L * 4 * h * d * pairs, L * (4 * B * h * new * d + 2 * cache * B * g * n * d)
    return found


def share(values: dict[str, float], names: tuple[str, ...]) -> float:
    return sum(value for name, value in values.items() if name in names) / sum(values.values())


LINEAR = ("qkv_kernel", "output_kernel", "up_gate_kernel", "down_kernel")
ATTENTION = ("attention_core", "prefix_kernel", "qk_kernel", "softmax_kernel", "sum_kernel", "merge_kernel")
ELEMENTWISE = ("norm_kernel", "residual_kernel", "activation_kernel")


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, kernels = run(experiment, **p), bill(p)
        metrics = result.metrics
        P, B = p.get("matmul_tflop_per_s", 989) * 1e12, p.get("memory_gb_per_s", 3350) * 1e9
        flop, moved = ({name: pair[i] for name, pair in kernels.items()} for i in (0, 1))
        time_s = {name: max(flop[name] / P, moved[name] / B) for name in kernels}
        table = result.tables["kernels"]
        drawn = dict(zip(table["kernel_name"], table["kernel_flop_per_byte"].tolist(), strict=True))
        assert set(drawn) == {*kernels, "roofline"}
        for name in kernels:
            assert drawn[name] == pytest.approx(flop[name] / moved[name], rel=1e-12), (p, name)

        def intensity(names: tuple[str, ...], flop: dict = flop, moved: dict = moved) -> float:
            return sum(flop[n] for n in names if n in flop) / sum(moved[n] for n in names if n in moved)

        attention_s = sum(time_s[name] for name in ATTENTION if name in time_s)
        attention_flop = sum(flop[name] for name in ATTENTION if name in flop)
        separate, stored = (
            bill(p | {"elementwise_path": "separate_kernels"}),
            bill(p | {"logits_path": "stored_logits"}),
        )
        whole_s = max(sum(flop.values()) / P, sum(moved.values()) / B)
        expected = {
            "linear_flop_per_byte": intensity(LINEAR),
            "attention_core_flop_per_byte": intensity(ATTENTION),
            "given_ridge_flop_per_byte": P / B,
            "attention_peak_share": attention_flop / attention_s / P,
            "elementwise_flop_per_byte": sum(separate[n][0] for n in ELEMENTWISE)
            / sum(separate[n][1] for n in ELEMENTWISE),
            "stored_qk_flop_per_byte": stored["qk_kernel"][0] / stored["qk_kernel"][1],
            "pass_flop_per_byte": sum(flop.values()) / sum(moved.values()),
            "kernels_bound_ms": 1e3 * sum(time_s.values()),
            "averaged_over_kernels": whole_s / sum(time_s.values()),
            "memory_bound_time_share": share(time_s, tuple(n for n in kernels if flop[n] / P < moved[n] / B)),
            "attention_time_share": share(time_s, ATTENTION),
            "elementwise_time_share": share(time_s, ELEMENTWISE),
            "elementwise_flop_share": share({n: pair[0] for n, pair in separate.items()}, ELEMENTWISE),
            "attention_moved_bytes": sum(moved[n] for n in ATTENTION if n in moved),
            "kernels_flop": sum(flop.values()),
        }
        assert set(expected) == set(metrics)
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-12), (p, name)  # sums of a dozen doubles
        shares = result.tables["shares"]
        for kind, values in (("share_of_flop", flop), ("share_of_bytes", moved), ("share_of_time", time_s)):
            for name in kernels:
                row = (shares["share_of"] == kind) & (shares["kernel_name"] == name)
                assert shares["share_of_pass"][row] == pytest.approx(share(values, (name,)), rel=1e-12), (p, name)
        by_batch = result.tables["by_batch"]
        row = (by_batch["batch"] == p["batch"]) & (by_batch["kernel_name"] == "attention_core")
        assert by_batch["kernel_flop_per_byte"][row] == pytest.approx(intensity(ATTENTION), rel=1e-12), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('[W["W_q"], W["W_k"], W["W_v"]]', '[W["W_q"]]'),  # k and v forgotten
        ("_q_len(params), batch, params.weight_dtype", "_q_len(params), batch * _q_len(params), params.weight_dtype"),
        ("n_kv_heads=params.n_kv_heads)", "n_kv_heads=SHAPES[params.model].n_heads)"),  # keys read for every head
        ("cache(1, prefix)", "cache(batch, prefix)"),  # everyone reads the prefix
        ("batch * (seen - q_len * prefix)", "batch * seen"),
        ("torch.arange(kv_len - q_len + 1, kv_len + 1)", "torch.full((q_len,), kv_len)"),  # no causal mask
        ("2 * q.nbytes + cache(batch, kv_len).nbytes", "cache(batch, kv_len).nbytes"),
        ('"softmax_kernel": ([logits]', '"softmax_kernel": ([]'),
        ("times=2 * layers", "times=layers"),
        ("whole.time_s(P, B) / time_s", "time_s / time_s"),
        ("if one.flop_per_byte < P / B)", "if one.flop_per_byte > P / B)"),
        ("_weights(shape, weight_dtype)", '_weights(shape, "bfloat16")'),  # 8-bit weights read as 16
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(2, 5, 5), (3, 1, 7), (1, 4, 9)])
def test_a_layer_that_really_runs_takes_as_many_operations(batch, q_len, kv_len):
    """One small layer in torch, counted by torch, against the kernels of a model of that shape."""
    from engine.experiments import layer_roofline

    tiny = type(SHAPES["llama_3_8b"])("", 1, 32, 4, 2, 8, 48, 40)
    x = torch.ones(batch * q_len, 32)
    W = [torch.ones(*size) for size in ((64, 32), (32, 32), (96, 32), (32, 48))]
    q, k = torch.ones(batch, 2, 2 * q_len, 8), torch.ones(batch, 2, kv_len, 8)
    counted = {}
    for name, work in {
        "qkv_kernel": lambda: x @ W[0].mT,
        "output_kernel": lambda: x @ W[1].mT,
        "up_gate_kernel": lambda: x @ W[2].mT,
        "down_kernel": lambda: torch.ones(batch * q_len, 48) @ W[3].mT,
        "head_kernel": lambda: torch.ones(batch, 32) @ torch.ones(40, 32).mT,
        "qk_kernel": lambda: q @ k.mT,
        "sum_kernel": lambda: torch.ones(batch, 2, 2 * q_len, kv_len) @ k,
    }.items():
        with FlopCounterMode(display=False) as flops:
            work()
        counted[name] = flops.get_total_flops()
    kernels = layer_roofline._linear(tiny, batch * q_len, batch, "bfloat16", False)
    kernels += layer_roofline._stored(tiny, batch, q_len, kv_len, "bfloat16")
    assert {one.name: one.products for one in kernels if one.products} == counted
    (fused,) = layer_roofline._fused(tiny, batch, q_len, kv_len, 0, "bfloat16")
    kept = torch.ones(q_len, kv_len).tril(kv_len - q_len).mean().item()  # of the pairs, by the mask
    assert fused.flop == round(kept * (counted["qk_kernel"] + counted["sum_kernel"]))


def test_a_prefix_that_is_shared_changes_no_operation_of_attention():
    """The pairs are split up among two kernels; only the merging comes on top."""
    p = {"batch": 8, "seq_len": 1024, "elementwise_path": "inside_kernels"}
    plain, split = run(get(NAME), **p), run(get(NAME), shared_prefix_len=768, **p)
    merging = 32 * 8 * 32 * (3 * 128 + 2)  # layers, sequences, heads; three operations a number, two a row
    assert split.metrics["kernels_flop"] - plain.metrics["kernels_flop"] == merging


def test_models_are_those_that_the_count_fits():
    assert {"llama_3_8b", "llama_2_7b", "llama_3_70b"} <= set(PLAIN_SHAPES)
    assert not {"mistral_7b", "gemma_3_27b", "deepseek_v3"} & set(PLAIN_SHAPES)


def test_refuses_what_a_pass_can_not_be():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match=r"new_within_sequence.*'seq_len': 16"):
        params(seq_len=16, tokens_per_step=32)
    with pytest.raises(ParamsError, match=r"prefix_is_cached.*'room': 1023"):
        params(seq_len=1024, shared_prefix_len=1024)
    with pytest.raises(ParamsError, match=r"groups_divide_heads.*'n_heads': 28"):
        params(model="qwen2_5_7b")
    params(seq_len=16, tokens_per_step=32, shared_prefix_len=1024, phase="prefill")
