r"""How far training has spread q·k, head by head, and what the loss says to another scale than the trained one.

The trained language model reads held-out texts with its scale 1/√d_k multiplied by a factor, and nothing else changed.
Factor √d_k is no scale at all, 1/√d_k makes 1/d_k of it. The loss shows which scale the weights have grown around, not
that a model trained with another one would be worse: W_q could have taken up any factor. Nor need it rise on both
sides: heads that have become sharp lose little when they are made sharper.

Spread is that within a row, which is all that the softmax sees: a number added to a whole row changes no weight. Beside
each head stand independent normal vectors with the norms that its q and k have at each place; what differs from them
training has done by directions, not by lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import corpus, inputs, language_model
from engine.attention import entropy_nats, mask_logits, qk_product, softmax, unit_norm
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number, text
from engine.chunks import chunks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    source: str = choice(*inputs.SOURCES)
    text: str = text(inputs.EXAMPLE, most=inputs.LONGEST)
    scale: str = choice("as_trained", "none", "factor")
    factor: float = number(1.0, low=0.0625, high=8, step=0.0625)
    n_texts: int = number(4, low=1, high=16, log2=True)
    seq_len: int = number(128, low=2 * corpus.REPEATED[1], high=language_model.SEQ_LEN, log2=True)

    def rules(self) -> Iterator[Problem]:
        yield from inputs.too_short(self.source, self.text)

    def unread(self) -> frozenset[str]:
        return inputs.unread(self.source) | ({"factor"} if self.scale != "factor" else set())


METRICS = (
    Metric("loss_nats", "nats"),
    Metric("loss_as_trained_nats", "nats"),
    Metric("best_factor"),
    Metric("qk_std_mean"),
    Metric("logits_std_mean"),
    Metric("synthetic_logits_std_mean"),
    Metric("entropy_share_mean"),
    Metric("synthetic_entropy_share_mean"),
    Metric("weight_max_mean"),
    Metric("synthetic_weight_max_mean"),
    Metric("n_unknown"),
)
PLOTS = (
    Plot("loss", table="by_factor", x="factor", y="loss_nats", x_scale="log2", y_unit="nats"),
    Plot("spread", table="by_head", mark="bar", x="head", y="logits_std", by="vectors"),
    Plot("entropy", table="by_head", mark="point", x="head", y="entropy_share", by="vectors"),
)
BUDGET_S = 0.2

N_ALL = len(language_model.HEADS)  # heads of all layers
ROOT = math.sqrt(language_model.D_K)
FACTORS = tuple(ROOT ** (step / 5) for step in range(-5, 6))  # from 1/d_k to no scale; powers of √2
TOKENS_AT_ONCE = 512  # some 30 ms a pass


def memory_bytes(params: Params) -> int:
    """The weights, and one pass: its token logits and hidden units, and the logits and weights of every layer."""
    n_texts, seq_len = _size(params)
    n = min(n_texts, max(1, TOKENS_AT_ONCE // seq_len))
    attention = (2 * language_model.N_LAYERS + 8) * language_model.N_HEADS * n * seq_len**2
    return 4 * (700_000 + n * seq_len * (24 * language_model.D_MODEL + 3 * language_model.D_FF) + attention)


def run(params: Params, run: Run) -> Result:
    """Read the texts at every factor; at the chosen one describe the rows of each head, and those of vectors like them.

    Shapes: (n_texts, seq_len) tokens, in chunks; per head all is summed over texts and rows.
    """
    import torch

    weights = language_model.load_weights(run.device, run.dtype)
    texts = inputs.read_texts(run, params.source, params.text, *_size(params))
    chosen = {"as_trained": 1.0, "none": ROOT, "factor": params.factor}[params.scale]
    factors = sorted({*FACTORS, chosen})
    losses = dict.fromkeys(factors, 0.0)
    rows = {"trained": np.zeros((5, N_ALL)), "synthetic": np.zeros((5, N_ALL))}
    n_texts, seq_len = texts.tokens.shape
    keep = torch.ones(seq_len, seq_len, dtype=torch.bool, device=run.device).tril()
    with torch.inference_mode():
        for start, n in chunks(n_texts, max(1, TOKENS_AT_ONCE // seq_len)):
            some = inputs.Texts(texts.tokens[start : start + n], texts.period[start : start + n])
            for i, factor in enumerate(factors):
                run.progress((start + n * i / len(factors)) / n_texts)
                trace = language_model.Trace()
                if factor == chosen:
                    token_logits = language_model.forward(weights, some.tokens, factor=factor, trace=trace)
                else:
                    token_logits = language_model.forward_fast(weights, some.tokens, factor=factor)
                losses[factor] += float(language_model.token_losses(token_logits, some.tokens)[some.known()].sum())
                if factor == chosen:
                    rows["trained"] += _per_head([_describe(logits, keep) for logits in trace.logits])
                    alike = [_alike(q, k, run) for q, k in zip(trace.q, trace.k, strict=True)]
                    scale = factor / ROOT
                    rows["synthetic"] += _per_head([_describe(qk * scale, keep) for qk in alike])

    n_known = int(texts.known().sum())
    losses = {factor: loss / n_known for factor, loss in losses.items()}
    heads = {vectors: _means(sums) for vectors, sums in rows.items()}
    trained, synthetic = heads["trained"], heads["synthetic"]
    metrics = {
        "loss_nats": losses[chosen],
        "loss_as_trained_nats": losses[1.0],
        "best_factor": min(losses, key=losses.__getitem__),
        "qk_std_mean": float(trained["logits_std"].mean()) * ROOT / chosen,
        "logits_std_mean": float(trained["logits_std"].mean()),
        "synthetic_logits_std_mean": float(synthetic["logits_std"].mean()),
        "entropy_share_mean": float(trained["entropy_share"].mean()),
        "synthetic_entropy_share_mean": float(synthetic["entropy_share"].mean()),
        "weight_max_mean": float(trained["weight_max"].mean()),
        "synthetic_weight_max_mean": float(synthetic["weight_max"].mean()),
        "n_unknown": float(inputs.n_unknown(params.source, params.text)),
    }
    by_factor = {"factor": np.array(list(losses)), "loss_nats": np.array(list(losses.values()))}
    by_head = {
        "head": np.array(language_model.HEADS * 2),
        "vectors": np.repeat(list(heads), N_ALL),
        **{name: np.concatenate([trained[name], synthetic[name]]) for name in trained},
    }
    return Result(metrics, {"by_factor": by_factor, "by_head": by_head})


def _size(params: Params) -> tuple[int, int]:
    """Number and length of the texts."""
    return (1, len(params.text)) if params.source == "text" else (params.n_texts, params.seq_len)


def _alike(q: torch.Tensor, k: torch.Tensor, run: Run) -> torch.Tensor:
    """q·k of independent normal directions with the norms of ``q`` and ``k``. Shapes: as of the product."""
    drawn_q, drawn_k = (unit_norm(run.randn(*x.shape)) * x.norm(dim=-1, keepdim=True) for x in (q, k))
    return qk_product(drawn_q, drawn_k)


def _describe(logits: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Sums over texts and rows of two or more keys, for each head.

    Squared deviations from the row's mean, their degrees of freedom, entropy as a share of ln n, largest weight, rows.
    Shapes: logits (n_texts, n_heads, seq_len, seq_len); returns (5, n_heads).
    """
    import torch

    n_keys = keep.sum(dim=-1, keepdim=True)
    centre = logits.masked_fill(~keep, 0.0).sum(dim=-1, keepdim=True) / n_keys
    squares = (logits - centre).masked_fill(~keep, 0.0).square().sum(dim=-1)
    weights = softmax(mask_logits(logits, keep))
    several = n_keys[1:, 0]  # the first row has one key
    share = entropy_nats(weights)[..., 1:] / several.to(logits.dtype).log()
    largest = weights.amax(dim=-1)[..., 1:]
    of_rows = (squares[..., 1:], (several - 1).expand_as(share), share, largest, torch.ones_like(share))
    return torch.stack([x.to(logits.dtype).sum(dim=(0, 2)) for x in of_rows])


def _per_head(layers: list[torch.Tensor]) -> np.ndarray:
    """One layer's heads after the other's. Shapes: (5, n_heads) each to (5, n_layers · n_heads), float64."""
    return np.concatenate([layer.cpu().double().numpy() for layer in layers], axis=1)


def _means(sums: np.ndarray) -> dict[str, np.ndarray]:
    """What the sums of :func:`_describe` say of each head."""
    squares, freedom, share, largest, n_rows = sums
    return {
        "logits_std": np.sqrt(squares / freedom),
        "entropy_share": share / n_rows,
        "weight_max": largest / n_rows,
    }
