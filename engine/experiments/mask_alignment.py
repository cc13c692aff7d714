r"""Which keys PyTorch's fused attention lets a chunk of new queries see when there are more keys than queries.

``kv_len`` tokens are in the cache, the last ``q_len`` of them new. What the chunk must return are the last rows of a
causal pass over all tokens. Four calls of ``scaled_dot_product_attention`` try:

``is_causal``     the flag ``is_causal=True``, whose mask begins at the first key (top left)
``lower_right``   ``attn_mask=`` the causal mask that ends at the last key, as ``torch.nn.attention.bias
                  .causal_lower_right`` makes it
``no_mask``       neither
``upper_left``    ``attn_mask=`` the causal mask that begins at the first key

The weights are read off the fused call itself: with the unit vectors as values, its output is the weights.

Sources: pytorch-code, docstring of ``scaled_dot_product_attention`` and ``torch/nn/attention/bias.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention, attention_logits, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.masks import keep_causal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    q_len: int = number(3, low=1, high=64)
    kv_len: int = number(8, low=1, high=64)
    call: str = choice("is_causal", "lower_right", "no_mask", "upper_left")
    batch: int = number(4, low=1, high=64, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.q_len > self.kv_len:
            yield Problem("rule", "q_len", self.q_len, rule="chunk_within_keys", values={"kv_len": self.kv_len})


METRICS = (
    Metric("chunk_error"),
    Metric("first_query_keys"),
    Metric("last_query_keys"),
    Metric("hidden_pairs"),
    Metric("leaked_pairs"),
    Metric("top_left_difference"),
    Metric("bottom_right_difference"),
)
CALLS = ("is_causal", "lower_right", "no_mask", "upper_left")
PLOTS = (
    Plot("weights", table="weights", mark="heat", x="key_position", y="query_position", value="attention_weight"),
    Plot("by_chunk", table="by_chunk", x="q_len", y="chunk_error", by="call", mark="line"),
)
BUDGET_S = 0.05

D_K = 64  # at least as many as keys, so that the unit vectors fit into values as wide as the keys
CHUNKS = 8  # chunk lengths of the curve


def memory_bytes(params: Params) -> int:
    """q, k, v, the unit vectors and their outputs, and some logits."""
    return 4 * params.batch * (12 * D_K * params.kv_len + 12 * params.kv_len**2) + 16 * params.kv_len**2


def run(params: Params, run: Run) -> Result:
    """The chunk under the call, against the same rows of the causal pass over all tokens.

    ``chunk_error``: the largest difference of the two. ``first_query_keys``, ``last_query_keys``: keys with a weight
    above 0. ``hidden_pairs``, ``leaked_pairs``: pairs of the chunk that ought to have a weight and have none, and the
    other way round. ``*_difference``: the largest difference of the weights from those of the eager reference under
    the causal mask of that alignment.

    Shapes: q, k, v (batch, kv_len, D_K).
    """
    import torch

    q, k, v = (run.randn(params.batch, params.kv_len, D_K) for _ in range(3))
    full = attention(q, k, v, keep=keep_causal(params.kv_len, device=run.device))
    run.progress(0.2)
    units = torch.eye(params.kv_len, D_K, device=run.device, dtype=run.dtype).expand_as(v)
    chunk = q[:, -params.q_len :]
    weights = _call(params.call, chunk, k, units)[..., : params.kv_len]
    seen, ought = (weights > 0).all(dim=0), keep_causal(params.q_len, params.kv_len, device=run.device)

    metrics = {
        "chunk_error": _error(params.call, params.q_len, q, k, v, full),
        "first_query_keys": seen[0].sum(),
        "last_query_keys": seen[-1].sum(),
        "hidden_pairs": (ought & ~seen).sum(),
        "leaked_pairs": (seen & ~ought).sum(),
    }
    for alignment in ("top_left", "bottom_right"):
        keep = keep_causal(params.q_len, params.kv_len, alignment=alignment, device=run.device)
        eager = softmax(mask_logits(attention_logits(chunk, k), keep))
        metrics[f"{alignment}_difference"] = (weights - eager).abs().max()
    tables = {"weights": _weights_table(params, weights[0]), "by_chunk": _by_chunk(params, run, q, k, v, full)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _call(call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One way to call PyTorch's fused attention. Shapes: (batch, q_len, D_K), (batch, kv_len, D_K) twice."""
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x[:, None] for x in (q, k, v))  # the fused kernels want an axis for the heads
    lengths = q.shape[-2], k.shape[-2]
    mask = None
    if call in ("lower_right", "upper_left"):
        alignment = "bottom_right" if call == "lower_right" else "top_left"
        mask = keep_causal(*lengths, alignment=alignment, device=q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=call == "is_causal")[:, 0]


def _error(call: str, q_len: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, full: torch.Tensor) -> float:
    return float((_call(call, q[:, -q_len:], k, v) - full[:, -q_len:]).abs().max())


def _weights_table(params: Params, weights: torch.Tensor) -> Table:
    """The weights of the first item, each query at its place in the sequence."""
    first = params.kv_len - params.q_len
    return {
        "query_position": np.repeat(np.arange(first, params.kv_len), params.kv_len),
        "key_position": np.tile(np.arange(params.kv_len), params.q_len),
        "attention_weight": weights.flatten().cpu().numpy().astype(np.float32),
    }


def _by_chunk(params: Params, run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, full: torch.Tensor) -> Table:
    """The error of every call for chunks from one token to all of them."""
    lengths = sorted({max(1, round(i * params.kv_len / CHUNKS)) for i in range(CHUNKS + 1)})
    rows = []
    for q_len in lengths:
        run.progress(0.5 + 0.4 * q_len / params.kv_len)
        rows += [(q_len, call, _error(call, q_len, q, k, v, full)) for call in CALLS[:3]]  # upper_left is is_causal
    return {
        "q_len": np.array([row[0] for row in rows]),
        "call": np.array([row[1] for row in rows]),
        "chunk_error": np.array([row[2] for row in rows]),
    }
