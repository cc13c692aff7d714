r"""Queries without any key: where their NaN goes, forward and backward, when the loss leaves those queries out.

A causal sequence begins with ``left_padding`` tokens of padding, whose keys are hidden: those queries see nothing. The
softmax of a row of -inf is 0/0. The loss is a sum over the outputs of the other queries, so the gradient that comes
back to the empty row is exactly 0, and :math:`0\cdot\mathrm{NaN}=\mathrm{NaN}`:

to v  :math:`w^\top g`: NaN weights times 0, for every key
to z  :math:`w\,(g - w^\top g)`: NaN; a ``masked_fill`` passes exactly 0 to what it overwrote, an addition passes it on
to q  the row of z times k; to k  the column of z times q: one NaN row of z reaches all keys

Ways to write it (``guard``):

``bare``              nothing
``where_out``         ``torch.where(seen, out, 0)`` on the outputs
``where_weights``     ``torch.where(seen, weights, 0)`` on the weights
``open``              the empty row may see every key; its output is multiplied by 0 afterwards
``finite``            the smallest finite number of the format instead of -inf
``sdpa_bool``         PyTorch's ``scaled_dot_product_attention`` with a mask of booleans
``sdpa_inf``          the same with a float mask of -inf
``sdpa_min``          the same with a float mask of the smallest finite number

The last three say what this version of PyTorch does on this device. The gradient is compared with that of the other
queries alone, in float64.

Sources: pytorch-code, docstring of ``scaled_dot_product_attention``; pytorch-131060; pytorch-52248.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention, attention_logits, context, mask_logits
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.masks import keep_causal, keep_padding

if TYPE_CHECKING:
    import torch

GUARDS = (
    "bare",
    "where_out",
    "where_weights",
    "open",
    "finite",
    "sdpa_bool",
    "sdpa_inf",
    "sdpa_min",
)


@dataclass(frozen=True)
class Params(BaseParams):
    guard: str = choice(*GUARDS)
    mask_written: str = choice("masked_fill", "additive_mask")
    low_dtype: str = choice("float32", "bfloat16", "float16")
    seq_len: int = number(8, low=2, high=128)
    d_k: int = number(16, low=1, high=128, log2=True)
    left_padding: int = number(2, low=0, high=127)

    def unread(self) -> frozenset[str]:
        written = self.guard not in ("open", "finite", "sdpa_bool", "sdpa_inf", "sdpa_min")
        return frozenset(() if written else {"mask_written"})

    def rules(self) -> Iterator[Problem]:
        if self.left_padding >= self.seq_len:
            values = {"seq_len": self.seq_len}
            yield Problem("rule", "left_padding", self.left_padding, rule="some_token_is_real", values=values)


METRICS = (
    Metric("nan_outputs"),
    Metric("nan_grad_q_rows"),
    Metric("nan_grad_k_rows"),
    Metric("nan_grad_v_rows"),
    Metric("grad_error_max"),
    Metric("zero_outputs"),
    Metric("mean_outputs"),
    Metric("unmasked_outputs"),
)
PLOTS = (
    Plot("nan_rows", table="nan_rows", x="tensor", y="nan_row_count", by="mask_written", facet="guard", mark="bar"),
)
BUDGET_S = 0.05


def memory_bytes(params: Params) -> int:
    """q, k, v with their gradients and some square matrices, in float64 for the reference."""
    return 8 * 24 * params.seq_len * (params.seq_len + params.d_k) + 2**16


def run(params: Params, run: Run) -> Result:
    """Outputs and gradients under the chosen guard; NaN counted under all of them.

    ``nan_outputs``: queries whose output is NaN. ``nan_grad_*_rows``: tokens whose gradient is. ``grad_error_max``:
    the largest difference from the reference, of the gradients that are numbers. ``zero_outputs``, ``mean_outputs``,
    ``unmasked_outputs``: queries without any key whose output is exactly 0; the mean of all values; what attention
    without a mask gives, up to the rounding of the format.

    Shapes: q, k, v and g (seq_len, d_k).
    """
    import torch

    dtype = getattr(torch, params.low_dtype)
    q, k, v, g = (run.randn(params.seq_len, params.d_k).to(dtype) for _ in range(4))
    n_real = params.seq_len - params.left_padding
    padding = keep_padding([n_real], params.seq_len, side="left", device=run.device)[0]  # (1, seq_len)
    keep = keep_causal(params.seq_len, device=run.device) & padding
    g[: params.left_padding] = 0  # the loss leaves the padding out

    out, grads = _differentiate(params.guard, params.mask_written, q, k, v, g, keep)
    run.progress(0.2)
    exact = [x.cpu().double() for x in (q, k, v, g)]
    wanted = _reference_gradients(exact, keep.cpu())
    errors = [(x.cpu().double() - y).abs().nan_to_num(0.0).max() for x, y in zip(grads, wanted, strict=True)]
    empty = out[: params.left_padding].cpu().double()
    unmasked = attention(exact[0], exact[1], exact[2])[: params.left_padding]
    near = 4 * torch.finfo(dtype).eps * exact[2].abs().max()
    metrics = {
        "nan_outputs": _nan_rows(out),
        "nan_grad_q_rows": _nan_rows(grads[0]),
        "nan_grad_k_rows": _nan_rows(grads[1]),
        "nan_grad_v_rows": _nan_rows(grads[2]),
        "grad_error_max": torch.stack(errors).max(),
        "zero_outputs": (empty == 0).all(dim=-1).sum(),
        "mean_outputs": ((empty - exact[2].mean(dim=0)).abs() <= near).all(dim=-1).sum(),
        "unmasked_outputs": ((empty - unmasked).abs() <= near).all(dim=-1).sum(),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"nan_rows": _table(run, q, k, v, g, keep)})


def _differentiate(
    guard: str,
    mask_written: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    keep: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Outputs, and the gradients of the sum of g times them to q, k and v. Shapes: (seq_len, d_k) each."""
    import torch

    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    fused = guard.startswith("sdpa")
    out = _fused(guard, q, k, v, keep) if fused else _eager(guard, mask_written, q, k, v, keep)
    # out of the sum, not times 0: the loss does not read the outputs of the padding at all
    used = keep.any(dim=-1)
    return out.detach(), torch.autograd.grad((out[used] * g[used]).sum(), (q, k, v))


