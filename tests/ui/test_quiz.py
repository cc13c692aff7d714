"""The Quiz page without a browser: every kind of item answered, graded, undone; random hands find no exception."""

import itertools
import random
from datetime import UTC, datetime

import pytest
from streamlit.testing.v1 import AppTest

from content.expressions import evaluate
from content.loader import load_deck
from study import desk, grading
from study.items import (
    KINDS,
    ChoiceQuestion,
    ClozeQuestion,
    OrderQuestion,
    PredictQuestion,
    ShapeQuestion,
    pose,
)
from study.log import FILE, SqlLog
from study.progress import fold
from tests.ui.test_pages import HAN, words
from tests.ui.test_pages import opened as page_opened
from ui import exam, quiz, state

DECK = load_deck()
ITEMS = desk.items(DECK.cards, DECK.topics)


pytestmark = pytest.mark.usefixtures("folder")


def opened(lang: str = "en", **query: str) -> AppTest:
    return page_opened("quiz", lang, **query)


def kept(folder):
    """What the log on the disk says, read by a connection of the test's own."""
    from study.database import connect

    engine = connect(f"sqlite:///{folder}/{FILE}")
    events = SqlLog(engine, "reader").events()
    engine.dispose()
    return events


def asked(app: AppTest, mode: str = "review"):
    """The question on the table, as the page poses it."""
    held = app.session_state["reader"].asking[mode]
    card = DECK.cards[desk.card_of(held.item)]
    return pose(ITEMS[held.item], card, held.attempt), held


def button(app: AppTest, label: str):
    return next(b for b in app.button if b.label.startswith(label))


def right_answer(question) -> str:
    """As the log keeps it."""
    if isinstance(question, ChoiceQuestion):
        return ",".join(str(n) for n, option in enumerate(question.options) if option.right)
    if isinstance(question, ClozeQuestion):
        return ",".join(str(next(n for n, o in enumerate(options) if o.right)) for options in question.holes)
    if isinstance(question, OrderQuestion):
        return ",".join(str(question.places.index(n)) for n in range(len(question.places)))
    if isinstance(question, ShapeQuestion):
        value = evaluate(question.answer, dict(question.drawn))
        return str(tuple(map(int, value)) if isinstance(value, tuple) else int(value))
    measured = grading.measure(question.item.card, question.claim)
    if isinstance(question, PredictQuestion) and question.ask == "direction":
        return grading.LARGER if measured > 1 else grading.SMALLER
    return repr(measured)


def give(app: AppTest, question, answer: str) -> AppTest:
    """Fill the controls and submit, as a reader does."""
    if isinstance(question, ChoiceQuestion) and question.multi:
        for place in grading.places(answer):
            next(box for box in app.checkbox if (box.key or "").endswith(f"-{place}")).check()
    elif isinstance(question, ChoiceQuestion):
        app.radio[0].set_value(int(answer))
    elif isinstance(question, ClozeQuestion):
        for hole, place in enumerate(grading.places(answer)):
            app.radio[hole].set_value(place)
    elif isinstance(question, OrderQuestion):
        for place in grading.places(answer):
            app.button(key=next(b.key for b in app.button if (b.key or "").endswith(f"-step-{place}"))).click().run()
    elif isinstance(question, PredictQuestion) and question.ask == "direction":
        app.radio[0].set_value(answer)
    else:
        app.text_input[0].set_value(answer)
    button(app, "Answer").click()
    app.run()
    while grading.wants_run(question) and asked(app, "practice")[1].measured is None and not app.exception:
        app.run()
    return app


def one_of(kind: str) -> str:
    return next(name for name, item in ITEMS.items() if item.kind == kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "recall"])
def test_a_right_answer_of_each_kind_is_called_right(kind, folder):
    card = desk.card_of(one_of(kind))
    app = opened(mode="practice", card=card)
    app.pills(key="practice_kind").set_value(kind).run()
    question, _ = asked(app, "practice")
    assert question.item.kind == kind
    give(app, question, right_answer(question))
    assert not app.exception
    assert any("**Right**" in m.value for m in app.markdown), [m.value for m in app.markdown]
    button(app, "Good").click().run()
    (review,) = [event for event in kept(folder) if event.kind == "review"]
    assert (review.item, review.mode, review.score, review.rating, review.counts) == (
        question.item.id,
        "practice",
        1,
        3,
        False,
    )


