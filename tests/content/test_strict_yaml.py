"""Each trap of YAML, and where the reader says that it stands."""

from __future__ import annotations

import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from content.strict_yaml import INVISIBLE, MAX_DEPTH, join_wrapped, read

TRAPS = {
    "alias": ("a: &x [1]\nb: *x\n", 2, 4, "an alias (*x)"),
    "anchor": ("b: 1\na: &x 1\n", 2, 4, "an anchor (&x)"),
    "merge key": ("a: {b: 1}\n<<: {c: 2}\n", 2, 1, "merge (<<)"),
    "tag": ("a: !!python/object/apply:os.system ['true']\n", 1, 4, "a tag"),
    "local tag": ("a: 1\nb: !x 3\n", 2, 4, "a tag (!x)"),
    "the same key twice": ("a: 1\nb: 2\na: 3\n", 3, 1, "a second time, first in line 1"),
    "the same key twice, inside": ("a:\n  b: 1\n  b: 2\n", 3, 3, "first in line 2"),
    "backslash in double quotes": ('tex: "\\frac{1}{2}"\n', 1, 6, "a backslash in double quotes"),
    "backslash that YAML refuses itself": ('tex: "\\sqrt{2}"\n', 1, 7, "use single quotes or `|`"),
    "tab before a key": ("a:\n\tb: 1\n", 2, 1, "a tab; wanted spaces"),
    "tab in prose": ("en: |\n  a\tb\n", 2, 4, "a tab; wanted spaces"),
    "form feed": ("en: |\n  \x0crac\n", 2, 3, "U+000C"),
    "zero width space": ("id: a\u200bb\n", 1, 6, "U+200B"),
    "bidirectional override": ("en: |\n  a \u202e b\n", 2, 5, "U+202E"),
    "byte order mark inside": ("a: 1\nb: \ufeff2\n", 2, 4, "U+FEFF"),
    "carriage return alone": ("a: 1\rb: 2\n", 1, 5, "U+000D"),
    "plain prose": ("question:\n  en: Why?\n  zh: '为'\n", 2, 7, "prose without quotes"),
    "plain prose that is a number": ("x: {en: 64, zh: '六十四'}\n", 1, 9, "prose without quotes"),
    "prose in double quotes": ("x:\n  en: \"Why?\"\n  zh: '为'\n", 2, 7, "prose in double quotes"),
    "prose under >": ("x:\n  zh: >\n    中文\n", 2, 7, "write `|`"),
    "a comment that became prose": ("x:\n  zh: |\n    答案。\n    # note to myself\n", 4, 5, "begins with `# `"),
    "a comment far down": ("x:\n  en: |\n    One\n    two.\n\n    # note\n  zh: '中'\n", 6, 5, "begins with `# `"),
    "number sign in plain text": ("because: it is rank #1 here\n", 1, 10, "ends before ` #`"),
    "colon in plain text": ("because: it holds: here\n", 1, 18, "a second `: ` on this line"),
    "comma in a flow mapping": ("a: {b: c, d}, e\n", 1, 13, "already complete"),
    "bracket in a flow list": ("a: [b, c\nd: 1\n", 2, 2, "must stand in single quotes"),
    "text that begins with @": ("a: @key\n", 1, 4, "can't begin with this character"),
    "text that begins with `": ("a: `code`\n", 1, 4, "can't begin with this character"),
    "braces without quotes": ("a: {{d_k}}\n", 1, 5, "a list or mapping stands where a key is wanted"),
    "braces at the start of text": ("a: {{d_k}} is\n", 1, 12, "text that begins with [, {"),
    "apostrophe in single quotes": ("a: 'it's'\n", 1, 8, "write '' for an apostrophe"),
    "quote never closed": ("a: 'it\nb: 1\n", 3, 1, "never closed"),
    "a line that is no field": ("a: b\nfoo\nc: d\n", 3, 1, "no `key: value`"),
    "text under | indented less": ("a: |\n  x\n y\n", 3, 2, "indented differently"),
    "a list beside a key": ("- a\nb: 1\n", 2, 1, "at the same depth"),
    "second document": ("a: 1\n---\nb: 2\n", 2, 1, "a second document"),
    "empty": ("", 1, 1, "empty"),
    "only a comment": ("# nothing\n", 2, 1, "empty"),
    "number without end": ("a: 1e999\n", 1, 4, "largest number"),
    "deep": (f"a: {'[' * MAX_DEPTH}{']' * MAX_DEPTH}\n", 1, 3 + MAX_DEPTH, f"more than {MAX_DEPTH} deep"),
    "very deep": ("{" * 5000, 1, 1001, "brackets or indents"),
    "many values": (f"a: [{'1,' * 200_001}]\n", 1, 400_001, "more than 200000 values"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_trap(name):
    text, line, column, words = TRAPS[name]
    problems = read(text, "x.yaml")[1]
    found = [(p.line, p.column) for p in problems if words in p.message]
    assert (line, column) in found, "\n".join(map(str, problems))


def test_alias_bomb_is_refused_without_being_expanded():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)
    ]
    document, problems = read("\n".join(lines), "x.yaml")
    assert len(problems) == 10 + 9 * 9  # every anchor, every alias
    assert all(v is None for v in document.data["a9"])


def test_all_problems_of_a_file_come_at_once():
    text = 'a: 1\na: 2\nb: "\\theta"\nc: &x 3\nd:\n  en: Why, then\n  zh: "为"\n'
    assert [p.line for p in sorted(read(text, "x.yaml")[1])] == [2, 3, 4, 6, 7]


