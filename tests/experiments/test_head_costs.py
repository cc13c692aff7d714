"""head_costs against PyTorch's own module and the operations written out."""

import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "head_costs"


def law(experiment: Experiment) -> None:
    for n_heads, d_model, seq_len in ((1, 64, 16), (4, 64, 16), (16, 128, 1), (8, 512, 512)):
        m = run(experiment, n_heads=n_heads, d_model=d_model, seq_len=seq_len).metrics
        module = torch.nn.MultiheadAttention(d_model, n_heads, bias=False, batch_first=True)
        assert m["n_parameters"] == sum(p.numel() for p in module.parameters())
        # four projections, and n² dot products of width d_model twice over; a multiply-add is two operations
        assert m["matmul_flop"] == 8 * seq_len * d_model**2 + 4 * seq_len**2 * d_model
        x = torch.zeros(1, seq_len, d_model)
        weights = module(x, x, x, average_attn_weights=False)[1]
        assert m["score_entries"] == weights.numel()
        assert m["score_bytes"] == weights.half().nbytes
        assert m["kv_cache_bytes"] == 2 * x.half().nbytes
        full = run(experiment, n_heads=n_heads, d_model=d_model, seq_len=seq_len, head_width="full_width").metrics
        one = run(experiment, n_heads=1, d_model=d_model, seq_len=seq_len).metrics
        for name in full:  # as so many layers of one head
            assert full[name] == n_heads * one[name], name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('params.d_model // n_heads if params.head_width == "split"', 'params.d_model if params.head_width == "split"'),
        (".flatten(1) @ W_o.mT", ".flatten(1)"),  # a projection forgotten
        ("for W in (W_q, W_k, W_v, W_o)", "for W in (W_q, W_k, W_v)"),
        ("k.nbytes + v.nbytes", "k.nbytes"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_table_is_relative_to_one_head():
    table = run(get(NAME)).tables["by_n_heads"]
    for item, grows in (("parameters", False), ("matmul", False), ("scores", True), ("kv_cache", False)):
        rows = table["item"] == item
        expected = table["n_heads"][rows] if grows else 1
        assert (table["relative"][rows] == expected).all(), item


def test_refuses_heads_that_do_not_divide_the_width():
    with pytest.raises(ParamsError, match="heads_divide_width"):
        get(NAME).Params(n_heads=3)
