r"""Speculative decoding of a trained model: which drafts its language model keeps, where, and what that gives a round.

The target is our own language model with its KV cache; texts of one batch go on by themselves, each by as many tokens
as it kept. Two drafts, neither of which is a network:

``ngram``   counts of what follows the last ``ngram_order`` characters in 20,000 characters of stories, each order
            smoothed by the one below it; it draws
``lookup``  what followed when the text so far had the last ``ngram_order`` characters before (prompt lookup); it
            proposes that one character with certainty, and a space where they never occurred

A round puts the last token, whose keys are not cached yet, and gamma drafts through the target in one pass, and gets
gamma + 1 distributions: one to judge each draft, and one for the bonus. What is rejected is taken back by setting the
length of the cache back; ``rollback`` off leaves it there. ``rollback_error`` compares the distributions that tokens
came from with those of a plain pass over the finished text.

:math:`\beta=\sum_x\min(p,q)` is known at every place of a finished text, so that ``mean_overlap`` is its mean over the
text, and the law puts it where all drafts would be kept with that same chance.

Sources: leviathan2022 and chen2023-speculative, abstracts.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import corpus, inputs
from engine.attention import context, mask_logits, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, flag, number
from engine.language_model import D_FF, D_K, D_MODEL, N_HEADS, N_LAYERS, Weights, forward_fast, load_weights
from engine.positions import rotary_angles, rotate
from engine.speculative import choose, expected_tokens, judge, one_hot, overlap, with_temperature

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    source: str = choice("stories", "repeats", "mixed")
    draft: str = choice("ngram", "lookup")
    ngram_order: int = number(4, low=0, high=6)
    gamma: int = number(4, low=1, high=8)
    temperature: float = number(1.0, low=0, high=2, step=0.1)
    rollback: bool = flag(True)
    n_texts: int = number(8, low=2, high=64, log2=True)
    n_rounds: int = number(6, low=1, high=8)


METRICS = (
    Metric("tokens_per_round"),
    Metric("mean_overlap"),
    Metric("formula_tokens_per_round"),
    Metric("kept_of_drafted_share"),
    Metric("kept_of_judged_share"),
    Metric("first_kept_share"),
    Metric("sure_places_share"),
    Metric("hard_places_share"),
    Metric("rollback_error"),
    Metric("n_tokens_made"),
)
PLOTS = (
    Plot("overlap", table="overlap", x="overlap", y="share", mark="bar"),
    Plot("by_depth", table="by_depth", x="depth", y="reached_share", theory="formula_share", mark="point"),
)
BUDGET_S = 0.15

PROMPT = 32  # characters; with eight rounds of nine tokens 104, and the target was trained on 128
COUNTED = 20_000  # characters of stories behind the counts of the draft
COUNTED_SEED = 1
BINS = 10
SURE, HARD = 0.9, 0.1  # places where draft and target share more, or less
COMPARED = 2  # texts that a plain pass reads again


def memory_bytes(params: Params) -> int:
    """The weights, the caches, one pass over the prompts and one over a plain text, and the counts of the draft."""
    capacity = _capacity(params)
    caches = 2 * N_LAYERS * params.n_texts * capacity * D_MODEL
    tokens = params.n_texts * max(PROMPT, params.gamma + 1)
    a_pass = tokens * (12 * D_MODEL + 3 * D_FF) + 4 * N_HEADS * tokens * capacity
    judged = 12 * params.n_texts * (params.gamma + 1) * corpus.N_TOKENS
    return 4 * (700_000 + 2 * caches + a_pass + judged) + 2**23


def run(params: Params, run: Run) -> Result:
    """Decode ``n_rounds`` rounds of every text.

    Shapes: tokens (n_texts, capacity); p and q of a round (n_texts, gamma + 1, n_tokens), of which the last q judges
    nothing: it is only compared with the distribution of the bonus.
    """
    import torch

    gamma, n_texts = params.gamma, params.n_texts
    weights = load_weights(run.device, run.dtype)
    prompts = _prompts(params, run)
    tokens = torch.zeros(n_texts, _capacity(params), dtype=torch.int64, device=run.device)
    tokens[:, :PROMPT] = prompts
    length = torch.full((n_texts,), PROMPT, device=run.device)
    every = torch.arange(n_texts, device=run.device)
    target = _Cached(weights, n_texts, _capacity(params))
    with torch.inference_mode():
        target.read(prompts[:, :-1])
        kept_counts, overlaps, origins = [], [], []
        for done in range(params.n_rounds):
            run.progress(done / params.n_rounds)
            u = run.rand(n_texts, 2 * gamma + 1)
            drafted, q = _draft(params, run, tokens, length, u[:, :gamma])
            last = tokens[every, length - 1]
            p = with_temperature(target.read(torch.cat((last[:, None], drafted), dim=1)), params.temperature)
            judged = judge(p, q[:, :gamma], drafted, u[:, gamma:-1], u[:, -1], "residual")
            places = length[:, None] + torch.arange(gamma + 1, device=run.device)
            made = torch.cat((drafted, drafted[:, :1]), dim=1)
            made[every, judged.n_kept] = judged.next_token
            valid = torch.arange(gamma + 1, device=run.device) <= judged.n_kept[:, None]
            tokens[every[:, None].expand_as(places)[valid], places[valid]] = made[valid]
            length = length + judged.n_kept + 1
            if params.rollback:
                target.length = length - 1  # the newest token has not been read yet
            kept_counts.append(judged.n_kept.cpu().numpy())
            overlaps.append(overlap(p, q)[valid].cpu().double().numpy())
            origins.append((places[:COMPARED], valid[:COMPARED], p[:COMPARED]))
        error = _cache_error(params, weights, tokens, length, origins)

    kept = np.stack(kept_counts)
    shared = np.concatenate(overlaps)
    judged_places = np.minimum(kept + 1, gamma)
    mean_overlap = float(shared.mean())
    metrics = {
        "tokens_per_round": float(kept.mean()) + 1,
        "mean_overlap": mean_overlap,
        "formula_tokens_per_round": expected_tokens(mean_overlap, gamma),
        "kept_of_drafted_share": float(kept.mean()) / gamma,
        "kept_of_judged_share": float(kept.sum() / judged_places.sum()),
        "first_kept_share": float((kept > 0).mean()),
        "sure_places_share": float((shared > SURE).mean()),
        "hard_places_share": float((shared < HARD).mean()),
        "rollback_error": error,
        "n_tokens_made": float(kept.size + kept.sum()),
    }
    return Result(metrics, {"overlap": _histogram(shared), "by_depth": _by_depth(kept, gamma, mean_overlap)})


def _capacity(params: Params) -> int:
    """Tokens of a text if every draft is kept; no more than the target was trained for."""
    return PROMPT + params.n_rounds * (params.gamma + 1)


def _prompts(params: Params, run: Run) -> torch.Tensor:
    """Beginnings of held-out texts; "mixed" is half stories, half repeating strings. Shapes: (n_texts, PROMPT)."""
    import torch

    if params.source != "mixed":
        return inputs.draw_texts(run, params.source, params.n_texts, PROMPT).tokens
    half = params.n_texts // 2
    kinds = ((kind, n) for kind, n in (("stories", half), ("repeats", params.n_texts - half)) if n)
    return torch.cat([inputs.draw_texts(run, kind, n, PROMPT).tokens for kind, n in kinds])


class _Cached:
    """The language model of engine/language_model.py behind a cache, a length of its own for every text.

    Reading writes keys and values behind ``length`` and moves it on. To take tokens back, set it back: what stands
    behind it is seen by nobody, and the next tokens are written over it.
    """

    def __init__(self, weights: Weights, n_texts: int, capacity: int) -> None:
        import torch

        self.weights = weights
        like = weights["embedding"]
        self.length = torch.zeros(n_texts, dtype=torch.int64, device=like.device)
        self.k, self.v = (like.new_zeros(N_LAYERS, n_texts, N_HEADS, capacity, D_K) for _ in range(2))

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token logits after each of some new tokens. Shapes: (n_texts, n_new) to (n_texts, n_new, n_tokens)."""
        import torch
        from torch.nn.functional import gelu, layer_norm

        weights = self.weights
        n_texts, n_new = tokens.shape
        places = self.length[:, None] + torch.arange(n_new, device=tokens.device)
        angles = rotary_angles(places.flatten(), D_K).unflatten(0, (n_texts, 1, n_new))
        rows = torch.arange(n_texts, device=tokens.device)[:, None]
        reach = int(self.length.max()) + n_new
        keep = torch.arange(reach, device=tokens.device) <= places[:, None, :, None]

        x = weights["embedding"][tokens]
        for layer in range(N_LAYERS):
            normed = layer_norm(x, (D_MODEL,), weights[f"{layer}.norm_1"])
            q, k, v = (
                (normed @ weights[f"{layer}.{name}"].mT).unflatten(-1, (N_HEADS, D_K)).transpose(1, 2)
                for name in ("W_q", "W_k", "W_v")
            )
            q, k = (
                rotate(part + weights[f"{layer}.{name}"].unflatten(0, (N_HEADS, 1, D_K)), angles)
                for part, name in ((q, "b_q"), (k, "b_k"))
            )
            self.k[layer].transpose(1, 2)[rows, places] = k.transpose(1, 2)
            self.v[layer].transpose(1, 2)[rows, places] = v.transpose(1, 2)
            logits = qk_product(q, self.k[layer, :, :, :reach]) / math.sqrt(D_K)
            mixed = context(softmax(mask_logits(logits, keep)), self.v[layer, :, :, :reach])
            x = x + mixed.transpose(1, 2).flatten(-2) @ weights[f"{layer}.W_o"].mT
            normed = layer_norm(x, (D_MODEL,), weights[f"{layer}.norm_2"])
            x = x + gelu(normed @ weights[f"{layer}.W_up"].mT) @ weights[f"{layer}.W_down"].mT
        self.length = self.length + n_new
        return layer_norm(x, (D_MODEL,), weights["norm"]) @ weights["embedding"].mT / math.sqrt(D_MODEL)


