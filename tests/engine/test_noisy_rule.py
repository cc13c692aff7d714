"""The rule with noise: how often it is kept, and that its loss is the entropy of what it says."""

import math

import pytest
import torch

from engine.base import make_run
from engine.noisy_rule import N_TOKENS, draw_tokens, floor_nats, follows

N, LENGTH = 4000, 12
DRAWN = N * (LENGTH - 2)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_token_follows_as_often_as_the_rule_and_chance_let_it(share):
    tokens = draw_tokens(make_run(0), N, LENGTH, share)
    assert tokens.shape == (N, LENGTH)
    assert tokens.min() == 0
    assert tokens.max() == N_TOKENS - 1
    p = share + (1 - share) / N_TOKENS
    kept = follows(tokens).double().mean().item()
    assert kept == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / DRAWN))  # five standard errors of a share


def test_the_rule_looks_two_places_back():
    tokens = torch.tensor([[1, 2, 4, 5, 7, 0], [1, 2, 5, 5, 0, 1]])
    assert follows(tokens).tolist() == [[True] * 4, [False, True, True, False]]


def test_the_floor_is_the_entropy_of_the_rule():
    """The mean over many sequences of what an outcome costs; the first target is a free draw."""
    share = 0.6
    p = share + (1 - share) / N_TOKENS
    other = (1 - share) / N_TOKENS
    entropy = -p * math.log(p) - (N_TOKENS - 1) * other * math.log(other)
    wanted = (math.log(N_TOKENS) + (LENGTH - 2) * entropy) / (LENGTH - 1)
    spread = math.log(p / other) * math.sqrt(p * (1 - p) / DRAWN)
    assert floor_nats(draw_tokens(make_run(1), N, LENGTH, share), share) == pytest.approx(wanted, abs=5 * spread)
    assert floor_nats(draw_tokens(make_run(1), N, LENGTH, 0.0), 0.0) == pytest.approx(math.log(N_TOKENS), rel=1e-12)
