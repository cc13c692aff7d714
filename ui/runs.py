"""The runs of a lab: as links, as a history of this visit, and pinned, to be laid over each other."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

import streamlit as st

from engine import devices, registry, runner
from engine.base import ParamsError, Plot, Result, Table
from engine.registry import Experiment
from engine.runner import Handle, RunSpec
from ui import engine, jobbar, state, text
from ui.state import Shown
from ui.text import t

MOST_SEED = 2**31 - 1
MOST_PINS = 5  # with the run on show six series, as many as can be told apart
OFFERED = ("float32", "float64")  # number formats of the Lab
MOST_KEPT = 50  # runs of the history
FIGURES = 3  # metrics of a line of the history


# -- a run in a link --------------------------------------------------------------------------------------------------


def link_of(spec: RunSpec) -> dict[str, str | None]:
    """What a link says of a run: only what differs from the defaults, None for the rest."""
    defaults = registry.get(spec.experiment).Params.defaults()
    changed = {name: str(value) if value != defaults[name] else None for name, value in spec.params.items()}
    return {
        "seed": str(spec.seed) if spec.seed else None,
        "device": spec.device if spec.device != "cpu" else None,
        "dtype": spec.dtype if spec.dtype != "float32" else None,
        **changed,
    }


def from_link(experiment: Experiment, link: Mapping[str, str]) -> tuple[RunSpec, list[str]]:
    """The run that a link names, and the names in it that can't be taken; those are left at their defaults."""
    defaults = experiment.Params.defaults()
    values, refused = dict(defaults), []
    for name in experiment.Params.specs():
        if name in link:
            try:
                values[name] = _read(link[name], defaults[name])
            except ValueError:
                refused.append(name)
    try:
        experiment.Params.from_mapping(values)
    except ParamsError as error:
        for problem in error.problems:
            if problem.kind != "rule":  # what fits alone but not together is shown, and the panel says what is wrong
                refused.append(problem.name)
                values[problem.name] = defaults[problem.name]
    seed = _seed(link.get("seed", "0"))
    if seed is None:
        refused.append("seed")
    device, dtype = link.get("device", "cpu"), link.get("dtype", "float32")
    if engine.is_ready():
        known = {d.id: d.dtypes for d in devices.available()}
        if device not in known:
            refused.append("device")
            device = devices.default().id
        if dtype not in known[device] or dtype not in OFFERED:
            refused.append("dtype")
            dtype = "float32"
    return engine.spec_of(experiment.name, values, seed=seed or 0, device=device, dtype=dtype), refused


def _seed(raw: str) -> int | None:
    seed = int(raw) if re.fullmatch(r"\d{1,10}", raw, re.ASCII) else MOST_SEED + 1
    return seed if seed <= MOST_SEED else None


def _read(raw: str, default: Any) -> Any:
    """A value of the link as the type of its parameter. Raises: ValueError."""
    if isinstance(default, bool):
        if raw not in ("True", "False"):
            raise ValueError(raw)
        return raw == "True"
    return type(default)(raw)


def label(
    spec: RunSpec, others: Sequence[RunSpec], names: Container[str] | None = None, most: int | None = None
) -> str:
    """A run by what sets it apart from the others: "d_k = 128, seed = 3"; only ``names``, the first ``most``."""
    parts = {**spec.params, "seed": spec.seed, "device": spec.device, "dtype": spec.dtype}
    varied = [
        name
        for name, value in parts.items()
        if names is None or name in names
        if any({**o.params, "seed": o.seed, "device": o.device, "dtype": o.dtype}[name] != value for o in others)
    ]
    return ", ".join(f"{_word(name)} = {_value(parts[name])}" for name in varied[:most])


def _word(name: str) -> str:
    return t(name) if name in ("seed", "device", "dtype") else text.name(name, plain=True)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return t("switch_on") if value else t("switch_off")
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else f"{value:,}"
    said = text.choice(str(value), plain=True)
    return said if len(said) <= 24 else f"{said[:23]}…"


# -- history ----------------------------------------------------------------------------------------------------------


def remember(slot: str, shown: Shown) -> None:
    """Add a run to the history of this visit, its newest first; what was just run again is not added twice."""
    kept = state.reader().history.setdefault(slot, [])
    if kept and kept[0].spec == shown.spec and kept[0].n_seeds == shown.n_seeds:
        kept.pop(0)
    # the tables stay in the shared cache of results; a visit holds small numbers only
    kept.insert(0, dataclasses.replace(shown, result=Result(dict(shown.result.metrics), {}, shown.result.done)))
    del kept[MOST_KEPT:]


