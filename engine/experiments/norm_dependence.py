r"""Which tokens of a batch the normalized vector of one token depends on: each norm, in training and in evaluation.

Every token of the batch is overwritten by another one, in turn, and all outputs are computed again. Row (text, token),
column (text, token) of the *map* is how far the first one's output moved when the second one was overwritten. A norm
of single tokens moves nothing but the overwritten token itself, a norm over texts moves tokens of that text, BatchNorm
in training moves them all: tokens of other texts, later tokens, and, where padding is not left out, every token by
padding. In evaluation the statistics of earlier batches stand in, and only the diagonal is left.

Sources: ba2016, sections 2 and 3; ioffe2015, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.norms import KEEP_RUNNING, NORM_AXES, NormStatistics, norm_statistics, normalize, update_running

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    normalization: str = choice(*NORM_AXES)
    norm_mode: str = choice("training_mode", "evaluation_mode")
    batch: int = number(4, low=1, high=16, log2=True)
    seq_len: int = number(6, low=2, high=24)
    d_model: int = number(32, low=2, high=256, log2=True)
    padding_added: int = number(0, low=0, high=16)
    mask_padding: bool = flag(False)
    mates_scale: float = number(1.0, low=0.0625, high=16, log2=True)

    def rules(self) -> Iterator[Problem]:
        tokens = self.batch * (self.seq_len + self.padding_added)
        if tokens > MAX_TOKENS:
            values = {"tokens": tokens, "limit": MAX_TOKENS}
            yield Problem("rule", "seq_len", self.seq_len, rule="too_many_tokens_to_overwrite", values=values)

    def unread(self) -> frozenset[str]:
        idle = set()
        if self.normalization not in KEEP_RUNNING:
            idle.add("norm_mode")
        if self.padding_added == 0 or NORM_AXES[self.normalization] == (-1,):
            idle.add("mask_padding")
        return frozenset(idle)


METRICS = (
    Metric("tokens_depended_on"),
    Metric("other_text_change_max"),
    Metric("future_change_max"),
    Metric("future_gradient_max"),
    Metric("mates_change_rms"),
    Metric("padding_change_rms"),
    Metric("n_norm_statistics"),
    Metric("norm_output_rms"),
)
PLOTS = (
    Plot("dependence", table="tokens", mark="heat", x="overwritten_token", y="normalized_token", value="change_log10"),
    Plot("mates", table="by_batch", x="texts_in_batch", y="mates_change_rms", by="normalization", x_scale="log2"),
)
BUDGET_S = 0.05

MAX_TOKENS = 60  # the map is drawn with a cell for each pair, 3600
AT_ONCE = 12  # copies of the batch in one pass
EARLIER, MOMENTUM = 50, 0.1  # batches behind the running statistics, and the weight of each, PyTorch's default
FLOOR, ZERO = -8, -9  # of the map: what is smaller than 1e-8, and what is exactly 0
BATCHES = (2, 4, 8, 16, 32)  # of the curve
COMPARED = ("layer_norm", "whole_text_norm", "position_batch_norm", "batch_norm")


def memory_bytes(params: Params) -> int:
    """A copy of the batch for each token with its gradient, and the batches of the curve."""
    padded = params.seq_len + params.padding_added
    tokens = params.batch * padded
    curve = BATCHES[-1] * params.seq_len
    return 4 * params.d_model * (12 * tokens * max(tokens, AT_ONCE) + 20 * curve) + 400 * tokens**2


def run(params: Params, run: Run) -> Result:
    """Overwrite every token in turn; then give the first text other mates, and all texts padding.

    ``tokens_depended_on``: how many tokens move the output of one, on average, itself included.
    ``other_text_change_max``, ``future_change_max``: the largest change of one number of an output when a token of
    another text, or a later one of the same text, is overwritten; ``future_gradient_max`` the largest gradient of a
    random projection of an output with respect to a later token of its text. ``mates_change_rms``: root mean square of
    the change of the first text's outputs when all other texts are replaced, by texts whose numbers are ``mates_scale``
    times as large. ``padding_change_rms``: of the change of all outputs when every text is followed by
    ``padding_added`` copies of one vector. ``n_norm_statistics``: variances, or mean squares, that one
    pass computes or looks up.

    Shapes: x (batch, seq_len, d_model).
    """
    import torch

    batch, seq_len, d_model = params.batch, params.seq_len, params.d_model
    x, other = run.randn(batch, seq_len, d_model), run.randn(batch, seq_len, d_model)
    pad, g = run.randn(d_model), run.randn(d_model)
    norm = _Norm(params, run, pad)
    padded = norm.pad(x)
    length = padded.shape[1]
    tokens = batch * length
    real = torch.arange(length, device=run.device).expand(batch, -1).flatten() < seq_len  # of all tokens

    plain = norm(padded)
    changes = []
    for start in range(0, tokens, AT_ONCE):
        run.progress(0.6 * start / tokens)
        which = torch.arange(start, min(start + AT_ONCE, tokens), device=run.device)
        copies = padded.repeat(len(which), 1, 1, 1)
        with_other = torch.cat((other, norm.pad(other)[:, seq_len:].flip(-1)), dim=1)  # other padding, too
        copies.flatten(1, 2)[torch.arange(len(which), device=run.device), which] = with_other.flatten(0, 1)[which]
        changes.append((norm(copies) - plain).abs().amax(dim=-1).flatten(1))  # (overwritten, output)
    change = torch.cat(changes).T[real]  # (output, overwritten)

    run.progress(0.6)
    copies = padded.repeat(tokens, 1, 1, 1).requires_grad_()  # copy t is differentiated at its output t
    each = torch.arange(tokens, device=run.device)
    (slopes,) = torch.autograd.grad((norm(copies).flatten(1, 2)[each, each] @ g).sum(), copies)
    gradient = slopes.flatten(1, 2).norm(dim=-1)[real]

    text, place = each // length, each % length
    same_text = text[real][:, None] == text[None, :]
    later = same_text & (place[real][:, None] < place[None, :]) & real
    elsewhere = ~same_text & real
    run.progress(0.8)
    mates = torch.cat((x[:1], params.mates_scale * other[1:]))
    moved_by_mates = norm(norm.pad(mates))[:1, :seq_len] - plain[:1, :seq_len]
    moved_by_padding = plain[:, :seq_len] - norm(x)
    metrics = {
        "tokens_depended_on": (change > 0).sum(dim=-1).cpu().double().mean(),
        "other_text_change_max": (change * elsewhere).max(),
        "future_change_max": (change * later).max(),
        "future_gradient_max": (gradient * later).max(),
        "mates_change_rms": _rms(moved_by_mates),
        "padding_change_rms": _rms(moved_by_padding),
        "n_norm_statistics": norm.statistics(padded).variance.numel(),
        "norm_output_rms": _rms(plain[:, :seq_len]),
    }
    names = np.array([f"{t + 1} {LETTERS[p]}" for t, p in zip(text.tolist(), place.tolist(), strict=True)])
    tables = {"tokens": _map(names, real.cpu().numpy(), change), "by_batch": _by_batch(params, run)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"  # places of a text: the longest has 24 tokens and 16 of padding


class _Norm:
    """The chosen norm in the chosen mode. In evaluation its statistics are those of earlier batches."""

    def __init__(self, params: Params, run: Run, pad: torch.Tensor) -> None:
        self.params, self._pad = params, pad
        running = None
        if params.norm_mode == "evaluation_mode" and params.normalization in KEEP_RUNNING:
            for _ in range(EARLIER):
                earlier = self.pad(run.randn(params.batch, params.seq_len, params.d_model))
                found = norm_statistics(earlier, params.normalization, self.keep(earlier), unbiased=True)
                running = found if running is None else update_running(running, found, MOMENTUM)
        self.running = running

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, seq_len, d_model) to (batch, seq_len + padding_added, d_model)."""
        import torch

        return torch.cat((x, self._pad.expand(x.shape[0], self.params.padding_added, -1)), dim=1)

    def keep(self, x: torch.Tensor) -> torch.Tensor | None:
        """1 for real tokens, 0 for padding. Shapes: x (..., batch, length, d_model); (length, 1)."""
        import torch

        if not self.params.mask_padding:
            return None
        return (torch.arange(x.shape[-2], device=x.device) < self.params.seq_len)[:, None]

    def statistics(self, x: torch.Tensor) -> NormStatistics:
        """Of the running ones those of the places that x has. Shapes: x (..., batch, length, d_model)."""
        if self.running is None:
            return norm_statistics(x, self.params.normalization, self.keep(x))
        return NormStatistics(*(part[:, : x.shape[-2]] for part in self.running))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.statistics(x))


