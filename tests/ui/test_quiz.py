"""The Quiz page without a browser: every kind of item answered, graded, undone; random hands find no exception."""

import itertools
import random
import time
from datetime import UTC, datetime, timedelta

import pytest
from streamlit.testing.v1 import AppTest

from content.expressions import evaluate
from content.loader import load_deck
from study import desk, grading
from study.database import connect
from study.events import Exam, Setting, Sheet, now
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
from ui.frame import PAGES

DECK = load_deck()
ITEMS = desk.items(DECK.cards, DECK.topics)


pytestmark = pytest.mark.usefixtures("folder")


def opened(lang: str = "en", **query: str) -> AppTest:
    return page_opened("quiz", lang, **query)


def kept(folder):
    """What the log on the disk says, read by a connection of the test's own."""
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
    button(app, "Next").click().run()  # it moves no date: there is nothing to grade
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
        button(app, "Next").click().run()
    question, _ = asked(app, "practice")

    def shown() -> int:
        return len([b for b in app.checkbox if b.key.startswith("answer")]) if multi else len(app.radio[0].options)

    every = len(question.options)
    assert shown() == every
    if multi:
        button(app, "Hint").click().run()  # words
        assert shown() == every
    else:
        for left in range(every - 1, 1, -1):
            button(app, "Hint").click().run()
            assert shown() == left
    assert button(app, "Hint").disabled


def test_recall_shows_the_points_and_takes_the_readers_own_grade(folder):
    app = opened(mode="practice", card="code-mha")
    app.pills(key="practice_kind").set_value("recall").run()
    app.text_area[0].set_value("compare with a trusted layer")
    button(app, "Compare").click().run()
    assert any("compare with a trusted layer" in c.value for c in app.code)
    button(app, "Hard").click().run()
    (review,) = kept(folder)
    assert (review.rating, review.answer) == (2, "compare with a trusted layer")


def test_the_points_that_are_ticked_suggest_the_grade(folder):
    app = opened(mode="practice", card="code-mha")
    app.pills(key="practice_kind").set_value("recall").run()
    button(app, "Compare").click().run()

    def suggested():
        return [b.label for b in app.button if b.proto.type == "primary"]

    assert suggested() == []
    points = DECK.cards["code-mha"].key_points
    boxes = [box.key for box in app.checkbox if "-point-" in box.key]
    assert len(boxes) == len(points)
    seen = []
    for key, point in zip(boxes, points, strict=True):
        if point.must:
            app.checkbox(key=key).check().run()
            seen += suggested()
    assert seen[0] == "Again"  # one of several
    assert seen[-1] == "Good"
    button(app, "Good").click().run()
    (review,) = kept(folder)
    assert review.score == 1


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
    button(app, "Next").click().run()
    (review,) = kept(folder)
    assert (review.score, review.rating) == (0, 1)
    app = opened()
    button(app, "Show the answer").click().run()
    assert any("**Not answered**" in m.value for m in app.markdown)
    assert [b.label.split(" ·")[0] for b in app.button if "rate-" in (b.key or "")] == ["Again"]


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
    deadline = time.monotonic() + 60  # the engine starts, and measures what the exam asks
    while not any("right" in s.value for s in again.subheader) and time.monotonic() < deadline:
        again.run()
    assert not again.exception
    assert next(s.value for s in again.subheader) == "0 of 5 right"
    assert fold(kept(folder)).reviews == ()  # what was not answered is no answer
    button(again, "Retake the wrong ones (5)").click().run()
    assert fold(kept(folder)).exams[1].items == begun.items


def test_what_is_chosen_in_an_exam_is_kept_whichever_way_one_leaves(folder):
    engine = connect(f"sqlite:///{folder}/{FILE}")

    def single(name):
        return not getattr(pose(ITEMS[name], DECK.cards[desk.card_of(name)], 0), "multi", False)

    names = [next(n for n, i in ITEMS.items() if i.kind == kind and single(n)) for kind in ("shape", "choice", "order")]
    SqlLog(engine, "reader").append([Exam(at=now(), items=tuple((name, 0) for name in names), minutes=9)])
    engine.dispose()
    app = opened(mode="exam")
    app.text_input[0].set_value("(1, 2)")
    button(app, "Flag").click()
    app.run()
    assert fold(kept(folder)).exams[0].answers == {0: "(1, 2)"}
    assert fold(kept(folder)).exams[0].flagged == {0}
    app.text_input[0].set_value("(3, 4)")
    button(app, "Next").click()
    app.run()
    assert fold(kept(folder)).exams[0].answers == {0: "(3, 4)"}
    app.radio[0].set_value(1)
    button(app, "Back").click()
    app.run()
    assert fold(kept(folder)).exams[0].answers == {0: "(3, 4)", 1: "1"}
    app.text_input[0].set_value("what? ![](x)").run()
    assert app.text_input[0].value == "what? ![](x)"  # it stays, with what is wrong, letter by letter
    assert any("`what? ![](x)`" in w.value for w in app.warning)
    assert fold(kept(folder)).exams[0].answers == {0: "(3, 4)", 1: "1"}
    app.text_input[0].set_value("(5, 6)").run()
    app.segmented_control(key=next(s.key for s in app.segmented_control if "exam-place" in s.key)).set_value(1).run()
    assert fold(kept(folder)).exams[0].answers[0] == "(5, 6)"  # by the answer sheet
    assert app.radio[0].value == 1
    app.radio[0].set_value(0)
    button(app, "Hand in now").click().run()  # and by handing in
    assert fold(kept(folder)).exams[0].answers == {0: "(5, 6)", 1: "0"}


