"""The floor of a graded answer: plain Streamlit calls for the deck's questions, and a button to the next one.

Nothing is kept, looked up or decided.
"""

from __future__ import annotations

import itertools

import streamlit as st

from content.loader import load_deck


@st.cache_resource
def questions() -> list[tuple[str, list[str]]]:
    """Each written choice of the deck: its prompt and its options."""
    items = itertools.chain.from_iterable(card.quiz for card in load_deck().cards.values())
    return [
        (item.prompt.en.strip(), [o.text.en.strip() for o in item.options]) for item in items if item.kind == "choice"
    ]


def turn() -> None:
    st.session_state.line += 1


@st.fragment
def question() -> None:
    line = st.session_state.line
    prompt, options = questions()[line % len(questions())]
    st.caption(f"{line} done")
    with st.container(border=True):
        st.caption("A topic and a kind")
        st.markdown(f"**{prompt}**")
        with st.form(f"form-{line}", border=False):
            st.radio("Options", options, index=None, key=f"radio-{line}", label_visibility="collapsed")
            st.form_submit_button("Answer", type="primary", icon=":material/check:")
        with st.container(horizontal=True):
            st.button("Hint", key=f"hint-{line}", icon=":material/lightbulb:", shortcut="H")
            st.button("Show", key=f"show-{line}", icon=":material/visibility:", shortcut="S")
    with st.container(horizontal=True):
        st.button("Next", key="next", icon=":material/undo:", shortcut="1", on_click=turn)
        with st.popover("Report"):
            st.text_area("What is wrong with it?", key=f"report-{line}")


st.session_state.setdefault("line", 0)
st.header("Trivial")
question()
