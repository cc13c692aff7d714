r"""Which rows of a learned position table a training step reaches: one backward pass through a small causal model.

Row t of the table is added to the token at place t, so only texts longer than t touch it. Rows behind the longest text
get no gradient at all and stay as they were drawn; the last rows that are touched get theirs from few texts.

``all_lengths``  the texts of the batch are of all lengths up to ``longest``, the rest is padding
``packed``       every text is ``longest`` tokens long, as when documents are joined and cut

The model has two pre-norm blocks with matrices N(0, 1/fan_in); the loss is the squared distance of each output to a
random target, averaged over all real tokens of the batch. No step is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.encodings import from_table
from engine.masks import keep_causal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    lengths: str = choice("all_lengths", "packed")
    table_rows: int = number(64, low=8, high=128, log2=True)
    longest: int = number(48, low=8, high=128)
    batch: int = number(24, low=1, high=128)
    n_layers: int = number(2, low=1, high=4)
    d_model: int = number(16, low=8, high=64, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.longest > self.table_rows:
            values = {"table_rows": self.table_rows}
            yield Problem("rule", "longest", self.longest, rule="text_within_table", values=values)


METRICS = (
    Metric("untouched_rows"),
    Metric("last_row_texts"),
    Metric("late_to_early_gradient"),
)
PLOTS = (
    Plot("by_row", table="by_row", x="table_row", y="row_gradient", by="lengths"),
    Plot("texts", table="by_row", x="table_row", y="texts", by="lengths"),
)
BUDGET_S = 0.1

LENGTHS = ("all_lengths", "packed")


def memory_bytes(params: Params) -> int:
    """Activations and their gradients in every layer."""
    tokens = params.batch * params.longest
    return 4 * (params.n_layers + 1) * tokens * (24 * params.d_model + 8 * params.longest) + 2**20


def run(params: Params, run: Run) -> Result:
    """The gradient to every row, under both ways to fill the batch.

    ``untouched_rows``: rows whose gradient is 0 throughout. ``last_row_texts``: texts that reach the last row touched.
    ``late_to_early_gradient``: root mean square of the gradient in the last quarter of ``longest`` over the first.

    Shapes: tokens and targets (batch, longest, d_model), table (table_rows, d_model).
    """
    import torch

    tokens, targets = (run.randn(params.batch, params.longest, params.d_model) for _ in range(2))
    table = run.randn(params.table_rows, params.d_model)
    layers = [run.randn(6, params.d_model, params.d_model) / params.d_model**0.5 for _ in range(params.n_layers)]
    found = {}
    for done, lengths in enumerate(LENGTHS):
        run.progress(done / len(LENGTHS))
        filled = _lengths(params, lengths).to(tokens.device)
        real = torch.arange(params.longest, device=tokens.device) < filled[:, None]
        gradient = _gradient(tokens, targets, real, table, layers)
        texts = (filled[:, None] > torch.arange(params.table_rows, device=tokens.device)).sum(dim=0)
        found[lengths] = gradient.norm(dim=-1).cpu().double().numpy(), texts.cpu().numpy()
    rows, texts = found[params.lengths]
    quarter = params.longest // 4
    late, early = (
        float(np.sqrt((part**2).mean())) for part in (rows[params.longest - quarter : params.longest], rows[:quarter])
    )
    metrics = {
        "untouched_rows": float((rows == 0).sum()),
        "last_row_texts": float(texts[texts > 0][-1]),
        "late_to_early_gradient": late / early,
    }
    return Result(metrics, {"by_row": _by_row(found)})


def _lengths(params: Params, kind: str) -> torch.Tensor:
    """How many real tokens each text has; the longest one is always there. Shapes: (batch,)."""
    import torch

    if kind == "packed":
        return torch.full((params.batch,), params.longest)
    return -(-torch.arange(1, params.batch + 1) * params.longest // params.batch)


def _gradient(
    tokens: torch.Tensor, targets: torch.Tensor, real: torch.Tensor, table: torch.Tensor, layers: list[torch.Tensor]
) -> torch.Tensor:
    """The gradient of the loss to the table. Shapes: real (batch, longest), each of layers (6, d_model, d_model)."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    rows = table.clone().requires_grad_()
    places = torch.arange(tokens.shape[1], device=tokens.device)
    keep = keep_causal(tokens.shape[1], device=tokens.device)
    x = tokens + from_table(rows, places)
    for W_q, W_k, W_v, W_o, W_up, W_down in layers:
        normed = layer_norm(x, x.shape[-1:])
        x = x + attention(normed @ W_q, normed @ W_k, normed @ W_v, keep=keep) @ W_o
        x = x + gelu(layer_norm(x, x.shape[-1:]) @ W_up) @ W_down
    loss = (x - targets).square().mean(dim=-1)[real].mean()
    return torch.autograd.grad(loss, rows)[0]


def _by_row(found: dict[str, tuple[np.ndarray, np.ndarray]]) -> Table:
    """The gradient to each row and the texts that reach it."""
    n_rows = len(found[LENGTHS[0]][0])
    return {
        "lengths": np.repeat(LENGTHS, n_rows),
        "table_row": np.tile(np.arange(n_rows), len(LENGTHS)),
        "row_gradient": np.concatenate([found[lengths][0] for lengths in LENGTHS]),
        "texts": np.concatenate([found[lengths][1] for lengths in LENGTHS]),
    }