def _eager(
    guard: str, mask_written: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor
) -> torch.Tensor:
    import torch

    seen = keep.any(dim=-1, keepdim=True)
    visible = keep | ~seen if guard == "open" else keep
    fill = torch.finfo(q.dtype).min if guard == "finite" else -math.inf
    logits = attention_logits(q, k)
    if mask_written == "additive_mask":
        logits = logits + torch.zeros_like(logits).masked_fill(~visible, fill)
    elif fill == -math.inf:
        logits = mask_logits(logits, visible)
    else:
        logits = logits.masked_fill(~visible, fill)
    # PyTorch's own softmax: its backward is one formula, as in the code that a reader would write
    weights = torch.softmax(logits, dim=-1)
    if guard == "where_weights":
        weights = torch.where(seen, weights, 0.0)
    out = context(weights, v)
    if guard == "where_out":
        out = torch.where(seen, out, 0.0)
    return out * seen if guard == "open" else out


def _fused(guard: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    mask = keep
    if guard != "sdpa_bool":
        fill = -math.inf if guard == "sdpa_inf" else torch.finfo(q.dtype).min
        mask = torch.zeros(keep.shape, dtype=q.dtype, device=q.device).masked_fill(~keep, fill)
    # the fused kernels want axes for batch and heads
    return scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], attn_mask=mask)[0, 0]


def _reference_gradients(exact: list[torch.Tensor], keep: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of the queries that see a key, the others taken out before the softmax. Shapes: (seq_len, d_k) each."""
    import torch

    q, k, v = (x.detach().clone().requires_grad_() for x in exact[:3])
    used = keep.any(dim=-1)
    out = attention(q[used], k, v, keep=keep[used])
    grads: tuple[torch.Tensor, ...] = torch.autograd.grad((out * exact[3][used]).sum(), (q, k, v))
    return grads


def _nan_rows(x: torch.Tensor) -> torch.Tensor:
    return x.isnan().any(dim=-1).sum()


def _table(run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, keep: torch.Tensor) -> Table:
    """Tokens whose gradient is NaN, under every guard and both ways to write the mask."""
    rows = []
    for i, mask_written in enumerate(("masked_fill", "additive_mask")):
        for j, guard in enumerate(GUARDS):
            run.progress(0.3 + 0.6 * (i * len(GUARDS) + j) / (2 * len(GUARDS)))
            _, grads = _differentiate(guard, mask_written, q, k, v, g, keep)
            for tensor, grad in zip(("of_q", "of_k", "of_v"), grads, strict=True):
                rows.append((mask_written, guard, tensor, int(_nan_rows(grad))))
    return {
        "mask_written": np.array([row[0] for row in rows]),
        "guard": np.array([row[1] for row in rows]),
        "tensor": np.array([row[2] for row in rows]),
        "nan_row_count": np.array([row[3] for row in rows]),
    }
