"""An experiment with all that it uses of the engine, as one namespace that needs torch and numpy alone.

The text is the engine's own, with its comments. What is left out is decided by names, read with ``ast``:

- A top-level statement stays when a statement that stays uses a name that it defines.
- A method stays when its name occurs in what stays, as a name, an attribute or a string. Special methods always stay,
  and so do all methods of a class that derives from something outside the engine, which may call them by itself.
- Imports of the engine fall away, imports of torch move to the top, other imports stay where they are and as far as
  they are used. A module that is imported whole (``from engine import attention as reference``) becomes a name that
  holds what is used of it.

A name is taken for used when it occurs at all, even where it is a local variable: then something stays without need,
and nothing that is needed is missing. What can't be joined so is refused with the line.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine import registry

ENGINE = Path(registry.__file__).parent
FOUND_IN_BASE = ("make_run",)  # what the written code uses beside names of the experiment


class ExportError(Exception):
    """The code can't be joined into one namespace; the message says where, and what to write instead."""


@dataclass(frozen=True)
class Section:
    """What stays of one module. ``file``: from the project's folder; ``about``: its docstring, as it is written."""

    file: str
    about: str
    code: str


@dataclass(frozen=True)
class Flat:
    """The sections in an order in which they run, the experiment last; ``files``: what they read, below ``engine/``."""

    imports: str
    sections: tuple[Section, ...]
    files: tuple[str, ...]


