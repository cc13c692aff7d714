r"""Rotary positions beyond those of ``engine/positions.py``: exact angles, the other pairing, angles in few bits.

The pair j of a vector at position t turns by :math:`t\,\theta_j`, :math:`\theta_j = base^{-2j/d_k}`. Which two
coordinates make a pair is a convention: (j, j + d_k/2) as in :func:`engine.positions.rotate`, or (2j, 2j + 1) as in the
paper and here in :func:`rotate_interleaved`.

Exact angles are float64 and live on the CPU, for not every accelerator has float64.

Source: Su et al. 2021, RoFormer (arXiv:2104.09864), sections 3.2.2 and 3.4.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.positions import BASE, rotary_angles, rotate

if TYPE_CHECKING:
    import torch

PAIRINGS = ("half_split", "interleaved")
ROUNDED = ("all", "position", "frequency", "product")


def exact_angles(positions: torch.Tensor, d_k: int, base: float = BASE) -> torch.Tensor:
    """The angles of :func:`engine.positions.rotary_angles` in float64.

    Shapes: positions (...,), on the CPU; returns (..., d_k / 2).
    """
    import torch

    exponents = torch.arange(0, d_k, 2, dtype=torch.float64) / d_k
    return positions[..., None].cpu().double() * base**-exponents


def rounded_angles(
    positions: torch.Tensor, d_k: int, base: float, dtype: torch.dtype, rounded: str = "all"
) -> torch.Tensor:
    """The angles that a program in ``dtype`` gets, or those where only one of its three roundings happens.

    ``all`` keeps the positions and the frequencies in ``dtype`` and multiplies them there, as a model does whose
    buffers were cast; ``position``, ``frequency`` and ``product`` round that alone. Frequencies are computed in float32
    before they are cast, as such programs do.

    Shapes: positions (...,), whole or not, on the CPU; returns (..., d_k / 2), float64.
    """
    import torch

    frequencies = rotary_angles(torch.ones(1), d_k, base)[0]  # (d_k / 2,), the float32 values
    if rounded == "all":
        return (positions.to(dtype)[..., None] * frequencies.to(dtype)).cpu().double()
    if rounded == "position":
        return exact_angles(positions.to(dtype), d_k, base)
    if rounded == "frequency":
        return positions[..., None].cpu().double() * frequencies.to(dtype).cpu().double()
    return exact_angles(positions, d_k, base).to(dtype).cpu().double()


def rotate_interleaved(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``x`` with the pairs (2j, 2j + 1) of its last axis turned by ``angles``. Shapes: (..., seq_len, d_k)."""
    import torch

    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def turn(x: torch.Tensor, angles: torch.Tensor, pairing: str) -> torch.Tensor:
    """``x`` turned under one of the PAIRINGS. Shapes: x (..., d_k), angles (..., d_k / 2), broadcastable."""
    return rotate(x, angles) if pairing == "half_split" else rotate_interleaved(x, angles)


def complex_pairs(x: torch.Tensor, pairing: str) -> torch.Tensor:
    """The pairs of ``x`` as complex numbers, so that turning is multiplying. Shapes: (..., d_k) to (..., d_k / 2)."""
    import torch

    first, second = x.chunk(2, dim=-1) if pairing == "half_split" else (x[..., 0::2], x[..., 1::2])
    return torch.complex(first.contiguous(), second.contiguous())
