"""The lab panel: controls, chart, figures, run and predict. The same on a card and on the Lab page."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import streamlit as st

from claims.receipts import LabReceipt
from claims.verify import Verdict, verify
from content.schema import Claim
from engine import registry, runner
from engine.base import ParamsError, Result
from engine.registry import Experiment
from engine.runner import Handle, RunSpec
from ui import charts, engine, frame, jobbar, learner, runs, state, takehome, text, widgets
from ui.boundary import fragment
from ui.state import Shown
from ui.text import t

PLACE = "bench"  # key of the container that holds a panel
SEEDS = 5  # runs behind the ± of a figure
DEFAULT_BUDGET_S, MOST_BUDGET_S = 30, 120
FIGURES = 3
MOST_TABS = 3  # more plots than this go into a list


@dataclass(frozen=True)
class Setup:
    """What a panel shows: an experiment with its first parameters and the controls to offer."""

    slot: str
    experiment: str
    params: Mapping[str, Any]
    controls: tuple[str, ...]
    figures: tuple[str, ...] = ()
    reference: LabReceipt | None = None  # its committed run, shown before anything was run here
    reference_date: str = ""
    claims: tuple[Claim, ...] = ()  # of the card, measured by this experiment
    card: str = ""
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    of_lab: bool = False  # the Lab page's: the link holds its run, which can be pinned, brought back and taken home


@dataclass(frozen=True)
class Measured:
    """What *Run on this device* brings back."""

    shown: Shown
    verdicts: tuple[Verdict, ...]


def panel(setup: Setup) -> None:
    """Draw the panel as a fragment of its own: a moved slider redraws it and nothing else."""
    state.reader().drawn_jobs.add(_purpose(setup))
    state.reader().drawn_jobs.add(runs.purpose(setup.slot))
    running = _is_running(setup)
    fragment(_panel, run_every=jobbar.POLL_S if running else None)(setup, running)


def _is_running(setup: Setup) -> bool:
    return any(engine.active_job(p) is not None for p in (_purpose(setup), runs.purpose(setup.slot)))


def _purpose(setup: Setup) -> str:
    return f"lab:{setup.slot}"


def _panel(setup: Setup, polled: bool) -> None:
    experiment = registry.get(setup.experiment)
    spec, refused = _get_ready(setup)
    predicting = bool(state.value_of(_predict_key(setup)))
    # A moved control computes before this fragment runs, and so before its first message is sent: the browser then gets
    # the whole panel in one go and draws it once, not in three steps.
    widgets.params_controls(
        experiment,
        setup.controls,
        setup.params,
        setup.slot,
        unread=experiment.Params.from_mapping(spec.params).unread() if spec is not None else (),
        on_change=functools.partial(_get_ready, setup),
    )
    if spec is None:
        for purpose in (_purpose(setup), runs.purpose(setup.slot)):  # what runs is not stopped by a refused setting
            if (job := engine.active_job(purpose)) is not None:
                jobbar.draw(job)
        st.error(refused, icon=":material/block:")
    elif predicting:
        _ask_prediction(setup, experiment, spec)
    else:
        _draw(setup, experiment, spec)
    if setup.card and spec is not None:
        defaults = experiment.Params.defaults()
        moved = {name: str(value) for name, value in spec.params.items() if value != defaults[name]}
        frame.link("lab", t("more_parameters"), icon=":material/open_in_full:", experiment=setup.experiment, **moved)
    if _is_running(setup) != polled:
        st.rerun()  # the page decides how often this fragment is polled, and its text holds the new numbers


def _get_ready(setup: Setup) -> tuple[RunSpec | None, str]:
    """Have on show, or on its way, what the controls ask for: the run, or None and why the experiment refuses it."""
    experiment = registry.get(setup.experiment)
    spec, refused = _asked_for(setup, experiment)
    if spec is not None:
        if setup.of_lab:
            state.set_link(experiment=setup.experiment, **runs.link_of(spec))
            runs.bring_up_to_date(setup.slot)
        _collect(setup)
        if experiment.trains:
            if setup.slot not in state.reader().shown:
                _show_reference(setup, spec)
        elif not state.value_of(_predict_key(setup)):
            _bring_up_to_date(setup, spec)
    return spec, refused


def _asked_for(setup: Setup, experiment: Experiment) -> tuple[RunSpec | None, str]:
    """The run that the controls ask for, or why the experiment refuses it."""
    held = widgets.held(setup.controls, setup.params, setup.slot)
    try:
        params = experiment.Params.from_mapping(held).as_dict()
    except ParamsError as error:
        return None, text.error(error)
    return engine.spec_of(setup.experiment, params, seed=setup.seed, device=setup.device, dtype=setup.dtype), ""


# -- getting a result -------------------------------------------------------------------------------------------------


def _show_reference(setup: Setup, spec: RunSpec) -> bool:
    """Show the committed run where it is the run asked for."""
    reference = setup.reference
    if reference is None or (spec.seed, spec.device, spec.dtype) != (0, "cpu", "float32"):
        return False
    if spec.params != registry.get(setup.experiment).Params.from_mapping(setup.params).as_dict():
        return False
    state.reader().shown[setup.slot] = Shown(
        spec, Result(dict(reference.metrics), dict(reference.tables), reference.done), "reference"
    )
    return True


def _bring_up_to_date(setup: Setup, spec: RunSpec) -> None:
    """Have the asked-for run on show, or a job under way that will bring it."""
    reader = state.reader()
    shown = reader.shown.get(setup.slot)
    if shown is not None and shown.spec == spec:
        if engine.active_job(_purpose(setup)) is None:  # a run that was stopped on the way here is forgotten
            state.set_value(f"{setup.slot}:wanted", None)
            reader.messages.pop(setup.slot, None)
        return
    if _show_reference(setup, spec):
        reader.messages.pop(setup.slot, None)
        return
    under_way = engine.active_job(_purpose(setup)) is not None
    if _wanted(setup) == spec and (under_way or setup.slot in reader.messages):
        return  # on its way, or the message says why there is no result
    state.set_value(f"{setup.slot}:wanted", spec)
    reader.messages.pop(setup.slot, None)
    try:
        result = engine.quick(spec)
    except (runner.TooLarge, runner.OutOfMemory) as error:
        reader.messages[setup.slot] = functools.partial(text.error, error)
        return
    if result is not None:
        _show(setup, Shown(spec, result, "here"))
        return
    if engine.active_elsewhere() is not None:  # a moved control must not end it: Run on this device may
        state.set_value(f"{setup.slot}:wanted", None)
        reader.messages[setup.slot] = lambda: t("busy_elsewhere")
        return
    _run(setup, spec)
    _collect(setup)


def _show(setup: Setup, shown: Shown) -> None:
    state.reader().shown[setup.slot] = shown
    if setup.of_lab:
        runs.remember(setup.slot, shown)


def _run(setup: Setup, spec: RunSpec, deadline_s: float | None = None) -> None:
    """Start one run as a job; with a deadline it is a training run under the reader's time budget."""
    state.set_value(f"{setup.slot}:wanted", spec)
    state.reader().messages.pop(setup.slot, None)

    def work(handle: Handle) -> Measured:
        result = runner.run_spec(spec, handle.progress, handle.check_stop)
        return Measured(Shown(spec, result, "here"), ())

    engine.submit(_purpose(setup), work, device=spec.device, deadline_s=deadline_s)


