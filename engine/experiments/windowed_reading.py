"""A model trained with full attention, read through a sliding window: what its losses say about what it lost.

Our language model (engine/language_model.py) was never trained with a window. Held-out texts are read twice, once as it
was trained and once with every layer's queries seeing only the last ``window`` keys, their own among them, and, if
asked for, the first ``first_tokens_kept`` keys of the text as well. Losses are those of the second half of each text.

In a string that repeats, a token can be known only from the place where it followed last time: a ``repeat_period``
less one back. Stories hold their facts at all distances.

``first_token_weight`` says whether the model has an attention sink at its first token, the reason for which many
published models break when that token leaves the window (xiao2023).

Sources: xiao2023, abstract (window attention, and the first tokens kept beside the window).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import attention as reference
from engine import corpus, inputs, language_model
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.decoding import KVCache, extend, norm
from engine.masks import keep_causal, keep_window

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    source: str = choice("stories", "repeats")
    repeat_period: int = number(24, low=2, high=48)
    window: int = number(32, low=1, high=128)
    first_tokens_kept: int = number(0, low=0, high=16)
    n_texts: int = number(2, low=1, high=64, log2=True)

    def unread(self) -> frozenset[str]:
        return frozenset({"repeat_period"} if self.source == "stories" else set())


METRICS = (
    Metric("windowed_loss_nats", "nats"),
    Metric("whole_loss_nats", "nats"),
    Metric("window_loss_added_nats", "nats"),
    Metric("first_token_weight"),
    Metric("beyond_window_weight"),
)
PLOTS = (
    Plot("by_place", table="by_place", x="position", y="loss_nats", by="attention_span", y_unit="nats"),
    Plot("by_distance", table="by_distance", x="tokens_back", y="mean_weight", by="layer"),
)
BUDGET_S = 0.2

TEXTS_AT_ONCE = 2  # some 15 ms for both passes
BIN = 8  # places of the text that share a point of the chart
SPANS = ("whole_text", "window_only")


def memory_bytes(params: Params) -> int:
    """The weights, and of a chunk the activations, and the logits and weights of a layer."""
    n, seq_len = min(params.n_texts, TEXTS_AT_ONCE), language_model.SEQ_LEN
    attention = 10 * language_model.N_HEADS * n * seq_len**2
    activations = n * seq_len * (40 * language_model.D_MODEL + 3 * language_model.D_FF)
    return 8 * (700_000 + attention + activations) + 64 * params.n_texts * seq_len


def run(params: Params, run: Run) -> Result:
    """Read all texts in both ways.

    ``window_loss_added_nats``: the windowed loss less that of the whole text. ``first_token_weight`` and
    ``beyond_window_weight``: in the pass over the whole text, what queries of the second half give to the first token,
    and to all keys that the window hides, as a mean over heads and layers.
    """
    import torch

    weights = language_model.load_weights(run.device, run.dtype)
    tokens = _texts(params, run)
    keeps = dict(zip(SPANS, _keeps(params, run), strict=True))
    losses: dict[str, list[np.ndarray]] = {span: [] for span in SPANS}
    rows: list[torch.Tensor] = []  # for each chunk (n_layers, n, half, seq_len), the mean over heads
    with torch.inference_mode():
        for start in range(0, params.n_texts, TEXTS_AT_ONCE):
            run.progress(start / params.n_texts)
            some = tokens[start : start + TEXTS_AT_ONCE]
            for span, keep in keeps.items():
                token_logits, seen = _read(weights, some, keep)
                losses[span].append(language_model.token_losses(token_logits, some).cpu().double().numpy())
                if span == "whole_text":
                    rows.append(seen)
    mean_rows = torch.cat(rows, dim=1).mean(dim=1)  # (n_layers, half, seq_len)
    by_token = {span: np.concatenate(found).mean(axis=0) for span, found in losses.items()}
    half = language_model.SEQ_LEN // 2
    whole, windowed = (float(by_token[span][half - 1 :].mean()) for span in SPANS)
    hidden = ~keeps["window_only"][-half:].cpu()
    metrics = {
        "windowed_loss_nats": windowed,
        "whole_loss_nats": whole,
        "window_loss_added_nats": windowed - whole,
        "first_token_weight": float(mean_rows[..., 0].mean()),
        "beyond_window_weight": float((mean_rows * hidden).sum(dim=-1).mean()),
    }
    return Result(metrics, {"by_place": _by_place(by_token), "by_distance": _by_distance(mean_rows)})


def _texts(params: Params, run: Run) -> torch.Tensor:
    """Held-out texts. Shapes: (n_texts, seq_len) of int64."""
    import torch

    if params.source == "stories":
        return inputs.draw_texts(run, "stories", params.n_texts, language_model.SEQ_LEN).tokens
    seed = inputs.LOWEST_SEED + int(torch.randint(2**62, (1,), generator=run.generator))
    drawn = corpus.repeats(seed, language_model.SEQ_LEN, period=params.repeat_period)
    encoded = [corpus.encode(text) for text, _ in itertools.islice(drawn, params.n_texts)]
    return torch.tensor(encoded, device=run.device)


def _keeps(params: Params, run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries see of the whole text, and through the window. Shapes: (seq_len, seq_len) each."""
    import torch

    n = language_model.SEQ_LEN
    causal = keep_causal(n, device=run.device)
    first = torch.arange(n, device=run.device) < params.first_tokens_kept
    return causal, keep_window(n, window=params.window, device=run.device) | (causal & first)


