"""tiled_attention: both ways agree, and counts are those made by hand. The loops are tested in test_flash.py."""

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "tiled_attention"
SMALL = {"seq_len": 32, "d_k": 8, "q_tile": 8, "kv_tile": 4}


def law(experiment: Experiment) -> None:
    for more in ({}, {"causal": True}, {"outer_loop": "over_keys", "q_tile": 32}, {"q_tile": 16, "causal": True}):
        m = run(experiment, seed=3, **SMALL | more).metrics
        assert m["output_error"] < 1e-14  # float64, means of at most 32 numbers
        assert m["gradient_error"] < 1e-13  # and sums of them
        n, d, q_tile = 32, 8, (SMALL | more)["q_tile"]
        tiles = (n // q_tile) * (n // 4)
        pairs = n * n
        if more.get("causal"):  # tiles with a key not later than their last query
            seen = sum(key <= query + q_tile - 1 for query in range(0, n, q_tile) for key in range(0, n, 4))
            pairs = seen * q_tile * 4
        assert (m["tiles"], m["tiles_computed"]) == (tiles, pairs // (q_tile * 4))
        assert (m["forward_flop"], m["training_flop"]) == (2 * 2 * pairs * d, 7 * 2 * pairs * d)
        assert (m["plain_forward_flop"], m["plain_training_flop"]) == (2 * 2 * n * n * d, 6 * 2 * n * n * d)
        assert m["plain_exps"] == n * n
        assert m["exps"] == 2 * pairs + pairs // 4  # one factor for each row of a tile
        assert m["kept_bytes"] == 8 * (4 * n * d + n)
        mask = n * n if more.get("causal") else 0  # a byte each
        assert m["plain_kept_bytes"] == 8 * (3 * n * d + n * n) + mask


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("forward_flop = work.product_flop\n        run.progress", "forward_flop = 0\n        run.progress"),
        (
            "if name in backward.touched)\n    return _Done",
            ")\n    return _Done(results, 0, 0, 0, kept)\n    return _Done",
        ),
        ('arrays["m"] + arrays["l"].log()', 'arrays["m"]'),
        ("flash.row_terms(backward, tiles)\n        if", "pass\n        if"),
        ("torch.autograd.grad(out, (q, k, v), inputs[3])", "torch.autograd.grad(out, (q, k, v), inputs[2])"),
        ("q @ k.mT * q.shape[-1] ** -0.5", "q @ k.mT"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=2, **SMALL | params).metrics


def test_slips_leave_the_output_and_spoil_the_gradients():
    for slip in ("no_row_term", "max_for_lse"):
        found = metrics(backward_slip=slip)
        assert found["output_error"] < 1e-14
        assert found["gradient_error"] > 0.05


def test_one_key_needs_no_row_term_beside_its_own():
    # with one key the weight is 1 and the gradients of q and k are 0 only because of the row term
    assert metrics(seq_len=1)["gradient_error"] < 1e-10


def test_few_bits_cost_whole_rows_more():
    found = metrics(results_in="bfloat16", seq_len=128, q_tile=32)
    assert found["output_error"] < found["plain_output_error"]
    assert found["kept_bytes"] == 2 * 4 * 128 * 8 + 4 * 128


def test_tables():
    result = run(get(NAME), seed=2, **SMALL)
    work = result.tables["work"]
    of_tiles = dict(zip(work["work_item"][::2], work["relative_to_plain"][::2], strict=True))
    assert of_tiles["forward_products"] == 1
    assert of_tiles["backward_products"] == 1.25
    assert (work["relative_to_plain"][1::2] == 1).all()
    kept = result.tables["by_length"]
    n = kept["seq_len"]
    expected = np.where(kept["attention_way"] == "in_tiles", 4 * n * 8 + n, n * 8 + n * n) * 8 / 1024
    assert (kept["kept_kib"] == expected).all()  # the plain one takes the same tensor for q, k and v there


def test_refusals():
    with pytest.raises(ParamsError, match="too_many_tiles_of_both"):
        get(NAME).Params(seq_len=1024, q_tile=8, kv_tile=8)
