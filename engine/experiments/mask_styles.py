r"""Six ways to hide keys from a query, in three number formats: what is left on the hidden keys, and of the rows.

``minus_inf``           the hidden logits become -inf before the softmax
``filled``              they become a finite constant: what stood there is overwritten
``added``               a finite constant is added to them: what stood there stays, if the format can resolve it
``times_zero``          they are multiplied by 0, and exp 0 = 1
``after_softmax``       their weights are multiplied by 0
``renormalized``        and the rows are divided by their sums

Logits are drawn and rounded to the format; every later step is stored in it, as in eager code. The reference is the
softmax over the visible keys alone, in float64, of the rounded logits. Hidden are the last ``hidden_len`` keys of each
row. From one more query all keys are hidden: the empty row, which is measured by itself. A second additive mask hides
the last ``hidden_twice`` keys again, where they are hidden: what becomes of a causal mask and a padding mask that are
added. It concerns ``added`` only.

Sources: vaswani2017, section 3.2.3; bert-code, ``attention_layer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.masks import keep_padding

if TYPE_CHECKING:
    import torch

STYLES = ("added", "filled", "minus_inf", "times_zero", "after_softmax", "renormalized")
CONSTANTS = {"minus_1e4": -1e4, "minus_1e9": -1e9}  # format_min is the smallest finite number of the format


@dataclass(frozen=True)
class Params(BaseParams):
    applied: str = choice(*STYLES)
    mask_constant: str = choice("minus_1e4", "minus_1e9", "format_min")
    low_dtype: str = choice("float32", "bfloat16", "float16")
    kv_len: int = number(16, low=2, high=4096, log2=True)
    hidden_len: int = number(8, low=1, high=4095)
    q_len: int = number(64, low=1, high=1024, log2=True)
    visible_mean: float = number(0.0, low=-20000, high=20000, step=100)
    hidden_mean: float = number(0.0, low=-20000, high=20000, step=100)
    logits_spread: float = number(1.0, low=0, high=100, step=0.5)
    hidden_twice: int = number(0, low=0, high=4096)

    def rules(self) -> Iterator[Problem]:
        if self.hidden_len >= self.kv_len:
            yield Problem(
                "rule", "hidden_len", self.hidden_len, rule="some_key_visible", values={"kv_len": self.kv_len}
            )
        if self.hidden_twice > self.kv_len:
            values = {"kv_len": self.kv_len}
            yield Problem("rule", "hidden_twice", self.hidden_twice, rule="twice_within_keys", values=values)
        if self.q_len * self.kv_len > MAX_LOGITS:
            values = {"product": self.q_len * self.kv_len, "limit": MAX_LOGITS}
            yield Problem("rule", "kv_len", self.kv_len, rule="too_many_logits", values=values)


METRICS = (
    Metric("hidden_weight_max"),
    Metric("row_sum_min"),
    Metric("row_sum_max"),
    Metric("undefined_rows"),
    Metric("mask_error_max"),
    Metric("empty_row_undefined"),
    Metric("empty_row_from_uniform"),
    Metric("empty_row_from_unmasked"),
    Metric("infinite_mask_share"),
    Metric("fill_refused"),
)
PLOTS = (
    Plot("leak", table="leak", x="hidden_lead", y="hidden_weight", by="applied", x_scale="log2"),
    Plot("empty", table="empty", x="key_position", y="attention_weight", by="applied", mark="bar"),
)
BUDGET_S = 0.05

MAX_LOGITS = 2**18  # 0.1 s where six ways are compared
# of the hidden logits, in the curve; within some units of the constant -1e4 the weight goes from 0 to 1
LEADS = np.union1d(2.0 ** np.arange(-2, 15), [9980.0, 9990.0, 9995.0, 10000.0, 10005.0, 10010.0, 10020.0])


def memory_bytes(params: Params) -> int:
    """Logits, masks and weights of a run, in float64 for the reference; a row for each point of the curve."""
    return 8 * 16 * (params.q_len + 1) * params.kv_len + 8 * 16 * (len(LEADS) + 1) * params.kv_len + 2**16


def run(params: Params, run: Run) -> Result:
    """The weights under the chosen way against the reference; every way in the curves.

    ``hidden_weight_max``: the largest weight of a row on all its hidden keys together; a row with NaN counts 0.
    ``row_sum_*``: of the rows that have one, 0 where none has. ``undefined_rows``: rows with NaN.
    ``mask_error_max``: half the sum of the absolute differences from the reference, largest over the rows; a row
    with NaN counts as wholly wrong (1). The empty row is left out of these. ``empty_row_undefined``: 1 where it is
    NaN; ``empty_row_from_*``: half the sum of the absolute differences of its weights from equal ones, and from the
    softmax without any mask; 1 where it is NaN. ``infinite_mask_share``: hidden entries of the additive mask that
    are -inf in the format. ``fill_refused``: 1 where torch refuses to fill a tensor of the format with the
    constant, as a Python number.

    Shapes: logits (q_len + 1, kv_len); the last row is the empty one.
    """
    import torch

    dtype = getattr(torch, params.low_dtype)
    visible = keep_padding([params.kv_len - params.hidden_len], params.kv_len, device=run.device)[0]  # (1, kv_len)
    drawn = run.randn(params.q_len + 1, params.kv_len) * params.logits_spread
    logits = (drawn + torch.where(visible, params.visible_mean, params.hidden_mean)).to(dtype)
    keep = visible.repeat(params.q_len + 1, 1)
    keep[-1] = False
    weights = _weights(params.applied, logits, keep, params).cpu().double()
    run.progress(0.5)

    rows, empty = weights[:-1], weights[-1]
    reference = softmax(mask_logits(logits[:-1].cpu().double(), visible.cpu()))
    undefined = rows.isnan().any(dim=-1)
    error = _distance(rows, reference)
    sums = rows.sum(dim=-1)[~undefined] if not undefined.all() else torch.zeros(1)
    metrics = {
        "hidden_weight_max": (rows * ~visible.cpu()).sum(dim=-1).nan_to_num(0.0).max(),
        "row_sum_min": sums.min(),
        "row_sum_max": sums.max(),
        "undefined_rows": undefined.sum(),
        "mask_error_max": error.max(),
        "empty_row_undefined": empty.isnan().any(),
        "empty_row_from_uniform": _distance(empty, torch.full_like(empty, 1 / params.kv_len)),
        "empty_row_from_unmasked": _distance(empty, softmax(logits[-1].cpu().double())),
        "infinite_mask_share": _additive(keep, dtype, params)[:-1][~keep[:-1]].isinf().cpu().double().mean(),
        "fill_refused": _refuses(dtype, params),
    }
    tables = {"leak": _leak(params, run, drawn[0], visible, dtype), "empty": _empty(params, logits[-1:], keep[-1:])}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _distance(weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Half the sum of the absolute differences of each row; 1 for a row with NaN. Shapes: (..., kv_len) to (...,)."""
    return ((weights - wanted).abs().sum(dim=-1) / 2).nan_to_num(1.0)


