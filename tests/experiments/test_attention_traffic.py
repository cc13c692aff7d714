"""attention_traffic: counts against the closed forms, which the experiment itself does not use."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "attention_traffic"


def law(experiment: Experiment) -> None:
    for n, d, kib, size in ((512, 32, 16, 2), (1000, 64, 64, 2), (512, 128, 192, 4), (64, 64, 192, 2)):
        p = {"seq_len": n, "d_k": d, "sram_kib": kib, "number_bytes": size}
        wide = math.ceil(kib * 1024 / size / (4 * d))
        blocks = math.ceil(n / wide)
        row, statistic = n * d * size, n * 4
        m = run(experiment, **p).metrics
        assert m["standard_bytes"] == 4 * row + 4 * n * n * size
        assert m["tiled_bytes"] == 2 * row + statistic + 2 * row * blocks
        assert m["standard_over_tiled"] == m["standard_bytes"] / m["tiled_bytes"]
        assert m["read_bytes"] == row + 2 * row * blocks
        assert m["tiled_bytes"] == m["read_bytes"] + m["written_bytes"]
        assert m["least_bytes"] == 4 * row
        assert m["q_rows"] == min(wide, n)
        m = run(experiment, **p, outer_loop="over_keys").metrics
        passes = blocks * (3 * row + 4 * statistic)
        assert m["tiled_bytes"] == 2 * row + passes + row + 2 * statistic
        assert m["kv_rows"] == min(wide, n)
        assert m["tiles"] == blocks * math.ceil(n / min(wide, d))
        m = run(experiment, **p, pass_taken="backward_pass").metrics
        assert m["standard_bytes"] == 8 * row + 7 * n * n * size
        assert m["tiled_bytes"] == (2 + 2 + 1 + 2) * row + statistic + blocks * (4 * row + 2 * statistic)
        m = run(experiment, **p, queries_at_once="one").metrics
        assert m["standard_bytes"] == 2 * row + 2 * d * size + 4 * n * size
        assert m["tiled_bytes"] == 2 * row + 2 * d * size + 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("memory, tiles = _memory(params), _tiles(params)", "memory, tiles = _memory(params), _tiles(Params())"),
        ("params.sram_kib * 1024 / params.number_bytes", "params.sram_kib * 1024"),
        ("STANDARD_BACKWARD if backward", "STANDARD_FORWARD if backward"),
        ("        flash.row_terms(memory, tiles)\n", ""),
        ("flash.by_queries(memory, tiles)", "flash.by_keys(memory, tiles)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), **params).metrics


def test_causal_tiles():
    m = metrics(seq_len=512, tiles_from="fixed_tiles", q_tile=64, kv_tile=64, causal=True)
    assert (m["tiles"], m["tiles_computed"]) == (64, 36)
    row = 512 * 64 * 2
    assert m["tiled_bytes"] == 2 * row + 512 * 4 + 2 * row * 36 / 8  # an eighth of keys and values for each tile


def test_tables_hold_the_chosen_point_and_no_point_that_takes_long():
    result = run(get(NAME), seq_len=4096, d_k=96)
    lengths, widths = result.tables["by_length"], result.tables["by_width"]
    chosen = (lengths["seq_len"] == 4096) & (lengths["algorithm"] == "over_queries")
    assert lengths["moved_mib"][chosen].tolist() == [result.metrics["tiled_bytes"] / 2**20]
    at = (widths["d_k"] == 96) & (widths["loop_order"] == "over_queries")
    assert widths["standard_over_tiled"][at].tolist() == [result.metrics["standard_over_tiled"]]
    fine = run(get(NAME), seq_len=128, tiles_from="fixed_tiles", q_tile=1, kv_tile=1).tables["by_length"]
    assert set(np.unique(fine["seq_len"])) == {128}


def test_refusals():
    with pytest.raises(ParamsError, match="too_many_tiles_of_both"):
        get(NAME).Params(seq_len=4096, tiles_from="fixed_tiles", q_tile=16, kv_tile=16)
