r"""RoPE beyond the length it was trained at: which frequencies the usual methods change, and by how much.

A model was trained at ``trained_len`` positions with the frequencies :math:`\theta_j = base^{-2j/d_k}`; the methods
make room for ``factor`` (s) times as many:

====================  =================================================================================================
``unscaled``          :math:`\theta_j` as it is
``interpolation``     :math:`\theta_j/s`, which is the same as positions divided by s
``ntk_aware``         :math:`\theta_j` of the base :math:`base\cdot s^{d_k/(d_k-2)}`: the fastest pair stays, the
                      slowest is divided by s
``by_parts``          :math:`(1-\gamma)\,\theta_j/s+\gamma\,\theta_j`, where :math:`\gamma` grows linearly from 0 at
                      ``slow_turns`` to 1 at ``fast_turns`` turns that the pair makes within the trained length
``yarn``              as ``by_parts``, and q and k times :math:`0.1\ln s+1`
``yarn_code``         as ``yarn``, but :math:`\gamma` falls linearly with the pair's number j, between the pairs that
                      make so many turns, rounded outwards to whole numbers: what the authors' code computes
``larger_base``       :math:`\theta_j` of a base that is simply set; the factor does not enter
====================  =================================================================================================

Frequencies are float64 and live on the CPU, for not every accelerator has float64.

Sources: chen2023 (interpolation); peng2023, definitions 1 to 3 and section 3.4 (the rest), and its authors' code,
yarn-code; ``by_parts`` with turns 1 and 4 is the rule of Llama 3.1, transformers-rope-utils.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.rotary import exact_angles

if TYPE_CHECKING:
    import torch

METHODS = ("unscaled", "interpolation", "ntk_aware", "by_parts", "yarn", "yarn_code", "larger_base")
SLOW_TURNS, FAST_TURNS = 1.0, 32.0  # alpha and beta of the paper, for the Llama family
LARGER_BASE = 500_000.0


def frequencies(d_k: int, base: float | torch.Tensor) -> torch.Tensor:
    """Radians that each pair turns from one position to the next. Shapes: (d_k / 2,); base (n, 1) to (n, d_k / 2)."""
    import torch

    return exact_angles(torch.ones(()), d_k, base)


def scaled_frequencies(
    method: str,
    d_k: int,
    base: float,
    factor: float | torch.Tensor,
    trained_len: int,
    *,
    slow_turns: float = SLOW_TURNS,
    fast_turns: float = FAST_TURNS,
    larger_base: float = LARGER_BASE,
) -> torch.Tensor:
    """The frequencies under one of the METHODS, float64 on the CPU.

    Shapes: (d_k / 2,), or for the methods that read a factor (n, 1) to (n, d_k / 2).

    Raises: ValueError for ``ntk_aware`` with a single pair, which is the fastest and the slowest at once.
    """
    theta = frequencies(d_k, base)
    if method == "interpolation":
        return theta / factor
    if method == "ntk_aware":
        if d_k < 4:
            raise ValueError(f"d_k: got {d_k}, wanted 4 at least: a single pair can't stay and be divided")
        return frequencies(d_k, base * factor ** (d_k / (d_k - 2)))
    if method in ("by_parts", "yarn"):
        kept = ((theta * trained_len / (2 * math.pi) - slow_turns) / (fast_turns - slow_turns)).clamp(0, 1)
    elif method == "yarn_code":
        kept = _kept_by_number(d_k, base, trained_len, slow_turns, fast_turns)
    else:
        return frequencies(d_k, larger_base) if method == "larger_base" else theta
    return (1 - kept) * theta / factor + kept * theta


def attention_factor(method: str, factor: float) -> float:
    """What q and k are multiplied by, each: the logits by its square."""
    return 0.1 * math.log(factor) + 1 if method in ("yarn", "yarn_code") and factor > 1 else 1.0


def _kept_by_number(d_k: int, base: float, trained_len: int, slow_turns: float, fast_turns: float) -> torch.Tensor:
    """How much of each pair's own frequency is kept, linear in its number. Shapes: (d_k / 2,)."""
    import torch

    def number_with(turns: float) -> float:
        return d_k * math.log(trained_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(number_with(fast_turns)), 0)
    last = min(math.ceil(number_with(slow_turns)), d_k - 1)
    if first == last:
        return (torch.arange(d_k // 2, dtype=torch.float64) <= first).cpu().double()
    return 1 - ((torch.arange(d_k // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
