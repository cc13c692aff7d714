"""What a lab panel costs Streamlit itself: the app's controls, figures and buttons around the trivial page's chart.

Everything is drawn by plain Streamlit calls in one fragment, with fixed words, and nothing is computed.
"""

from __future__ import annotations

import streamlit as st

from bench.recorded import recorded

FIGURES = "### 0.125 :small[:gray[dead share]]\n### 0.250 :small[:gray[mean norm]]\n### 0.500 :small[:gray[weight]]"


@st.fragment
def panel() -> None:
    """One panel; its first slider chooses among the recorded positions."""
    left, right = st.columns(2)
    positions = recorded()
    chosen = left.select_slider("position", list(range(len(positions))), key="position", help="as in the app")
    right.select_slider("keys", [2**power for power in range(1, 15)], 64, key="keys", help="as in the app")
    left, _ = st.columns(2)
    left.slider("factor", 0.0625, 8.0, 1.0, 0.0625, key="factor", help="as in the app")
    st.segmented_control("rule", ["a", "b", "c", "d", "e", "f"], default="a", key="rule", required=True)
    st.segmented_control(
        "plot", ["weights", "norms"], default="weights", key="plot", label_visibility="collapsed", required=True
    )
    for number, (frame, spec) in enumerate(positions[chosen]):
        st.vega_lite_chart(frame, spec, key=f"chart-{number}")
    st.markdown(FIGURES, anchors=False)
    with st.container(horizontal=True):
        st.button("run", key="run", type="primary", icon=":material/play_arrow:", help="as in the app")
        st.button("predict", key="predict", icon=":material/psychology:", help="as in the app")
    st.caption("device, number format and seeds of the run")
    st.expander("table", key="details", on_change="rerun")


panel()
