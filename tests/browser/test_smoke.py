"""Every page, opened by its deep link on a server that nobody has opened yet, and then in the other language."""

from __future__ import annotations

import itertools
import re
import urllib.request

import pytest

from content.loader import load_deck
from content.schema import LANGUAGES
from tools.browser import ROOT, assert_clean
from tools.screenshots import all_pages

HAN = re.compile(r"[\u4e00-\u9fff]")


def title(page: str, language: str) -> str:
    """What the tab of a page says."""
    return load_deck().strings.ui[f"page_{page}" if page else "app_title"].get(language)


@pytest.mark.parametrize(
    ("page", "languages"),
    list(zip(all_pages(), itertools.cycle((LANGUAGES, LANGUAGES[::-1])))),
    ids=lambda value: (value or "home") if isinstance(value, str) else value[0],
)
def test_a_cold_deep_link_shows_the_page_in_its_language(cold_app, open_reader, page, languages):
    for language in languages:
        visit = open_reader(cold_app, language={"en": "zh", "zh": "en"}[language])  # the link counts, not the browser
        visit.goto(page, lang=language)
        assert title(page, language) in visit.page.title()
        links = visit.page.get_by_test_id("stSidebar").get_by_test_id("stPageLink-NavLink")
        labels = [link.inner_text().strip() for link in links.all()]
        assert len(labels) == len(all_pages())
        for label in labels:
            assert bool(HAN.search(label)) == (language == "zh"), labels
        assert visit.page.get_by_test_id("stSidebarNav").count() == 0  # not the menu that Streamlit makes of file names
        assert_clean(visit)


def test_the_menu_leads_to_every_page_and_keeps_the_language(app, open_reader):
    visit = open_reader(app, language="en")
    visit.goto(lang="zh")
    links = visit.page.get_by_test_id("stSidebar").get_by_test_id("stPageLink-NavLink")
    for number, page in enumerate(all_pages()):
        visit.act(lambda number=number: links.nth(number).click())
        assert visit.page.title(), page
        assert HAN.search(visit.page.get_by_test_id("stMain").inner_text())
    assert_clean(visit)


def test_health_is_answered(app):
    with urllib.request.urlopen(f"{app.url}/_stcore/health", timeout=30) as answer:
        assert answer.status == 200


def test_pages_are_thin():
    """A page's file is a handful of lines; what it shows stands in ui."""
    for path in [ROOT / "app.py", *(ROOT / "pages").glob("*.py")]:
        code = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        assert len(code) <= 12, path
