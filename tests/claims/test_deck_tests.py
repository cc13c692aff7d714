"""tests/test_claims.py sees a claim that does not hold, and one that can't fail, and names every seed."""

import pytest

from content.loader import load_deck
from tests import test_claims
from tests.claims import DECK
from tests.claims.pretended import claim, install


@pytest.mark.parametrize(("trains", "n_seeds"), [(False, test_claims.N_SEEDS), (True, test_claims.N_SEEDS_TRAINING)])
def test_all_failing_seeds_are_named(monkeypatch, trains, n_seeds):
    calls = install(monkeypatch, lambda params, seed: {"value": float(seed), "second": 0.0}, trains=trains)
    with pytest.raises(AssertionError) as caught:
        test_claims.test_claim_holds_on_every_seed("card", claim({"at_most": 0.5}))
    failed = {seed: float(seed) for seed in range(1, n_seeds)}
    assert f"accepted from None to 0.5; by seed: {failed}" in str(caught.value)
    assert [seed for _, seed in calls] == list(range(n_seeds))


def test_a_claim_that_can_not_fail_is_found(monkeypatch):
    install(monkeypatch, lambda params, seed: {"value": float(seed), "second": 0.0})
    made = claim({"at_most": 1}, fails_when={"other": 1})
    with pytest.raises(
        AssertionError, match=r"\{'other': 1\} still between None and 1\.0; by seed: \{0: 0\.0, 1: 1\.0\}"
    ):
        test_claims.test_claim_fails_where_it_must("card", made)


def test_every_claim_of_a_deck_has_its_test():
    deck = load_deck(DECK)
    wanted = {claim.id for card in deck.cards.values() for claim in card.claims}
    wanted |= {claim.id for claims in deck.loose.values() for claim in claims}
    assert wanted <= {param.id for param in test_claims.each_claim()}
    assert {param.id for param in test_claims.each_claim(that_must_fail=True)} >= wanted - {
        "measured-agrees-with-formula"
    }
