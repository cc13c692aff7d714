r"""What positions cost: parameters counted from modules, operations while they run, bytes of what is stored beside.

Nothing is computed but shapes: modules and layers run on tensors without storage, and the rotation on one vector.
What each way of giving positions to a model adds:

``learned_table``  an embedding with a row for each position up to ``max_len``, added once to the tokens
``sinusoidal``     the same vectors from a formula, added once
``relative_bias``  T5's 32 scalars a head, one table for all layers, added to every logit of every layer
``alibi``          nothing to learn, a fixed slope a head, added to every logit of every layer
``rope``           nothing to learn; q and k of every layer turned, with cosines and sines of each place

``bias_bytes`` and ``rotary_table_bytes`` are what stands in memory if it is written out: the biases of one layer in 16
bits, the cosines and sines in float32. Kernels may make both on the fly. A multiply-add counts two operations, an
elementwise one counts one; norms and softmax are left out. Cosines and sines are given, as they are the same for all
heads, layers and texts.

Sources: su2021-roformer, section 3.4.2 (elementwise form of the rotation); t5-code, ``compute_bias``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import context, qk_product
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.operations import count_operations

if TYPE_CHECKING:
    import torch

CACHED_KEYS = ("turned", "not_turned")
WAYS = ("learned_table", "sinusoidal", "relative_bias", "alibi", "rope")


@dataclass(frozen=True)
class Params(BaseParams):
    positions: str = choice("rope", "learned_table", "sinusoidal", "relative_bias", "alibi")
    cached_keys: str = choice(*CACHED_KEYS)
    q_len: int = number(4096, low=1, high=131072, log2=True)
    kv_len: int = number(4096, low=1, high=131072, log2=True)
    max_len: int = number(4096, low=1, high=1_048_576, log2=True)
    d_model: int = number(4096, low=64, high=16384, log2=True)
    d_k: int = number(128, low=16, high=512, log2=True)
    n_heads: int = number(32, low=1, high=128, log2=True)
    n_kv_heads: int = number(8, low=1, high=128, log2=True)
    n_layers: int = number(32, low=1, high=128)

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            values = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.q_len > self.kv_len:
            yield Problem("rule", "q_len", self.q_len, rule="chunk_within_keys", values={"kv_len": self.kv_len})

    def unread(self) -> frozenset[str]:
        unread = set() if self.positions == "learned_table" else {"max_len"}
        if self.q_len == self.kv_len:  # nothing waits in the cache
            unread.add("cached_keys")
        return frozenset(unread)


METRICS = (
    Metric("extra_parameters"),
    Metric("position_flop", "flop"),
    Metric("projection_flop", "flop"),
    Metric("score_flop", "flop"),
    Metric("position_share"),
    Metric("bias_bytes", "bytes"),
    Metric("rotary_table_bytes", "bytes"),
)
PLOTS = (
    Plot("operations", table="by_way", x="positions", y="position_share", mark="point", y_scale="log10"),
    Plot(
        "by_length",
        table="by_length",
        x="kv_len",
        y="position_share",
        by="cached_keys",
        x_scale="log2",
        y_scale="log10",
    ),
)
BUDGET_S = 0.1

BUCKETS = 32
LENGTHS = (1024, 16384, 131072)


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**20


def run(params: Params, run: Run) -> Result:
    """Count a pass of ``q_len`` new tokens behind ``kv_len`` - ``q_len`` cached ones, through all layers.

    ``position_share``: operations for positions over those of the projections and of both products of attention.
    """
    bills = {}
    for done, way in enumerate(WAYS):
        run.progress(0.5 * done / len(WAYS))
        bills[way] = _position_flop(params, way, params.q_len, params.kv_len, params.cached_keys)
    projections, scores = _layer_flop(params, params.q_len, params.kv_len)
    whole = params.n_layers * (projections + scores)
    bias, turned = _stored(params)
    metrics = {
        "extra_parameters": _parameters(params, params.positions),
        "position_flop": bills[params.positions],
        "projection_flop": params.n_layers * projections,
        "score_flop": params.n_layers * scores,
        "position_share": bills[params.positions] / whole,
        "bias_bytes": bias,
        "rotary_table_bytes": turned,
    }
    steps = []
    for done, kv_len in enumerate(LENGTHS):
        run.progress(0.5 + 0.5 * done / len(LENGTHS))
        step = params.n_layers * sum(_layer_flop(params, 1, kv_len))
        steps += [(c, kv_len, _position_flop(params, "rope", 1, kv_len, c) / step) for c in CACHED_KEYS]
    tables = {
        "by_way": {"positions": np.array(WAYS), "position_share": np.array([bills[way] / whole for way in WAYS])},
        "by_length": {
            "cached_keys": np.array([cached for cached, _, _ in steps]),
            "kv_len": np.array([kv_len for _, kv_len, _ in steps]),
            "position_share": np.array([share for _, _, share in steps]),
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _empty(*shape: int) -> torch.Tensor:
    import torch

    return torch.empty(*shape, device="meta", dtype=torch.float16)


def _parameters(params: Params, way: str) -> int:
    """What the module of this way has to learn."""
    from torch import nn

    if way == "learned_table":
        module: nn.Module = nn.Embedding.from_pretrained(_empty(params.max_len, params.d_model), freeze=False)
    elif way == "relative_bias":
        module = nn.Embedding.from_pretrained(_empty(BUCKETS, params.n_heads), freeze=False)
    else:
        module = nn.Module()
        module.register_buffer("fixed", _empty(params.n_heads if way == "alibi" else params.d_k // 2))
    return sum(p.numel() for p in module.parameters())


def _layer_flop(params: Params, q_len: int, kv_len: int) -> tuple[int, int]:
    """Operations of the four projections of one layer, and of q·k and weights · v with all keys visible.

    Shapes: q (n_heads, q_len, d_k), k and v (n_heads, kv_len, d_k), those of the cache repeated for the heads.
    """
    x = _empty(q_len, params.d_model)
    W_q, W_k, W_v = (_empty(params.d_model, n * params.d_k) for n in (params.n_heads, *[params.n_kv_heads] * 2))
    W_o = _empty(params.n_heads * params.d_k, params.d_model)
    with count_operations() as projections:
        q, _, _ = x @ W_q, x @ W_k, x @ W_v
        _ = q @ W_o
    q = _empty(params.n_heads, q_len, params.d_k)
    k = v = _empty(params.n_heads, kv_len, params.d_k)
    with count_operations() as scores:
        _ = context(qk_product(q, k), v)
    return projections.total, scores.total


def _position_flop(params: Params, way: str, q_len: int, kv_len: int, cached_keys: str) -> int:
    """Operations that this way adds to a pass through all layers."""
    if way in ("learned_table", "sinusoidal"):
        return _sum_flop(q_len, params.d_model)  # once, not in every layer
    if way in ("relative_bias", "alibi"):
        return params.n_layers * _sum_flop(params.n_heads, q_len, kv_len)
    # keys that wait in the cache as they came from W_k have to be turned in every pass
    turned_keys = q_len if cached_keys == "turned" else kv_len
    vectors = params.n_heads * q_len + params.n_kv_heads * turned_keys
    return params.n_layers * vectors * _vector_flop(params.d_k)


def _sum_flop(*shape: int) -> int:
    """One operation for each number of what the sum is added to."""
    return int(_empty(*shape).numel())


@functools.lru_cache(maxsize=16)
def _vector_flop(d_k: int) -> int:
    """Operations that turn one vector; on the CPU, as elementwise work without storage takes 2 ms to imitate."""
    import torch

    x, cos, sin = torch.empty(1, 1, d_k), torch.empty(1, d_k // 2), torch.empty(1, d_k // 2)
    with count_operations() as counted:
        _ = _turn(x, cos, sin)
    return counted.total


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As :func:`engine.positions.rotate`, with cosines and sines given. Shapes: x (n_heads, seq_len, d_k)."""
    import torch

    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def _stored(params: Params) -> tuple[int, int]:
    """Bytes of the biases of one layer for all heads, and of the cosines and sines for all layers and heads."""
    import torch

    bias = _empty(params.n_heads, params.q_len, params.kv_len)
    angles = torch.empty(2, params.kv_len, params.d_k // 2, device="meta", dtype=torch.float32)
    return bias.nbytes, angles.nbytes
