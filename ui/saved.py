"""The language chosen last time, kept in the visitor's browser (no cookie: hosts drop ours)."""

from __future__ import annotations

import streamlit as st
from streamlit.components import v2

from content.schema import LANGUAGES
from ui import state

_SCRIPT = """
const KEY = "attention-interview-lab.language"
export default function ({ data, setStateValue }) {
  let saved = null
  try { saved = localStorage.getItem(KEY) } catch { return }  // storage switched off: nothing is kept
  if (data.choice) {
    if (saved !== data.choice) localStorage.setItem(KEY, data.choice)
  } else if (data.open && saved && saved !== data.current) {
    setStateValue("language", saved)
  }
}
"""
# declared once a process: a declaration in a script run would be a new component each time
_component = v2.component("saved_language", js=_SCRIPT)


def draw() -> None:
    """Save a choice of this visit; take up the saved one where neither link nor visit said a language."""
    reader = state.reader()
    answer = _component(
        data={
            "choice": reader.language if reader.chose_language else None,
            "open": state.language_is_open(),
            "current": state.language(),
        },
        key="saved_language",
        on_language_change=lambda: None,
        height=0,
    )
    if state.language_is_open() and answer.language in LANGUAGES:
        state.choose_language(answer.language, by_reader=False)
        st.rerun()