def restore(slot: str, spec: RunSpec) -> None:
    """Put a run's parameters, seed, device and number format back into the controls."""
    state.set_controls(slot, {**spec.params, "seed": spec.seed, "device": spec.device})
    state.set_controls(slot, {f"dtype-{spec.device}": spec.dtype})


def history(experiment: Experiment, slot: str) -> None:
    """The runs of this visit in a table; the chosen one can be brought back or pinned."""
    kept = state.reader().history.get(slot, [])
    fold = st.expander(t("history"), icon=":material/history:", key=f"{slot}-history", on_change="rerun")
    if not fold.open:
        return
    with fold:
        if not kept:
            st.caption(t("history_empty"))
            return
        plain = engine.spec_of(experiment.name, experiment.Params.defaults())
        metrics = experiment.metric_names[:FIGURES]
        rows = {
            t("run"): [label(shown.spec, [plain]) if shown.spec != plain else t("defaults") for shown in kept],
            t("seeds"): [shown.n_seeds for shown in kept],
            **{
                text.with_unit(m, experiment.metric(m).unit): [
                    text.number(shown.result.metrics[m]) if m in shown.result.metrics else "" for shown in kept
                ]
                for m in metrics
            },
        }
        chosen = st.dataframe(
            rows, hide_index=True, key=f"{slot}-history-rows", on_select="rerun", selection_mode="single-row"
        ).selection.rows
        at = chosen[0] if chosen and chosen[0] < len(kept) else None
        with st.container(horizontal=True):
            spec = kept[at].spec if at is not None else plain
            st.button(
                t("bring_back"),
                key=f"{slot}-back",
                icon=":material/undo:",
                disabled=at is None,
                on_click=restore,
                args=(slot, spec),
            )
            st.button(
                t("pin"),
                key=f"{slot}-pin-old",
                icon=":material/keep:",
                disabled=at is None or full(slot),
                on_click=pin,
                args=(slot, spec, None),
            )
        if at is None:
            st.caption(t("history_help"))


# -- pins -------------------------------------------------------------------------------------------------------------


def pins(slot: str) -> list[tuple[RunSpec, Result | None]]:
    """The pinned runs of a lab, the oldest first; None where the link named one that was not run here yet."""
    return state.reader().pins.setdefault(slot, [])


def beside(slot: str, now: RunSpec, table: str) -> list[tuple[RunSpec, Result]]:
    """The pinned runs to lay beside the one on show: the others, as far as they have brought that table."""
    return [(spec, r) for spec, r in pins(slot) if r is not None and table in r.tables and spec != now]


def full(slot: str) -> bool:
    """Whether no more runs can be pinned."""
    return len(pins(slot)) >= MOST_PINS


def pin(slot: str, spec: RunSpec, result: Result | None) -> None:
    """Keep a run to be laid under the next ones; the link holds it."""
    held = pins(slot)
    if all(spec != other for other, _ in held) and not full(slot):
        held.append((spec, result))
    _keep_link(slot)


def unpin(slot: str, spec: RunSpec | None) -> None:
    """Let go of one pinned run, or of all."""
    state.reader().pins[slot] = [] if spec is None else [held for held in pins(slot) if held[0] != spec]
    _keep_link(slot)


def _keep_link(slot: str) -> None:
    named = []
    for spec, _ in pins(slot):
        told = {name: value for name, value in link_of(spec).items() if value}
        named.append(urlencode({"seed": "0", **told}))  # never empty
    state.set_link_list("pin", named)


def from_link_list(experiment: Experiment, slot: str) -> list[str]:
    """Pin the runs that the link names, once a visit; the names in them that can't be taken."""
    refused: list[str] = []
    if slot not in state.reader().pins:
        held = pins(slot)
        known = {*experiment.Params.specs(), "seed", "device", "dtype"}
        for named in state.link_list("pin")[:MOST_PINS]:
            asked = dict(parse_qsl(named))
            spec, wrong = from_link(experiment, asked)
            wrong += [name for name in asked if name not in known]
            try:
                experiment.Params.from_mapping(spec.params)
            except ParamsError:  # fits alone but not together: no panel would show what is wrong with a pin
                wrong.append("pin")
            if not asked:
                wrong.append("pin")
            refused += wrong
            if not wrong and all(spec != other for other, _ in held):
                held.append((spec, None))
    return refused


