r"""Additive attention :math:`v^\top\tanh(W_q q + W_k k)` against the dot product, scaled and not, as d_k grows.

:math:`\tanh` keeps each hidden unit in [-1, 1], but a logit sums d_k of them, weighted by v. It needs no scale
of its own because v is drawn with variance 1/d_k, which carries the root: the variance of a logit is then
:math:`E[\tanh^2 z], z \sim N(0, 2)`, whatever d_k. With v of variance 1 it would grow like d_k.

The hidden width of the additive form is d_k. q and k are N(0, 1); W_q, W_k and v have variance 1/d_k and are drawn
anew for each item of the batch.

Source: vaswani2017, section 3.2.1 (the comparison, and the suspicion about the dot product).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, entropy_nats, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number

if TYPE_CHECKING:
    import torch

KINDS = ("additive", "dot", "scaled_dot")


@dataclass(frozen=True)
class Params(BaseParams):
    d_k: int = number(64, low=1, high=1024, log2=True)
    kv_len: int = number(64, low=2, high=1024, log2=True)
    kind: str = choice(*KINDS)
    batch: int = number(4, low=1, high=64, log2=True)


METRICS = (
    Metric("logits_std"),
    Metric("logits_abs_max"),
    Metric("entropy_nats", "nats"),
    Metric("entropy_share"),
    Metric("weight_max_mean"),
    Metric("flops", "flop"),
    Metric("transcendental_count"),
)
PLOTS = (Plot("spread_by_width", table="by_width", x="d_k", y="logits_std", by="kind", x_scale="log2", y_scale="log2"),)
BUDGET_S = 0.05

Q_LEN = 64
CHUNK_NUMBERS = 2**20  # hidden units at once: 4 MB, some 10 ms
WIDTHS = (4, 16, 64, 256)
WIDTH_DRAWS, WIDTH_LEN = 2, 24  # 1152 logits a point: this table is drawn anew at every run


def memory_bytes(params: Params) -> int:
    """A chunk of hidden units with its temporaries, one item's matrices, and all logits with theirs, in float64."""
    hidden = max(CHUNK_NUMBERS, params.kv_len * params.d_k)
    matrices = 2 * max(params.d_k, WIDTHS[-1]) ** 2 + 2 * (Q_LEN + params.kv_len) * params.d_k
    return 8 * (3 * hidden + 2 * matrices + 5 * params.batch * Q_LEN * params.kv_len)


def run(params: Params, run: Run) -> Result:
    """Logits of ``batch`` times 64 queries under the chosen form.

    ``flops``: operations for the logits of 64 queries, softmax apart (it costs the same under every form), counted as
    they run: matrix products by PyTorch's formulas, two for a multiply-add (additive: both projections and the product
    with v; dot: q·k), and one for each number that comes out of the addition, of the scaling and of tanh.
    ``transcendental_count``: the tanh among them.
    """
    import torch

    from engine.operations import count_operations

    items = []
    for index in range(params.batch):
        run.progress(index / params.batch)
        drawn = _draw(run, q_len=Q_LEN, kv_len=params.kv_len, d_k=params.d_k)
        with count_operations() as counted:  # every item counts the same: the last is reported
            items.append(_item(params.kind, drawn, run, index / params.batch))
    logits = torch.cat(items)  # (batch * q_len, kv_len)

    weights = softmax(logits).cpu().double()
    entropy = entropy_nats(weights).mean().item()
    metrics = {
        "logits_std": logits.cpu().double().std().item(),
        "logits_abs_max": logits.abs().max().item(),
        "entropy_nats": entropy,
        "entropy_share": entropy / math.log(params.kv_len),
        "weight_max_mean": weights.amax(dim=-1).mean().item(),
        "flops": float(counted.total),
        "transcendental_count": float(counted.transcendental),
    }
    return Result(metrics, {"by_width": _by_width(run)})


def _draw(run: Run, *shape: int, q_len: int, kv_len: int, d_k: int) -> tuple[torch.Tensor, ...]:
    """q, k, W_q, W_k and v, the last as a column. Shapes: (*shape, rows, columns) each."""
    root = math.sqrt(d_k)
    q, k = run.randn(*shape, q_len, d_k), run.randn(*shape, kv_len, d_k)
    W_q, W_k = run.randn(*shape, d_k, d_k) / root, run.randn(*shape, d_k, d_k) / root
    return q, k, W_q, W_k, run.randn(*shape, d_k, 1) / root


def _item(kind: str, drawn: tuple[torch.Tensor, ...], run: Run, done: float) -> torch.Tensor:
    """Logits of every query with every key; the additive form a few queries at a time. Shapes: (..., q_len, kv_len)."""
    q, k, W_q, W_k, v = drawn
    if kind == "dot":
        return qk_product(q, k)
    if kind == "scaled_dot":
        return attention_logits(q, k, "inv_sqrt_d_k")
    q_len, projected_q, projected_k = q.shape[-2], q @ W_q.mT, k @ W_k.mT
    rows = max(1, CHUNK_NUMBERS // projected_k.numel())
    logits = q.new_empty(*q.shape[:-1], k.shape[-2])  # filled in place: small results among big ones fragment the heap
    for start in range(0, q_len, rows):
        run.progress(done)
        some_q = projected_q[..., start : start + rows, :]
        hidden = (some_q[..., :, None, :] + projected_k[..., None, :, :]).tanh()  # (..., rows, kv_len, d_k)
        logits[..., start : start + rows, :] = (hidden @ v[..., None, :, :])[..., 0]
    return logits


def _by_width(run: Run) -> Table:
    """Spread of the logits of every form at several widths."""
    rows = []
    for d_k in WIDTHS:
        drawn = _draw(run, WIDTH_DRAWS, q_len=WIDTH_LEN, kv_len=WIDTH_LEN, d_k=d_k)
        for kind in KINDS:
            rows.append((d_k, kind, _item(kind, drawn, run, 1.0).cpu().double().std().item()))
    return {
        name: np.array(column)
        for name, column in zip(("d_k", "kind", "logits_std"), zip(*rows, strict=True), strict=True)
    }
