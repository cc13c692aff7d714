"""The floor: Streamlit's own call on the data and specs that the app drew, under the app's own settings, nothing else.

``BENCH_FOLDER`` holds what bench/repaint.py recorded; without it there is one line to draw.
"""

from __future__ import annotations

import streamlit as st

from bench.recorded import recorded

st.header("Trivial")
positions = recorded()
position = st.slider("position", 0, len(positions) - 1)
for number, (frame, spec) in enumerate(positions[position]):
    st.vega_lite_chart(frame, spec, key=f"chart-{number}")
