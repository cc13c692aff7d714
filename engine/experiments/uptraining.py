r"""A trained model of MHA is given fewer KV heads, and trained on: what is lost at once, and what comes back.

The language model of engine/language_model.py has four heads in each of three layers. Its key and value heads are
pooled into two KV heads (GQA) and, beside it, into one (MQA); then both are trained further on texts like those of its
training, half stories and half repeating strings, all weights with Adam at a constant rate. A KV head is one matrix
that is repeated for the heads of its group, so its gradient is the sum over them. Biases of k are pooled like W_k.

``heads_01_23``, ``heads_02_13`` and ``heads_03_12``: which heads share, in every layer. ``pooled``: k, v, or both.

What comes out is a fact about one small model with four heads and generated texts: it shows what pooling does to
weights that training made, not what a large model loses, and a short training on a new rate, not the 5 % of the paper.

Source: ainslie2023, sections 2.1 and 3.3 (pooling, then training with the recipe of the pre-training).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import corpus, inputs, language_model
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.training import Adam

if TYPE_CHECKING:
    import torch

TRAINS = True
POOLED = {"k_and_v": ("W_k", "b_k", "W_v"), "k_alone": ("W_k", "b_k"), "v_alone": ("W_v",)}
HEAD_PAIRS = {
    "heads_01_23": ((0, 1), (2, 3)),
    "heads_02_13": ((0, 2), (1, 3)),
    "heads_03_12": ((0, 3), (1, 2)),
}


@dataclass(frozen=True)
class Params(BaseParams):
    source: str = choice("stories", "repeats")
    head_pairs: str = choice(*HEAD_PAIRS)
    pooling: str = choice("pooled_mean", "pooled_first", "pooled_random")
    pooled: str = choice(*POOLED)
    steps: int = number(40, low=0, high=400)
    learning_rate: float = number(0.001, low=0.0001, high=0.01)
    n_texts: int = number(8, low=1, high=32, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset() if self.steps else frozenset({"learning_rate"})


VARIANTS = ("gqa", "mqa")
METRICS = (
    Metric("original_loss_nats", "nats"),
    *(Metric(f"{moment}_loss_nats_{variant}", "nats") for variant in VARIANTS for moment in ("start", "end")),
    *(Metric(f"{moment}_loss_ratio_{variant}") for variant in VARIANTS for moment in ("start", "end")),
    Metric("uptrained_share"),
)
PLOTS = (
    Plot(
        "loss",
        table="curves",
        x="step",
        y="loss_nats",
        by="sharing",
        theory="original_loss",
        one_law=True,
        y_unit="nats",
    ),
)
BUDGET_S = 10.0

SEQ_LEN = 128
BATCH = 8  # texts of a step, half of each kind
EVERY = 5  # steps between two measurements
TRAINED_TOKENS = 16_384_000  # of the original, see engine/trained/training.json
ALL_HEADS = (tuple(range(language_model.N_HEADS)),)


def memory_bytes(params: Params) -> int:
    """Both variants with gradients, moments and repeated matrices, and the activations of a step or a measurement."""
    n = max(BATCH, params.n_texts) * SEQ_LEN
    activations = n * language_model.N_LAYERS * (16 * language_model.D_MODEL + 3 * language_model.D_FF)
    return 4 * (12 * 700_000 + 2 * activations + 6 * n * corpus.N_TOKENS)


def run(params: Params, run: Run) -> Result:
    """Train both variants on the same texts; losses on held-out texts of the chosen kind, before and on the way.

    ``..._loss_ratio``: over the loss of the model as it was. ``uptrained_share``: characters seen here, over those
    of the original training.
    """
    import torch

    dtype = torch.float64 if run.dtype == torch.float64 else torch.float32  # lower ones would round the updates away
    original = language_model.load_weights(run.device, dtype)
    texts = inputs.draw_texts(run, params.source, params.n_texts, SEQ_LEN)
    seed = int(torch.randint(2**31, (1,), generator=run.generator))
    as_it_was = _loss(original, texts)
    variants = {"gqa": _Variant(params, run, original, HEAD_PAIRS[params.head_pairs])}
    variants["mqa"] = _Variant(params, run, original, ALL_HEADS)
    batches = _batches(run, seed)
    losses: dict[str, list[tuple[int, float]]] = {name: [] for name in variants}
    latest: Result | None = None
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1), latest)
        if step % EVERY == 0 or step == params.steps:
            for name, variant in variants.items():
                losses[name].append((step, _loss(variant.weights(), texts)))
            latest = _result(losses, as_it_was, step / params.steps if params.steps else 1.0)
        if step < params.steps:
            batch = next(batches)
            for variant in variants.values():
                variant.train(batch)
    assert latest is not None
    return latest


class _Variant:
    """The model with KV heads that groups of heads share, and its optimizer."""

    def __init__(
        self, params: Params, run: Run, original: dict[str, torch.Tensor], groups: tuple[tuple[int, ...], ...]
    ) -> None:
        import torch

        self.shared = {f"{layer}.{name}" for layer in range(language_model.N_LAYERS) for name in POOLED[params.pooled]}
        group_of = {head: number for number, group in enumerate(groups) for head in group}
        self.reads = torch.tensor([group_of[head] for head in sorted(group_of)], device=run.device)
        self.own: dict[str, torch.Tensor] = {}
        for name, weight in original.items():
            kept = _pool(weight, groups, params.pooling, run) if name in self.shared else weight.clone()
            self.own[name] = kept.requires_grad_()
        self.optimizer = Adam(list(self.own.values()), params.learning_rate)

    def weights(self) -> dict[str, torch.Tensor]:
        """As the model reads them: what is shared, repeated for the heads of its group."""
        return {
            name: weight[self.reads].flatten(0, 1) if name in self.shared else weight
            for name, weight in self.own.items()
        }

    def train(self, batch: inputs.Texts) -> None:
        for weight in self.own.values():
            weight.grad = None
        _mean_loss(self.weights(), batch).backward()
        self.optimizer.step()


def _pool(weight: torch.Tensor, groups: tuple[tuple[int, ...], ...], pooling: str, run: Run) -> torch.Tensor:
    """One head for each group. Shapes: weight (n_heads · d_k, ...); returns (groups, d_k, ...)."""
    import torch

    heads = weight.unflatten(0, (language_model.N_HEADS, language_model.D_K))
    if pooling == "pooled_random":  # of the same size as those that it replaces
        return run.randn(len(groups), *heads.shape[1:]).to(weight.dtype) * heads.square().mean().sqrt()
    if pooling == "pooled_first":
        return torch.stack([heads[group[0]] for group in groups])
    return torch.stack([heads[list(group)].mean(dim=0) for group in groups])


def _batches(run: Run, seed: int) -> Iterator[inputs.Texts]:
    """Half stories, half repeating strings, from seeds that neither training nor held-out texts use."""
    import torch

    first = inputs.LOWEST_SEED + 2**62 + seed
    stories, repeats = corpus.stories(first, SEQ_LEN), corpus.repeats(first, SEQ_LEN)
    while True:
        drawn = [(text, 0) for text in itertools.islice(stories, BATCH // 2)]
        drawn += list(itertools.islice(repeats, BATCH // 2))
        tokens = torch.tensor([corpus.encode(text) for text, _ in drawn], device=run.device)
        yield inputs.Texts(tokens, torch.tensor([period for _, period in drawn], device=run.device))


def _mean_loss(weights: dict[str, torch.Tensor], texts: inputs.Texts) -> torch.Tensor:
    """Over the characters that can be known."""
    losses = language_model.token_losses(language_model.forward_fast(weights, texts.tokens), texts.tokens)
    return losses[texts.known()].mean()


def _loss(weights: dict[str, torch.Tensor], texts: inputs.Texts) -> float:
    import torch

    with torch.no_grad():
        return float(_mean_loss(weights, texts))


def _result(losses: dict[str, list[tuple[int, float]]], original: float, done: float) -> Result:
    metrics = {"original_loss_nats": original}
    for name, curve in losses.items():
        for moment, (_, loss) in (("start", curve[0]), ("end", curve[-1])):
            metrics[f"{moment}_loss_nats_{name}"] = loss
            metrics[f"{moment}_loss_ratio_{name}"] = loss / original
    last = next(iter(losses.values()))[-1][0]
    metrics["uptrained_share"] = last * BATCH * SEQ_LEN / TRAINED_TOKENS
    steps = [step for curve in losses.values() for step, _ in curve]
    table: Table = {
        "step": np.array(steps),
        "sharing": np.repeat([name.upper() for name in losses], [len(curve) for curve in losses.values()]),
        "loss_nats": np.array([loss for curve in losses.values() for _, loss in curve]),
        "original_loss": np.full(len(steps), original),
    }
    return Result({m.name: float(metrics[m.name]) for m in METRICS}, {"curves": table}, done)
