"""The rooms and their one direction: app, pages → ui → {study, export, tools} → claims → {content, engine}."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BELOW_CLAIMS = {"content", "engine"}
BELOW_TOOLS = {"claims", *BELOW_CLAIMS}
BELOW_UI = {"study", "export", "tools", *BELOW_TOOLS}
MAY_USE = {  # a room may use any room below it, and itself
    "engine": set(),
    "content": set(),
    "claims": BELOW_CLAIMS,
    "study": BELOW_TOOLS,
    "export": BELOW_TOOLS,
    "tools": BELOW_UI,
    "bench": BELOW_UI,
    "ui": BELOW_UI,
    "pages": {"ui", *BELOW_UI},
    "app": {"ui", *BELOW_UI},
}
EXTRAS = {"engine/executors.py": {"distributed"}}  # imported only where it is asked for, its absence told
ROOMS = {*MAY_USE, "tests"}
FILES = [ROOT / "app.py", *(path for room in MAY_USE for path in sorted((ROOT / room).rglob("*.py")))]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source: str) -> set[str]:
    """Top-level names that a file imports, wherever in it; relative imports stay in their room."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
    return found


def wrong(room: str, source: str) -> set[str]:
    """What a file of this room must not import."""
    names = imported(source)
    refused = (names & ROOMS) - {room} - MAY_USE[room]
    if room in BELOW_UI:
        refused |= names & {"streamlit"}
    if room == "engine":  # computes with torch and numpy, nothing else
        refused |= names - sys.stdlib_module_names - {"engine", "numpy", "torch"}
    if room == "content":
        refused |= names & {"torch", "numpy"}
    return refused


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.exists()], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_a_file_imports_from_below_only(path):
    extras = EXTRAS.get(path.relative_to(ROOT).as_posix(), set())
    assert wrong(room_of(path), path.read_text("utf-8")) - extras == set()


@pytest.mark.parametrize(
    ("room", "source", "refused"),
    [
        ("engine", "def f():\n    from content import schema", {"content"}),
        ("content", "import engine.base", {"engine"}),
        ("claims", "from tools.run_claims import main", {"tools"}),
        ("study", "import export", {"export"}),
        ("export", "from ui.text import t", {"ui"}),
        ("export", "import streamlit", {"streamlit"}),
        ("export", "from content.loader import load_deck\nfrom engine import runner", set()),
        ("claims", "from export.table import csv", {"export"}),
        ("ui", "import pages.cards", {"pages"}),
        ("pages", "import tests.harness", {"tests"}),
        ("tools", "if True:\n    import streamlit as st", {"streamlit"}),
        ("engine", "import pandas", {"pandas"}),
        ("content", "import torch.nn", {"torch"}),
        ("ui", "import streamlit, claims.bind", set()),
        ("claims", "from . import verify", set()),
    ],
)
def test_the_direction_test_sees_a_wrong_import(room, source, refused):
    assert wrong(room, source) == refused


BLOCKED = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError(f"{name} must not be imported here")
sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
from engine import registry
for name in registry.names():
    registry.get(name).Params()
print(len(sys.argv) - 1, "torch" in sys.modules)
"""


def test_every_module_imports_without_torch():
    # importing one of these draws a page, or is alembic's alone
    scripts = ("app.py", "pages/", "bench/apps/", "study/migrations/")
    paths = [path for path in FILES if not path.relative_to(ROOT).as_posix().startswith(scripts)]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    done = subprocess.run([sys.executable, "-c", BLOCKED, *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [str(len(names)), "False"]
