"""Every page, in both languages, without a browser: it draws, speaks one language, and shows no exception."""

import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from content.loader import load_deck
from content.schema import Text
from ui import prose, state
from ui.cards import lab_titles
from ui.frame import PAGES

DECK = load_deck()
HAN = re.compile(r"[\u4e00-\u9fff]")
PAGE_IDS = list(PAGES)
APP = str(Path(__file__).parents[2] / "app.py")


def opened(page: str, lang: str, **query: str) -> AppTest:
    """A page after its first script run, opened by its link."""
    app = AppTest.from_file(APP, default_timeout=60)
    app.context = {"locale": "en-US"}
    if page != "home":
        app.switch_page(PAGES[page][0])
    for name, value in {"lang": lang, **query}.items():
        app.query_params[name] = value
    return app.run()


def words(app: AppTest) -> list[str]:
    """All text that the page shows, element by element."""
    kinds = (
        "markdown",
        "caption",
        "header",
        "subheader",
        "title",
        "button",
        "info",
        "warning",
        "error",
        "toggle",
        "metric",
        "latex",
    )
    found = [e.label if kind in ("button", "toggle", "metric") else e.value for kind in kinds for e in app.get(kind)]
    return [str(w) for w in found]


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("page", PAGE_IDS)
def test_page_draws_in_one_language(page, lang):
    app = opened(page, lang)
    assert not app.exception
    assert not app.error, [e.value for e in app.error]
    shown = words(app)
    assert len(shown) > 3
    joined = "\n".join(shown)
    assert "{{" not in joined
    assert not re.search(r"(?<![\w-])nan(?![\w-])", joined)
    if lang == "en":  # a Chinese word on an English page is a label that was forgotten
        assert not [w for w in shown if HAN.search(w)]


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    "section", ["spoken", "derivation", "follow-ups", "mistakes", "trade-offs", "practice", "resume", "sources"]
)
@pytest.mark.parametrize("card", sorted(DECK.cards))
def test_card_sections(card, section, lang):
    app = opened("cards", lang, card=card, section=section)
    assert not app.exception
    assert not app.error, [e.value for e in app.error]
    joined = "\n".join(words(app))
    assert "{{" not in joined
    assert not re.search(r"(?<![\w-])nan(?![\w-])", joined)
    bound = "{{" in DECK.cards[card].short_answer.en or section in ("derivation", "mistakes")
    assert ("-background[[" in joined) or not bound  # measured numbers stand on their ground, linked to their receipts
    if lang == "en" and section != "sources":  # a source keeps the title that it has
        assert not [w for w in words(app) if HAN.search(w)]
    assert app.query_params["section"] in (section, [section])


def test_language_by_link_then_browser_then_english():
    app = AppTest.from_file(APP, default_timeout=60)
    app.context = {"locale": "zh-CN"}
    assert any(HAN.search(w) for w in words(app.run()))
    app = AppTest.from_file(APP, default_timeout=60)
    app.context = {"locale": "fr-FR"}
    assert not any(HAN.search(w) for w in words(app.run()))
    app = AppTest.from_file(APP, default_timeout=60)
    app.context = {"locale": "zh-CN"}
    app.query_params["lang"] = "en"
    assert not any(HAN.search(w) for w in words(app.run()))


@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("cards", {"card": "no-such-card"}),
        ("cards", {"card": "sdpa-scale-sqrt-dk", "section": "no-such-section"}),
        ("cards", {"lang": "xx"}),
        ("lab", {"experiment": "no_such_experiment"}),
        ("lab", {"experiment": "qk_variance", "d_k": "1e99"}),
        ("lab", {"experiment": "qk_variance", "d_k": "many", "seed": "-3", "device": "tpu", "dtype": "int8"}),
        ("lab", {"experiment": "qk_variance", "scale": "'; drop table"}),
    ],
)
def test_a_broken_link_is_answered_in_words(page, query):
    app = opened(page, **{"lang": "en", **query})
    assert not app.exception
    assert not app.error


