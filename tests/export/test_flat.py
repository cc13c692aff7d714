"""flat.py on engines made up for the purpose: what stays, what goes, in which order, and what is refused."""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from pathlib import Path

import pytest
import torch

from engine import base, language_model
from engine.corpus import encode
from engine.registry import UnknownExperiment
from export.flat import ExportError, Flat, flatten
from tests.export.runs import executed

RUN = "SEED = 0\nprint(run(SEED), make_run)\n"
BASE = '"""The contract.\n\nFor authors.\n"""\ndef make_run(seed):\n    return seed\n'


@pytest.fixture
def flat(tmp_path):
    """A function: the export of an experiment of that text, among modules of the engine of these texts."""

    def build(experiment: str, written: str = RUN, **modules: str) -> Flat:
        folder = tmp_path / "engine"
        texts = {"base": BASE} | modules | {"experiments/tried": experiment}
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.py").write_text(textwrap.dedent(text).lstrip(), "utf-8")
        flatten.cache_clear()
        return flatten("tried", written, folder)

    return build


def joined(flat: Flat) -> str:
    return "\n\n".join([flat.imports, *(section.code for section in flat.sections)])


def names(flat: Flat) -> list[str]:
    """What is defined, methods with their class, in the order of the text."""
    found = []
    for node in ast.parse(joined(flat)).body:
        if isinstance(node, ast.Assign):
            found += [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        if isinstance(node, ast.ClassDef):
            found += [f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)]
    return found


def test_what_is_used_stays_through_any_number_of_steps(flat):
    found = flat(
        "from engine.tools import half\nfrom engine.base import make_run\n\ndef run(x):\n    return half(x)\n\n"
        "def unused():\n    return OTHER\n\nOTHER = 1\n",
        tools="from engine.deep import TWO\nSTEP, REST = 1, 2\n\ndef half(x):\n    return x // TWO + STEP\n\n"
        "def double(x):\n    return x * TWO\n",
        deep="TWO = 2\nTHREE = 3\n",
        never="raise SystemExit\n",
    )
    assert names(found) == ["TWO", "STEP", "REST", "half", "make_run", "run"]
    assert [section.file for section in found.sections] == [
        "engine/deep.py",
        "engine/tools.py",
        "engine/base.py",
        "engine/experiments/tried.py",
    ]


def test_methods_that_nothing_calls_go_and_their_comments_with_them(flat):
    found = flat(
        """
        from engine.tools import Child

        def run(x):
            return Child().read() + getattr(Child(), "by_name")()
        """,
        tools="""
        class Parent:
            size = 1

            def read(self):
                return self.step()

            def step(self):
                return 1

            # a note
            @property
            def unused(self):
                return helper()

            def by_name(self):
                return 2

            def __repr__(self):
                return "P"

        class Child(Parent):
            size = 2

            def step(self):
                return self.size

            def unused_too(self):
                return self.unused

        def helper():
            return 0
        """,
    )
    assert names(found) == [
        *("Parent", "Parent.read", "Parent.step", "Parent.by_name", "Parent.__repr__"),
        *("Child", "Child.step", "make_run", "run"),
    ]
    assert "a note" not in joined(found)
    assert "@property" not in joined(found)


def test_methods_that_others_may_call_stay(flat):
    found = flat(
        "from engine.tools import Twice, Error\n\ndef run(x):\n    return Twice, Error\n",
        tools="""
        import threading

        class Once(threading.Thread):
            n = 1

            def run_it(self):
                return 1

        class Twice(Once):
            n = 2

            def daemon_name(self):
                return 2

        class Error(ValueError):
            n = 3

            def unused(self):
                return 3
        """,
    )
    assert {"Once.run_it", "Twice.daemon_name"} <= {*names(found)}  # a Thread calls what it likes
    assert "Error.unused" not in names(found)


def test_imports_are_gathered_at_the_top(flat):
    found = flat(
        "from __future__ import annotations\nimport math\nimport os\nfrom collections.abc import Iterator, Mapping\n"
        "from typing import TYPE_CHECKING\nimport numpy as np\nfrom engine.tools import fsum\n"
        "if TYPE_CHECKING:\n    from fractions import Fraction\n\n"
        "def run(x: Mapping[str, int]) -> Fraction:\n    return fsum([math.pi, np.pi])\n",
        tools="import math\n\ndef fsum(x):\n    return math.fsum(x)\n",
    )
    assert found.imports == (
        "import math\nfrom collections.abc import Mapping\nfrom fractions import Fraction\n\n"
        "import numpy as np\nimport torch"
    )


