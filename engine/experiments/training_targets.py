r"""How many positions of one pass have a target, and how much of the text each prediction may see, by objective.

One text of n tokens is made into what a model reads and what it has to predict:

``next_token_lm``    a start token and the text without its last token are read under a causal mask; all n are targets
``prefix_lm``        the same, but the first tokens see each other both ways and are no targets
``masked_lm``        a share of the tokens, drawn at random, is replaced by one mask token; these are the targets
``span_corruption``  the same share in spans: each is replaced by a sentinel of its own, and the targets are, span by
                     span, its sentinel and its tokens, with an end token behind both parts; lengths as in T5

An encoder-decoder and one stack with a prefix mask differ in their weights, not in what may be seen: the inputs both
ways, the targets all inputs and what comes before. So one mask stands for both, and positions are those of the two
parts together.

A position without a target is read by others all the same. A backward pass through a small random stack
(engine/transformer_block.py) shows which of the inputs the loss depends on, and how much of it.

Sources: t5-preprocessing, ``random_spans_helper`` and ``random_spans_noise_mask``; wettig2022, abstract (0.15).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.masks import keep_prefix
from engine.transformer_block import DecoderSizes, block, block_shapes, unembed

if TYPE_CHECKING:
    import torch

OBJECTIVES = ("next_token_lm", "prefix_lm", "masked_lm", "span_corruption")


@dataclass(frozen=True)
class Params(BaseParams):
    objective: str = choice(*OBJECTIVES)
    raw_tokens: int = number(96, low=8, high=1024, step=8)
    corrupted_share: float = number(0.15, low=0.05, high=0.9, step=0.05)
    mean_span: float = number(3.0, low=1, high=16, step=0.5)
    prefix_share: float = number(0.5, low=0.125, high=0.875, step=0.125)
    n_layers: int = number(2, low=0, high=4)

    def unread(self) -> frozenset[str]:
        # every position has a target of its own then, whatever the others read
        return frozenset({"n_layers"} if self.objective == "next_token_lm" else ())

    def rules(self) -> Iterator[Problem]:
        if self.n_layers * self.raw_tokens**2 > MAX_PAIRS:
            values = {"pairs": self.n_layers * self.raw_tokens**2, "limit": MAX_PAIRS}
            yield Problem("rule", "n_layers", self.n_layers, rule="too_many_layer_pairs", values=values)


METRICS = (
    Metric("computed_positions"),
    Metric("predicted_positions"),
    Metric("target_share"),
    Metric("seen_share"),
    Metric("loss_reached_share"),
    Metric("text_targets"),
    Metric("untargeted_gradient_share"),
    Metric("both_ways_positions"),
)
PLOTS = (
    Plot("seen", table="seen", mark="point", x="text_place", y="text_seen_share", by="objective"),
    Plot("targets", table="objectives", mark="bar", x="objective", y="target_share"),
)
BUDGET_S = 0.05

MAX_PAIRS = 2**21  # of all layers of the stack: some 0.2 s forward and back on one core
VOCABULARY, D_MODEL, N_HEADS = 32, 16, 2
START, MASK, SENTINEL, END = -1, -2, -3, -4  # what stands at a position that holds no token of the text
NONE = -5  # at a position without a target
DRAWN = 128  # predictions that are drawn of each objective, at most


@dataclass(frozen=True)
class _Example:
    """What a model reads and has to predict. ``held``, ``wanted``: for each position the place in the text of the token
    that stands there, and of the one to be predicted there, or one of the names above. ``both_ways``: so many positions
    see each other both ways, the others what is before them.
    """

    held: np.ndarray
    wanted: np.ndarray
    both_ways: int


def memory_bytes(params: Params) -> int:
    """What autograd keeps of the stack's logits and vectors, and masks of all objectives."""
    positions = 2 * params.raw_tokens + 4
    return 4 * positions**2 * (8 * N_HEADS * params.n_layers + 24) + 4 * positions * 64 * D_MODEL * params.n_layers


def run(params: Params, run: Run) -> Result:
    """Build one text's example for every objective, and count.

    ``computed_positions``: that a model computes, of both parts. ``target_share``: targets for each of them.
    ``seen_share``: of the text's tokens, those that the prediction of a token may depend on, on average over the
    targets. ``loss_reached_share``: positions whose input has a gradient other than exactly 0;
    ``untargeted_gradient_share``: of the squared gradient of all inputs, that of positions without a target.
    ``text_targets``: targets that are tokens of the text and neither sentinels nor the end. ``both_ways_positions``:
    those that see each other both ways; of an encoder-decoder, what the encoder reads.

    Shapes: keep (positions, positions), x (1, positions, D_MODEL).
    """
    order = run.rand(params.raw_tokens).cpu().argsort().numpy()
    cuts = tuple(run.rand(params.raw_tokens).cpu().argsort().numpy() for _ in range(2))
    counts, points = [], []
    for done, objective in enumerate(OBJECTIVES):
        example = _build(objective, params, order, cuts)
        places, seen = _seen(example, params.raw_tokens)
        n_targets = int((example.wanted != NONE).sum())
        counts.append(n_targets / len(example.held))
        points.append((objective, places, seen))
        if objective == params.objective:
            chosen, chosen_seen = example, seen
        run.progress(0.1 * (done + 1))

    targets = chosen.wanted != NONE
    squares = _squared_gradient(params, run, chosen)
    metrics = {
        "computed_positions": len(chosen.held),
        "predicted_positions": targets.sum(),
        "target_share": targets.mean(),
        "seen_share": chosen_seen.mean(),
        "loss_reached_share": (squares > 0).mean(),
        "text_targets": (chosen.wanted >= 0).sum(),
        "untargeted_gradient_share": squares[~targets].sum() / squares.sum(),
        "both_ways_positions": chosen.both_ways,
    }
    table: Table = {"objective": np.array(OBJECTIVES), "target_share": np.array(counts)}
    return Result(
        {name: float(value) for name, value in metrics.items()}, {"seen": _points(points), "objectives": table}
    )


