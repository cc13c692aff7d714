r"""Where the heads of the trained language model look, and what the model loses when one of them is cut out.

The map shows the weights of one head on one text. Five scores of all heads say how much weight goes, on average,

- to the token before (previous token) and to the token itself (self): rows of two or more keys;
- to the first token, whatever it is;
- to the first token while a random string stands for the first time, so that nothing in it can be found again: if a
  head then puts much more there than a uniform row would, the first token is where it rests, an attention sink;
- to the tokens that followed this one at its earlier times (induction), on random strings that repeat with a random
  period, where nothing but those earlier times can tell how the string goes on.

Cutting a head out puts the mean of its context over places and texts in its place, so that what it always adds stays,
or zero. A high score says where a head looks; only the loss without it says whether the model needs that. Nor is that
the whole answer: where several heads do the same, cutting one of them costs nothing, and cutting all of them does.

Source: olsson2022, abstract (what an induction head is); xiao2023, abstract (sinks). The scores are defined here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine import inputs, language_model
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number, text

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    source: str = choice(*inputs.SOURCES)
    text: str = text(inputs.EXAMPLE, most=inputs.LONGEST)
    layer: int = number(1, low=0, high=language_model.N_LAYERS - 1)
    head: int = number(1, low=0, high=language_model.N_HEADS - 1)
    ablation: str = choice("mean", "zero")
    n_texts: int = number(2, low=1, high=16, log2=True)

    def rules(self) -> Iterator[Problem]:
        yield from inputs.too_short(self.source, self.text)

    def unread(self) -> frozenset[str]:
        return inputs.unread(self.source) & {"text"}  # repeating strings are always read too


METRICS = (
    Metric("previous_token_score_max"),
    Metric("induction_score_max"),
    Metric("previous_token_layer"),
    Metric("induction_layer"),
    Metric("n_induction_heads"),
    Metric("self_share_max"),
    Metric("first_token_share_max"),
    Metric("first_token_share_mean"),
    Metric("first_token_share_uniform"),
    Metric("sink_share_max"),
    Metric("sink_share_uniform"),
    Metric("loss_repeated_nats", "nats"),
    Metric("loss_repeated_without_previous_nats", "nats"),
    Metric("loss_repeated_without_induction_nats", "nats"),
    Metric("loss_repeated_without_all_induction_nats", "nats"),
    Metric("loss_repeated_without_other_nats", "nats"),
    Metric("loss_stories_nats", "nats"),
    Metric("loss_stories_without_previous_nats", "nats"),
    Metric("loss_stories_without_induction_nats", "nats"),
    Metric("loss_stories_without_all_induction_nats", "nats"),
    Metric("loss_stories_without_other_nats", "nats"),
    Metric("n_unknown"),
)
PLOTS = (
    Plot("map", table="map", mark="heat", x="key_token", y="query_token", value="attention_weight"),
    Plot("scores", table="scores", mark="point", x="head", y="attention_weight", by="pattern"),
    Plot("ablation", table="ablation", mark="bar", x="head", y="loss_added_nats", by="source", y_unit="nats"),
)
BUDGET_S = 0.28

N_SHOWN = 63  # tokens of the map
N_ALL = len(language_model.HEADS)  # heads of all layers
KINDS = {"stories": "stories", "repeats": "repeated"}  # what is drawn, and what its losses are called
INDUCTION = 0.5  # a head counts as an induction head when it scores above
PATTERNS = ("previous", "induction", "first", "sink", "self")


def memory_bytes(params: Params) -> int:
    """The weights, and one pass: its token logits and hidden units, and the logits and weights of every layer."""
    width = 24 * language_model.D_MODEL + 3 * language_model.D_FF
    attention = (2 * language_model.N_LAYERS + 3) * language_model.N_HEADS * language_model.SEQ_LEN**2
    return 4 * (700_000 + params.n_texts * (language_model.SEQ_LEN * width + attention)) + 200 * N_SHOWN**2


def run(params: Params, run: Run) -> Result:
    """Score the heads, cut each out of the model once, and all induction heads together; show one head on one text.

    Previous token, first token and self are scored on the texts of the source, induction and sink on repeated strings;
    the two heads whose losses are told apart from the others are those that score highest on repeated strings.
    """
    import torch

    weights = language_model.load_weights(run.device, run.dtype)
    drawn = {kind: inputs.draw_texts(run, kind, params.n_texts, language_model.SEQ_LEN) for kind in KINDS}
    without: dict[str, np.ndarray] = {}  # the loss with each head cut out, and at last with all induction heads
    with torch.inference_mode():
        read = {kind: _read(weights, texts) for kind, texts in drawn.items()}
        on_repeats = read["repeats"].scores
        inducing = np.flatnonzero(on_repeats["induction"] > INDUCTION).tolist()
        cuts = [*([j] for j in range(N_ALL)), inducing]
        for i, (kind, texts) in enumerate(drawn.items()):
            without[kind] = np.zeros(len(cuts))
            for j, heads in enumerate(cuts):
                run.progress((i + j / len(cuts)) / len(drawn))
                edit = _cut(heads, read[kind].means if params.ablation == "mean" else None)
                without[kind][j] = _loss(language_model.forward(weights, texts.tokens, edit_context=edit), texts)
        if params.source == "text":
            drawn["text"] = inputs.typed_text(run, params.text)
            read["text"] = _read(weights, drawn["text"])

    periods = drawn["repeats"].period.tolist()
    tokens, scores = drawn[params.source].tokens, read[params.source].scores
    scores |= {pattern: on_repeats[pattern] for pattern in ("induction", "sink")}
    best = {pattern: int(on_repeats[pattern].argmax()) for pattern in ("previous", "induction")}
    others = [j for j in range(N_ALL) if j not in (*best.values(), *inducing)]
    metrics = {
        "previous_token_score_max": float(scores["previous"].max()),
        "induction_score_max": float(scores["induction"].max()),
        "previous_token_layer": float(best["previous"] // language_model.N_HEADS),
        "induction_layer": float(best["induction"] // language_model.N_HEADS),
        "n_induction_heads": float(len(inducing)),
        "self_share_max": float(scores["self"].max()),
        "first_token_share_max": float(scores["first"].max()),
        "first_token_share_mean": float(scores["first"].mean()),
        "first_token_share_uniform": float((1 / np.arange(2, tokens.shape[1] + 1)).mean()),
        "sink_share_max": float(scores["sink"].max()),
        "sink_share_uniform": float(np.concatenate([1 / np.arange(2, n + 1) for n in periods]).mean()),
    }
    for kind, name in KINDS.items():
        metrics[f"loss_{name}_nats"] = read[kind].loss
        for pattern, j in best.items():
            metrics[f"loss_{name}_without_{pattern}_nats"] = float(without[kind][j])
        metrics[f"loss_{name}_without_all_induction_nats"] = float(without[kind][-1])
        metrics[f"loss_{name}_without_other_nats"] = float(without[kind][others].mean())
    metrics["n_unknown"] = float(inputs.n_unknown(params.source, params.text))
    tables: dict[str, Table] = {
        "map": _map(tokens[0, :N_SHOWN].tolist(), read[params.source].first_text[params.layer][params.head]),
        "scores": {
            "head": np.array(language_model.HEADS * len(PATTERNS)),
            "pattern": np.repeat(PATTERNS, N_ALL),
            "attention_weight": np.concatenate([scores[pattern] for pattern in PATTERNS]),
        },
        "ablation": {
            "head": np.array(language_model.HEADS * len(KINDS)),
            "source": np.repeat(list(KINDS), N_ALL),
            "loss_added_nats": np.concatenate([without[kind][:N_ALL] - read[kind].loss for kind in KINDS]),
        },
    }
    return Result({m.name: metrics[m.name] for m in METRICS}, tables)


class _Reading(NamedTuple):
    """What a pass over texts leaves: loss, scores of all heads, and layer by layer what the map and a cut need.

    Shapes: means (n_heads, d_k), first_text (n_heads, seq_len, seq_len), both one a layer; a score (N_ALL,).
    """

    loss: float
    scores: dict[str, np.ndarray]
    means: list[torch.Tensor]
    first_text: list[torch.Tensor]


def _read(weights: language_model.Weights, texts: inputs.Texts) -> _Reading:
    trace = language_model.Trace()
    loss = _loss(language_model.forward(weights, texts.tokens, trace=trace), texts)
    layers = [_scores(of_layer, texts.period.tolist()) for of_layer in trace.weights]
    scores = {pattern: np.concatenate([layer[pattern] for layer in layers]) for pattern in layers[0]}
    means = [context.mean(dim=(0, 2)) for context in trace.context]
    return _Reading(loss, scores, means, [of_layer[0] for of_layer in trace.weights])


def _loss(token_logits: torch.Tensor, texts: inputs.Texts) -> float:
    """Mean cross-entropy of the tokens that can be known."""
    return float(language_model.token_losses(token_logits, texts.tokens)[texts.known()].mean())


def _cut(heads: list[int], means: list[torch.Tensor] | None) -> language_model.Edit:
    """An edit that puts the mean of each head's context, or zero, in its place."""

    def edit(layer: int, context: torch.Tensor) -> torch.Tensor:
        for j in heads:
            if j // language_model.N_HEADS == layer:
                head = j % language_model.N_HEADS
                context[:, head] = means[layer][head] if means else 0.0
        return context

    return edit


