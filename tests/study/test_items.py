"""Every item of the deck, asked and answered through the real grader: a wrong key is impossible."""

import ast
import itertools
import random
import re
import statistics

import pytest
import torch

from claims import receipts
from content.checks import STANDS_OUT, made_items, stands_out
from content.loader import load_deck
from content.schema import Claim, Mistake, draws
from engine import registry
from engine.base import make_run
from study import grading
from study.answers import Unreadable
from study.items import (
    KINDS,
    ChoiceQuestion,
    ClozeQuestion,
    NumericQuestion,
    OrderQuestion,
    PredictQuestion,
    RecallQuestion,
    ShapeQuestion,
    items_of,
    pose,
)

DECK = load_deck()
ITEMS = {item.id: (item, card) for card in DECK.cards.values() for item in items_of(card)}
ATTEMPTS = range(3)


def of(*kinds):
    names = [name for name, (item, _) in ITEMS.items() if item.kind in kinds]
    assert names, kinds
    return pytest.mark.parametrize("name", names)


def asked(name, attempt=0):
    return pose(*ITEMS[name], attempt)


@pytest.mark.parametrize("card", DECK.cards.values(), ids=lambda card: card.id)
def test_a_card_has_the_items_that_the_check_counts(card):
    assert sorted((item.kind, item.name) for item in items_of(card)) == sorted(made_items(card))


def test_ids_are_unique_and_kinds_known():
    assert len(ITEMS) == sum(len(items_of(card)) for card in DECK.cards.values())
    assert {item.kind for item, _ in ITEMS.values()} == set(KINDS)


@pytest.mark.parametrize("name", ITEMS)
def test_an_attempt_is_one_question(name):
    for attempt in ATTEMPTS:
        assert asked(name, attempt) == asked(name, attempt)


def test_attempts_differ():
    """Of many items, at ten attempts each; two orders of two options agree often, ten orders of four hardly ever."""
    for name, (item, _) in ITEMS.items():
        if item.kind in ("choice", "numeric", "shape", "count", "cloze", "order"):
            questions = [asked(name, attempt) for attempt in range(10)]
            assert any(question != questions[0] for question in questions), name


@of("choice")
def test_choices_are_right_for_their_key_and_wrong_for_all_else(name):
    for attempt in ATTEMPTS:
        question = asked(name, attempt)
        assert isinstance(question, ChoiceQuestion)
        right = {place for place, option in enumerate(question.options) if option.right}
        assert grading.choice(question, right).right
        for size in range(1, len(question.options) + 1 if question.multi else 2):
            for chosen in itertools.combinations(range(len(question.options)), size):
                assert grading.choice(question, chosen).right == (set(chosen) == right)
        with pytest.raises(Unreadable):
            grading.choice(question, [])
        if not question.multi:
            assert len(right) == 1
            with pytest.raises(Unreadable):
                grading.choice(question, [0, 1])


@of("choice")
def test_what_an_item_of_a_mistake_calls_wrong_is_refuted_by_its_claim(name):
    item, card = ITEMS[name]
    if isinstance(item.made_of, Mistake):
        question = asked(name)
        (key,) = [option for option in question.options if option.right]
        assert key.text == item.made_of.wrong
        assert {o.text.en for o in question.options if not o.right} <= {p.point.en for p in card.key_points}
        if item.made_of.refuted_by:
            held = receipts.load(card.id).claims[item.made_of.refuted_by]
            assert held.holds


@of("choice")
def test_the_key_does_not_stand_out_by_its_length(name):
    """Written options within the check's factor; around a mistake the card's true sentences are what there is."""
    item, _ = ITEMS[name]
    question = asked(name)
    for language in ("en", "zh"):
        most = 1.8 if isinstance(item.made_of, Mistake) else STANDS_OUT
        assert not stands_out(question.options, language, most), [o.text.get(language) for o in question.options]


@of("cloze")
def test_holes_are_right_for_their_options_and_wrong_for_all_else(name):
    """That the right options make the code pass, and each wrong one fail, is run by check_content --code."""
    question = asked(name, 1)
    assert isinstance(question, ClozeQuestion)
    assert question.code.count("___") == len(question.holes)
    for chosen in itertools.product(*(range(len(options)) for options in question.holes)):
        right = all(options[place].right for options, place in zip(question.holes, chosen, strict=True))
        assert grading.cloze(question, chosen).right == right
    with pytest.raises(Unreadable):
        grading.cloze(question, [None] * len(question.holes))


@of("order")
def test_an_order_is_right_where_no_step_stands_before_one_that_it_builds_on(name):
    """In the card's order, and in a hundred drawn ones, by the pairs of steps that the card links."""
    _, card = ITEMS[name]
    linked = [
        (card.derivation[(place if step.builds_on is None else number) - 1], step)
        for place, step in enumerate(card.derivation)
        for number in ([place] if step.builds_on is None else step.builds_on)
        if number > 0
    ]
    chance = random.Random(name)
    for attempt in ATTEMPTS:
        question = asked(name, attempt)
        assert isinstance(question, OrderQuestion)
        assert set(map(id, question.steps)) == {id(step) for pair in linked for step in pair}
        right = [question.places.index(place) for place in range(len(question.steps))]
        assert grading.order(question, right).right
        assert grading.order(question, right).first_wrong is None
        assert not grading.order(question, range(len(right))).right  # as shown is never right
        for _ in range(100):
            arranged = chance.sample(right, len(right))
            at = {id(question.steps[shown]): place for place, shown in enumerate(arranged)}
            early = [at[id(step)] for needed, step in linked if at[id(needed)] > at[id(step)]]
            grade = grading.order(question, arranged)
            assert grade.right == (not early)
            assert grade.first_wrong == min(early, default=None)
        with pytest.raises(Unreadable):
            grading.order(question, right[1:])


