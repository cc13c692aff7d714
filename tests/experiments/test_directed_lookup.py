"""directed_lookup against gradients by autograd, bounds that follow from symmetry, and heads that are built by hand."""

import itertools
import math

import numpy as np
import pytest
import torch

from engine.base import ParamsError, make_run
from engine.experiments import directed_lookup
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "directed_lookup"
FORMS = ("tied", "separate", "symmetric")
# what the best head is known to reach (see the module): form, who is wanted, mask, value
REACHED = [
    ("separate", "cycle", "no_mask", 1),
    ("separate", "chain", "no_mask", 1),
    ("separate", "pairs", "no_mask", 1),
    ("symmetric", "cycle", "no_mask", 1 / 2),
    ("symmetric", "cycle", "no_self", 1 / 2),
    ("tied", "cycle", "no_self", 1 / 2),
    ("symmetric", "pairs", "no_mask", 1),
    ("tied", "pairs", "no_mask", 1 / 2),
    ("tied", "pairs", "no_self", 1),
    ("tied", "chain", "strict", 1),
]


def law(experiment: Experiment) -> None:
    for form, wanted, mask, value in REACHED:
        m = run(experiment, seed=2, projections=form, wanted=wanted, mask=mask).metrics
        # the search stops within 0.004 of the best, and no row can have more than the rest of exp(-16) · 7
        assert m["wanted_weight"] == pytest.approx(value, abs=0.005), (form, wanted, mask)
        assert m["wanted_weight_bound"] == pytest.approx(value), (form, wanted, mask)
        back = m["wanted_weight"] if wanted == "pairs" or value == 1 / 2 else 0.0
        assert m["reverse_weight"] == pytest.approx(back, abs=1e-3), (form, wanted, mask)
    chain = run(experiment, seed=2, wanted="chain").metrics
    assert 0.43 < chain["wanted_weight"] < 0.47  # a longer search ends at 0.460
    assert chain["wanted_weight_bound"] == pytest.approx(1 / (1 + math.exp(-16 / 14)))
    found = run(experiment, seed=2, wanted="chain").tables["map"]["attention_weight"].reshape(8, 8)
    previous = [found[i, i - 1] for i in range(1, 8)]
    assert chain["wanted_weight"] == pytest.approx(math.exp(np.log(previous).mean()), rel=1e-5)  # float32 table
    assert chain["wanted_weight_min"] == pytest.approx(min(previous), rel=1e-5)
    assert chain["reverse_weight"] == pytest.approx(
        math.exp(np.log([found[i - 1, i] for i in range(1, 8)]).mean()), rel=1e-4
    )
    assert chain["self_weight_mean"] == pytest.approx(np.diag(found).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gradient.flip(0) * follow", "gradient.flip(0) * signs"),  # separate ones that are not
        ("params.d_k // 2 :] = -1", "params.d_k :] = -1"),  # symmetric ones that are tied
        ('name != "separate"', "True"),
        ('"chain": (at - 1).clamp_min(0)', '"chain": (at + 1).clamp_max(n - 1)'),
        ("keep = keep & ~torch.eye", "keep = keep | ~torch.eye"),  # the token itself is not hidden
        ("weights[task.wanted[rows], rows.nonzero()[:, 0]]", "weights[rows.nonzero()[:, 0], task.wanted[rows]]"),
        ("vectors = vectors + first", "vectors = vectors - first"),  # the search descends
        ("return 1 / 3 if", "return 1 / 2 if 1 / 2 else 1 / 3 if"),
        ("return 1 / (1 + math.exp(-gain))", "return 1.0"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    def with_bounds(experiment: Experiment) -> None:
        law(experiment)
        assert run(experiment).metrics["wanted_weight_bound"] == pytest.approx(1 / 3)

    assert_law_catches(with_bounds, NAME, old, new)


@pytest.mark.parametrize("wanted", ["cycle", "chain", "pairs"])
def test_the_gradient_of_the_search_is_that_of_what_it_raises(wanted):
    task = directed_lookup._task(directed_lookup.Params(wanted=wanted, mask="no_self"))
    logits = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    log_weights = logits.masked_fill(torch.eye(8, dtype=torch.bool), -math.inf).log_softmax(-1)
    rows = [i for i in range(8) if wanted != "chain" or i]
    sum(log_weights[i, task.wanted[i]] for i in rows).backward()
    torch.testing.assert_close(directed_lookup._gradient(logits.detach(), task), logits.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("limit", [1.0, 16.0, 1024.0])
@pytest.mark.parametrize("equal_lengths", [False, True])
def test_vectors_keep_their_limit_and_their_kind(limit, equal_lengths):
    params = directed_lookup.Params(logit_limit=limit, equal_lengths=equal_lengths)
    logits = directed_lookup._search(params, make_run(0), directed_lookup._task(params), [limit])[:, 0]
    assert logits.abs().max() <= limit * (1 + 1e-9)  # rounding
    for form, of_form in zip(FORMS, logits, strict=True):
        symmetric = torch.allclose(of_form, of_form.mT, rtol=0, atol=1e-9 * limit)
        assert symmetric == (form != "separate")
    assert torch.linalg.eigvalsh(logits[0]).min() > -1e-9 * limit
    if equal_lengths:
        assert torch.allclose(logits[0].diagonal(dim1=-2, dim2=-1), torch.tensor(limit).double(), rtol=1e-6)


def test_no_symmetric_logits_pass_the_bound():
    """Random symmetric logits, Gram matrices among them, for all that is wanted: the bound is one of all such heads."""
    draw = np.random.default_rng(0)
    n = 4
    for form, wanted, mask in itertools.product(("tied", "symmetric"), ("cycle", "pairs"), ("no_mask", "no_self")):
        bound = directed_lookup._bound(directed_lookup.Params(wanted=wanted, mask=mask), form, 16.0)
        a = 2 * draw.standard_normal((20000, n, n))
        s = a @ a.transpose(0, 2, 1) if form == "tied" else a + a.transpose(0, 2, 1)
        if mask == "no_self":
            s[:, range(n), range(n)] = -np.inf
        log_w = s - np.log(np.exp(s).sum(-1, keepdims=True))
        target = [(i + 1) % n if wanted == "cycle" else i ^ 1 for i in range(n)]
        assert np.exp(log_w[:, range(n), target].mean(-1)).max() <= bound + 1e-12  # rounding


@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_no_tied_chain_passes_the_bound_of_its_lengths(mask):
    """Random Gram matrices with their own longest vector as limit, and the Gaussian chain, which comes closest."""
    draw = np.random.default_rng(0)
    n = 6
    at = np.arange(n)
    shape = np.exp(-((at[:, None] - at) ** 2) / 4) * np.exp(-(at[:, None] + at) / 4)  # largest one before
    for scale in (0.3, 1, 3, 10, 30):
        a = draw.standard_normal((2000, n, n)) * np.exp(-0.1 * at[:, None])
        for grams in (scale * a @ a.transpose(0, 2, 1), scale * shape[None]):
            visible = np.where(np.tri(n, dtype=bool), grams, -np.inf) if mask == "causal" else grams
            log_w = visible - np.log(np.exp(visible - visible.max(-1, keepdims=True)).sum(-1, keepdims=True))
            log_w -= visible.max(-1, keepdims=True)
            found = np.exp(log_w[:, at[1:], at[:-1]].mean(-1))
            params = directed_lookup.Params(wanted="chain", mask=mask, seq_len=n)
            longest = grams.diagonal(axis1=1, axis2=2).max(-1)
            bounds = [directed_lookup._bound(params, "tied", limit) for limit in longest]
            assert (found <= np.array(bounds) + 1e-12).all()  # rounding
            equal = directed_lookup.Params(wanted="chain", mask=mask, seq_len=n, equal_lengths=True)
            assert directed_lookup._bound(equal, "tied", longest[0]) == 0.5


def test_a_chain_built_by_hand_needs_a_limit_in_proportion_to_its_length():
    """Unit vectors whose cosines fall like a Gaussian of the distance, scaled by lengths that fall by e in all.

    Row i is largest at i - 1: of -φ²j - φ²(i - j)²/2 with φ² = 1/n that is the top. Its lead over the next best is some
    φ²/2 = 1/2n of the largest logit, so the limit that a given lead needs grows like n, not exponentially.
    """
    leads = []
    for n in (8, 32, 128, 512):
        at = np.arange(n)
        lengths, cosines = np.exp(-at / n), np.exp(-((at[:, None] - at) ** 2) / (2 * n))
        logits = lengths[:, None] * cosines * lengths
        assert np.linalg.eigvalsh(logits).min() > -1e-9  # a Gram matrix: vectors exist
        assert [row.argmax() for row in logits[1:]] == list(range(n - 1))
        top = np.sort(logits[1:], axis=1)
        leads.append(n * (top[:, -1] - top[:, -2]).min())
    assert max(leads) / min(leads) < 1.5


def test_separate_heads_that_are_built_by_hand_are_found_as_good():
    q, k = 4 * np.eye(8)[(np.arange(8) + 1) % 8], 4 * np.eye(8)
    weights = np.exp(q @ k.T) / np.exp(q @ k.T).sum(-1, keepdims=True)
    assert run(get(NAME), projections="separate").metrics["wanted_weight"] == pytest.approx(weights[0, 1], abs=1e-3)


def test_refuses_what_makes_no_sense():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="wanted_is_hidden"):
        params(mask="causal")
    with pytest.raises(ParamsError, match="pairs_need_even_length"):
        params(wanted="pairs", seq_len=7)


def test_a_larger_limit_never_finds_less():
    found = run(get(NAME), projections="symmetric", logit_limit=1024.0)
    by_limit = found.tables["by_limit"]["wanted_weight"].reshape(3, -1)
    assert (np.diff(by_limit, axis=1) >= 0).all()
    assert found.metrics["wanted_weight"] == pytest.approx(by_limit[FORMS.index("symmetric"), -1])
    at = np.arange(8)
    weights = found.tables["map"]["attention_weight"].reshape(8, 8)[at, (at + 1) % 8]
    assert np.exp(np.log(weights).mean()) == pytest.approx(found.metrics["wanted_weight"], rel=1e-5)  # float32 table
