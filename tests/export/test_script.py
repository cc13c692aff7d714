"""script.py: what stands at the top, how a reader edits it, and what becomes of a wrong edit."""

from __future__ import annotations

import ast
import dataclasses
import re
import unicodedata

import pytest

from engine import registry
from engine.base import ParamsError
from engine.registry import UnknownExperiment
from engine.runner import RunSpec
from export.script import _python, flat_run, header, script
from tests.export.runs import WORDS, executed, expected, other_params

SPEC = RunSpec("qk_variance", {"d_k": 16, "scale": "inv_d_k", "n_pairs": 512}, seed=3, dtype="float64")


def comments_at_the_top(text: str) -> str:
    lines = text.splitlines()
    return " ".join(line.removeprefix("# ") for line in lines[: lines.index("from __future__ import annotations")])


def settings(text: str) -> dict[str, object]:
    """The plain values that are assigned at the top of a script."""
    assigned = [n for n in ast.parse(text).body if isinstance(n, ast.Assign)][:4]
    return {ast.unparse(n.targets[0]): ast.literal_eval(n.value) for n in assigned}


@pytest.mark.parametrize("name", registry.names())
def test_the_run_stands_at_the_top_as_plain_python(name):
    params = other_params(name)
    found = settings(script(RunSpec(name, params, 11, "mps", "float64"), **WORDS))
    whole = registry.get(name).Params.from_mapping(params).as_dict()
    assert found == {"PARAMETERS": whole, "SEED": 11, "DEVICE": "mps", "DTYPE": "float64"}
    assert list(found["PARAMETERS"]) == list(registry.get(name).Params.specs())


def test_bounds_and_changed_defaults_stand_beside_the_parameters():
    text = script(SPEC, **WORDS)
    assert '    "d_k": 16,  # whole, 1 to 4,096; default 64\n' in text
    assert '    "scale": "inv_d_k",  # "none", "inv_sqrt_d_k", "inv_d_k", "inv_log_d_k"\n' in text
    assert '    "q_std": 1.0,  # 0.05 to 4\n' in text
    assert '    "with_tau": True,  # True or False\n' in script(RunSpec("scale_training", {}, 0), **WORDS)


def test_the_top_says_what_it_is_and_what_it_needs(monkeypatch):
    installed = {"torch": "2.13.0+cu130", "numpy": "2.4.6"}
    monkeypatch.setattr("importlib.metadata.version", installed.__getitem__)
    top = comments_at_the_top(script(SPEC, title="q·k", about="Draws pairs.", language="en"))
    assert top.startswith("q·k # Draws pairs. # ")
    assert "pip install torch==2.13.0 numpy==2.4.6" in top
    assert "http" not in top


@pytest.mark.parametrize(
    "about", ["word " * 100, "逐行看权重集中到什么程度、softmax 的雅可比还剩多少。" * 12, 'a\nimport os\n"""\n\\']
)
def test_words_of_any_kind_stay_comments_of_a_screen_s_width(about):
    text = script(SPEC, title=about, about=about, language="en")
    assert settings(text) == settings(script(SPEC, **WORDS))
    assert "".join(comments_at_the_top(text).split()).startswith("".join(f"{about}#{about}#From".split()))
    for line in text.splitlines():
        assert sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line) <= 120


def test_an_edited_parameter_takes_effect_and_a_wrong_one_is_refused_with_what_would_do():
    text = script(SPEC, **WORDS)
    _, lines = executed(text.replace('"d_k": 16,', '"d_k": 32,'))
    assert lines[1:] == expected(dataclasses.replace(SPEC, params={**SPEC.params, "d_k": 32}))
    with pytest.raises(ValueError, match=r"d_k: got 5000, wanted a value from 1 to 4096"):
        executed(text.replace('"d_k": 16,', '"d_k": 5000,'))
    with pytest.raises(ValueError, match=r"'d_kk', wanted one of .*did you mean d_k\?"):
        executed(text.replace('"d_k": 16,', '"d_kk": 16,'))


def test_what_a_reader_typed_stands_there_as_typed():
    typed = ["plain", 'say "a"', "it's", 'it\'s "a"', "中文 😀", "a\nb\\c\0", "#{x}"]
    assert [ast.literal_eval(_python(text)) for text in typed] == typed
    assert _python("中文") == '"中文"'


def test_an_edited_seed_is_another_run():
    _, lines = executed(script(SPEC, **WORDS).replace("\nSEED = 3\n", "\nSEED = 4\n"))
    assert lines[1:] == expected(dataclasses.replace(SPEC, seed=4)) != expected(SPEC)


def test_metrics_that_a_run_does_not_measure_are_left_out():
    spec = RunSpec("scale_training", {"d_k": 2, "steps": 10, "n_seeds": 1, "with_tau": False}, 0)
    _, lines = executed(script(spec, **WORDS))
    assert lines[1:] == expected(spec)
    assert not [line for line in lines if line.startswith("learned_factor_mean")]


def test_a_file_that_it_reads_is_named_at_the_top():
    flat = dataclasses.replace(flat_run(SPEC), files=("trained/model.npz",))
    assert "put model.npz into the same folder" in header(SPEC, flat, **WORDS).replace("\n# ", " ")
    assert "reads a file" not in header(SPEC, flat_run(SPEC), **WORDS)


def test_its_head_is_in_one_language():
    said = header(SPEC, flat_run(SPEC), "标题", "说明。", "zh")
    words = [word for word in re.findall(r"[A-Za-z]{2,}", said) if word not in ("torch", "numpy", "pip", "install")]
    assert words == [*re.findall(r"[A-Za-z]{2,}", SPEC.experiment), "dtype"]


def test_what_the_runner_refuses_is_refused():
    with pytest.raises(ParamsError):
        script(RunSpec("qk_variance", {"d_k": 0}, 0), **WORDS)
    with pytest.raises(UnknownExperiment):
        script(RunSpec("qk_varianse", {}, 0), **WORDS)
