r"""What one wrong character in the prefix does to a trained language model: behind it the right text, or its own.

Teacher forcing shows a model right prefixes only. Here our own language model reads a random string twice and begins it
a third time, so that every next character is known; then a wrong one is put in, as an error of its own would be, and

``no_error``         nothing is put in: the right text throughout, as in training
``right_text_after`` behind the wrong character stands the right text again
``own_text_after``   behind it stands what the model itself finds most likely, as in greedy decoding

The wrong character is another one of the string, or one that the string does not have, or, to compare, the right one.
*Right* is a character that stands in the string where the text has come to; a *neighbour* is one that follows the
character before it somewhere in the string, so also in a text that goes on from another place of it.

The error is ours: how often the model would make one by itself is not measured here. Strings that repeat have one right
continuation, other texts do not.

Sources: bengio2015 and ranzato2015, abstracts (errors may add up); he2021-exposure, abstract (a model may recover).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import corpus
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.decoding import KVCache, Layer, extend, norm
from engine.inputs import LOWEST_SEED
from engine.language_model import D_FF, D_MODEL, N_HEADS, N_LAYERS, Weights, load_weights

if TYPE_CHECKING:
    import torch

CASES = ("no_error", "right_text_after", "own_text_after")


@dataclass(frozen=True)
class Params(BaseParams):
    wrong_character: str = choice("of_the_string", "from_elsewhere", "the_right_one")
    wrong_in_a_row: int = number(1, low=1, high=4)
    string_len: int = number(16, low=8, high=32)
    n_texts: int = number(16, low=4, high=64, log2=True)
    places_after: int = number(12, low=4, high=24)


METRICS = (
    Metric("next_loss_nats", "nats"),
    Metric("next_loss_without_error_nats", "nats"),
    Metric("recovered_loss_nats", "nats"),
    Metric("right_at_once_share"),
    Metric("on_track_share"),
    Metric("neighbour_share"),
    Metric("own_confidence"),
)
PLOTS = (
    Plot("right", table="by_place", x="places_behind", y="right_share", by="prefix_case", mark="line"),
    Plot("loss", table="by_place", x="places_behind", y="right_loss_nats", by="prefix_case", mark="line"),
)
BUDGET_S = 0.1

TIMES = 2  # the string before it begins once more
BEGUN = 4  # characters of the third time before the wrong one
SETTLED = 4  # places behind the error from which on its effect on the right text is over, if it ends at all


def memory_bytes(params: Params) -> int:
    """The weights, a pass over the beginnings, and the caches of the branches behind them."""
    tokens = params.n_texts * (TIMES * params.string_len + BEGUN + params.wrong_in_a_row + params.places_after)
    cache = 2 * N_LAYERS * tokens * D_MODEL
    a_pass = tokens * (12 * D_MODEL + 3 * D_FF + 4 * N_HEADS * 128 + 4 * corpus.N_TOKENS)
    return 4 * (700_000 + 6 * cache + 2 * a_pass) + 2**22


def run(params: Params, run: Run) -> Result:
    """Read the beginnings once, then go on behind them in the three ways.

    ``next_loss_nats``: loss of the right character straight behind the error; ``next_loss_without_error_nats``: of the
    same without it. ``recovered_loss_nats``: mean loss from the fourth place behind it on, with the right text between.
    ``right_at_once_share``: texts whose most likely character straight behind the error is right; ``on_track_share``:
    those whose own text is right at the last place. ``neighbour_share``: own characters from the fourth place on that
    are neighbours; ``own_confidence``: the mean probability that the model gives them.

    Shapes: right (n_texts, length); logits of a branch (n_texts, places_after, n_tokens).
    """
    import torch

    weights = load_weights(run.device, run.dtype)
    layers = _layers(weights)
    strings, right, wrong = _draw(params, run)
    at = TIMES * params.string_len + BEGUN
    behind = at + params.wrong_in_a_row  # the first place that is predicted
    wanted = right[:, behind:]
    with torch.inference_mode():
        run.progress(0.0)
        beginning = KVCache(N_LAYERS)
        _read(weights, layers, right[:, :at], beginning)

        run.progress(0.4)
        no_error = _read(weights, layers, right[:, at:-1], _copy(beginning))[:, params.wrong_in_a_row - 1 :]
        run.progress(0.5)
        given = torch.cat((wrong, right[:, behind:-1]), dim=1)
        right_after = _read(weights, layers, given, _copy(beginning))[:, params.wrong_in_a_row - 1 :]
        run.progress(0.6)
        own_after, own = _go_on(params, run, weights, layers, wrong, _copy(beginning))

    cases = dict(zip(CASES, (no_error, right_after, own_after), strict=True))
    said = {name: (own if name == "own_text_after" else logits.argmax(dim=-1)) for name, logits in cases.items()}
    right_shares = {name: _numbers(tokens == wanted).mean(axis=0) for name, tokens in said.items()}
    losses = {name: _numbers(_losses(logits, wanted)).mean(axis=0) for name, logits in cases.items()}
    settled = SETTLED - 1
    confidence = own_after.softmax(dim=-1).amax(dim=-1)[:, settled:]
    metrics = {
        "next_loss_nats": losses["right_text_after"][0],
        "next_loss_without_error_nats": losses["no_error"][0],
        "recovered_loss_nats": losses["right_text_after"][settled:].mean(),
        "right_at_once_share": right_shares["own_text_after"][0],
        "on_track_share": right_shares["own_text_after"][-1],
        "neighbour_share": _neighbours(strings, own.tolist(), settled),
        "own_confidence": _numbers(confidence).mean(),
    }
    table: Table = {
        "places_behind": np.tile(np.arange(1, params.places_after + 1), len(CASES)),
        "prefix_case": np.repeat(CASES, params.places_after),
        "right_share": np.concatenate([right_shares[name] for name in CASES]),
        "right_loss_nats": np.concatenate([losses[name] for name in CASES]),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"by_place": table})


def _draw(params: Params, run: Run) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Held-out strings, the right texts, and the wrong characters. Shapes: (n_texts, length), (n_texts, in a row)."""
    import torch

    seed = LOWEST_SEED + int(torch.randint(2**62, (1,), generator=run.generator))
    at = TIMES * params.string_len + BEGUN
    length = at + params.wrong_in_a_row + params.places_after
    drawn = itertools.islice(corpus.repeats(seed, length, period=params.string_len), params.n_texts)
    texts = [text for text, _ in drawn]
    draw = random.Random(seed)
    wrong = []
    for text in texts:
        string = text[: params.string_len]
        places = range(at, at + params.wrong_in_a_row)
        wrong.append("".join(_wrong(params, draw, string, text[place]) for place in places))
    strings = [text[: params.string_len] for text in texts]
    tokens = [torch.tensor([corpus.encode(text) for text in some], device=run.device) for some in (texts, wrong)]
    return strings, tokens[0], tokens[1]


