"""Check the deck, or another folder of the same shape: ``python tools/check_content.py [FOLDER]``.

Everything that is wrong comes out at once, as ``file:line:column: where: message``: the warnings, then the errors, each
in the order of the files. A warning does not fail; any error does (exit 1).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parent.parent))

from content.checks import check_deck
from content.loader import HOME, ContentError, Problem, display, load_deck
from tools.check_engine import check_deck_engine, defaults
from tools.check_receipts import check_receipts
from tools.check_strings import check_strings
from tools.cloze import check_cloze


def check(folder: Path = HOME, *, code: bool = False) -> list[Problem]:
    """All problems of a folder, sorted by place. ``code`` also runs the code of the cloze items."""
    try:
        deck = load_deck(folder)
    except ContentError as error:
        return list(error.problems)
    problems = check_deck(deck, defaults()) + check_deck_engine(deck)
    if not (deck.paths or deck.broken):
        problems.append(Problem(display(folder), 1, 1, "", "no card in it; wanted cards/<topic>/<id>.yaml"))
    if (folder / "strings.yaml").exists():  # else the words are the project's, and checked with it
        problems += check_strings(deck)
    if folder.resolve() == HOME:
        problems += check_receipts(deck)
    if code:
        problems += check_cloze(deck)
    return sorted(set(problems))


def main(arguments: list[str] | None = None) -> int:
    """Print the problems; 1 when one of them is an error."""
    parser = argparse.ArgumentParser(description="Check cards, strings, glossary, sources, topics and tracks.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=HOME, help="a folder with cards/<topic>/<id>.yaml (default: the deck)"
    )
    parser.add_argument(
        "--code", action="store_true", help="also run the code of the cloze items: right options pass, wrong ones fail"
    )
    options = parser.parse_args(arguments)
    problems = check(options.folder, code=options.code)
    for problem in sorted(problems, key=lambda p: not p.warning):  # what fails stands where a terminal ends
        print(problem)
    errors = sum(not p.warning for p in problems)
    print(f"{options.folder}: {_counted(errors, 'error')}, {_counted(len(problems) - errors, 'warning')}")
    return 1 if errors else 0


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


if __name__ == "__main__":
    sys.exit(main())
