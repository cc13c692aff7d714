r"""How much of the next token can be read off earlier normalized tokens, though all tokens are independent.

Independent tokens: nothing in the past tells anything of the next one, and the best prediction explains a share 0 of
its variance. A norm whose statistics are shared over positions makes its outputs add up to 0 over all N tokens that
share them, so they are correlated by :math:`-1/(N-1)`. The best linear prediction of a text's last token from its k
tokens before then explains

.. math:: R^2=\frac{k}{(N-1)(N-k)}

of the last one's variance: 1 where one text is the whole batch (N = k + 1), for the last token is then minus the sum of
all others, and about :math:`k/N^2` in a large batch. In evaluation the statistics are constants and nothing is shared.

The prediction is fitted by least squares on one half of the batches and measured on the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.norms import KEEP_RUNNING, NORM_AXES, NormStatistics, norm_statistics, normalize

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    normalization: str = choice(*NORM_AXES)
    norm_mode: str = choice("training_mode", "evaluation_mode")
    batch: int = number(2, low=1, high=64, log2=True)
    seq_len: int = number(8, low=2, high=32, log2=True)
    d_model: int = number(64, low=8, high=256, log2=True)
    n_batches: int = number(32, low=4, high=256, log2=True)

    def rules(self) -> Iterator[Problem]:
        numbers = self.batch * self.seq_len * self.d_model * self.n_batches
        if numbers > MAX_NUMBERS:
            values = {"numbers": numbers, "limit": MAX_NUMBERS}
            yield Problem("rule", "n_batches", self.n_batches, rule="too_many_numbers_to_normalize", values=values)

    def unread(self) -> frozenset[str]:
        return frozenset() if self.normalization in KEEP_RUNNING else frozenset({"norm_mode"})


METRICS = (
    Metric("future_read_share"),
    Metric("theory_future_read_share"),
    Metric("raw_read_share"),
    Metric("tokens_correlation"),
    Metric("numbers_sharing"),
)
PLOTS = (
    Plot(
        "readable",
        table="by_batch",
        x="texts_in_batch",
        y="future_read_share",
        x_scale="log2",
        theory="theory_future_read_share",
    ),
)
BUDGET_S = 0.05

MAX_NUMBERS = 2**22
BATCHES = (1, 2, 4, 8, 16)  # of the curve
TEXTS = 32  # behind each of its points, in batches of that size; at least four batches


def memory_bytes(params: Params) -> int:
    """All tokens with what is computed of them, in float32 and float64; or those of the curve's largest batches."""
    numbers = params.batch * params.seq_len * params.d_model * params.n_batches
    curve = max(TEXTS, 4 * BATCHES[-1]) * params.seq_len * params.d_model
    return 4 * 24 * max(numbers, curve) + 16 * params.seq_len**2


def run(params: Params, run: Run) -> Result:
    """Fit the last token of a text by those before it, feature by feature with the same coefficients for all features.

    ``future_read_share``: share of the last token's variance that is explained on batches that were not fitted;
    ``raw_read_share``: the same of the tokens before the norm, which is 0 but for the fit. ``tokens_correlation``: mean
    correlation of two tokens of a text after the norm. ``numbers_sharing``: how many numbers share one mean.

    Shapes: x (n_batches, batch, seq_len, d_model).
    """
    x = run.randn(params.n_batches, params.batch, params.seq_len, params.d_model)
    run.progress(0.2)
    normed, sharing = _normed(params, x)
    run.progress(0.4)
    metrics = {
        "future_read_share": _read_share(normed),
        "theory_future_read_share": _theory(params, sharing),
        "raw_read_share": _read_share(x),
        "tokens_correlation": _correlation(normed),
        "numbers_sharing": sharing,
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"by_batch": _by_batch(params, run)})


def _normed(params: Params, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Each batch by its own statistics, in evaluation all by one, where such are kept; and the numbers behind a mean.

    Shapes: x (n_batches, batch, seq_len, d_model), as it comes out.
    """
    statistics = norm_statistics(x, params.normalization)
    sharing = x.numel() // statistics.variance.numel()
    if _is_fixed(params):
        statistics = NormStatistics(*(part.mean(dim=0, keepdim=True) for part in statistics))
    return normalize(x, statistics), sharing


def _is_fixed(params: Params) -> bool:
    return params.norm_mode == "evaluation_mode" and params.normalization in KEEP_RUNNING


def _theory(params: Params, sharing: int) -> float:
    """The law above, where tokens of one text share their statistics."""
    if _is_fixed(params) or -2 not in NORM_AXES[params.normalization]:
        return 0.0
    k = params.seq_len - 1
    return k / ((sharing - 1) * (sharing - k))


def _read_share(x: torch.Tensor) -> float:
    """Fitted on the first half of the batches, measured on the second. Shapes: x (n_batches, batch, seq_len, d)."""
    import torch

    half = len(x) // 2
    fitted, measured = _products(x[:half]), _products(x[half:])
    if measured[-1, -1] == 0:  # a position normalized over one text: nothing is left to explain
        return 0.0
    # the shortest of the best predictions, where several tokens are 0
    coefficients = torch.linalg.pinv(fitted[:-1, :-1], hermitian=True) @ fitted[:-1, -1]
    error = torch.cat((-coefficients, coefficients.new_ones(1)))
    return 1 - float(error @ measured @ error / measured[-1, -1])


def _products(x: torch.Tensor) -> torch.Tensor:
    """Mean products of the tokens of a text, over batches, texts and features. Shapes: returns (seq_len, seq_len)."""
    tokens = x.cpu().double().transpose(0, 2).flatten(1)
    return tokens @ tokens.mT / tokens.shape[1]


def _correlation(x: torch.Tensor) -> float:
    """Mean correlation of two tokens of a text, whose means are 0 up to sampling; 0 where all of them are 0."""
    products = _products(x)
    squares = products.trace().item()
    return (products.sum().item() - squares) / squares / (len(products) - 1) if squares else 0.0


def _by_batch(params: Params, run: Run) -> Table:
    """The same for several sizes of the batch."""
    rows = []
    for done, batch in enumerate(BATCHES):
        run.progress(0.4 + 0.6 * done / len(BATCHES))
        x = run.randn(max(4, TEXTS // batch), batch, params.seq_len, params.d_model)
        normed, sharing = _normed(params, x)
        rows.append((batch, _read_share(normed), _theory(params, sharing)))
    batches, shares, laws = zip(*rows, strict=True)
    return {
        "texts_in_batch": np.array(batches),
        "future_read_share": np.array(shares),
        "theory_future_read_share": np.array(laws),
    }
