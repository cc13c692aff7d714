"""Run the code of cloze items: the right options pass, each wrong one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from content.checks import filled
from content.loader import PROJECT, Deck
from content.problems import Problem
from content.schema import Cloze

TIME_LIMIT_S = 60  # of one item with all its options; importing torch takes most of it on a busy machine
# Each filling runs in a namespace of its own; torch is imported once for all of them. Only messages come back.
_RUNNER = """
import json, sys
outcomes = []
for source in json.load(open(sys.argv[1], encoding="utf-8")):
    try:
        exec(compile(source, "<cloze>", "exec"), {"__name__": "cloze"})
        outcomes.append(None)
    except BaseException as error:
        outcomes.append(f"{type(error).__name__}: {error}"[:200])
json.dump(outcomes, open(sys.argv[2], "w", encoding="utf-8"))
"""


def check_cloze(deck: Deck) -> list[Problem]:
    """Run every cloze item of a deck."""
    return [
        p
        for card_id, card in deck.cards.items()
        for n, item in enumerate(card.quiz)
        if isinstance(item, Cloze)
        for p in _item(deck, card_id, n, item)
    ]


def fillings(item: Cloze) -> list[tuple[tuple[int, int] | None, str]]:
    """The right filling (None), then each wrong option (hole, number) with the other hole right; as whole sources."""
    right = [next(o.text.en for o in options if o.right) for options in item.holes]
    cases: list[tuple[tuple[int, int] | None, list[str]]] = [(None, right)]
    for h, options in enumerate(item.holes):
        cases += [((h, n), [*right[:h], o.text.en, *right[h + 1 :]]) for n, o in enumerate(options) if not o.right]
    return [(case, filled(item, texts)) for case, texts in cases]


def outcomes(sources: Sequence[str], *, limit_s: float = TIME_LIMIT_S) -> list[str | None]:
    """What each source ended with: None when it ran through, else the error. Runs in a process of its own.

    Raises: TimeoutError, RuntimeError when the process itself dies.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, got = os.path.join(folder, "sources.json"), os.path.join(folder, "outcomes.json")
        with open(given, "w", encoding="utf-8") as stream:
            json.dump(list(sources), stream)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _RUNNER, given, got],
                cwd=PROJECT,
                env=environment,
                timeout=limit_s,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running after {limit_s:g} s") from None
        if not os.path.exists(got):
            raise RuntimeError(f"the process ended with {done.returncode}: {done.stderr.strip()[-200:]}")
        with open(got, encoding="utf-8") as stream:
            ended: list[str | None] = json.load(stream)
        return ended


def _item(deck: Deck, card_id: str, n: int, item: Cloze) -> Iterator[Problem]:
    document, path = deck.documents[card_id], ("quiz", n)
    cases = fillings(item)
    try:
        ended = outcomes([source for _, source in cases])
    except (TimeoutError, RuntimeError) as error:
        yield document.problem((*path, "code"), f"can't be run: {error}")
        return
    for (case, _), failure in zip(cases, ended, strict=True):
        if case is None and failure is not None:
            yield document.problem((*path, "assert"), f"the right options fail: {failure}")
        elif case is not None and failure is None:
            h, o = case
            yield document.problem(
                (*path, "holes", h, o),
                f"{item.holes[h][o].text.en!r} passes, though it is wrong; let `assert` see the difference",
            )
