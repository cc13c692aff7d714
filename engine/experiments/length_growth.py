r"""How the cost of a published model grows with the length of the sequence: what is linear in it, and what is square.

The products with weights take the same for every token. Attention takes :math:`4\,h\,d_k` operations for every pair of
a query and a key, so :math:`n` tokens cost :math:`a\,n+b\,n^2` in a layer, and doubling them costs
:math:`2\,(1+s)` times as much, where :math:`s` is attention's share: two to four times. With a cache the next token
meets each key once and every weight once, :math:`a+4\,h\,d_k\,n`.

``dense`` computes all pairs and then hides some; ``skipping`` leaves out tiles without a pair that the mask keeps,
those of the future and, in layers with a window, those before it. A linear attention layer is counted in its recurrent
form: each head adds k vᵀ to a matrix of d_k × d_k numbers and reads it with q. Gates, decay and the extra products of
its chunked form are left out.

Nothing is computed but shapes. Operations are those of the matrix products in the layers, a multiply-add counting two;
the unembedding is left out.

Sources: kaplan2020, section 2.1, and scaling-book, transformers.md (two other conventions); gemma-code (the windows).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.model_shapes import SHAPES, ModelShape, weights
from engine.operations import count_operations

if TYPE_CHECKING:
    import torch

MODELS = tuple(name for name, s in SHAPES.items() if not (s.kv_rank or s.n_experts))


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("llama_3_8b", *(name for name in MODELS if name != "llama_3_8b"))
    seq_len: int = number(4096, low=128, high=1048576, log2=True)
    attention_kernel: str = choice("dense", "skipping")
    tile: int = number(128, low=16, high=1024, log2=True)
    full_attention_in: str = choice("layers_as_published", "all_layers_full", "one_in_six_full", "one_in_four_full")
    window: int = number(1024, low=128, high=65536, log2=True)

    def unread(self) -> frozenset[str]:
        if self.attention_kernel == "skipping":
            return frozenset()  # the second chart draws every mix
        return frozenset({"tile"} if self.full_attention_in == "one_in_six_full" else {"tile", "window"})


METRICS = (
    Metric("growth_when_doubled"),
    Metric("attention_share"),
    Metric("layers_crossover_tokens"),
    Metric("projections_crossover_tokens"),
    Metric("next_token_growth"),
    Metric("next_token_attention_share"),
    Metric("sequence_flop", "flop"),
    Metric("next_token_flop", "flop"),
    Metric("attention_flop_per_token", "flop"),
    Metric("projection_flop_per_token", "flop"),
    Metric("ffn_flop_per_token", "flop"),
)
PLOTS = (
    Plot("growth", table="growth", x="seq_len", y="growth_when_doubled", by="grown", x_scale="log2"),
    Plot("shares", table="shares", x="seq_len", y="attention_share", by="full_attention_in", x_scale="log2"),
)
BUDGET_S = 0.015

LENGTHS = tuple(2**n for n in range(9, 21))
SEARCHED = 2**22  # tokens up to which a crossover is looked for
MIXES = ("layers_as_published", "all_layers_full", "one_in_six_full", "one_in_four_full")


class _Layers(NamedTuple):
    """Layers alike: "full" attention, a "windowed" one that keeps ``window`` keys a query, or a "linear" one."""

    kind: str
    n_layers: int
    window: int = 0


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; the rows of tiles of one sequence are what is left."""
    return 2**20 + (0 if "tile" in params.unread() else 64 * SEARCHED // params.tile)


def run(params: Params, run: Run) -> Result:
    """Counts of all layers at the chosen length, beside those at twice the length, and both charts.

    ``attention_share``              of all products in the layers that multiply queries with keys and weights with
                                     values, over the whole sequence
    ``growth_when_doubled``          operations of twice as many tokens over those of these
    ``layers_crossover_tokens``      from which length on attention takes as many as all products with weights of the
                                     layers; the end of the search where it never does
    ``projections_crossover_tokens`` as many as the projections of q, k, v and the output alone
    ``next_token_...``               of one token behind a cache, with ``seq_len`` keys in all
    """
    run.progress(0.0)
    cost = _Cost(params)
    run.progress(0.3)
    attention, step = cost.attention(params.seq_len), cost.next_token_attention(params.seq_len)
    metrics = {
        "growth_when_doubled": cost.sequence(2 * params.seq_len) / cost.sequence(params.seq_len),
        "attention_share": attention / cost.sequence(params.seq_len),
        "layers_crossover_tokens": cost.crossover(cost.projections + cost.ffn),
        "projections_crossover_tokens": cost.crossover(cost.projections),
        "next_token_growth": cost.next_token(2 * params.seq_len) / cost.next_token(params.seq_len),
        "next_token_attention_share": step / cost.next_token(params.seq_len),
        "sequence_flop": cost.sequence(params.seq_len),
        "next_token_flop": cost.next_token(params.seq_len),
        "attention_flop_per_token": attention / params.seq_len,
        "projection_flop_per_token": cost.projections,
        "ffn_flop_per_token": cost.ffn,
    }
    run.progress(0.6)
    tables = {"growth": _growth(cost), "shares": _shares(params)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


class _Cost:
    """Operations in all layers of a model. Lengths are in tokens."""

    def __init__(self, params: Params) -> None:
        self.params = params
        self.shape = SHAPES[params.model]
        self.layers = _layers(params)
        self.projections, self.ffn = _weight_flop(params.model)  # for one token
        self.pair, self.state = _pair_flop(params.model), _state_flop(params.model)

    def attention(self, n: int) -> int:
        """Of every query of a sequence with the keys that the kernel computes."""
        return sum(layers.n_layers * self._layer(layers, n) for layers in self.layers)

    def _layer(self, layers: _Layers, n: int) -> int:
        if layers.kind == "linear":
            return n * self.state
        skips = self.params.attention_kernel == "skipping"
        return self.pair * (_pairs_in_tiles(n, self.params.tile, layers.window) if skips else n * n)

    def sequence(self, n: int) -> int:
        return n * (self.projections + self.ffn) + self.attention(n)

    def next_token_attention(self, n: int) -> int:
        """Of one query: a full layer reads n keys, one with a window holds no more than that."""
        each = (
            self.state if layers.kind == "linear" else self.pair * min(n, layers.window or n) for layers in self.layers
        )
        return sum(layers.n_layers * flop for layers, flop in zip(self.layers, each, strict=True))

    def next_token(self, n: int) -> int:
        return self.projections + self.ffn + self.next_token_attention(n)

    def crossover(self, flop_per_token: int) -> int:
        """By halving: the mean token's attention never falls with the length."""
        low, high = 0, SEARCHED
        while high - low > 1:
            middle = (low + high) // 2
            if self.attention(middle) < flop_per_token * middle:
                low = middle
            else:
                high = middle
        return high


def _layers(params: Params) -> list[_Layers]:
    """The layers of the model under the chosen mix: of six, or four, the last one is full."""
    shape = SHAPES[params.model]
    total = shape.n_layers
    if params.full_attention_in == "one_in_six_full":
        full = total // 6
        return [_Layers("windowed", total - full, params.window), _Layers("full", full)]
    if params.full_attention_in == "one_in_four_full":
        full = total // 4
        return [_Layers("linear", total - full), _Layers("full", full)]
    windowed = shape.n_layers_of_window() if params.full_attention_in == "layers_as_published" else 0
    return [_Layers("windowed", windowed, shape.window), _Layers("full", total - windowed)]


def _pairs_in_tiles(n: int, tile: int, window: int) -> int:
    """Pairs in the tiles that hold one that the mask keeps, row of tiles by row of tiles; no window where it is 0."""
    starts = np.arange(0, n, tile)
    stops = np.minimum(starts + tile, n)
    oldest = np.maximum(starts - window + 1, 0) if window else np.zeros_like(starts)  # key that the first query sees
    return int(((stops - starts) * (stops - oldest // tile * tile)).sum())


def _counted(work: Callable[[], object]) -> int:
    with count_operations() as counted:
        work()
    return counted.products


@functools.cache
def _weight_flop(model: str) -> tuple[int, int]:
    """Of one token in all layers: projections, and FFN."""
    import torch

    found = {"projections": 0, "ffn": 0}
    for name, n_layers, weight in weights(SHAPES[model], torch.bfloat16):
        if name not in ("W_q", "W_k", "W_v", "W_o", "ffn"):
            continue
        for matrix in weight if name == "ffn" else (weight,):  # up, gate and down, which is as large turned round
            x = torch.empty(1, matrix.shape[-1], dtype=matrix.dtype, device="meta")
            part = "ffn" if name == "ffn" else "projections"
            found[part] += n_layers * _counted(functools.partial(torch.mm, x, matrix.mT))
    return found["projections"], found["ffn"]


@functools.cache
def _pair_flop(model: str) -> int:
    """Of one query and one key in every head of a layer: q·k, and its weight times v."""
    q, k, v = (_heads(SHAPES[model]) for _ in range(3))
    return _counted(lambda: q @ k.mT @ v)


@functools.cache
def _state_flop(model: str) -> int:
    """Of one token in every head of a linear layer: k vᵀ into the state, and q times the state."""
    q, k, v = (_heads(SHAPES[model]) for _ in range(3))
    return _counted(lambda: q @ (k.mT @ v))


def _heads(shape: ModelShape) -> torch.Tensor:
    """One token in every head. Shapes: (n_heads, 1, d_k)."""
    import torch

    return torch.empty(shape.n_heads, 1, shape.d_k, device="meta")


def _growth(cost: _Cost) -> Table:
    """What twice the length costs, by the length: a whole sequence, its attention alone, and the next token."""
    curves = {
        "whole_sequence": cost.sequence,
        "sequence_attention": cost.attention,
        "next_token": cost.next_token,
    }
    return {
        "seq_len": np.tile(LENGTHS, len(curves)),
        "grown": np.repeat([*curves], len(LENGTHS)),
        "growth_when_doubled": np.array([curve(2 * n) / curve(n) for curve in curves.values() for n in LENGTHS]),
    }


def _shares(params: Params) -> Table:
    """Attention's share by the length, under each mix of layers."""
    costs = {mix: _Cost(replace(params, full_attention_in=mix)) for mix in MIXES}
    return {
        "seq_len": np.tile(LENGTHS, len(costs)),
        "full_attention_in": np.repeat([*costs], len(LENGTHS)),
        "attention_share": np.array([c.attention(n) / c.sequence(n) for c in costs.values() for n in LENGTHS]),
    }