def _read(
    weights: language_model.Weights, tokens: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token logits under a keep-mask, and the attention weights of the second half of the queries, meaned over heads.

    Shapes: tokens (batch, seq_len); (batch, seq_len, n_tokens) and (n_layers, batch, seq_len / 2, seq_len), float64.
    """
    import torch

    names = {name.split(".")[1] for name in weights if "." in name}
    layers = [{name: weights[f"{number}.{name}"] for name in names} for number in range(language_model.N_LAYERS)]
    seen = []

    def attend(
        _: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, keep: torch.Tensor | None
    ) -> torch.Tensor:
        assert keep is not None
        row = reference.softmax(reference.mask_logits(reference.attention_logits(q, keys), keep))
        seen.append(row[:, :, tokens.shape[1] // 2 :].mean(dim=1).cpu().double())
        return reference.context(row, values)

    x = extend(
        layers,
        weights["embedding"][tokens],
        KVCache(language_model.N_LAYERS),
        n_heads=language_model.N_HEADS,
        mask=lambda q_len, kv_len: keep,
        attend=attend,
    )
    token_logits = norm(x, weights["norm"]) @ weights["embedding"].mT / language_model.D_MODEL**0.5
    return token_logits, torch.stack(seen)


def _by_place(by_token: dict[str, np.ndarray]) -> Table:
    """The mean loss of BIN neighbouring tokens; the first token of a text has none."""
    starts = np.arange(0, language_model.SEQ_LEN - 1, BIN)
    return {
        "position": np.tile(starts + BIN // 2, len(SPANS)),
        "attention_span": np.repeat(SPANS, len(starts)),
        "loss_nats": np.concatenate(
            [[by_token[span][start : start + BIN].mean() for start in starts] for span in SPANS]
        ),
    }


def _by_distance(mean_rows: torch.Tensor) -> Table:
    """What the queries of the second half give to each distance that all of them have behind them, for each layer."""
    n_layers, half, seq_len = mean_rows.shape
    sums = np.zeros((n_layers, seq_len - half))
    for row in range(half):
        last = half + row
        sums += mean_rows[:, row, last - (seq_len - half) + 1 : last + 1].flip(-1).numpy()
    back = np.arange(seq_len - half)
    return {
        "tokens_back": np.tile(back, n_layers),
        "layer": np.repeat([f"L{n}" for n in range(n_layers)], len(back)),
        "mean_weight": (sums / half).flatten(),
    }
