"""What every page starts with: title, language, menu, device, and one boundary for what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import streamlit as st
from streamlit.components import v2

from content.loader import ContentError
from content.schema import LANGUAGES
from engine import devices
from ui import deck, engine, jobbar, learner, saved, state, verifying
from ui.boundary import fragment, guarded, log
from ui.text import t

# page id: file, icon. A page is in the menu when it works.
PAGES = {
    "home": ("app.py", ":material/home:"),
    "cards": ("pages/cards.py", ":material/style:"),
    "lab": ("pages/lab.py", ":material/science:"),
    "quiz": ("pages/quiz.py", ":material/quiz:"),
    "progress": ("pages/progress.py", ":material/monitoring:"),
    "claims": ("pages/claims.py", ":material/fact_check:"),
}
KEEPING = ("quiz", "progress")  # these bring what they record to the browser themselves, in their fragments
HERE = Path(__file__).parent
ICON = HERE / "icon.svg"
LANGUAGE_NAMES = {"en": "English", "zh": "中文"}


# declared once a process: a declaration in a script run would be a new component each time
_look = v2.component("look", css=(HERE / "look.css").read_text("utf-8"), isolate_styles=False)
_page = v2.component("page", js=(HERE / "page.js").read_text("utf-8"))


@contextmanager
def page(page_id: str) -> Iterator[None]:
    """Draw the frame, then the page inside it, then start the engine's warm-up."""
    deck.refresh()
    try:
        deck.deck()
    except ContentError as error:  # the very words of the interface are broken: both languages, from here
        log.error("the content can't be read: %s", error)
        st.error("The content can't be read; mend the lines below and reload. · 内容读取失败，请修正下列各行后刷新。")
        st.code("\n".join(map(str, error.problems)), language=None, wrap_lines=True)
        st.stop()
    state.settle_language()
    title = t(
        f"page_{page_id}"
    )  # t("page_home") t("page_cards") t("page_lab") t("page_quiz") t("page_progress") t("page_claims")
    st.set_page_config(
        page_title=t("app_title") if page_id == "home" else f"{title} · {t('app_title')}",
        page_icon=str(ICON),  # a file of our own: an icon by name is fetched from another host
        layout="wide",
        initial_sidebar_state="auto",
    )
    _sidebar(page_id)
    _look(key="look", height=0)
    state.reader().drawn_jobs.clear()
    with guarded("the log"):
        if learner.is_at_hand():
            learner.restore()
    with guarded(f"page {page_id}"):
        verifying.collect()
        yield
        if page_id not in KEEPING:
            learner.keep()
        jobbar.foot()
    engine.warm_up().start()


def turned_to(place: str, *, filled: int = 0) -> None:
    """Say what a page shows, where it shows one thing after another: when it turns to another, it starts at its top.

    ``filled``: how often its lab was filled in from its text; where that rises, the lab is brought into view.
    """
    _page(data={"place": place, "filled": filled}, key="page", height=0)


def link(page_id: str, label: str, *, icon: str | None = None, **query: str) -> None:
    """A link to another page that keeps the language."""
    st.page_link(PAGES[page_id][0], label=label, icon=icon, query_params={**query, "lang": state.language()})


def go(page_id: str, **query: str) -> None:
    """Open another page, keeping the language."""
    st.switch_page(PAGES[page_id][0], query_params={**query, "lang": state.language()})


def _sidebar(page_id: str) -> None:
    with st.sidebar:
        st.markdown(f"**{t('app_title')}**")
        st.caption(t("tagline"))
        for entry, (_, icon) in PAGES.items():
            link(entry, t(f"page_{entry}"), icon=icon)
        st.space("small")
        _language_switch()
        # polls only until the engine is there
        fragment(_device_badge, run_every=None if engine.warm_up().ready.is_set() else 1.0)()
    saved.draw()


def _language_switch() -> None:
    key = "language_switch"
    state.set_value(key, state.language())  # each time: on the next page it is another widget, which shows nothing else
    st.segmented_control(
        "Language · 语言",
        LANGUAGES,
        key=key,
        format_func=LANGUAGE_NAMES.__getitem__,
        label_visibility="collapsed",
        required=True,
        on_change=lambda: state.choose_language(state.value_of(key), by_reader=True),
    )


def _device_badge() -> None:
    warm_up = engine.warm_up()
    if warm_up.failure is not None:
        st.caption(f":material/error: {t('engine_missing', kind=type(warm_up.failure).__name__)}")
        return
    version = engine.torch_version()
    if not warm_up.ready.is_set():
        st.caption(f":material/memory: {t('engine_starting')}\n\ntorch {version}")
        return
    device = devices.default()
    st.caption(
        f":material/memory: {device.kind.upper()} · float32 · {t('one_thread')}\n\ntorch {version}", help=device.name
    )
    gpu = devices.idle_gpu()
    if gpu:
        st.warning(t("idle_gpu", gpu=gpu), icon=":material/info:")
        st.code("rm -rf .venv && make app", language="bash")
