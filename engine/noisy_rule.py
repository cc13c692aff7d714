r"""Sequences that follow a rule with noise: what the past says of the next token is exactly known.

With probability ``rule_share`` a token is the one two places before it, plus 3, modulo 8; else it is drawn at random.
So the *floor* for a model that sees only the past is the loss of whoever knows the rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.base import Run

if TYPE_CHECKING:
    import torch

N_TOKENS = 8
STEP = 3  # what the rule adds


def draw_tokens(run: Run, batch: int, length: int, rule_share: float) -> torch.Tensor:
    """Shapes: (batch, length), int64 on the run's device."""
    import torch

    shape = (batch, length)
    drawn = torch.randint(N_TOKENS, shape, generator=run.generator)
    by_rule = torch.rand(shape, generator=run.generator) < rule_share
    columns = [drawn[:, 0], drawn[:, 1]]
    for t in range(2, length):
        columns.append(torch.where(by_rule[:, t], (columns[t - 2] + STEP) % N_TOKENS, drawn[:, t]))
    return torch.stack(columns, dim=1).to(run.device)


def follows(tokens: torch.Tensor) -> torch.Tensor:
    """Which tokens from the third on are what the rule says. Shapes: (..., n) to (..., n - 2)."""
    return tokens[..., 2:] == (tokens[..., :-2] + STEP) % N_TOKENS


def floor_nats(tokens: torch.Tensor, rule_share: float) -> float:
    """What these sequences cost whoever knows the rule: the mean of -ln p(next token | the past) under it.

    No model that sees only the past does better, but for luck on a few sequences. Shapes: (batch, n).
    """
    import torch

    p = (1 - rule_share) / N_TOKENS + rule_share * follows(tokens).cpu().double()
    first = torch.full_like(p[:, :1], 1 / N_TOKENS)  # the first target has no token two places before it
    return float(-torch.cat((first, p), dim=1).log().mean())
