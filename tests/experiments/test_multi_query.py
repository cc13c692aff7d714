"""multi_query against the variance of a sum of products and the bytes of a cache counted by hand."""

import math

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "multi_query"
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
SETTINGS = [
    {"n_heads": 8, "n_kv_heads": 8, "d_k": 16},
    {"n_heads": 8, "n_kv_heads": 1, "d_k": 64},
    {"n_heads": 12, "n_kv_heads": 4, "d_k": 32, "seq_len": 100, "batch": 3, "cache_dtype": "float32"},
    {"n_heads": 4, "n_kv_heads": 2, "d_k": 128, "d_rope": 64, "seq_len": 1000, "cache_dtype": "float16"},
]


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        width = p["d_k"] + p.get("d_rope", 0)
        # logits that share a key are not independent: the spread over seeds gives the standard error
        results = [run(experiment, seed=s, **p) for s in range(12)]
        variances = np.array([r.metrics["logits_variance"] for r in results])
        assert abs(variances.mean() - width) <= 5 * variances.std(ddof=1) / math.sqrt(len(variances)), p
        metrics = results[0].metrics
        assert metrics["scaled_logits_variance"] == pytest.approx(metrics["logits_variance"] / width, rel=1e-12), p
        assert metrics["theory_variance"] == width

        size, tokens = SIZES[p.get("cache_dtype", "bfloat16")], p.get("batch", 1) * p.get("seq_len", 4096)
        expected = {n: size * tokens * (2 * n * p["d_k"] + p.get("d_rope", 0)) for n in (p["n_kv_heads"], p["n_heads"])}
        assert metrics["kv_cache_bytes"] == expected[p["n_kv_heads"]], p
        assert metrics["kv_cache_share"] == expected[p["n_kv_heads"]] / expected[p["n_heads"]], p

        table = results[0].tables["by_kv_heads"]
        assert table["n_kv_heads"].tolist() == [n for n in range(1, p["n_heads"] + 1) if p["n_heads"] % n == 0]
        for i, n_kv_heads in enumerate(table["n_kv_heads"]):  # every row, not only the chosen one
            of_row = np.array([r.tables["by_kv_heads"]["logits_variance"][i] for r in results])
            assert abs(of_row.mean() - width) <= 5 * of_row.std(ddof=1) / math.sqrt(len(of_row)), (p, n_kv_heads)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            'scale_value("inv_sqrt_d_k", width)',
            'scale_value("inv_sqrt_d_k", params.d_k)',
        ),  # the scale forgets the rotary part
        ("return 2 * nbytes", "return nbytes"),  # v forgotten
        ("+ nbytes(1, params.d_rope)", "+ nbytes(n_kv_heads, params.d_rope)"),  # the rotary key kept for every head
        (
            "cache[params.n_kv_heads] / cache[params.n_heads]",
            "params.n_kv_heads / params.n_heads",
        ),  # the formula, not the bytes
        ("qk_product(q, k).cpu()", "qk_product(q, k).mean(dim=0).cpu()"),  # heads averaged first
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_one_head_is_all_three():
    result = run(get(NAME), n_heads=1, n_kv_heads=1, d_k=8)
    assert result.metrics["kv_cache_share"] == 1
    assert len(result.tables["by_kv_heads"]["n_kv_heads"]) == 1


def test_refuses_groups_that_do_not_divide_the_heads():
    with pytest.raises(ParamsError, match=r"groups_divide_heads.*'n_heads': 32"):
        get(NAME).Params(n_heads=32, n_kv_heads=5)
    with pytest.raises(ParamsError, match="groups_divide_heads"):
        get(NAME).Params(n_heads=4, n_kv_heads=8)
