r"""Several tokens, each in a slot of its own: what one wide head returns, and what several narrow ones in its place.

A query wants ``n_targets`` of ``kv_len`` tokens, the t-th of them in the t-th slot of the output. A head reads all its
coordinates under one row of weights, so a layer of width d_model returns

.. math:: W_O\,[\,W_V^1\bar x^1;\dots;W_V^h\bar x^h\,],\quad \bar x^i=\textstyle\sum_j w_{ij}\,x_j

with :math:`h` heads of :math:`d_v=d_{model}/h`. Tokens are independent, their contents N(0, 1) in ``content``
dimensions. The layer is searched, not set: the rows by gradient, within logits that differ by at most ``logit_range``,
and for each set of rows the W_O of least squared error. The search is short: where rows can be nearly one-hot it
reaches the bound below, and at a small ``logit_range`` a longer one finds rows that lose less. W_V is drawn: no
direction of the content counts more than another, so all matrices of full rank do equally well. Which keys are wanted
makes no difference either (they are the first ones here): for another query of the same layer the rows move with its
targets, and W_O stays.

A bound: a head passes on at most :math:`\min(d_v, content)` numbers, whatever its row and its matrices, so the share of
the wanted numbers' variance that is lost is at least

.. math:: 1-\frac{h\,\min(d_v,\ content)}{n_{targets}\cdot content}

It does not use that weights are positive and sum to 1, but it does use that W_O is linear: what a nonlinear reader
makes of a mean is shown by ``averaged_pair``.

Source: vaswani2017, section 3.2.2 (a single head averages).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import context, softmax, softmax_gradient
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    n_heads: int = number(2, low=1, high=16, log2=True)
    n_targets: int = number(2, low=1, high=8)
    d_model: int = number(16, low=2, high=64, log2=True)
    content: int = number(8, low=1, high=64)
    kv_len: int = number(8, low=2, high=32, log2=True)
    logit_range: float = number(16.0, low=1, high=32, step=1)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": self.d_model})
        if self.content > self.d_model:
            values = {"d_model": self.d_model}
            yield Problem("rule", "content", self.content, rule="content_within_model", values=values)
        if self.n_targets > self.kv_len:
            values = {"kv_len": self.kv_len}
            yield Problem("rule", "n_targets", self.n_targets, rule="targets_among_keys", values=values)


METRICS = (
    Metric("lost_share"),
    Metric("lost_share_one_head"),
    Metric("lost_share_bound"),
)
PLOTS = (
    Plot("rows", table="rows", x="key", y="attention_weight", by="row", mark="bar"),
    Plot("lost", table="by_content", x="content", y="lost_share", by="n_heads", theory="lost_share_bound"),
)
BUDGET_S = 0.05

N_STARTS = 4  # of the search: one in which the heads lean towards a target each, in turn, and three random ones
STEPS, STEP_SIZE = 12, 1.0  # of Adam on the numbers behind the logits
RIDGE = 1e-9  # beside second moments of size 1: for coordinates that are left out, and heads whose rows coincide
N_DRAWS = 1024  # sets of tokens on which the layers that were found are measured


class _Layers(NamedTuple):
    """Layers that are searched together, a number of heads after the other, each with all widths of the content.

    A head that is wider than the content would only repeat itself: of its rows of W_v as many are used as the content
    has dimensions, the others are 0.

    Shapes: head_of (layer, d_model, n_heads), 1 where a coordinate is read under a head's row; W_v (layer, d_model,
    d_model), 0 behind the layer's content; wanted (layer,), how many numbers are wanted.
    """

    head_of: torch.Tensor
    W_v: torch.Tensor
    wanted: torch.Tensor


def memory_bytes(params: Params) -> int:
    """The square matrices of all starts, forward and back, and the tokens that are drawn with their values."""
    layers = 2 * len(_contents(params))
    squares = layers * (N_STARTS * 10 + 4) * params.d_model**2
    rows = 20 * layers * N_STARTS * (params.n_heads * params.kv_len + params.d_model * params.n_targets)
    tokens = N_DRAWS * (params.kv_len * (params.content + 3 * params.d_model) + 4 * params.n_targets * params.content)
    return 8 * (squares + rows) + 4 * tokens


def run(params: Params, run: Run) -> Result:
    """Search good layers of one head and of ``n_heads`` at several widths of the content; measure the chosen ones.

    ``lost_share``: squared error of the slots over their squared length, on drawn tokens; in the table the expectation,
    without drawing. The search runs in float64 on the CPU, whatever the run's dtype.

    Shapes: rows (layer, n_heads, kv_len), tokens (draw, kv_len, content).
    """
    contents, counts = _contents(params), sorted({1, params.n_heads})
    pairs = [(n_heads, content) for n_heads in counts for content in contents]
    layers = _draw_layers(run, params, pairs)
    rows, lost = _search(params, run, layers)
    run.progress(0.9)
    tokens = run.randn(N_DRAWS, params.kv_len, params.content)
    measured, shown = {}, {}
    for n_heads in counts:
        i = pairs.index((n_heads, params.content))
        W_o = _best_output(rows[i], layers.head_of[i], layers.W_v[i, :, : params.content], params.n_targets)
        shown[n_heads] = rows[i, :n_heads]
        measured[n_heads] = _measure(tokens, shown[n_heads], layers.W_v[i, :, : params.content], W_o)
    metrics = {
        "lost_share": measured[params.n_heads],
        "lost_share_one_head": measured[1],
        "lost_share_bound": _bound(params, params.n_heads, params.content),
    }
    by_content = {
        "n_heads": np.array([n_heads for n_heads, _ in pairs]),
        "content": np.array([content for _, content in pairs]),
        "lost_share": lost.numpy(),
        "lost_share_bound": np.array([_bound(params, n_heads, content) for n_heads, content in pairs]),
    }
    return Result(metrics, {"rows": _rows_table(shown), "by_content": by_content})


def _contents(params: Params) -> list[int]:
    """Widths of the content in the table: the chosen one among some parts of the model's width."""
    parts = {params.d_model * eighths // 8 for eighths in (2, 4, 5, 6, 8)}
    return sorted({max(1, width) for width in parts} | {params.content})


def _bound(params: Params, n_heads: int, content: int) -> float:
    """The share that is lost at least."""
    passed_on = n_heads * min(params.d_model // n_heads, content)
    return max(0.0, 1 - passed_on / (params.n_targets * content))


def _draw_layers(run: Run, params: Params, pairs: list[tuple[int, int]]) -> _Layers:
    """A layer for each number of heads and width of the content; the rows of a head's W_v are orthonormal."""
    import torch
    from torch.nn.functional import one_hot

    d_model = params.d_model
    drawn = run.randn(d_model, d_model).cpu().double()
    W_v = torch.zeros(len(pairs), d_model, d_model, dtype=torch.float64)
    for of_layer, (n_heads, content) in zip(W_v, pairs, strict=True):
        d_v = d_model // n_heads
        used = drawn.view(n_heads, d_v, d_model)[:, : min(d_v, content), :content]
        of_layer.view(n_heads, d_v, d_model)[:, : used.shape[1], :content] = torch.linalg.qr(used.mT)[0].mT
    number = torch.stack([torch.arange(d_model) // (d_model // n_heads) for n_heads, _ in pairs])
    wanted = torch.tensor([float(params.n_targets * content) for _, content in pairs], dtype=torch.float64)
    return _Layers(one_hot(number, params.n_heads).to(W_v.dtype), W_v, wanted)


def _search(params: Params, run: Run, layers: _Layers) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that lose least with the W_O that is best for them, and what they lose: by Adam, the best of the starts.

    Shapes: (layer, n_heads, kv_len), (layer,).
    """
    import torch

    shape = (len(layers.wanted), N_STARTS, params.n_heads, params.kv_len)
    free = 0.3 * run.randn(*shape).cpu().double()
    for head in range(params.n_heads):
        free[:, 0, head, head % params.n_targets] += 1
    first, second = torch.zeros_like(free), torch.zeros_like(free)
    for step in range(1, STEPS + 1):
        run.progress(0.9 * (step - 1) / STEPS)
        part = free.sigmoid()
        rows = softmax(params.logit_range * part)
        _, gradient = _lost(rows, layers, params.n_targets)
        gradient = params.logit_range * part * (1 - part) * softmax_gradient(rows, gradient)
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.1)
        unbias = 1 - 0.9**step
        free = free - STEP_SIZE * (first / unbias) / ((second / unbias).sqrt() + 1e-12)
    rows = softmax(params.logit_range * free.sigmoid())
    lost, best = _lost(rows, layers, params.n_targets)[0].min(dim=1)
    return rows[torch.arange(len(rows)), best], lost


def _lost(rows: torch.Tensor, layers: _Layers, n_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    r"""What is lost with the W_O that is best for these rows, and the gradient of that with respect to them.

    Tokens are independent. So two coordinates that W_O reads, with rows v, v' of W_V under the weights w, w', have the
    second moment :math:`M=(w\cdot w')(v\cdot v')`; their moments with the wanted numbers, multiplied and summed, are
    :math:`N=(w_T\cdot w'_T)(v\cdot v')`, where w_T is what w puts on the targets. Least squares keeps
    :math:`\mathrm{tr}(M^{-1}N)` of the numbers, and its differential is :math:`\mathrm{tr}(M^{-1}dN-M^{-1}NM^{-1}dM)`.

    Shapes: rows (layer, start, n_heads, kv_len); returns (layer, start) and as rows.
    """
    import torch

    of_values = (layers.W_v @ layers.W_v.mT)[:, None]
    head_of, wanted = layers.head_of[:, None], layers.wanted[:, None]
    on_targets = rows[..., :n_targets]
    moments, shared = (head_of @ (w @ w.mT) @ head_of.mT * of_values for w in (rows, on_targets))
    inverse = torch.linalg.inv(moments + RIDGE * torch.eye(moments.shape[-1], dtype=moments.dtype))
    twice = inverse @ shared @ inverse
    kept = (inverse * shared).sum(dim=(-2, -1))
    by_moments, by_shared = (head_of.mT @ (matrix * of_values) @ head_of for matrix in (twice, inverse))
    gradient = by_moments @ rows
    gradient[..., :n_targets] -= by_shared @ on_targets
    return 1 - kept / wanted, 2 * gradient / wanted[..., None, None]


def _best_output(rows: torch.Tensor, head_of: torch.Tensor, W_v: torch.Tensor, n_targets: int) -> torch.Tensor:
    """The W_O of least expected squared error of one layer. Shapes: (d_model, n_targets · content)."""
    import torch

    by_coordinate = head_of @ rows  # (d_model, kv_len)
    moments = (by_coordinate @ by_coordinate.mT) * (W_v @ W_v.mT)
    with_wanted = (by_coordinate[:, :n_targets, None] * W_v[:, None]).flatten(1)
    return torch.linalg.solve(moments + RIDGE * torch.eye(len(moments), dtype=moments.dtype), with_wanted)


def _measure(tokens: torch.Tensor, rows: torch.Tensor, W_v: torch.Tensor, W_o: torch.Tensor) -> float:
    """The share that a layer loses of the slots, on these tokens.

    Shapes: tokens (draw, kv_len, content), rows (n_heads, kv_len), W_v (d_model, content), W_o (d_model, wanted).
    """
    rows, W_v, W_o = (matrix.to(tokens.device, tokens.dtype) for matrix in (rows, W_v, W_o))
    v = (tokens @ W_v.mT).unflatten(-1, (len(rows), -1)).transpose(1, 2)  # (draw, n_heads, kv_len, d_v)
    out = context(rows[:, None], v).flatten(1) @ W_o
    wanted = tokens.flatten(1)[:, : W_o.shape[1]]  # the first tokens are the targets
    return float((out - wanted).square().sum() / wanted.square().sum())


def _rows_table(shown: dict[int, torch.Tensor]) -> Table:
    """The weights of the one wide head, and of each narrow head."""
    named = [
        ("one_head" if n_heads == 1 else f"H{i + 1}", row)
        for n_heads, rows in shown.items()
        for i, row in enumerate(rows.numpy())
    ]
    kv_len = len(named[0][1])
    return {
        "row": np.repeat([name for name, _ in named], kv_len),
        "key": np.tile([f"K{j + 1}" for j in range(kv_len)], len(named)),
        "attention_weight": np.concatenate([row for _, row in named]),
    }