def _wanted(setup: Setup) -> RunSpec | None:
    return state.value_of(f"{setup.slot}:wanted")


def _collect(setup: Setup) -> None:
    """Take what a finished job of this panel brought, or say why it brought nothing."""
    reader = state.reader()
    job = engine.take_finished(_purpose(setup))
    if job is None:
        return
    if job.state == "failed":
        reader.messages[setup.slot] = functools.partial(text.error, job.error)
        return
    brought = job.result if job.state == "done" else job.partial
    if isinstance(brought, Result):  # so far: a training run reports its curves on the way
        brought = Measured(Shown(_wanted(setup), brought, "here"), ())
    if brought is not None:
        brought.shown.seconds = job.seconds
        _show(setup, brought.shown)
        learner.remember(brought.verdicts)
    if job.state == "done":
        reader.messages.pop(setup.slot, None)
    else:
        # t("stopped_stop") t("stopped_replaced") t("stopped_deadline") t("stopped_abandoned") t("stopped_empty")
        ended = f"stopped_{job.reason}" if brought is not None else "stopped_empty"
        reached = brought.shown.result.done if brought is not None and brought.shown.result.done < 1 else job.fraction
        reader.messages[setup.slot] = functools.partial(_ended, ended, f"{job.fraction:.0%}", f"{reached:.0%}")


def _ended(name: str, share: str, reached: str) -> str:
    """How far a run got that did not come to its end; what is on show may end earlier, where it was last measured."""
    return t(name, share=share) + (f" {t('measured_until', share=reached)}" if reached != share else "")


