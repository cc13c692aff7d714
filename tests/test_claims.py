"""Every claim of the deck on many seeds, and failing where it must: one test a claim, discovered from the cards.

The small deck of tests/claims runs with it, so that these tests are never empty.
"""

import pytest

from claims.verify import under_fails_when, verify
from content.loader import load_deck
from engine import registry
from tests.claims import DECK

# Whoever writes a claim tries more, once: `make claims ARGS="--seeds 50 --check-fails"`. The same give the same again.
N_SEEDS = 20
N_SEEDS_TRAINING = 2

pytestmark = pytest.mark.claims

DECKS = (load_deck(), load_deck(DECK))


def each_claim(*, that_must_fail: bool = False):
    """All claims with their card. Those about one experiment go to one worker, which keeps the runs that they share."""
    params = []
    for deck in DECKS:
        for card, claims in deck.claims.items():
            for claim in claims:
                if claim.fails_when is not None or not that_must_fail:
                    params.append(
                        pytest.param(card, claim, id=claim.id, marks=pytest.mark.xdist_group(claim.experiment))
                    )
    return params


@pytest.mark.parametrize(("card", "claim"), each_claim())
def test_claim_holds_on_every_seed(card, claim):
    seeds = range(N_SEEDS_TRAINING if registry.get(claim.experiment).trains else N_SEEDS)
    verdict = verify(claim, card, seeds=seeds, cached=True)
    found = dict(zip(verdict.seeds, verdict.values, strict=True))
    failed = {seed: found[seed] for seed in verdict.failed_seeds}
    assert verdict.holds, f"accepted from {verdict.low} to {verdict.high}; by seed: {failed}"


@pytest.mark.parametrize(("card", "claim"), each_claim(that_must_fail=True))
def test_claim_fails_where_it_must(card, claim):
    seeds = claim.seeds[:1] if registry.get(claim.experiment).trains else None
    verdict = verify(under_fails_when(claim), card, seeds=seeds, cached=True)
    held = {
        seed: value
        for seed, value in zip(verdict.seeds, verdict.values, strict=True)
        if seed not in verdict.failed_seeds
    }
    assert not held, f"with {claim.fails_when} still between {verdict.low} and {verdict.high}; by seed: {held}"


def test_no_claim_is_left_out_because_its_file_can_not_be_read():
    assert [broken.path.name for deck in DECKS for broken in deck.broken] == []
