"""slot_retrieval against layers that are set by hand and fitted to drawn tokens by numpy."""

import numpy as np
import pytest
import torch

from engine.base import ParamsError, make_run
from engine.experiments import slot_retrieval
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "slot_retrieval"
SETTINGS = [
    {},  # two heads of 8, content of 8: nothing is lost
    {"n_heads": 1},
    {"content": 16},  # as wide as the model: two heads pass on half, as one does
    {"content": 12},
    {"n_heads": 4, "n_targets": 4, "content": 4},
    {"n_heads": 2, "n_targets": 4, "content": 4},
    {"n_heads": 1, "n_targets": 3, "content": 5, "kv_len": 16},
    {"n_heads": 4, "n_targets": 2, "d_model": 32, "content": 16},
]
# A share of 1024 drawn squared lengths, 16 numbers or more each, that is split in two: standard error at most 0.006
FIVE_ERRORS = 0.03


def by_hand(n_heads=2, n_targets=2, d_model=16, content=8, kv_len=8) -> float:
    """What is lost when head h looks at target h modulo n_targets alone: W_V drawn, W_O fitted to half of the tokens.

    One head may look at any target, or at all of them: this one takes the mean.
    """
    draw = np.random.default_rng(1)
    tokens = draw.standard_normal((8192, kv_len, content))
    wanted = tokens[:, :n_targets].reshape(len(tokens), -1)
    means = [tokens[:, :n_targets].mean(1)] if n_heads == 1 else [tokens[:, h % n_targets] for h in range(n_heads)]
    read = np.concatenate([mean @ draw.standard_normal((content, d_model // n_heads)) for mean in means], axis=1)
    W_o = np.linalg.lstsq(read[::2], wanted[::2], rcond=None)[0]
    return float(((read @ W_o - wanted)[1::2] ** 2).sum() / (wanted[1::2] ** 2).sum())


def law(experiment: Experiment) -> None:
    for p in SETTINGS:
        for seed in (1, 2):
            result = run(experiment, seed=seed, **p)
            expected = by_hand(**p)
            assert result.metrics["lost_share"] == pytest.approx(expected, abs=FIVE_ERRORS), (p, seed)
            assert result.metrics["lost_share_one_head"] == pytest.approx(
                by_hand(**p | {"n_heads": 1}), abs=FIVE_ERRORS
            )
            table = result.tables["by_content"]
            at = (table["content"] == p.get("content", 8)) & (table["n_heads"] == p.get("n_heads", 2))
            assert table["lost_share"][at] == pytest.approx(result.metrics["lost_share"], abs=FIVE_ERRORS), (p, seed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.arange(d_model) // (d_model // n_heads)", "torch.arange(d_model) * 0"),  # all heads share a row
        ("context(rows[:, None], v)", "context(rows.flip(0)[:, None], v)"),  # heads in another order than W_o's
        ("free = free - STEP_SIZE", "free = free + STEP_SIZE"),  # the search climbs
        ("by_coordinate[:, :n_targets, None]", "by_coordinate[:, 1 : n_targets + 1, None]"),  # other keys wanted
        ("min(d_v, content), :content]", "1, :content]"),  # a head passes on one number
        ("(by_coordinate @ by_coordinate.mT)", "(by_coordinate @ by_coordinate.mT).square()"),  # another W_o
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_gradient_of_the_search_is_that_of_what_it_lowers():
    draw = torch.Generator().manual_seed(3)
    params = slot_retrieval.Params(n_heads=4, n_targets=3, content=12)
    layers = slot_retrieval._draw_layers(make_run(3), params, [(1, 12), (4, 4), (4, 12)])
    rows = torch.rand(3, 2, 4, 8, generator=draw, dtype=torch.float64).softmax(-1).requires_grad_()
    lost, gradient = slot_retrieval._lost(rows, layers, params.n_targets)
    (expected,) = torch.autograd.grad(lost.sum(), rows)
    torch.testing.assert_close(gradient.detach(), expected, rtol=1e-6, atol=1e-8)  # float64, an inverse in between


def test_no_row_of_one_head_beats_the_rows_that_were_found():
    """Whatever the row, weights of both signs included: least squares in closed form for 5000 of them."""
    draw = np.random.default_rng(0)
    rows = np.concatenate([draw.dirichlet([0.3] * 8, 4000), draw.standard_normal((1000, 8))])
    kept = (rows[:, :2] ** 2).sum(1) / (
        2 * (rows**2).sum(1)
    )  # of two targets' variance, by the mean's overlap with each
    found = run(get(NAME), n_heads=1).tables["by_content"]["lost_share"]
    assert found == pytest.approx(0.5, abs=1e-5)  # what leaks within the range of the logits is squared: below 1e-6
    assert (1 - kept).min() >= 0.5 - 1e-12  # rounding


def test_the_bound_is_never_passed_and_is_reached():
    for seed in range(5):
        for p in SETTINGS:
            table = run(get(NAME), seed=seed, **p).tables["by_content"]
            gap = table["lost_share"] - table["lost_share_bound"]
            assert gap.min() > -1e-7  # the ridge
            assert gap.max() < 0.02, (seed, p)


def test_a_single_token_is_no_trouble_and_a_small_range_of_logits_is():
    assert run(get(NAME), n_heads=1, n_targets=1).metrics["lost_share"] < 1e-3
    lost = [run(get(NAME), logit_range=float(r)).metrics["lost_share"] for r in (2, 5, 10)]
    assert lost[0] > 0.03 > lost[1] > 1e-5 > lost[2]


def test_rows_shown_are_distributions_on_the_keys():
    table = run(get(NAME)).tables["rows"]
    for name in ("one_head", "H1", "H2"):
        assert table["attention_weight"][table["row"] == name].sum() == pytest.approx(1, abs=1e-12)  # float64


def test_refuses_what_makes_no_sense():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="heads_divide_width"):
        params(n_heads=3)
    with pytest.raises(ParamsError, match="content_within_model"):
        params(content=17)
    with pytest.raises(ParamsError, match="targets_among_keys"):
        params(n_targets=5, kv_len=4)