def _measure(setup: Setup, spec: RunSpec) -> None:
    """*Run on this device*: this setting on several seeds, and the claims that this experiment carries."""
    state.set_value(f"{setup.slot}:wanted", spec)
    state.reader().messages.pop(setup.slot, None)
    claims, card = setup.claims, setup.card

    def work(handle: Handle) -> Measured:
        total = SEEDS + len(claims)
        results: list[Result] = []
        for i in range(SEEDS):
            seeded = dataclasses.replace(spec, seed=spec.seed + i)
            results.append(
                runner.run_spec(
                    seeded, lambda fraction, _, i=i: handle.progress((i + fraction) / total), handle.check_stop
                )
            )
        shown = _over_seeds(spec, results)
        verdicts: list[Verdict] = []
        for i, claim in enumerate(claims):
            handle.progress((SEEDS + i) / total, Measured(shown, tuple(verdicts)))
            verdicts.append(verify(claim, card, device=spec.device, check_stop=handle.check_stop))
        return Measured(shown, tuple(verdicts))

    engine.submit(_purpose(setup), work, device=spec.device)


def _over_seeds(spec: RunSpec, results: list[Result]) -> Shown:
    """Median and half the range of each metric; the plots are those of the first seed."""
    metrics = {name: [result.metrics[name] for result in results] for name in results[0].metrics}
    middle = {name: statistics.median(values) for name, values in metrics.items()}
    spread = {name: (max(values) - min(values)) / 2 for name, values in metrics.items()}
    return Shown(spec, Result(middle, results[0].tables), "here", spread=spread, n_seeds=len(results))


# -- drawing ----------------------------------------------------------------------------------------------------------


def _draw(setup: Setup, experiment: Experiment, spec: RunSpec) -> None:
    reader = state.reader()
    job = engine.active_job(_purpose(setup))
    shown = reader.shown.get(setup.slot)
    result = job.partial if job is not None and isinstance(job.partial, Result) else shown.result if shown else None
    if job is not None:
        jobbar.draw(job)
    if result is None:
        st.skeleton(height=charts.HEIGHT) if job is not None else st.info(
            t("nothing_run"), icon=":material/play_arrow:"
        )
    else:
        if unknown := int(result.metrics.get("n_unknown", 0)):
            st.warning(t("unknown_characters", n=unknown), icon=":material/spellcheck:")
        if not all(map(math.isfinite, result.metrics.values())):
            st.warning(t("not_finite", dtype=spec.dtype), icon=":material/warning:")
        _chart(setup, experiment, result, shown)
        _figures(setup, experiment, result, shown)
    if setup.of_lab:
        on_show = shown.spec if shown is not None else spec
        runs.draw_pins(experiment, setup.slot, on_show, result, shown.n_seeds if shown is not None else 1)
    _prediction_outcome(setup)
    message = reader.messages.get(setup.slot)
    if message:
        st.warning(message(), icon=":material/info:")
    _buttons(setup, experiment, spec, job is not None)
    if shown is not None and job is None:
        if shown.spec != spec:
            st.caption(f":material/history: {t('other_setting')}")
        _caption(setup, shown)
    if result is not None:
        _details(setup, experiment, result)
        if setup.of_lab and shown is not None and job is None:
            _keep_and_take(setup, experiment, shown)


def _keep_and_take(setup: Setup, experiment: Experiment, shown: Shown) -> None:
    """Of the Lab page: pin the run on show, take it home, go back to an earlier one."""
    with st.container(horizontal=True):
        if any(spec == shown.spec for spec, _ in runs.pins(setup.slot)):
            st.button(
                t("unpin_this"),
                key=f"{setup.slot}-unpin",
                icon=":material/keep_off:",
                on_click=runs.unpin,
                args=(setup.slot, shown.spec),
            )
        else:
            st.button(
                t("pin"),
                key=f"{setup.slot}-pin",
                icon=":material/keep:",
                help=t("pin_help", most=runs.MOST_PINS),
                disabled=runs.full(setup.slot) or shown.result.done < 1,  # a link could not bring back a part of a run
                on_click=runs.pin,
                args=(setup.slot, shown.spec, shown.result if shown.n_seeds == 1 else None),
            )
        whole = shown.n_seeds == 1 and shown.result.done == 1
        takehome.draw(experiment, shown.spec, shown.result.tables, place=PLACE, whole=whole)
    runs.history(experiment, setup.slot)


