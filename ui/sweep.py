"""The Lab's sweep: one metric over one or two parameters, with a band over the seeds."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import streamlit as st

from engine import runner
from engine.base import ChoiceSpec, FlagSpec, NumberSpec, ParamsError, Plot, Table
from engine.registry import Experiment
from engine.runner import Handle, RunSpec, Sweep
from ui import charts, engine, jobbar, state, takehome, text, widgets
from ui.boundary import fragment
from ui.text import t

PLACE = "sweep"  # key of its container
SEEDS, MOST_SEEDS = 5, 50
LINK = ("sweep", "by", "metric", "seeds")  # what of a link is the sweep's
MOST_LINES = 5  # values of the second parameter; more lines can't be told apart


@dataclass(frozen=True)
class Swept:
    """Sweeps over ``over``, one for each value of ``by``; or a single one, under None."""

    over: str
    by: str | None
    lines: tuple[tuple[Any, Sweep], ...]
    asked: RunSpec  # everything that is not swept, the first of the seeds among it
    left_out: tuple[Any, ...]  # values of ``by`` that these settings do not allow

    def table(self, metric: str) -> Table:
        """Columns ``over``, ``by`` where there is one, the metric's mean, low and high."""
        parts = [sweep.table(metric) for _, sweep in self.lines]
        table = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        series = {}
        if self.by:
            named = [
                [self._line(value)] * len(part[self.over]) for (value, _), part in zip(self.lines, parts, strict=True)
            ]
            series = {self.by: np.concatenate(named)}
        return {
            self.over: table[self.over],
            **series,
            metric: table["mean"],
            "low": table["low"],
            "high": table["high"],
        }

    def _line(self, value: Any) -> str:
        """A line in the legend: a choice speaks for itself, a number or switch needs its name."""
        return _word(value) if isinstance(value, str) else f"{_plain(self.by or '')} = {_word(value)}"


def draw(experiment: Experiment, asked: RunSpec, slot: str) -> None:
    """Choose what is swept, run it as a job, draw what is there.

    ``asked`` holds all that is not swept, unless a control of the panel ``slot`` was moved since.
    """
    if experiment.trains or not _numbers(experiment):
        return
    purpose = f"sweep:{experiment.name}"
    state.reader().drawn_jobs.add(purpose)
    running = engine.active_job(purpose) is not None
    # on a phone this stands above the panel: closed, it is one line
    asked_for = running or state.link_value("sweep") is not None
    with st.expander(t("sweep"), icon=":material/query_stats:", expanded=asked_for), st.container(key=PLACE):
        st.caption(t("sweep_help"))
        fragment(_panel, run_every=jobbar.POLL_S if running else None)(experiment, asked, slot, purpose, running)


def _numbers(experiment: Experiment) -> list[str]:
    return [name for name, spec in experiment.Params.specs().items() if isinstance(spec, NumberSpec)]