def test_imports_inside_functions_go_where_they_say_nothing_new(flat):
    found = flat(
        """
        def run(x):
            '''Runs.'''
            import torch

            from engine.tools import half

            import difflib

            if x:
                pass
            else:
                from engine.tools import double

                x = double(x)
            return half(x), difflib, torch
        """,
        tools="""
        def half(x):
            import torch

            def inner():
                return x
            return inner()

        def double(x):
            return 2 * x
        """,
    )
    assert found.sections[-1].code.splitlines() == [
        "def run(x):",
        "    '''Runs.'''",
        "    import difflib",
        "",
        "    if x:",
        "        pass",
        "    else:",
        "        x = double(x)",
        "    return half(x), difflib, torch",
    ]
    # a function within a function stands apart from what is above it
    assert found.sections[0].code.startswith("def half(x):\n\n    def inner():")


def test_a_module_that_is_imported_whole_becomes_a_name_that_holds_what_is_used(flat):
    found = flat(
        """
        from engine import tools
        from engine.other import third

        def run(x, half=None):
            return tools.half(x) + tools.SIZE + third(x) + tools.half(x)
        """,
        tools="SIZE = 6\nUNUSED = 0\n\ndef half(x):\n    return x / 2\n\ndef double(x):\n    return 2 * x\n",
        other="""
        def third(x):
            from engine import tools

            return tools.double(x) / tools.SIZE
        """,
    )
    assert names(found) == ["SIZE", "half", "double", "tools", "third", "make_run", "run"]
    made = "tools = SimpleNamespace(SIZE=SIZE, double=double, half=half)  # of engine/tools.py"
    assert joined(found).count(made) == joined(found).count("SimpleNamespace(") == 1
    assert executed(f"{joined(found)}\nprint(run(3))")[1] == ["10.0"]  # 1.5 + 6 + 1 + 1.5


def test_the_language_model_of_the_engine_can_be_exported(tmp_path):
    engine = tmp_path / "engine"
    shutil.copytree(Path(base.__file__).parent, engine, ignore=shutil.ignore_patterns("__pycache__", "trained"))
    (engine / "experiments/tried.py").write_text(
        "from engine import language_model\nfrom engine.corpus import encode\n\n\n"
        "def run(seed, load=False):\n    import torch\n\n    if load:\n        return language_model.load_weights()\n"
        "    weights = language_model.draw_weights(torch.Generator().manual_seed(seed))\n"
        "    return language_model.forward(weights, torch.tensor([encode('Ada has a key.')])).sum().item()\n"
    )
    found = flatten("tried", "SEED = 3\nrun(SEED)\n", engine)
    assert found.files == ("trained/model.npz",)
    future = "from __future__ import annotations\n"
    code = f"{future}__file__ = {str(tmp_path / 'script.py')!r}\n{joined(found)}\n"
    weights = language_model.draw_weights(torch.Generator().manual_seed(3))
    logits = language_model.forward(weights, torch.tensor([encode("Ada has a key.")]))
    assert executed(f"{code}print(run(3))")[1] == [str(logits.sum().item())]
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path}/trained/model.npz")):
        executed(f"{code}run(3, load=True)")


def test_comments_and_chapters_stay_with_what_they_are_about(flat):
    line = "# " + "-" * 40
    found = flat(
        "from engine.tools import A, B, last\n\ndef run(x):\n    return A + B + last()\n",
        tools=f'"""Tools.\n\nAll of them.\n"""\n{line}\n# One\n\n# of a\nA = 1\nB = 2  # of b\n\n{line}\n# Two\n\n'
        f"C = 3\n\n{line}\n# Three\n\n\n# of the last\ndef last():\n    return 0\n",
    )
    tools = found.sections[0]
    assert tools.code == (
        f"{line}\n# One\n\n\n# of a\nA = 1\nB = 2  # of b\n\n\n{line}\n# Three\n\n\n# of the last\n"
        "def last():\n    return 0"
    )
    assert tools.about == '"""Tools.\n\nAll of them.\n"""'
    assert found.sections[1].about == '"""The contract."""'  # the rest of base.py's is for authors of experiments


def test_files_that_kept_modules_read_are_collected(flat):
    reads = "FILES = ('trained/{}.npz',)\n\ndef read():\n    return FILES\n"
    experiment = "from engine.first import read\nfrom engine.second import other\n\ndef run(x):\n    return read()\n"
    assert flat(experiment, first=reads.format("a"), second="FILES = ('b',)\nother = 1\n").files == ("trained/a.npz",)