def _chart(setup: Setup, experiment: Experiment, result: Result, shown: Shown | None) -> None:
    words = text.experiment(experiment.name)
    plots = [p for p in experiment.plots if p.table in result.tables and len(result.tables[p.table][p.x])]
    if not plots:
        return
    plot = plots[0]
    if len(plots) > 1:
        names = [p.name for p in plots]
        key = state.control_key(setup.slot, "plot")

        def title(name: str) -> str:
            return text.say(words.plots[name])

        if len(names) <= MOST_TABS:
            chosen = st.segmented_control(
                t("plot"),
                names,
                default=names[0],
                key=key,
                format_func=title,
                label_visibility="collapsed",
                required=True,
            )
        else:
            chosen = widgets.listed(t("plot"), names, key, title, start=names[0], label_visibility="collapsed")
        plot = plots[names.index(chosen)]
    else:
        st.caption(text.say(words.plots[plot.name]))
    described = t("chart_of", name=text.say(words.plots[plot.name]))
    key, table = f"{setup.slot}-{plot.name}", result.tables[plot.table]
    pinned = runs.beside(setup.slot, shown.spec, plot.table) if setup.of_lab and shown is not None else []
    if pinned and shown is not None and plot.mark != "heat":
        specs = [shown.spec, *(s for s, _ in pinned)]
        laid = [(f"{t('on_show')} · {runs.label(shown.spec, specs)}", table)]
        laid += [(runs.label(s, specs), r.tables[plot.table]) for s, r in pinned]
        plot, table = runs.overlay(plot, laid)
        key += f"-{len(laid)}"
    charts.draw(plot, table, key=key, description=described)


def summary(experiment: Experiment, result: Result) -> str:
    """One sentence that says what the run shows."""
    words = text.experiment(experiment.name)
    said = text.say(words.summary)
    named = {name for _, name, _, _ in string.Formatter().parse(said) if name}
    if all(math.isfinite(result.metrics.get(name, math.nan)) for name in named):
        return said.format(**result.metrics)
    return text.say(words.title)  # a partial result need not hold every metric yet, and what is undefined says nothing


def _figures(setup: Setup, experiment: Experiment, result: Result, shown: Shown | None) -> None:
    """Three figures, each with its name beside it: under each other, so that none is cut on a narrow screen."""
    lines = []
    for metric in setup.figures or experiment.metric_names[:FIGURES]:
        if metric in result.metrics:
            spread = shown.spread.get(metric) if shown else None
            uncertainty = f" ± {text.number(spread)}" if spread is not None else ""
            name = text.with_unit(metric, experiment.metric(metric).unit, plain=False)
            lines.append(f"### {text.number(result.metrics[metric])} :small[:gray[{uncertainty}　{name}]]")
    st.markdown("\n".join(lines), anchors=False)


def _buttons(setup: Setup, experiment: Experiment, spec: RunSpec, busy: bool) -> None:
    if experiment.trains:
        budget = st.slider(
            t("budget"),
            5,
            MOST_BUDGET_S,
            DEFAULT_BUDGET_S,
            step=5,
            key=state.control_key(setup.slot, "budget_s"),
            format="%d s",
            help=t("budget_help"),
        )
    with st.container(horizontal=True):
        if experiment.trains:
            st.button(
                t("train_here"),
                key=f"{setup.slot}-run",
                type="primary",
                icon=":material/play_arrow:",
                disabled=busy,
                on_click=_run,
                args=(setup, spec, float(budget)),
            )
        else:
            st.button(
                t("run_here"),
                key=f"{setup.slot}-run",
                type="primary",
                icon=":material/play_arrow:",
                disabled=busy,
                help=t("run_here_help", seeds=SEEDS, claims=len(setup.claims)),
                on_click=_measure,
                args=(setup, spec),
            )
        st.button(
            t("predict_first"),
            key=f"{setup.slot}-predict",
            icon=":material/psychology:",
            disabled=busy,
            help=t("predict_help"),
            on_click=state.set_value,
            args=(_predict_key(setup), True),
        )