def _wrong(params: Params, draw: random.Random, string: str, right: str) -> str:
    if params.wrong_character == "the_right_one":
        return right
    inside = set(string)
    others = inside if params.wrong_character == "of_the_string" else set(corpus.VOCABULARY[1:]) - inside
    return draw.choice(sorted(others - {right}) or [" "])


def _layers(weights: Weights) -> list[Layer]:
    names = {name.split(".")[1] for name in weights if "." in name}
    return [{name: weights[f"{n}.{name}"] for name in names} for n in range(N_LAYERS)]


def _read(weights: Weights, layers: list[Layer], tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Token logits after each new token. Shapes: (n_texts, n) to (n_texts, n, n_tokens)."""
    x = extend(layers, weights["embedding"][tokens], cache, n_heads=N_HEADS)
    return norm(x, weights["norm"]) @ weights["embedding"].mT / D_MODEL**0.5


def _copy(cache: KVCache) -> KVCache:
    """A cache that grows by itself."""
    copy = KVCache(N_LAYERS)
    for layer in range(N_LAYERS):
        copy.append(layer, *cache.stored(layer))
    return copy


def _go_on(
    params: Params, run: Run, weights: Weights, layers: list[Layer], wrong: torch.Tensor, cache: KVCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy decoding behind the wrong characters. Shapes: (n_texts, places, n_tokens) and (n_texts, places)."""
    import torch

    logits = [_read(weights, layers, wrong, cache)[:, -1:]]
    for place in range(1, params.places_after):
        run.progress(0.6 + 0.4 * place / params.places_after)
        logits.append(_read(weights, layers, logits[-1].argmax(dim=-1), cache))
    whole = torch.cat(logits, dim=1)
    return whole, whole.argmax(dim=-1)


def _losses(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits.transpose(1, 2), wanted, reduction="none")


def _neighbours(strings: list[str], own: list[list[int]], settled: int) -> float:
    """Share of own characters, from a place on, that follow the one before them somewhere in the string."""
    found = []
    for string, tokens in zip(strings, own, strict=True):
        pairs = set(itertools.pairwise(string + string[0]))
        text = corpus.decode(tokens)
        found += [pair in pairs for pair in itertools.pairwise(text[settled - 1 :])]
    return float(np.mean(found))


def _numbers(x: torch.Tensor) -> np.ndarray:
    return np.asarray(x.cpu().double())
