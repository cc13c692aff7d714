"""cache_size and engine/model_shapes.py against published numbers of parameters and the bytes of a cache by hand."""

import math

import pytest
import torch

from engine.base import ParamsError
from engine.experiments import cache_size
from engine.model_shapes import SHAPES, cached, weights
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run
from tests.released_parameters import RELEASED_PARAMETERS

NAME = "cache_size"
# key and value numbers of one token in one layer, layers that see all tokens, layers of a window, the window
NUMBERS = {
    "llama_2_7b": (2 * 32 * 128, 32, 0, 0),
    "llama_2_70b": (2 * 8 * 128, 80, 0, 0),
    "llama_3_8b": (2 * 8 * 128, 32, 0, 0),
    "llama_3_70b": (2 * 8 * 128, 80, 0, 0),
    "mistral_7b": (2 * 8 * 128, 0, 32, 4096),
    "qwen2_5_7b": (2 * 4 * 128, 28, 0, 0),
    "qwen3_4b": (2 * 8 * 128, 36, 0, 0),
    "gemma_2_9b": (2 * 8 * 256, 21, 21, 4096),
    "gemma_3_27b": (2 * 16 * 128, 10, 52, 1024),
    "deepseek_v2": (512 + 64, 60, 0, 0),
    "deepseek_v3": (512 + 64, 61, 0, 0),
}
BYTES = {"bfloat16": 2, "float32": 4, "float8": 1}


@pytest.mark.parametrize(("model", "count"), [item for item in RELEASED_PARAMETERS.items() if item[0] in SHAPES])
def test_the_shapes_have_the_published_parameters(model, count):
    assert sum(n * tensor.numel() for _, n, tensor in weights(SHAPES[model], torch.bfloat16)) == count


@pytest.mark.parametrize(("model", "billions"), [("deepseek_v2", 236), ("deepseek_v3", 671)])
def test_mixtures_have_the_parameters_of_their_name(model, billions):
    count = sum(n * tensor.numel() for _, n, tensor in weights(SHAPES[model], torch.bfloat16))
    assert round(count / 1e9) == billions


def test_weights_are_divided_among_gpus_but_for_what_all_heads_need():
    whole = {name: tensor.numel() for name, _, tensor in weights(SHAPES["llama_3_8b"], torch.bfloat16)}
    for n_gpus in (2, 8, 16):
        for name, _, tensor in weights(SHAPES["llama_3_8b"], torch.bfloat16, n_gpus):
            parts = 1 if "norm" in name else min(n_gpus, 8) if name in ("W_k", "W_v") else n_gpus
            assert tensor.numel() * parts == whole[name], (n_gpus, name)


