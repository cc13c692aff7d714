r"""What the number of heads changes in the bill of an attention layer, counted while it runs: and what it does not.

The usual split gives each head :math:`d_k=d_v=d_{model}/h`, so the four projections keep their size and both products
their operations. What grows with :math:`h` is the number of rows of weights: a matrix of logits for each head, with an
exponential for each entry. ``full_width`` gives every head the width of the model instead: then everything grows.

Nothing is computed but shapes: the layer runs on tensors without storage. A multiply-add counts two operations; biases
and the elementwise work are left out, except that the exponentials are counted apart.

Source: vaswani2017, section 3.2.2 (equal cost with heads of reduced width).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.attention import context, qk_product
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.operations import count_operations


@dataclass(frozen=True)
class Params(BaseParams):
    n_heads: int = number(8, low=1, high=64, log2=True)
    d_model: int = number(512, low=64, high=16384, log2=True)
    seq_len: int = number(512, low=1, high=131072, log2=True)
    head_width: str = choice("split", "full_width")

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": self.d_model})


METRICS = (
    Metric("n_parameters"),
    Metric("matmul_flop", "flop"),
    Metric("score_entries"),
    Metric("score_bytes", "bytes"),
    Metric("kv_cache_bytes", "bytes"),
)
PLOTS = (Plot("bill", table="by_n_heads", x="n_heads", y="relative", by="item", x_scale="log2", y_scale="log2"),)
BUDGET_S = 0.05

MOST_HEADS = 64  # of the table
ITEMS = {
    "parameters": "n_parameters",
    "matmul": "matmul_flop",
    "scores": "score_entries",
    "kv_cache": "kv_cache_bytes",
}


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**20


def run(params: Params, run: Run) -> Result:
    """Count one layer over ``seq_len`` tokens with every number of heads, and each count relative to one head.

    ``score_bytes`` is what the logits of all heads would take in 16 bits if they were stored, as eager code does and
    fused kernels do not; ``kv_cache_bytes`` k and v of all heads in 16 bits.
    """
    counts = sorted({2**n for n in range(7) if params.d_model % 2**n == 0 and 2**n <= MOST_HEADS} | {1, params.n_heads})
    bills = {}
    for done, n_heads in enumerate(counts):
        run.progress(done / len(counts))
        bills[n_heads] = _bill(params, n_heads)
    metrics = {m.name: float(bills[params.n_heads][m.name]) for m in METRICS}
    table = {
        "n_heads": np.tile(counts, len(ITEMS)),
        "item": np.repeat(list(ITEMS), len(counts)),
        "relative": np.array([bills[n_heads][name] / bills[1][name] for name in ITEMS.values() for n_heads in counts]),
    }
    return Result(metrics, {"by_n_heads": table})


def _bill(params: Params, n_heads: int) -> dict[str, int]:
    """Counts of one layer: from its tensors, and from the operations that are carried out.

    Shapes: q, k, v (n_heads, seq_len, d_k), logits (n_heads, seq_len, seq_len).
    """
    import torch

    d_k = params.d_model // n_heads if params.head_width == "split" else params.d_model
    empty = functools.partial(torch.empty, device="meta", dtype=torch.float16)
    W_q, W_k, W_v = (empty(n_heads * d_k, params.d_model) for _ in range(3))
    W_o = empty(params.d_model, n_heads * d_k)
    x = empty(params.seq_len, params.d_model)
    with count_operations() as counted:
        q, k, v = ((x @ W.mT).unflatten(-1, (n_heads, d_k)).transpose(0, 1) for W in (W_q, W_k, W_v))
        logits = qk_product(q, k)  # softmax keeps the shape and multiplies no matrices: it is left out
        _ = context(logits, v).transpose(0, 1).flatten(1) @ W_o.mT
    return {
        "n_parameters": sum(W.numel() for W in (W_q, W_k, W_v, W_o)),
        "matmul_flop": counted.products,
        "score_entries": logits.numel(),
        "score_bytes": logits.nbytes,
        "kv_cache_bytes": k.nbytes + v.nbytes,
    }
