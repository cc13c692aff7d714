"""engine/paging.py against contiguous tensors, and its allocators against a map of every slot."""

import random

import pytest
import torch

from engine.attention import attention
from engine.paging import BlockTable, Buddy, FirstFit, PagedCache, Paging, PoolFull, paged_attention

N_HEADS, D_K, D_V = 3, 8, 5


def cache_of(n_blocks: int, block_size: int, **how: bool) -> PagedCache:
    paging = Paging(n_blocks, block_size, **how)
    keys = torch.full((n_blocks, N_HEADS, block_size, D_K), float("nan"), dtype=torch.float64)
    return PagedCache(paging, keys, keys.new_full((n_blocks, N_HEADS, block_size, D_V), float("nan")))


def drawn(n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (torch.randn(N_HEADS, n_tokens, width, dtype=torch.float64) for width in (D_K, D_V))


def check_counts(paging: Paging, tables: list[BlockTable]) -> None:
    held = [block for table in tables for block in table.blocks]
    assert paging.references == [held.count(block) for block in range(len(paging.references))]
    assert paging.free_blocks == paging.references.count(0)
    for table in tables:
        assert len(table.blocks) == paging.blocks_for(table.length)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_random_life_of_sequences_keeps_their_tokens(block_size):
    # appended, forked and freed at random, each sequence reads exactly its own tokens; empty slots are NaN, so that
    # a single one of them in a result would show
    torch.manual_seed(0)
    choose = random.Random(block_size)
    cache, lives = cache_of(80, block_size), []
    for _ in range(200):
        act = choose.choice(["new", "append", "append", "fork", "prefix", "free"]) if lives else "new"
        if act == "new" and len(lives) < 8:
            lives.append((BlockTable(), torch.empty(N_HEADS, 0, D_K).double(), torch.empty(N_HEADS, 0, D_V).double()))
        elif act == "append":
            n = choose.randrange(len(lives))
            table, keys, values = lives[n]
            k, v = drawn(choose.choice([1, 1, 1, 5]))
            try:
                cache.append(table, k, v)
            except PoolFull:
                continue
            lives[n] = table, torch.cat((keys, k), 1), torch.cat((values, v), 1)
        elif act == "fork" and len(lives) < 8:
            table, keys, values = choose.choice(lives)
            lives.append((cache.paging.fork(table), keys, values))
        elif act == "prefix" and len(lives) < 8:
            table, keys, values = choose.choice(lives)
            kept = choose.randint(0, table.length) // block_size * block_size
            lives.append((cache.paging.full_prefix(table, kept), keys[:, :kept], values[:, :kept]))
        elif act == "free":
            cache.paging.free(lives.pop(choose.randrange(len(lives)))[0])
        check_counts(cache.paging, [life[0] for life in lives])
        for table, keys, values in lives:
            assert all(torch.equal(x, y) for x, y in zip(cache.gather(table), (keys, values), strict=True))
            if table.length:
                q = torch.randn(N_HEADS, 2, D_K, dtype=torch.float64)
                # a few dozen float64 sums in another order
                torch.testing.assert_close(
                    paged_attention(q, cache, table), attention(q, keys, values), rtol=0, atol=1e-13
                )


def test_copy_on_write_copies_the_last_block_once_and_only_if_it_is_shared():
    cache = cache_of(10, 4)
    first = BlockTable()
    assert cache.append(first, *drawn(6)) is None
    second = cache.paging.fork(first)
    copied = cache.append(second, *drawn(1))
    assert copied
    assert (copied.source, copied.tokens) == (first.blocks[-1], 2)
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] == copied.target != first.blocks[1]
    assert cache.append(first, *drawn(1)) is None  # nobody else has it any more
    assert cache.append(second, *drawn(1)) is None
    third = cache.paging.fork(second)  # at a border of blocks there is nothing to copy
    assert cache.append(third, *drawn(1)) is None


def test_without_copy_on_write_one_sequence_writes_into_another():
    cache = cache_of(10, 4, copy_on_write=False)
    first, second = BlockTable(), BlockTable()
    cache.append(first, *drawn(6))
    second = cache.paging.fork(first)
    k, v = drawn(1)
    cache.append(first, k, v)
    cache.append(second, *drawn(1))
    assert not torch.equal(cache.gather(first)[0][:, -1:], k)


def test_a_full_pool_refuses_and_changes_nothing():
    cache = cache_of(3, 4)
    first = BlockTable()
    cache.append(first, *drawn(10))
    second = cache.paging.fork(first)
    with pytest.raises(PoolFull):
        cache.append(second, *drawn(1))  # the copy needs a fourth block
    with pytest.raises(PoolFull):
        cache.append(first, *drawn(3))
    check_counts(cache.paging, [first, second])


@pytest.mark.parametrize("made", [FirstFit, Buddy])
def test_regions_never_overlap_and_everything_returns(made):
    regions, choose, held = made(256), random.Random(3), {}
    for _ in range(2000):
        if choose.random() < 0.55:
            wanted = choose.randint(1, 60)
            start = regions.take(wanted)
            room = regions.room_for(wanted)
            taken = {slot for first, size in held.items() for slot in range(first, first + size)}
            assert len(taken) + regions.free_slots + (room if start is not None else 0) == 256
            if start is None:
                steps = range(0, 257 - room, room) if made is Buddy else range(257 - room)
                assert all(taken & set(range(first, first + room)) for first in steps), "a gap was overlooked"
            else:
                assert not taken & set(range(start, start + room))
                held[start] = room
        elif held:
            start = choose.choice(sorted(held))
            del held[start]
            regions.give_back(start)
    for start in list(held):
        regions.give_back(start)
    assert regions.free_slots == 256
    assert regions.take(256) == 0


def test_a_buddy_rounds_to_powers_of_two():
    assert [Buddy(64).room_for(n) for n in (1, 2, 3, 8, 9, 33)] == [1, 2, 4, 8, 16, 64]
