"""decoding_costs against a count by hand."""

import itertools

import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "decoding_costs"
P, G, LAYERS, H, KV, D, B = 5, 4, 3, 4, 2, 64, 2
SIZES = {
    "prompt_len": P,
    "new_tokens": G,
    "n_layers": LAYERS,
    "n_heads": H,
    "n_kv_heads": KV,
    "d_model": D,
    "batch": B,
}


def layer_flop(rows: int, kv_rows: int, kv_len: int) -> int:
    """Multiply-adds of a layer, twice: q and W_o, k and v, the FFN; q·k and weights·v."""
    linear = rows * (2 * D * D + 8 * D * D) + kv_rows * 2 * D * (D * KV // H)
    return 2 * B * (linear + 2 * rows * kv_len * D)


def passes(without_cache: str) -> dict[str, dict[str, int]]:
    last = 1 if without_cache == "needed_rows" else None
    totals = {}
    for cached in (True, False):
        tokens = flop = entries = 0
        for step in range(G):
            kv_len = P + step
            rows = 1 if cached and step else kv_len
            for layer in range(LAYERS):
                asked = rows if last is None or layer < LAYERS - 1 else last
                flop += layer_flop(asked, rows, kv_len)
                entries += B * H * asked * kv_len
            tokens += rows
        totals["with" if cached else "without"] = {"tokens": tokens, "flop": flop, "entries": entries, "last": 0}
    return totals


def law(experiment: Experiment) -> None:
    for without, layout in itertools.product(("every_row", "needed_rows"), ("preallocated", "growing")):
        metrics = run(experiment, without_cache=without, cache_layout=layout, **SIZES).metrics
        wanted = passes(without)
        token = 2 * 2 * B * KV * (D // H) * LAYERS  # bytes of a key and a value in 16 bits, all layers
        lengths = range(P + 1, P + G)  # behind each step that follows the prompt
        weights = 2 * LAYERS * (2 * D * D + 2 * D * D * KV // H + 8 * D * D)
        step = LAYERS * layer_flop(1, 1, P + G - 1)
        last_rows = 1 if without == "needed_rows" else P + G - 1
        full = (LAYERS - 1) * layer_flop(P + G - 1, P + G - 1, P + G - 1) + layer_flop(last_rows, P + G - 1, P + G - 1)
        assert metrics == pytest.approx(
            {
                "cache_saves_factor": wanted["without"]["flop"] / wanted["with"]["flop"],
                "last_step_saves_factor": full / step,
                "flop_with_cache": wanted["with"]["flop"],
                "flop_without_cache": wanted["without"]["flop"],
                "score_entries_with_cache": wanted["with"]["entries"],
                "score_entries_without_cache": wanted["without"]["entries"],
                "tokens_passed_with_cache": wanted["with"]["tokens"],
                "tokens_passed_without_cache": wanted["without"]["tokens"],
                "cache_bytes": token * (P + G - 1),
                "cache_read_bytes": token * sum(lengths),
                "cache_written_bytes": token * (sum(lengths) if layout == "growing" else len(lengths)),
                "weight_bytes": weights,
                "last_step_flop_per_byte": step / (weights + token * (P + G - 1)),
            },
            rel=1e-12,  # counts below 2**53, and quotients of them
        ), (without, layout)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "count_pass(sizes, params.batch, 1, kv_len)) if step",
            "count_pass(sizes, params.batch, 1, kv_len)) if step > 1",
        ),
        ("kv_len, kv_len, last_rows=needed)", "kv_len, kv_len)"),
        ("kv_len = params.prompt_len + step", "kv_len = params.prompt_len + step + 1"),
        ("sizes.d_k * params.n_kv_heads * params.batch", "sizes.d_k * params.n_heads * params.batch"),
        ('if params.cache_layout == "preallocated" else None', 'if params.cache_layout == "growing" else None'),
        ("for _ in range(params.new_tokens - 1):", "for _ in range(params.new_tokens - 2):"),
        ("last / (weights + held)", "last / weights"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_first_token_costs_the_same():
    metrics = run(get(NAME), prompt_len=100, new_tokens=1).metrics
    assert metrics["cache_saves_factor"] == 1
    assert metrics["cache_read_bytes"] == metrics["cache_written_bytes"] == 0


def test_curves_end_at_the_totals():
    result = run(get(NAME))
    table = result.tables["by_step"]
    for name in ("with_cache", "without_cache"):
        rows = table["decoding"] == name
        assert table["flop_so_far"][rows][-1] == table["step_flop"][rows].sum() == result.metrics[f"flop_{name}"]
    bytes_table = result.tables["bytes"]
    assert (
        bytes_table["step_bytes"][bytes_table["bytes_of"] == "cache_read"].sum() == result.metrics["cache_read_bytes"]
    )


def test_refuses_heads_that_do_not_come_out_even():
    with pytest.raises(ParamsError, match="groups_divide_heads"):
        get(NAME).Params(n_heads=4, n_kv_heads=8)
    with pytest.raises(ParamsError, match="heads_divide_width"):
        get(NAME).Params(n_heads=128, d_model=64)
