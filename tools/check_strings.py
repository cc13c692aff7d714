"""strings.yaml against what it names, in both directions: nothing without words, no words without a use."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path as File

from content.loader import PROJECT, Deck, display
from content.problems import Path, Problem, choices, did_you_mean
from content.prose import Page
from content.schema import LANGUAGES, Strings, Text
from engine import registry
from engine.base import ChoiceSpec, NumberSpec
from engine.registry import Experiment
from study.stats import PLOTS

RUN_COLUMN = "run"  # which run a row of a chart of several is from: ui/runs.py adds it
UNITS = (
    "nats",
    "bytes",
    "s",
    "flop",
    "flop/byte",
    "flop/s",
    "bytes/s",
    "%",
)  # of engine.base.Metric; "1", of pure numbers, has no words
INTERFACE = ("app.py", "pages", "ui", "study", "export")
_CALL = re.compile(
    r"""\bt\(\s*(["'])([A-Za-z][A-Za-z0-9_]*)\1\s*[,)]"""
)  # in code, in f-strings, and in a comment beside a computed key


def check_strings(deck: Deck) -> list[Problem]:
    """All problems of the deck's strings."""
    page = Page(deck.documents["strings"])
    strings = deck.strings
    problems = list(_names(page, strings))
    problems += _interface(page, strings)
    _holes(page, strings)
    _plain(page, strings)
    return [*problems, *page.problems]


# --------------------------------------------------------------------------------------------------------------------
# Words of the engine


def _names(page: Page, strings: Strings) -> Iterator[Problem]:
    experiments = [registry.get(name) for name in registry.names()]
    modules = sorted(
        (PROJECT / "engine").rglob("*.py")
    )  # what experiments share may name columns, choices and rules too
    constants = {c for path in modules for c in _constants(path)}
    wanted: dict[str, list[tuple[str, File, str]]] = {
        section: [] for section in ("names", "choices", "rules", "units", "experiments")
    }
    for e in experiments:
        wanted["experiments"].append((e.name, e.path, "experiment"))
        wanted["names"] += [(m.name, e.path, "metric") for m in e.metrics]
        wanted["units"] += [(m.unit, e.path, "unit") for m in e.metrics]
        for name, spec in e.Params.specs().items():
            wanted["names"].append((name, e.path, "parameter"))
            if isinstance(spec, ChoiceSpec):
                wanted["choices"] += [(value, e.path, "choice") for value in spec.values]
            elif isinstance(spec, NumberSpec):
                wanted["units"].append((spec.unit, e.path, "unit"))
        for plot in e.plots:
            wanted["names"] += [(column, e.path, "column") for column in plot.columns]
            wanted["units"] += [(plot.x_unit, e.path, "unit"), (plot.y_unit, e.path, "unit")]
    for plot in PLOTS.values():  # of a reader's progress: drawn as an experiment's are
        wanted["names"] += [(column, PROJECT / "study" / "stats.py", "column") for column in plot.columns]
    wanted["rules"] = [(rule, path, "rule") for path in modules for rule in _rules(path)]
    for section, uses in wanted.items():
        have: dict[str, object] = getattr(strings, section)
        said = set()
        for name, path, what in uses:
            if name not in have and name != "1" and (name, path) not in said:
                said.add((name, path))
                yield Problem(display(path), 1, 1, what, f"{name!r} has no words; add it to {section} in strings.yaml")
        # a table's column or a series' value that no plot names is a string in the module
        used = (
            {name for name, _, _ in uses}
            | (constants if section in ("names", "choices") else set())
            | (set(UNITS) if section == "units" else set())
            | ({RUN_COLUMN} if section == "names" else set())
        )
        for name in have:
            if name not in used:
                page.error(
                    (section, name),
                    "nothing of the engine is called so; delete it" + did_you_mean(name, sorted(used - constants)),
                )
    for e in experiments:
        if e.name in strings.experiments:
            _experiment(page, strings, e)


def _experiment(page: Page, strings: Strings, e: Experiment) -> None:
    words, path = strings.experiments[e.name], ("experiments", e.name)
    plots = [p.name for p in e.plots]
    for name in plots:
        if name not in words.plots:
            page.error((*path, "plots"), f"the plot {name!r} has no title; add it")
    for name in words.plots:
        if name not in plots:
            page.error((*path, "plots", name), f"no such plot; {e.name} has {choices(name, plots)}")
    for language in LANGUAGES:
        for hole in _fields(words.summary.get(language)):
            if hole not in e.metric_names:
                page.error(
                    (*path, "summary", language),
                    f"{{{hole}}}: no such metric; {e.name} has {choices(hole, e.metric_names, most=40)}",
                )
        try:
            words.summary.get(language).format(**dict.fromkeys(e.metric_names, 1.0))
        except (KeyError, IndexError):
            pass  # said above
        except ValueError as error:
            page.error((*path, "summary", language), f"can't be filled: {error}")


@cache
def _tree(path: File) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _constants(path: File) -> set[str]:
    return {n.value for n in ast.walk(_tree(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _rules(path: File) -> set[str]:
    """Names given as ``rule=...`` in a module."""
    keywords = [k for n in ast.walk(_tree(path)) if isinstance(n, ast.Call) for k in n.keywords]
    return {
        k.value.value
        for k in keywords
        if k.arg == "rule" and isinstance(k.value, ast.Constant) and isinstance(k.value.value, str)
    }


# --------------------------------------------------------------------------------------------------------------------
# Words of the interface


def _interface(page: Page, strings: Strings) -> Iterator[Problem]:
    files = list(_interface_files())
    if not files:
        return
    used: set[str] = set()
    for path in files:
        used |= _constants(path)
        text = path.read_text("utf-8")
        for match in _CALL.finditer(text):
            used.add(match[2])
            if match[2] not in strings.ui:
                line, column = (
                    text.count("\n", 0, match.start()) + 1,
                    match.start() - text.rfind("\n", 0, match.start()),
                )
                yield Problem(
                    display(path),
                    line,
                    column,
                    "t",
                    f"got {match[2]!r}; add it to ui in strings.yaml" + did_you_mean(match[2], strings.ui),
                )
    for key in strings.ui:
        if key not in used:
            page.error(
                ("ui", key),
                'no page says this; delete it. Where the key is computed, list the keys in a comment: # t("a") t("b")',
            )


def _interface_files() -> Iterator[File]:
    for name in INTERFACE:
        place = PROJECT / name
        if place.is_dir():
            yield from sorted(place.rglob("*.py"))
        elif place.is_file():
            yield place


# --------------------------------------------------------------------------------------------------------------------
# Texts that are filled


def _holes(page: Page, strings: Strings) -> None:
    """Both languages have the same {holes}, and can be filled."""
    filled: Iterable[tuple[Path, Text]] = [
        *((("ui", key), text) for key, text in strings.ui.items()),
        *((("rules", key), text) for key, text in strings.rules.items()),
        *((("experiments", key, "summary"), words.summary) for key, words in strings.experiments.items()),
    ]
    for path, text in filled:
        names = {}
        for language in LANGUAGES:
            try:
                names[language] = set(_fields(text.get(language)))
            except ValueError as error:
                page.error((*path, language), f"can't be filled: {error}; a brace that is no hole is written twice")
        if len(names) == 2 and names["en"] != names["zh"]:
            other = sorted(names["en"] ^ names["zh"])
            page.error(path, f"{', '.join(f'{{{o}}}' for o in other)} stands in one language only")


def _fields(text: str) -> list[str]:
    return [name.split(".")[0].split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name is not None]


def _plain(page: Page, strings: Strings) -> None:
    """A label with a formula has plain words for charts and lists."""
    for section in ("names", "choices"):
        for key, words in getattr(strings, section).items():
            if "$" in words.label.en + words.label.zh and words.plain is None:
                page.error(
                    (section, key), "the label holds a formula, which charts and lists can't draw; add plain: {en, zh}"
                )
            if words.plain and "$" in words.plain.en + words.plain.zh:
                page.error((section, key, "plain"), "plain words hold no $formula$")
