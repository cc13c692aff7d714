"""Numbers as a format keeps them: rounded, and read again as float32, which holds all numbers of the 16-bit formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def round_to_nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded to the format, ties to even. Shapes: any."""
    return x.to(dtype).float()


def round_stochastically(x: torch.Tensor, chance: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded up where its place between the two neighbours is above ``chance``, else down; float32 as it is.

    With uniform chances the mean is x, as far as float32 can tell the places between the neighbours apart. x must be
    within the range of the format. Shapes: those of ``chance`` and x.
    """
    import torch

    if dtype == torch.float32:
        return x
    limits = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp_min(limits.smallest_normal)).exponent - 1
    spacing = limits.eps * torch.ldexp(torch.ones_like(x), exponent)
    below = (x / spacing).floor() * spacing  # exact: spacing is a power of two
    return below + spacing * (x - below > chance * spacing)
