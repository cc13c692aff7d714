"""The eager reference: attention one step at a time, as on a whiteboard, and what is measured on its weights.

Fast paths elsewhere are tested against these functions; these are tested against PyTorch's own
``scaled_dot_product_attention`` in float64. Tensors are ``(batch, n_heads, seq_len, d_k)``; every function also takes
fewer leading axes, because it only touches the last two.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SCALE_RULES = ("inv_sqrt_d_k", "none", "inv_d_k", "factor", "learnable_tau", "cosine")


def scale_value(rule: str, d_k: int, *, factor: float = 1.0, tau: float = 1.0) -> float:
    r"""The number that multiplies q·k under a rule.

    ``none`` 1, ``inv_sqrt_d_k`` :math:`1/\sqrt{d_k}`, ``inv_d_k`` :math:`1/d_k`, ``factor`` :math:`factor/\sqrt{d_k}`,
    ``learnable_tau`` and ``cosine`` :math:`1/\tau` (``cosine`` also normalizes q and k, see :func:`attention_logits`).

    Raises: ValueError for an unknown rule.
    """
    values = {
        "none": 1.0,
        "inv_sqrt_d_k": 1 / math.sqrt(d_k),
        "inv_d_k": 1 / d_k,
        "factor": factor / math.sqrt(d_k),
        "learnable_tau": 1 / tau,
        "cosine": 1 / tau,
    }
    if rule not in values:
        raise ValueError(f"scale rule: got {rule!r}, wanted one of {', '.join(values)}")
    return values[rule]


def qk_product(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q·k of every query with every key.

    Shapes: q (..., q_len, d_k), k (..., kv_len, d_k); returns (..., q_len, kv_len).
    """
    return q @ k.transpose(-2, -1)


def attention_logits(
    q: torch.Tensor, k: torch.Tensor, rule: str = "inv_sqrt_d_k", *, factor: float = 1.0, tau: float = 1.0
) -> torch.Tensor:
    """q·k under a scale rule; ``cosine`` divides q and k by their norms first.

    Shapes: as :func:`qk_product`.
    """
    if rule == "cosine":
        q, k = unit_norm(q), unit_norm(k)
    return qk_product(q, k) * scale_value(rule, q.shape[-1], factor=factor, tau=tau)


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    """x with every vector of the last axis divided by its Euclidean norm; a vector of zeros gives NaN."""
    return x / x.norm(dim=-1, keepdim=True)


def mask_logits(logits: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Logits with -inf where ``keep`` is false.

    Shapes: logits (..., q_len, kv_len), keep bool, broadcastable to it.
    """
    return logits.masked_fill(~keep, -math.inf)


def softmax(logits: torch.Tensor) -> torch.Tensor:
    """Weights over the keys, the row's maximum subtracted first.

    A row that is masked throughout gives NaN, as PyTorch's softmax does: there is nothing to average.
    """
    shifted = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    return shifted / shifted.sum(dim=-1, keepdim=True)


def context(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Weighted mean of the values. Shapes: weights (..., q_len, kv_len), v (..., kv_len, d_v)."""
    return weights @ v


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    keep: torch.Tensor | None = None,
    rule: str = "inv_sqrt_d_k",
    factor: float = 1.0,
    tau: float = 1.0,
) -> torch.Tensor:
    """All steps in a row. Shapes: returns (..., q_len, d_v)."""
    logits = attention_logits(q, k, rule, factor=factor, tau=tau)
    return context(softmax(logits if keep is None else mask_logits(logits, keep)), v)


# --------------------------------------------------------------------------------------------------------------------
# Measures of a row of weights


def entropy_nats(weights: torch.Tensor) -> torch.Tensor:
    """Shannon entropy of each row; 0 for one-hot, ln n for uniform. A weight of 0 counts 0."""
    import torch

    return -torch.special.xlogy(weights, weights).sum(dim=-1)


def softmax_jacobian(weights: torch.Tensor) -> torch.Tensor:
    """d weights_i / d logits_j = weights_i (δ_ij - weights_j). Shapes: (..., n) to (..., n, n)."""
    return weights.diag_embed() - weights[..., :, None] * weights[..., None, :]


def row_norm(x: torch.Tensor) -> torch.Tensor:
    """Euclidean norm over the last axis whose squares neither underflow nor overflow (float32 squares end at 1e-19).

    Shapes: (..., n) to (...,), at least float32.
    """
    import torch

    x = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = x.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).smallest_normal)
    return largest.squeeze(-1) * (x / largest).norm(dim=-1)


def softmax_gradient(weights: torch.Tensor, grad_weights: torch.Tensor) -> torch.Tensor:
    r"""Gradient with respect to the logits from the one with respect to the weights: the Jacobian times a vector.

    :math:`\partial L/\partial z_i = w_i\,(g_i - \sum_j w_j g_j)`. Adding a constant to every :math:`g_j` changes
    nothing, so :math:`g` is measured from its value at the largest weight. On a saturated row the bracket of that
    weight is then a sum of small terms and not a difference of two almost equal numbers, which is only rounding noise.

    Shapes: (..., n) each; returns (..., n).
    """
    top = weights.argmax(dim=-1, keepdim=True)
    centred = grad_weights - grad_weights.gather(-1, top)
    return weights * (centred - (weights * centred).sum(dim=-1, keepdim=True))


def jacobian_norm(weights: torch.Tensor) -> torch.Tensor:
    r"""Frobenius norm of the softmax Jacobian, from the weights alone, without building the matrix.

    With :math:`S_m = \sum_i w_i^m` it is :math:`\sqrt{S_2 - 2S_3 + S_2^2}`. On a saturated row that is a difference of
    numbers near 1, and what lies below the square root of the rounding error is lost (3e-4 in float32, 1e-8 in
    float64). So the largest weight :math:`w_\star` is set apart and :math:`1 - w_\star` written as the sum of the
    others. With :math:`R_m = \sum_{i\ne\star} w_i^m` the same number is a sum without a negative term, as every other
    :math:`w_i \le 1/2`:

    .. math:: \|J\|_F^2 = w_\star^2\,(R_1^2 + 2R_2) + R_2^2 + \sum_{i\ne\star} w_i^2\,(1 - 2w_i)

    The others are divided by the largest of them first, so that no square underflows. All digits of the weights count
    then, and the norm is 0 only where every other weight is exactly 0: where its logit lies more than 103 below the
    largest one in float32, 745 in float64, 17 in float16.

    Computed in float32 at least. Shapes: (..., n) to (...,).
    """
    import torch

    w = weights.to(torch.promote_types(weights.dtype, torch.float32))
    top = w.argmax(dim=-1, keepdim=True)
    largest = w.gather(-1, top).squeeze(-1)
    others = w.scatter(-1, top, 0.0)
    second = others.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(w.dtype).smallest_normal)
    ratio = others / second  # at most 1; all zeros for an exact one-hot row
    squares = ratio * ratio
    r1, r2 = ratio.sum(dim=-1), squares.sum(dim=-1)
    second = second.squeeze(-1)
    total = largest**2 * (r1**2 + 2 * r2) + (second * r2) ** 2 + (squares * (1 - 2 * others)).sum(dim=-1)
    return second * total.sqrt()
