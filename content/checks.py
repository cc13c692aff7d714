"""The rules of docs/cards.md that need more than one field: of a card, of the deck, of the files beside the cards.

Knows nothing of the engine; what needs it (experiments, metrics, parameters) is checked in ``tools/check_content.py``.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from content import expressions, speech
from content.bindings import Hole, bindings, citations, scan
from content.loader import Deck
from content.problems import Path, Problem, choices
from content.prose import TO_WRITE, Page, check_card_texts, check_loose_texts, check_text
from content.schema import LANGUAGES, Card, Cloze, Item, Numeric, Option, Predict, Scalar, Shape, draws, texts

LEAST = {"claims": 5, "mistakes": 3, "follow_ups": 4}
LEAST_ITEMS, LEAST_KINDS, LEAST_DRAWS = 8, 4, 50
STANDS_OUT = 1.5  # times as long as any other, or as short
SHORT = 24  # characters: of these nobody notices the length
_NOT_LETTERS = re.compile(r"\\[A-Za-z]+|[${}`\s]")
TO_NAME, TO_LINK = "to_be_written", "to-be-written"  # new_card.py's places for a name and for an id

Defaults = Mapping[str, Mapping[str, Scalar]]


def check_deck(deck: Deck, defaults: Defaults | None = None) -> list[Problem]:
    """Everything that is wrong in a folder whose files could be read, and what could not.

    ``defaults``: of each experiment's parameters; a number in the prose may stand there as well.
    """
    problems = [p for file in deck.broken for p in file.problems]
    known = known_cards(deck)
    for card_id, card in deck.cards.items():
        page = Page(deck.documents[card_id])
        check_card(page, card, deck, known, defaults or {})
        problems += page.problems
    for name, claims in deck.loose.items():
        page = Page(deck.documents[f"claims/{name}"])
        check_loose_texts(page, claims, defaults or {})
        problems += page.problems
    problems += _across(deck)
    problems += _beside(deck, known)
    return sorted(set(problems))


def known_cards(deck: Deck) -> set[str]:
    """Cards of the deck (broken ones too) and of the syllabus."""
    planned = itertools.chain.from_iterable(t.cards for t in deck.topics.values())
    return {*deck.cards, *planned, *(f.path.stem for f in deck.broken)}


def check_card(page: Page, card: Card, deck: Deck, known: set[str], defaults: Defaults) -> None:
    """One card against its own rules and the lists beside it."""
    _to_write(page, (), page.document.data)
    _identity(page, card, deck)
    _links(page, card, deck, known)
    _counts(page, card)
    _claims(page, card)
    _points(page, card)
    _steps(page, card)
    _spoken(page, card)
    for n, item in enumerate(card.quiz):
        _item(page, ("quiz", n), item, card)
        if isinstance(item, Numeric) and item.unit != "1":
            _known(page, ("quiz", n, "unit"), item.unit, deck.strings.units, "units in strings.yaml has")
    check_card_texts(page, card, defaults)


def made_items(card: Card) -> list[tuple[str, str]]:
    """(kind, id) of every quiz item that a card has: the written ones, and those made of its other parts."""
    items = [(str(item.kind), item.id) for item in card.quiz]
    items += [("choice", m.id) for m in card.mistakes]
    if card.built_on():
        items.append(("order", "order"))
    return [*items, ("recall", "recall")]


# --------------------------------------------------------------------------------------------------------------------
# Identity and links


def _to_write(page: Page, path: Path, data: Any) -> None:
    """Places that new_card.py left to be written, each by its line."""
    if isinstance(data, dict):
        for key, value in data.items():
            _to_write(page, (*path, key), value)
    elif isinstance(data, list):
        for n, value in enumerate(data):
            _to_write(page, (*path, n), value)
    elif data in (TO_NAME, TO_LINK):
        page.error(path, f"still to be written: {next(part for part in reversed(path) if isinstance(part, str))}")
    elif isinstance(data, str) and TO_WRITE in data:
        page.error(path, f"still to be written: {data.replace(TO_WRITE, '').strip()}", offset=data.find(TO_WRITE))


def _unwritten(value: str | None) -> bool:
    return value in (None, TO_NAME, TO_LINK)


def _identity(page: Page, card: Card, deck: Deck) -> None:
    path = deck.paths[card.id]
    if path.stem != card.id:
        page.error(("id",), f"got {card.id!r} in the file {path.name}; name the file {card.id}.yaml, or change the id")
    inside = path.relative_to(deck.folder / "cards").parts
    if len(inside) != 2 or inside[0] != card.topic:
        page.error(
            ("topic",),
            f"got {card.topic!r} in the folder {'/'.join(inside[:-1]) or 'cards'}; the place is "
            f"cards/{card.topic}/{card.id}.yaml",
        )
    if card.topic not in deck.topics:
        page.error(("topic",), f"got {card.topic!r}; topics.yaml has {choices(card.topic, list(deck.topics), most=20)}")
    elif card.id not in deck.topics[card.topic].cards:
        other = next((t for t, topic in deck.topics.items() if card.id in topic.cards), None)
        mend = f"; it is listed under {other}" if other else "; add it there"
        page.error(("id",), f"{card.id!r} is not among the cards of {card.topic} in topics.yaml{mend}")


def _links(page: Page, card: Card, deck: Deck, known: set[str]) -> None:
    for name in ("prerequisites", "related", "tracks"):
        seen: set[str] = set()
        for n, other in enumerate(getattr(card, name)):
            if other in seen:
                page.error((name, n), f"{other} stands here twice")
            seen.add(other)
            if name == "tracks":
                _known(page, (name, n), other, deck.tracks, "tracks.yaml has")
            elif other == card.id:
                page.error((name, n), "a card is not linked with itself")
            else:
                _known(
                    page, (name, n), other, sorted(known), "no such card, written or planned; topics.yaml has", most=5
                )
    for track_id in card.tracks:
        if track_id in deck.tracks and card.id not in deck.tracks[track_id].cards:
            page.error(
                ("tracks",), f"{track_id} does not list {card.id} in tracks.yaml; add it there, or delete it here"
            )
    for track_id, track in deck.tracks.items():
        if card.id in track.cards and track_id not in card.tracks:
            page.error(("tracks",), f"tracks.yaml lists this card in {track_id}; add it here, or delete it there")
    for n, cite in enumerate(card.sources):
        _known(page, ("sources", n, "key"), cite.key, deck.sources, "sources.yaml has")
        if cite.key in [c.key for c in card.sources[:n]]:
            page.error(("sources", n, "key"), f"{cite.key} stands here twice; put both places in one `where`")
    if card.asked:
        _known(page, ("asked", "source"), card.asked.source, deck.sources, "sources.yaml has")
    claims = [c.id for c in card.claims]
    for path, claim in _claim_references(card):
        _known(page, path, claim, claims, "this card claims")
    labs = [lab.id for lab in card.labs]
    for n, follow_up in enumerate(card.follow_ups):
        if follow_up.lab:
            _known(page, ("follow_ups", n, "lab", "use"), follow_up.lab.use, labs, "this card's labs are")


def _known(page: Page, path: Path, name: str, names: Iterable[str], there_is: str, most: int = 12) -> None:
    names = list(names)
    if name not in names and not _unwritten(name):
        page.error(path, f"got {name!r}; {there_is} {choices(name, names, most=most)}")


def _claim_references(card: Card) -> Iterator[tuple[Path, str]]:
    for n, step in enumerate(card.derivation):
        yield from [(("derivation", n, "check"), step.check)] if step.check else []
    for n, mistake in enumerate(card.mistakes):
        yield from [(("mistakes", n, "refuted_by"), mistake.refuted_by)] if mistake.refuted_by else []
    for n, follow_up in enumerate(card.follow_ups):
        yield from [(("follow_ups", n, "claim"), follow_up.claim)] if follow_up.claim else []
    for n, alternative in enumerate(card.alternatives.items):
        yield from [(("alternatives", "items", n, "claim"), alternative.claim)] if alternative.claim else []
    for n, item in enumerate(card.quiz):
        if isinstance(item, Numeric):
            yield ("quiz", n, "answer_from"), item.answer_from
        elif isinstance(item, Predict):
            yield ("quiz", n, "claim"), item.claim


# --------------------------------------------------------------------------------------------------------------------
# The parts of a card


def _counts(page: Page, card: Card) -> None:
    for name, least in LEAST.items():
        if len(getattr(card, name)) < least:
            page.error((name,), f"got {len(getattr(card, name))}; a card has at least {least}")
    if not any(c.limit for c in card.claims):
        page.error(
            ("claims",), "no claim has `limit: true`; one at least shows where the standard answer stops holding"
        )
    items = made_items(card)
    kinds = {kind for kind, _ in items}
    if len(items) < LEAST_ITEMS:
        page.error(
            ("quiz",),
            f"got {len(items)} items with those made of mistakes, derivation and key points; a card has at least "
            f"{LEAST_ITEMS}",
        )
    if len(kinds) < LEAST_KINDS:
        page.error(("quiz",), f"got the kinds {', '.join(sorted(kinds))}; a card has at least {LEAST_KINDS} kinds")
    if not any(isinstance(item, Numeric | Shape) for item in card.quiz):
        page.error(("quiz",), "no item draws fresh numbers; one at least is numeric, shape or count, with its `vary`")
    for name in ("key_points", "labs", "mistakes", "follow_ups", "quiz"):
        ids = [part.id for part in getattr(card, name)]
        for n, part_id in enumerate(ids):
            if part_id in ids[:n] and part_id != TO_LINK:
                page.error((name, n, "id"), f"got {part_id!r} a second time; ids of {name} are unique on a card")
    for language in LANGUAGES:
        text = card.short_answer.get(language)
        sentences = len(re.findall(r"[.!?](?=\s|$)" if language == "en" else r"[。！？](?!”)|[。！？]”", text))
        if not 2 <= sentences <= 4 and TO_WRITE not in text:
            page.warn(("short_answer", language), f"{sentences} sentences; a short answer has two to four")
    backgrounds = Counter(r.background for r in card.resume)
    for n, line in enumerate(card.resume):
        if backgrounds[line.background] > 1:
            page.error(("resume", n, "background"), f"{line.background} stands here twice")
        if "{{" not in line.line.en and TO_WRITE not in line.line.en:
            page.warn(("resume", n, "line"), "no measured value in it; a résumé line is filled by the reader's own run")


def _claims(page: Page, card: Card) -> None:
    used = {claim for _, claim in _claim_references(card)}
    used |= {binding.claim for _, text in texts(card) for binding in bindings(text.en)}
    runs: dict[str, int] = {}
    statements: dict[str, int] = {}
    for n, claim in enumerate(card.claims):
        path: Path = ("claims", n)
        if _unwritten(claim.experiment):
            continue
        run = repr((claim.experiment, sorted(claim.params.items()), sorted((claim.versus or {}).items()), claim.metric))
        for what, key, seen in (("run", run, runs), ("statement", claim.statement.en.casefold(), statements)):
            if key in seen:
                page.error(path, f"the same {what} as claims[{seen[key]}]; each claim carries a different sentence")
            seen.setdefault(key, n)
        if len(claim.seeds) == 1:
            page.error(
                (*path, "seeds"),
                "got one seed, which may be a lucky one; write [] where nothing is random, else several",
            )
        if claim.fails_when is None:
            page.warn(path, "no fails_when: name one change of params under which the claim must fail")
        elif all(claim.params.get(k) == v for k, v in claim.fails_when.items()):
            page.error((*path, "fails_when"), "changes nothing; these are the params of the claim itself")
        if claim.versus is not None and "metric" not in claim.versus and claim.versus_params == claim.params:
            page.error((*path, "versus"), "changes nothing; these are the params of the claim itself")
        if claim.versus is not None and claim.versus.get("metric") == claim.metric:
            page.error((*path, "versus", "metric"), f"{claim.metric} compared with itself")
        if claim.observation and not claim.expect.is_one_sided:
            page.error((*path, "expect"), f"got {claim.expect.kind}; a wall-clock time is only bounded on one side")
        if claim.replaces == claim.id:
            page.error((*path, "replaces"), "a claim does not replace itself; the correction has an id of its own")
        if claim.id not in used:
            page.warn((*path, "id"), "no step, mistake, follow-up, item or text of the card uses this claim")


def _points(page: Page, card: Card) -> None:
    for n, point in enumerate(card.key_points):
        for language in LANGUAGES:
            path: Path = ("key_points", n, "says", language)
            for i, group in enumerate(point.says.get(language)):
                if len(set(group)) < len(group):
                    page.error((*path, i), "the same phrase twice")
                if any(not speech.heard(p) for p in group):
                    page.error((*path, i), "a phrase of punctuation only is in every text")
            if any(TO_WRITE in phrase for group in point.says.get(language) for phrase in group):
                continue
            if (
                point.must
                and TO_WRITE not in card.short_answer.get(language)
                and not speech.makes(card.short_answer.get(language), point, language)
            ):
                missing = [
                    " / ".join(g)
                    for g in point.says.get(language)
                    if not speech.says(card.short_answer.get(language), (g,))
                ]
                why = f"nothing of: {'; '.join(missing)}" if missing else "it says what not_says takes back"
                page.error(
                    path,
                    f"the short answer does not say this point ({why}); say it there, or let `says` know the words",
                )
            for m, mistake in enumerate(card.mistakes):
                if speech.makes(mistake.wrong.get(language), point, language):
                    report = page.error if point.must else page.warn
                    report(
                        ("mistakes", m, "wrong", language),
                        f"this wrong sentence says the key point {point.id}; make its `says` stricter, or add "
                        "`not_says`",
                    )


def _steps(page: Page, card: Card) -> None:
    pattern = {
        "en": r"\b(as above|as before|see above|previous step|last step|the above)\b",
        "zh": "同上|如上|上一步|前一步|上述|上式|上面",
    }
    for n, step in enumerate(card.derivation):
        if any(number > n for number in step.builds_on or ()):
            page.error(
                ("derivation", n, "builds_on"),
                f"step {n + 1} builds on earlier steps, numbers from 1 to {n}"
                if n
                else "the first step builds on none; write [], or leave it out",
            )
        for name in ("step", "because"):
            for language in LANGUAGES:
                if m := re.search(pattern[language], getattr(step, name).get(language), re.IGNORECASE):
                    page.error(
                        ("derivation", n, name, language),
                        f"{m[0]!r}: steps are put in order one by one; each stands by itself",
                        offset=m.start(),
                    )


def _spoken(page: Page, card: Card) -> None:
    for language in LANGUAGES:
        length = speech.spoken_units(card.spoken.get(language), language)
        limit, unit = speech.LIMIT[language], "words" if language == "en" else "units"
        if length > limit:
            report = page.error if length > speech.TOLERANCE * limit else page.warn
            report(
                ("spoken", language),
                f"{length} {unit}, about {speech.spoken_seconds(card.spoken.get(language), language):.0f} s; at most "
                f"{limit} {unit} are 30 s",
            )


# --------------------------------------------------------------------------------------------------------------------
# Quiz items


def _item(page: Page, path: Path, item: Item, card: Card) -> None:
    if isinstance(item, (Numeric, Shape)):
        _vary(page, path, item)
    if isinstance(item, Numeric):
        _numeric(page, path, item, card)
    elif isinstance(item, Shape):
        _answer(page, path, item)
    elif isinstance(item, Predict):
        claim = next((c for c in card.claims if c.id == item.claim), None)
        if claim and item.ask == "direction" and claim.versus is None:
            page.error(
                (*path, "ask"),
                f"got direction; {item.claim} compares nothing. Ask for the value, or give the claim a versus",
            )
    elif isinstance(item, Cloze):
        _cloze(page, path, item)
    groups: Sequence[tuple[Path, Any]] = ()
    if item.kind == "choice":
        groups = [((*path, "options"), item.options)]
    elif item.kind == "cloze":
        groups = [((*path, "holes", n), options) for n, options in enumerate(item.holes)]
    for place, options in groups:
        for language in LANGUAGES:
            seen = [o.text.get(language).strip() for o in options]
            for n, text in enumerate(seen):
                if text in seen[:n] and TO_WRITE not in text:
                    page.error((*place, n, "text", language), "the same option twice")
            if item.kind == "choice" and (how := stands_out(options, language)):
                page.error(place, f"the right option stands out in {language}: it is {how}; make them alike in length")


def stands_out(options: Sequence[Option], language: str, most: float = STANDS_OUT) -> str:
    """Whether the right options are told by their length alone: all of them longer, or shorter, than each wrong one by
    more than a factor; empty if not. Formulas count by their letters."""
    lengths = [len(_NOT_LETTERS.sub("", option.text.get(language))) for option in options]
    right = [length for length, option in zip(lengths, options, strict=True) if option.right]
    wrong = [length for length, option in zip(lengths, options, strict=True) if not option.right]
    if max(*right, *wrong) <= SHORT:
        return ""
    if min(right) > most * max(wrong):
        return f"{min(right)} characters long beside at most {max(wrong)}"
    if max(right) * most < min(wrong):
        return f"{max(right)} characters long beside at least {min(wrong)}"
    return ""


def _vary(page: Page, path: Path, item: Numeric | Shape) -> None:
    names = [set(draw) for draw in draws(item.vary)]
    if any(n != names[0] for n in names):
        page.error((*path, "vary"), "the presets name different parameters; each names them all")
    for language in LANGUAGES:
        holes = {p.name for p in scan(item.prompt.get(language)) if isinstance(p, Hole)}
        if (unsaid := sorted(names[0] - holes)) and TO_WRITE not in item.prompt.get(language):
            page.error(
                (*path, "prompt", language),
                f"does not say the drawn values of {', '.join(unsaid)}; write {{{{{unsaid[0]}}}}}",
            )


def _numeric(page: Page, path: Path, item: Numeric, card: Card) -> None:
    different = len({repr(sorted(d.items())) for d in draws(item.vary)})
    if different < LEAST_DRAWS:
        page.error((*path, "vary"), f"got {different} different draws; at least {LEAST_DRAWS}")
    claim = next((c for c in card.claims if c.id == item.answer_from), None)
    if claim is None or _unwritten(claim.experiment):
        return
    if claim.expect.is_one_sided:
        page.error(
            (*path, "answer_from"),
            f"{claim.id} expects {claim.expect.kind}, which no answer can miss on the other side; take a claim "
            "with a value",
        )
    if claim.expect.rel_tol is not None and item.rel_tol < claim.expect.rel_tol:
        page.error(
            (*path, "rel_tol"),
            f"got {item.rel_tol:g}; {claim.id} itself is only sure to {claim.expect.rel_tol:g}, so right answers "
            "would be refused",
        )


def _answer(page: Page, path: Path, item: Shape) -> None:
    """The expression can be read, uses the drawn names, and gives whole numbers for every draw."""
    for draw in draws(item.vary, most=500):
        try:
            value = expressions.evaluate(item.answer, {k: v for k, v in draw.items() if not isinstance(v, (str, bool))})
            if isinstance(value, tuple) != (item.kind == "shape"):
                page.error(
                    (*path, "answer"), f"got {item.answer!r}; a shape is a tuple, (n, d), and a count is one expression"
                )
                return
            for part in value if isinstance(value, tuple) else (value,):
                if expressions.whole(part) < 0:
                    raise ValueError(f"{item.answer!r} is negative at {draw}")
        except ValueError as error:
            page.error((*path, "answer"), str(error))
            return


def _cloze(page: Page, path: Path, item: Cloze) -> None:
    for h, options in enumerate(item.holes):
        for n, option in enumerate(options):
            if option.text.en != option.text.zh:
                page.error((*path, "holes", h, n, "text"), "code is the same in both languages")
    if any(TO_WRITE in o.text.en for options in item.holes for o in options):
        return
    for filling in itertools.product(*item.holes):
        source = filled(item, [o.text.en for o in filling])
        try:
            ast.parse(source)
        except (SyntaxError, ValueError) as error:
            said = ", ".join(o.text.en for o in filling)
            line = source.split("\n")[(getattr(error, "lineno", None) or 1) - 1].strip()
            page.error((*path, "code"), f"filled with {said} this is no Python ({error.args[0]}): {line}")


def filled(item: Cloze, options: Sequence[str]) -> str:
    """Set-up, code with its holes filled, and check; backticks around an option are the text's, not the code's."""
    first, *parts = item.code.split("___")
    code = first + "".join(o.strip().strip("`") + part for o, part in zip(options, parts, strict=True))
    return f"{item.setup}\n{code}\n{item.check}\n"


# --------------------------------------------------------------------------------------------------------------------
# The deck


def _across(deck: Deck) -> Iterator[Problem]:
    """Claim ids are unique in the deck; prerequisites lead nowhere in a circle; no source is left unused."""
    first: dict[str, str] = {}
    ids = {c.id for claims in deck.claims.values() for c in claims}
    for owner, claims in deck.claims.items():
        document = deck.documents[owner]
        for n, claim in enumerate(claims):
            if claim.id in first and claim.id != TO_LINK:
                yield document.problem(
                    ("claims", n, "id"),
                    f"got {claim.id!r}, which is a claim of {first[claim.id]} as well; claims are unique in the deck",
                )
            first.setdefault(claim.id, owner)
            if claim.replaces and claim.replaces not in ids:
                yield document.problem(
                    ("claims", n, "replaces"), f"got {claim.replaces!r}; no claim has this id (did it not stay?)"
                )
            if owner.startswith("claims/") and claim.experiment != owner.removeprefix("claims/"):
                yield document.problem(
                    ("claims", n, "experiment"),
                    f"got {claim.experiment!r}; the file holds claims of {owner.removeprefix('claims/')}",
                )
    for circle in _circles({card_id: card.prerequisites for card_id, card in deck.cards.items()}):
        yield deck.documents[circle[0]].problem(
            ("prerequisites",), f"a circle: {' → '.join([*circle, circle[0]])}; a card is learned before the next"
        )


def _circles(graph: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Each circle once, from its first card on."""
    done: set[str] = set()

    def walk(node: str, trail: list[str]) -> Iterator[list[str]]:
        if node in trail:
            yield trail[trail.index(node) :]
        elif node in graph and node not in done:
            for before in graph[node]:
                if before != node:
                    yield from walk(before, [*trail, node])
            done.add(node)

    for start in graph:
        yield from walk(start, [])


