"""The generated texts: same seed same text, facts that stay true, strings that repeat."""

import itertools
import random
import re

import pytest

from engine import corpus


def take(texts, n):
    return list(itertools.islice(texts, n))


def test_a_seed_decides_the_texts():
    assert take(corpus.stories(1, 200), 5) == take(corpus.stories(1, 200), 5) != take(corpus.stories(2, 200), 5)
    assert take(corpus.repeats(1, 200), 5) == take(corpus.repeats(1, 200), 5) != take(corpus.repeats(2, 200), 5)
    assert {len(text) for text in take(corpus.stories(3, 77), 20)} == {77}


def test_every_character_has_a_token_and_comes_back():
    for text in (*take(corpus.stories(1, 300), 20), *(text for text, _ in take(corpus.repeats(1, 300), 20))):
        assert corpus.decode(corpus.encode(text)) == text
    assert corpus.decode(corpus.encode("naïve 注意力\n")) == "na?ve ???\n"
    assert len(set(corpus.VOCABULARY)) == corpus.N_TOKENS == 96


def test_strings_repeat_with_their_period_and_every_length_comes():
    texts = take(corpus.repeats(5, 256), 400)
    for text, period in texts:
        assert text[period:] == text[:-period]
    periods = {period for _, period in texts}
    assert min(periods) == corpus.REPEATED[0]
    assert max(periods) > 0.9 * corpus.REPEATED[1]
    assert {period for _, period in take(corpus.repeats(5, 64, period=9), 5)} == {9}


def replay(told: str) -> int:
    """Read a story sentence by sentence and answer each question from what was said before it."""
    where: dict[str, str] = {}  # of people and of things that lie somewhere
    holder: dict[str, str] = {}
    asked = 0
    for sentence in re.findall(r"[^.?]+[.?]", told):
        s = sentence.strip()
        if m := re.fullmatch(r"(\w+) has an? (.+)\.", s):
            holder[m[2]] = m[1]
        elif m := re.fullmatch(r"(?:The )?(.+) is in the (\w+)\.", s):
            where[m[1]] = m[2]
        elif m := re.fullmatch(r"(\w+) went to the (\w+)\.", s):
            assert where[m[1]] != m[2]
            where[m[1]] = m[2]
        elif m := re.fullmatch(r"(\w+) took the (.+)\.", s):
            assert where.pop(m[2]) == where[m[1]]
            holder[m[2]] = m[1]
        elif m := re.fullmatch(r"(\w+) gave the (.+) to (\w+)\.", s):
            assert holder[m[2]] == m[1]
            assert where[m[1]] == where[m[3]]
            holder[m[2]] = m[3]
        elif m := re.fullmatch(r"(\w+) put the (.+) down in the (\w+)\.", s):
            assert (holder.pop(m[2]), where[m[1]]) == (m[1], m[3])
            where[m[2]] = m[3]
        elif m := re.fullmatch(r"(\w+) waited in the (\w+)\.", s):
            assert where[m[1]] == m[2]
        elif m := re.fullmatch(r"Where is (?:the )?(.+)\?", s):
            asked, question = asked + 1, m[1]
            answer = where[question]
        elif m := re.fullmatch(r"Who has the (.+)\?", s):
            asked, question = asked + 1, m[1]
            answer = holder[question]
        else:  # the answer to the question before
            assert re.fullmatch(rf"(?:In the )?{answer}\.", s), told
    return asked


def test_every_answer_follows_from_what_was_said():
    draw = random.Random(8)
    assert sum(replay(corpus.story(draw)) for _ in range(300)) > 300  # questions are asked at all


def test_a_wrong_answer_is_noticed():
    draw = random.Random(8)
    told = next(s for s in iter(lambda: corpus.story(draw), None) if "? In the garden." in s)
    with pytest.raises((AssertionError, KeyError)):
        replay(told.replace("? In the garden.", "? In the forest."))