@pytest.mark.parametrize("multi", [False, True])
def test_every_option_is_shown_until_a_hint_takes_a_wrong_one_away(multi):
    name, item = next(
        (n, i) for n, i in ITEMS.items() if i.kind == "choice" and getattr(i.made_of, "multi", False) == multi
    )
    app = opened(mode="practice", card=item.card)
    app.pills(key="practice_kind").set_value("choice").run()
    while asked(app, "practice")[0].item.id != name:
        button(app, "Show the answer").click().run()
        button(app, "Again").click().run()
    question, _ = asked(app, "practice")

    def shown() -> int:
        return len([b for b in app.checkbox if b.key.startswith("answer")]) if multi else len(app.radio[0].options)

    every = len(question.options)
    assert shown() == every
    button(app, "Hint").click().run()  # words
    assert shown() == every
    if not multi:
        for left in range(every - 1, 1, -1):
            button(app, "Hint").click().run()
            assert shown() == left
    assert button(app, "Hint").disabled


def test_recall_shows_the_points_and_takes_the_readers_own_grade(folder):
    app = opened(mode="practice", card="code-mha")
    app.pills(key="practice_kind").set_value("recall").run()
    app.text_input[0].set_value("compare with a trusted layer")
    button(app, "Compare").click().run()
    assert any("compare with a trusted layer" in m.value for m in app.markdown)
    button(app, "Hard").click().run()
    (review,) = kept(folder)
    assert (review.rating, review.answer) == (2, "compare with a trusted layer")


def test_what_cannot_be_read_is_said_and_nothing_is_lost(folder):
    app = opened(mode="practice")
    app.pills(key="practice_kind").set_value("shape").run()
    app.text_input[0].set_value("a cube?")
    button(app, "Answer").click()
    app.run()
    assert any("a cube?" in w.value for w in app.warning)
    assert app.text_input[0].value == "a cube?"
    assert kept(folder) == []


def test_a_wrong_answer_can_only_be_repeated(folder):
    app = opened(mode="practice")
    app.pills(key="practice_kind").set_value("shape").run()
    app.text_input[0].set_value("(1, 2, 3)")
    button(app, "Answer").click()
    app.run()
    assert any("**Not right**" in m.value for m in app.markdown)
    assert not button(app, "Again").disabled
    assert all(button(app, name).disabled for name in ("Hard", "Good", "Easy"))


def test_grades_come_back_as_previewed_and_undo_goes_back_several_steps(folder):
    app = opened()
    seen = []
    for _ in range(3):
        _, held = asked(app)
        seen.append(held.item)
        button(app, "Show the answer" if ITEMS[held.item].kind != "recall" else "Compare").click().run()
        shown = button(app, "Again").label
        assert shown.endswith("1 min")
        button(app, "Again").click().run()
    assert len(set(seen)) == 3
    for item in reversed(seen):
        button(app, "Undo").click().run()
        assert asked(app)[1].item == item
    progress = fold(kept(folder))
    assert progress.reviews == ()
    assert progress.undone == 3
    assert button(app, "Undo").disabled


def test_a_second_click_on_a_grade_changes_nothing(folder, monkeypatch):
    app = opened()
    button(app, "Show the answer").click().run()
    held = app.session_state["reader"].asking["review"]
    button(app, "Again").click().run()
    reader = app.session_state["reader"]
    monkeypatch.setattr(state, "reader", lambda: reader)
    quiz._rate(held, "review", 1, 0.0, True)  # what the same click, sent twice, comes to
    assert len([e for e in kept(folder) if e.kind == "review"]) == 1
    quiz._rate(asked(app)[1], "review", 1, 0.0, True)  # the next question's own click counts
    assert len([e for e in kept(folder) if e.kind == "review"]) == 2


def test_the_question_stays_after_a_reload(folder):
    first, _ = asked(opened())
    again, _ = asked(opened())
    assert first == again


