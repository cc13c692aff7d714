"""The Lab page: any experiment with every parameter, and a sweep over one of them with bands over seeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import streamlit as st

from engine import devices, registry, runner
from engine.base import NumberSpec, ParamsError, Plot
from engine.registry import Experiment
from engine.runner import Handle, Sweep
from ui import bench, charts, engine, jobbar, state, text, widgets
from ui.boundary import fragment
from ui.text import say, t

SWEEP_SEEDS = 5
MOST_SEED = 2**31 - 1


def draw() -> None:
    """Choose an experiment; its panel, its sweep, its formula and its code."""
    names = list(registry.names())
    first = "softmax_saturation" if "softmax_saturation" in names else names[0]
    st.header(t("page_lab"), anchor=False)
    asked, by_link = state.link_value("experiment"), state.link_value("experiment", names)
    if asked != by_link:
        st.warning(t("link_refused", names="experiment"), icon=":material/link_off:")
    name = widgets.listed(t("experiment"), names, "lab_experiment", _title, start=by_link or first) or first
    if name != by_link:  # another experiment has other parameters
        state.set_link(**{key: None for key in state.link_values() if key != "lang"})
    experiment = registry.get(name)
    words = text.experiment(name)
    reading, working = st.columns([5, 6], gap="large")
    with working, st.container(border=True, key="bench"):
        setup = _setup(experiment)
        bench.panel(setup)
    with reading:
        st.markdown(say(words.about))
        st.latex(words.formula)
        _sweep(experiment, setup)
        _code(experiment)


def _title(name: str) -> str:
    return say(text.experiment(name).title)


def _setup(experiment: Experiment) -> bench.Setup:
    slot = f"lab/{experiment.name}"
    defaults = experiment.Params.defaults()
    start, refused = _from_link(experiment, defaults)
    if refused:
        st.warning(t("link_refused", names=", ".join(refused)), icon=":material/link_off:")
    with st.container(horizontal=True):
        seed = st.number_input(
            t("seed"), 0, MOST_SEED, _link_seed() or 0, key=state.control_key(slot, "seed"), width=140
        )
        device, dtype = "cpu", "float32"
        if engine.is_ready():
            found = {d.id: d for d in devices.available()}
            ids = list(found)
            place = ids.index(state.link_value("device", found) or devices.default().id)
            device_key = state.control_key(slot, "device")
            device = st.selectbox(
                t("device"), ids, place, key=device_key, format_func=lambda i: found[i].name, width=240
            )
            dtypes = [d for d in found[device].dtypes if d in ("float32", "float64")] or ["float32"]
            by_link = state.link_value("dtype", dtypes) or dtypes[0]
            # the key holds the device: another one may have other types
            dtype_key = state.control_key(slot, f"dtype-{device}")
            dtype = st.segmented_control(t("dtype"), dtypes, default=by_link, key=dtype_key, required=True)

    def keep_link(params: Mapping[str, Any]) -> None:
        changed = {n: str(v) if v != defaults[n] else None for n, v in params.items()}
        state.set_link(
            experiment=experiment.name,
            seed=str(seed) if seed else None,
            device=device if device != "cpu" else None,
            dtype=dtype if dtype != "float32" else None,
            **changed,
        )

    return bench.Setup(
        slot=slot,
        experiment=experiment.name,
        params=start,
        controls=tuple(experiment.Params.specs()),
        seed=int(seed),
        device=device,
        dtype=dtype,
        on_params=keep_link,
    )


def _link_seed() -> int | None:
    """The seed of the link, 0 without one; None for what is no seed."""
    raw = state.link_value("seed") or "0"
    seed = int(raw) if re.fullmatch(r"\d{1,10}", raw, re.ASCII) else MOST_SEED + 1
    return seed if seed <= MOST_SEED else None


def _from_link(experiment: Experiment, defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Parameters named in the link; what can't be taken is listed and left at its default."""
    values, refused = dict(defaults), [] if _link_seed() is not None else ["seed"]
    if engine.is_ready():
        known = {d.id: d.dtypes for d in devices.available()}
        allowed = {"device": known, "dtype": {dtype for dtypes in known.values() for dtype in dtypes}}
        refused += [name for name, ids in allowed.items() if state.link_value(name) != state.link_value(name, ids)]
    for name in experiment.Params.specs():
        raw = state.link_value(name)
        if raw is None:
            continue
        try:
            values[name] = _read(raw, defaults[name])
        except ValueError:
            refused.append(name)
    try:
        experiment.Params.from_mapping(values)
    except ParamsError as error:
        for problem in error.problems:
            if problem.kind != "rule":  # what fits alone but not together is shown, and the panel says what is wrong
                refused.append(problem.name)
                values[problem.name] = defaults[problem.name]
    return values, refused


def _read(raw: str, default: Any) -> Any:
    """A value of the link as the type of its parameter. Raises: ValueError."""
    if isinstance(default, bool):
        if raw not in ("True", "False"):
            raise ValueError(raw)
        return raw == "True"
    return type(default)(raw)


def _code(experiment: Experiment) -> None:
    fold = st.expander(t("code_that_runs"), icon=":material/code:", key=f"code-{experiment.name}", on_change="rerun")
    if fold.open:
        with fold:
            st.code(experiment.path.read_text("utf-8"), language="python", line_numbers=True, height=480)


