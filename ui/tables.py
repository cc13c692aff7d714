"""The comparison table of a card's alternatives, filled by the engine."""

from __future__ import annotations

import streamlit as st

from content.schema import Card, FilledTable
from engine import registry
from ui import engine, text
from ui.boundary import fragment
from ui.text import t

POLL_S = 1.0


def draw(card: Card) -> None:
    """One row for each alternative, one column for each metric; waits for the engine without holding up the page."""
    table = card.alternatives.table
    if table is not None:
        st.markdown(f"**{t('compared')}**")
        fragment(_fill, run_every=None if engine.is_ready() else POLL_S)(table)


def _fill(table: FilledTable) -> None:
    experiment = registry.get(table.experiment)
    ((over, values),) = table.over.items()
    params = experiment.Params.defaults() | dict(table.params)
    columns: dict[str, list[str]] = {text.name(over, plain=True): [text.choice(str(v), plain=True) for v in values]}
    for metric in table.metrics:
        columns[text.with_unit(metric, experiment.metric(metric).unit)] = []
    for value in values:
        result = engine.quick(engine.spec_of(table.experiment, params | {over: value}))
        for metric, column in zip(table.metrics, list(columns.values())[1:], strict=True):
            column.append("…" if result is None else text.number(result.metrics[metric]))
    st.table(columns, border="horizontal", hide_index=True)
    settings = ", ".join(
        f"{text.name(n, plain=True)} = {text.choice(str(v), plain=True)}" for n, v in table.params.items()
    )
    st.caption(t("compared_at", settings=settings))
    if any("…" in column for column in columns.values()):
        st.caption(t("engine_starting"))