VALUES = {
    "yes": "yes",
    "no": "no",
    "on": "on",
    "True": "True",
    "true": True,
    "false": False,
    "null": None,
    "~": None,
    "": None,
    "12:30:45": "12:30:45",
    "2024-01-31": "2024-01-31",
    "1e-9": 1e-9,
    "1E5": 1e5,
    "1.": 1.0,
    ".5": 0.5,
    "-0.25": -0.25,
    "+3": 3,
    "0": 0,
    "007": "007",
    "0x10": "0x10",
    "0o17": "0o17",
    "1_000": "1_000",
    ".inf": ".inf",
    ".nan": ".nan",
    "NaN": "NaN",
    "40 * 2**30": "40 * 2**30",
    "1/16": "1/16",
    "9" * 41: "9" * 41,
    "=": "=",
    "1e": "1e",
}


@pytest.mark.parametrize("written", VALUES)
def test_values_are_what_they_look_like(written):
    document, problems = read(f"a: {written}\n", "x.yaml")
    assert problems == []
    value = document.data["a"]
    assert (value, type(value)) == (VALUES[written], type(VALUES[written]))


def test_keys_are_always_text():
    assert list(read("no: 1\n1: 2\nnull: 3\n1.5: 4\n'1': 5\n", "x.yaml")[0].data) == ["no", "1", "null", "1.5"]


def test_marks_say_where_a_field_stands():
    document = read("a: 1\nb:\n  - c: 2\n    d: [x, y]\n", "x.yaml")[0]
    assert document.marks[("b", 0, "d")] == (4, 5)
    assert document.marks[("b", 0, "d", 1)] == (4, 12)
    assert document.place(("b", 0, "missing", "deeper")) == (3, 5)


@pytest.mark.parametrize(
    ("text", "word", "line", "column"),
    [
        (
            "x:\n  zh: |\n    第一行，\n    第二行里的 word。\n",
            "word",
            4,
            11,
        ),  # joined to one line, still found on its own
        ("x:\n  en: |\n    One line\n\n      indented word\n", "word", 5, 16),
        ("x:\n  en: 'a short word'\n", "word", 2, 16),
        ("x: {en: 'One', zh: '中 word'}\n", "word", 1, 23),
        ("x:\n  zh: '第一行，\n    第二行 word'\n", "word", 3, 9),
    ],
)
def test_a_word_of_prose_is_found_in_its_line(text, word, line, column):
    document, problems = read(text, "x.yaml")
    assert problems == []
    path = ("x", "en" if "word" in str(document.data["x"].get("en")) else "zh")
    place = document.place(path, document.data["x"][path[-1]].index(word))
    assert place == (line, column)


WRAPPED = [
    ("两行\n中文", "两行中文"),
    ("两行，\nword", "两行，word"),
    ("word\n（括号）", "word（括号）"),
    ("一个 key\n的值", "一个 key\n的值"),
    ("他说“好”\n然后", "他说“好”然后"),
    ("two\nlines", "two\nlines"),
    ("“one”\n“two”", "“one”\n“two”"),
    ("第一段。\n\n第二段。", "第一段。\n\n第二段。"),
    ("- 第一项。\n- 第二项", "- 第一项。\n- 第二项"),
    ("如下：\n1. 第一项", "如下：\n1. 第一项"),
    ("注意，\n*强调*", "注意，*强调*"),
    ("- 第一项很长，\n  接着写", "- 第一项很长，接着写"),
    ("| 表 |\n| 格 |", "| 表 |\n| 格 |"),
    ("```\n中文\n注释\n```", "```\n中文\n注释\n```"),
    ("$$\n中\n文\n$$", "$$\n中\n文\n$$"),
    ("硬换行  \n下一行", "硬换行  \n下一行"),
]


@pytest.mark.parametrize(("text", "joined"), WRAPPED)
def test_wrapped_lines(text, joined):
    assert join_wrapped(text)[0] == joined


MIXED = st.text("ab 中文，。“”\n-|$`", max_size=60)


@given(MIXED)
def test_joining_loses_nothing_but_line_breaks_and_indents(text):
    joined, starts = join_wrapped(text)
    assert "".join(joined.split()) == "".join(text.split())
    lines = text.split("\n")
    assert len(starts) == len(lines)
    for start, line in zip(starts, lines, strict=True):
        assert joined[start:].startswith((line, line.lstrip(" ")))


PLAIN = st.text(string.ascii_letters + "中文 '\"\\:#{}[],&*!|>%@`-?\n", max_size=30)
DATA = st.recursive(
    st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False) | PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(string.ascii_lowercase, min_size=3, max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(string.ascii_lowercase + "_", min_size=3, max_size=8), DATA, max_size=5))
def test_reads_what_a_writer_of_yaml_wrote(data):
    """Against PyYAML's own writer, with text in quotes, which both read alike."""

    class Quoted(yaml.SafeDumper):
        pass

    Quoted.add_representer(
        str, lambda dumper, value: dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'")
    )
    text = yaml.dump(data, Dumper=Quoted, allow_unicode=True, width=10_000)
    if INVISIBLE.search(text) or '"' in text:  # the writer falls back to escapes, which are refused here
        return
    document, problems = read(text, "x.yaml")
    deep = [p for p in problems if "deep" in p.message]
    if not deep:
        assert problems == []
        assert document.data == data
