r"""Rotary positions: a query and a key are turned by angles that grow with their places in the text.

Source: Su et al. 2021, RoFormer (arXiv:2104.09864), section 3; the pairing (i, i + d_k/2) as in GPT-NeoX and Llama.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BASE = 10_000.0


def rotary_angles(positions: torch.Tensor, d_k: int, base: float = BASE) -> torch.Tensor:
    r"""The angle :math:`t\,\theta_i`, :math:`\theta_i = base^{-2i/d_k}`, of each pair of coordinates.

    Shapes: positions (seq_len,); returns (seq_len, d_k / 2), in float32 at least: in 16 bits far positions coincide.
    """
    import torch

    exponents = torch.arange(0, d_k, 2, device=positions.device, dtype=torch.float32) / d_k
    return positions[:, None].float() * base**-exponents


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``x`` with the pairs (i, i + d_k/2) of its last axis turned by ``angles``. Shapes: (..., seq_len, d_k)."""
    import torch

    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