@of("shape", "count")
def test_sizes_are_right_for_an_independent_evaluation_and_wrong_else(name):
    item, _ = ITEMS[name]
    for attempt in ATTEMPTS:
        question = asked(name, attempt)
        assert isinstance(question, ShapeQuestion)
        # Python itself is the oracle, on whole numbers
        node = ast.parse(item.made_of.answer, mode="eval")
        value = eval(compile(node, "<answer>", "eval"), {"min": min, "max": max}, dict(question.drawn))
        parts = value if isinstance(value, tuple) else (value,)
        assert all(part == int(part) and part > 0 for part in parts), "sizes are whole"
        written = ", ".join(str(int(part)) for part in parts)
        assert grading.sizes(question, written).right
        assert grading.sizes(question, item.made_of.answer).right  # the author's own expression
        other = ", ".join(str(int(part) + 1) for part in parts)
        assert not grading.sizes(question, other).right
        for hole in question.drawn:
            assert f"{{{{{hole}" not in question.prompt.en + question.prompt.zh


def oracle(claim: Claim) -> float:
    """The claim's number straight from the experiment, without runner, cache or verdict."""
    experiment = registry.get(claim.experiment)

    def metrics(params, seed):
        return experiment.run(experiment.Params.from_mapping(params), make_run(seed)).metrics

    values = []
    for seed in claim.seeds or (0,):
        first = metrics(claim.params, seed)
        if claim.versus is None:
            values.append(first[claim.metric])
        elif "metric" in claim.versus:
            values.append(first[claim.metric] / first[claim.versus["metric"]])
        else:
            values.append(first[claim.metric] / metrics({**claim.params, **claim.versus}, seed)[claim.metric])
    return statistics.median(values)


@of("numeric")
def test_numbers_are_right_for_a_run_of_the_tests_own_and_wrong_beside_it(name):
    torch.set_num_threads(1)
    for attempt in ATTEMPTS:
        question = asked(name, attempt)
        assert isinstance(question, NumericQuestion)
        measured = grading.measure(question.item.card, question.claim)
        value = oracle(question.claim)
        assert measured == pytest.approx(value, rel=1e-6)  # the same run twice: rounding of the median at most
        grade = grading.numeric(question, repr(value), measured)
        assert grade.right
        assert grade.low <= value <= grade.high
        outside = value * (1 + 1.5 * question.rel_tol), value * (1 - 1.5 * question.rel_tol)
        assert not any(grading.numeric(question, repr(other), measured).right for other in outside if other != value)
        assert question.drawn.items() <= question.claim.params.items()


@of("predict")
def test_predictions_are_held_against_the_run(name):
    _, card = ITEMS[name]
    question = asked(name)
    assert isinstance(question, PredictQuestion)
    measured = receipts.load(card.id).claims[question.claim.id].value
    if question.ask == "direction":
        sides = [grading.predicted_direction(side, measured).right for side in (grading.LARGER, grading.SMALLER)]
        assert sorted(sides) == [False, True]
        assert sides[0] == (measured > 1)
        return
    unit = registry.get(question.claim.experiment).metric(question.claim.metric).unit
    unit = "1" if question.claim.versus else unit
    if measured:
        assert grading.predicted_value(question, repr(measured), measured, unit).right
        assert grading.predicted_value(question, repr(1.5 * measured), measured, unit).score == 0.5
        assert grading.predicted_value(question, repr(30 * measured), measured, unit).score == 0


@of("recall")
def test_recall_asks_the_cards_question_with_its_points(name):
    _, card = ITEMS[name]
    question = asked(name)
    assert isinstance(question, RecallQuestion)
    assert question.prompt == card.question
    assert question.points == card.key_points


def test_a_hole_is_filled_in_both_languages_with_its_format():
    for name, (item, _) in ITEMS.items():
        question = asked(name)
        if isinstance(question, NumericQuestion | ShapeQuestion):
            for language in ("en", "zh"):
                assert not re.search(r"\{\{[a-z_0-9]+(:[^}]*)?\}\}", question.prompt.get(language)), name
            assert any(question.drawn == dict(some) for some in draws(item.made_of.vary))


def test_of_several_right_options_each_counts_and_a_wrong_one_takes_back():
    name = next(n for n, (i, _) in ITEMS.items() if getattr(i.made_of, "multi", False))
    question = asked(name)
    right = [place for place, option in enumerate(question.options) if option.right]
    wrong = [place for place, option in enumerate(question.options) if not option.right]
    assert grading.choice(question, right[:1]).score == pytest.approx(1 / len(right))
    assert grading.choice(question, [*right, wrong[0]]).score == pytest.approx(1 - 1 / len(right))
    assert grading.choice(question, wrong).score == 0
