"""The charts that bench/repaint.py recorded from the app, for the pages that it is compared with."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import streamlit as st


@st.cache_resource
def recorded() -> list[list[tuple[pd.DataFrame, dict[str, Any]]]]:
    """For each position of the slider, the charts: rows and spec."""
    folder = os.environ.get("BENCH_FOLDER")
    if folder is None:
        axes = {"x": {"field": "x", "type": "quantitative"}, "y": {"field": "y", "type": "quantitative"}}
        rows = [pd.DataFrame({"x": range(9), "y": [x**power for x in range(9)]}) for power in (1, 2)]
        return [[(frame, {"mark": "line", "encoding": axes})] for frame in rows]
    held = json.loads(Path(folder, "charts.json").read_text("utf-8"))
    return [
        [
            (pa.ipc.open_stream(io.BytesIO(Path(folder, c["rows"]).read_bytes())).read_pandas(), json.loads(c["spec"]))
            for c in charts
        ]
        for charts in held
    ]
