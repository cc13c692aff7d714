import pytest

from content.loader import load_deck


@pytest.fixture(scope="session")
def deck():
    return load_deck()


@pytest.fixture(scope="session")
def strings(deck):
    return deck.strings
