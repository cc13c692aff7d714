"""What lives at once, against sizes that are known."""

import torch

from engine.live_memory import count_live

KIB = 1024


def test_what_is_gone_makes_room_and_what_stays_does_not():
    with count_live() as live:
        x = torch.ones(256)  # 1 KiB
        y = x + 1
        del x
        z = y * 2
        assert live.now == 2 * KIB
    assert live.peak == 2 * KIB  # x and y, then y and z
    assert z.sum() == 4 * 256


def test_operands_live_while_the_result_is_made():
    x = torch.ones(256)
    with count_live(x) as live:
        y = (x + 1) * 2  # the sum is gone only when the product is there
        assert live.now == KIB
    assert live.peak == 2 * KIB
    assert y.numel() == 256


def test_views_and_work_in_place_are_free():
    x = torch.ones(256)
    with count_live(x) as live:
        x.view(16, 16).mT[0].add_(1)
        y = torch.zeros(256)
        halves = y.split(128)
        del y
        assert live.now == KIB  # one half keeps the whole piece alive
        del halves
        assert live.now == 0
    assert live.peak == KIB


def test_a_hundred_steps_hold_no_more_than_one():
    x = torch.ones(256)
    with count_live(x) as live:
        for _ in range(100):
            x = x + 1
    assert live.peak == 2 * KIB


def test_results_of_several_tensors_are_seen():
    with count_live() as live:
        values, places = torch.rand(64).sort()
    assert live.peak == 64 * 4 + values.nbytes + places.nbytes


def test_tensors_without_storage_count_what_they_would_take():
    with count_live() as live:
        made = torch.empty(1024, 1024, device="meta", dtype=torch.float16)
        assert live.now == made.nbytes == 2 * KIB * KIB
