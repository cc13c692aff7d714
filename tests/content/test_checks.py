"""Each rule of a card: the example keeps it, one edit breaks it, and the check says where."""

from __future__ import annotations

import re

import pytest

from content.checks import made_items
from content.loader import parse
from tests.content.examples import CARD_ID, edited, example, folder, line_of, problems
from tools.check_content import check


def test_the_example_of_the_documentation_is_clean(tmp_path):
    assert check(folder(tmp_path, example()), code=True) == []


SHORT = "Aligned q and k are another matter: the mean grows like $d_k$."
WHY = "At $d_k = 256$ the standard deviation is then {{full-width-overshoots:.3f}}."
# name: (edits, the piece of the line that is named, words)
BROKEN = {
    # identity
    "topic unknown": (
        [("topic: scaling", "topic: scalin")],
        "topic: scalin\n",
        "topic: got 'scalin'; topics.yaml has scaling, heads",
    ),
    # links
    "prerequisite unknown": (
        [("prerequisites: [sdpa-walkthrough]", "prerequisites: [sdpa-walktrough]")],
        "prerequisites:",
        "no such card, written or planned",
    ),
    "nearest prerequisite": (
        [("prerequisites: [sdpa-walkthrough]", "prerequisites: [sdpa-walktrough]")],
        "prerequisites:",
        "(did you mean sdpa-walkthrough?)",
    ),
    "related to itself": (
        [("related: [sdpa-scale-sqrt-dk]", "related: [dot-product-spread]")],
        "related:",
        "not linked with itself",
    ),
    "related twice": (
        [("related: [sdpa-scale-sqrt-dk]", "related: [mla, mla]")],
        "related:",
        "related[1]: mla stands here twice",
    ),
    "track unknown": ([("tracks: []", "tracks: [new-grad]")], "tracks:", "got 'new-grad'; tracks.yaml has"),
    "track that does not list it": (
        [("tracks: []", "tracks: [research]")],
        "tracks:",
        "research does not list dot-product-spread",
    ),
    "source unknown": (
        [("{key: vaswani2017,", "{key: vaswani2018,")],
        "{key: vaswani2018",
        "(did you mean vaswani2017?)",
    ),
    "source twice": (
        [("footnote 4'}\n", "footnote 4'}\n  - {key: vaswani2017, where: 'section 4'}\n")],
        "where: 'section 4'",
        "vaswani2017 stands here twice",
    ),
    "asked of an unknown source": (
        [("minutes: 5", "asked: {banks: 1, of: 2, reports: 3, source: nobody}\nminutes: 5")],
        "asked:",
        "asked.source: got 'nobody'",
    ),
    "claim of a step unknown": (
        [("    check: scaled-variance-is-one", "    check: scaled-variance-is-two")],
        "check: scaled-variance-is-two",
        "(did you mean scaled-variance-is-one?)",
    ),
    "claim of a mistake unknown": (
        [("    refuted_by: aligned-mean-grows", "    refuted_by: aligned-mean")],
        "refuted_by: aligned-mean\n",
        "mistakes[2].refuted_by: got 'aligned-mean'",
    ),
    "claim of a follow-up unknown": (
        [("    claim: aligned-mean-grows", "    claim: no-such")],
        "claim: no-such",
        "follow_ups[3].claim: got 'no-such'",
    ),
    "claim of an alternative unknown": (
        [("      claim: full-width-overshoots", "      claim: no-such")],
        "claim: no-such",
        "alternatives.items[0].claim",
    ),
    "claim of an item unknown": (
        [("    answer_from: spread-is-the-root", "    answer_from: no-such")],
        "answer_from: no-such",
        "quiz[0].answer_from",
    ),
    "lab of a follow-up unknown": (
        [("lab: {use: spread, params: {q_std: 2}}", "lab: {use: spreed, params: {q_std: 2}}")],
        "use: spreed",
        "this card's labs are spread (did you mean spread?)",
    ),
    # counts
    "no limit": ([("    limit: true\n", "")], "claims:", "no claim has `limit: true`"),
    "key point's id twice": (
        [("- id: aligned-is-different", "- id: variances-add")],
        "- id: variances-add\n    must: true\n    point:\n      en: |\n        For aligned",
        "key_points[1].id: got 'variances-add' a second time",
    ),
    "item's id twice": ([("- id: which-way", "- id: what-adds")], "- id: what-adds\n    kind: choice", "a second time"),
    "background twice": (
        [
            (
                "quiz:\n",
                "  - background: new-grad\n    line: {en: '{{spread-is-the-root}}', zh: "
                "'{{spread-is-the-root}}'}\n\nquiz:\n",
            )
        ],
        "  - background: new-grad\n    line:\n",
        "new-grad stands here twice",
    ),
    # claims
    "one seed": (
        [("    seeds: [0, 1, 2]\n    expect: {approx: 128", "    seeds: [0]\n    expect: {approx: 128")],
        "seeds: [0]\n",
        "claims[4].seeds: got one seed",
    ),
    "the same run twice": (
        [("params: {d_k: 256, scale: inv_d_k}", "params: {d_k: 256}")],
        "- id: full-width-overshoots",
        "the same run as claims[0]",
    ),
    "the same statement twice": (
        [
            (
                "Divided by $d_k$, the standard deviation at $d_k = 256$ is only 0.0625.",
                "At $d_k = 256$ the standard deviation of q·k is 16.",
            )
        ],
        "- id: full-width-overshoots",
        "the same statement as claims[0]",
    ),
    "fails_when changes nothing": (
        [("    fails_when: {d_k: 1024}", "    fails_when: {d_k: 256}")],
        "fails_when: {d_k: 256}",
        "changes nothing",
    ),
    "versus changes nothing": (
        [("    versus: {d_k: 64}", "    versus: {d_k: 256}")],
        "versus: {d_k: 256}",
        "changes nothing",
    ),
    "a metric versus itself": (
        [("    versus: {d_k: 64}", "    versus: {metric: logits_std}")],
        "versus: {metric: logits_std}",
        "compared with itself",
    ),
    "a two-sided time": (
        [("    limit: true\n", "    limit: true\n    observation: true\n")],
        "expect: {approx: 128",
        "a wall-clock time is only bounded on one side",
    ),
    "replaces a claim that did not stay": (
        [("    limit: true\n", "    limit: true\n    replaces: gone-claim\n")],
        "replaces: gone-claim",
        "no claim has this id",
    ),
    # key points
    "short answer does not say a point": (
        [("en: [[aligned, alignment, correlated], [mean grows]]", "en: [[aligned], [variance grows]]")],
        "en: [[aligned], [variance grows]]",
        "the short answer does not say this point (nothing of: variance grows)",
    ),
    "short answer takes a point back": (
        [
            (
                "    says:\n      en: [[aligned, alignment, correlated], [mean grows]]",
                "    not_says: {en: [[another matter]], zh: [[没有这句]]}\n    says:\n      en: [[aligned, "
                "alignment, correlated], [mean grows]]",
            )
        ],
        "en: [[aligned, alignment",
        "it says what not_says takes back",
    ),
    "wrong sentence says a point": (
        [
            (
                "        The spread of q·k is proportional to $d_k$.",
                "        Independent variances add, so the spread is $d_k$.",
            )
        ],
        "        Independent variances add",
        "this wrong sentence says the key point variances-add",
    ),
    "phrase twice": (
        [("[standard deviation, std, spread]", "[spread, spread]")],
        "[spread, spread]",
        "the same phrase twice",
    ),
    "phrase of nothing": (
        [("[standard deviation, std, spread]", "[spread, '*']")],
        "[spread, '*']",
        "punctuation only",
    ),
    # derivation and spoken answer
    "as above": (
        [("        Variances of uncorrelated terms add.", "        As above, variances add.")],
        "        As above",
        "each stands by itself",
    ),
    "同上": (
        [("        互不相关的项，方差相加。\n    check", "        同上，方差相加。\n    check")],
        "        同上",
        "each stands by itself",
    ),
    "builds on a later step": (
        [("    check: scaled-variance-is-one", "    check: scaled-variance-is-one\n    builds_on: [1, 4]")],
        "    builds_on: [1, 4]",
        "builds on earlier steps, numbers from 1 to",
    ),
    "the first step builds on one": (
        [("\nderivation:\n  - step:", "\nderivation:\n  - builds_on: [1]\n    step:")],
        "  - builds_on: [1]",
        "the first step builds on none",
    ),
    "spoken too long": (
        [("    size of root d_k. That needs", f"    size of root d_k. {'Word ' * 60}That needs")],
        "    For independent coordinates with variance one",
        "at most 75 words are 30 s",
    ),
    # bindings
    "unknown claim in prose": (
        [(WHY, WHY.replace("{{full-width", "{{full-widht"))],
        "{{full-widht",
        "{{full-widht-overshoots:.3f}}: no such claim on this card",
    ),
    "unknown format": ([(WHY, WHY.replace(":.3f}}", ":3x}}"))], ":3x}}", "the format '3x'"),
    "bound in one language only": (
        [(WHY, "At $d_k = 256$ it is nearly flat [@vaswani2017].")],
        "        At $d_k = 256$ it is nearly",
        "stands in the other language and not here",
    ),
    "value in a statement": (
        [("standard deviation of q·k is 16.", "standard deviation of q·k is {{spread-is-the-root:.0f}}.")],
        "{{spread-is-the-root:.0f}}",
        "no measured value in a statement",
    ),
    "value in a wrong sentence": (
        [
            (
                "        Dividing by $d_k$ brings the logits back to variance 1.",
                "        Dividing by $d_k$ gives {{full-width-overshoots:.3f}}.",
            )
        ],
        "        Dividing by $d_k$ gives",
        "no measured value in a statement, a wrong sentence",
    ),
    "hole outside of a prompt": (
        [(WHY, WHY.replace("{{full-width-overshoots:.3f}}", "{{d_k}}"))],
        "deviation is then {{d_k}}",
        "only prompts of numeric, shape and count items have holes",
    ),
    "hole that is not varied": (
        [("q has standard deviation {{q_std}}, k has 1", "q has standard deviation {{q_sdt}}, k has 1")],
        "{{q_sdt}}",
        "this item varies d_k, q_std (did you mean q_std?)",
    ),
    "cited and not a source of the card": (
        [(SHORT, SHORT + " Also [@henry2020].")],
        "Also [@henry2020]",
        "[@henry2020]: not among the card's sources",
    ),
    "source key mistyped": ([(SHORT, SHORT + " Also [@ x].")], "Also [@ x]", "a citation is [@key]"),
    # parity
    "formula in one language only": (
        [("        It is proportional to $\\sqrt{d_k}$.", "        It is proportional to the root.")],
        "        It is proportional",
        "$\\sqrt{d_k}$: a formula of the other language",
    ),
    "citation in one language only": (
        [("标准差是 $\\sqrt{d_k}$ [@vaswani2017]：", "标准差是 $\\sqrt{d_k}$：")],
        "    各分量独立、均值 0、方差 1 时，$d_k$ 个",
        "vaswani2017: a citation of the other language",
    ),
    # numbers
    "result in digits": (
        [("        Only if they are independent.", "        Only if they are independent; else 37 times.")],
        "else 37 times",
        "'37 times' is a result",
    ),
    "result in words": (
        [("        Only if they are independent.", "        Else it is eight times larger.")],
        "        Else it is eight",
        "'eight times' is a result",
    ),
    "result as a part": (
        [("        Only if they are independent.", "        Else a fifth of it stays.")],
        "        Else a fifth",
        "'a fifth' stands in the params of no run here",
    ),
    "result in Chinese words": (
        [("        前提是两者独立。", "        否则只剩五分之一。")],
        "        否则只剩",
        "'五分之一' stands in the params of no run",
    ),
    "result as a size": (
        [("        Only if they are independent.", "        It takes 40 GiB.")],
        "        It takes 40 GiB",
        "'40 GiB' stands in the params of no run",
    ),
    "result as a plain number": (
        [("        Only if they are independent.", "        It would be 37.")],
        "        It would be 37",
        "'37' stands in the params of no run",
    ),
    "result in a formula": (
        [
            ("        Only if they are independent.", "        It would be $x = 0.37$."),
            ("        前提是两者独立。", "        会是 $x = 0.37$。"),
        ],
        "        It would be $x",
        "'0.37' stands in the params of no run",
    ),
    "eight times, though 8 is a parameter": (
        [("        Only if they are independent.", "        Else it is 256 times larger.")],
        "        Else it is 256",
        "'256 times' is a result",
    ),
    "statement says more than its run": (
        [("the standard deviation of q·k is 16.", "the standard deviation of q·k is 17.")],
        "q·k is 17.",
        "'17' stands in neither params, versus or expect",
    ),
    "statement says another parameter": (
        [
            (
                "        At $d_k = 256$ the standard deviation of q·k is 16.",
                "        At $d_k = 128$ the standard deviation of q·k is 16.",
            ),
            ("        $d_k = 256$ 时，q·k 的标准差是 16。", "        $d_k = 128$ 时，q·k 的标准差是 16。"),
        ],
        "        At $d_k = 128$",
        "'128' stands in neither",
    ),
    "statement's count in words": (
        [("the standard deviation of q·k is 16.", "the standard deviation of q·k over five layers is 16.")],
        "over five layers",
        "'five' stands in neither",
    ),
    "statement's ratio in words": (
        [("at $d_k = 256$ is 2 times that at $d_k = 64$.", "at $d_k = 256$ is three times that at $d_k = 64$.")],
        "is three times",
        "'three times' stands in neither expect",
    ),
    "more times": (
        [
            ("        前提是两者独立。", "        否则会多了 {{spread-ratio-is-the-root:.0f}} 倍。"),
            ("        Only if they are independent.", "        Else {{spread-ratio-is-the-root:.0f}} more."),
        ],
        "        否则会多了",
        "is read as 8 or as 9 times",
    ),
    # how it draws
    "bold on full-width": (
        [("        前提是两者独立。", "        **前提：**两者独立。")],
        "        **前提",
        "emphasis ends on ：",
    ),
    "half-width in Chinese": (
        [("        前提是两者独立。", "        前提是,两者独立。")],
        "        前提是,",
        ", next to Chinese; write ，",
    ),
    # quiz
    "too few draws": (
        [("q_std: [0.5, 0.75, 1, 1.25, 1.5, 2, 3]}", "q_std: [0.5, 1]}")],
        "    vary: {d_k: [16, 36",
        "got 16 different draws; at least 50",
    ),
    "draw not said": (
        [("q has standard deviation {{q_std}}, k has 1", "q has standard deviation 1, k has 1")],
        "q has standard deviation 1,",
        "does not say the drawn values of q_std; write {{q_std}}",
    ),
    "tighter than its claim": (
        [
            (
                "    answer_from: spread-is-the-root\n    rel_tol: 0.1",
                "    answer_from: spread-is-the-root\n    rel_tol: 0.01",
            )
        ],
        "rel_tol: 0.01\n",
        "right answers would be refused",
    ),
    "answer of a one-sided claim": (
        [("    expect: {approx: 16, rel_tol: 0.06}", "    expect: {at_least: 16}")],
        "answer_from: spread-is-the-root",
        "expects at_least, which no answer can miss",
    ),
    "unit unknown": (
        [("    answer_from: spread-is-the-root\n", "    answer_from: spread-is-the-root\n    unit: bytess\n")],
        "unit: bytess",
        "quiz[0].unit: got 'bytess'; units in strings.yaml has",
    ),
    "direction of a claim without versus": (
        [("    claim: spread-ratio-is-the-root", "    claim: spread-is-the-root")],
        "ask: direction",
        "compares nothing",
    ),
    "shape without a tuple": (
        [("    answer: (q_len, kv_len)", "    answer: q_len * kv_len")],
        "answer: q_len * kv_len",
        "a shape is a tuple",
    ),
    "answer of unknown names": (
        [("    answer: (q_len, kv_len)", "    answer: (q_len, n_len)")],
        "answer: (q_len, n_len)",
        "no such name as 'n_len'",
    ),
    "answer that is no whole number": (
        [("    answer: (q_len, kv_len)", "    answer: (q_len / 2, kv_len)")],
        "answer: (q_len / 2",
        "0.5 is not a whole number",
    ),
    "answer that is code": (
        [("    answer: (q_len, kv_len)", "    answer: (q_len.real, kv_len)")],
        "answer: (q_len.real",
        "only numbers, names",
    ),
    "key told by its length": (
        [
            (
                "- text: {en: 'The variances', zh:",
                "- text: {en: 'The variances of all the single products of the two vectors', zh:",
            )
        ],
        "    options:\n      - text: {en: 'The variances",
        "the right option stands out in en",
    ),
    "option twice": (
        [("- text: {en: 'The standard deviations', zh: '标准差'}", "- text: {en: 'The variances', zh: '标准差'}")],
        "zh: '标准差'}",
        "the same option twice",
    ),
    "code that differs by language": (
        [("text: {en: 'd_k', zh: 'd_k'}", "text: {en: 'd_k', zh: '维度'}")],
        "zh: '维度'}",
        "code is the same in both languages",
    ),
    "code that can't be read": (
        [("text: {en: 'd_k', zh: 'd_k'}", "text: {en: 'd_k +', zh: 'd_k +'}")],
        "    code: |\n      logits",
        "filled with d_k + this is no Python",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name, tmp_path):
    edits, piece, words = BROKEN[name]
    found = [p for p in problems(tmp_path, *edits) if words in f"{p.where}: {p.message}"]
    assert found, f"{words!r} is not among\n" + "\n".join(map(str, check(tmp_path)))
    assert not found[0].warning
    at = line_of(piece, edited(*edits))
    assert at in [p.line for p in found], f"line {at} is not among\n" + "\n".join(map(str, found))


def test_name_of_the_file(tmp_path):
    folder(tmp_path, example())
    path = tmp_path / "cards" / "scaling" / f"{CARD_ID}.yaml"
    path.rename(path.with_name("other.yaml"))
    (problem,) = check(tmp_path)
    assert f"got '{CARD_ID}' in the file other.yaml; name the file {CARD_ID}.yaml" in problem.message


@pytest.mark.parametrize("place", ["cards/heads", "cards", "cards/scaling/deep"])
def test_folder_of_the_file(place, tmp_path):
    folder(tmp_path, example())
    path = tmp_path / "cards" / "scaling" / f"{CARD_ID}.yaml"
    (tmp_path / place).mkdir(exist_ok=True)
    path.rename(tmp_path / place / path.name)
    (problem,) = check(tmp_path)
    assert f"the place is cards/scaling/{CARD_ID}.yaml" in problem.message


def test_id_under_no_topic(tmp_path):
    (problem,) = check(folder(tmp_path, example().replace(CARD_ID, "not-planned")))
    assert problem.where == "id"
    assert "is not among the cards of scaling in topics.yaml; add it there" in problem.message


def test_id_under_another_topic(tmp_path):
    problem = check(folder(tmp_path, example().replace(CARD_ID, "kv-cache-size")))[0]
    assert "it is listed under kv-cache" in problem.message, problem


def test_track_that_lists_a_card_which_does_not_say_so(tmp_path):
    (problem,) = check(
        folder(
            tmp_path,
            example()
            .replace(CARD_ID, "sdpa-walkthrough")
            .replace("prerequisites: [sdpa-walkthrough]", "prerequisites: []"),
        )
    )[:1]
    assert "tracks.yaml lists this card in algorithm-engineer" in problem.message


def without(text: str, part: str, entry: str) -> str:
    """The example without one entry of a list."""
    section = re.search(rf"^{part}:\n(?:.*\n)*?(?=^\S)", text, re.MULTILINE)[0]
    kept = re.sub(rf"^  - id: {entry}\n(?:    .*\n|\n)*", "", section, flags=re.MULTILINE)
    assert kept != section
    return text.replace(section, kept)


@pytest.mark.parametrize(
    ("part", "entry", "words"),
    [
        ("claims", "scaled-variance-is-one", "got 4; a card has at least 5"),
        ("mistakes", "always-the-root", "got 2; a card has at least 3"),
        ("follow_ups", "other-variances", "got 3; a card has at least 4"),
    ],
)
def test_too_few(part, entry, words, tmp_path):
    found = [p for p in check(folder(tmp_path, without(example(), part, entry))) if p.where == part]
    assert [p.message for p in found] == [words]


def test_items_made_of_the_other_parts_count(tmp_path):
    card = parse(example(), "x.yaml")[0]
    kinds = [kind for kind, _ in made_items(card)]
    assert kinds == ["numeric", "predict", "choice", "cloze", "shape", "choice", "choice", "choice", "order", "recall"]
    text = example()
    for item in ("what-adds", "the-scale-line", "shape-of-the-logits"):
        text = without(text, "quiz", item)
    (problem,) = [p for p in check(folder(tmp_path, text)) if p.where == "quiz"]
    assert "got 7 items" in problem.message


def test_too_few_kinds(tmp_path):
    text = example()
    for item in ("measure-the-spread", "which-way", "the-scale-line", "shape-of-the-logits"):
        text = without(text, "quiz", item)
    messages = [p.message for p in check(folder(tmp_path, text)) if p.where == "quiz"]
    assert "got the kinds choice, order, recall; a card has at least 4 kinds" in messages


@pytest.mark.parametrize(
    ("kept", "refused"), [((), True), (("measure-the-spread",), False), (("shape-of-the-logits",), False)]
)
def test_one_item_draws_fresh_numbers(kept, refused, tmp_path):
    text = example()
    for item in {"measure-the-spread", "shape-of-the-logits"} - set(kept):
        text = without(text, "quiz", item)
    messages = [p.message for p in check(folder(tmp_path, text)) if p.where == "quiz"]
    assert any("draws fresh numbers" in message for message in messages) is refused


@pytest.mark.parametrize(("words", "warning"), [(45, True), (60, False)])
def test_spoken_length_warns_first(words, warning, tmp_path):
    found = problems(
        tmp_path, ("    size of root d_k. That needs", f"    size of root d_k. {'Word ' * words}That needs")
    )
    (problem,) = [p for p in found if p.where == "spoken.en"]
    assert problem.warning is warning
    assert "words, about" in problem.message


@pytest.mark.parametrize(("chars", "warning"), [(80, True), (120, False)])
def test_spoken_length_in_chinese(chars, warning, tmp_path):
    found = problems(tmp_path, ("典型大小是根号 d_k。前提是", f"典型大小是根号 d_k。{'字' * chars}前提是"))
    (problem,) = [p for p in found if p.where == "spoken.zh"]
    assert problem.warning is warning


WARNINGS = {
    "short answer of one sentence": ([(SHORT, "")], "short_answer.en: 1 sentences"),
    "no fails_when": ([("    fails_when: {d_k: 1024}\n", "")], "claims[2]: no fails_when"),
    "unused claim": ([("    check: scaled-variance-is-one\n", "")], "claims[1].id: no step, mistake"),
    "résumé without a value": (
        [("({{spread-is-the-root:.1f}}) and", "and"), ("（{{spread-is-the-root:.1f}}），并", "，并")],
        "resume[0].line: no measured value",
    ),
    "value written in two ways": (
        [("下光均值就有 {{aligned-mean-grows:.0f}}", "下光均值就有 {{aligned-mean-grows:.1f}}")],
        "in different ways",
    ),
    "times more": (
        [
            ("        Only if they are independent.", "        Else {{spread-ratio-is-the-root:.0f}} times larger."),
            ("        前提是两者独立。", "        否则是 {{spread-ratio-is-the-root:.0f}} 倍。"),
        ],
        "is read as 8 or as 9 times",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_warning(name, tmp_path):
    edits, words = WARNINGS[name]
    found = problems(tmp_path, *edits)
    assert [p for p in found if words in f"{p.where}: {p.message}" and p.warning], found
    assert not [p for p in found if not p.warning and name != "short answer of one sentence"], found


ALLOWED = {
    "cited result": [
        ("        Only if they are independent.", "        Only if independent; else 37 times [@vaswani2017]."),
        ("        前提是两者独立。", "        前提是独立；否则是 37 倍 [@vaswani2017]。"),
    ],
    "constant in backticks": [
        ("        Only if they are independent.", "        Only below `65504`."),
        ("        前提是两者独立。", "        不超过 `65504`。"),
    ],
    "parameter of a run": [
        ("        Only if they are independent.", "        Try it at 512."),
        ("        前提是两者独立。", "        取 512 试试。"),
    ],
    "default of an experiment": [
        ("        Only if they are independent.", "        Over 4096 pairs."),
        ("        前提是两者独立。", "        取 4096 对。"),
    ],
    "number of a wrong sentence": [
        ("        The spread of q·k is proportional to $d_k$.", "        The spread is 37 times $d_k$."),
        ("        q·k 的离散程度与 $d_k$ 成正比。", "        离散程度是 $d_k$ 的 37 倍。"),
    ],
    "number of an option": [
        ("- text: {en: 'The standard deviations', zh: '标准差'}", "- text: {en: '37 of them', zh: '其中 37 个'}")
    ],
    "hypothesis in a question": [
        ("What if q has standard deviation 2?", "What if q is 256 times as large?"),
        ("如果 q 的标准差是 2 呢？", "如果 q 是 256 倍呢？"),
    ],
    "inverse of a ratio": [
        ("is 2 times that at $d_k = 64$.", "is 2 times that at $d_k = 64$, which is a half the size.")
    ],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name, tmp_path):
    assert problems(tmp_path, *ALLOWED[name]) == []


# --------------------------------------------------------------------------------------------------------------------
# The deck


def second(**changes: str) -> str:
    """The example as another card of the syllabus, with ids of its own."""
    text = example().replace(f"id: {CARD_ID}", "id: dot-vs-additive")
    text = re.sub(
        r"\b(spread-is-the-root|scaled-variance-is-one|spread-ratio-is-the-root|full-width-overshoots|aligned-mean-grows)\b",
        r"second-\1",
        text,
    )
    for old, new in changes.items():
        text = text.replace(old, new)
    return text


def test_two_cards(tmp_path):
    assert check(folder(tmp_path, example(), second())) == []


def test_claims_are_unique_in_the_deck(tmp_path):
    (problem,) = check(
        folder(
            tmp_path,
            example(),
            second()
            .replace("- id: second-aligned-mean-grows", "- id: aligned-mean-grows")
            .replace("second-aligned-mean-grows", "aligned-mean-grows"),
        )
    )
    assert (
        f"which is a claim of {CARD_ID} as well" in problem.message
        or "which is a claim of dot-vs-additive as well" in problem.message
    )


def test_prerequisites_in_a_circle(tmp_path):
    first = edited(("prerequisites: [sdpa-walkthrough]", "prerequisites: [dot-vs-additive]"))
    other = second().replace("prerequisites: [sdpa-walkthrough]", f"prerequisites: [{CARD_ID}]")
    (problem,) = check(folder(tmp_path, first, other))
    assert problem.where == "prerequisites"
    assert "a circle: " in problem.message
    assert f"{CARD_ID} → dot-vs-additive" in problem.message


def test_a_broken_card_is_reported_and_may_be_linked_to(tmp_path):
    other = second().replace("level: core", "level: x")
    first = edited(("prerequisites: [sdpa-walkthrough]", "prerequisites: [dot-vs-additive]"))
    (problem,) = check(folder(tmp_path, first, other))
    assert "level: got 'x'" in str(problem)


def loose(text: str) -> str:
    """The claims of the example as a file of their own."""
    return "claims:\n" + text.split("\nclaims:\n")[1].split("\nmistakes:\n")[0]


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        ("qk_variance", None, None),
        ("other_name", None, "got 'qk_variance'; the file holds claims of other_name"),
        ("qk_variance", ("q·k is 16.", "q·k is 17."), "'17' stands in neither params"),
        ("qk_variance", ("    metric: logits_mean", "    metric: logits_men"), "(did you mean logits_mean?)"),
        ("qk_variance", ("的标准差是 16。", "的标准差是 16."), "write 。"),
    ],
)
def test_claims_without_a_card(name, edit, words, tmp_path):
    folder(tmp_path)
    (tmp_path / "claims").mkdir()
    text = edited(edit) if edit else example()
    (tmp_path / "claims" / f"{name}.yaml").write_text(loose(text), "utf-8")
    found = check(tmp_path)
    if words is None:
        assert found == []
    else:
        assert any(words in p.message for p in found), found


BESIDE = {
    "card under two topics": (
        "topics",
        "heads:\n  title: {en: 'a', zh: '一'}\n  cards: [mla, mla]\n",
        "mla stands under heads as well",
    ),
    "track of unknown cards": (
        "tracks",
        "t-1:\n  title: {en: 'a', zh: '一'}\n  about: {en: 'b', zh: '二'}\n  cards: [mla, mlaa]\n",
        "got 'mlaa'; no such card",
    ),
    "card twice in a track": (
        "tracks",
        "t-1:\n  title: {en: 'a', zh: '一'}\n  about: {en: 'b', zh: '二'}\n  cards: [mla, mla]\n",
        "mla stands here twice",
    ),
    "glossary out of order": (
        "glossary",
        "b-1:\n  term: {en: 'b', zh: '乙'}\n  meaning: {en: 'b', zh: '乙'}\na-1:\n  term: {en: 'a', zh: '甲'}\n  "
        "meaning: {en: 'a', zh: '甲'}\n",
        "a-1: stands behind b-1",
    ),
    "term twice": (
        "glossary",
        "a-1:\n  term: {en: 'Same', zh: '甲'}\n  meaning: {en: 'a', zh: '甲'}\nb-1:\n  term: {en: 'same', zh: "
        "'乙'}\n  meaning: {en: 'b', zh: '乙'}\n",
        "'same' is a term of a-1 as well",
    ),
    "glossary cites nobody": (
        "glossary",
        "a-1:\n  term: {en: 'a', zh: '甲'}\n  meaning: {en: 'a [@nobody2000]', zh: '甲 [@nobody2000]'}\n",
        "got 'nobody2000'",
    ),
    "glossary's formulas differ": (
        "glossary",
        "a-1:\n  term: {en: 'a', zh: '甲'}\n  meaning: {en: '$x$', zh: '$y$'}\n",
        "a formula of the other language",
    ),
    "glossary's punctuation": (
        "glossary",
        "a-1:\n  term: {en: 'a', zh: '甲'}\n  meaning: {en: 'a', zh: '甲,乙'}\n",
        ", next to Chinese",
    ),
    "sources out of order": (
        "sources",
        "".join(
            f"{k}: {{authors: 'A B', title: 't', year: 2017, link: 'https://example.org'}}\n"
            for k in ("vaswani2017", "a2000")
        ),
        "a2000: stands behind vaswani2017",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_files_beside(name, tmp_path):
    file, text, words = BESIDE[name]
    found = check(folder(tmp_path, **{file: text}))
    assert [p for p in found if words in f"{p.where}: {p.message}"], found