def purpose(slot: str) -> str:
    """Of the job that runs pinned runs which the link named."""
    return f"pins:{slot}"


def bring_up_to_date(slot: str) -> None:
    """Have the results of the pinned runs that are quick or known; the others wait for :func:`run_missing`."""
    done = engine.take_finished(purpose(slot))  # what it has run is in the shared cache of results
    if done is not None and done.state == "failed":
        state.reader().messages[slot] = functools.partial(text.error, done.error)
    reader, kept = state.reader(), []
    for spec, result in pins(slot):
        if result is None and engine.is_ready():
            try:
                result = runner.look_up(spec)
                if result is None and spec not in reader.slow and not registry.get(spec.experiment).trains:
                    result = engine.quick(spec)
            except (runner.TooLarge, runner.OutOfMemory, devices.UnknownDevice, devices.UnsupportedDtype) as error:
                reader.messages[slot] = functools.partial(text.error, error)
                continue
            if result is None:
                reader.slow.append(spec)  # tried once: the next poll does not try again
        kept.append((spec, result))
    pins(slot)[:] = kept
    _keep_link(slot)  # another experiment may have been here meanwhile


def run_missing(slot: str) -> None:
    """Run the pinned runs that are not known here, as a job."""
    left = [spec for spec, result in pins(slot) if result is None]

    def work(handle: Handle) -> list[Result]:
        return runner.map_runs(left, on_progress=handle.progress, check_stop=handle.check_stop)

    engine.submit(purpose(slot), work, device=left[0].device)


def overlay(plot: Plot, runs: Sequence[tuple[str, Table]]) -> tuple[Plot, Table]:
    """One plot of several runs: the run becomes the series, what was the series a chart of its own.

    A plot that is already cut into small charts keeps them, and its series are named by run.
    """
    names = {name: [table[name] for _, table in runs] for name in runs[0][1]}
    table: Table = {name: _joined(parts) for name, parts in names.items()}
    rows = [len(one[plot.x]) for _, one in runs]
    series = _joined([[said] * n for (said, _), n in zip(runs, rows, strict=True)])
    if plot.by and plot.facet:
        series = _joined([[f"{of} · {said}" for of, said in zip(table[plot.by], series, strict=True)]])
        return dataclasses.replace(plot, by="run"), table | {"run": series}
    return dataclasses.replace(plot, by="run", facet=plot.by or plot.facet), table | {"run": series}


def _joined(parts: Sequence[Any]) -> Any:
    import numpy as np

    return np.concatenate([np.asarray(part) for part in parts])


def draw_pins(experiment: Experiment, slot: str, now: RunSpec, shown: Result | None, n_seeds: int) -> None:
    """The numbers of the pinned runs beside those of the run on show, each with its button to let go."""
    held = [(spec, result) for spec, result in pins(slot) if spec != now]
    if not held:
        return
    specs = [now, *(spec for spec, _ in held)]
    metrics = experiment.metric_names[:FIGURES]
    results = [shown, *(result for _, result in held)]
    here = f"{t('on_show')} · {label(now, specs)}" + (f" · {t('median_of', n=n_seeds)}" if n_seeds > 1 else "")
    rows: dict[str, list[str]] = {t("run"): [here, *(label(s, specs) for s in specs[1:])]}
    for m in metrics:
        rows[text.with_unit(m, experiment.metric(m).unit)] = [
            text.number(result.metrics[m]) if result is not None and m in result.metrics else "…" for result in results
        ]
    st.dataframe(rows, hide_index=True, key=f"{slot}-pins-rows")
    job = engine.active_job(purpose(slot))
    if job is not None:
        jobbar.draw(job)
    with st.container(horizontal=True):
        if job is None and any(result is None for _, result in held):
            st.button(
                t("run_pinned"),
                key=f"{slot}-run-pinned",
                icon=":material/play_arrow:",
                disabled=not engine.is_ready(),
                on_click=run_missing,
                args=(slot,),
            )
        for number, (spec, _) in enumerate(held):
            st.button(
                label(spec, specs),
                key=f"{slot}-unpin-{number}",
                icon=":material/keep_off:",
                type="tertiary",
                help=t("unpin"),
                on_click=unpin,
                args=(slot, spec),
            )
        if len(held) > 1:
            st.button(
                t("unpin_all"),
                key=f"{slot}-unpin-all",
                icon=":material/close:",
                type="tertiary",
                on_click=unpin,
                args=(slot, None),
            )
