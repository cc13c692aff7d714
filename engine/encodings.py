r"""Positions that are not rotary: what is added to a token's vector, and what is added to a logit.

Sources: vaswani2017, section 3.5 (sinusoidal, and a learned table beside it); press2022 (ALiBi), and its authors' code
for numbers of heads that are no power of two: alibi-code, ``get_slopes``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SINUSOIDAL_BASE = 10_000.0


def sinusoidal(positions: torch.Tensor, d_model: int, base: float = SINUSOIDAL_BASE) -> torch.Tensor:
    r"""Sine and cosine of the same angle side by side, as in the paper: coordinate 2i holds
    :math:`\sin(t / base^{2i/d_{model}})`, coordinate 2i + 1 the cosine.

    Shapes: positions (seq_len,); returns (seq_len, d_model), float64 for positions in float64 and float32 otherwise.

    Raises: ValueError for an odd width, whose last sine would have no cosine.
    """
    import torch

    if d_model % 2:
        raise ValueError(f"d_model: got {d_model}, wanted an even width: sine and cosine come in pairs")
    positions = positions.to(torch.promote_types(positions.dtype, torch.float32))
    exponents = torch.arange(0, d_model, 2, device=positions.device, dtype=positions.dtype) / d_model
    angles = positions[:, None] * base**-exponents
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def from_table(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A row of a learned table for each position.

    Shapes: table (n_positions, d_model), positions (seq_len,) of int64; returns (seq_len, d_model).

    Raises: IndexError for a position that the table has no row for; PyTorch would read negative ones from the end.
    """
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(table):
        got = f"{int(positions.min())} to {int(positions.max())}"
        raise IndexError(f"positions: got {got}, wanted 0 to {len(table) - 1}: the table has {len(table)} rows")
    return table[positions]


def alibi_slopes(n_heads: int) -> list[float]:
    r"""How fast the bias of each head falls with the distance.

    For a power of two :math:`2^{-8/n}, 2^{-16/n}, \dots, 2^{-8}`: with 8 heads 1/2, 1/4, ..., 1/256. Otherwise those of
    the next smaller power of two, and for the heads that are left every second slope of twice that power, from the
    steepest on: between and beside the others, none of them twice.
    """
    power = 1 << (n_heads.bit_length() - 1)
    steps = [float(step) for step in range(1, power + 1)] + [step + 0.5 for step in range(n_heads - power)]
    return [2.0 ** (-8 * step / power) for step in steps]


def alibi_bias(n_heads: int, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
    """Minus slope times distance, to be added to the scaled logits before the softmax.

    The paper is about causal attention, where no key comes after its query. Without that mask later keys get the bias
    of earlier ones at the same distance, which is a common extension and not in the paper.

    Shapes: q_positions (q_len,), kv_positions (kv_len,); returns (n_heads, q_len, kv_len) in float32.
    """
    import torch

    distance = (q_positions[:, None] - kv_positions).abs().float()
    return -torch.tensor(alibi_slopes(n_heads), device=distance.device)[:, None, None] * distance