def _rms(x: torch.Tensor) -> float:
    return float(x.cpu().double().square().mean().sqrt())


def _map(names: np.ndarray, real: np.ndarray, change: torch.Tensor) -> Table:
    """A row for each pair of an output and an overwritten token; texts are numbered, places have letters."""
    with np.errstate(divide="ignore"):
        size = np.log10(change.cpu().double().numpy())
    return {
        "normalized_token": np.repeat(names[real], len(names)),
        "overwritten_token": np.tile(names, int(real.sum())),
        "change_log10": np.where(np.isneginf(size), ZERO, np.maximum(size, FLOOR)).ravel().astype(np.float32),
    }


def _by_batch(params: Params, run: Run) -> Table:
    """How far the first text moves with other mates, in training, without padding: several norms and batch sizes."""
    import torch

    first = run.randn(1, params.seq_len, params.d_model)
    one, other = (run.randn(BATCHES[-1], params.seq_len, params.d_model) for _ in range(2))
    rows = []
    for normalization in COMPARED:
        for batch in BATCHES:
            outs = [
                normalize(x, norm_statistics(x, normalization))[0]
                for x in (torch.cat((first, mates[: batch - 1])) for mates in (one, params.mates_scale * other))
            ]
            rows.append((batch, normalization, _rms(outs[0] - outs[1])))
    batches, names, changes = zip(*rows, strict=True)
    return {
        "texts_in_batch": np.array(batches),
        "normalization": np.array(names),
        "mates_change_rms": np.array(changes),
    }
