"""The flagship card as a reader meets it: measured numbers, formulas, charts, runs, Stop, links, a phone."""

from __future__ import annotations

import contextlib
import re

import pytest
from playwright.sync_api import TimeoutError

from content.loader import load_deck
from engine import devices
from tools.browser import assert_clean, serve

CARD = "sdpa-scale-sqrt-dk"
LANGUAGES = ("en", "zh")
RUN = {"en": "Run on this device", "zh": "在本机运行"}
TRAIN = {"en": "Train on this device", "zh": "在本机训练"}
STOP = {"en": "Stop", "zh": "停止"}
SECTIONS = ("spoken", "derivation", "follow-ups", "mistakes", "trade-offs", "practice", "resume", "sources")


def open_card(visit, language="en", **query):
    visit.goto("cards", card=CARD, lang=language, **query)
    visit.page.locator(".st-key-bench").wait_for()


def engine_ready(visit):
    """Wait until the device badge names a device: torch is imported."""
    menu(visit).get_by_text(re.compile(r"float32")).wait_for(timeout=60_000)
    visit.idle()


def bench(visit):
    return visit.page.locator(".st-key-bench")


def menu(visit):
    return visit.page.get_by_test_id("stSidebarUserContent")


def figures(visit):
    return [f.inner_text() for f in bench(visit).locator("h3").all()][1:]


@pytest.mark.parametrize("language", LANGUAGES)
def test_card_shows_bound_numbers_formulas_and_a_drawn_chart(app, open_reader, language):
    visit = open_reader(app, language=language)
    open_card(visit, language)
    assert visit.page.locator(".katex").count() > 5
    assert visit.page.locator('a[href^="#"]').count() > 3  # numbers linked to their receipts
    assert len([m for m in visit.marks() if m.startswith("stroke")]) >= 3  # the three scale rules, each drawn
    assert_clean(visit)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_opens_by_its_link(app, open_reader, section, language):
    visit = open_reader(app, language=language)
    open_card(visit, language, section=section)
    visit.page.locator('[role="tab"][aria-selected="true"]').wait_for()
    assert f"section={section}" in visit.page.url
    assert_clean(visit)


def test_a_number_leads_to_its_receipt(app, reader):
    open_card(reader)
    link = reader.page.locator('a[href^="#"]').filter(has_text=re.compile(r"\d")).first
    claim = link.get_attribute("href").lstrip("#")
    link.click()
    receipt = reader.page.locator(f'[id="{claim}"]')
    receipt.wait_for()
    reader.page.wait_for_function(
        "id => document.getElementById(id).getBoundingClientRect().top < innerHeight", arg=claim
    )


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_claim_has_its_receipt_on_the_card_and_its_button_renews_it(app, open_reader, language):
    visit = open_reader(app, language=language)
    open_card(visit, language)
    claims = [claim.id for claim in load_deck().cards[CARD].claims]
    rows = visit.page.locator("li.receipt")
    rows.last.wait_for()
    assert [row.get_attribute("id") for row in rows.all()] == claims
    assert not [r for r in rows.all_inner_texts() if "$" in r or "\\" in r]  # formulas are said, not shown as TeX
    engine_ready(visit)
    rows.first.get_by_role("button").click()
    own = {"en": "measured by you", "zh": "你的实测"}[language]
    rows.first.get_by_text(own).wait_for(timeout=60_000)
    assert visit.page.get_by_text(own).count() == 1
    assert_clean(visit)


def test_run_on_this_device_renews_receipts(cold_app, open_reader):
    visit = open_reader(cold_app)
    open_card(visit)
    engine_ready(visit)
    assert not visit.page.get_by_text("measured by you").count()
    bench(visit).get_by_role("button", name=RUN["en"]).click()
    visit.page.get_by_text("measured by you").first.wait_for(timeout=60_000)
    bench(visit).get_by_text("seed 0–4").wait_for()
    visit.idle()
    assert any("±" in f for f in figures(visit))
    again = open_reader(cold_app)  # the reader's log has them: another day they are there
    open_card(again)
    engine_ready(again)
    assert again.page.get_by_text("measured by you").count()
    assert_clean(visit)


def test_a_slider_redraws_chart_and_figures(app, open_reader):
    visit = open_reader(app)
    open_card(visit)
    engine_ready(visit)
    before = figures(visit)
    slider = bench(visit).get_by_role("slider").first
    visit.act(lambda: slider.press("ArrowRight"))
    visit.page.wait_for_function(
        "before => [...document.querySelectorAll('.st-key-bench h3')].slice(1).map(e => e.innerText).join() !== before",
        arg=",".join(before),
    )
    visit.idle()
    assert len([m for m in visit.marks() if m.startswith("stroke")]) >= 3
    assert_clean(visit)


