"""What experiments on the language model read: drawn by the run alone, never seen in training, and said honestly."""

import itertools

import pytest
import torch

from engine import corpus, inputs
from engine.base import make_run
from tools.train_language_model import HELD_OUT_SEED


def test_the_seed_of_the_run_decides_the_texts():
    for kind in ("stories", "repeats"):
        one, again, other = (inputs.draw_texts(make_run(seed), kind, 3, 128).tokens for seed in (5, 5, 6))
        assert torch.equal(one, again)
        assert not torch.equal(one, other)


def test_no_text_comes_from_a_seed_of_training(monkeypatch):
    seeds = []
    for kind in ("stories", "repeats"):
        original = getattr(corpus, kind)
        monkeypatch.setattr(
            corpus, kind, lambda seed, length, original=original: seeds.append(seed) or original(seed, length)
        )
    for seed, kind in itertools.product(range(50), ("stories", "repeats")):
        inputs.draw_texts(make_run(seed), kind, 1, 128)
    assert len(set(seeds)) == len(seeds) / 2  # both kinds of a run begin with the same number
    assert min(seeds) >= inputs.LOWEST_SEED > 2 * HELD_OUT_SEED + 1


def test_repeats_repeat_with_their_period_and_are_known_once_they_have_begun_again():
    texts = inputs.draw_texts(make_run(1), "repeats", 16, 128)
    assert len(set(texts.period.tolist())) > 4
    for tokens, period, known in zip(texts.tokens, texts.period.tolist(), texts.known(), strict=True):
        assert torch.equal(tokens[period:], tokens[:-period])
        assert known.tolist() == [place > period for place in range(1, 128)]


def test_of_a_text_everything_can_be_known():
    for source in ("stories", "text"):
        assert inputs.read_texts(make_run(0), source, "Ada.", 2, 128).known().all()


def test_a_typed_text_is_read_as_it_is():
    texts = inputs.read_texts(make_run(0), "text", "Ada é 钥匙?", 4, 128)
    assert corpus.decode(texts.tokens[0].tolist()) == "Ada ? ???"
    assert texts.tokens.shape == (1, 9)
    assert inputs.n_unknown("text", "Ada é 钥匙?") == 3
    assert inputs.n_unknown("stories", "Ada é 钥匙?") == 0  # it is not read


def test_a_typed_text_needs_a_token_to_predict():
    assert [problem.rule for problem in inputs.too_short("text", "A")] == ["text_needs_two"]
    assert not list(inputs.too_short("text", "Ad"))
    assert not list(inputs.too_short("stories", "A"))


@pytest.mark.parametrize(("text", "names"), [("A b\n", ["0 A", "1 ␣", "2 b", "3 ↵"]), ("", [])])
def test_cells_are_named_by_place_and_character(text, names):
    assert inputs.cell_names(corpus.encode(text)) == names