# -- sweep ------------------------------------------------------------------------------------------------------------


def _sweep(experiment: Experiment, setup: bench.Setup) -> None:
    if experiment.trains:
        return
    purpose = f"sweep:{experiment.name}"
    state.reader().drawn_jobs.add(purpose)
    running = engine.active_job(purpose) is not None
    st.subheader(t("sweep"), anchor=False)
    st.caption(t("sweep_help"))
    fragment(_sweep_panel, run_every=jobbar.POLL_S if running else None)(experiment, setup, purpose, running)


def _sweep_panel(experiment: Experiment, setup: bench.Setup, purpose: str, polled: bool) -> None:
    specs = experiment.Params.specs()
    over_options = [n for n, s in specs.items() if isinstance(s, NumberSpec)]
    slot = f"sweep/{experiment.name}"
    with st.container(horizontal=True, vertical_alignment="bottom"):
        over = widgets.listed(t("sweep_over"), over_options, f"{slot}.over", _plain, start=over_options[0])
        names = experiment.metric_names
        metric = widgets.listed(t("metric"), names, f"{slot}.metric", _plain, start=names[0]) or names[0]
        st.button(
            t("run_sweep"),
            key=f"{slot}.run",
            icon=":material/play_arrow:",
            disabled=polled,
            on_click=_start_sweep,
            args=(experiment, setup, purpose, over),
        )
    job = engine.active_job(purpose)
    if job is not None:
        jobbar.draw(job)
    finished = engine.take_finished(purpose)
    if finished is not None:
        if finished.state == "done":
            state.set_value(f"{slot}:result", finished.result)
            state.set_value(f"{slot}:settings", state.value_of(f"{slot}:asked"))
            state.reader().messages.pop(slot, None)
        elif finished.state == "failed":
            state.reader().messages[slot] = text.error(finished.error)
        else:
            if isinstance(finished.partial, Sweep) and len(finished.partial.values):
                state.set_value(f"{slot}:result", finished.partial)
                state.set_value(f"{slot}:settings", state.value_of(f"{slot}:asked"))
            state.reader().messages[slot] = t(f"stopped_{finished.reason}", share=f"{finished.fraction:.0%}")
    if slot in state.reader().messages:
        st.warning(state.reader().messages[slot], icon=":material/info:")
    result: Sweep | None = state.value_of(f"{slot}:result")
    if result is not None:
        _draw_sweep(experiment, result, metric, slot)
    if (job is not None) != polled:
        st.rerun()


def _plain(name: str) -> str:
    return text.name(name, plain=True)


def _start_sweep(experiment: Experiment, setup: bench.Setup, purpose: str, over: str) -> None:
    defaults = experiment.Params.defaults()
    params = {n: v if (v := state.control_value(setup.slot, n)) is not None else setup.params[n] for n in defaults}
    spec = experiment.Params.specs()[over]
    changed = {n: v for n, v in params.items() if v != defaults[n] and n != over}
    settings = ", ".join(f"{_plain(n)} = {text.choice(str(v), plain=True)}" for n, v in changed.items())
    state.set_value(f"sweep/{experiment.name}:asked", settings)
    values = []
    for value in widgets.sweep_values(spec, isinstance(defaults[over], int)):
        try:
            experiment.Params.from_mapping(params | {over: value})
        except ParamsError:  # a value that this setting does not allow is left out of the curve
            continue
        values.append(value)
    if not values:
        state.reader().messages[f"sweep/{experiment.name}"] = t("sweep_empty")
        return

    def work(handle: Handle) -> Sweep:
        with engine.many_runs() as executor:
            return runner.sweep(
                experiment.name,
                params,
                over,
                values,
                tuple(range(SWEEP_SEEDS)),
                device=setup.device,
                dtype=setup.dtype,
                executor=executor,
                on_progress=handle.progress,
                check_stop=handle.check_stop,
            )

    engine.submit(purpose, work, device=setup.device)


def _draw_sweep(experiment: Experiment, result: Sweep, metric: str, slot: str) -> None:
    spec = experiment.Params.specs()[result.over]
    assert isinstance(spec, NumberSpec)
    plot = Plot(
        name="sweep",
        table="sweep",
        x=result.over,
        y=metric,
        low="low",
        high="high",
        x_scale="log2" if spec.log2 else "linear",
        x_unit=spec.unit,
        y_unit=experiment.metric(metric).unit,
    )
    table = result.table(metric)
    table = {metric if column == "mean" else column: values for column, values in table.items()}
    settings = state.value_of(f"{slot}:settings")
    st.caption(
        t(
            "sweep_title",
            metric=text.with_unit(metric, experiment.metric(metric).unit),
            over=text.name(result.over, plain=True),
            seeds=len(result.seeds),
        )
    )
    charts.draw(
        plot,
        table,
        key=f"{slot}-chart",
        description=t("sweep_title", metric=metric, over=result.over, seeds=len(result.seeds)),
    )
    st.caption(t("sweep_settings", settings=settings) if settings else t("sweep_defaults"))
    fold = st.expander(t("table_and_summary"), key=f"{slot}-rows", on_change="rerun")
    if fold.open:
        with fold:
            st.dataframe(charts.as_frame(plot, table), hide_index=True)