def _constant(dtype: torch.dtype, params: Params) -> float:
    import torch

    return CONSTANTS.get(params.mask_constant, float(torch.finfo(dtype).min))


def _additive(keep: torch.Tensor, dtype: torch.dtype, params: Params) -> torch.Tensor:
    """The mask that is added: the constant, cast to the format, where a key is hidden; twice for the last ones."""
    import torch

    # a cast turns what is out of range into -inf; a fill with the number would refuse it
    constant = torch.tensor(_constant(dtype, params), device=keep.device).to(dtype)
    zero = torch.zeros((), dtype=dtype, device=keep.device)
    first = torch.where(keep, zero, constant)
    again = torch.arange(keep.shape[-1], device=keep.device) >= keep.shape[-1] - params.hidden_twice
    return first + torch.where(again & ~keep, constant, zero)


def _weights(applied: str, logits: torch.Tensor, keep: torch.Tensor, params: Params) -> torch.Tensor:
    """Shapes: logits and keep (rows, kv_len); every step in the format of the logits."""
    import torch

    if applied == "minus_inf":
        return softmax(mask_logits(logits, keep))
    if applied == "filled":
        constant = torch.tensor(_constant(logits.dtype, params), device=keep.device).to(logits.dtype)
        return softmax(torch.where(keep, logits, constant))
    if applied == "added":
        return softmax(logits + _additive(keep, logits.dtype, params))
    if applied == "times_zero":
        return softmax(logits * keep)
    weights = softmax(logits) * keep
    return weights / weights.sum(dim=-1, keepdim=True) if applied == "renormalized" else weights


def _refuses(dtype: torch.dtype, params: Params) -> bool:
    """Whether torch declines to fill a tensor of the format with the constant."""
    import torch

    try:
        torch.zeros(1, dtype=dtype).masked_fill(torch.ones(1, dtype=torch.bool), _constant(dtype, params))
    except RuntimeError:
        return True
    return False


def _leak(params: Params, run: Run, drawn: torch.Tensor, visible: torch.Tensor, dtype: torch.dtype) -> Table:
    """Weight on the hidden keys when their logits lead those of the visible keys by so much; every way.

    A NaN is drawn as nothing. Shapes: drawn (kv_len,), visible (1, kv_len).
    """
    import torch

    leads = torch.tensor(LEADS, device=run.device, dtype=run.dtype)[:, None]
    logits = (drawn + params.visible_mean + torch.where(visible, 0.0, leads)).to(dtype)
    keep = visible.expand(len(LEADS), -1)
    parts = []
    for i, applied in enumerate(STYLES):
        run.progress(0.6 + 0.3 * i / len(STYLES))
        weights = _weights(applied, logits, keep, params).cpu().double()
        hidden = (weights * ~keep.cpu()).sum(dim=-1).numpy()
        there = np.isfinite(hidden)
        parts.append((LEADS[there], np.full(there.sum(), applied), hidden[there]))
    leads_there, styles, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {
        "hidden_lead": leads_there.astype(np.float32),
        "applied": styles,
        "hidden_weight": weight.astype(np.float32),
    }


def _empty(params: Params, logits: torch.Tensor, keep: torch.Tensor) -> Table:
    """The weights of the empty row under the ways that give it any, and without a mask; the first keys only."""
    n = min(params.kv_len, 32)
    rows = [("no_mask", softmax(logits.cpu().double())[0])]
    rows += [(applied, _weights(applied, logits, keep, params).cpu().double()[0]) for applied in STYLES]
    drawn = [(name, row[:n].numpy()) for name, row in rows if not row.isnan().any()]
    return {
        "key_position": np.tile(np.arange(n), len(drawn)),
        "applied": np.repeat([name for name, _ in drawn], n),
        "attention_weight": np.concatenate([row for _, row in drawn]).astype(np.float32),
    }
