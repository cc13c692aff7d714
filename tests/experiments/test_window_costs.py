"""window_costs against the formulas of bytes and operations, in whole numbers."""

import pytest

from engine.base import ParamsError
from engine.model_shapes import SHAPES
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "window_costs"
SETTINGS = [
    {"model": "gemma_3_27b", "seq_len": 131072},
    {"model": "gemma_2_9b", "seq_len": 8192},
    {"model": "mistral_7b", "seq_len": 5000},
    {"model": "mistral_7b", "seq_len": 100},
    {"model": "llama_3_8b", "layer_mix": "set_here", "window": 512, "global_every": 4, "seq_len": 3000},
    {"model": "llama_3_8b", "layer_mix": "set_here", "window": 512, "global_every": 5, "seq_len": 3000},
    {"model": "gemma_3_27b", "layer_mix": "set_here", "window": 512, "global_every": 0, "seq_len": 3000},
    {"model": "gemma_2_9b", "layer_mix": "set_here", "window": 512, "global_every": 1, "seq_len": 3000},
]


def bill(p: dict, n_global: int, window: int, n: int) -> tuple[int, int, int]:
    """Bytes, operations of attention, operations of the matrices."""
    s = SHAPES[p["model"]]
    w = min(window, n)
    kept = n_global * n + (s.n_layers - n_global) * w
    pairs = n_global * n * (n + 1) // 2 + (s.n_layers - n_global) * (n * w - w * (w - 1) // 2)
    per_layer = s.d_model * s.d_k * (2 * s.n_heads + 2 * s.n_kv_heads) + 3 * s.d_model * s.d_ff
    return (
        2 * 2 * s.n_kv_heads * s.d_k * kept,  # k and v, two bytes a number
        4 * s.n_heads * s.d_k * pairs,  # two products, two operations for a multiply-add
        2 * n * s.n_layers * per_layer,
    )


def n_global_layers(p: dict) -> int:
    n_layers = SHAPES[p["model"]].n_layers
    if p.get("layer_mix") != "set_here":
        return {"gemma_3_27b": 10, "gemma_2_9b": 21, "mistral_7b": 0}[p["model"]]
    return n_layers // p["global_every"] if p["global_every"] else 0


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        result, n = run(experiment, **p), p["seq_len"]
        shape = SHAPES[p["model"]]
        window, n_global = p.get("window", shape.window), n_global_layers(p)
        mixed, whole = bill(p, n_global, window, n), bill(p, shape.n_layers, window, n)
        assert result.metrics == {
            "cache_share_of_global": mixed[0] / whole[0],
            "global_layers_cache_share": n_global / shape.n_layers * whole[0] / mixed[0],
            "mixed_cache_bytes": mixed[0],
            "attention_flop_share": mixed[1] / whole[1],
            "windows_prefill_flop_share": sum(mixed[1:]) / sum(whole[1:]),
            "attention_part_of_prefill": mixed[1] / sum(mixed[1:]),
        } | {"global_layers_cache_share": pytest.approx(n_global / shape.n_layers * whole[0] / mixed[0])}, p
        table = result.tables["by_length"]
        at = (table["seq_len"] == 16384) & (table["window_layers"] == "mixed_layers")
        long = bill(p, n_global, window, 16384)
        assert table["cache_gib"][at] == pytest.approx([long[0] / 2**30])
        assert table["attention_flop_part"][at] == pytest.approx([long[1] / sum(long[1:])])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(at - window + 1).clamp_min(0)", "(at - window).clamp_min(0)"),
        ("n == period - 1) for n", "n == 0) for n"),
        ("_layer_bytes(shape, seq_len, shape.window)", "_layer_bytes(shape, seq_len, 0)"),
        ("torch.bmm(torch.bmm(q, k.mT), v)", "torch.bmm(q, k.mT)"),
        ('and name != "ffn"', ""),
        ("seq_len * _matrix_flop(shape)", "_matrix_flop(shape)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_short_texts_cost_what_they_cost_without_a_window():
    metrics = run(get(NAME), model="mistral_7b", seq_len=4096).metrics
    assert metrics["cache_share_of_global"] == metrics["attention_flop_share"] == 1


def test_a_model_without_a_window_must_be_given_its_layers():
    with pytest.raises(ParamsError, match="model_without_window"):
        get(NAME).Params(model="llama_3_8b")