def law(experiment: Experiment) -> None:
    for model, (numbers, n_whole, n_window, window) in NUMBERS.items():
        for p in (
            {"seq_len": 1000},
            {"seq_len": 16384, "batch": 3, "cache_dtype": "float32"},
            {"seq_len": 16384, "window_kept": False, "cache_dtype": "float8"},
            {"seq_len": 8192, "cache_dtype": "int8", "group_size": 32},
            {"seq_len": 8192, "cache_dtype": "int4", "group_size": 64, "zero_point": True},
        ):
            metrics = run(experiment, model=model, **p).metrics
            kept = min(p["seq_len"], window) if p.get("window_kept", True) else p["seq_len"]
            tokens = p.get("batch", 1) * (n_whole * p["seq_len"] + n_window * kept)
            dtype = p.get("cache_dtype", "bfloat16")
            if dtype in BYTES:
                expected = tokens * numbers * BYTES[dtype]
            else:  # the integers, and two bytes for each scale or zero point
                side = 2 * (2 if p.get("zero_point") else 1)
                expected = tokens * numbers * (int(dtype[3:]) / 8 + side / p["group_size"])
            assert metrics["model_cache_bytes"] == expected, (model, p)
            assert metrics["kv_stored_bits"] == 8 * expected / (tokens * numbers), (model, p)
            fits = (0.9 * 80 * 2**30 - metrics["model_bytes"]) / (expected / p.get("batch", 1))
            assert metrics["max_batch"] == max(0, math.floor(fits)), (model, p)
    for n_gpus in (1, 4, 16):  # each GPU has the heads of its share, at least one, and a whole latent
        m = run(experiment, model="llama_3_70b", n_gpus=n_gpus).metrics
        assert m["model_cache_bytes"] == 80 * 4096 * max(1, 8 // n_gpus) * 2 * 128 * 2
        assert m["kv_copies"] == max(1, n_gpus / 8)
        assert run(experiment, model="deepseek_v3", n_gpus=n_gpus).metrics["kv_copies"] == n_gpus
    qwen = run(experiment, model="qwen3_4b", seq_len=1).metrics
    assert qwen["query_heads_cache_bytes"] == 36 * 2 * 32 * 128 * 2
    assert qwen["hidden_size_cache_bytes"] == 36 * 2 * 2560 * 2
    assert qwen["split_width_cache_bytes"] == 36 * 2 * 8 * 80 * 2
    deepseek = run(experiment, model="deepseek_v3", seq_len=1).metrics
    assert deepseek["query_heads_cache_bytes"] == 61 * 128 * (192 + 128) * 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("whole + (n_window and n_window *", "whole + (n_window and"),  # one layer of a window, not all
        ("n_gpus, 0)\n    return", "n_gpus, shape.window)\n    return"),  # global layers cut as well
        ("(integers, *(side if zero_point else side[:1]))", "(integers,)"),  # scales forgotten
        ("integers[..., 0::2] | integers[..., 1::2] << 4", "integers"),  # four bits in a byte of their own
        ("kv_rank=0, n_kv_heads=shape.n_heads)", "kv_rank=0)"),  # latents are not expanded to heads that are shared
        ("(usable - model_bytes) // one", "usable // one"),
        ("params.n_gpus * several / alone", "several / alone"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_decode_step_can_read_what_is_kept():
    """The cache is enough: one query of every head attends to it, and nothing of it is left out."""
    shape = SHAPES["llama_3_8b"]
    x = torch.empty(2, 100, shape.d_model, device="meta")
    k, v = cached(shape, x)
    q = torch.empty(2, shape.n_heads, 1, shape.d_k, device="meta")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert out.shape == (2, shape.n_heads, 1, shape.d_k)
    k, v = cached(shape, x, window=30)
    assert k.shape[-2] == v.shape[-2] == 30
    assert k.untyped_storage().nbytes() == k.nbytes  # not a view of all tokens


def test_quantized_numbers_can_be_read_back():
    x = torch.randn(256, generator=torch.Generator().manual_seed(1))
    for bits, zero_point in ((8, False), (8, True), (4, False), (4, True)):
        integers, scale, *zero = cache_size._quantize(x, bits, 32, zero_point)
        if bits == 4:
            integers = torch.stack((integers & 15, integers >> 4), -1).flatten(-2)
        step = scale.float().repeat_interleave(32)
        lowest = zero[0].float().repeat_interleave(32) if zero else -step * (2**bits - 1) / 2
        # half a step, and the rounding of scale and zero point to float16: 2^-11 of the range on each
        bound = step / 2 + 2**-10 * step * 2**bits
        assert ((integers.float() * step + lowest - x).abs() <= bound).all(), (bits, zero_point)


def test_refuses_gpus_that_cannot_share_the_heads():
    with pytest.raises(ParamsError, match=r"gpus_divide_heads.*'n_heads': 28"):
        get(NAME).Params(model="qwen2_5_7b", n_gpus=8)
    with pytest.raises(ParamsError, match=r"gpus_share_kv_heads.*'n_kv_heads': 4"):
        get(NAME).Params(model="qwen2_5_7b", n_gpus=7)
