"""shared_blocks against sets of tokens by hand: a block is what a set of equal beginnings has in common."""

import pytest

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, recorded

NAME = "shared_blocks"
SMALL = {"n_branches": 3, "prompt_len": 21, "own_prompt_tokens": 5, "new_tokens": 14, "block_size": 4}
SIZE = 4


def blocks_of(histories: list[tuple[int, ...]]) -> int:
    """Blocks if whatever could be shared is: one for each different beginning that ends with the block."""
    return len({h[: start + SIZE] for h in histories for start in range(0, len(h), SIZE)})


def branched(branching: str, parents: list[list[int]]) -> list[tuple[int, ...]]:
    tokens = iter(range(10_000))
    prompt = tuple(next(tokens) for _ in range(21))
    own = 5 if branching == "shared_prefix" else 0
    histories = [prompt + tuple(next(tokens) for _ in range(own)) for _ in range(3)]
    for step in range(14):
        if branching == "beam_search":
            histories = [histories[parent] for parent in parents[step]]
        histories = [(*history, next(tokens)) for history in histories]
    return histories


def law(experiment: Experiment) -> None:
    for branching in ("parallel_samples", "beam_search", "shared_prefix"):
        own = 5 if branching == "shared_prefix" else 0
        found, parents = {}, []
        for sharing in ("copy_on_write", "full_blocks", "nothing_shared", "overwritten"):
            result, drawn = recorded(experiment, seed=1, block_sharing=sharing, decode_branching=branching, **SMALL)
            found[sharing] = result.metrics
            parents = (drawn[0] * 3).astype(int).tolist() if drawn else []
        histories = branched(branching, parents)
        total = sum(map(len, histories))
        for sharing in ("copy_on_write", "full_blocks", "nothing_shared"):
            assert found[sharing]["wrong_token_share"] == 0, (branching, sharing)
        assert found["overwritten"]["wrong_token_share"] > 0
        assert all(metrics["step_tokens_read"] == total for metrics in found.values())

        whole = sum(-(-len(h) // SIZE) for h in histories)
        assert found["nothing_shared"]["blocks_held"] == whole
        # every step ends with a token of one's own, so no last block is in common
        assert found["copy_on_write"]["blocks_held"] == blocks_of(histories)
        assert found["full_blocks"]["blocks_held"] == blocks_of(histories)
        assert found["copy_on_write"]["blocks_held_share"] == blocks_of(histories) / whole

        assert found["nothing_shared"]["prefilled_tokens"] == 3 * (21 + own)
        assert found["copy_on_write"]["prefilled_tokens"] == 21 + 3 * own
        assert found["nothing_shared"]["shared_prefix_tokens"] == 0
        assert found["copy_on_write"]["shared_prefix_tokens"] == 21
        assert found["full_blocks"]["shared_prefix_tokens"] == 20
        if branching != "beam_search":
            assert found["full_blocks"]["prefilled_tokens"] == 21 + 2 * 1 + 3 * own  # a tail of one token
            assert found["copy_on_write"]["tokens_copied"] == 2  # by all but the last that writes
            assert found["nothing_shared"]["tokens_copied"] == found["full_blocks"]["tokens_copied"] == 0
        else:
            moved = [21 + step for step in range(14) for branch, parent in enumerate(parents[step]) if parent != branch]
            assert found["nothing_shared"]["tokens_copied"] == sum(moved)
            assert found["full_blocks"]["prefilled_tokens"] == 21 + 2 + sum(3 * ((21 + s) % SIZE) for s in range(14))
            # of the children of one beam all but one copy the block that they write into
            copies = [
                (21 + step) % SIZE * (3 - len(set(parents[step])) if step else 2) for step in range(14)
            ]  # before the first step all three still have the prompt's blocks
            assert found["copy_on_write"]["tokens_copied"] == sum(copies)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('copy_on_write=sharing != "overwritten"', "copy_on_write=True"),
        ('self.sharing == "nothing_shared" and parent == branch', "False"),
        ("self.copied += table.length", "self.copied += 1"),
        ("self.prefilled += table.length - branch.length", "pass"),
        ("list(histories[parent])", "list(histories[0])"),
        ("self.paging.references[block] > 1", "True"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_refuses_too_many_tokens():
    with pytest.raises(ParamsError, match="too_many_branch_tokens"):
        get(NAME).Params(n_branches=32, new_tokens=256)
    with pytest.raises(ParamsError, match="too_many_beam_blocks"):
        get(NAME).Params(decode_branching="beam_search", n_branches=8, new_tokens=256, prompt_len=8192, block_size=1)
