r"""A causal head that averages its prefix, and what can be read from the average about the position.

With equal logits the token at position t (counted from 0) puts :math:`1/(t+1)` on every token up to itself, so also on
the first one. Where the values mark that token, as a BOS token can be marked, the head's output holds
:math:`1/(t+1)`: the position is :math:`1/\text{share}-1`. Without a mark the average of t + 1 independent values still
shrinks like :math:`1/\sqrt{t+1}`.

``logits_std`` gives each key a logit of its own, as content does: the share then counts other tokens as more or less
than one. ``number_format`` rounds the share as a 16-bit activation would: far positions coincide.

Sources: kazemnejad2023, abstract (positions can be represented without an encoding); chi2023, abstract (the shrinking
variance).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.attention import context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number


@dataclass(frozen=True)
class Params(BaseParams):
    position: int = number(7, low=0, high=1023, step=1)
    logits_std: float = number(0.0, low=0, high=1.5, step=0.25)
    number_format: str = choice("float32", "bfloat16", "float16")
    seq_len: int = number(128, low=8, high=1024, log2=True)
    n_heads: int = number(16, low=1, high=64, log2=True)
    d_v: int = number(64, low=1, high=128, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.position >= self.seq_len:
            values = {"last": self.seq_len - 1}
            yield Problem("rule", "position", self.position, rule="position_within_length", values=values)


METRICS = (
    Metric("bos_share"),
    Metric("position_read"),
    Metric("context_std"),
    Metric("position_read_error"),
    Metric("first_tie"),
)
PLOTS = (
    Plot(
        "share",
        table="by_position",
        x="prefix_len",
        y="bos_share",
        low="bos_share_low",
        high="bos_share_high",
        theory="one_over_count",
        x_scale="log2",
        y_scale="log2",
    ),
    Plot(
        "read",
        table="by_position",
        x="position",
        y="position_read",
        low="position_read_low",
        high="position_read_high",
        theory="true_position",
    ),
    Plot(
        "spread",
        table="by_position",
        x="prefix_len",
        y="context_std",
        theory="one_over_root_count",
        x_scale="log2",
        y_scale="log2",
    ),
)
BUDGET_S = 0.02

CHUNK_LOGITS = 2**18
BAND = (0.1, 0.5, 0.9)  # of the heads: the ends of the band and the line in it


def memory_bytes(params: Params) -> int:
    """One chunk of logits with its temporaries, the values of all heads, and some columns a position."""
    logits = max(CHUNK_LOGITS, params.n_heads * params.seq_len)
    values = 3 * params.n_heads * params.seq_len * (params.d_v + 4)
    return 4 * (5 * logits + values) + 8 * 40 * params.seq_len + 2**16


def run(params: Params, run: Run) -> Result:
    """Shares of the first token, and spread of the averaged values, of ``n_heads`` heads at every position.

    ``bos_share``, ``position_read``: medians over the heads at ``position``. ``position_read_error``: median of the
    error of what is read, relative to position + 1. ``first_tie``: the first position whose share, in the number
    format, equals that of the position before, in the first head; seq_len where there is none.

    Shapes: logits (n_heads, seq_len), one a key and the same for all queries; v (n_heads, seq_len, d_v).
    """
    import torch

    logits = params.logits_std * run.randn(params.n_heads, params.seq_len)
    v = run.randn(params.n_heads, params.seq_len, params.d_v)
    places = torch.arange(params.seq_len, device=logits.device)
    rows = max(1, CHUNK_LOGITS // (params.n_heads * params.seq_len))
    shares, squares = [], []
    for start in range(0, params.seq_len, rows):
        run.progress(start / params.seq_len)
        keep = places <= places[start : start + rows, None]  # (rows, seq_len)
        weights = softmax(mask_logits(logits[:, None, :].expand(-1, len(keep), -1), keep))
        shares.append(weights[..., 0].clone())  # the first token's mark, averaged; a view would keep the whole chunk
        squares.append(context(weights, v).square().mean(dim=(0, 2)))
    share = torch.cat(shares, dim=1).to(getattr(torch, params.number_format)).cpu().double().numpy()
    spread = torch.cat(squares).sqrt().cpu().double().numpy()

    at = params.position
    read = 1 / share - 1
    ties = np.flatnonzero(share[0, 1:] == share[0, :-1])
    metrics = {
        "bos_share": float(np.median(share[:, at])),
        "position_read": float(np.median(read[:, at])),
        "context_std": float(spread[at]),
        "position_read_error": float(np.median(np.abs(read[:, at] - at)) / (at + 1)),
        "first_tie": float(ties[0] + 1 if len(ties) else params.seq_len),
    }
    return Result(metrics, {"by_position": _by_position(share, read, spread)})


def _by_position(share: np.ndarray, read: np.ndarray, spread: np.ndarray) -> Table:
    """Medians and a band over the heads, and what equal logits would give."""
    count = np.arange(1, share.shape[1] + 1)
    columns: Table = {"position": count - 1, "prefix_len": count}
    for name, values in (("bos_share", share), ("position_read", read)):
        low, middle, high = np.quantile(values, BAND, axis=0)
        columns |= {name: middle, f"{name}_low": low, f"{name}_high": high}
    return columns | {
        "context_std": spread,
        "one_over_count": 1 / count,
        "true_position": count - 1.0,
        "one_over_root_count": 1 / np.sqrt(count),
    }