def _panel(experiment: Experiment, asked: RunSpec, slot: str, purpose: str, polled: bool) -> None:
    specs = experiment.Params.specs()
    place = f"sweep/{experiment.name}"
    numbers = _numbers(experiment)
    names = experiment.metric_names
    with st.container(horizontal=True, vertical_alignment="bottom"):
        over = widgets.listed(
            t("sweep_over"), numbers, f"{place}.over", _plain, start=state.link_value("sweep", numbers) or numbers[0]
        )
        others = [n for n, s in specs.items() if n != over and isinstance(s, NumberSpec | ChoiceSpec | FlagSpec)]
        by = widgets.listed(
            t("sweep_by"), ["", *others], f"{place}.by", _or_nothing, start=state.link_value("by", others) or ""
        )
    metric = widgets.listed(
        t("metric"), names, f"{place}.metric", _plain, start=state.link_value("metric", names) or names[0]
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        n_seeds = st.number_input(t("seeds"), 1, MOST_SEEDS, _link_seeds(), key=f"{place}.seeds", width=110)
        st.button(
            t("run_sweep"),
            key=f"{place}.run",
            icon=":material/play_arrow:",
            disabled=polled,
            on_click=_start,
            args=(experiment, asked, slot, purpose, over, by or None, int(n_seeds)),
        )
    panel_busy = engine.active_job(f"lab:{slot}") is not None  # the run on show comes first
    if (
        state.link_value("sweep", numbers)
        and state.value_of(f"{place}:begun") is None
        and engine.is_ready()
        and not panel_busy
    ):
        _start(experiment, asked, slot, purpose, over, by or None, int(n_seeds))  # a link that names one has it run
    job = engine.active_job(purpose)
    if job is not None:
        jobbar.draw(job)
    _collect(place, purpose)
    state.set_link(
        sweep=over if job or state.value_of(f"{place}:result") or state.link_value("sweep", numbers) else None,
        by=by or None,
        metric=metric if metric != names[0] else None,
        seeds=str(n_seeds) if n_seeds != SEEDS else None,
    )
    if place in state.reader().messages:
        st.warning(state.reader().messages[place](), icon=":material/info:")
    result: Swept | None = job.partial if job is not None and job.partial else state.value_of(f"{place}:result")
    if result is not None and result.lines:
        if job is None and not _is_current(result, asked, slot, over, by or None, int(n_seeds)):
            st.caption(f":material/history: {t('sweep_other_setting')}")
        _draw(experiment, result, metric or names[0], place)
    if (job is not None) != polled:
        st.rerun()


def _is_current(result: Swept, asked: RunSpec, slot: str, over: str, by: str | None, n_seeds: int) -> bool:
    """Whether the sweep on show is the one that the controls ask for now."""
    params = _held(asked, slot)
    now = {n: v for n, v in params.items() if n not in (over, by)}
    then = {n: v for n, v in result.asked.params.items() if n not in (over, by)}
    same_runs = (result.asked.seed, result.asked.device, result.asked.dtype) == (asked.seed, asked.device, asked.dtype)
    return (result.over, result.by, len(result.lines[0][1].seeds)) == (over, by, n_seeds) and now == then and same_runs


def _held(asked: RunSpec, slot: str) -> dict[str, Any]:
    """The parameters as the panel's controls hold them now."""
    held = {n: v for n in asked.params if (v := state.control_value(slot, n)) is not None}
    return {**asked.params, **held}


def _plain(name: str) -> str:
    return text.name(name, plain=True)


def _or_nothing(name: str) -> str:
    return _plain(name) if name else t("nothing_else")


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return t("switch_on") if value else t("switch_off")
    return text.choice(value, plain=True) if isinstance(value, str) else f"{value:,g}"


def _link_seeds() -> int:
    return _seeds(state.link_value("seeds") or "") or SEEDS


def _seeds(raw: str) -> int | None:
    return int(raw) if re.fullmatch(r"\d{1,2}", raw, re.ASCII) and 1 <= int(raw) <= MOST_SEEDS else None


def refused(experiment: Experiment, link: Mapping[str, str]) -> list[str]:
    """The names in a link that can't be taken for a sweep."""
    specs = experiment.Params.specs()
    fits = {
        "sweep": isinstance(specs.get(link.get("sweep", "")), NumberSpec),
        "by": isinstance(specs.get(link.get("by", "")), NumberSpec | ChoiceSpec | FlagSpec),
        "metric": link.get("metric") in experiment.metric_names,
        "seeds": _seeds(link.get("seeds", "")) is not None,
    }
    return [name for name in LINK if name in link and not fits[name]]


# -- running ----------------------------------------------------------------------------------------------------------


def _start(
    experiment: Experiment, asked: RunSpec, slot: str, purpose: str, over: str, by: str | None, n_seeds: int
) -> None:
    place = f"sweep/{experiment.name}"
    state.set_value(f"{place}:begun", True)
    params = _held(asked, slot)
    groups = _few(experiment, by) if by else [None]
    every = [(value, _allowed(experiment, {**params, by: value} if by else params, over)) for value in groups]
    lines = [(value, values) for value, values in every if values]
    state.reader().messages.pop(place, None)
    if not lines:
        state.reader().messages[place] = lambda: f"{t('sweep_empty')}\n\n{_why_empty(experiment, params, over)}"
        return
    fitting = ({**params, over: values[0], **({by: value} if by else {})} for value, values in lines)
    if all(over in experiment.Params.from_mapping(some).unread() for some in fitting):
        state.reader().messages[place] = lambda: t("sweep_unread", over=_plain(over))
        return
    held_by = RunSpec(experiment.name, params, asked.seed, asked.device, asked.dtype)
    left_out = tuple(value for value, values in every if not values)

    def work(handle: Handle) -> Swept:
        done: list[tuple[Any, Sweep]] = []
        total = sum(len(values) for _, values in lines)

        def so_far(sweep: Sweep | None, value: Any) -> Swept:
            now = [(value, sweep)] if sweep is not None and sweep.values else []
            return Swept(over, by, (*done, *now), held_by, left_out)

        with engine.many_runs() as executor:
            for value, values in lines:
                before = sum(len(sweep.values) for _, sweep in done)

                def report(
                    fraction: float, partial: Sweep, *, value: Any = value, before: int = before, n: int = len(values)
                ) -> None:
                    handle.progress((before + fraction * n) / total, so_far(partial, value))

                swept = runner.sweep(
                    experiment.name,
                    {**params, by: value} if by else params,
                    over,
                    values,
                    tuple(range(asked.seed, asked.seed + n_seeds)),
                    device=asked.device,
                    dtype=asked.dtype,
                    on_progress=report,
                    check_stop=handle.check_stop,
                    executor=executor,
                )
                done.append((value, swept))
        return so_far(None, None)

    engine.submit(purpose, work, device=asked.device)


def _allowed(experiment: Experiment, params: Mapping[str, Any], over: str) -> list[Any]:
    """The values of a sweep that these parameters allow; a curve leaves out the others."""
    allowed = []
    for value in widgets.sweep_values(experiment, over):
        try:
            experiment.Params.from_mapping({**params, over: value})
        except ParamsError:
            continue
        allowed.append(value)
    return allowed


def _why_empty(experiment: Experiment, params: Mapping[str, Any], over: str) -> str:
    """What the experiment says to the first value of a sweep that it refuses throughout."""
    first = widgets.sweep_values(experiment, over)[0]
    try:
        experiment.Params.from_mapping({**params, over: first})
    except ParamsError as error:
        return text.error(error)
    return ""


def _few(experiment: Experiment, by: str) -> Sequence[Any]:
    """The values of the second parameter: all of a choice, a handful of a number."""
    spec = experiment.Params.specs()[by]
    if isinstance(spec, ChoiceSpec):
        return spec.values
    if isinstance(spec, FlagSpec):
        return (False, True)
    return widgets.sweep_values(experiment, by, most=MOST_LINES)


def _settings(experiment: Experiment, result: Swept) -> str:
    """What differs from the defaults beside what is swept, in the reader's words."""
    asked, defaults = result.asked, experiment.Params.defaults()
    changed = {n: v for n, v in asked.params.items() if v != defaults[n] and n not in (result.over, result.by)}
    said = [f"{_plain(n)} = {_word(v)}" for n, v in changed.items()]
    said += [f"{t('seed')} ≥ {asked.seed}"] if asked.seed else []
    said += [f"{t('device')} = {asked.device}"] if asked.device != "cpu" else []
    return ", ".join(said + ([asked.dtype] if asked.dtype != "float32" else []))


def _collect(place: str, purpose: str) -> None:
    """Take what a finished sweep brought, also a part of it, or say why it brought nothing."""
    finished = engine.take_finished(purpose)
    if finished is None:
        return
    brought = finished.result or finished.partial
    if isinstance(brought, Swept) and brought.lines:
        state.set_value(f"{place}:result", brought)
    if finished.state == "failed":
        state.reader().messages[place] = functools.partial(text.error, finished.error)
    elif finished.state != "done":
        ended = f"stopped_{finished.reason}" if isinstance(brought, Swept) and brought.lines else "stopped_empty"
        state.reader().messages[place] = functools.partial(t, ended, share=f"{finished.fraction:.0%}")


# -- drawing ----------------------------------------------------------------------------------------------------------


def _draw(experiment: Experiment, result: Swept, metric: str, place: str) -> None:
    spec = experiment.Params.specs()[result.over]
    assert isinstance(spec, NumberSpec)
    unit = experiment.metric(metric).unit
    plot = Plot(
        name="sweep",
        table="sweep",
        x=result.over,
        y=metric,
        by=result.by,
        low="low",
        high="high",
        x_scale="log2" if spec.log2 else "log10" if widgets.is_wide(spec) else "linear",
        x_unit=spec.unit,
        y_unit=unit,
    )
    table = result.table(metric)
    seeds = len(result.lines[0][1].seeds)
    over = text.name(result.over, plain=True)
    st.caption(t("sweep_title", metric=text.with_unit(metric, unit), over=over, seeds=seeds))
    described = t("sweep_title", metric=_plain(metric), over=over, seeds=seeds)
    charts.draw(plot, table, key=f"{place}-chart-{result.by}", description=described)
    settings = _settings(experiment, result)
    st.caption(t("sweep_settings", settings=settings) if settings else t("sweep_defaults"))
    if result.left_out:
        st.caption(t("sweep_left_out", values=", ".join(map(_word, result.left_out))))
    fold = st.expander(t("table_and_summary"), key=f"{place}-rows", on_change="rerun")
    if fold.open:
        with fold:
            st.dataframe(charts.as_frame(plot, table), hide_index=True)
    takehome.draw_table(f"{experiment.name}-sweep", table, place=PLACE)
