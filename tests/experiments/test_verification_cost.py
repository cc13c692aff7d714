"""verification_cost against operations and bytes worked out by hand."""

import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "verification_cost"
LAYERS, D, H, DK, FF, V = 32, 4096, 32, 128, 14336, 128256
SETTINGS = [
    {},
    {"batch": 256},
    {"batch": 32, "kv_len": 8192, "gamma": 7},
    {"batch": 64, "n_kv_heads": 1, "kv_len": 32768},
    {"batch": 2, "n_kv_heads": 32, "matmul_tflop_per_s": 1.0},
    {"batch": 4, "n_experts": 16, "experts_per_token": 2, "memory_gb_per_s": 100.0},
]


def distinct(draws, n_tokens, k):
    """Experts that some of the first tokens chose: the k with the largest numbers, over all routings."""
    found = []
    for score in draws:
        chosen = set()
        for row in score[:n_tokens]:
            chosen |= set(sorted(range(len(row)), key=lambda e: -row[e])[:k])
        found.append(len(chosen))
    return sum(found) / len(found)


def law(experiment: Experiment) -> None:
    for given in SETTINGS:
        p = {"batch": 1, "kv_len": 1024, "gamma": 4, "n_kv_heads": 8, "n_experts": 1, "experts_per_token": 1}
        p |= {"matmul_tflop_per_s": 989.0, "memory_gb_per_s": 3350.0} | given
        result, draws = recorded(experiment, seed=6, **p)
        kv = p["n_kv_heads"] * DK
        shared = LAYERS * (2 * D * H * DK + 2 * D * kv) + V * D
        ffn = LAYERS * 3 * D * FF
        k = p["experts_per_token"]

        def step(n_new: int, p=p, draws=draws, shared=shared, ffn=ffn, k=k, kv=kv) -> tuple[float, float, float, float]:
            experts = distinct(draws, p["batch"] * n_new, k) if draws else 1
            tokens = p["batch"] * n_new
            linear = 2 * tokens * (shared + ffn)  # a multiply-add for every weight that serves the token
            attention = LAYERS * 2 * 2 * tokens * H * DK * p["kv_len"]
            weights = 2 * (shared + ffn // k * experts)
            cache = 2 * p["batch"] * LAYERS * 2 * kv * p["kv_len"]
            return linear, weights, attention, cache

        def seconds(n_new: int, p=p, step=step) -> float:
            linear, weights, attention, cache = step(n_new)
            flop, byte = 1e12 * p["matmul_tflop_per_s"], 1e9 * p["memory_gb_per_s"]
            return max(linear / flop, weights / byte) + max(attention / flop, cache / byte)

        one, more = step(1), step(p["gamma"] + 1)
        cost = seconds(p["gamma"] + 1) / seconds(1)
        want = {
            "verify_cost": cost,
            "extra_token_cost": (cost - 1) / p["gamma"],
            "decode_weights_share": one[1] / (one[1] + one[3]),
            "decode_intensity_flop_per_byte": (one[0] + one[2]) / (one[1] + one[3]),
            "verify_intensity_flop_per_byte": (more[0] + more[2]) / (more[1] + more[3]),
            "all_weights_bytes": 2 * (shared + ffn // k * p["n_experts"]),
            "step_cache_bytes": one[3],
        }
        # counts are whole numbers; the rest is float64
        assert {name: result.metrics[name] for name in want} == pytest.approx(want, rel=1e-12, abs=1e-15), p


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch * bill.cache_bytes", "batch * n_new * bill.cache_bytes"),  # the cache read once for every new token
        ("weights = attention_bytes +", "weights = batch * attention_bytes +"),
        ("batch * bill.linear_flop", "bill.linear_flop"),
        ("+ max(attention_flop / P, cache / B)", ""),
        ("N_LAYERS * (k.nbytes + v.nbytes)", "N_LAYERS * k.nbytes"),
        ("* linear.products + naming.products", "* linear.products"),
        ("N_HEADS // params.n_kv_heads * n_new", "n_new"),
        ("first < batch * n_new", "first < batch"),
        ("D_FF // params.experts_per_token", "D_FF"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_one_more_token_is_free_while_memory_is_the_bound():
    assert run(get(NAME)).metrics["verify_cost"] == 1
    assert run(get(NAME), matmul_tflop_per_s=0.1).metrics["verify_cost"] == pytest.approx(5)  # compute alone


def test_one_expert_for_all_is_the_dense_model():
    dense = run(get(NAME), batch=16).metrics
    assert dense["experts_read_ratio"] == 1
    everybody = run(get(NAME), batch=16, n_experts=2, experts_per_token=2).metrics
    assert everybody["verify_cost"] == pytest.approx(dense["verify_cost"])


def test_a_token_needs_no_more_experts_than_there_are():
    with pytest.raises(ParamsError, match="experts_for_a_token"):
        get(NAME).Params(experts_per_token=2)
