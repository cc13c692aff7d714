r"""How much the tokens of a text resemble each other inside a trained model: what BatchNorm would take its means from.

The little language model (engine/language_model.py) reads texts; what goes into each of its norms is kept. Of each
feature the variance is split into that between texts and that within them. With B texts of n tokens, :math:`M_b` being
n times the variance of the texts' means and :math:`M_w` the variance within texts, the share common to a text is

.. math:: \rho=\frac{M_b-M_w}{M_b+(n-1)M_w}

and the mean over all Bn tokens spreads as that of fewer independent ones would: Bn times the variance of the tokens
over :math:`M_b`. The model itself was trained with LayerNorm; this says what a batch's means would have been like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, choice, number
from engine.inputs import draw_texts
from engine.language_model import D_FF, D_MODEL, N_HEADS, N_LAYERS, Trace, Weights, forward, load_weights, shapes

if TYPE_CHECKING:
    import torch

N_NORMS = 2 * N_LAYERS + 1


@dataclass(frozen=True)
class Params(BaseParams):
    source: str = choice("repeats", "stories")
    n_texts: int = number(16, low=4, high=64, log2=True)
    seq_len: int = number(64, low=16, high=128, log2=True)


METRICS = (
    Metric("independent_tokens"),
    Metric("tokens_in_batch"),
    Metric("text_share_found"),
    Metric("text_share_found_max"),
    Metric("token_size_ratio"),
)
PLOTS = (Plot("shares", table="by_norm", x="norm_number", y="text_share_found", by="source", mark="point"),)
BUDGET_S = 0.2

TOKENS_AT_ONCE = 512  # of the texts in one pass: some 20 ms


def memory_bytes(params: Params) -> int:
    """One pass with its trace, what goes into all norms, and the model."""
    tokens = params.n_texts * params.seq_len
    one_pass = max(params.seq_len, TOKENS_AT_ONCE) * (
        12 * N_HEADS * params.seq_len * N_LAYERS + 40 * D_MODEL + 3 * D_FF
    )
    model = sum(int(np.prod(shape)) for shape in shapes().values())
    return 4 * (one_pass + model) + 8 * tokens * D_MODEL * (2 * N_NORMS + 6)


def run(params: Params, run: Run) -> Result:
    """Read texts that no training saw, and split the variance of what goes into each norm.

    ``text_share_found``: share of a feature's variance that the tokens of a text have in common, mean over features and
    norms, and ``text_share_found_max`` that of the norm with the largest. ``independent_tokens``: tokens over the mean
    factor by which the variance of a batch's mean is larger than with independent tokens. ``token_size_ratio``: the
    longest over the shortest token vector that goes into the last norm.
    """
    weights = load_weights(run.device, run.dtype)
    tokens = draw_texts(run, params.source, params.n_texts, params.seq_len).tokens
    inputs = _norm_inputs(weights, tokens, run)
    shares, factors = np.array([_split(x) for x in inputs]).T
    lengths = inputs[-1].norm(dim=-1)
    metrics = {
        "independent_tokens": tokens.numel() / factors.mean(),
        "tokens_in_batch": tokens.numel(),
        "text_share_found": shares.mean(),
        "text_share_found_max": shares.max(),
        "token_size_ratio": lengths.max() / lengths.min(),
    }
    table = {
        "norm_number": np.arange(1, N_NORMS + 1),
        "source": np.repeat(params.source, N_NORMS),
        "text_share_found": shares,
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"by_norm": table})


def _norm_inputs(weights: Weights, tokens: torch.Tensor, run: Run) -> list[torch.Tensor]:
    """What goes into each norm, in float64 on the CPU.

    Shapes: tokens (n_texts, seq_len); returns (n_texts, seq_len, D_MODEL), one for each norm.
    """
    import torch

    parts = []
    chunks = tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1]))
    for number_of, chunk in enumerate(chunks):
        run.progress(number_of / len(chunks))
        parts.append([x.cpu().double() for x in _stream(weights, chunk)])
    return [torch.cat(of_norm) for of_norm in zip(*parts, strict=True)]


def _stream(weights: Weights, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The stream before each norm, built up again from the contexts that a pass leaves behind."""
    from torch.nn.functional import gelu, layer_norm

    trace = Trace()
    forward(weights, tokens, trace=trace)
    x = weights["embedding"][tokens]
    stream = [x]
    for layer, mixed in enumerate(trace.context):
        x = x + mixed.transpose(-3, -2).flatten(-2) @ weights[f"{layer}.W_o"].mT
        stream.append(x)
        normed = layer_norm(x, (D_MODEL,), weights[f"{layer}.norm_2"])
        x = x + gelu(normed @ weights[f"{layer}.W_up"].mT) @ weights[f"{layer}.W_down"].mT
        stream.append(x)
    return stream


def _split(x: torch.Tensor) -> tuple[float, float]:
    """Share common to a text, and the factor on the variance of the mean; means over features.

    Shapes: x (n_texts, seq_len, D_MODEL).
    """
    n_texts, seq_len, _ = x.shape
    means = x.mean(dim=1, keepdim=True)
    between = seq_len * (means - means.mean(dim=0)).square().sum(dim=(0, 1)) / (n_texts - 1)
    within = (x - means).square().sum(dim=(0, 1)) / (n_texts * (seq_len - 1))
    share = (between - within) / (between + (seq_len - 1) * within)
    return share.mean().item(), (between / x.flatten(0, 1).var(dim=0)).mean().item()