def _caption(setup: Setup, shown: Shown) -> None:
    if shown.where == "reference":
        st.caption(t("from_reference", device="CPU", dtype="float32", seeds="0", date=setup.reference_date))
        return
    n_seeds = max(shown.n_seeds, int(shown.spec.params.get("n_seeds", 1)))  # a training run has several by itself
    seeds = f"{shown.spec.seed}–{shown.spec.seed + n_seeds - 1}" if n_seeds > 1 else str(shown.spec.seed)
    line = t("measured_here", device=shown.spec.device, dtype=shown.spec.dtype, seeds=seeds)
    if shown.seconds is not None:
        line += f" · {shown.seconds:.1f} s"
    if shown.result.done < 1:
        line += f" · {t('got_so_far', share=f'{shown.result.done:.0%}')}"
    st.caption(line)


def _details(setup: Setup, experiment: Experiment, result: Result) -> None:
    fold = st.expander(t("table_and_summary"), key=f"{setup.slot}-details", on_change="rerun")
    if not fold.open:
        return
    with fold:
        st.write(summary(experiment, result))
        rows = {
            text.with_unit(m.name, m.unit): text.number(result.metrics[m.name])
            for m in experiment.metrics
            if m.name in result.metrics
        }
        st.dataframe(
            {t("metric"): list(rows), t("value"): list(rows.values())}, hide_index=True, key=f"{setup.slot}-metrics"
        )
        first = {plot.table: plot for plot in reversed(experiment.plots)}  # several plots may draw one table
        for plot in experiment.plots:
            if plot.table in result.tables and first[plot.table] is plot:
                st.caption(text.say(text.experiment(experiment.name).plots[plot.name]))
                st.dataframe(
                    charts.as_frame(plot, result.tables[plot.table]),
                    hide_index=True,
                    key=f"{setup.slot}-{plot.name}-rows",
                )


# -- predict, then run ------------------------------------------------------------------------------------------------


def _predict_key(setup: Setup) -> str:
    return f"{setup.slot}:predicting"


def _ask_prediction(setup: Setup, experiment: Experiment, spec: RunSpec) -> None:
    """The chart is put away; the reader says a number, then sees the run."""
    metric = (setup.figures or experiment.metric_names)[0]
    st.markdown(t("predict_ask", name=text.with_unit(metric, experiment.metric(metric).unit, plain=False)))
    key = f"{setup.slot}:prediction"
    st.number_input(t("your_prediction"), value=None, format="%g", key=key, placeholder=t("a_number"))
    with st.container(horizontal=True):
        st.button(
            t("commit_and_run"),
            key=f"{setup.slot}-commit",
            type="primary",
            icon=":material/play_arrow:",
            disabled=state.value_of(key) is None,
            on_click=_commit,
            args=(setup, spec, metric),
        )
        st.button(t("cancel"), key=f"{setup.slot}-cancel", on_click=state.set_value, args=(_predict_key(setup), False))


def _commit(setup: Setup, spec: RunSpec, metric: str) -> None:
    value = state.value_of(f"{setup.slot}:prediction")
    state.set_value(_predict_key(setup), False)
    state.set_value(f"{setup.slot}:pending", (spec, metric, value))
    if registry.get(setup.experiment).trains:
        _run(setup, spec, float(state.control_value(setup.slot, "budget_s") or DEFAULT_BUDGET_S))


def _prediction_outcome(setup: Setup) -> None:
    """Compare a committed prediction with the run it was made for, once that run is whole, and keep it."""
    pending = state.value_of(f"{setup.slot}:pending")
    shown = state.reader().shown.get(setup.slot)
    if pending is None or shown is None or engine.active_job(_purpose(setup)) is not None:
        return
    spec, metric, predicted = pending
    if shown.spec != spec or metric not in shown.result.metrics:
        return
    if shown.result.done < 1:
        st.info(t("prediction_waits", predicted=text.number(predicted)))
        return
    measured = shown.result.metrics[metric]
    if state.value_of(f"{setup.slot}:pending-kept") != pending:
        state.set_value(f"{setup.slot}:pending-kept", pending)
        learner.predicted(setup.experiment, metric, predicted, measured)
    st.info(
        t(
            "prediction_outcome",
            predicted=text.number(predicted),
            measured=text.number(measured),
            error=_how_far(predicted, measured),
        )
    )


def _how_far(predicted: float, measured: float) -> str:
    """A factor where both have the same sign, else a difference."""
    if text.number(predicted) == text.number(measured):
        return t("just_so")
    if predicted * measured > 0:
        factor = max(predicted / measured, measured / predicted)
        return t("off_by_factor", factor=f"{factor:.2f}") if math.isfinite(factor) else t("off_by", difference="∞")
    return t("off_by", difference=text.number(abs(predicted - measured)))
