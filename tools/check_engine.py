"""What a card says of the engine, against the engine: experiments, metrics, parameters, sources. No run is made."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as File

from content.checks import LEAST_DRAWS, TO_NAME, cited_sources
from content.loader import HOME, PROJECT, Deck, display
from content.problems import Path, Problem, choices
from content.prose import Page
from content.schema import Card, Claim, FilledTable, Lab, Numeric, Scalar, drawn, draws
from engine import registry
from engine.base import ParamsError
from engine.registry import Experiment

COUNTED = ("bytes", "flop")  # units of what is counted, not estimated
_SOURCE = re.compile(r"^\s*Sources?: (.*)$", re.MULTILINE)
_KEY = re.compile(r"\b[a-z]+(?:-[a-z]+)*\d{4}[a-z]?\b")


def defaults() -> dict[str, dict[str, Scalar]]:
    """Default parameters of every experiment."""
    return {name: registry.get(name).Params.defaults() for name in registry.names()}


def check_deck_engine(deck: Deck) -> list[Problem]:
    """Everything in a deck that names something of the engine."""
    problems: list[Problem] = []
    for owner, claims in deck.claims.items():
        page = Page(deck.documents[owner])
        for n, claim in enumerate(claims):
            _claim(page, ("claims", n), claim)
        if card := deck.cards.get(owner):
            _labs(page, card)
            _quiz(page, card)
            if card.alternatives.table:
                _table(page, ("alternatives", "table"), card.alternatives.table)
        problems += page.problems
    if deck.folder.resolve() == HOME:
        problems += _unclaimed(deck)
    return [*problems, *_sources(deck)]


def _experiment(page: Page, path: Path, name: str) -> Experiment | None:
    """The experiment, or a problem at ``path``. A place still to be written is reported elsewhere."""
    if name in registry.names():
        return registry.get(name)
    if name != TO_NAME:
        page.error(path, f"got {name!r}; engine/experiments has {choices(name, registry.names(), most=30)}")
    return None


def _params(page: Page, path: Path, experiment: Experiment, *layers: Mapping[str, Scalar]) -> bool:
    """Whether parameters are accepted; each problem stands at the field of ``path`` that it is about."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    try:
        experiment.Params.from_mapping(merged)
    except ParamsError as error:
        for problem in error.problems:
            page.error((*path, problem.name), str(problem).removeprefix(f"{problem.name}: "))
        return False
    return True


def _metric(page: Page, path: Path, experiment: Experiment, name: str) -> None:
    if name not in experiment.metric_names and name != TO_NAME:
        page.error(path, f"got {name!r}; {experiment.name} has {choices(name, experiment.metric_names, most=40)}")


def _claim(page: Page, path: Path, claim: Claim) -> None:
    experiment = _experiment(page, (*path, "experiment"), claim.experiment)
    if experiment is None:
        return
    _metric(page, (*path, "metric"), experiment, claim.metric)
    if _params(page, (*path, "params"), experiment, claim.params):
        if claim.versus is not None and "metric" in claim.versus:
            _metric(page, (*path, "versus", "metric"), experiment, str(claim.versus["metric"]))
        elif claim.versus is not None:
            _params(page, (*path, "versus"), experiment, claim.params, claim.versus)
        if claim.fails_when is not None:
            _fails_when(page, path, experiment, claim)
    if claim.metric in experiment.metric_names:
        unit = experiment.metric(claim.metric).unit
        if unit in COUNTED and claim.expect.kind in ("approx", "ratio_approx"):
            exact = claim.expect.kind.replace("approx", "equals")
            page.error(
                (*path, "expect"),
                f"got {claim.expect.kind} for {unit}; a count is exact, write {exact}: and the number or its "
                "arithmetic",
            )
        compared = str((claim.versus or {}).get("metric", claim.metric))
        timed = [
            m.name for m in experiment.metrics if m.name in (claim.metric, compared) and (m.measured or m.unit == "s")
        ]
        if timed and not claim.observation:
            page.error(
                path,
                f"{timed[0]} is a time, or follows from one; write `observation: true`, and a bound on one side with a "
                "large margin",
            )


def _fails_when(page: Page, path: Path, experiment: Experiment, claim: Claim) -> None:
    assert claim.fails_when is not None
    changed = {**claim.params, **claim.fails_when}
    if not _params(page, (*path, "fails_when"), experiment, changed):
        return
    before, after = experiment.Params.from_mapping(claim.params), experiment.Params.from_mapping(changed)
    if before == after:
        page.error((*path, "fails_when"), "changes nothing; this is the experiment's default")
    if claim.versus is not None and "metric" not in claim.versus:
        _params(page, (*path, "fails_when"), experiment, changed, claim.versus)