def _build(objective: str, params: Params, order: np.ndarray, cuts: tuple[np.ndarray, ...]) -> _Example:
    n = params.raw_tokens
    if objective in ("next_token_lm", "prefix_lm"):
        prefix = round(n * params.prefix_share) if objective == "prefix_lm" else 0
        wanted = np.arange(n)
        wanted[:prefix] = NONE
        return _Example(np.array([START, *range(n - 1)]), wanted, prefix + 1)
    n_noise = min(max(round(n * params.corrupted_share), 1), n - 1)
    if objective == "masked_lm":
        hidden = np.sort(order[:n_noise])
        held, wanted = np.arange(n), np.full(n, NONE)
        held[hidden], wanted[hidden] = MASK, hidden
        return _Example(held, wanted, n)
    return _corrupt(n, n_noise, params.mean_span, cuts)


def _corrupt(n: int, n_noise: int, mean_span: float, cuts: tuple[np.ndarray, ...]) -> _Example:
    """Spans that are kept and spans that are not take turns, beginning with a kept one; their lengths are random."""
    n_spans = min(max(round(n_noise / mean_span), 1), n_noise, n - n_noise)
    kept_lengths, noise_lengths = (
        _split(total, n_spans, cut) for total, cut in zip((n - n_noise, n_noise), cuts, strict=True)
    )
    inputs: list[int] = []
    targets: list[int] = []
    at = 0
    for kept, noise in zip(kept_lengths, noise_lengths, strict=True):
        inputs += [*range(at, at + kept), SENTINEL]
        targets += [SENTINEL, *range(at + kept, at + kept + noise)]
        at += kept + noise
    inputs.append(END)
    targets.append(END)
    # the decoder reads its targets one place late, behind a start token
    held = np.array([*inputs, START, *targets[:-1]])
    return _Example(held, np.array([NONE] * len(inputs) + targets), len(inputs))


def _split(total: int, parts: int, cut: np.ndarray) -> np.ndarray:
    """Lengths of at least 1 that add up to total: cut at parts - 1 of the places between two tokens."""
    places = np.sort(cut[cut < total - 1][: parts - 1]) + 1
    return np.diff(np.array([0, *places, total]))


def _keep(example: _Example) -> torch.Tensor:
    return keep_prefix(len(example.held), prefix_len=example.both_ways)


def _seen(example: _Example, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each token of the text that is predicted: its place, and the share of the text that its prediction may see."""
    text = example.held >= 0
    seen = (_keep(example).numpy()[:, text]).sum(axis=1) / n
    predicted = example.wanted >= 0
    return example.wanted[predicted], seen[predicted]


def _squared_gradient(params: Params, run: Run, example: _Example) -> np.ndarray:
    """Squared norm of the gradient of the mean loss with respect to the vector that stands at each position."""
    import torch
    from torch.nn.functional import cross_entropy

    d_k = D_MODEL // N_HEADS
    sizes = DecoderSizes(params.n_layers, D_MODEL, N_HEADS, N_HEADS, d_k, 2 * D_MODEL, VOCABULARY)
    keep = _keep(example).to(run.device)
    targets = torch.from_numpy(np.flatnonzero(example.wanted != NONE)).to(run.device)
    labels = (run.rand(len(targets)) * VOCABULARY).long().clamp_max(VOCABULARY - 1)  # 16-bit types round up to 1
    vectors = run.randn(1, len(example.held), D_MODEL).requires_grad_()
    x = vectors
    for layer in range(params.n_layers):
        weights = {
            name: x.new_ones(shape) if name.startswith("norm") else run.randn(*shape) / shape[-1] ** 0.5
            for name, shape in block_shapes(sizes).items()
        }
        x = block(weights, sizes, x, keep)
        run.progress(0.5 + 0.3 * layer / params.n_layers)
    outer = {"norm": torch.ones_like(x[0, 0]), "embedding": run.randn(VOCABULARY, D_MODEL)}
    loss = cross_entropy(unembed(outer, x)[0, targets], labels)
    (slopes,) = torch.autograd.grad(loss, vectors)
    # not the square in float32, where a small gradient would become exactly 0
    return np.asarray(slopes[0].cpu().double().square().sum(dim=-1).numpy())


def _points(points: list[tuple[str, np.ndarray, np.ndarray]]) -> Table:
    """The predictions of every objective, evenly thinned out where there are more than DRAWN."""
    drawn = [np.unique(np.linspace(0, len(p) - 1, min(len(p), DRAWN)).round().astype(int)) for _, p, _ in points]
    return {
        "objective": np.concatenate([np.repeat(name, len(d)) for (name, _, _), d in zip(points, drawn, strict=True)]),
        "text_place": np.concatenate([places[d] for (_, places, _), d in zip(points, drawn, strict=True)]),
        "text_seen_share": np.concatenate([seen[d] for (_, _, seen), d in zip(points, drawn, strict=True)]),
    }
