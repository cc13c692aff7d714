r"""LayerNorm, RMSNorm, BatchNorm and their relatives as one function: they differ in the axes of their statistics.

x has the shape (..., batch, seq_len, d_model). Every norm computes :math:`(x-\mu)/\sqrt{\sigma^2+\epsilon}`; one pair
:math:`\mu,\sigma^2` is computed for

``layer_norm``          each token, over its features
``rms_norm``            each token, over its features, with :math:`\mu=0` and the mean square for the variance
``whole_text_norm``     each text, over its tokens and features: what many take LayerNorm for; GroupNorm with one group
``instance_norm``       each text and feature, over its tokens
``batch_norm``          each feature, over all tokens of all texts of the batch
``position_batch_norm`` each position and feature, over the texts of the batch

The variance is that of the numbers at hand (divided by their count), as in PyTorch. In evaluation the last two, which
look at other texts, put running statistics in place of those of the batch; the others compute what they do in training.

Sources: ba2016, sections 3 and 3.1; rmsnorm-code, README; pytorch-code, ``BatchNorm1d``, ``LayerNorm``, ``GroupNorm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

NORM_AXES = {
    "batch_norm": (-3, -2),
    "layer_norm": (-1,),
    "rms_norm": (-1,),
    "position_batch_norm": (-3,),
    "instance_norm": (-2,),
    "whole_text_norm": (-2, -1),
}
KEEP_RUNNING = ("batch_norm", "position_batch_norm")  # those with another computation in evaluation
NORM_EPSILON = 1e-5  # PyTorch's default for LayerNorm and BatchNorm


class NormStatistics(NamedTuple):
    """What x is centred on and divided by, with axes of length 1 where it was averaged."""

    mean: torch.Tensor
    variance: torch.Tensor


def norm_statistics(
    x: torch.Tensor, normalization: str, keep: torch.Tensor | None = None, *, unbiased: bool = False
) -> NormStatistics:
    """The statistics that a norm takes from x.

    ``keep`` leaves tokens out, such as padding: 1 where a token counts, 0 where not. A norm of single tokens has no
    other tokens to leave out and does not read it. ``unbiased`` divides by one less than the count, which is what
    BatchNorm remembers for evaluation, though not what it divides by in training.

    Shapes: x (..., batch, seq_len, d_model), keep (..., batch, seq_len, 1). Raises: KeyError for an unknown norm.
    """
    import torch

    axes = NORM_AXES[normalization]
    if keep is None or axes == (-1,):
        keep = torch.ones_like(x[..., :1])
    keep = keep.to(x.dtype).expand_as(x)
    count = keep.sum(dim=axes, keepdim=True).clamp_min(1)  # a place where no text has a token: nothing to divide
    total = torch.zeros_like(count) if normalization == "rms_norm" else (x * keep).sum(dim=axes, keepdim=True)
    mean = total / count
    squares = ((x - mean).square() * keep).sum(dim=axes, keepdim=True)
    return NormStatistics(mean, squares / ((count - 1).clamp_min(1) if unbiased else count))


def normalize(x: torch.Tensor, statistics: NormStatistics, epsilon: float = NORM_EPSILON) -> torch.Tensor:
    """x centred and divided. A learned gain and bias, one for each feature, are for the caller. Shapes: as x."""
    return (x - statistics.mean) * (statistics.variance + epsilon).rsqrt()


def update_running(running: NormStatistics, batch: NormStatistics, momentum: float) -> NormStatistics:
    """Running statistics after one more batch, whose variance is the unbiased one.

    ``momentum`` is the weight of the new batch, as in PyTorch; elsewhere it is that of the old value. Shapes: as given.
    """
    return NormStatistics(*((1 - momentum) * old + momentum * new for old, new in zip(running, batch, strict=True)))
