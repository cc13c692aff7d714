"""The Lab page: any experiment with every parameter, its runs, a sweep, its formula and its code."""

from __future__ import annotations

import streamlit as st

from engine import devices, registry
from engine.base import ChoiceSpec, NumberSpec
from engine.registry import Experiment
from ui import bench, engine, runs, state, sweep, text, widgets
from ui.deck import deck
from ui.text import say, t

MOST_SHOWN = 40  # characters of a refused value
KNOWN = ("lang", "experiment", "seed", "device", "dtype", "pin", *sweep.LINK)  # of a link, beside parameters


def draw() -> None:
    """Choose an experiment; its panel, its sweep, its formula and its code."""
    names = list(registry.names())
    first = "softmax_saturation" if "softmax_saturation" in names else names[0]
    st.header(t("page_lab"), anchor=False)
    asked, by_link = state.link_value("experiment"), state.link_value("experiment", names)
    if asked != by_link:
        st.warning(t("link_refused", names=f"`experiment={_code_like(asked or '')}`"), icon=":material/link_off:")
    name = widgets.listed(t("experiment"), names, "lab_experiment", _title, start=by_link or first) or first
    if name != (by_link or first):  # another experiment has other parameters: those that it was left with
        state.set_link(**{key: None for key in state.link_values() if key != "lang"})
        left = state.reader().shown.get(_slot(name))
        state.set_link(experiment=name, **(runs.link_of(left.spec) if left else {}))
    experiment = registry.get(name)
    words = text.experiment(name)
    reading, working = st.columns([5, 6], gap="large")
    with working, st.container(border=True, key=bench.PLACE):
        setup = _setup(experiment)
        bench.panel(setup)
    with reading:
        st.markdown(say(words.about))
        st.latex(words.formula)
        asked_for = engine.spec_of(name, setup.params, seed=setup.seed, device=setup.device, dtype=setup.dtype)
        sweep.draw(experiment, asked_for, setup.slot)
        _code(experiment)


def _title(name: str) -> str:
    return say(text.experiment(name).title)


def _slot(experiment: str) -> str:
    return f"lab/{experiment}"


def _setup(experiment: Experiment) -> bench.Setup:
    """What the link asks for and the controls above the panel hold."""
    slot = _slot(experiment.name)
    link = state.link_values()
    start, refused = runs.from_link(experiment, link)
    refused += sweep.refused(experiment, link)
    refused += [name for name in link if name not in {*experiment.Params.specs(), *KNOWN}]
    refused += runs.from_link_list(experiment, slot)
    if refused:  # kept, and added to: the next script run finds a link that is mended, or mended in part
        said = state.reader().refused_links.setdefault(slot, {})
        said |= {name: link.get(name, "") for name in refused if name not in said}
    if asked := state.reader().refused_links.get(slot):
        names = "; ".join(_in_link(experiment, name, value) for name, value in asked.items())
        st.warning(t("link_refused", names=names), icon=":material/link_off:")
    with st.container(horizontal=True):
        seed = st.number_input(t("seed"), 0, runs.MOST_SEED, start.seed, key=state.control_key(slot, "seed"), width=140)
        device, dtype = start.device, start.dtype
        if engine.is_ready():
            found = {d.id: d for d in devices.available()}
            ids = list(found)
            by_link = start.device if "device" in state.link_values() else devices.default().id
            device_key = state.control_key(slot, "device")
            device = st.selectbox(
                t("device"), ids, ids.index(by_link), key=device_key, format_func=lambda i: found[i].name, width=240
            )
            dtypes = [d for d in found[device].dtypes if d in ("float32", "float64")] or ["float32"]
            # the key holds the device: another one may have other types
            dtype_key = state.control_key(slot, f"dtype-{device}")
            at_first = start.dtype if start.dtype in dtypes else dtypes[0]
            dtype = st.segmented_control(t("dtype"), dtypes, default=at_first, key=dtype_key, required=True)
    return bench.Setup(
        slot=slot,
        experiment=experiment.name,
        params=start.params,
        controls=tuple(experiment.Params.specs()),
        seed=int(seed),
        device=device,
        dtype=dtype,
        of_lab=True,
    )


def _in_link(experiment: Experiment, name: str, value: str) -> str:
    """A parameter as its control is called, as the link has it, and what it may be."""
    spec = experiment.Params.specs().get(name)
    said = f"`{name}={_code_like(value)}`" if value else f"`{name}`"
    if name in deck().strings.names:
        said = f"{text.name(name, plain=True)} ({said})"
    if isinstance(spec, NumberSpec):
        said += f" · {spec.low:g} … {spec.high:g}"
    elif isinstance(spec, ChoiceSpec):
        said += f" · {', '.join(spec.values)}"
    return said


def _code_like(value: str) -> str:
    return value.replace("`", "")[:MOST_SHOWN]


def _code(experiment: Experiment) -> None:
    fold = st.expander(t("code_that_runs"), icon=":material/code:", key=f"code-{experiment.name}", on_change="rerun")
    if fold.open:
        with fold:
            st.code(experiment.path.read_text("utf-8"), language="python", line_numbers=True, height=480)
