"""The usual way, for comparison: torch at the top, the whole page run again, st.altair_chart, a collection every run.

Draws what the trivial page draws, and computes the lab's experiment as the app does.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import altair as alt
import pyarrow as pa
import streamlit as st
import torch

from content.loader import load_deck
from engine import registry
from engine.base import make_run

torch.set_num_threads(1)
folder = Path(os.environ["BENCH_FOLDER"])
lab = load_deck().cards["sdpa-scale-sqrt-dk"].labs[0]
experiment = registry.get(lab.experiment)
held = json.loads((folder / "charts.json").read_text("utf-8"))

position = st.slider("position", 0, len(held) - 1)
experiment.run(experiment.Params.from_mapping(dict(lab.params)), make_run(position))
for chart in held[position]:
    frame = pa.ipc.open_stream(io.BytesIO((folder / chart["rows"]).read_bytes())).read_pandas()
    spec = json.loads(chart["spec"])
    for part in ("usermeta", "config", "autosize", "datasets", "data", "padding"):
        spec.pop(part, None)
    st.altair_chart(alt.Chart.from_dict({**spec, "data": {"values": frame.to_dict("records")}}))
