"""What experiments on the language model read: held-out texts that the run's seed draws, or a text that was typed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from engine import corpus
from engine.base import Problem, Run

if TYPE_CHECKING:
    import torch

SOURCES = ("stories", "repeats", "text")
EXAMPLE = "Ada has a red key. Ben is in the barn. Who has the red key? Ada."
LONGEST = 128  # characters of a typed text
LOWEST_SEED = 2 * 10**6 + 2  # the seeds of training and of its curve lie below, see tools/train_language_model.py


class Texts(NamedTuple):
    """Texts of one length, and after how many tokens each comes again: 0 for texts that do not repeat.

    Shapes: tokens (n_texts, seq_len) and period (n_texts,), both int64.
    """

    tokens: torch.Tensor
    period: torch.Tensor

    def known(self) -> torch.Tensor:
        """Which tokens from the second on can be known: of a random string those after it has begun again.

        That it begins again can't be known either, so the first token of the second time is not among them.

        Shapes: returns (n_texts, seq_len - 1) of bool, as :func:`engine.language_model.token_losses`.
        """
        import torch

        places = torch.arange(1, self.tokens.shape[1], device=self.tokens.device)
        return places > self.period[:, None]


def draw_texts(run: Run, kind: str, n_texts: int, seq_len: int) -> Texts:
    """``n_texts`` held-out texts of a kind, "stories" or "repeats", that no training saw."""
    import torch

    seed = LOWEST_SEED + int(torch.randint(2**62, (1,), generator=run.generator))
    if kind == "repeats":
        drawn = list(itertools.islice(corpus.repeats(seed, seq_len), n_texts))
    else:
        drawn = [(text, 0) for text in itertools.islice(corpus.stories(seed, seq_len), n_texts)]
    return _as_tensors(run, drawn)


def typed_text(run: Run, text: str) -> Texts:
    """A typed text by itself, as long as it is."""
    return _as_tensors(run, [(text, 0)])


def read_texts(run: Run, source: str, text: str, n_texts: int, seq_len: int) -> Texts:
    """The texts of a source of :data:`SOURCES`: drawn, or for "text" the typed one alone."""
    return typed_text(run, text) if source == "text" else draw_texts(run, source, n_texts, seq_len)


def _as_tensors(run: Run, texts: list[tuple[str, int]]) -> Texts:
    import torch

    tokens = torch.tensor([corpus.encode(text) for text, _ in texts], device=run.device)
    return Texts(tokens, torch.tensor([period for _, period in texts], device=run.device))


def n_unknown(source: str, text: str) -> int:
    """How many characters of a typed text the model reads as "?", because it has no token for them."""
    return sum(character not in corpus.VOCABULARY for character in text) if source == "text" else 0


def too_short(source: str, text: str) -> Iterator[Problem]:
    """The problem of a typed text in which no token is followed by another."""
    if source == "text" and len(text) < 2:
        yield Problem("rule", "text", text, rule="text_needs_two")


def unread(source: str) -> frozenset[str]:
    """The parameters among ``text``, ``n_texts`` and ``seq_len`` that a source leaves unread."""
    return frozenset({"n_texts", "seq_len"} if source == "text" else {"text"})


def cell_names(tokens: list[int]) -> list[str]:
    """Names for the axes of a heat map, "place character": "3 e"; a space is shown as ␣, the end of a line as ↵."""
    signs = {" ": "␣", "\n": "↵"}
    return [f"{place} {signs.get(c, c)}" for place, c in enumerate(corpus.decode(tokens))]
