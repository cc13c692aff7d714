r"""Which tokens each output depends on: the gradient of every position with respect to every input, and overwriting.

A stack of attention layers with a residual stream; everything but attention works on each position by itself, so
only attention, and the choice of an expert (below), can carry one token to another position. One mask, applied in one
of four ways:

``minus_inf``           the hidden logits become -inf before the softmax
``times_zero``          the hidden logits are multiplied by 0 before the softmax, and exp 0 = 1
``after_softmax``       the hidden weights are multiplied by 0: the values are gone, the denominator has seen the keys
``after_renormalized``  and the rows are divided by their sums, which is ``minus_inf`` again but for the rounding

Row t, column s of the *gradient* map is :math:`\|\partial(g^\top\mathrm{out}_t)/\partial x_s\|` for one random g; of
the *overwritten* map it is the largest change of out_t when x_s is replaced by another token. The first costs one
backward pass and sees nothing that passes through a choice: with ``expert_choice`` the half of the tokens with the
highest scores goes through an expert, and which half that is depends on all tokens.

Sources: vaswani2017, section 3.2.3; flaxformer-code, ``ExpertsChooseMaskedRouter``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, context, mask_logits, row_norm, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.masks import keep_causal, keep_named

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    seq_len: int = number(12, low=2, high=48)
    mask: str = choice("causal", "no_mask", "strict", "one_ahead", "prefix", "window", "documents")
    applied: str = choice("minus_inf", "times_zero", "after_softmax", "after_renormalized")
    n_layers: int = number(1, low=1, high=6)
    in_layers: str = choice("all_layers", "first_layer", "last_layer")
    prefix_tokens: int = number(4, low=1, high=48)
    window: int = number(4, low=1, high=48)
    document_len: int = number(6, low=1, high=48)
    expert_choice: bool = flag(False)
    d_model: int = number(16, low=2, high=64, log2=True)

    def unread(self) -> frozenset[str]:
        of_masks = {"prefix": "prefix_tokens", "window": "window", "documents": "document_len"}
        idle = {field for mask, field in of_masks.items() if mask != self.mask}
        return frozenset(idle | ({"in_layers"} if self.n_layers == 1 else set()))

    def rules(self) -> Iterator[Problem]:
        numbers = self.seq_len**2 * self.d_model * self.n_layers
        if numbers > MAX_NUMBERS:
            values = {"numbers": numbers, "limit": MAX_NUMBERS}
            yield Problem("rule", "n_layers", self.n_layers, rule="too_large_a_leak_map", values=values)


METRICS = (
    Metric("future_gradient_max"),
    Metric("future_change_max"),
    Metric("future_weight_max"),
    Metric("seen_gradient_min"),
    Metric("n_future_pairs"),
    Metric("reach_ahead"),
    Metric("reach_back"),
    Metric("row_sum_min"),
    Metric("kept_share"),
    Metric("empty_rows"),
    Metric("passes_difference"),
    Metric("nan_rows"),
)
PLOTS = (
    Plot("gradient", table="pairs", mark="heat", x="input_position", y="output_position", value="gradient_log10"),
    Plot("overwritten", table="pairs", mark="heat", x="input_position", y="output_position", value="change_log10"),
)
BUDGET_S = 0.05

MAX_NUMBERS = 2**19  # in the residual streams of all copies of the sequence, all layers together
FLOOR, ZERO = -8, -9  # of the maps: what is smaller than 1e-8, and what is exactly 0


def memory_bytes(params: Params) -> int:
    """A copy of the sequence for each position, with what autograd keeps of every layer, forward and back."""
    a_copy = params.seq_len * (12 * params.d_model + 10 * params.seq_len)
    return 4 * 3 * params.seq_len * (params.n_layers + 2) * a_copy + 64 * params.seq_len**2


def run(params: Params, run: Run) -> Result:
    """Both maps of one random stack, and what the mask makes of the weights of the first layer that has it.

    ``future_gradient_max``, ``future_change_max``: the largest entry of a map with s > t; ``seen_gradient_min``: the
    smallest with s <= t. ``n_future_pairs``: entries of the gradient map with s > t that are not exactly 0;
    ``reach_ahead``, ``reach_back``: the farthest s - t, and t - s, that is not exactly 0. ``future_weight_max``,
    ``row_sum_min``: the largest weight of a row on later keys, and the smallest sum of a row; rows without any key are
    left out, their context counts as zero. ``passes_difference``: largest difference between one pass over the
    sequence and a pass over each prefix, of which the last output is taken. ``nan_rows``: positions before the last
    whose output is NaN when the last token is.

    Shapes: x (seq_len, d_model); a copy for each position is the batch.
    """
    import torch

    n, stack = params.seq_len, _Stack(params, run)
    x, other, g = run.randn(n, params.d_model), run.randn(n, params.d_model), run.randn(params.d_model)
    each = torch.arange(n, device=run.device)

    copies = x.repeat(n, 1, 1).requires_grad_()  # copy t is differentiated at its output t
    out = stack(copies)
    full = stack.keep.any(dim=-1)  # rows that see anything
    weights = stack.first_weights[0][full]
    run.progress(0.2)
    (slopes,) = torch.autograd.grad((out[each, each] @ g).sum(), copies)
    gradient = row_norm(slopes)  # (t, s)
    out = out.detach()
    run.progress(0.5)
    with torch.no_grad():
        overwritten = x.repeat(n, 1, 1)  # in copy s token s is replaced
        overwritten[each, each] = other
        change = (stack(overwritten) - out).abs().amax(dim=-1).T  # (t, s)
        passes = torch.stack([stack(x[None, : t + 1])[0, -1] for t in range(n)])
        run.progress(0.8)
        x[-1] = math.nan
        nan_rows = stack(x[None])[0, :-1].isnan().any(dim=-1).sum()

    future = ~keep_causal(n, device=run.device)
    leaks = future & (gradient != 0)
    distance = each[None, :] - each[:, None]  # s - t
    metrics = {
        "future_gradient_max": gradient[future].max(),
        "future_change_max": change[future].max(),
        "future_weight_max": (weights * future[full]).sum(dim=-1).max(),
        "seen_gradient_min": gradient[~future].min(),
        "n_future_pairs": leaks.sum(),
        "reach_ahead": (distance * leaks).max(),
        "reach_back": (-distance * (gradient != 0)).max(),
        "row_sum_min": weights.sum(dim=-1).min(),
        "kept_share": stack.keep.sum().item() / stack.keep.numel(),
        "empty_rows": n - full.sum(),
        "passes_difference": (passes - out[0]).abs().max(),
        "nan_rows": nan_rows,
    }
    table: Table = {
        "output_position": np.repeat(np.arange(n), n),
        "input_position": np.tile(np.arange(n), n),
        "gradient_log10": _log10(gradient),
        "change_log10": _log10(change),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"pairs": table})


class _Stack:
    """Attention layers, and an expert behind each if wanted, with their random weights; called on a batch."""

    def __init__(self, params: Params, run: Run) -> None:
        self.params = params
        self.keep = _keep(params, params.seq_len, run.device)
        self.causal = keep_causal(params.seq_len, device=run.device)
        chosen = {"all_layers": range(params.n_layers), "first_layer": (0,), "last_layer": (params.n_layers - 1,)}
        self.chosen = chosen[params.in_layers]
        root = math.sqrt(params.d_model)
        # q, k, v, out and the expert
        self.matrices = [run.randn(5, params.d_model, params.d_model) / root for _ in range(params.n_layers)]
        self.scores = [run.randn(params.d_model) for _ in range(params.n_layers)]
        self.first_weights = self.keep  # of the last call, in the first layer with the mask

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, seq_len, d_model), in and out; a shorter sequence gets the corner of the mask."""
        for layer, (W_q, W_k, W_v, W_o, W_e) in enumerate(self.matrices):
            h = _normalize(x)
            weights = self._weights(layer, attention_logits(h @ W_q, h @ W_k))
            x = x + context(weights, h @ W_v) @ W_o
            if self.params.expert_choice:
                x = x + self._taken(x @ self.scores[layer]) * (_normalize(x) @ W_e).tanh()
        return x

    def _weights(self, layer: int, logits: torch.Tensor) -> torch.Tensor:
        n = logits.shape[-1]
        if layer not in self.chosen:
            return softmax(mask_logits(logits, self.causal[:n, :n]))
        keep = self.keep[:n, :n]
        if self.params.applied == "minus_inf":
            # a row without any key would be NaN; its context counts as zero, as in PyTorch's fused attention
            weights = softmax(mask_logits(logits, keep | ~keep.any(dim=-1, keepdim=True))) * keep.any(-1, keepdim=True)
        elif self.params.applied == "times_zero":
            weights = softmax(logits * keep)
        else:
            weights = softmax(logits) * keep
            if self.params.applied == "after_renormalized":
                sums = weights.sum(dim=-1, keepdim=True)
                weights = weights / sums.masked_fill(sums == 0, 1.0)
        if layer == self.chosen[0]:
            self.first_weights = weights.detach()
        return weights

    def _taken(self, scores: torch.Tensor) -> torch.Tensor:
        """1 for the half of the tokens with the highest scores, else 0. Shapes: (batch, n) to (batch, n, 1)."""
        import torch

        most = scores.topk(max(1, scores.shape[-1] // 2), dim=-1).indices
        return torch.zeros_like(scores).scatter(-1, most, 1.0)[..., None]


def _keep(params: Params, n: int, device: torch.device) -> torch.Tensor:
    return keep_named(
        params.mask,
        n,
        prefix_len=params.prefix_tokens,
        window=params.window,
        document_len=params.document_len,
        device=device,
    )


def _normalize(x: torch.Tensor) -> torch.Tensor:
    """LayerNorm without gain and bias: of each position by itself."""
    from torch.nn.functional import layer_norm

    return layer_norm(x, x.shape[-1:])


def _log10(values: torch.Tensor) -> np.ndarray:
    """For a map of values over many powers of ten: log10, at least FLOOR, and ZERO for what is exactly 0."""
    import torch

    logs = values.cpu().double().log10().clamp_min(FLOOR)
    return np.asarray(torch.where(values.cpu() == 0, float(ZERO), logs).flatten())
