"""ring_cache against a ring of token numbers, followed step by step, and a windowed stack in numpy."""

import itertools
import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError
from engine.registry import Experiment, get
from engine.windows import EMPTY, RingCache, keep_at
from tests.harness import assert_law_catches, recorded, run

NAME = "ring_cache"
WIDTH, HEADS, D_K = 32, 2, 16


def first_wrong(use: str, window: int, slots: int, step: int, drafts: int, seq_len: int) -> int:
    """The first token that does not see exactly the keys of its window: numbers of tokens are moved, nothing else."""
    ring: dict[int, int] = {}
    for start in range(0, seq_len, step):
        new = range(start, min(start + step, seq_len))
        old = dict(ring)

        def put(tokens: range, ring: dict[int, int] = ring) -> None:
            for token in list(tokens)[-slots:]:
                ring[min(token, slots - 1) if use == "last_slot_reused" else token % slots] = token

        put(new)
        held = [*old.values(), *new] if use == "read_first" else list(ring.values())
        for token in new:
            seen = {key for key in held if use == "filled_slots_seen" or token - window < key <= token}
            if seen != set(range(max(0, token - window + 1), token + 1)):
                return token
        if drafts:
            put(range(new[-1] + 1, new[-1] + 1 + drafts))
            for slot in [slot for slot, token in ring.items() if token > new[-1]]:
                del ring[slot]
    return seq_len


def law(experiment: Experiment) -> None:
    uses = ("write_first", "read_first", "filled_slots_seen", "last_slot_reused")
    for use, window, extra, step, drafts in itertools.product(uses, (1, 4), (-1, 0, 2), (1, 3), (0, 1, 3)):
        if window + extra < 1:
            continue
        result = run(
            experiment,
            ring_use=use,
            window=window,
            extra_slots=extra,
            tokens_per_step=step,
            rejected_drafts=drafts,
            seq_len=12,
            n_layers=1,
        )
        wanted = first_wrong(use, window, window + extra, step, drafts, 12)
        assert result.metrics["tokens_before_error"] == wanted, (use, window, extra, step, drafts)
        # float64: sums of some ten terms in one layer; a missing key changes the output by a good part of it
        assert (result.metrics["largest_error"] < 1e-12) == (wanted == 12)
        assert result.metrics["ring_cache_bytes"] == 2 * (window + extra) * WIDTH * 8
        assert result.metrics["whole_cache_bytes"] == 2 * 12 * WIDTH * 8
        steps, slots = [min(step, 12 - start) for start in range(0, 12, step)], window + extra
        assert result.metrics["ring_tokens_written"] == sum(min(n, slots) + min(drafts, slots) for n in steps)
    for use, first in (("turned_on_read", 12), ("slot_as_position", 4), ("position_stuck", 4)):
        metrics = run(experiment, ring_use=use, window=4, seq_len=12).metrics
        assert metrics["tokens_before_error"] == first, use
        assert (metrics["largest_error"] < 1e-12) == (first == 12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("keep_window(len(text), window=params.window)", "keep_window(len(text), window=params.window + 1)"),
        ("cache.forget_from(end)", "cache.forget_from(end + 1)"),
        ('seen = beside if params.ring_use == "read_first"', 'seen = beside if params.ring_use == "no"'),
        ("return positions % n_slots", "return positions"),
        ("exact_angles(at - oldest, D_K)", "exact_angles(at * 0, D_K)"),
        ("positions.clamp_max(cache.n_slots - 1) if", "None if"),
        ("params.window + params.extra_slots)\n", "params.window)\n"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / math.sqrt(x.var() + 1e-5)


def turn(x: np.ndarray, position: int) -> np.ndarray:
    half = D_K // 2
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 10000 ** (-np.arange(half) / half))
    return np.concatenate([z.real, z.imag])


def test_the_whole_pass_is_windowed_attention():
    """Errors of a ring that lost its oldest key, worked out in numpy from what the run drew."""
    result, draws = recorded(get(NAME), seed=2, window=3, extra_slots=-1, seq_len=6, n_layers=1)
    W_q, W_k, W_v, W_o, W_up, W_down = (w / math.sqrt(w.shape[1]) for w in draws[:6])
    text = draws[6]
    outputs = {}
    for window in (3, 2):
        for i, t in enumerate(text):
            read = []
            for h in range(HEADS):
                part = slice(h * D_K, (h + 1) * D_K)
                seen = range(max(0, i - window + 1), i + 1)
                q = turn(W_q[part] @ norm(t), i)
                e = np.exp([q @ turn(W_k[part] @ norm(text[j]), j) / math.sqrt(D_K) for j in seen])
                read.append(sum(w * (W_v[part] @ norm(text[j])) for w, j in zip(e / e.sum(), seen, strict=True)))
            x = t + W_o @ np.concatenate(read)
            up = W_up @ norm(x)
            outputs[window, i] = x + W_down @ np.array([u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in up])
    for i in range(6):
        wanted = math.sqrt(((outputs[2, i] - outputs[3, i]) ** 2).mean() / (outputs[3, i] ** 2).mean())
        # float64, one layer of sums of 128 terms
        assert result.tables["by_token"]["drawn_error"][i] == pytest.approx(max(wanted, 1e-17), rel=1e-9, abs=1e-14)


def test_the_ring_keeps_the_last_tokens_in_their_slots():
    cache = RingCache(1, 3)
    for t in range(5):
        one = torch.full((1, 1, 2), float(t))
        cache.write(0, one, -one, torch.tensor([t]))
    held = cache.stored(0)
    assert held.positions.tolist() == [3, 4, 2]
    assert held.keys[0, :, 0].tolist() == [3, 4, 2]
    assert held.values[0, :, 0].tolist() == [-3, -4, -2]
    assert cache.nbytes == 2 * 3 * 2 * 4
    many = torch.arange(5.0, 12.0)[None, :, None].expand(1, 7, 2)
    cache.write(0, many, many, torch.arange(5, 12))  # more than there are slots
    assert held.positions.tolist() == [9, 10, 11]
    cache.forget_from(10)
    assert held.positions.tolist() == [9, EMPTY, EMPTY]
    assert keep_at(torch.tensor([9, 11, 12]), held.positions, 3).tolist() == [
        [True, False, False],
        [True, False, False],
        [False, False, False],
    ]


def test_slots_are_drawn_with_their_ages():
    table = run(get(NAME), window=4, seq_len=10).tables["slots"]
    cells = dict(zip(zip(table["position"], table["slot"], strict=True), table["tokens_old"], strict=True))
    assert cells == {(t, s): (t - s) % 4 for t in range(10) for s in range(4) if s <= t}


def test_refuses_a_ring_without_slots():
    with pytest.raises(ParamsError, match="ring_has_a_slot"):
        get(NAME).Params(window=2, extra_slots=-2)