def _labs(page: Page, card: Card) -> None:
    labs: dict[str, tuple[Lab, Experiment]] = {}
    for n, lab in enumerate(card.labs):
        path: Path = ("labs", n)
        experiment = _experiment(page, (*path, "experiment"), lab.experiment)
        if experiment is None:
            continue
        labs[lab.id] = lab, experiment
        _params(page, (*path, "params"), experiment, lab.params)
        fields = list(experiment.Params.specs())
        for i, name in enumerate(lab.controls):
            if name not in fields and name != TO_NAME:
                page.error(
                    (*path, "controls", i),
                    f"got {name!r}; {experiment.name} has the parameters {choices(name, fields, most=40)}",
                )
        for i, metric in enumerate(lab.figures):
            _metric(page, (*path, "figures", i), experiment, metric)
    for n, follow_up in enumerate(card.follow_ups):
        if follow_up.lab and follow_up.lab.use in labs:
            lab, experiment = labs[follow_up.lab.use]
            _params(page, ("follow_ups", n, "lab", "params"), experiment, lab.params, follow_up.lab.params)


def _quiz(page: Page, card: Card) -> None:
    claims = {c.id: c for c in card.claims}
    for n, item in enumerate(card.quiz):
        if not isinstance(item, Numeric) or item.answer_from not in claims:
            continue
        claim, path = claims[item.answer_from], ("quiz", n, "vary")
        if claim.experiment not in registry.names():
            continue
        experiment = registry.get(claim.experiment)
        fields = list(experiment.Params.specs())
        names = set(drawn(item.vary))
        for name in sorted(names - set(fields)):
            page.error(path, f"got {name!r}; {experiment.name} has the parameters {choices(name, fields, most=40)}")
        if names <= set(fields):
            valid = sum(1 for _ in itertools.islice(_valid(experiment, claim, item), LEAST_DRAWS))
            if valid < LEAST_DRAWS:
                page.error(path, f"{experiment.name} accepts {valid} different draws of these; at least {LEAST_DRAWS}")


def _valid(experiment: Experiment, claim: Claim, item: Numeric) -> Iterator[object]:
    """The parameters of the draws that the experiment accepts, each once."""
    seen = set()
    for draw in draws(item.vary):
        try:
            params = experiment.Params.from_mapping({**claim.params, **draw})
            experiment.Params.from_mapping({**claim.versus_params, **draw})
        except ParamsError:
            continue
        if params not in seen:
            seen.add(params)
            yield params


def _table(page: Page, path: Path, table: FilledTable) -> None:
    experiment = _experiment(page, (*path, "experiment"), table.experiment)
    if experiment is None:
        return
    for n, metric in enumerate(table.metrics):
        _metric(page, (*path, "metrics", n), experiment, metric)
    for name, values in table.over.items():
        for value in values:
            if not _params(page, (*path, "over"), experiment, table.params, {name: value}):
                return


# --------------------------------------------------------------------------------------------------------------------
# The other direction


def _unclaimed(deck: Deck) -> Iterator[Problem]:
    """Every experiment is behind a claim, once there are cards."""
    if not deck.cards:
        return
    claimed = {c.experiment for claims in deck.claims.values() for c in claims}
    for name in registry.names():
        if name not in claimed:
            message = (
                f"no claim uses this experiment; write one on a card, or in content/claims/{name}.yaml until its "
                "card is written"
            )
            yield Problem(display(registry.get(name).path), 1, 1, "", message)


def engine_sources() -> list[tuple[str, File, int]]:
    """(key, file, line) of every ``Source:`` line in the engine."""
    found = []
    for path in sorted((PROJECT / "engine").rglob("*.py")):
        text = path.read_text("utf-8")
        for match in _SOURCE.finditer(text):
            for key in _KEY.findall(match[1]):
                found.append((key, path, text.count("\n", 0, match.start(1)) + 1))
    return found


def _sources(deck: Deck) -> Iterator[Problem]:
    """Sources that the engine's docstrings name are listed, and every listed source is used."""
    if deck.documents["sources"].file != display(HOME / "sources.yaml"):
        return
    keys: Sequence[str] = list(deck.sources)
    used = cited_sources(deck)
    for key, path, line in engine_sources():
        used.add(key)
        if key not in deck.sources:
            yield Problem(display(path), line, 1, "Source", f"got {key!r}; sources.yaml has {choices(key, keys)}")
    if deck.folder.resolve() == HOME and deck.cards:
        for key in keys:
            if key not in used:
                yield deck.documents["sources"].problem(
                    (key,), "no card, term or experiment cites this source; delete it, or cite it"
                )
