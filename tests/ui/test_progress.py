"""The Progress page without a browser: empty and filled, its settings, and the way of a log out and in again."""

from datetime import date, timedelta

import pytest
from streamlit.testing.v1 import AppTest

from study.database import connect
from study.events import Review, now
from study.log import FILE, SqlLog
from study.progress import fold
from tests.ui.test_pages import opened as page_opened
from tests.ui.test_quiz import ITEMS, button, kept

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
    assert any("new among them" in m.value for m in app.markdown)
    assert len(kept(folder)) == 3
    app.run()
    assert len(kept(folder)) == 3  # what is set already is not set again


def test_everything_is_forgotten_only_after_the_word(folder):
    fill(folder, 3)
    app = opened(view="log")
    assert button(app, "Delete my log").disabled
    app.text_input(key="forget-word").set_value("forget").run()
    button(app, "Delete my log").click().run()
    assert kept(folder) == []
    assert any("deleted" in m.value for m in app.markdown)
