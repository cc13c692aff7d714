"""cache_growth against tensors that are really appended, and against lengths rounded by hand."""

import math

import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "cache_growth"
TOKEN = 2 * 8 * 128 * 2  # bytes of k and v of one token in one layer: 8 KV heads of width 128 in 16 bits
SMALL = {"batch": 4, "prompt_len": 40, "n_steps": 8, "room_len": 64, "n_layers": 3, "block_size": 4}


def law(experiment: Experiment) -> None:
    for ragged in (True, False):
        p = {**SMALL, "ragged": ragged}
        result, draws = recorded(experiment, seed=5, strategy="paged_blocks", **p)
        lengths = [1 + int(u * 40) for u in draws[0]] if ragged else [40] * 4
        needed = 3 * TOKEN * sum(n + 8 for n in lengths)
        assert result.metrics["needed_bytes"] == needed
        rounded = 3 * TOKEN * sum(4 * math.ceil((n + 8) / 4) for n in lengths)
        assert result.metrics["allocated_bytes"] == result.metrics["peak_bytes"] == rounded

        held = recorded(experiment, seed=5, strategy="preallocate", **p)[0].metrics
        assert held["allocated_bytes"] == held["peak_bytes"] == 3 * TOKEN * 4 * 64
        assert held["copied_over_needed"] == 0

        for keep_old in (False, True):
            grown = recorded(experiment, seed=5, strategy="cat", keep_old=keep_old, **p)[0].metrics
            assert grown["peak_bytes"] == _appended_peak(max(lengths), keep_old=keep_old)
            assert grown["allocated_bytes"] == 3 * TOKEN * 4 * (max(lengths) + 8)
            copied = sum(3 * TOKEN * 4 * (max(lengths) + step) for step in range(8))
            assert grown["copied_over_needed"] == copied / needed

            doubled = recorded(experiment, seed=5, strategy="doubling", keep_old=keep_old, **p)[0].metrics
            room = max(lengths)
            assert doubled["allocated_bytes"] == 3 * TOKEN * 4 * 2 * room  # 8 steps fill it no second time
            alive = 9 * room if keep_old else 7 * room  # 3 old and 3 new; or 2 new, then one old beside its new one
            assert doubled["peak_bytes"] == TOKEN * 4 * alive


def _appended_peak(longest: int, *, keep_old: bool) -> int:
    """Of three real tensors that torch.cat makes one token longer, eight times."""
    caches = [torch.zeros(2, 4, 8, longest, 128, dtype=torch.bfloat16) for _ in range(3)]
    token, most = torch.zeros(2, 4, 8, 1, 128, dtype=torch.bfloat16), 0
    for _ in range(8):
        old = list(caches)
        for layer in range(3):
            caches[layer] = torch.cat((caches[layer], token), dim=-2)
            alive = {id(t): t for t in (*caches, *(old if keep_old else old[layer : layer + 1]))}
            most = max(most, sum(t.nbytes for t in alive.values()))
    return most


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.steps.append(self.most)", "self.steps.append(self.now)"),  # the end of a step, not its highest moment
        ("            if params.keep_old:\n", "            if not params.keep_old:\n"),
        ("room = params.room_len if strategy", "room = longest if strategy"),
        ("length + step == counts[sequence] * params.block_size", "step == params.block_size"),
        ("held.copied += cache.nbytes", "held.copied += 1"),
        ("else 2 * n_tokens", "else n_tokens + 1"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_blocks_of_one_token_waste_nothing():
    metrics = run(get(NAME), strategy="paged_blocks", block_size=1).metrics
    assert metrics["peak_over_needed"] == metrics["allocated_over_needed"] == 1


def test_each_step_of_the_table_covers_its_tokens():
    table = run(get(NAME), seed=2).tables["by_step"]
    assert (table["held_mib"] >= table["needed_mib"]).all()


def test_refuses_too_little_room():
    with pytest.raises(ParamsError, match=r"room_holds_all_tokens.*576"):
        get(NAME).Params(room_len=512)
