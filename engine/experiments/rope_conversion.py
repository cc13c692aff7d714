r"""Weights of one rotary layout carried over to a layer with the other: what has to move, and what goes wrong.

A layer pairs neighbours (2j, 2j + 1) in the first ``rotary_dims`` coordinates of each head. The layer that shall take
over its weights pairs halves (j, j + rotary_dims/2). Both compute

.. math:: q = \mathrm{RMSNorm}_h\big((W_q + B_q A_q)\,x + b_q\big)\odot g_q

and k likewise, with fewer heads, then turn q and k; v has a matrix alone. The rows of a head have to change places, the
even ones first, then the odd ones: those of W, of the adapter's B, of b and of g. What is tried:

``converted``        all of that
``unconverted``      the weights as they are
``q_only``           k is left as it is
``wrong_direction``  the inverse: halves to neighbours
``all_as_one_head``  all rows of W, B and b are sorted as if they belonged to one head
``ratio_for_k``      those of k are split into n_heads / n_kv_heads heads instead of n_kv_heads
``whole_head``       all rows of a head are sorted, where only a part of the head is turned
``without_bias``, ``without_gain``, ``without_adapter``   that part is left as it is
``v_too``            W_v is sorted as well, and the output matrix behind it is not

Sources: transformers-llama, ``permute`` in ``convert_llama_weights_to_hf.py``; llama-cpp-3364 (the ratio).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.positions import BASE
from engine.rotary import exact_angles, turn

if TYPE_CHECKING:
    import torch

CONVERSIONS = (
    "unconverted",
    "converted",
    "q_only",
    "wrong_direction",
    "all_as_one_head",
    "ratio_for_k",
    "whole_head",
    "without_bias",
    "without_gain",
    "without_adapter",
    "v_too",
)


@dataclass(frozen=True)
class Params(BaseParams):
    conversion: str = choice(*CONVERSIONS)
    n_heads: int = number(8, low=1, high=16, log2=True)
    n_kv_heads: int = number(2, low=1, high=16, log2=True)
    d_k: int = number(32, low=2, high=128, log2=True)
    rotary_dims: int = number(16, low=2, high=128, log2=True)
    d_model: int = number(64, low=1, high=256, log2=True)
    seq_len: int = number(16, low=2, high=32)
    base: float = number(BASE, low=10, high=10_000_000)
    computed_in: str = choice("float64", "float32")

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            values = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.rotary_dims > self.d_k or self.rotary_dims % 2 or self.d_k % 2:
            values = {"d_k": self.d_k}
            yield Problem("rule", "rotary_dims", self.rotary_dims, rule="rotary_part_of_head", values=values)
        if self.conversion == "ratio_for_k" and self.n_kv_heads * self.d_k % (2 * self.n_heads // self.n_kv_heads):
            values = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="ratio_splits_rows", values=values)


METRICS = (
    Metric("conversion_logits_error"),
    Metric("conversion_context_error"),
    Metric("error_at_distance_zero"),
    Metric("rows_moved"),
    Metric("permutation_order"),
)
PLOTS = (
    Plot("by_distance", table="distances", x="token_distance", y="logit_difference", by="conversion"),
    Plot("rows", table="rows", mark="heat", x="row_before", y="row_after", value="row_taken"),
)
BUDGET_S = 0.05

SHOWN = ("converted", "unconverted", "q_only", "wrong_direction", "without_bias", "without_gain")
ADAPTER_RANK = 4
EPSILON = 1e-6  # of the norm, as in many models


def memory_bytes(params: Params) -> int:
    """Matrices with a few copies, activations and logits, in float64."""
    rows = (params.n_heads + 2 * params.n_kv_heads) * params.d_k
    logits = params.n_heads * params.seq_len**2
    return 8 * (6 * rows * (params.d_model + ADAPTER_RANK + 1) + 12 * rows * params.seq_len + 12 * logits) + 2**18


def run(params: Params, run: Run) -> Result:
    """The chosen conversion, and several by the distance of query and key.

    Errors are norms of differences from the layer that the weights come from, over that layer's own, past keys only.
    ``rows_moved`` counts rows of W_q and W_k that stand elsewhere afterwards; ``permutation_order`` is how many times
    the right conversion has to be done until all rows are back in place. All on the CPU, for not every device has
    float64.

    Shapes: x (seq_len, d_model).
    """
    import torch

    dtype = getattr(torch, params.computed_in)
    x = run.randn(params.seq_len, params.d_model).cpu().to(dtype)
    weights = _draw(params, run, dtype)
    run.progress(0.1)

    logits, read = _layer(params, weights, x, "interleaved")
    past = torch.ones(params.seq_len, params.seq_len, dtype=torch.bool).tril()
    wanted = logits.cpu().double()[:, past]
    converted = _convert(params, params.conversion, weights)
    got_logits, got_read = _layer(params, converted, x, "half_split")
    size = wanted.square().mean().sqrt()
    at_zero = (got_logits.cpu().double() - logits.cpu().double()).diagonal(dim1=-2, dim2=-1)
    order = _order(_even_then_odd(params.rotary_dims))
    labels = _convert(params, params.conversion, _row_numbers(params))
    moved = sum(int((part.matrix[:, 0] != torch.arange(len(part.matrix))).sum()) for part in (labels.q, labels.k))
    metrics = {
        "conversion_logits_error": _relative_error(got_logits[:, past], wanted),
        "conversion_context_error": _relative_error(got_read, read),
        "error_at_distance_zero": float(at_zero.square().mean().sqrt() / size),
        "rows_moved": moved,
        "permutation_order": order,
    }

    names = tuple(dict.fromkeys((params.conversion, *SHOWN)))
    errors = []
    for number_done, name in enumerate(names):
        run.progress(0.2 + 0.1 * number_done)
        shown, _ = _layer(params, _convert(params, name, weights), x, "half_split")
        errors.append(_by_distance((shown.cpu().double() - logits.cpu().double()).square().mean(dim=0)) / float(size))
    n, rows = params.seq_len, params.d_k
    taken = labels.q.matrix[:rows, 0].long()
    tables = {
        "distances": {
            "conversion": np.repeat(names, n),
            "token_distance": np.tile(np.arange(n), len(names)),
            "logit_difference": np.concatenate(errors),
        },
        "rows": {
            "row_after": np.repeat(np.arange(rows), rows),
            "row_before": np.tile(np.arange(rows), rows),
            "row_taken": (taken[:, None] == torch.arange(rows)).flatten().numpy().astype(np.float32),
        },
    }
    return Result({m.name: float(metrics[m.name]) for m in METRICS}, tables)


# --------------------------------------------------------------------------------------------------------------------
# The layer


class _Part(NamedTuple):
    """One projection. Shapes: matrix (rows, d_model), B (rows, rank), A (rank, d_model), bias (rows,), gain (d_k,)."""

    matrix: torch.Tensor
    B: torch.Tensor
    A: torch.Tensor
    bias: torch.Tensor
    gain: torch.Tensor


class _Weights(NamedTuple):
    q: _Part
    k: _Part
    W_v: torch.Tensor  # (n_kv_heads · d_k, d_model)


def _draw(params: Params, run: Run, dtype: torch.dtype) -> _Weights:
    """Products of size 1, an adapter a third of that, biases and gains that no row shares with another."""

    def normal(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().to(dtype)

    def draw(n_heads: int) -> _Part:
        rows, d = n_heads * params.d_k, params.d_model
        matrix = normal(rows, d) / math.sqrt(d)
        B, A = normal(rows, ADAPTER_RANK), normal(ADAPTER_RANK, d)
        B, A, bias = B / (3 * math.sqrt(ADAPTER_RANK)), A / math.sqrt(d), normal(rows)
        return _Part(matrix, B, A, bias, gain=(normal(params.d_k) / 2).exp())

    return _Weights(
        draw(params.n_heads),
        draw(params.n_kv_heads),
        normal(params.n_kv_heads * params.d_k, params.d_model) / math.sqrt(params.d_model),
    )


def _layer(params: Params, weights: _Weights, x: torch.Tensor, pairing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n_heads, seq_len, seq_len), not masked, and the context (n_heads, seq_len, d_k) under a causal mask."""
    import torch

    angles = exact_angles(torch.arange(params.seq_len), params.rotary_dims, params.base)
    q, k = (_project(part, x, angles, pairing) for part in (weights.q, weights.k))
    v = (x @ weights.W_v.T).unflatten(-1, (-1, params.d_k)).transpose(0, 1)
    k, v = (each.repeat_interleave(params.n_heads // params.n_kv_heads, dim=0) for each in (k, v))
    logits = attention_logits(q, k)
    keep = torch.ones(params.seq_len, params.seq_len, dtype=torch.bool).tril()
    return logits, context(softmax(mask_logits(logits, keep)), v)


def _project(part: _Part, x: torch.Tensor, angles: torch.Tensor, pairing: str) -> torch.Tensor:
    """Projected, split into heads, normed, turned. Shapes: returns (n_heads, seq_len, d_k)."""
    import torch

    heads = (x @ (part.matrix + part.B @ part.A).T + part.bias).unflatten(-1, (-1, len(part.gain))).transpose(0, 1)
    heads = heads * (heads.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt() * part.gain
    dims = 2 * angles.shape[-1]
    return torch.cat((turn(heads[..., :dims], angles, pairing), heads[..., dims:]), dim=-1)


# --------------------------------------------------------------------------------------------------------------------
# The conversion


def _even_then_odd(dims: int) -> torch.Tensor:
    """Which row each row is taken from: neighbours to halves. Shapes: returns (dims,)."""
    import torch

    return torch.arange(dims).view(-1, 2).T.flatten()


def _sort_rows(rows: torch.Tensor, n_heads: int, dims: int, back: bool = False) -> torch.Tensor:
    """``rows`` with the first ``dims`` of every head sorted, the even ones first. Shapes: as they came."""
    import torch

    order = _even_then_odd(dims)
    heads = rows.unflatten(0, (n_heads, -1))
    part = heads[:, order.argsort() if back else order]
    return torch.cat((part, heads[:, dims:]), dim=1).flatten(0, 1)


def _convert(params: Params, conversion: str, weights: _Weights) -> _Weights:
    """The weights for a layer that pairs halves, or what a slip makes of them."""
    if conversion == "unconverted":
        return weights
    dims = params.d_k if conversion == "whole_head" else params.rotary_dims
    back = conversion == "wrong_direction"

    one, ratio = conversion == "all_as_one_head", params.n_heads // params.n_kv_heads
    split_q = 1 if one else params.n_heads
    split_k = 1 if one else ratio if conversion == "ratio_for_k" else params.n_kv_heads

    def convert(part: _Part, split: int) -> _Part:
        width = len(part.matrix) // split
        # rows that are split in another way than into heads have no part that is turned: all of them are sorted
        of_rows = dims if width == params.d_k else width
        rows = {"matrix": part.matrix, "B": part.B, "bias": part.bias}
        moved = {name: _sort_rows(each, split, of_rows, back) for name, each in rows.items()}
        moved["gain"] = _sort_rows(part.gain, 1, dims, back)
        left = {"without_bias": "bias", "without_gain": "gain", "without_adapter": "B"}.get(conversion)
        return part._replace(**{name: each for name, each in moved.items() if name != left})

    k = weights.k if conversion == "q_only" else convert(weights.k, split_k)
    W_v = _sort_rows(weights.W_v, params.n_kv_heads, dims) if conversion == "v_too" else weights.W_v
    return _Weights(convert(weights.q, split_q), k, W_v)


def _row_numbers(params: Params) -> _Weights:
    """In place of numbers each row holds its own number, so that a conversion shows where rows go."""
    import torch

    def number_rows(n_heads: int) -> _Part:
        rows = torch.arange(n_heads * params.d_k)[:, None]
        return _Part(rows, rows, rows[:1], rows[:, 0], torch.arange(params.d_k))

    k = number_rows(params.n_kv_heads)
    return _Weights(number_rows(params.n_heads), k, k.matrix)


def _order(permutation: torch.Tensor) -> int:
    """How many times it has to be done until everything is back in place."""
    import torch

    start = torch.arange(len(permutation))
    now, count = permutation, 1
    while not torch.equal(now, start):
        now, count = now[permutation], count + 1
    return count


def _by_distance(squares: torch.Tensor) -> np.ndarray:
    """Root mean square over the pairs of each distance. Shapes: (seq_len, seq_len) to (seq_len,)."""
    n = len(squares)
    distance = np.arange(n)[:, None] - np.arange(n)
    past = distance >= 0
    return np.asarray(np.sqrt(np.bincount(distance[past], squares.numpy()[past]) / np.arange(n, 0, -1)))


def _relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    from torch.linalg import vector_norm

    wanted = wanted.cpu().double()
    return float(vector_norm(got.cpu().double() - wanted) / vector_norm(wanted))