def test_refute_it_runs_the_counter_example(app, open_reader):
    visit = open_reader(app)
    open_card(visit, section="mistakes")
    engine_ready(visit)
    visit.page.get_by_role("button", name="Refute it").first.click()
    visit.page.get_by_text("measured here").first.wait_for(timeout=60_000)
    visit.idle()
    assert_clean(visit)


def test_predict_then_run_compares(app, open_reader):
    visit = open_reader(app)
    open_card(visit)
    engine_ready(visit)
    visit.act(lambda: bench(visit).get_by_role("button", name="Predict, then run").click())
    assert not bench(visit).get_by_test_id("stVegaLiteChart").count()  # the answer is put away
    box = bench(visit).get_by_role("spinbutton")
    visit.act(lambda: (box.fill("0.3"), box.press("Enter")))
    visit.act(lambda: bench(visit).get_by_role("button", name="Commit and run").click())
    bench(visit).get_by_text(re.compile(r"You said 0\.3")).wait_for()
    assert_clean(visit)


def test_a_follow_up_fills_the_lab(app, open_reader):
    visit = open_reader(app)
    open_card(visit, section="follow-ups")
    engine_ready(visit)
    visit.act(lambda: visit.page.locator("summary").filter(has_text="?").first.click())
    said = visit.page.get_by_text("The lab panel now has this setting.")
    for _ in range(3):  # on a machine at its limit the page may be drawn anew under the pointer, and the click is lost
        visit.page.get_by_role("button", name="Open in the lab").first.click()
        with contextlib.suppress(TimeoutError):
            said.wait_for(timeout=20_000)
            break
    said.wait_for()
    visit.idle()
    assert_clean(visit)


def test_a_lab_that_is_filled_in_comes_into_view(app, open_reader):
    visit = open_reader(app, width=390)
    open_card(visit, section="follow-ups")
    engine_ready(visit)
    visit.act(lambda: visit.page.locator("summary").filter(has_text="?").first.click())
    top = "document.querySelector('.st-key-bench').getBoundingClientRect().top"
    assert visit.page.evaluate(top) > 844  # below the window
    visit.act(lambda: visit.page.get_by_role("button", name="Open in the lab").first.click())
    visit.page.wait_for_function(f"Math.abs({top}) < 200")

    # and once only: a question without a lab lies between, and the card that it leads to fills in nothing
    quiz = visit.page.get_by_test_id("stSidebar").get_by_role("link", name="Quiz", include_hidden=True)
    visit.act(lambda: quiz.evaluate("link => link.click()"))
    visit.act(lambda: visit.page.get_by_role("link", name="New card").click())
    visit.page.locator(".st-key-bench").wait_for()
    visit.page.wait_for_timeout(1500)  # a smooth scroll would be under way
    assert visit.page.evaluate(top) > 844
    assert_clean(visit)


def test_think_first_hides_every_answer(app, open_reader):
    visit = open_reader(app)
    open_card(visit)
    visit.act(lambda: visit.page.get_by_text("Think first").click())
    assert not visit.page.get_by_role("tab").count()
    visit.act(lambda: visit.page.get_by_role("button", name="Show the answers").click())
    assert visit.page.get_by_role("tab").count() == len(SECTIONS)


def test_language_is_switched_and_remembered_by_the_browser(app, open_reader):
    visit = open_reader(app)
    open_card(visit)
    visit.act(lambda: visit.page.get_by_text("中文").click())
    assert "lang=zh" in visit.page.url
    visit.page.wait_for_function("() => localStorage.getItem('attention-interview-lab.language') === 'zh'")
    visit.goto()  # a new visit without a word about the language
    menu(visit).get_by_role("link", name="结论清单").wait_for()
    visit.goto(lang="en")  # the link counts more than what was saved
    menu(visit).get_by_role("link", name="Claims").wait_for()


def training_lab(visit):
    """Bring the training lab of the card to the front."""
    bench(visit).get_by_test_id("stSelectbox").first.locator("input").click()
    visit.page.get_by_role("option").filter(has_text=re.compile("[Tt]rain")).first.click()
    bench(visit).get_by_role("button", name=TRAIN["en"]).wait_for()
    visit.idle()


