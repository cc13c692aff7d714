"""kv_head_mapping: heads written out one by one in float64, from the numbers that a run drew."""

import numpy as np
import pytest

from engine.experiments import kv_head_mapping
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "kv_head_mapping"


def output(x, W_q, W_k, W_v, W_o, reads):
    """The layer, one head after another. Shapes: x (batch, n, d), W (heads, d_k, d), W_o (d, heads, d_k)."""
    n, total = x.shape[1], 0.0
    for head, kv in enumerate(reads):
        q, k, v = x @ W_q[head].T, x @ W_k[kv].T, x @ W_v[kv].T
        logits = q @ k.transpose(0, 2, 1) / np.sqrt(W_q.shape[1])
        logits[:, np.triu_indices(n, 1)[0], np.triu_indices(n, 1)[1]] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        total = total + weights / weights.sum(-1, keepdims=True) @ v @ W_o[:, head].T
    return total


def law(experiment: Experiment) -> None:
    for n_heads, n_kv_heads, trained, read in (
        (8, 2, "adjacent", "strided"),
        (8, 2, "strided", "adjacent"),
        (8, 4, "adjacent", "strided"),
        (8, 8, "adjacent", "strided"),
        (4, 1, "strided", "adjacent"),
    ):
        result, draws = recorded(
            experiment, n_heads=n_heads, n_kv_heads=n_kv_heads, trained_as=trained, read_as=read, seq_len=9
        )
        x, *W = draws
        W = [w / np.sqrt(x.shape[2]) for w in W]
        group = n_heads // n_kv_heads
        reads = {
            "adjacent": [head // group for head in range(n_heads)],
            "strided": [head % n_kv_heads for head in range(n_heads)],
        }
        wanted, wrong = (output(x, *W, reads[layout]) for layout in (trained, read))
        m = result.metrics
        # float64 sums of a few dozen terms
        assert m["shared_error"] < 1e-14
        assert m["relabelled_error"] < 1e-14
        assert m["enable_gqa_error"] < 1e-14
        error = np.linalg.norm(wrong - wanted) / np.linalg.norm(wanted)
        assert m["mapping_error"] == pytest.approx(error, rel=1e-10, abs=1e-14)
        same = [a == b for a, b in zip(reads[trained], reads[read], strict=True)]
        assert m["heads_misread_share"] == 1 - sum(same) / n_heads
        assert m["repeat_copies_factor"] == group
        assert m["grouped_copies_factor"] == m["enable_gqa_copies_factor"] == 0
        # with one head in a group there is nothing to broadcast
        assert m["broadcast_copies_factor"] == (group if group > 1 else 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layout or params.trained_as", "layout or params.read_as"),
        ("new[places] = order", "new[order] = places"),
        ("W_q[new.tolist()]", "W_q"),  # the query heads stay, the columns of W_o move
        ("W_k[reads], W_v[reads]]).flatten", "W_k[reads], W_v[reads].flip(0)]).flatten"),
        ("return counted.written", "return counted.read"),
        ("lambda: grouped_attention(q, k, v)", "lambda: grouped_attention(q, repeated(k), repeated(v))"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_heads_read_the_wrong_way_are_those_that_err():
    result = run(get(NAME))
    errors = result.tables["head_errors"]
    strided = errors["head_error"][errors["head_layout"] == "strided"]
    right = np.array([0, 2, 5, 7])  # of 8 heads and 2 KV heads, where i // 4 and i mod 2 agree
    assert (strided[right] < 1e-14).all()
    assert (np.delete(strided, right) > 0.5).all()
    cells = result.tables["mapping"]
    assert sorted(set(cells["query_head"][cells["read_in"] == 2])) == right.tolist()


def test_lower_formats_err_as_they_round():
    for dtype, bound in (("float32", 1e-5), ("bfloat16", 0.05)):  # 2^-24 and 2^-9, some tens of them
        assert 1e-9 < run(get(NAME), computed_in=dtype).metrics["shared_error"] < bound


def test_all_ways_are_in_the_table():
    table = run(get(NAME)).tables["copies"]
    assert tuple(table["kv_way"]) == kv_head_mapping.WAYS