def _scores(weights: torch.Tensor, periods: list[int]) -> dict[str, np.ndarray]:
    """Mean weight on the pattern's keys in the rows that have one; induction and sink for texts that repeat.

    Shapes: weights (n_texts, n_heads, seq_len, seq_len); a score (n_heads,).
    """
    import torch

    found = {
        "previous": weights.diagonal(-1, dim1=-2, dim2=-1),
        "first": weights[..., 1:, 0],
        "self": weights.diagonal(dim1=-2, dim2=-1)[..., 1:],
    }
    if all(periods):
        pairs = list(zip(weights, periods, strict=True))
        found["sink"] = torch.cat([w[:, 1:period, 0] for w, period in pairs], dim=-1)[None]
        found["induction"] = torch.cat([_followers(w, period) for w, period in pairs], dim=-1)[None]
    return {pattern: on_key.mean(dim=(0, 2)).cpu().double().numpy() for pattern, on_key in found.items()}


def _followers(weights: torch.Tensor, period: int) -> torch.Tensor:
    """Weight on what followed each row's token at its earlier times, in the rows after the string's first time.

    Shapes: (n_heads, seq_len, seq_len); returns (n_heads, seq_len - period).
    """
    import torch

    places = torch.arange(weights.shape[-1], device=weights.device)
    follows = ((places[:, None] + 1 - places) % period == 0) & (places > 0) & (places <= places[:, None])
    return (weights * follows).sum(dim=-1)[:, period:]


def _map(tokens: list[int], weights: torch.Tensor) -> Table:
    """A row a query and key that it sees."""
    names = inputs.cell_names(tokens)
    queries, keys = np.tril_indices(len(names))
    return {
        "query_token": np.array(names)[queries],
        "key_token": np.array(names)[keys],
        "attention_weight": weights.cpu().double().numpy()[queries, keys].astype(np.float32),
    }
