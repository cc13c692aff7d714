r"""Speculative decoding: a draft proposes tokens, the target judges them, and what comes out has the target's law.

The draft draws :math:`x\sim q`; it is kept with probability :math:`\min(1,\ p(x)/q(x))`. At the first token that is not
kept the rest of the draft is dropped and a token is drawn from the residual :math:`\max(p-q,\,0)`, normalized. If all
are kept, one more token comes from the target's last distribution: the bonus.

:data:`RULES` are this rule, two others that keep the law as well, and three that are often taken for it and do not:

``residual``         the rule above
``point_mass``       the draft takes its most likely token and says so: q is 1 there, and 0 elsewhere
``match_sample``     a token of the target is drawn at every place; a drafted one is kept if it is the same
``resample_target``  as ``residual``, but a rejected place is drawn from p itself
``argmax_agrees``    kept if it is the target's most likely token, else drawn from p
``greedy_draft``     the draft takes its most likely token, and is judged as if it had been drawn from q

Source: leviathan2022 and chen2023-speculative, abstracts; the rejection sampler of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

RULES = ("residual", "point_mass", "match_sample", "resample_target", "argmax_agrees", "greedy_draft")
GREEDY = ("point_mass", "greedy_draft")  # the draft takes its most likely token


class Judged(NamedTuple):
    """How a round ended: drafted tokens kept, and the one token that follows them. Shapes: (rounds,) both, int64."""

    n_kept: torch.Tensor
    next_token: torch.Tensor


def overlap(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The probability that p and q share, 1 minus their total variation distance. Shapes: (..., n) to (...)."""
    import torch

    return torch.minimum(p, q).sum(dim=-1)


def one_hot(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """All probability on one token, in the dtype of ``like``. Shapes: (...) to (..., n)."""
    import torch

    return torch.nn.functional.one_hot(tokens, like.shape[-1]).to(like.dtype)


def with_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Probabilities of the tokens; at temperature 0 the most likely one has all. Shapes: (..., n)."""
    if temperature == 0:
        return one_hot(logits.argmax(dim=-1), logits)
    return (logits / temperature).softmax(dim=-1)


def drawn_from(q: torch.Tensor, rule: str) -> torch.Tensor:
    """What the draft's tokens are really drawn from. Shapes: (..., n)."""
    return one_hot(q.argmax(dim=-1), q) if rule in GREEDY else q


def kept_probability(p: torch.Tensor, q: torch.Tensor, rule: str) -> torch.Tensor:
    """The probability with which each token is kept once it is drafted. Shapes: (..., n)."""
    import torch

    if rule == "match_sample":
        return p
    if rule == "argmax_agrees":
        return one_hot(p.argmax(dim=-1), p)
    believed = drawn_from(q, rule) if rule == "point_mass" else q
    # a token that q never draws is never judged; 0/0 must not become NaN
    return torch.where(believed > 0, p / believed, torch.ones_like(p)).clamp(max=1)


def correction(p: torch.Tensor, q: torch.Tensor, rejected: torch.Tensor, rule: str) -> torch.Tensor:
    """What is drawn from in place of a rejected token. Shapes: p, q (..., n), rejected (...); returns (..., n)."""
    import torch

    if rule in ("resample_target", "argmax_agrees"):
        return p
    if rule == "match_sample":  # the target's own draw, known to be another token
        return _normalized(p * (1 - one_hot(rejected, p)), p)
    believed = drawn_from(q, rule) if rule == "point_mass" else q
    return _normalized(torch.clamp(p - believed, min=0), p)


def _normalized(x: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """``x`` with sum 1; where nothing is left, which no rejection reaches but by rounding, ``otherwise``."""
    import torch

    total = x.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, x / total, otherwise)


def choose(probabilities: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The tokens that uniform numbers choose, by the inverse of the cumulative sum.

    Shapes: (..., n) and (...) to (...), int64.
    """
    cumulative = probabilities.cumsum(dim=-1)
    # the sum is 1 only up to rounding: scaled by it, u can't lie beyond the last token
    return (cumulative <= u[..., None] * cumulative[..., -1:]).sum(dim=-1).clamp(max=probabilities.shape[-1] - 1)


def leading(kept: torch.Tensor) -> torch.Tensor:
    """How many are true before the first false one. Shapes: (..., gamma) of bool to (...)."""
    return kept.long().cumprod(dim=-1).sum(dim=-1)


def judge(
    p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, u: torch.Tensor, u_next: torch.Tensor, rule: str
) -> Judged:
    """Keep drafted tokens up to the first rejection, and draw the token that follows.

    Shapes: p (rounds, gamma + 1, n), q (rounds, gamma, n), drafted and the uniform numbers u (rounds, gamma), u_next
    (rounds,).
    """
    import torch

    gamma = drafted.shape[1]
    kept = kept_probability(p[:, :gamma], q, rule).gather(-1, drafted[..., None])[..., 0]
    n_kept = leading(u < kept)
    rows = torch.arange(len(p), device=p.device)
    at = n_kept.clamp(max=gamma - 1)  # of a round without rejection any place will do
    corrected = correction(p[rows, at], q[rows, at], drafted[rows, at], rule)
    following = torch.where((n_kept < gamma)[:, None], corrected, p[:, gamma])
    return Judged(n_kept, choose(following, u_next))


def expected_tokens(alpha: float, gamma: int) -> float:
    r"""Tokens a round if every draft is kept with probability alpha, whatever happened before: :math:`\sum_{i=0}^\gamma
    \alpha^i=(1-\alpha^{\gamma+1})/(1-\alpha)`.
    """
    return sum(alpha**i for i in range(gamma + 1))