def test_search_finds_a_card_by_words_of_either_language():
    if not DECK.cards:
        pytest.fail("the deck is empty")
    app = opened("cards", "en")
    app.text_input(key="card_search").set_value("softmax 缩放").run()
    assert any(m.value for m in app.get("page_link")) if hasattr(app, "page_link") else True
    app.text_input(key="card_search").set_value("zzzzzz").run()
    assert len(app.info) == 1


def test_think_first_hides_answers_until_asked():
    app = opened("cards", "en", card="sdpa-scale-sqrt-dk")
    before = len(app.markdown)
    app.toggle(key="think_first").set_value(True).run()
    assert len(app.tabs) == 0
    assert len(app.markdown) < before
    next(b for b in app.button if b.label == "Show the answers").click().run()
    assert len(app.tabs) > 0


@pytest.mark.parametrize(
    ("lang", "text", "shown"),
    [
        ("en", "so [@vaswani2017], [@yang2022].", "so ([Vaswani et al., 2017]({}); [Yang et al., 2022]({}))."),
        ("zh", "如此 [@vaswani2017]、[@yang2022]。", "如此（[Vaswani et al., 2017]({})；[Yang et al., 2022]({})）。"),
        ("en", "so [@question-bank-survey].", "so (" + DECK.sources["question-bank-survey"].short + ")."),
    ],
)
def test_citations_side_by_side_share_a_bracket_and_only_addresses_are_links(monkeypatch, lang, text, shown):
    monkeypatch.setattr(prose.state, "language", lambda: lang)
    links = [DECK.sources[key].link for key in ("vaswani2017", "yang2022")]
    assert prose.cited(text) == shown.format(*links)


def test_other_cards_are_links_where_they_are_written(monkeypatch):
    monkeypatch.setattr(prose.state, "language", lambda: "zh")
    text = Text(en="-", zh="见 `causal-mask`、`no-such-card`，`causal` 和 `x-y`。")
    link = "[`causal-mask`](cards?card=causal-mask&lang=zh)"
    shown = prose.markdown(DECK.cards["sdpa-scale-sqrt-dk"], text)
    assert shown == f"见 {link}、`no-such-card`，`causal` 和 `x-y`。"


def test_a_visit_is_made_once_however_often_it_is_asked_for(monkeypatch):
    made = []
    original = state.Reader
    monkeypatch.setattr(state, "Reader", lambda: made.append(1) or original())
    app = opened("cards", "en", card="sdpa-scale-sqrt-dk")
    assert not app.exception
    assert len(made) == 1


def test_one_thread_serves_two_visits_and_mixes_neither(monkeypatch):
    sessions = {"first": {}, "second": {}}
    now = ["first"]
    contexts = {name: object() for name in sessions}
    monkeypatch.setattr(state, "get_script_run_ctx", lambda **_: contexts[now[0]])
    monkeypatch.setattr(state.st, "session_state", ByVisit(sessions, now))
    found = {}
    for name in ("first", "second", "first", "second"):
        now[0] = name
        assert found.setdefault(name, state.reader()) is state.reader() is sessions[name]["reader"]
    assert found["first"] is not found["second"]


class ByVisit:
    """Streamlit's session state: it belongs to whoever asks."""

    def __init__(self, sessions, now):
        self.sessions, self.now = sessions, now

    def __contains__(self, key):
        return key in self.sessions[self.now[0]]

    def __getitem__(self, key):
        return self.sessions[self.now[0]][key]

    def __setitem__(self, key, value):
        self.sessions[self.now[0]][key] = value


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("card", list(DECK.cards))
def test_the_labs_of_a_card_are_told_apart(card, lang, monkeypatch):
    monkeypatch.setattr(state, "language", lambda: lang)
    titles = lab_titles(DECK.cards[card])
    assert len(set(titles.values())) == len(titles)
    assert not [title for title in titles.values() if len(title) > 140]  # two lines of the panel


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_no_statement_shows_its_formulas_raw_on_a_receipt(lang):
    shown = [prose.plain(claim.statement.get(lang)) for claims in DECK.claims.values() for claim in claims]
    assert [text for text in shown if re.search(r"[\\{}^$`]", text)] == []
