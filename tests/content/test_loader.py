"""Files that are no card, and a folder that holds some of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from content import loader
from content.loader import ContentError, Deck, load_card, load_deck, parse
from content.schema import Card, Strings
from tests.content.examples import CARD_ID, edited, example, folder, line_of


def refused(path: Path) -> list[loader.Problem]:
    with pytest.raises(ContentError) as caught:
        load_card(path)
    return list(caught.value.problems)


def test_the_example_loads(tmp_path):
    path = tmp_path / f"{CARD_ID}.yaml"
    path.write_text(example(), "utf-8")
    card = load_card(path)
    assert card.id == CARD_ID
    assert card.claim("full-width-overshoots").expect.approx == 1 / 16
    assert card.short_answer.zh.endswith("线性增长。")  # no line break left at the end
    assert "[@vaswani2017]：$d_k = 256$" in card.short_answer.zh  # two lines of the file, joined without a space


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + example().replace("\n", "\r\n").encode())
    assert load_card(path) == parse(example(), "a.yaml")[0]


FILES = {
    "not UTF-8": (b"id: a\nen: \xff\n", 2, 5, "0xff, which is not UTF-8"),
    "UTF-16": ("id: a\n".encode("utf-16"), 1, 1, "not UTF-8"),
    "GBK": ("id: a\nzh: 中文\n".encode("gbk"), 2, 5, "not UTF-8"),
    "empty": (b"", 1, 1, "empty"),
    "a list": (b"- a\n", 1, 1, "wanted a mapping"),
    "text": (b"just text\n", 1, 1, "wanted a mapping"),
    "null bytes": (b"\0\0\0", 1, 1, "U+0000"),
}


@pytest.mark.parametrize("name", FILES)
def test_file_that_is_no_card(name, tmp_path):
    raw, line, column, words = FILES[name]
    path = tmp_path / "x.yaml"
    path.write_bytes(raw)
    problem = refused(path)[0]
    assert (problem.line, problem.column) == (line, column)
    assert words in problem.message
    assert problem.file == path.as_posix()


def test_ten_megabytes_are_refused_unread(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    with path.open("wb") as stream:
        stream.truncate(10_000_000)
    monkeypatch.setattr(Path, "open", lambda *args, **kwargs: pytest.fail("the file was opened"))
    (problem,) = refused(path)
    assert "got 10.0 MB; larger than 2 MB, not read" in problem.message


def test_a_file_that_grows_after_its_size_was_asked(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n" * 1_000_000)
    with pytest.raises(ContentError, match="larger than 2 MB"):
        loader._bytes(path, "x.yaml", size=10)


def test_a_folder_a_missing_file_a_pipe_and_another_ending(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "card.yml").write_text("id: a")
    os.symlink(tmp_path / "loop.yaml", tmp_path / "loop.yaml")
    assert "got a folder; wanted a file" in refused(tmp_path / "folder.yaml")[0].message
    assert "got a special file" in refused(tmp_path / "pipe.yaml")[0].message
    assert "no such file" in refused(tmp_path / "missing.yaml")[0].message
    assert "wanted .yaml" in refused(tmp_path / "card.yml")[0].message
    assert "can't be read" in refused(tmp_path / "loop.yaml")[0].message


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text("id: a")

    def deny(*args, **kwargs):  # chmod does not stop root, who runs the tests in containers
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    assert "no permission to read it" in refused(path)[0].message


def test_a_file_is_parsed_once_until_it_changes(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text(example(), "utf-8")
    first = load_card(path)
    calls = []
    real = loader.parse
    monkeypatch.setattr(loader, "parse", lambda *args: calls.append(args) or real(*args))
    assert load_card(path) is first
    assert calls == []
    path.write_text(example().replace("minutes: 5", "minutes: 15"), "utf-8")
    assert load_card(path).minutes == 15
    assert len(calls) == 1


def test_what_is_wrong_with_a_file_is_kept_too(tmp_path, monkeypatch):
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\na: 2\n")
    before = refused(path)
    monkeypatch.setattr(loader, "parse", lambda *args: pytest.fail("parsed again"))
    assert refused(path) == before


# --------------------------------------------------------------------------------------------------------------------
# What the schema says, in plain words


SCHEMA = {
    "language missing": (
        (("  zh: |\n    $d_k$ 变大时，q·k 会有多大？\n", ""),),
        "question:\n  en: |\n    How large",
        "question.zh: missing; wanted the Chinese text beside en",
    ),
    "field missing": (
        (("minutes: 5\n", ""),),
        "# yaml-language-server",
        "minutes: missing; add `minutes:` (Time to read it)",
    ),
    "field unknown": ((("minutes: 5\n", "minuts: 5\n"),), "minuts: 5", "minuts: no such field; Card has"),
    "field unknown, nearest": ((("minutes: 5\n", "minuts: 5\n"),), "minuts: 5", "(did you mean minutes?)"),
    "field unknown in a claim": (
        (("    limit: true", "    limits: true"),),
        "    limits: true",
        "claims[4].limits: no such field; Claim has",
    ),
    "field unknown in an item": (
        (("    ask: direction", "    asks: direction"),),
        "    asks: direction",
        "Predict has id, prompt, kind, claim, ask (did you mean ask?)",
    ),
    "level unknown": (
        (("level: core", "level: deeep"),),
        "level: deeep",
        "level: got 'deeep'; wanted one of core, deep, trap (did you mean deep?)",
    ),
    "number for text": (
        (("id: which-way", "id: 12"),),
        "id: 12",
        "quiz[1].id: got 12; wanted text, so put it in single quotes",
    ),
    "text for number": (
        (("minutes: 5", "minutes: five"),),
        "minutes: five",
        "minutes: got 'five'; wanted a whole number",
    ),
    "number out of bounds": (
        (("minutes: 5", "minutes: 500"),),
        "minutes: 500",
        "minutes: got 500; wanted a number at most 120",
    ),
    "yes for true": (
        (("    limit: true", "    limit: yes"),),
        "    limit: yes",
        "claims[4].limit: got 'yes'; wanted true or false",
    ),
    "one for many": (
        (("labs:\n  - id: spread\n", "labs:\n    id: spread\n"),),
        "labs:",
        "labs: got a mapping; wanted a list",
    ),
    "many for one": (
        (("params: {d_k: 512, scale: inv_sqrt_d_k}", "params: [512]"),),
        "params: [512]",
        "claims[1].params: got a list; wanted a mapping",
    ),
    "id with capitals": (
        (("id: which-way", "id: WhichWay"),),
        "id: WhichWay",
        "quiz[1].id: got 'WhichWay'; wanted kebab-case",
    ),
    "claim's id of one word": (
        (("- id: aligned-mean-grows", "- id: aligned"),),
        "- id: aligned\n",
        "claims[4].id: got 'aligned'; wanted kebab-case of at least two words",
    ),
    "metric with hyphens": (
        (("    metric: logits_mean", "    metric: logits-mean"),),
        "    metric: logits-mean",
        "claims[4].metric: got 'logits-mean'; wanted snake_case",
    ),
    "no tolerance": (
        (("{approx: 128, rel_tol: 0.02}", "{approx: 128}"),),
        "{approx: 128}",
        "approx wants exactly one of rel_tol, abs_tol; got none",
    ),
    "two expectations": (
        (("{approx: 128, rel_tol: 0.02}", "{at_least: 1, at_most: 2}"),),
        "{at_least: 1,",
        "got at_least, at_most; exactly one",
    ),
    "tolerance of a bound": (
        (("{approx: 128, rel_tol: 0.02}", "{at_least: 1, rel_tol: 0.1}"),),
        "{at_least: 1,",
        "at_least takes no tolerance",
    ),
    "ratio without versus": (
        (("{approx: 128, rel_tol: 0.02}", "{ratio_at_least: 2}"),),
        "- id: aligned-mean-grows",
        "compares two runs; say with which in `versus`",
    ),
    "arithmetic wrong": (
        (("{approx: 1/16, rel_tol", "{approx: 1//0, rel_tol"),),
        "{approx: 1//0",
        "'1//0' divides by zero",
    ),
    "not a number": (
        (("{approx: 128, rel_tol: 0.02}", "{approx: .nan, rel_tol: 0.02}"),),
        "{approx: .nan",
        "claims[4].expect.approx",
    ),
    "seed twice": (
        (("    seeds: [0, 1, 2]\n    expect: {approx: 128", "    seeds: [0, 0]\n    expect: {approx: 128"),),
        "- id: aligned-mean-grows",
        "the same seed twice",
    ),
    "kind unknown": (
        (("    kind: predict", "    kind: guess"),),
        "- id: which-way",
        "quiz[1]: kind: got 'guess'; wanted one of choice, numeric, predict, cloze, shape, count",
    ),
    "kind missing": ((("    kind: predict\n", ""),), "- id: which-way", "kind is missing; wanted one of"),
    "no option right": (
        (("        right: true\n        why: {en: 'For", "        why: {en: 'For"),),
        "- id: what-adds",
        "got 0 right options",
    ),
    "hole too many": (
        (("logits = qk / ___", "___ = qk / ___"),),
        "- id: the-scale-line",
        "code has 2 ___ and holes 1 lists",
    ),
    "vary of no list": (
        (("    vary: {q_len: [1, 5, 7], kv_len: [7, 64], d_k: [16, 64]}", "    vary: {q_len: 1}"),),
        "    vary: {q_len: 1}",
        "vary.q_len: got 1; wanted a list",
    ),
    "phrases not in groups": (
        (("en: [[aligned, alignment, correlated], [mean grows]]", "en: [aligned]"),),
        "en: [aligned]",
        "says.en[0]: got 'aligned'; wanted a list",
    ),
    "empty prose": ((("    $d_k$ 变大时，q·k 会有多大？\n", ""),), "zh: |\n\nintent", "question.zh: is empty"),
    "date as words": (
        (("changes: []", "changes: [{date: yesterday, what: {en: 'a', zh: '一'}}]"),),
        "changes: [{",
        "wanted a date as 2026-01-31",
    ),
}


@pytest.mark.parametrize("name", SCHEMA)
def test_schema_in_plain_words(name):
    edits, piece, words = SCHEMA[name]
    text = edited(*edits)
    with pytest.raises(ContentError) as caught:
        parse(text, "x.yaml")
    found = [p for p in caught.value.problems if words in f"{p.where}: {p.message}"]
    assert found, str(caught.value)
    assert found[0].line == line_of(piece, text), str(found[0])  # of the field, or of the entry that lacks it


def test_no_message_is_the_librarys():
    """Words that pydantic says and an author would not understand."""
    for edits, _, _ in SCHEMA.values():
        with pytest.raises(ContentError) as caught:
            parse(edited(*edits), "x.yaml")
        for problem in caught.value.problems:
            for jargon in (
                "Input should",
                "validation error",
                "type=",
                "pydantic",
                "Field required",
                "Value error",
                "instance of",
            ):
                assert jargon not in problem.message


def test_problems_of_yaml_and_of_the_schema_come_together_and_once():
    text = edited(
        ("level: core", "level: corre\nlevel: core"), ("minutes: 5", "minutes: five"), ("tracks: []", "tracks: *x")
    )
    with pytest.raises(ContentError) as caught:
        parse(text, "x.yaml")
    assert [(p.line, p.where) for p in caught.value.problems] == [(5, "level"), (7, "minutes"), (8, "tracks")]


# --------------------------------------------------------------------------------------------------------------------
# The folder


def test_a_bad_card_does_not_stop_the_others(tmp_path):
    folder(tmp_path, example(), example().replace("id: dot", "id: other", 1).replace("level: core", "level: x"))
    (tmp_path / "cards" / "scaling" / "big.yaml").write_bytes(b"x" * 3_000_000)
    (tmp_path / "cards" / "scaling" / "old.yml").write_text(example(), "utf-8")
    (tmp_path / "cards" / "scaling" / ".hidden.yaml").write_text("")
    (tmp_path / "cards" / "folder.yaml").mkdir()
    deck = load_deck(tmp_path)
    assert list(deck.cards) == [CARD_ID]
    broken = {b.path.name: b.problems[0].message for b in deck.broken}
    assert set(broken) == {"other-product-spread.yaml", "big.yaml", "old.yml", "folder.yaml"}
    assert "wanted one of core" in broken["other-product-spread.yaml"]


def test_the_second_card_with_an_id_is_broken(tmp_path):
    folder(tmp_path, example(), example().replace("topic: scaling", "topic: heads"))
    deck = load_deck(tmp_path)
    assert deck.paths[CARD_ID].parent.name == "heads"  # in alphabetical order
    assert "which is the id of" in deck.broken[0].problems[0].message


def test_a_bad_file_beside_the_cards_raises_with_all_of_them(tmp_path):
    folder(
        tmp_path,
        example(),
        strings="ui: {}\n",
        sources="a-b: {authors: 'x', title: 'y', year: 20177, link: 'http://x'}\n",
    )
    with pytest.raises(ContentError) as caught:
        load_deck(tmp_path)
    said = str(caught.value)
    assert "strings.yaml:1:1: names: missing" in said
    assert "sources.yaml:1:33: a-b.year: got 20177; wanted a number at most 2100" in said
    assert "a-b.link: got 'http://x'; wanted an https:// address" in said


def test_a_folder_without_lists_takes_the_projects(tmp_path):
    (tmp_path / "cards").mkdir()
    deck = load_deck(tmp_path)
    assert isinstance(deck, Deck)
    assert "vaswani2017" in deck.sources
    assert not deck.cards


def test_no_such_folder():
    with pytest.raises(ContentError, match="no such folder"):
        load_deck("/nowhere/at/all")


def test_claims_without_a_card(tmp_path):
    claim = example().split("claims:\n")[1].split("\nmistakes:")[0]
    folder(tmp_path)
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "qk_variance.yaml").write_text(f"claims:\n{claim}", "utf-8")
    assert load_deck(tmp_path).loose["qk_variance"][0].id == "spread-is-the-root"


@pytest.mark.parametrize(
    ("link", "address"),
    [
        ("arXiv:1706.03762", "https://arxiv.org/abs/1706.03762"),
        ("arXiv:cs/0112017", "https://arxiv.org/abs/cs/0112017"),
        ("doi:10.1000/182", "https://doi.org/10.1000/182"),
        ("https://github.com/openai/CLIP", "https://github.com/openai/CLIP"),
    ],
)
def test_links_become_addresses(link, address):
    entry = parse(
        f"a1: {{authors: 'A B, C D, E F', title: 't', year: 2017, link: '{link}'}}",
        "sources.yaml",
        loader.BESIDE["sources"],
    )[0]["a1"]
    assert entry.link == address
    assert entry.short == "B et al., 2017"


@pytest.mark.parametrize(
    "link", ["javascript:alert(1)", "http://x.org", "https://x.org/a b", "arXiv:1706", "docs/../x.md", "ftp://x.org/a"]
)
def test_other_links_are_refused(link):
    with pytest.raises(ContentError, match="wanted an https"):
        parse(f"a1: {{authors: 'A', title: 't', year: 2017, link: '{link}'}}", "sources.yaml", loader.BESIDE["sources"])


def test_a_plain_word_in_a_list_of_words_needs_no_quotes():
    text = (loader.HOME / "strings.yaml").read_text("utf-8")
    assert parse(text, "strings.yaml", Strings)[0].units["nats"].en == "nats"
    with pytest.raises(ContentError, match="prose without quotes"):
        parse(text.replace("{en: nats, zh: nats}", "{en: nats!, zh: nats}"), "strings.yaml", Strings)


# --------------------------------------------------------------------------------------------------------------------
# Whatever a file holds, it is a card or a ContentError


def never_anything_else(content: str | bytes) -> None:
    try:
        card = parse(content, "x.yaml")[0]
    except ContentError as error:
        found = error.problems
    else:
        assert isinstance(card, Card)
        return
    assert found
    assert all(p.line >= 1 and p.column >= 1 and p.message for p in found)


@given(st.binary(max_size=200))
def test_random_bytes(raw):
    never_anything_else(raw)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_random_text(text):
    never_anything_else(text)


@given(
    st.lists(
        st.sampled_from(
            [
                "a",
                "en",
                ": ",
                "- ",
                "\n",
                "  ",
                "{",
                "}",
                "[",
                "]",
                "|",
                ">",
                "'",
                '"',
                "\\",
                "&x",
                "*x",
                "!t",
                "# ",
                "---",
                "<<",
                "中",
                "1e-9",
                ",",
            ]
        ),
        max_size=40,
    )
)
def test_random_yaml(parts):
    never_anything_else("".join(parts))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(st.data())
def test_the_example_with_lines_lost_doubled_and_mixed(data):
    lines = example().split("\n")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        what = data.draw(st.sampled_from(["lose", "double", "move", "cut", "indent"]))
        if what == "lose":
            del lines[at]
        elif what == "double":
            lines.insert(at, lines[at])
        elif what == "move":
            lines.insert(data.draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        elif what == "cut":
            lines[at] = lines[at][: data.draw(st.integers(0, 20))]
        else:
            lines[at] = "  " + lines[at]
    never_anything_else("\n".join(lines))


def test_cards_stand_in_the_order_in_which_they_are_studied():
    deck = load_deck()
    planned = [card_id for topic in deck.topics.values() for card_id in topic.cards]
    assert list(deck.cards) == sorted(deck.cards, key=planned.index)
    assert next(iter(deck.cards)) == "sdpa-walkthrough"  # no other card is needed for it
