"""What draws otherwise than it reads; the emphasis cases were compared with a CommonMark renderer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from content.markdown import BLANK, faults, formulas, outside, spans

FAULTS = {
    # emphasis: CommonMark prints the asterisks
    "italics in Chinese": ("zh", "这*并没有*死", 1, "slants Chinese"),
    "bold ends on a colon": ("zh", "**注意：**下文", 4, "emphasis ends on ："),
    "bold ends on a full stop": ("zh", "这是**重点。**", 6, "emphasis ends on 。"),
    "bold ends on a quote": ("zh", "叫 **“温度”**的", 7, "emphasis ends on ”"),
    "italics end on a bracket": ("zh", "*括号（里）*的", 5, "emphasis ends on ）"),
    "bold ends on a formula": ("zh", "**因为 $x$**所以", 8, "between '$' and '所'"),
    "bold ends on percent": ("zh", "有**50%**的行", 6, "between '%' and '的'"),
    "bold ends on code": ("zh", "用 **`q`**的", 7, "between '`' and '的'"),
    "bold ends on a measured value": ("zh", "是 **{{a-b:%}}**的", 13, "between '}' and '的'"),
    "bold begins with a quote": ("zh", "这叫**“温度”**", 2, "between '叫' and '“'"),
    "bold begins with a space": ("en", "so ** x** y", 3, "between ' ' and ' '"),
    "bold without its end": ("en", "so **x y", 3, "without their partner"),
    "bold over two paragraphs": ("en", "so **x\n\ny** z", 9, "printed"),
    "four asterisks": ("en", "so ****x**** y", 3, "one to three"),
    # formulas
    "bracket formula": ("en", r"so \(x\) is", 3, "not drawn as a formula"),
    "display bracket": ("en", r"so \[x\] is", 3, "not drawn as a formula"),
    "two prices": ("en", "between $5 and $6 a day", 8, "a price is written"),
    "price and formula": ("en", "for $5 the $x$", 4, "a price is written"),
    "prices in Chinese": ("zh", "从 $5 到 $6 不等", 2, "a price is written"),
    "one dollar": ("en", "costs $5", 6, "without its partner"),
    "dollars in a line": ("en", "so $$x$$ is", 3, "$$ inside a line"),
    "dollars around one line": ("en", "$$x$$", 0, "$$ inside a line"),
    "bar in a table's formula": ("en", "| a | $|x|$ |\n| --- | --- |", 6, "| in a formula"),
    "measured value in a formula": ("en", r"$x \approx {{a-b}}$", 0, "outside the dollar signs"),
    # the rest of Markdown
    "two tildes": ("zh", "3~5 和 6~8", 1, "strike out"),
    "HTML": ("en", "a <br> b", 2, "HTML"),
    "HTML with attributes": ("en", 'a <span style="x">b</span>', 2, "HTML"),
    "code never closed": ("en", "```\nx = 1\n", 0, "never closed"),
    # widths
    "comma": ("zh", "你好,世界", 2, "write ，"),
    "comma and space": ("zh", "用 softmax, 然后", 9, "write ，"),
    "colon": ("zh", "例如:", 2, "write ："),
    "question mark": ("zh", "为什么?", 3, "write ？"),
    "semicolon": ("zh", "一是;二是", 2, "write ；"),
    "full stop": ("zh", "完了.", 2, "write 。"),
    "brackets": ("zh", "方差(期望)大", 2, "write （"),
    "straight quotes": ("zh", '叫"温度"', 1, "write “ ”"),
    "three dots": ("zh", "等等...", 2, "write ……"),
    "full stop behind a number": ("zh", "标准差是 16.", 7, "ends a Chinese sentence; write 。"),
    "full stop inside": ("zh", "标准差是 16. 然后", 7, "ends a Chinese sentence"),
    "question mark behind a word": ("zh", "为什么用 softmax?", 12, "ends a Chinese sentence"),
    "full-width in English": ("en", "one，two", 3, "full-width, in English; write ,"),
    "full stop in English": ("en", "one。", 3, "write ."),
    "Chinese in English": ("en", "the 方差 of", 4, "Chinese, in English"),
    "full-width digits": ("zh", "有 ６４ 个", 2, "write 64"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    language, text, offset, words = FAULTS[name]
    found = list(faults(text, language))
    assert any(f.offset == offset and words in f.message for f in found), found


FINE = {
    "zh": [
        "**注意**：下文",
        "**因为 $x$ 大**，所以",
        "**并没有**死；**更大**；*softmax* 不变。",
        "用 $a$、$b$ 两个（见 [@vaswani2017]）。",
        "softmax 之后，K、V 各一份：`q, k` 和 (q, k) 对。",
        "3 到 5 个 key，约 7% 的行",
        "- 第一项\n- 第二项：**好**。\n\n1. 甲\n2. 乙",
        "见 https://example.org/a,b?c=1:2。",
        "价格是 \\$5 和 \\$6",
        "$$\n\\begin{bmatrix} a & b \\\\[2pt] c & d \\end{bmatrix}\n$$",
        "| 名字 | 公式 |\n| --- | --- |\n| 范数 | $\\lVert x\\rVert$ |",
        "```python\nx = '中文,英文' * 2  # $5\n```",
        "`a*b*c` 与 `$x`",
        "**{{a-b:.1f}} 倍**的差距",
        "约 12:30 开始",
    ],
    "en": [
        "A **bold** word, *so*, and 2 * 3 * 4.",
        '(**all** of it) and "**quoted**"',
        "$x < y$ and $y > z$, `<br>`, a < b > c",
        "Prices of \\$5 and \\$6; one ~ is fine.",
        "* a list\n* of two",
        "$1/\\sqrt{d_k}$ is $2\\ln n$, and $5 \\cdot x$, $16$",
        "snake_case_names and d_k stay",
        "a \\* b",
        "$$\nx = 1\n$$",
    ],
}


@pytest.mark.parametrize(("language", "text"), [(language, text) for language, texts in FINE.items() for text in texts])
def test_fine(language, text):
    assert list(faults(text, language)) == []


def test_spans_and_what_is_outside_of_them():
    text = "a `b` $c$ \\$ \n\n$$\nd\n$$\n\n```\ne\n```"
    assert [(s.kind, s.text) for s in spans(text)] == [
        ("code", "`b`"),
        ("math", "$c$"),
        ("escape", "\\$"),
        ("display", "$$\nd\n$$"),
        ("fence", "```\ne\n```"),
    ]
    assert outside("a `b` $c$") == f"a {BLANK * 3} {BLANK * 3}"


def test_formulas_are_compared_without_spaces_and_words():
    assert formulas(r"$d_k = 64$ and $n_{\text{layers}}$") == formulas(r"$d_k=64$，$n_{\text{层}}$")
    assert formulas("$d_k$") != formulas("$d_v$")


@given(st.text("a中`$*\\~\n|<>br/，。:() {}", max_size=50), st.sampled_from(["en", "zh"]))
def test_any_text_is_read(text, language):
    assert len(outside(text)) == len(text)
    for fault in faults(text, language):
        assert 0 <= fault.offset <= len(text)
