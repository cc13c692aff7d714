"""The Progress page without a browser: empty and filled, its settings, and the way of a log out and in again."""

from datetime import date, timedelta

import pytest
from streamlit.testing.v1 import AppTest

from study.database import connect
from study.events import Review, Setting, now
from study.log import FILE, SqlLog
from study.progress import fold
from tests.ui.test_pages import opened as page_opened
from tests.ui.test_quiz import DECK, ITEMS, button, kept

VIEWS = ["plan", "memory", "history", "log"]


pytestmark = pytest.mark.usefixtures("folder")


def opened(lang: str = "en", **query: str) -> AppTest:
    return page_opened("progress", lang, **query)


def fill(folder, number: int = 120) -> list[Review]:
    """Answers of the last weeks."""
    engine = connect(f"sqlite:///{folder}/{FILE}")
    items, start = list(ITEMS), now() - timedelta(days=30)
    log = [
        Review(
            at=start + timedelta(hours=5 * n),
            item=items[n % 40],
            mode="review",
            score=1,
            rating=1 + n % 4,
            counts=True,
            seconds=30,
        )
        for n in range(number)
    ]
    SqlLog(engine, "reader").append(log)
    engine.dispose()
    return log


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("filled", [False, True])
def test_each_view_is_drawn_empty_and_filled(view, lang, filled, folder):
    if filled:
        fill(folder)
    app = opened(lang, view=view)
    assert not app.exception
    assert not app.error
    shown = [*app.markdown, *app.info, *app.caption]
    assert len(shown) > 2


def test_settings_are_events_and_make_a_plan(folder):
    app = opened()
    assert any("Set the day" in info.value for info in app.info)
    app.date_input(key="set-interview").set_value(date.today() + timedelta(days=9)).run()
    app.number_input(key="set-minutes").set_value(20).run()
    app.slider(key="set-retention").set_value(85).run()
    assert not app.exception
    progress = fold(kept(folder))
    assert progress.setting("minutes_a_day") == 20
    assert progress.setting("retention") == 0.85
    assert progress.setting("interview") == (date.today() + timedelta(days=9)).isoformat()
    assert any("of which new" in m.value for m in app.markdown)
    assert len(kept(folder)) == 3
    app.run()
    assert len(kept(folder)) == 3  # what is set already is not set again


def test_day_and_track_can_be_taken_back(folder):
    app = opened()
    day = date.today() + timedelta(days=9)
    app.date_input(key="set-interview").set_value(day).run()
    track = app.selectbox(key="set-track")
    track.set_value(track.options[0] if track.options[0] in DECK.tracks else next(iter(DECK.tracks))).run()
    again = opened()
    assert again.date_input(key="set-interview").value == day
    again.date_input(key="set-interview").set_value(None).run()
    assert not again.exception
    assert fold(kept(folder)).setting("interview") is None
    assert opened().date_input(key="set-interview").value is None


def test_everything_is_forgotten_only_after_the_word(folder):
    fill(folder, 3)
    app = opened(view="log")
    assert button(app, "Delete my log").disabled
    app.text_input(key="forget-word").set_value("forget").run()
    button(app, "Delete my log").click().run()
    assert kept(folder) == []
    assert any("deleted" in m.value for m in app.markdown)


def test_cards_show_where_the_reader_stands_with_them(folder):
    fill(folder, 2)  # of one card, weeks ago: both wanted again long since
    first = next(iter(ITEMS)).split("/")[0]
    app = page_opened("cards", "en")
    app.run()  # the first page of a process does not wait for the log
    status = next(p for p in app.pills if p.key == "card_status")
    for name, shown in (("due", {first}), ("new", DECK.cards.keys() - {first}), ("later", set())):
        status.set_value(name)
        app.run()
        questions = {m.value.strip("*") for m in app.markdown}
        assert {c for c, card in DECK.cards.items() if card.question.en.strip() in questions} == shown, name
        status = next(p for p in app.pills if p.key == "card_status")


def test_home_shows_what_is_remembered_and_the_next_card_of_the_track(folder):
    fill(folder, 2)
    track = DECK.tracks["algorithm-engineer"]
    met = {item.split("/")[0] for item in list(ITEMS)[:2]}
    following = next(card for card in track.cards if card in DECK.cards and card not in met)
    engine = connect(f"sqlite:///{folder}/{FILE}")
    SqlLog(engine, "reader").append([Setting(at=now(), name="track", value="algorithm-engineer")])
    engine.dispose()
    app = page_opened("home", "en")
    app.run()
    assert not app.exception
    links = [link.proto.label for link in app.get("page_link")]
    assert f"Next of your track: {DECK.cards[following].question.en.strip()}" in links
    assert any("met 2 of" in p.proto.text for p in app.get("progress"))


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_sheet_to_print_holds_its_cards_whole(lang, folder):
    app = page_opened("cards", lang, sheet="algorithm-engineer")
    assert not app.exception
    text = "\n".join(m.value for m in app.markdown)
    for name in DECK.tracks["algorithm-engineer"].cards:
        if name in DECK.cards:
            assert DECK.cards[name].follow_ups[0].question.get(lang).strip() in text
    app = page_opened("cards", lang, sheet="nonsense")  # the list
    assert not app.exception
    assert any(t.key == "card_search" for t in app.text_input)


def test_what_is_remembered_worst_is_of_what_was_answered(folder):
    app = opened(view="log")
    assert "what I remember worst" not in app.selectbox(key="away-cards").options
    fill(folder, 3)
    app = opened(view="log")
    assert "what I remember worst" in app.selectbox(key="away-cards").options
    met = {item.split("/")[0] for item in list(ITEMS)[:3]}
    app = page_opened("cards", "en", sheet="weak")
    text = "\n".join(m.value for m in app.markdown)
    shown = {name for name, card in DECK.cards.items() if card.follow_ups[0].question.en.strip() in text}
    assert shown == met
