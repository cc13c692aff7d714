"""Whether the code behind a number is still the code that measured it.

The hash of an experiment covers the syntax trees of its module and of every module of ``engine`` that it imports,
directly or through another: the reference ``attention.py`` and ``training.py`` count in full. Comments, docstrings and
layout do not count, since no number can depend on them.

Of ``engine/base.py``, which every experiment imports, only :data:`BASE_PARTS` count: how random numbers are drawn and
moved to the device. The rest of it (bounds checks, the words of a refused parameter, what a plot is) decides whether a
run takes place and how it is shown, never what it measures; if it counted, a mended message would make every receipt
stale.

Trees are written out by :func:`canonical` and not by ``ast.dump`` or ``ast.unparse``, whose output differs between
versions of Python: a receipt committed under 3.11 must not look stale under 3.13.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ENGINE = Path(__file__).parent

BASE_PARTS = ("Run", "make_run")


@functools.cache
def code_hash(experiment: str, engine: Path = ENGINE) -> str:
    """Sixteen hexadecimal digits that change when the code that an experiment runs changes.

    Raises: engine.registry.UnknownExperiment.
    """
    start = engine / "experiments" / f"{experiment}.py"
    if not start.is_file():
        from engine.registry import UnknownExperiment

        raise UnknownExperiment(experiment)
    digest = hashlib.sha256()
    for path in sorted(_reached(start, engine)):
        digest.update(f"{path.relative_to(engine).as_posix()}\n{_module(path, engine).code}\n".encode())
    return digest.hexdigest()[:16]


class _Module(NamedTuple):
    """What counts of a file: its code in canonical form, and the files of the engine that it imports."""

    code: str
    imports: frozenset[Path]


@functools.cache
def _module(path: Path, engine: Path) -> _Module:
    tree = ast.parse(path.read_bytes())
    if path == engine / "base.py":
        tree.body = [node for node in tree.body if getattr(node, "name", None) in BASE_PARTS]
    return _Module(canonical(tree), frozenset(_imported(tree, path, engine)))


def _reached(start: Path, engine: Path) -> set[Path]:
    """The module itself and all that it imports from the engine, through any number of steps."""
    reached, waiting = set(), [start]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += _module(path, engine).imports
    return reached


def _imported(tree: ast.Module, path: Path, engine: Path) -> Iterator[Path]:
    """Files of the engine that a module imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ("engine", *path.relative_to(engine).parts[:-1])
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*above, *([node.module] if node.module else [])))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]  # an imported name may be a module
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            file = engine.joinpath(*rest).with_suffix(".py") if rest else engine / "__init__.py"
            if first == "engine" and file.is_file():
                yield file


# --------------------------------------------------------------------------------------------------------------------
# A form of the tree that is the same in every version of Python

_SKIPPED = {"ctx", "kind", "type_comment", "type_ignores"}  # where a name stands says ctx; u"" and "" are one string


def canonical(node: object) -> str:
    """A syntax tree as text: node types and fields in alphabetical order, empty fields and bare strings left out.

    Leaving empty fields out is what makes a tree the same in 3.11 and in 3.12, which gave functions and classes a list
    of type parameters. Bare strings are docstrings, of modules, classes, functions and attributes.
    """
    if isinstance(node, list):
        return f"[{' '.join(canonical(item) for item in node if not _is_bare_string(item))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)  # repr depends on which characters a version counts as printable
    if isinstance(node, ast.Constant):
        return ascii(node.value)
    if isinstance(node, ast.JoinedStr):
        return f"(JoinedStr {canonical(_merged(node.values))})"
    fields = [
        f" {name}={canonical(value)}"
        for name in sorted(node._fields)
        if name not in _SKIPPED and (value := getattr(node, name, None)) is not None and value != []
    ]
    return f"({type(node).__name__}{''.join(fields)})"


def _is_bare_string(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _merged(parts: list[ast.expr]) -> list[ast.expr]:
    """The pieces of an f-string, neighbouring texts joined and empty ones dropped: versions split them differently."""
    merged: list[ast.expr] = []
    for part in parts:
        if not isinstance(part, ast.Constant):
            merged.append(part)
        elif merged and isinstance(merged[-1], ast.Constant):
            merged[-1] = ast.Constant(str(merged[-1].value) + str(part.value))
        elif part.value:
            merged.append(part)
    return merged
