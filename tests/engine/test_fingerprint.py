"""fingerprint.py: what changes the hash of an experiment, what does not, and that every Python gives the same one."""

import ast
import hashlib
import shutil
from pathlib import Path

import pytest

from engine import fingerprint, registry
from engine.fingerprint import canonical, code_hash
from engine.registry import UnknownExperiment

FILES = {
    "__init__.py": '"""A small engine."""\n',
    "base.py": "class Problem:\n    text = 'got'\n"
    "class Run:\n    def randn(self):\n        return 1\n"
    "def make_run(seed):\n    return seed\n",
    "attention.py": "def softmax(x):\n    return x\ndef unused():\n    return 0\n",
    "training.py": "from engine import attention\nfrom engine.base import Run\nRATE = 0.1\n",
    "runner.py": "LIMIT = 1\n",
    "experiments/__init__.py": "",
    "experiments/direct.py": "from engine.attention import softmax\nfrom engine.base import Run\nN = 1\n",
    "experiments/through.py": "def run():\n    import engine.training as t\n    return t.RATE\n",
    "experiments/relative.py": "from ..attention import softmax\nfrom . import direct\n",
    "experiments/alone.py": "import math\n",
}


@pytest.fixture
def engine(tmp_path):
    """A folder of that shape, whose files a test may change."""
    for name, text in FILES.items():
        path = tmp_path / "engine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "engine"


def hashes(engine: Path) -> dict[str, str]:
    code_hash.cache_clear()
    fingerprint._module.cache_clear()
    return {name: code_hash(name, engine) for name in ("direct", "through", "relative", "alone")}


def changed_by(engine: Path, file: str, old: str, new: str) -> set[str]:
    """The experiments whose hash changes with one edit."""
    before = hashes(engine)
    text = (engine / file).read_text()
    assert text.count(old) == 1, (file, old)
    (engine / file).write_text(text.replace(old, new))
    after = hashes(engine)
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("attention.py", "return x", "return 2 * x", {"direct", "through", "relative"}),
        ("attention.py", "return 0", "return 1", {"direct", "through", "relative"}),  # the reference counts in full
        ("training.py", "0.1", "0.2", {"through"}),
        ("experiments/direct.py", "N = 1", "N = 2", {"direct", "relative"}),
        ("experiments/alone.py", "import math", "import cmath", {"alone"}),
        ("base.py", "return 1", "return 2", {"direct", "through", "relative"}),  # how numbers are drawn
        ("base.py", "return seed", "return 0", {"direct", "through", "relative"}),
        ("base.py", "'got'", "'have'", set()),  # the words of a refused parameter
        ("runner.py", "1", "2", set()),
        ("__init__.py", "small", "tiny", set()),
    ],
)
def test_what_an_edit_makes_stale(engine, file, old, new, changed):
    assert changed_by(engine, file, old, new) == changed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def softmax(x):\n    return x", '"""A module."""\ndef softmax(x):\n    """Weights."""\n    return x'),
        ("return x", "return x  # as it came"),
        ("return x", "return (\n        x\n    )"),
        ("def softmax", "\n\n\ndef softmax"),
        ("return x", "'a bare string'\n    return x"),
    ],
)
def test_docstrings_comments_and_layout_do_not_count(engine, old, new):
    assert changed_by(engine, "attention.py", old, new) == set()


def test_two_experiments_with_the_same_text_differ(engine):
    shutil.copy(engine / "experiments/alone.py", engine / "experiments/direct.py")
    assert len(set(hashes(engine).values())) == 4


def test_unknown_experiment():
    with pytest.raises(UnknownExperiment, match="qk_variance"):
        code_hash("qk_varianse")


def test_every_experiment_has_a_hash_of_its_own_and_the_parts_of_base_exist():
    found = [code_hash(name) for name in registry.names()]
    assert len(set(found)) == len(found) > 0
    tree = ast.parse((fingerprint.ENGINE / "base.py").read_text("utf-8"))
    assert set(fingerprint.BASE_PARTS) <= {getattr(node, "name", None) for node in tree.body}


# --------------------------------------------------------------------------------------------------------------------
# The same text in every version of Python

SAMPLE = r'''
"""Module."""
from __future__ import annotations
import dataclasses as dc
from typing import Generic, TypeVar
T = TypeVar("T")
@dc.dataclass(frozen=True)
class Box(Generic[T], metaclass=type):
    """Holds."""
    x: int = 1
    "an attribute's docstring"
    def get(self, a, /, b: float = 1e-9, *args, c=None, d, **kw) -> T:
        "docstring"
        return self.x
async def coro(): pass
def gen():
    got = yield from (i for i in range(3) if i)
    yield got
def strings(x, y):
    return (f"a{x!r:>{y}}b" "c" f"{x=}" rf"\d{y}" "", b"\x00\xff", "\u4e2d\U0001f600\x7f\u00ad", u"u", ...,
            1j, -0.0, 1_000, 1e400, f"{x:%Y-%m}" f"{y}" if x else f"")
def flow(x, *rest):
    while (n := len(rest)) > 1:
        try:
            del x[n:-1, ..., ::2]
        except (ValueError, TypeError) as e:
            raise KeyError from e
        else:
            continue
        finally:
            break
    else:
        assert x, "m"
    with open(x) as f, open(x):
        global T
    match x:
        case {"a": [1, *_], **r} if r: pass
        case Box(x=1 | 2) as b: return {**r, "k": not b, **{}}
        case None | True | "s": return [*rest, lambda *, k=1: k]
    return x if 0 < n <= 3 != 4 else (x @ n, x // n, ~n, x is not n, n in rest)
'''


def test_the_canonical_form_is_readable():
    tree = ast.parse('def f(x, y=None):\n    "doc"\n    return f"{x}" + "é"\n')
    assert canonical(tree) == (
        "(Module body=[(FunctionDef args=(arguments args=[(arg arg='x') (arg arg='y')] defaults=[None])"
        " body=[(Return value=(BinOp left=(JoinedStr [(FormattedValue conversion=-1 value=(Name id='x'))])"
        " op=(Add) right='\\xe9'))] name='f')])"
    )


def test_every_python_writes_the_same_canonical_form():
    # taken under 3.11.7 and found the same under 3.12.1 and 3.13.0: whichever Python runs this test must agree
    digest = hashlib.sha256(canonical(ast.parse(SAMPLE)).encode()).hexdigest()
    assert digest == "ab5e882a131f814a6cfb22975bd8764bc2cfd0d2f48d0605d689626cf934a5e7"


def test_different_code_has_different_forms():
    pieces = """
        x = None | x = () | x: int | x: int = 0
        x = 0 | x = 0.0 | x = False | x = '0' | x = b'0' | x = f'0' | x = f'{0}'
        del x | x | f(*x) | f(**x) | f(x=x) | {**x} | {x: x} | a = b = x | a, b = x | x += 1 | x -= 1 | x = lambda: x
        def f(x): pass | def f(*x): pass | def f(*, x): pass | def f(x, /): pass | def f(x=None): pass
    """
    pieces = [piece.strip() for line in pieces.strip().splitlines() for piece in line.split(" | ")]
    forms = {canonical(ast.parse(piece)) for piece in pieces}
    assert len(forms) == len(pieces)