def test_an_exam_from_the_first_item_to_the_wrong_ones_again(folder):
    app = opened(mode="exam")
    app.segmented_control(key="exam_size").set_value(5)
    button(app, "Begin").click()
    app.run()
    assert not app.exception
    begun = fold(kept(folder)).exams[0]
    assert len(begun.items) == 5
    button(app, "Flag").click().run()
    assert fold(kept(folder)).exams[0].flagged == {0}
    again = opened(mode="exam")  # after a reload
    assert any("Unflag" in b.label for b in again.button)
    button(again, "Hand in now").click().run()
    for _ in range(20):
        if any("right" in s.value for s in again.subheader):
            break
        again.run()
    assert not again.exception
    assert next(s.value for s in again.subheader) == "0 of 5 right"
    progress = fold(kept(folder))
    assert len(progress.reviews) == 5
    assert not any(review.counts for review in progress.reviews)
    again.run()
    assert len(fold(kept(folder)).reviews) == 5  # remembered once
    button(again, "Again what was wrong (5)").click().run()
    assert fold(kept(folder)).exams[1].items == begun.items


def test_a_second_click_begins_no_second_exam(folder, monkeypatch):
    app = opened(mode="exam")
    button(app, "Begin").click()
    app.run()
    reader = app.session_state["reader"]
    monkeypatch.setattr(state, "reader", lambda: reader)
    exam._start(((next(iter(ITEMS)), 0),), 5.0)  # what the same click, sent twice, comes to
    assert len(fold(kept(folder)).exams) == 1


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("mode", ["review", "practice", "exam"])
def test_each_mode_speaks_one_language(mode, lang):
    app = opened(lang, mode=mode)
    assert not app.exception
    if lang == "en":
        assert not HAN.search("\n".join(w for w in words(app) if w not in ("中文",)))


def test_without_a_place_for_the_log_the_page_says_so(monkeypatch, folder):
    (folder / "file").write_text("")
    monkeypatch.setenv("DATA_DIR", str(folder / "file" / "deeper"))
    app = opened()
    assert not app.exception
    assert any("can't be kept" in w.value for w in app.warning)
    button(app, "Show the answer").click().run()
    assert not app.exception


@pytest.mark.slow
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_thousand_random_actions_meet_no_exception_and_leave_a_log_that_fits(lang, folder):
    """In both languages together two thousand. What the page says was done is what the log holds."""
    chance = random.Random(lang)
    app = opened(lang, mode=chance.choice(["review", "practice"]))
    for step in range(1000):
        _act(app, chance)
        assert not app.exception, (step, [e.message for e in app.exception])
        if step % 100 == 99:
            progress = fold(kept(folder))
            held = app.session_state["reader"].progress
            assert held is None or held[1] == fold(held[1].reviews) or held[0] <= len(kept(folder))
            assert all(a.at <= datetime.now(UTC) for a in progress.reviews)
            for before, after in itertools.pairwise(progress.reviews):
                assert before.at <= after.at


def _act(app: AppTest, chance: random.Random) -> None:
    """One thing that a hand may do: fill something, choose something, click something."""
    fields = [*app.text_input, *app.text_area]
    moves = ["button"] * 6 + ["radio"] * bool(app.radio) * 2 + ["check"] * bool(app.checkbox) + ["text"] * bool(fields)
    moves += ["mode"] * (chance.random() < 0.2)
    move = chance.choice(moves)
    if move == "radio":
        radio = chance.choice(app.radio)
        radio.set_value(
            chance.choice(range(len(radio.options))) if radio.key and "direction" not in radio.key else None
        )
    elif move == "check":
        chance.choice(app.checkbox).set_value(chance.random() < 0.5)
    elif move == "text":
        chance.choice(fields).set_value(
            chance.choice(["1", "√64", "(2, 3)", "b*h*n", "", "１２", "$x$", "*" * 50, "1e9"])
        )
    elif move == "mode":
        app.segmented_control(key="quiz_mode").set_value(chance.choice(["review", "practice", "exam"]))
    else:
        usable = [b for b in app.button if not b.disabled]
        if usable:
            chance.choice(usable).click()
    app.run()
