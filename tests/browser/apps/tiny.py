"""A page with one of everything that the harness must see. ``?bad=`` adds one thing that no reader should meet."""

import threading
import time

import pandas as pd
import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx

st.set_page_config(page_title="Tiny")
zh = st.query_params.get("lang", "en") == "zh"
st.title("小实验室" if zh else "Tiny lab")
st.markdown("方差是 $d_k$。" if zh else "The variance is $d_k$.")

BAD = {
    "binding": "{{unscaled-variance}}",
    "nan": "The value is nan.",
    "NaN": "NaN",
    "formula": r"Cost \$5",
    "citation": "As shown [@vaswani2017].",
    "bold": "注意**结束。**下",
    "katex": r"$\frac{1$",
}
bad = st.query_params.get("bad")
if bad in BAD:
    st.markdown(BAD[bad])
if bad == "exception":
    raise ValueError("shown to nobody")


@st.fragment
def lab() -> None:
    d_k = st.slider("d_k", 1, 64, 8)
    if st.button("Slow"):
        time.sleep(1.0)
    rows = [{"x": x, "y": (x * d_k) ** p, "power": f"p{p}"} for x in range(5) for p in (0.5, 1)]
    st.vega_lite_chart(
        pd.DataFrame(rows),
        {
            "mark": "line",
            "encoding": {
                "x": {"field": "x", "type": "quantitative"},
                "y": {"field": "y", "type": "quantitative"},
                "color": {"field": "power", "scale": {"range": ["#ff0000", "#0000ff"]}, "type": "nominal"},
            },
        },
        key="chart",
    )
    st.caption(f"d_k = {d_k}")


lab()
if st.query_params.get("gone"):  # a fragment that the browser polls and the server has forgotten
    st.fragment(lambda: st.caption("polled"), run_every=0.1)()
    threading.Timer(1.0, get_script_run_ctx().fragment_storage.clear).start()
