"""Params → controls: one control a field, made from its declaration."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import streamlit as st

from engine.base import ChoiceSpec, FlagSpec, NumberSpec, TextSpec
from engine.registry import Experiment
from ui import state, text

MOST_SEGMENTS = 6  # more choices than this go into a list


def listed(
    label: str,
    options: Sequence[str],
    key: str,
    words: Callable[[str], str],
    *,
    start: str | None,
    then: Callable[[], object] | None = None,
    **look: Any,
) -> str | None:
    """A list to choose from; what is chosen stands under ``key``. ``start`` None: nothing is chosen at first.

    ``then`` is called when something else was chosen.

    Streamlit goes on showing the words of the old language under an unchanged key, so the widget's own key has it.
    """
    spoken, chosen = f"{key}.{state.language()}", state.value_of(key)
    if chosen not in options:
        chosen = start
        state.set_value(key, chosen)
    if state.value_of(spoken) != chosen:
        state.set_value(spoken, chosen)

    def keep() -> None:
        state.set_value(key, state.value_of(spoken))
        if then:
            then()

    # without a first choice the list can be emptied again: Streamlit offers that only where it is told of none
    place = None if chosen is None or start is None else list(options).index(chosen)
    st.selectbox(label, options, place, key=spoken, format_func=words, on_change=keep, **look)
    return state.value_of(key)


def held(names: Iterable[str], start: Mapping[str, Any], slot: str) -> dict[str, Any]:
    """All parameters: what the controls ``names`` hold now, ``start`` for those not drawn or not drawn yet."""
    moved = {name: state.control_value(slot, name) for name in names}
    return {**start, **{name: value for name, value in moved.items() if value is not None}}


def params_controls(
    experiment: Experiment,
    names: Iterable[str],
    start: Mapping[str, Any],
    slot: str,
    *,
    unread: Container[str] = (),
    on_change: Callable[[], object] | None = None,
) -> None:
    """Draw controls: sizes first, in two columns, then the rules, as one thinks. What they hold says :func:`held`.

    ``unread``: those that the other settings leave without effect; they are shown and can't be moved.
    """
    specs = experiment.Params.specs()
    shown = [n for n in names if n in specs]
    sizes = [n for n in shown if isinstance(specs[n], NumberSpec)]
    for row in range(0, len(sizes), 2):
        for column, field in zip(st.columns(2), sizes[row : row + 2], strict=False):
            with column:
                _number(slot, field, specs[field], start[field], on_change, field in unread)
    for field in shown:
        spec, off = specs[field], field in unread
        if isinstance(spec, ChoiceSpec):
            _choice(slot, field, spec, start[field], on_change, off)
        elif isinstance(spec, FlagSpec | TextSpec):
            key, label, help_text = state.control_key(slot, field), text.name(field), text.help_of(field)
            if isinstance(spec, FlagSpec):
                st.toggle(label, start[field], key=key, help=help_text, on_change=on_change, disabled=off)
            else:
                # no max_chars: a text that is pasted and too long would be dropped without a word
                st.text_area(
                    label,
                    start[field],
                    height="content",
                    key=key,
                    help=help_text,
                    on_change=on_change,
                    disabled=off,
                )


def _number(
    slot: str, field: str, spec: NumberSpec, start: float, on_change: Callable[[], object] | None, off: bool
) -> None:
    # each control is told its default: a value put into the session state alone is lost when the first script run is
    # cut short before the browser has drawn it, and the control then stands at its minimum
    key, whole = state.control_key(slot, field), isinstance(start, int)
    label = text.with_unit(field, spec.unit, plain=False)
    look: dict[str, Any] = {"key": key, "help": text.help_of(field), "on_change": on_change, "disabled": off}
    if spec.log2:
        options = _powers_of_two(spec, whole, {start, state.value_of(key)})
        style = "{:,}" if whole else "{:g}"
        st.select_slider(label, options, start, format_func=style.format, **look)
    elif whole:
        step = int(spec.step or 1)
        st.slider(label, int(spec.low), int(spec.high), int(start), step=step, **look)
    elif spec.step:
        low, high, step = float(spec.low), float(spec.high), float(spec.step)
        st.slider(label, low, high, float(start), step=step, format="%g", **look)
    else:
        step = 10.0 ** math.floor(math.log10(start / 2)) if start > 0 else None  # 0.003 goes to 0.002, not to 0
        st.number_input(label, float(spec.low), float(spec.high), float(start), step, format="%g", **look)


def _powers_of_two(spec: NumberSpec, whole: bool, also: set[Any]) -> list[Any]:
    low, high = math.ceil(math.log2(spec.low)) if spec.low > 0 else 0, math.floor(math.log2(spec.high))
    powers = {int(2**e) if whole else float(2**e) for e in range(low, high + 1)}
    return sorted(powers | {v for v in also if v is not None})


def _choice(
    slot: str, field: str, spec: ChoiceSpec, start: str, on_change: Callable[[], object] | None, off: bool
) -> None:
    key, label, help_text = state.control_key(slot, field), text.name(field), text.help_of(field)
    if len(spec.values) <= MOST_SEGMENTS:
        st.segmented_control(
            label,
            spec.values,
            default=start,
            key=key,
            format_func=text.choice,
            help=help_text,
            required=True,
            on_change=on_change,
            disabled=off,
        )
    else:
        words = functools.partial(text.choice, plain=True)
        listed(label, spec.values, key, words, start=start, then=on_change, help=help_text, disabled=off)


def sweep_values(experiment: Experiment, name: str, most: int = 13) -> list[Any]:
    """At most ``most`` values over the range of a parameter that is a number, each of them a place of its control.

    Powers of two where the control moves by them; else evenly, or evenly in the logarithm over a range of a hundred.
    """
    spec, whole = experiment.Params.specs()[name], isinstance(experiment.Params.defaults()[name], int)
    assert isinstance(spec, NumberSpec)
    if spec.log2:
        powers = _powers_of_two(spec, whole, set())
        n = min(most, len(powers))
        return [powers[round(i * (len(powers) - 1) / max(1, n - 1))] for i in range(n)]
    low, high = float(spec.low), float(spec.high)
    shares = [i / (most - 1) for i in range(most)]
    values = [low * (high / low) ** s if is_wide(spec) else low + (high - low) * s for s in shares]
    step = spec.step or (1 if whole else 0)
    if step:
        values = [round(low + round((v - low) / step) * step, 12) for v in values]
    return sorted({round(v) if whole else v for v in values})


def is_wide(spec: NumberSpec) -> bool:
    """Whether a range spans a factor of a hundred, so that even values would leave out its lower part."""
    return spec.low > 0 and spec.high / spec.low >= 100