def cited_sources(deck: Deck) -> set[str]:
    """Keys that a card, the glossary or another list cites."""
    found = {c.key for card in deck.cards.values() for c in card.sources}
    found |= {card.asked.source for card in deck.cards.values() if card.asked}
    for part in (*deck.cards.values(), *deck.glossary.values(), *deck.tracks.values(), *deck.sources.values()):
        found |= {key for _, text in texts(part) for key, _ in citations(text.en)}
    return found | {key for term in deck.glossary.values() for key, _ in citations(term.paper or "")}


def _beside(deck: Deck, known: set[str]) -> list[Problem]:
    """topics, tracks, glossary, sources, strings: what is wrong inside them."""
    problems: list[Problem] = []
    parts: dict[str, Any] = {
        "topics": dict(deck.topics),
        "tracks": dict(deck.tracks),
        "glossary": dict(deck.glossary),
        "sources": dict(deck.sources),
        "strings": deck.strings,
    }
    for name, part in parts.items():
        page = Page(deck.documents[name])
        for path, text in texts(part):
            check_text(page, path, text)
        if name == "topics":
            _topics(page, deck)
        elif name == "tracks":
            for track_id, track in deck.tracks.items():
                for n, card in enumerate(track.cards):
                    _known(
                        page,
                        (track_id, "cards", n),
                        card,
                        sorted(known),
                        "no such card, written or planned; topics.yaml has",
                        most=5,
                    )
                    if card in track.cards[:n]:
                        page.error((track_id, "cards", n), f"{card} stands here twice")
        elif name in ("glossary", "sources"):
            for before, after in itertools.pairwise(part):
                if after < before:
                    page.error(
                        (after,),
                        f"stands behind {before}; keys are in alphabetical order, so that nobody enters one twice",
                    )
        if name == "glossary":
            _glossary(page, deck)
        problems += page.problems
    return problems


def _topics(page: Page, deck: Deck) -> None:
    first: dict[str, str] = {}
    for topic_id, topic in deck.topics.items():
        for n, card in enumerate(topic.cards):
            if card in first:
                page.error((topic_id, "cards", n), f"{card} stands under {first[card]} as well; a card has one topic")
            first.setdefault(card, topic_id)


def _glossary(page: Page, deck: Deck) -> None:
    first: dict[tuple[str, str], str] = {}
    for key, term in deck.glossary.items():
        for language in LANGUAGES:
            word = (language, term.term.get(language).casefold())
            if word in first:
                page.error(
                    (key, "term", language),
                    f"{term.term.get(language)!r} is a term of {first[word]} as well; a term stands once",
                )
            first.setdefault(word, key)
        for place, text in ((("meaning", "en"), term.meaning.en), (("paper",), term.paper or "")):
            for source, _ in citations(text):
                _known(page, (key, *place), source, deck.sources, "sources.yaml has")