def test_an_answer_that_an_edited_item_no_longer_knows_costs_only_its_place(folder):
    name = next(n for n, i in ITEMS.items() if i.kind == "order")
    other = next(n for n, i in ITEMS.items() if i.kind == "shape")
    exam_event = Exam(at=now() - timedelta(minutes=5), items=((name, 0), (other, 0)), minutes=9)
    sheet = Sheet(at=now(), exam=exam_event.id, place=0, answer="0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18")
    engine = connect(f"sqlite:///{folder}/{FILE}")
    SqlLog(engine, "reader").append([exam_event, sheet])
    engine.dispose()
    app = opened(mode="exam")
    assert not app.exception
    assert not app.error
    button(app, "Hand in now").click().run()
    assert not app.error
    assert any("of 2 right" in s.value for s in app.subheader)
    assert any(b.label == "Begin" for b in app.button)


def test_undo_on_the_plan_brings_the_question_back_there(folder):
    engine = connect(f"sqlite:///{folder}/{FILE}")
    day = (now() + timedelta(days=9)).date().isoformat()
    SqlLog(engine, "reader").append([Setting(at=now(), name="interview", value=day)])
    engine.dispose()
    app = opened(mode="plan")
    _, held = asked(app, "plan")
    button(app, "Show the answer" if ITEMS[held.item].kind != "recall" else "Compare").click().run()
    button(app, "Again").click().run()
    button(app, "Undo").click().run()
    assert asked(app, "plan")[1].item == held.item
    assert "review" not in app.session_state["reader"].asking


def test_an_order_that_comes_back_is_empty_again(folder):
    app = opened(mode="practice", card=desk.card_of(one_of("order")))
    app.pills(key="practice_kind").set_value("order").run()
    question, _ = asked(app, "practice")
    give(app, question, right_answer(question))
    button(app, "Next").click().run()
    button(app, "Undo").click().run()
    steps = [b for b in app.button if "-step-" in (b.key or "")]
    assert len(steps) == len(question.steps)


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
    """In both languages together two thousand, on Quiz and on Progress. What the pages say was done is what the log
    holds."""
    chance = random.Random(lang)
    app = opened(lang, mode=chance.choice(["review", "practice"]))
    done: dict[str, int] = {}
    for step in range(1000):
        if step % 25 == 24:
            app.switch_page(PAGES[chance.choice(["quiz", "progress"])][0])
            app.run()
        move = _act(app, lang, chance)
        done[move] = done.get(move, 0) + 1
        assert not app.exception, (step, move, [e.message for e in app.exception])
        if step % 100 == 99:
            app.run()  # what was recorded at the end of a run is read by the next one
            progress = fold(kept(folder))
            assert app.session_state["reader"].progress.progress == progress  # what the page goes by
            assert all(a.at <= datetime.now(UTC) for a in progress.reviews)
            for before, after in itertools.pairwise(progress.reviews):
                assert before.at <= after.at
    assert {"button", "radio", "text", *VIEWS, "number", "date", "slider", "toggle"} <= done.keys()


VIEWS = {"quiz_mode": ["review", "plan", "practice", "exam"], "progress_view": ["plan", "memory", "history", "log"]}


def _act(app: AppTest, lang: str, chance: random.Random) -> str:
    """One thing that a hand may do: fill something, choose something, click something. Returns what it was."""
    fields = [*app.text_input, *app.text_area]
    view = next((key for key in VIEWS if any(s.key == key for s in app.segmented_control)), None)
    usable = [b for b in app.button if not b.disabled]
    moves = ["button"] * 6 * bool(usable) + ["radio"] * 2 * bool(app.radio) + ["text"] * bool(fields)
    for kind in ("checkbox", "toggle", "date_input", "number_input", "slider"):
        moves += [kind.split("_")[0]] * bool(getattr(app, kind))
    if lang == "en":  # the test's side words the options outside a visit, in English
        moves += ["select"] * bool(app.selectbox)
    if view and (chance.random() < 0.2 or not moves):
        moves = [view]
    move = chance.choice(moves)
    if move in VIEWS:
        app.segmented_control(key=move).set_value(chance.choice(VIEWS[move]))
    elif move == "radio":
        radio = chance.choice(app.radio)
        is_direction = len(radio.options) == 2 and {"larger", "更大"} & set(radio.options)
        radio.set_value(chance.choice((grading.LARGER, grading.SMALLER) if is_direction else range(len(radio.options))))
    elif move == "checkbox":
        chance.choice(app.checkbox).set_value(chance.random() < 0.5)
    elif move == "toggle":
        chance.choice(app.toggle).set_value(chance.random() < 0.5)
    elif move == "date":
        today = now().date()
        days = [None, today, today + timedelta(days=9), today - timedelta(days=2), today + timedelta(days=400)]
        chance.choice(app.date_input).set_value(chance.choice(days))
    elif move == "number":
        field = chance.choice(app.number_input)
        field.set_value(chance.choice([field.min, field.max, (field.min + field.max) // 2]))
    elif move == "select":
        field = chance.choice(app.selectbox)
        tracks = [name for name, track in DECK.tracks.items() if DECK.cards.keys() & set(track.cards)]
        weak = ["weak"] * any("worst" in option for option in field.options)
        field.set_value(chance.choice(["all", *weak, *tracks] if field.key == "away-cards" else [None, *tracks]))
    elif move == "slider":
        field = chance.choice(app.slider)
        field.set_value(chance.choice([field.min, field.max]))
    elif move == "text":
        said = ["1", "√64", "(2, 3)", "b*h*n", "", "１２", "$x$", "*" * 50, "1e9", "forget", "清除"]
        chance.choice(fields).set_value(chance.choice(said))
    else:
        chance.choice(usable).click()
    app.run()
    return move
