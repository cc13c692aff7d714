"""length_growth against whole blocks that run under PyTorch's own counter, and masks that are laid out in full."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.masks import keep_named
from engine.model_shapes import SHAPES
from engine.registry import Experiment, get
from engine.transformer_block import DecoderSizes, block, block_shapes
from tests.harness import assert_law_catches, run

NAME = "length_growth"


def counted_block(model: str, n: int) -> int:
    """Operations of one whole block of that model over n tokens, all pairs computed."""
    s = SHAPES[model]
    sizes = DecoderSizes(s.n_layers, s.d_model, s.n_heads, s.n_kv_heads, s.d_k, s.d_ff, s.vocabulary)
    weights = {name: torch.empty(shape, device="meta") for name, shape in block_shapes(sizes).items()}
    with FlopCounterMode(display=False) as flops:
        block(weights, sizes, torch.empty(1, n, s.d_model, device="meta"), None)
    return flops.get_total_flops()


def pairs_in_tiles(n: int, tile: int, window: int) -> int:
    """Pairs of all tiles in which the mask keeps one, from the mask itself."""
    keep = keep_named("window" if window else "causal", n, n, window=window or 1, prefix_len=1, document_len=1)
    return sum(
        rows.shape[0] * rows[:, start : start + tile].shape[1]
        for rows in keep.split(tile)
        for start in range(0, n, tile)
        if rows[:, start : start + tile].any()
    )


def law(experiment: Experiment) -> None:
    for model in ("llama_2_7b", "qwen3_4b"):
        layers, heads, d_k = SHAPES[model].n_layers, SHAPES[model].n_heads, SHAPES[model].d_k
        for n in (128, 512):
            m = run(experiment, model=model, seq_len=n).metrics
            once, twice = layers * counted_block(model, n), layers * counted_block(model, 2 * n)
            assert m["sequence_flop"] == once
            assert m["growth_when_doubled"] == twice / once
            assert m["growth_when_doubled"] == pytest.approx(2 * (1 + m["attention_share"]), rel=1e-12)  # rounding
            assert m["attention_share"] == pytest.approx(layers * 4 * n * n * heads * d_k / once, rel=1e-12)
            assert m["next_token_flop"] == once / n  # the mean token of a sequence that computes all pairs
        a = m["projection_flop_per_token"] + m["ffn_flop_per_token"]
        assert m["layers_crossover_tokens"] == a / (layers * 4 * heads * d_k)  # whole numbers in these models
        assert m["projections_crossover_tokens"] == m["projection_flop_per_token"] / (layers * 4 * heads * d_k)
    skipping = {"attention_kernel": "skipping", "tile": 16, "seq_len": 200}
    for mix, windowed, full, linear in (
        ("layers_as_published", 21, 21, 0),
        ("all_layers_full", 0, 42, 0),
        ("one_in_six_full", 35, 7, 0),
        ("one_in_four_full", 0, 10, 32),
    ):
        m = run(experiment, model="gemma_2_9b", full_attention_in=mix, window=128, **skipping).metrics
        window = 128 if mix == "one_in_six_full" else 4096
        pairs = full * pairs_in_tiles(200, 16, 0) + windowed * pairs_in_tiles(200, 16, window)
        wanted = 16 * (4 * 256 * pairs + linear * 200 * 4 * 256 * 256)  # heads; q·k and weights·v; k vᵀ and q·state
        assert m["attention_flop_per_token"] == wanted / 200, mix
        keys = full * 200 + windowed * min(200, window)
        step = 16 * (4 * 256 * keys + linear * 4 * 256 * 256)
        assert m["next_token_attention_share"] == pytest.approx(step / m["next_token_flop"], rel=1e-12), mix
        assert m["next_token_flop"] - step == m["projection_flop_per_token"] + m["ffn_flop_per_token"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n * (self.projections + self.ffn) + self.attention(n)", "n * self.projections + self.attention(n)"),
        ("lambda: q @ k.mT @ v)", "lambda: q @ k.mT)"),  # the second product forgotten
        ('weight if name == "ffn" else (weight,)', 'weight[:2] if name == "ffn" else (weight,)'),  # a plain FFN
        ("starts - window + 1", "starts - window - tile"),
        ("stops - oldest // tile * tile", "n - oldest // tile * tile"),  # tiles of the future not skipped
        ("full = total // 6", "full = total // 5"),
        ("min(n, layers.window or n)", "n"),
        ("self.attention(middle) < flop_per_token * middle", "self.attention(middle) < flop_per_token"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_model_of_windows_alone_never_crosses():
    m = run(get(NAME), model="mistral_7b", attention_kernel="skipping").metrics
    assert m["layers_crossover_tokens"] == m["projections_crossover_tokens"] == 2**22
    assert run(get(NAME), model="mistral_7b", attention_kernel="skipping", seq_len=65536).metrics[
        "growth_when_doubled"
    ] == pytest.approx(2, rel=0.01)  # the first window is still filling: 4096 of 65536 tokens


def test_the_mean_token_of_a_skipping_kernel_never_gets_cheaper():
    """What the search by halving rests on."""
    shares = [
        run(get(NAME), attention_kernel="skipping", tile=128, seq_len=n, full_attention_in=mix, window=256).metrics[
            "attention_flop_per_token"
        ]
        for mix in ("layers_as_published", "one_in_six_full")
        for n in range(128, 900, 7)
    ]
    per_mix = len(shares) // 2
    for curve in (shares[:per_mix], shares[per_mix:]):
        assert all(later >= earlier * (1 - 1e-12) for earlier, later in itertools.pairwise(curve))
