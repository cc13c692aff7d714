"""Tests of claims; ``deck`` is a small deck whose claims they run for real."""

from pathlib import Path

DECK = Path(__file__).parent / "deck"
