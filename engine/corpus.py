"""What our own language model is trained on: little stories whose facts stay true, and random strings that repeat.

Both are generated, from a seed and without any other source, so the text needs no licence and no download. In a story
people carry things about; whoever says later where a thing is must have read it. In a repeated string nothing helps
but to find what followed last time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

FIRST, LAST = 32, 126  # printable ASCII
VOCABULARY = ("\n", *(chr(code) for code in range(FIRST, LAST + 1)))
N_TOKENS = len(VOCABULARY)
UNKNOWN = "?"

NAMES = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "Juno", "Kai", "Lena", "Mei", "Noor")
THINGS = ("key", "lamp", "book", "cup", "coin", "rope", "map", "bell", "stone", "letter", "apple", "hat")
COLOURS = ("red", "blue", "green", "old", "small", "round", "heavy", "clean")
PLACES = ("garden", "kitchen", "attic", "boat", "barn", "tower", "shop", "cellar", "school", "forest")
REPEATED = (3, 32)  # shortest and longest string that repeats; short ones are as frequent as long ones


def encode(text: str) -> list[int]:
    """One token a character; what the model has no token for becomes a question mark."""
    place = {character: token for token, character in enumerate(VOCABULARY)}
    return [place.get(character, place[UNKNOWN]) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens."""
    return "".join(VOCABULARY[token] for token in tokens)


def story(draw: random.Random) -> str:
    """A few sentences about two or three people and as many things; every answer in it follows from what was said."""
    people = draw.sample(NAMES, draw.choice((2, 2, 3)))
    things = [f"{draw.choice(COLOURS)} {thing}" for thing in draw.sample(THINGS, draw.choice((2, 3)))]
    places = draw.sample(PLACES, 4)
    where = {person: draw.choice(places) for person in people}
    holder: dict[str, str | None] = {}
    lying: dict[str, str] = {}
    told = []
    for thing in things:
        owner = draw.choice((*people, None))
        holder[thing] = owner
        if owner:
            told.append(f"{owner} has a {thing}." if thing[0] not in "aeiou" else f"{owner} has an {thing}.")
        else:
            lying[thing] = draw.choice(places)
            told.append(f"The {thing} is in the {lying[thing]}.")
    told += [f"{person} is in the {where[person]}." for person in people]
    draw.shuffle(told)
    for _ in range(draw.randint(3, 7)):
        person = draw.choice(people)
        carried = [thing for thing, owner in holder.items() if owner == person]
        here = [thing for thing, place in lying.items() if place == where[person]]
        others = [other for other in people if other != person and where[other] == where[person]]
        act = draw.random()
        if act < 0.35:
            where[person] = draw.choice([place for place in places if place != where[person]])
            told.append(f"{person} went to the {where[person]}.")
        elif here and act < 0.7:
            thing = draw.choice(here)
            holder[thing] = person
            del lying[thing]
            told.append(f"{person} took the {thing}.")
        elif carried and others and act < 0.85:
            thing, other = draw.choice(carried), draw.choice(others)
            holder[thing] = other
            told.append(f"{person} gave the {thing} to {other}.")
        elif carried:
            thing = draw.choice(carried)
            holder[thing] = None
            lying[thing] = where[person]
            told.append(f"{person} put the {thing} down in the {where[person]}.")
        else:
            told.append(f"{person} waited in the {where[person]}.")
        if draw.random() < 0.45:
            told.append(_question(draw, where, holder, lying))
    return " ".join(told) + "\n"


def _question(draw: random.Random, where: dict[str, str], holder: dict[str, str | None], lying: dict[str, str]) -> str:
    if draw.random() < 0.4:
        person = draw.choice(list(where))
        return f"Where is {person}? In the {where[person]}."
    thing = draw.choice(list(holder))
    owner = holder[thing]
    return f"Who has the {thing}? {owner}." if owner else f"Where is the {thing}? In the {lying[thing]}."


def stories(seed: int, length: int) -> Iterator[str]:
    """Texts of ``length`` characters cut out of stories that follow each other; each begins inside a story."""
    draw = random.Random(seed)
    held = ""
    while True:
        while len(held) < length:
            held += story(draw)
        yield held[:length]
        held = held[length:]


def repeats(seed: int, length: int, *, period: int | None = None) -> Iterator[tuple[str, int]]:
    """Texts of ``length`` characters in which a random string repeats, and its own length: random, or ``period``."""
    draw = random.Random(seed)
    while True:
        size = period or round(math.exp(draw.uniform(*map(math.log, REPEATED))))
        once = "".join(draw.choices(VOCABULARY[1:], k=size))
        yield (once * (length // size + 1))[:length], size
