"""table.py: what is written reads back as the same numbers, by a reader that knows nothing of ours."""

from __future__ import annotations

import csv as standard
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine import runner
from engine.runner import RunSpec, Sweep, run_spec
from export.table import csv, sweep_csv


def read(text: str) -> list[list[str]]:
    return list(standard.reader(io.StringIO(text, newline=""), strict=True))


def columns(dtype: type, elements: st.SearchStrategy | None = None) -> st.SearchStrategy:
    return hnp.arrays(dtype, 3, elements=elements)


@given(columns(np.float32), columns(np.float64), columns(np.int64))
def test_numbers_read_back_as_they_were(single, double, whole):
    header, *rows = read(csv({"single": single, "double": double, "whole": whole}))
    assert header == ["single", "double", "whole"]
    back = [*zip(*rows, strict=True)]
    np.testing.assert_array_equal(np.array([np.float32(x) for x in back[0]]), single)  # equal, not near
    np.testing.assert_array_equal(np.array([float(x) for x in back[1]]), double)
    assert [int(x) for x in back[2]] == whole.tolist()


def test_numbers_have_no_digit_too_many():
    assert csv({"x": np.array([0.1, 1e-30], np.float32), "y": np.array([0.1, 2 / 3])}) == (
        "x,y\r\n0.1,0.1\r\n1e-30,0.6666666666666666\r\n"
    )


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=4))
def test_words_read_back_as_they_were(words):
    column = np.array(words, dtype=object)
    assert read(csv({"word, quoted": column, "n": np.arange(len(words))})) == [
        ["word, quoted", "n"],
        *([word, str(i)] for i, word in enumerate(words)),
    ]


def test_the_form_is_rfc_4180():
    table = {"name": np.array(['say "a, b"', "two\r\nlines", "plain"])}
    assert csv(table) == 'name\r\n"say ""a, b"""\r\n"two\r\nlines"\r\nplain\r\n'


def test_an_empty_table_is_a_header_and_uneven_columns_are_refused():
    assert csv({"a": np.array([]), "b": np.array([])}) == "a,b\r\n"
    with pytest.raises(ValueError, match="a 2, b 3"):
        csv({"a": np.zeros(2), "b": np.zeros(3)})


def test_the_table_of_a_partial_result_is_written_too():
    partials = []
    params = {"d_k": 2, "kv_len": 2, "steps": 10, "n_seeds": 1}
    runner.run("scale_training", params, on_progress=lambda done, partial: partials.append(partial), cached=False)
    partial = next(p for p in partials if p is not None)
    header, *rows = read(csv(partial.tables["curves"]))
    assert partial.done < 1
    assert header == list(partial.tables["curves"])
    assert {row[0] for row in rows} == {"0"}  # the record at step 0
    assert len(rows) == len({row[1] for row in rows}) == 4  # one for each scale


def test_a_sweep_is_a_line_for_each_run():
    values, seeds = (1, 4), (0, 7, 8)
    sweep = runner.sweep("qk_variance", {"n_pairs": 256}, "d_k", values, seeds)
    header, *rows = read(sweep_csv(sweep))
    assert header == ["d_k", "seed", *sweep.metrics]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(value, seed) for value in values for seed in seeds]
    for row in rows:
        alone = run_spec(RunSpec("qk_variance", {"n_pairs": 256, "d_k": int(row[0])}, int(row[1])))
        assert dict(zip(header[2:], map(float, row[2:]), strict=True)) == alone.metrics


def test_a_sweep_without_a_whole_row_is_a_header_and_a_name_twice_is_refused():
    assert sweep_csv(Sweep("d_k", (), (0, 1), {"loss": np.zeros((0, 2))})) == "d_k,seed,loss\r\n"
    with pytest.raises(ValueError, match="twice among loss, seed, loss"):
        sweep_csv(Sweep("loss", (1,), (0,), {"loss": np.zeros((1, 1))}))
