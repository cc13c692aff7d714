"""position_costs against a count by hand, and its rotation against the engine's own."""

import itertools

import pytest
import torch

from engine.base import ParamsError
from engine.experiments.position_costs import _turn
from engine.positions import rotary_angles, rotate
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "position_costs"
WAYS = get(NAME).Params.specs()["positions"].values
SIZES = {"d_model": 64, "d_k": 16, "n_heads": 8, "n_kv_heads": 2, "n_layers": 3, "max_len": 128}


def law(experiment: Experiment) -> None:
    for way, cached, (q_len, kv_len) in itertools.product(WAYS, ("turned", "not_turned"), ((32, 32), (2, 16))):
        params = {"positions": way, "q_len": q_len, "kv_len": kv_len, "cached_keys": cached}
        metrics = run(experiment, **params, **SIZES).metrics
        keys = kv_len if cached == "not_turned" else q_len
        flop = {
            "learned_table": q_len * 64,
            "sinusoidal": q_len * 64,
            "relative_bias": 3 * 8 * q_len * kv_len,
            "alibi": 3 * 8 * q_len * kv_len,
            "rope": 3 * 3 * 16 * (8 * q_len + 2 * keys),  # layers, two products and a sum, width, heads
        }[way]
        projections = 3 * 2 * q_len * 64 * 16 * (8 + 2 + 2 + 8)
        scores = 3 * 2 * 2 * 8 * q_len * kv_len * 16
        assert metrics == {
            "extra_parameters": {"learned_table": 128 * 64, "relative_bias": 32 * 8}.get(way, 0),
            "position_flop": flop,
            "projection_flop": projections,
            "score_flop": scores,
            "position_share": flop / (projections + scores),
            "bias_bytes": 2 * 8 * q_len * kv_len,
            "rotary_table_bytes": 2 * 4 * kv_len * 8,
        }, params


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('q_len if cached_keys == "turned" else kv_len', "q_len"),
        ("_empty(params.max_len, params.d_model), freeze", "_empty(params.max_len, params.d_k), freeze"),
        ("params.n_kv_heads * turned_keys", "params.n_heads * turned_keys"),
        ("q, _, _ = x @ W_q, x @ W_k, x @ W_v", "q, _ = x @ W_q, x @ W_k"),
        ("return _sum_flop(q_len, params.d_model)  #", "return params.n_layers * _sum_flop(q_len, params.d_model)  #"),
        ("_sum_flop(params.n_heads, q_len, kv_len)", "_sum_flop(q_len, kv_len)"),
        ("first * sin + second * cos), dim=-1)", "first * sin), dim=-1)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_what_is_counted_is_the_rotation():
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    angles = rotary_angles(torch.arange(5), 8)
    assert torch.equal(_turn(x, angles.cos(), angles.sin()), rotate(x, angles))


def test_a_longer_cache_costs_only_keys_that_were_not_turned():
    table = run(get(NAME), q_len=1).tables["by_length"]
    shares = {cached: table["position_share"][table["cached_keys"] == cached] for cached in ("turned", "not_turned")}
    assert (shares["not_turned"][1:] > shares["not_turned"][:-1]).all()
    assert (shares["turned"][1:] < shares["turned"][:-1]).all()  # the same two rotations beside more attention


def test_refuses_groups_that_do_not_come_out_even():
    with pytest.raises(ParamsError, match="groups_divide_heads"):
        get(NAME).Params(n_heads=4, n_kv_heads=8)
    with pytest.raises(ParamsError, match="chunk_within_keys"):
        get(NAME).Params(q_len=64, kv_len=32)