@functools.cache
def flatten(experiment: str, written: str, engine: Path = ENGINE) -> Flat:
    """What an experiment needs to run in a file of its own. ``written``: the code around it, which uses its names.

    Raises: UnknownExperiment; ExportError.
    """
    start = engine / "experiments" / f"{experiment}.py"
    if not start.is_file():
        raise registry.UnknownExperiment(experiment)
    modules = _Modules(engine)
    kept = _Kept(modules)
    around = ast.parse(written)
    kept.read(modules.at(start), around)
    base = engine / "base.py"
    for name in FOUND_IN_BASE:
        kept.need(modules.at(base), name)
    kept.settle()
    in_order = modules.in_order(*modules.at(start).needs(), base, start)
    used = [module for module in in_order if kept.statements.get(module.path)]
    own = {node.id for node in ast.walk(around) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    _refuse_collisions(used, kept, own)
    top = _Imports([module.outside[name] for module in used for name in sorted(kept.outside[module.path])])
    if kept.of_whole:
        top.needed.add(SPACE)
    sections = [Section(module.file, module.about(), kept.text(module, top)) for module in used]
    return Flat(top.text(), tuple(sections), tuple(dict.fromkeys(file for module in used for file in module.files())))


# --------------------------------------------------------------------------------------------------------------------
# Modules


@dataclass(frozen=True)
class _Outside:
    """One name imported from outside the engine: ``import module as name``, or ``from module import what as name``."""

    module: str
    what: str | None
    name: str


SPACE = _Outside("types", "SimpleNamespace", "SimpleNamespace")


@dataclass(frozen=True)
class _Module:
    """A file of the engine, and where each of its global names comes from."""

    path: Path
    file: str
    lines: list[str]
    tree: ast.Module
    defined: dict[str, ast.stmt] = field(default_factory=dict)
    inside: dict[str, Path] = field(default_factory=dict)  # imported from the engine: the module that has it
    whole: dict[str, Path] = field(default_factory=dict)  # a module of the engine under a name
    outside: dict[str, _Outside] = field(default_factory=dict)

    def about(self) -> str:
        """Its docstring with the quotes around it; of base.py, which is for authors of experiments, the first line."""
        if ast.get_docstring(self.tree) is None:
            return ""
        node = self.tree.body[0]
        lines = self.lines[node.lineno - 1 : _end(node)]
        return "\n".join(lines) if self.path.name != "base.py" or len(lines) == 1 else f'{lines[0]}"""'

    def needs(self) -> list[Path]:
        """The modules of the engine that it imports from."""
        return list(dict.fromkeys((*self.inside.values(), *self.whole.values())))

    def files(self) -> tuple[str, ...]:
        """Value of its constant ``FILES``: what it reads, below ``engine/``."""
        statement = self.defined.get("FILES")
        if statement is None:
            return ()
        try:
            return tuple(ast.literal_eval(statement.value))  # type: ignore[attr-defined]  # else AttributeError
        except (AttributeError, TypeError, ValueError):
            raise self.error(statement, "wanted FILES to be a tuple of strings") from None

    def error(self, node: ast.AST, message: str) -> ExportError:
        return ExportError(f"{self.file}:{getattr(node, 'lineno', 1)}: {message}")


class _Modules:
    """Files of the engine, read once each."""

    def __init__(self, engine: Path) -> None:
        self.engine = engine
        self._read: dict[Path, _Module] = {}

    def at(self, path: Path) -> _Module:
        if path not in self._read:
            self._read[path] = self._parse(path)
        return self._read[path]

    def in_order(self, *paths: Path) -> list[_Module]:
        """The modules and all that they import from, each after those that it imports from, as they are imported."""
        found: dict[Path, _Module] = {}

        def visit(path: Path) -> None:
            if path not in found:
                module = self.at(path)
                for other in module.needs():
                    visit(other)
                found[path] = module

        for path in paths:
            visit(path)
        return list(found.values())

    def _parse(self, path: Path) -> _Module:
        text = path.read_text("utf-8")
        file = path.relative_to(self.engine.parent).as_posix()
        module = _Module(path, file, [*text.splitlines(), "", ""], ast.parse(text))  # so that every line has one below
        for statement in module.tree.body:
            if _is_import(statement) or _is_typing_block(statement) or _is_string(statement):
                continue
            names = list(_defined_names(statement))
            if not names:
                wanted = "an exported module holds imports, functions, classes and assignments to names"
                raise module.error(statement, f"got {ast.unparse(statement).splitlines()[0]!r} at the top; {wanted}")
            for name in names:
                if name in module.defined:
                    raise module.error(statement, f"{name} is defined twice at the top of the module")
                module.defined[name] = statement
        at_top = {id(node) for statement in module.tree.body for node in _top_imports(statement)}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._imported(module, node, at_top=id(node) in at_top)
        return module

    def _imported(self, module: _Module, node: ast.Import | ast.ImportFrom, *, at_top: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "engine":
                    raise module.error(node, f"got `import {alias.name}`, wanted `from {alias.name} import` its names")
                if at_top or alias.name == "torch":
                    name = alias.asname or alias.name.split(".")[0]
                    module.outside[name] = _Outside(alias.name, None, alias.asname or alias.name)
            return
        place = node.module or ""
        if node.level:
            raise module.error(node, "got a relative import, wanted `from engine.module import name`")
        if place.split(".")[0] != "engine":
            if at_top and place != "__future__":
                for alias in node.names:
                    module.outside[alias.asname or alias.name] = _Outside(place, alias.name, alias.asname or alias.name)
            return
        folder = self.engine.joinpath(*place.split(".")[1:])
        for alias in node.names:
            name = alias.asname or alias.name
            if name in module.defined:
                raise module.error(node, f"{name} is imported and defined in one module")
            if (folder / f"{alias.name}.py").is_file():
                module.whole[name] = folder / f"{alias.name}.py"
            elif not folder.with_suffix(".py").is_file():
                raise module.error(node, f"got `{ast.unparse(node)}`, wanted a module of the engine")
            elif name != alias.name or name == "*":
                raise module.error(node, f"got `{ast.unparse(node)}`; in one namespace a name stays what it is")
            else:
                module.inside[name] = folder.with_suffix(".py")


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_typing_block(node: ast.AST) -> bool:
    """``if TYPE_CHECKING:`` with imports alone."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and all(map(_is_import, node.body))


def _top_imports(statement: ast.stmt) -> list[ast.AST]:
    if _is_import(statement):
        return [statement]
    return list(statement.body) if isinstance(statement, ast.If) and _is_typing_block(statement) else []


def _defined_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id


# --------------------------------------------------------------------------------------------------------------------
# What stays


class _Kept:
    """The statements and methods that stay, found from the roots until nothing is added."""

    def __init__(self, modules: _Modules) -> None:
        self.modules = modules
        self.statements: dict[Path, set[ast.stmt]] = {}
        self.outside: dict[Path, set[str]] = {}
        self.of_whole: dict[str, set[str]] = {}  # under the name of a module: what is used of it
        self._said: set[str] = set()  # every name, attribute and one-word string of what stays
        self._asleep: dict[
            ast.FunctionDef, _Module
        ] = {}  # methods of classes that stay, which nothing has called so far
        self._waiting: list[tuple[_Module, str]] = []

    def need(self, module: _Module, name: str) -> None:
        """A global name of a module is used."""
        self._waiting.append((module, name))

    def settle(self) -> None:
        """Follow the names until everything needed is there."""
        while self._waiting:
            self._follow(*self._waiting.pop())
            if not self._waiting:
                for method in [method for method in self._asleep if method.name in self._said]:
                    self.read(self._asleep.pop(method), method)

    def _follow(self, module: _Module, name: str) -> None:
        if name in module.inside:
            other = self.modules.at(module.inside[name])
            if name not in other.defined and name not in other.inside:
                raise module.error(
                    module.tree, f"got {name} from {other.file}, which defines {', '.join(other.defined)}"
                )
            self.need(other, name)
        elif name in module.whole:
            raise module.error(module.tree, f"got the module {name} by itself, wanted its names only: {name}.something")
        elif name in module.defined:
            self._keep(module, module.defined[name])
        elif name in module.outside:
            self.outside.setdefault(module.path, set()).add(name)

    def _keep(self, module: _Module, statement: ast.stmt) -> None:
        kept = self.statements.setdefault(module.path, set())
        self.outside.setdefault(module.path, set())
        if statement in kept:
            return
        kept.add(statement)
        may_go = self._may_go(module, statement) if isinstance(statement, ast.ClassDef) else []
        self._asleep |= dict.fromkeys(may_go, module)
        self.read(module, statement, without=may_go)

    def read(self, module: _Module, node: ast.AST, without: Sequence[ast.AST] = ()) -> None:
        """Take note of every name in a piece of code that stays."""
        if node in without:
            return
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in module.whole:
            self.of_whole.setdefault(node.value.id, set()).add(node.attr)
            other = self.modules.at(module.whole[node.value.id])
            if node.attr not in other.defined:
                raise module.error(node, f"got {ast.unparse(node)}; {other.file} defines {', '.join(other.defined)}")
            self.need(other, node.attr)
            return
        if isinstance(node, ast.Name):
            self._said.add(node.id)
            self._waiting.append((module, node.id))
        elif isinstance(node, ast.Attribute):
            self._said.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            self._said.add(node.value)
        for child in ast.iter_child_nodes(node):
            self.read(module, child, without)

    def _may_go(self, module: _Module, owner: ast.ClassDef) -> list[ast.FunctionDef]:
        """The methods that only code of the engine can call."""
        methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
        if len(methods) == len(owner.body) or not self._is_closed(module, owner):
            return []
        return [method for method in methods if not (method.name.startswith("__") and method.name.endswith("__"))]

    def _is_closed(self, module: _Module, owner: ast.ClassDef) -> bool:
        """Whether the class derives from nothing but classes of the engine, exceptions and NamedTuple."""
        for base in owner.bases:
            name = base.id if isinstance(base, ast.Name) else ""
            place = module
            while name in place.inside:
                place = self.modules.at(place.inside[name])
            definition = place.defined.get(name)
            if isinstance(definition, ast.ClassDef):
                if not self._is_closed(place, definition):
                    return False
            elif name != "NamedTuple" and not _is_exception(name):
                return False
        return True

    # ----------------------------------------------------------------------------------------------------------------
    # The text of what stays

    def text(self, module: _Module, top: _Imports) -> str:
        """The lines of a module that stay, laid out as they were, behind the modules that it imports whole."""
        spaces = [
            _space(name, sorted(self.of_whole.pop(name)), self.modules.at(path))
            for name, path in module.whole.items()
            if name in self.of_whole  # else nothing uses it, or a module before has made it
        ]
        return "\n\n\n".join([*(["\n".join(spaces)] if spaces else []), self._lines(module, top)])

    def _lines(self, module: _Module, top: _Imports) -> str:
        left_out = [method for method, owner in self._asleep.items() if owner is module]
        gone = {line for method in left_out for line in self._method_lines(module, method)}
        for statement in self.statements[module.path]:
            gone |= _import_lines(module, statement, top)
        parts: list[str] = []
        before: ast.stmt | None = None  # the statement above, in the file
        drawn = False  # whether the statement above stays
        chapter: list[str] = []
        for statement in module.tree.body:
            start, gap = _lead(module, statement, before)
            headings = [block for block in gap if block[0].startswith("# ---")]
            chapter = headings[-1] if headings else chapter
            if statement in self.statements[module.path]:
                lines = [module.lines[i - 1] for i in range(start, _end(statement) + 1) if i not in gone]
                if chapter:
                    parts += ["", "", *chapter, "", ""] if parts else [*chapter, "", ""]
                elif parts:
                    assert before is not None
                    parts += [""] * (start - _end(before) - 1 if drawn else 2 if _is_block(statement, before) else 1)
                parts += lines
                chapter, drawn = [], True
            else:
                drawn = False
            before = statement
        return "\n".join(parts)

    @staticmethod
    def _method_lines(module: _Module, method: ast.stmt) -> range:
        """A method with its decorators, the comment on it and the blank lines above."""
        first = _start(method)
        while module.lines[first - 2].lstrip().startswith("#"):
            first -= 1
        while not module.lines[first - 2].strip():
            first -= 1
        return range(first, _end(method) + 1)


def _space(name: str, names: list[str], module: _Module) -> str:
    """A name that holds what is used of a module."""
    line = f"{name} = SimpleNamespace({', '.join(f'{n}={n}' for n in names)})  # of {module.file}"
    if len(line) <= 120:
        return line
    return "\n".join([f"{name} = SimpleNamespace(  # of {module.file}", *(f"    {n}={n}," for n in names), ")"])


def _is_exception(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def _start(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno  # ast.parse() gives every node both


def _is_block(*statements: ast.stmt) -> bool:
    return any(isinstance(statement, ast.FunctionDef | ast.ClassDef) for statement in statements)


def _lead(module: _Module, statement: ast.stmt, before: ast.stmt | None) -> tuple[int, list[list[str]]]:
    """First line of a statement with the comment right above it, and the comments that stand alone before that."""
    start = _start(statement)
    floor = _end(before) if before else 0
    while start - 1 > floor and module.lines[start - 2].startswith("#"):
        start -= 1
    blocks: list[list[str]] = [[]]
    for line in module.lines[floor : start - 1]:
        if line.strip():
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    return start, [block for block in blocks if block]


def _import_lines(module: _Module, statement: ast.stmt, top: _Imports) -> set[int]:
    """Lines of the imports inside a statement that one namespace makes superfluous, each with the blank line below."""
    gone: set[int] = set()
    blocks: list[list[ast.stmt]] = [
        block
        for owner in ast.walk(statement)
        for block in (getattr(owner, part, []) for part in ("body", "orelse", "finalbody"))
        if isinstance(block, list)  # of a lambda and of a conditional expression they are expressions
    ]
    for block in blocks:
        for node in block:
            if not _is_superfluous(node, top):
                continue
            if len(block) == 1:
                raise module.error(node, "an import stands alone in its block; move it up")
            gone |= set(range(node.lineno, _end(node) + 1))
            blank, below = module.lines[_end(node)], module.lines[_end(node) + 1].lstrip()
            if not blank and not below.startswith(("def ", "class ", "@")):  # those stand apart from a docstring
                gone.add(_end(node) + 1)
    return gone


def _is_superfluous(node: ast.stmt, top: _Imports) -> bool:
    """Whether it imports from the engine, or what is imported at the top."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] == "engine"
    return isinstance(node, ast.Import) and all(
        _Outside(alias.name, None, alias.asname or alias.name) in top.needed for alias in node.names
    )


# --------------------------------------------------------------------------------------------------------------------
# One namespace


class _Imports:
    """The imports at the top of it all; torch is always among them."""

    def __init__(self, needed: list[_Outside]) -> None:
        self.needed = {*needed, _Outside("torch", None, "torch")}

    def text(self) -> str:
        """One line for each module: first Python's own, then the others."""
        groups = []
        for own in (True, False):
            some = [o for o in self.needed if (o.module.split(".")[0] in sys.stdlib_module_names) is own]
            plain = {f"import {o.module}" + (f" as {o.name}" if o.name != o.module else "") for o in some if not o.what}
            names: dict[str, set[str]] = {}
            for o in some:
                if o.what:
                    names.setdefault(o.module, set()).add(o.what + (f" as {o.name}" if o.name != o.what else ""))
            lines = [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
            if some:
                groups.append("\n".join([*sorted(plain), *lines]))
        return "\n\n".join(groups)


def _refuse_collisions(modules: list[_Module], kept: _Kept, own: set[str]) -> None:
    """Two things of one name, and what would hide a name of Python's. ``own``: names of the code around."""
    owners: dict[str, tuple[str, object]] = {name: ("the code around it", name) for name in own}
    for module in modules:
        for name in sorted(kept.outside[module.path]):
            outside = module.outside[name]
            if hasattr(builtins, name):
                raise _hides(module.file, name)
            where, what = owners.setdefault(name, (module.file, outside))
            if what != outside:
                raise _collision(module.file, where, name)
        for name in sorted(module.whole.keys() & kept.of_whole.keys()):
            where, what = owners.setdefault(name, (module.file, module.whole[name]))
            if what != module.whole[name]:
                raise _collision(module.file, where, name)
        for name, statement in module.defined.items():
            if statement not in kept.statements[module.path]:
                continue
            place = f"{module.file}:{statement.lineno}"
            if hasattr(builtins, name):
                raise _hides(place, name)
            if name in owners:
                raise _collision(place, owners[name][0], name)
            owners[name] = place, statement


def _hides(place: str, name: str) -> ExportError:
    return ExportError(f"{place}: {name} is a name of Python's own, which other modules mean; choose another")


def _collision(place: str, other: str, name: str) -> ExportError:
    return ExportError(f"{place}: {name} is also a name of {other}; an exported script has one namespace: rename one")
