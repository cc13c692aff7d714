"""softmax_passes: counts known from the passes; results, which the experiment compares with engine/attention.py."""

import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "softmax_passes"
NO_CACHE = {"cache_numbers": 0, "kv_len": 96, "tile_len": 16}
# reads, reads and writes, exponentials for each logit, without a cache; six tiles, of which one factor each
COUNTS = {
    ("naive", "weights"): (2, 3, 2),
    ("safe", "weights"): (3, 4, 2),
    ("online", "weights"): (2, 3, 2 + 6 / 96),
    ("naive", "weighted_sum"): (3, 4, 2),
    ("safe", "weighted_sum"): (4, 5, 2),
    ("online", "weighted_sum"): (3, 4, 2 + 6 / 96),
    ("fused", "weighted_sum"): (1, 1, 1 + 6 / 96),
}


def law(experiment: Experiment) -> None:
    for (way, produced), counts in COUNTS.items():
        p = NO_CACHE | {"way": way, "produced": produced}
        result = run(experiment, seed=7, dtype="float64", **p)
        got = result.metrics
        assert (got["reads_per_logit"], got["accesses_per_logit"], got["exps_per_logit"]) == counts, p
        assert got["safe_over_way"] == COUNTS["safe", produced][1] / counts[1]
        assert got["output_error"] < 1e-14, p  # float64
        assert got["undefined_rows"] == 0
        table = result.tables["accesses"]
        of_way = {a: n for w, a, n in zip(*(table[c] for c in ("way", "access", "per_logit")), strict=True) if w == way}
        assert of_way == {"read": counts[0], "written": counts[1] - counts[0], "exponential": counts[2]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.reads += piece.numel()", "self.reads += 1"),
        ("self.writes += piece.numel()", "pass"),
        ("counted[0] += out.numel()", "counted[0] += 1"),
        ("total = total * (before - base).exp()", "total = total"),
        ('(memory.read("logits", keys) - m).exp() / total', '(memory.read("logits", keys) - m).exp()'),
        ("self.cached > self.cache_numbers", "self.cached > self.cache_numbers + 96"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def metrics(**params) -> dict[str, float]:
    return run(get(NAME), seed=2, **params).metrics


@pytest.mark.parametrize("produced", ["weights", "weighted_sum"])
@pytest.mark.parametrize("way", ["naive", "safe", "online"])
def test_a_row_that_fits_is_read_once_by_every_way(way, produced):
    found = metrics(way=way, produced=produced, kv_len=512, cache_numbers=1024)
    assert found["reads_per_logit"] == 1
    assert found["accesses_per_logit"] == 2


def test_the_cache_keeps_what_was_used_last():
    # a row one tile longer than the cache: going round in a circle, each tile is thrown out just before it is needed
    assert (
        metrics(way="online", produced="weights", kv_len=1024, tile_len=64, cache_numbers=960)["reads_per_logit"] == 2
    )


def test_only_the_naive_way_overflows():
    high = {"logits_mean": 100, "kv_len": 256}
    assert metrics(way="naive", **high)["undefined_rows"] == 1
    for way in ("safe", "online", "fused"):
        assert metrics(way=way, **high)["output_error"] < 1e-5


def test_refusals():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="fused_writes_no_weights"):
        params(way="fused", produced="weights")
    with pytest.raises(ParamsError, match="too_many_tiles"):
        params(kv_len=1024, tile_len=1)