def test_training_is_drawn_while_it_runs_the_page_stays_usable_and_stop_stops(open_reader):
    with serve() as own:  # a server of its own: the one training slot is ours
        visit = open_reader(own)
        open_card(visit, section="derivation")
        engine_ready(visit)
        training_lab(visit)
        for slider in ("training steps", "time budget"):  # long enough to be stopped, on any machine
            visit.act(lambda slider=slider: bench(visit).get_by_role("slider", name=slider).press("End"))
        bench(visit).get_by_role("button", name=TRAIN["en"]).click()
        stop = bench(visit).get_by_role("button", name=STOP["en"])
        stop.wait_for(timeout=60_000)
        bench(visit).get_by_test_id("stVegaLiteChart").first.wait_for(timeout=60_000)  # a curve before the end
        visit.page.get_by_role("tab", name=re.compile("Follow-ups")).click()  # the rest of the page answers meanwhile
        visit.page.locator("summary").filter(has_text="?").first.wait_for(timeout=60_000)
        assert stop.count()
        stop.click()
        # how soon is the runner's tests' matter, chunk by chunk; here it must end before its end
        stopped = bench(visit).get_by_text(re.compile(r"Stopped at \d+%"))
        stopped.wait_for(timeout=60_000)
        assert "100%" not in stopped.inner_text()
        visit.idle()
        assert_clean(visit)


def test_two_tabs_of_one_browser_do_not_mix(app, open_reader):
    first, second = open_reader(app), open_reader(app, language="zh")
    open_card(first, "en")
    open_card(second, "zh")
    engine_ready(first)
    engine_ready(second)
    for visit, times in ((first, 1), (second, 2)):
        slider = bench(visit).get_by_role("slider").first
        for _ in range(times):
            visit.act(lambda slider=slider: slider.press("ArrowRight"))
    assert figures(first) != figures(second)
    assert_clean(first)
    assert_clean(second)


def test_thirty_quick_moves_end_at_the_last_value(app, open_reader):
    visit = open_reader(app)
    open_card(visit)
    engine_ready(visit)
    slider = bench(visit).get_by_role("slider").first
    for i in range(30):
        slider.press("ArrowRight" if i % 2 else "ArrowLeft")
    slider.press("ArrowLeft")
    visit.idle()
    shown = slider.get_attribute("aria-valuetext") or slider.get_attribute("aria-valuenow")
    assert shown is not None
    bench(visit).get_by_test_id("stVegaLiteChart").first.wait_for()
    assert_clean(visit)


@pytest.mark.parametrize("path", ["", "cards", "lab", "claims"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_no_page_scrolls_sideways_on_a_phone(app, open_reader, path, language):
    visit = open_reader(app, language=language, width=390)
    visit.goto(path, lang=language, **({"card": CARD} if path == "cards" else {}))
    assert visit.scroll_width() == 0
    assert_clean(visit)


def test_verify_all_has_progress_and_stop_and_keeps_what_was_measured(open_reader):
    with serve() as own:
        visit = open_reader(own)
        visit.goto("claims", lang="en")
        engine_ready(visit)
        visit.page.get_by_role("button", name=re.compile("Verify all")).click()
        # at the foot of the page: Streamlit has a Stop of its own in the head while a script runs
        stop = visit.page.get_by_test_id("stBottomBlockContainer").get_by_role("button", name=STOP["en"])
        stop.wait_for(timeout=60_000)
        stop.click()
        visit.page.get_by_text(re.compile("were measured and are kept")).wait_for(timeout=60_000)
        visit.idle()
        assert_clean(visit)


def test_every_tab_opens_at_the_first_click(app, open_reader):
    visit = open_reader(app)
    open_card(visit)
    for section, tab in zip(SECTIONS[1:], visit.page.get_by_role("tab").all()[1:], strict=True):
        tab.click()
        visit.page.wait_for_url(re.compile(f"section={section}"), timeout=60_000)
        assert tab.get_attribute("aria-selected") == "true"
    visit.idle()
    assert_clean(visit)


@pytest.mark.parametrize("path", ["cards", "lab"])
def test_lists_speak_the_language_that_was_switched_to(app, open_reader, path):
    visit = open_reader(app)
    visit.goto(path, lang="en", **({"card": CARD} if path == "cards" else {}))
    bench(visit).wait_for()
    engine_ready(visit)
    visit.act(lambda: menu(visit).get_by_text("中文").click())
    visit.page.wait_for_url(re.compile("lang=zh"))
    visit.idle()
    shown = [e.input_value() or e.inner_text() for e in visit.page.locator('[data-testid="stSelectbox"] input').all()]
    assert shown
    named_by_their_makers = {device.name for device in devices.available()}
    assert all(re.search("[\u4e00-\u9fff]", word) for word in shown if word not in named_by_their_makers), shown
