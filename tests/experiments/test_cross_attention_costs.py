"""cross_attention_costs against a count by hand."""

import itertools

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "cross_attention_costs"
S, P, G, L, C, H, KV, D, DS, B = 20, 5, 4, 3, 2, 4, 2, 64, 48, 3
SIZES = {
    "source_len": S,
    "prompt_len": P,
    "new_tokens": G,
    "n_layers": L,
    "n_cross_layers": C,
    "n_heads": H,
    "n_kv_heads": KV,
    "d_model": D,
    "d_source": DS,
    "n_beams": B,
}
WIDTH = D * KV // H  # of the keys of a token


def text_flop(batch: int, rows: int, length: int) -> int:
    """Layers of self-attention and FFN."""
    return 2 * L * batch * rows * (2 * D * D + 2 * D * WIDTH + 8 * D * D + 2 * length * D)


def asking(batch: int, rows: int, ffn: bool) -> int:
    return 2 * C * batch * rows * (2 * D * D + 2 * S * D + (8 * D * D if ffn else 0))


def law(experiment: Experiment) -> None:
    making = 2 * C * S * 2 * DS * WIDTH
    for kv, layout, ffn in itertools.product(
        ("made_once", "made_each_pass"), ("one_for_all_beams", "one_a_beam"), (False, True)
    ):
        metrics = run(experiment, cross_kv=kv, beam_layout=layout, cross_ffn=ffn, **SIZES).metrics
        lengths = range(P + 1, P + G)
        once = sum(text_flop(B, 1, n) + asking(B, 1, ffn) for n in lengths)
        again = once + len(lengths) * making
        last = text_flop(B, 1, P + G - 1) + asking(B, 1, ffn) + (making if kv == "made_each_pass" else 0)
        first_cross = text_flop(1, P, P) + asking(1, P, ffn) + making
        first_prefix = text_flop(1, S + P, S + P) + 2 * S * DS * D
        copies = B if layout == "one_a_beam" else 1
        source, text = 2 * copies * S * WIDTH * 2, 2 * L * B * (P + G - 1) * WIDTH * 2
        added = C * (2 * D * D + 2 * DS * WIDTH + (8 * D * D if ffn else 0))
        assert metrics == pytest.approx(
            {
                "recomputing_flop_ratio": again / once,
                "cross_cache_bytes": C * source,
                "self_cache_bytes": text,
                "source_cache_ratio": L / C,
                "first_pass_flop_ratio": first_prefix / first_cross,
                "last_step_flop_ratio": text_flop(B, 1, S + P + G - 1) / last,
                "cross_read_share": C * source / (C * source + text),
                "cross_kv_flop": making,
                "steps_flop": again if kv == "made_each_pass" else once,
                "prefix_cache_bytes": L * source + text,
                "added_parameters": added,
                "prefix_added_parameters": DS * D,
                "decoder_weight_bytes": 2 * (L * (2 * D * D + 2 * D * WIDTH + 8 * D * D) + added),
            },
            rel=1e-12,  # counts below 2**53, and quotients of them
        ), (kv, layout, ffn)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "_asking_flop(params, sizes, params.n_beams, 1, params.source_len)",
            "_asking_flop(params, sizes, 1, 1, params.source_len)",
        ),
        (
            "params.n_cross_layers * 2 * _product_flop(source_len, params.d_source",
            "params.n_layers * 2 * _product_flop(source_len, params.d_source",
        ),
        (
            "2 * _product_flop(source_len, params.d_source, kv_width)",
            "2 * _product_flop(source_len, params.d_model, kv_width)",
        ),
        ("length = source_len + params.prompt_len", "length = source_len"),
        ('if params.beam_layout == "one_a_beam" else 1', 'if params.beam_layout == "one_for_all_beams" else 1'),
        ("prefix=params.n_layers * source", "prefix=params.n_cross_layers * source"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_curves_agree_with_the_metrics():
    result = run(get(NAME), **SIZES)
    table = result.tables["by_step"]
    cached = table["step_flop"][table["reading"] == "cross_cached"]
    assert cached.sum() == result.metrics["steps_flop"]
    first = result.tables["by_source"]
    at_full = first["source_len"] == S
    prefix, cross = (
        first["first_pass_flop"][at_full & (first["reading"] == name)][0]
        for name in ("source_as_prefix", "cross_cached")
    )
    assert np.isclose(prefix / cross, result.metrics["first_pass_flop_ratio"], rtol=1e-12)  # quotient of whole numbers


def test_refuses_more_reading_layers_than_layers():
    with pytest.raises(ParamsError, match="cross_among_layers"):
        get(NAME).Params(n_layers=4, n_cross_layers=5)


def test_a_step_reads_no_matrices_of_keys_that_are_held():
    read = {}
    for cross_kv in ("made_once", "made_each_pass"):
        table = run(get(NAME), cross_kv=cross_kv).tables["bytes"]
        read[cross_kv] = table["step_bytes"][table["bytes_of"] == "weights"][-1]
    params = get(NAME).Params()
    pair = 2 * params.d_source * params.d_model  # as many KV heads as heads
    assert read["made_each_pass"] - read["made_once"] == 2 * params.n_cross_layers * pair
