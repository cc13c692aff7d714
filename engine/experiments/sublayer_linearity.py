r"""What an attention layer and a feed-forward network can make of the same tokens: who reaches whom, and which span.

One layer of each, without residual path and norms, on tokens x drawn in a subspace of ``token_rank`` dimensions:

    attention   out_i = Σ_h Σ_j w_ij^h (W_o^h W_v^h) x_j,   w = softmax(q·k/√d_k)
    ffn         out_i = W_down φ(W_up x_i)

Three questions to both. From which tokens does an output get a gradient? Is the map additive, f(x + y) = f(x) + f(y):
as it is, and with the weights w kept as they were for x? Which rank has the matrix of all outputs? Whatever the
weights, each head mixes vectors that a fixed matrix made of tokens, so attention's outputs lie in
``n_heads`` · ``token_rank`` dimensions. φ acts on every hidden unit, and nothing of the kind bounds what it returns.

``norm_in_front``: none; over the features of each token, as LayerNorm without gain and bias; or over tokens, feature
by feature, as BatchNorm does in training: that one lets tokens meet, whatever stands behind it.

Everything is computed in float64 on the CPU, as ranks are counted: singular values above max(shape) · 2.2e-16 of the
largest, as in numpy's ``matrix_rank``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, context, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    token_rank: int = number(4, low=1, high=64, log2=True)
    seq_len: int = number(32, low=1, high=64, log2=True)
    d_model: int = number(32, low=8, high=64, log2=True)
    n_heads: int = number(2, low=1, high=8, log2=True)
    causal: bool = flag(False)
    d_ff: int = number(128, low=1, high=512, log2=True)
    unit_function: str = choice("gelu_unit", "relu_unit", "linear_unit")
    norm_in_front: str = choice("norm_none", "norm_by_token", "norm_over_tokens")

    def rules(self) -> Iterator[Problem]:
        if self.token_rank > self.d_model:
            values = {"d_model": self.d_model}
            yield Problem("rule", "token_rank", self.token_rank, rule="token_rank_fits_width", values=values)
        if self.norm_in_front == "norm_over_tokens" and self.seq_len == 1:  # all would be 0
            yield Problem("rule", "seq_len", self.seq_len, rule="norm_wants_tokens")


SUBLAYERS = ("attention_sublayer", "ffn_sublayer")

METRICS = (
    Metric("attention_other_influence"),
    Metric("ffn_other_influence"),
    Metric("attention_additivity_error"),
    Metric("frozen_additivity_error"),
    Metric("ffn_additivity_error"),
    Metric("tokens_rank"),
    Metric("attention_out_rank"),
    Metric("ffn_out_rank"),
)
PLOTS = (
    Plot("spectrum", table="spectrum", x="singular_index", y="singular_share", by="sublayer", y_scale="log10"),
    Plot(
        "influence",
        table="influence",
        x="input_token",
        y="output_token",
        value="influence_share",
        mark="heat",
        facet="sublayer",
    ),
)
BUDGET_S = 0.1

N_SHOWN = 12  # tokens of the map of influence
DRAWN_FLOOR = 1e-18  # smaller shares, which are rounding, are drawn here: a logarithmic axis has no 0
TINY = 1e-300  # a share of nothing at all, as behind dead units, is 0

_Map = Callable[["torch.Tensor"], "torch.Tensor"]


def memory_bytes(params: Params) -> int:
    """A copy of the tokens for each output, through both layers and back, and the weights of the layers."""
    copies = params.seq_len**2 * (10 * params.d_model + 2 * params.d_ff)
    rows = 4 * params.n_heads * params.seq_len**3
    return 8 * (4 * (copies + rows) + 4 * params.d_model * (4 * params.d_model + 2 * params.d_ff)) + 2**20


def run(params: Params, run: Run) -> Result:
    """Draw tokens and one layer of each kind, and put the three questions to both.

    ``*_other_influence``: share of the squared gradient of an output that falls on other tokens than its own.
    ``*_additivity_error``: ‖f(x + y) - f(x) - f(y)‖ / ‖f(x + y)‖, y drawn as x is.

    Shapes: x, y and the outputs (seq_len, d_model).
    """
    import torch

    def drawn(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double()

    width, heads = params.d_model, params.n_heads
    basis = drawn(params.token_rank, width) / math.sqrt(params.token_rank)
    x, y = (drawn(params.seq_len, params.token_rank) @ basis for _ in range(2))
    probes = drawn(params.seq_len, width)
    W_q, W_k, W_v = (drawn(heads, width // heads, width) / math.sqrt(width) for _ in range(3))
    W_o = drawn(heads, width, width // heads) / math.sqrt(width)
    W_up = drawn(params.d_ff, width) / math.sqrt(width)
    W_down = drawn(width, params.d_ff) / math.sqrt(params.d_ff)
    keep = torch.ones(params.seq_len, params.seq_len, dtype=torch.bool)
    keep = keep.tril() if params.causal else keep

    def normed(x: torch.Tensor) -> torch.Tensor:
        return _norm(x, params.norm_in_front)

    def rows(x: torch.Tensor) -> torch.Tensor:  # (..., n_heads, seq_len, seq_len)
        x = normed(x).unsqueeze(-3)
        return softmax(attention_logits(x @ W_q.mT, x @ W_k.mT).masked_fill(~keep, -math.inf))

    def mix(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (context(weights, normed(x).unsqueeze(-3) @ W_v.mT) @ W_o.mT).sum(dim=-3)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return mix(rows(x), x)

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        return _unit(normed(x) @ W_up.mT, params.unit_function) @ W_down.mT

    frozen = rows(x)
    layers = dict(zip(SUBLAYERS, (attend, feed_forward), strict=True))
    influences, spectra, errors = {}, {}, {}
    for number_of, (name, layer) in enumerate(layers.items()):
        run.progress(number_of / len(layers))
        influences[name] = _influence(layer, x, probes)
        run.progress((number_of + 0.5) / len(layers))
        spectra[name] = torch.linalg.svdvals(layer(x))
        errors[name] = _additivity_error(layer, x, y)
    attention, ffn = SUBLAYERS
    metrics = {
        "attention_other_influence": _from_others(influences[attention]),
        "ffn_other_influence": _from_others(influences[ffn]),
        "attention_additivity_error": errors[attention],
        "frozen_additivity_error": _additivity_error(lambda x: mix(frozen, x), x, y),
        "ffn_additivity_error": errors[ffn],
        "tokens_rank": _rank(torch.linalg.svdvals(x), max(x.shape)),
        "attention_out_rank": _rank(spectra[attention], max(x.shape)),
        "ffn_out_rank": _rank(spectra[ffn], max(x.shape)),
    }
    tables = {"spectrum": _spectrum_table(spectra), "influence": _influence_table(influences)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _norm(x: torch.Tensor, norm: str) -> torch.Tensor:
    if norm == "norm_none":
        return x
    along = -1 if norm == "norm_by_token" else -2
    centred = x - x.mean(dim=along, keepdim=True)
    return centred / (centred.square().mean(dim=along, keepdim=True) + 1e-5).sqrt()


def _unit(hidden: torch.Tensor, unit_function: str) -> torch.Tensor:
    from torch.nn.functional import gelu, relu

    if unit_function == "linear_unit":
        return hidden
    return gelu(hidden) if unit_function == "gelu_unit" else relu(hidden)


def _influence(layer: _Map, x: torch.Tensor, probes: torch.Tensor) -> torch.Tensor:
    """Squared norm of the gradient of a random combination of output i's coordinates with respect to token j.

    Each output has a copy of the sequence of its own, so one backward pass serves all. Shapes: returns (i, j).
    """
    import torch

    copies = x.expand(len(x), -1, -1).clone().requires_grad_()
    outs = layer(copies).diagonal(dim1=0, dim2=1).mT  # (i, d_model): output i of copy i
    (gradient,) = torch.autograd.grad((outs * probes).sum(), copies)
    return gradient.square().sum(dim=-1)


def _from_others(influence: torch.Tensor) -> torch.Tensor:
    import torch

    own = torch.eye(len(influence), dtype=torch.bool)
    return influence.masked_fill(own, 0).sum() / influence.sum().clamp_min(TINY)


def _additivity_error(layer: _Map, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    import torch

    whole = layer(x + y)
    off = (whole - layer(x) - layer(y)).norm()
    return torch.where(off == 0, off, off / whole.norm())


def _rank(singular: torch.Tensor, longer: int) -> int:
    import torch

    return int((singular > longer * torch.finfo(singular.dtype).eps * singular[0]).sum())


def _spectrum_table(spectra: dict[str, torch.Tensor]) -> Table:
    n_values = len(next(iter(spectra.values())))
    return {
        "sublayer": np.repeat(list(spectra), n_values),
        "singular_index": np.tile(np.arange(1, n_values + 1), len(spectra)),
        "singular_share": np.concatenate(
            [(s / s[0].clamp_min(TINY)).clamp_min(DRAWN_FLOOR).numpy() for s in spectra.values()]
        ),
    }


def _influence_table(influences: dict[str, torch.Tensor]) -> Table:
    """Of the first tokens, each output's shares."""
    sums = {name: i.sum(dim=-1, keepdim=True).clamp_min(TINY) for name, i in influences.items()}
    shares = [(i / sums[name])[:N_SHOWN, :N_SHOWN].numpy() for name, i in influences.items()]
    outputs, inputs = np.indices(shares[0].shape)
    return {
        "sublayer": np.repeat(list(influences), outputs.size),
        "output_token": np.tile(outputs.ravel(), len(shares)),
        "input_token": np.tile(inputs.ravel(), len(shares)),
        "influence_share": np.concatenate([s.ravel() for s in shares]).astype(np.float32),
    }