def test_an_exported_experiment_finds_its_file_beside_it(flat, tmp_path, monkeypatch):
    experiment = (
        "from engine.base import data_file\n\nFILES = ('trained/numbers.txt',)\n\n"
        "def run(x):\n    return data_file(FILES[0]).read_text()\n"
    )
    text = Path(base.__file__).read_text("utf-8")
    found = flat(experiment, base=text)
    code = f"{found.imports}\n" + "\n\n".join(section.code for section in found.sections)
    home = tmp_path / "home"
    (home / "trained").mkdir(parents=True)
    (home / "trained/numbers.txt").write_text("1 2 3")
    code = f"from __future__ import annotations\n__file__ = {str(home / 'script.py')!r}\n{code}\nprint(run(0))\n"
    assert executed(code)[1] == ["1 2 3"]
    assert base.data_file("base.py") == Path(base.__file__)
    (home / "trained/numbers.txt").rename(home / "numbers.txt")  # as a browser saves it
    assert executed(code)[1] == ["1 2 3"]
    shutil.rmtree(home)
    with pytest.raises(FileNotFoundError, match=re.escape("trained/numbers.txt")):
        executed(code)


USE_BOTH = "from engine.tools import A\n\nSIZE = 1\n\ndef run(x):\n    return A + SIZE\n"


REFUSED = [
    (USE_BOTH, "SIZE = 2\nA = SIZE\n", "experiments/tried.py:3: SIZE is also a name of engine/tools.py:1"),
    (USE_BOTH, "import math as SIZE\nA = SIZE.pi\n", "tried.py:3: SIZE is also a name of engine/tools.py"),
    ("SEED = 1\n\ndef run(x):\n    return SEED\n", "", "tried.py:1: SEED is also a name of the code around it"),
    (USE_BOTH, "def sum(x):\n    return 0\n\nA = sum([1])\n", "tools.py:1: sum is a name of Python's own"),
    (USE_BOTH, "from math import pow\nA = pow(1, 2)\n", "tools.py: pow is a name of Python's own"),
    (USE_BOTH, "A = 1\nA = 2\n", "tools.py:2: A is defined twice"),
    (USE_BOTH, "for A in (1, 2):\n    pass\n", "tools.py:1: got 'for A in (1, 2):' at the top"),
    (USE_BOTH, "B = 1\n", "got A from engine/tools.py, which defines B"),
    ("import engine.tools\n\ndef run(x):\n    return x\n", "", "wanted `from engine.tools import` its names"),
    ("from engine import nothing\n\ndef run(x):\n    return x\n", "", "wanted a module of the engine"),
    ("from engine import tools\n\ndef run(x):\n    return vars(tools)\n", "", "wanted its names only: tools.something"),
    (
        "from engine import tools\n\ndef run(x):\n    return tools.B\n",
        "A = 1\n",
        "got tools.B; engine/tools.py defines A",
    ),
    ("from ..tools import A\n\ndef run(x):\n    return A\n", "A = 1\n", "got a relative import"),
    ("from engine.tools import A as B\n\ndef run(x):\n    return B\n", "A = 1\n", "a name stays what it is"),
    ("from engine.tools import *\n\ndef run(x):\n    return A\n", "A = 1\n", "a name stays what it is"),
    ("from engine.tools import A\nA = 2\n\ndef run(x):\n    return A\n", "A = 1\n", "imported and defined"),
    ("def run(x):\n    from engine.tools import A\n", "A = 1\n", "tried.py:2: an import stands alone"),
    ("FILES = {x: x}\n\ndef run(x):\n    return FILES\n", "", "tried.py:1: wanted FILES to be a tuple"),
]


@pytest.mark.parametrize(("experiment", "tools", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_does_not_fit_into_one_namespace_is_refused_with_its_line(flat, experiment, tools, message):
    with pytest.raises(ExportError, match=re.escape(message)):
        flat(experiment, tools=tools)


def test_two_modules_under_one_name_are_refused(flat):
    experiment = "from engine import tools as t\nfrom engine.more import B\n\ndef run(x):\n    return t.A + B\n"
    with pytest.raises(ExportError, match=r"tried.py: t is also a name of engine/more.py"):
        flat(experiment, tools="A = 1\n", more="from engine import other as t\nB = t.C\n", other="C = 2\n")


def test_names_that_are_left_out_collide_with_nothing(flat):
    found = flat(USE_BOTH, tools="SIZE = 2\nA = 1\n")
    assert names(found) == ["A", "make_run", "SIZE", "run"]


def test_an_unknown_experiment_is_refused():
    with pytest.raises(UnknownExperiment):
        flatten("qk_varianse", RUN)
