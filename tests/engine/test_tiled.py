"""The state of an online softmax: against the softmax of whole rows, and as an algebra."""

import itertools
import math

import pytest
import torch

from engine.attention import softmax
from engine.tiled import (
    State,
    absorb,
    empty_state,
    finish,
    finite_or_zero,
    merge,
    merge_means,
    next_reference,
    tile_slices,
)


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(2, 3, 5, 29, generator=generator, dtype=torch.float64)
    return logits, torch.randn(2, 3, 29, 4, generator=generator, dtype=torch.float64)


def through(logits, v, slices, slack=0.0):
    state = empty_state(logits, v)
    for keys in slices:
        state = absorb(state, logits[..., keys], v[..., keys, :], slack)
    return state


def near(one, other):
    return torch.allclose(one, other, rtol=0, atol=1e-13)  # float64, sums of 29 terms near 1


@pytest.mark.parametrize("tile_len", [1, 2, 7, 28, 29, 64])
@pytest.mark.parametrize("slack", [0.0, 3.0])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_tiles_in_any_order_give_the_softmax_of_whole_rows(rows, tile_len, slack, reverse):
    logits, v = rows
    slices = tile_slices(29, tile_len)
    assert [i for s in slices for i in range(29)[s]] == list(range(29))
    state = through(logits, v, slices[::-1] if reverse else slices, slack)
    out, lse = finish(state)
    assert out.shape == (2, 3, 5, 4)
    assert near(out, softmax(logits) @ v)
    assert near(lse, logits.logsumexp(dim=-1))
    if slack == 0:
        assert torch.equal(state.reference, logits.amax(dim=-1))
    else:
        assert (logits.amax(dim=-1) - state.reference).max() <= slack


def test_merging_is_commutative_and_associative_and_has_an_identity(rows):
    logits, v = rows
    parts = [through(logits[..., s], v[..., s, :], [slice(None)]) for s in tile_slices(29, 8)]
    whole = finish(through(logits, v, [slice(None)]))
    for order in itertools.permutations(parts):
        a, b, c, d = order
        for state in (
            merge(merge(merge(a, b), c), d),
            merge(merge(a, b), merge(c, d)),
            merge(a, merge(b, merge(c, d))),
        ):
            assert all(map(near, finish(state), whole))
    empty = empty_state(logits, v)
    for state in (merge(empty, parts[0]), merge(parts[0], empty)):
        assert all(map(torch.equal, state, parts[0]))
    assert all(map(torch.equal, merge(empty, empty), empty))


def test_means_merge_by_their_log_sum_exps(rows):
    logits, v = rows
    parts = [finish(through(logits[..., s], v[..., s, :], [slice(None)])) for s in tile_slices(29, 8)]
    parts.append(finish(empty_state(logits, v)))
    out, lse = merge_means(*(torch.stack(part) for part in zip(*parts, strict=True)))
    assert near(out, softmax(logits) @ v)
    assert near(lse, logits.logsumexp(dim=-1))
    nothing = merge_means(torch.zeros(2, 5, 4), torch.full((2, 5), -math.inf))
    assert torch.equal(nothing[0], torch.zeros(5, 4))
    assert torch.equal(nothing[1], torch.full((5,), -math.inf))


def test_masked_tiles_and_rows_without_any_key(rows):
    logits, v = (x.clone() for x in rows)
    logits[..., :14] = -math.inf  # the first two tiles of 7
    logits[0, 0, 0] = -math.inf  # and one whole row
    out, lse = finish(through(logits, v, tile_slices(29, 7)))
    assert torch.equal(out[0, 0, 0], torch.zeros(4, dtype=torch.float64))
    assert lse[0, 0, 0] == -math.inf
    assert near(out[1], (softmax(logits) @ v)[1])


def test_the_reference_moves_only_beyond_the_slack():
    m, largest = torch.tensor([-math.inf, -math.inf, 0.0, 0.0, 0.0]), torch.tensor([-math.inf, 2.0, 2.0, 2.5, -1.0])
    assert next_reference(m, largest).tolist() == [-math.inf, 2, 2, 2.5, 0]
    assert next_reference(m, largest, slack=2.0).tolist() == [-math.inf, 2, 0, 2.5, 0]
    assert finite_or_zero(torch.tensor([-math.inf, 3.0])).tolist() == [0, 3]


def test_states_are_plain_tuples(rows):
    assert State._fields == ("reference", "total", "weighted")
    assert [x.shape for x in empty_state(*rows)] == [(2, 3, 5), (2, 3, 5), (2, 3, 5, 4)]
