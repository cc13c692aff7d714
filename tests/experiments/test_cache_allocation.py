"""cache_allocation against a plain simulation that keeps a list of what is in every slot."""

from collections import deque

import numpy as np
import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded, run

NAME = "cache_allocation"
SMALL = {
    "pool_slots": 1024,
    "longest_request": 128,
    "mean_prompt_tokens": 16,
    "mean_output_tokens": 32,
    "serving_steps": 256,
    "block_size": 8,
    "kept_free_share": 0.05,
}
POOL, LONGEST, STEPS, SIZE = 1024, 128, 256, 8


def served(policy: str, lengths: list[tuple[int, int]]) -> dict[str, float]:
    """Every slot by itself: None, or the request that has it; shares and counts over the last three quarters."""
    slots: list[int | None] = [None] * POOL
    waiting: deque[list[int]] = deque()  # prompt, output
    running: list[dict] = []
    drawn = preempted = recomputed = generated = 0
    sums = np.zeros(6)

    def needs(prompt: int, output: int) -> int:
        rounded = 1
        while rounded < output:
            rounded *= 2
        return {"reserve_maximum": LONGEST, "reserve_power_of_two": min(prompt + rounded, LONGEST)}.get(
            policy, prompt + output - 1
        )

    def free_blocks() -> list[int]:
        return [b for b in range(POOL // SIZE) if slots[b * SIZE] is None]

    def hand_over(request: dict, places: list[int]) -> None:
        for place in places:
            slots[place] = request["number"]
        request["places"] += places

    def stop(request: dict) -> None:
        running.remove(request)
        for place in request["places"]:
            slots[place] = None

    for step in range(STEPS):
        for request in [r for r in running if r["left"] == 0]:
            stop(request)
        if policy == "paged_blocks":
            for request in list(running):
                while request in running and len(request["places"]) < request["tokens"]:
                    if free_blocks():
                        block = free_blocks()[0]
                        hand_over(request, list(range(block * SIZE, block * SIZE + SIZE)))
                    else:
                        last = running[-1]
                        stop(last)
                        waiting.appendleft([last["tokens"], last["left"]])
                        preempted += 1
                        recomputed += last["tokens"] - 1
        while True:
            if not waiting:
                waiting.append(list(lengths[drawn % len(lengths)]))
                drawn += 1
            prompt, output = waiting[0]
            free = sum(slot is None for slot in slots)
            if policy == "paged_blocks":
                wanted = -(-prompt // SIZE) + int(0.05 * POOL / SIZE)
                fits = enough = wanted <= len(free_blocks())
                places = [b * SIZE + i for b in free_blocks()[: -(-prompt // SIZE)] for i in range(SIZE)]
            else:
                wanted = needs(prompt, output)
                runs = np.concatenate(([0], np.cumsum([slot is None for slot in slots])))
                starts = np.flatnonzero(runs[wanted:] - runs[:-wanted] == wanted).tolist()
                fits, enough = bool(starts), wanted <= free
                places = list(range(starts[0], starts[0] + wanted)) if starts else []
            if not fits:
                break
            waiting.popleft()
            request = {
                "number": step, "tokens": prompt, "left": output, "final": prompt + output - 1, "places": []
            }  # fmt: skip
            hand_over(request, places)
            running.append(request)
        if step >= STEPS // 4:
            tokens = sum(r["tokens"] for r in running)
            written = sum(min(r["final"], len(r["places"])) for r in running)
            held = sum(len(r["places"]) for r in running)
            waste = (POOL - held, 0) if enough else (0, POOL - held)
            sums += (tokens, written - tokens, held - written, *waste, len(running))
        for request in running:
            request["tokens"] += 1
            request["left"] -= 1
            generated += 1
    sums /= STEPS - STEPS // 4
    return {
        "token_slot_share": sums[0] / POOL,
        "reserved_slot_share": sums[1] / POOL,
        "never_written_share": sums[2] / POOL,
        "between_regions_share": sums[3] / POOL,
        "too_few_left_share": sums[4] / POOL,
        "requests_together": sums[5],
        "preemptions": preempted,
        "recomputed_over_generated": recomputed / generated,
    }


def law(experiment: Experiment) -> None:
    for policy in ("paged_blocks", "reserve_maximum", "reserve_power_of_two", "reserve_exact"):
        result, (drawn,) = recorded(experiment, seed=2, cache_policy=policy, **SMALL)
        lengths = []
        for u, v in drawn:
            prompt = min(LONGEST - 1, max(1, round(-np.log1p(-u) * 16 + 0.5)))
            lengths.append((prompt, min(LONGEST - prompt, max(1, round(-np.log1p(-v) * 32 + 0.5)))))
        wanted = served(policy, lengths)
        assert result.metrics == pytest.approx(wanted, rel=1e-12), policy  # means of whole numbers, float64


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slots = request.final", "slots = request.final + 1"),
        ("self._preempt(next(reversed(self.running)), step)", "self._preempt(next(iter(self.running)), step)"),
        ("self.waiting.appendleft(again)", "self.waiting.append(again)"),
        ("_Request(request.prompt + done, request.output - done)", "_Request(request.prompt, request.output)"),
        ("self.paging.blocks_for(request.prompt) + self.kept", "self.paging.blocks_for(request.prompt)"),
        ("self.recomputed += again.prompt - 1", "self.recomputed += again.prompt"),
        ("(request.output - 1).bit_length()", "request.output.bit_length()"),
        ("waits_for = (free, 0) if fits else (0, free)", "waits_for = (0, free) if fits else (free, 0)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("policy", ["paged_blocks", "reserve_maximum", "reserve_power_of_two", "reserve_exact"])
@pytest.mark.parametrize("allocator", ["first_fit", "buddy"])
def test_every_slot_is_counted_once(policy, allocator):
    table = run(get(NAME), cache_policy=policy, region_allocator=allocator, seed=4).tables
    shares = table["by_policy"]["pool_share"].reshape(4, 5)
    assert shares.sum(axis=1) == pytest.approx(np.ones(4), rel=1e-12)  # sums of five floats
    assert (shares >= 0).all()
    by_step = table["over_time"]["kv_slots"].reshape(-1, 5)
    assert (by_step.sum(axis=1) == 4096).all()
    assert (by_step >= 0).all()


def test_the_map_holds_as_many_tokens_as_are_counted():
    for policy in ("paged_blocks", "reserve_exact"):
        tables = run(get(NAME), cache_policy=policy, seed=4).tables
        filled = tables["memory_map"]["piece_filled"].reshape(-1, 32).mean(axis=1) * 4096
        mapped = dict(zip(tables["memory_map"]["serving_step"][::32].tolist(), filled, strict=True))
        counted = tables["over_time"]["kv_slots"][::5]  # the first use of each step
        tokens = dict(zip(tables["over_time"]["serving_step"][::5].tolist(), counted, strict=True))
        common = mapped.keys() & tokens.keys()
        assert len(common) > 5
        assert all(mapped[step] == pytest.approx(tokens[step], abs=1e-6) for step in common)  # means of 0 and 1


def test_regions_of_one_size_leave_no_pieces_and_nobody_is_preempted():
    for allocator in ("first_fit", "buddy"):
        metrics = run(get(NAME), cache_policy="reserve_maximum", region_allocator=allocator).metrics
        assert metrics["between_regions_share"] == metrics["preemptions"] == 0


def test_blocks_of_one_token_leave_nothing_unwritten():
    metrics = run(get(NAME), **SMALL | {"block_size": 1}).metrics
    assert metrics["reserved_slot_share"] == metrics["never_written_share"] == 0


def test_refuses_a_pool_that_is_too_small():
    with pytest.raises(ParamsError, match="pool_holds_longest_request"):
        get(NAME).Params(pool_slots=1024)
    with pytest.raises(ParamsError, match="pool_is_power_of_two"):
        get(NAME).Params(pool_slots=5000)
    with pytest.raises(ParamsError, match="blocks_divide_pool"):
        get(NAME).Params(block_size=12)
    with pytest.raises(ParamsError, match="mean_request_within_longest"):
        get(NAME).Params(mean_output_tokens=1024)