def _draft(
    params: Params, run: Run, tokens: torch.Tensor, length: torch.Tensor, u: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """gamma tokens for every text, and gamma + 1 distributions: what each was drawn from, and what would come next."""
    import torch

    texts = [row[:n] for row, n in zip(tokens.tolist(), length.tolist(), strict=True)]
    drafted, laws = [], []
    for i in range(params.gamma + 1):
        if params.draft == "lookup":
            found = torch.tensor([_looked_up(text, params.ngram_order) for text in texts], device=run.device)
            law = one_hot(found, u.new_zeros(1, corpus.N_TOKENS))
        else:
            counted = _ngram(params.ngram_order)
            rows = np.stack([counted.law(tuple(text[len(text) - params.ngram_order :])) for text in texts])
            law = torch.tensor(rows, dtype=torch.float32).to(run.device, run.dtype)
            law = with_temperature(law.log(), params.temperature)
        laws.append(law)
        if i < params.gamma:
            chosen = choose(law, u[:, i])
            drafted.append(chosen)
            for text, token in zip(texts, chosen.tolist(), strict=True):
                text.append(token)
    return torch.stack(drafted, dim=1), torch.stack(laws, dim=1)


def _looked_up(text: list[int], order: int) -> int:
    """What followed the last ``order`` tokens where they stood before, latest first; a space if they never did."""
    ending = text[len(text) - order :]
    for end in range(len(text) - 1, order - 1, -1):
        if text[end - order : end] == ending:
            return text[end]
    return corpus.encode(" ")[0]


class _NGram:
    """What follows the last tokens of a text in another one: each order's counts, with the lower order as if seen once.

    Probabilities are above 0, since the lowest order is the uniform distribution.
    """

    def __init__(self, tokens: list[int], order: int) -> None:
        self.counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for end in range(len(tokens)):
            for n in range(min(order, end) + 1):
                self.counts[tuple(tokens[end - n : end])][tokens[end]] += 1
        self.known: dict[tuple[int, ...], np.ndarray] = {}

    def law(self, before: tuple[int, ...]) -> np.ndarray:
        """Probability of each next token after ``before``. Shapes: (n_tokens,)."""
        if before not in self.known:
            row = self.law(before[1:]).copy() if before else np.full(corpus.N_TOKENS, 1 / corpus.N_TOKENS)
            seen = self.counts.get(before)
            if seen:
                for token, count in seen.items():
                    row[token] += count
            self.known[before] = row / row.sum()
        return self.known[before]


@functools.cache
def _ngram(order: int) -> _NGram:
    return _NGram(corpus.encode(next(corpus.stories(COUNTED_SEED, COUNTED))), order)


def _cache_error(
    params: Params,
    weights: Weights,
    tokens: torch.Tensor,
    length: torch.Tensor,
    origins: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> float:
    """The largest difference between a probability that was judged by and that of a plain pass over the same text."""
    error = 0.0
    for text in range(min(COMPARED, params.n_texts)):
        n = int(length[text])
        plain = with_temperature(forward_fast(weights, tokens[text : text + 1, :n]), params.temperature)[0]
        for places, valid, p in origins:
            at = places[text][valid[text]] - 1  # a token's distribution stands at the one before it
            error = max(error, float((p[text][valid[text]] - plain[at]).abs().max()))
    return error


def _histogram(shared: np.ndarray) -> Table:
    counts, edges = np.histogram(shared, bins=BINS, range=(0, 1 + 1e-6))
    return {"overlap": (edges[:-1] + edges[1:]) / 2, "share": counts / len(shared)}


def _by_depth(kept: np.ndarray, gamma: int, alpha: float) -> Table:
    """Share of the rounds whose first i drafts are all kept."""
    depth = np.arange(1, gamma + 1)
    return {
        "depth": depth,
        "reached_share": np.array([(kept >= i).mean() for i in depth]),
        "formula_share": alpha**depth,
    }
