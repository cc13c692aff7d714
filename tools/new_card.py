"""Begin a card: ``python tools/new_card.py TOPIC ID`` writes content/cards/TOPIC/ID.yaml with every part of a card.

What has to be written is marked TODO (or to_be_written, for names), and tools/check_content.py lists it line by line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parent.parent))

from content.checks import LEAST, TO_LINK, TO_NAME
from content.loader import HOME, Deck, display, load_deck
from content.problems import choices
from content.prose import TO_WRITE


def skeleton(deck: Deck, topic: str, card_id: str) -> str:
    """The text of a card that passes the schema and says what is still to be written.

    Raises: ValueError for a topic or an id that topics.yaml does not list.
    """
    if topic not in deck.topics:
        raise ValueError(f"got the topic {topic!r}; topics.yaml has {choices(topic, list(deck.topics), most=20)}")
    planned = deck.topics[topic].cards
    if card_id not in planned:
        raise ValueError(
            f"got the id {card_id!r}; under {topic} topics.yaml has {choices(card_id, planned, most=30)}. A new "
            "card is added there first"
        )
    tracks = ", ".join(name for name, track in deck.tracks.items() if card_id in track.cards)
    claims = "".join(_claim(limit=n == LEAST["claims"] - 1) for n in range(LEAST["claims"]))
    return f"""\
# yaml-language-server: $schema=../../../schema/card.schema.json
# How a card is written: docs/cards.md. What is missing: python tools/check_content.py
id: {card_id}
topic: {topic}
level: core  # core, deep, or trap: the usual answer is wrong
version: 1
minutes: 10
tracks: [{tracks}]
prerequisites: []
related: []

sources:
  - {{key: {TO_LINK}, where: '{TO_WRITE} the section, table or footnote that you opened'}}

{_text("question", "as an interviewer would say it", "像面试官那样问")}
{_text("intent", "what the interviewer is after, and what makes the question hard", "面试官想考什么，难在哪里")}
{_text("short_answer", "two to four sentences that say every must point", "两到四句，讲到每个 must 要点")}
{_text("spoken", "the same for the ear, at most 75 words", "同样的内容，说出来的话，至多 130 个单位")}
key_points:
{_item([("must", "true")], ("point", "one point of a complete answer", "完整回答的一个要点"))}\
    says:
      en: [[{TO_WRITE} a phrase, another phrase], [a phrase that must stand there as well]]
      zh: [[{TO_WRITE} 一种说法, 另一种说法], [还必须出现的说法]]

derivation:
{"".join(_step() for _ in range(3))}
labs:
  - id: main
    experiment: {TO_NAME}  # a file of engine/experiments
    params: {{}}
    controls: [{TO_NAME}]
{_text("look_for", "what to move, and what to see", "调什么，看什么", 4)}
claims:
{claims}
mistakes:
{"".join(_mistake() for _ in range(LEAST["mistakes"]))}
follow_ups:
{"".join(_follow_up() for _ in range(LEAST["follow_ups"]))}
alternatives:
  items: []

in_practice: []

resume: []

quiz:
{_choice()}{_choice()}\
  - id: {TO_LINK}
    kind: predict
{_text("prompt", "what will the run show?", "运行结果会是什么？", 4)}\
    claim: {TO_LINK}
    ask: value
  - id: {TO_LINK}
    kind: count
{_count()}\
    vary: {{batch: [1, 2, 4, 8], n_heads: [2, 4, 8, 16], seq_len: [16, 32, 64, 128]}}
    answer: 'batch * n_heads * seq_len'

changes: []
"""


def _text(name: str, en: str, zh: str, depth: int = 0) -> str:
    pad = " " * depth
    return f"{pad}{name}:\n{pad}  en: |\n{pad}    {TO_WRITE} {en}\n{pad}  zh: |\n{pad}    {TO_WRITE} {zh}\n"


def _count() -> str:
    holes = "{{batch}}, {{n_heads}}, {{seq_len}}"
    return _text("prompt", f"what do {holes} decide?", f"{holes.replace(', ', '、')} 决定了多少？", 4)


def _item(fields: list[tuple[str, str]], *prose: tuple[str, str, str]) -> str:
    lines = "".join(f"    {name}: {value}\n" for name, value in fields)
    return f"  - id: {TO_LINK}\n{lines}" + "".join(_text(*p, 4) for p in prose)


def _step() -> str:
    step = _text("step", "what this step says, by itself", "这一步说什么，单独能看懂", 4)
    because = _text("because", "why it follows", "为什么成立", 4)
    return f"  - {step.lstrip()}    tex: '{TO_WRITE} the formula'\n{because}"


def _claim(*, limit: bool) -> str:
    return f"""\
  - id: {TO_LINK}
{_text("statement", "one sentence, with no number but its run's", "一句话，其中的数都来自这次运行", 4)}\
    experiment: {TO_NAME}
    params: {{}}
    metric: {TO_NAME}
    seeds: [0, 1, 2]  # [] where nothing is random
    expect: {{approx: 1, rel_tol: 0.1}}
    because: '{TO_WRITE} why this bound and this tolerance'
    fails_when: {{{TO_NAME}: {TO_NAME}}}
""" + ("    limit: true  # where the standard answer stops holding\n" if limit else "")


def _mistake() -> str:
    prose = (
        ("wrong", "what people say", "常见的错误说法"),
        ("right", "what is right", "正确的说法"),
        ("why", "why, with a measured value", "为什么，带上实测值"),
    )
    return _item([], *prose) + f"    refuted_by: {TO_LINK}\n"


def _follow_up() -> str:
    prose = _item([], ("question", "the next question", "下一个问题"), ("answer", "its answer", "答案"))
    points = (
        f"    key_points:\n      - en: |\n          {TO_WRITE} one point\n        zh: |\n          {TO_WRITE} "
        "一个要点\n"
    )
    return prose + points + "    lab: {use: main, params: {}}\n"


def _choice() -> str:
    options = "".join(
        f"      - text: {{en: '{TO_WRITE} an option', zh: '{TO_WRITE} 选项'}}\n        right: {right}\n"
        f"        why: {{en: '{TO_WRITE} the reason', zh: '{TO_WRITE} 理由'}}\n"
        for right in ("true", "false")
    )
    return _item([("kind", "choice")], ("prompt", "the question", "题目")) + f"    options:\n{options}"


def main(arguments: list[str] | None = None) -> int:
    """Write the file; 1 when it can't be."""
    parser = argparse.ArgumentParser(description="Begin a card.")
    parser.add_argument("topic", help="a topic of topics.yaml, such as scaling")
    parser.add_argument("id", help="the card's id, listed there under the topic")
    parser.add_argument("--folder", type=Path, default=HOME, help="the content folder (default: the deck)")
    options = parser.parse_args(arguments)
    path = options.folder / "cards" / options.topic / f"{options.id}.yaml"
    try:
        text = skeleton(load_deck(options.folder), options.topic, options.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except ValueError as error:  # a ContentError among them
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        there = isinstance(error, FileExistsError) and path.is_file()
        said = "is there already; it is left as it is" if there else f"can't be written: {error.strerror}"
        print(f"{display(path)} {said}", file=sys.stderr)
        return 1
    print(f"{display(path)} is begun; tools/check_content.py lists what is still to be written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
