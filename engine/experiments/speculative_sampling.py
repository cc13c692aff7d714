r"""What comes out of speculative decoding over a small vocabulary: its exact law, and draws, beside the target's law.

Target and draft know the last token only: two matrices of logits, of which ``draft_agreement`` is the correlation. So
every way a round can go can be written down: k drafts kept, then a rejection and its correction, or all kept and the
bonus; and what follows a round is a round again. ``law_tv`` is the total variation distance between the law of the
first :math:`\gamma+1` tokens and the one that the target gives by itself, summed in float64 over all sequences.

The same rounds are then drawn, ``n_streams`` times, by the code that engine/speculative.py gives any model. First and
last of the tokens are counted as a pair. Even exact draws lie some way off: ``fair_tv`` is the distance that counts of
that many independent draws have on average,
:math:`\frac12\sum_i\sqrt{\tfrac{2}{\pi}\,\tfrac{p_i(1-p_i)}{N}}`, and ``chi_square_z`` compares
:math:`\chi^2` with its mean and its spread; cells that expect fewer than ten draws are put together.

Sources: leviathan2022 and chen2023-speculative, abstracts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, choice, number
from engine.speculative import (
    RULES,
    choose,
    correction,
    drawn_from,
    judge,
    kept_probability,
    overlap,
    with_temperature,
)

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    rule: str = choice(*RULES)
    draft_agreement: float = number(0.7, low=0, high=1, step=0.05)
    gamma: int = number(3, low=1, high=4)
    n_tokens: int = number(6, low=2, high=8)
    temperature: float = number(1.0, low=0.1, high=4, step=0.1)
    n_streams: int = number(4096, low=256, high=65536, log2=True)


METRICS = (
    Metric("law_tv"),
    Metric("first_kept_share"),
    Metric("overlap_share"),
    Metric("sampled_tv"),
    Metric("fair_tv"),
    Metric("chi_square_z"),
    Metric("draft_tv"),
    Metric("kept_probability"),
    Metric("agreement_probability"),
    Metric("mean_overlap"),
    Metric("tokens_per_round"),
)
PLOTS = (
    Plot("law", table="first_token", x="token", y="probability", by="distribution", mark="bar"),
    Plot("by_place", table="by_place", x="place", y="law_tv", by="tokens_of", mark="point"),
)
BUDGET_S = 0.03

LOGITS_STD = 1.5
FEWEST = 10  # draws that a cell of χ² must expect
STREAMS_AT_ONCE = 8192


def memory_bytes(params: Params) -> int:
    """The law of all sequences with a few copies, and the probabilities of some streams."""
    law = 8 * int(params.n_tokens ** (params.gamma + 2))
    places = min(params.n_streams, STREAMS_AT_ONCE) * (params.gamma + 1)
    return 5 * law + 8 * places * (8 * params.n_tokens + 30) + 32 * params.n_streams


def run(params: Params, run: Run) -> Result:
    """The exact law from all first tokens; then streams that all begin after token A, the first.

    Shapes: p, q (n_tokens, n_tokens), a row for each last token.
    """
    run.progress(0.0)
    rho = params.draft_agreement
    target_logits = LOGITS_STD * run.randn(params.n_tokens, params.n_tokens)
    other = LOGITS_STD * run.randn(params.n_tokens, params.n_tokens)
    draft_logits = rho * target_logits + math.sqrt(1 - rho**2) * other
    p, q = (with_temperature(logits, params.temperature) for logits in (target_logits, draft_logits))

    exact_p, exact_q = (
        with_temperature(logits.cpu().double(), params.temperature) for logits in (target_logits, draft_logits)
    )
    laws = _laws(exact_p, exact_q, params.gamma, params.rule)
    wanted = _chain(exact_p, params.gamma + 1)
    drawn = drawn_from(exact_q, params.rule)
    kept = (drawn * kept_probability(exact_p, exact_q, params.rule)).sum(dim=-1)
    run.progress(0.3)

    first, last, n_kept, n_rounds, n_made = _sample(params, run, p, q)
    n = params.n_tokens
    pairs = np.bincount(first * n + last, minlength=n * n) / params.n_streams
    expected = _pairs(wanted[0]).reshape(-1).numpy()

    metrics = {
        "law_tv": _tv(laws[0], wanted[0]),
        "first_kept_share": float((n_kept > 0).mean()),
        "overlap_share": float(overlap(exact_p, exact_q)[0]),
        "sampled_tv": float(np.abs(pairs - expected).sum() / 2),
        "fair_tv": float(np.sqrt(2 / math.pi * expected * (1 - expected) / params.n_streams).sum() / 2),
        "chi_square_z": _chi_square_z(pairs, expected, params.n_streams),
        "draft_tv": _tv(_chain(exact_q, params.gamma + 1)[0], wanted[0]),
        "kept_probability": float(kept[0]),
        "agreement_probability": float((exact_p * exact_q).sum(dim=-1)[0]),
        "mean_overlap": float(overlap(exact_p, exact_q).mean()),
        "tokens_per_round": n_made / n_rounds,
    }
    return Result(metrics, {"first_token": _first_token(exact_p, exact_q, laws), "by_place": _by_place(laws, wanted)})


def _chain(p: torch.Tensor, length: int) -> torch.Tensor:
    """The law of ``length`` tokens drawn one after the other. Shapes: (n, n) to (n, ..., n), last token first."""
    law = p
    for _ in range(length - 1):
        law = law[..., None] * p
    return law


def _laws(p: torch.Tensor, q: torch.Tensor, gamma: int, rule: str) -> torch.Tensor:
    r"""The law of the first gamma + 1 tokens after each last token, by all that can happen in the first round.

    With k tokens kept the first k come from the draft, the next from the correction, and the others from the rounds
    that follow, whose law is known already: it is that of fewer tokens.

    Shapes: p, q (n, n); returns (n, ..., n), the last token before, then gamma + 1 tokens.
    """
    import torch

    n = len(p)
    drawn = drawn_from(q, rule)
    keeps = drawn * kept_probability(p, q, rule)  # drafted and kept
    tokens = torch.arange(n).expand(n, n)
    corrected = correction(p[:, None].expand(n, n, n), q[:, None].expand(n, n, n), tokens, rule)
    corrects = torch.einsum("sy,syz->sz", drawn - keeps, corrected)  # drafted, rejected, and replaced by z

    chains = [torch.ones(n, dtype=p.dtype)]  # k drafts kept
    for _ in range(gamma):
        chains.append(chains[-1][..., None] * keeps)
    laws = [torch.ones(n, dtype=p.dtype)]
    for length in range(1, gamma + 2):
        law = torch.zeros((n,) * (length + 1), dtype=p.dtype)
        for k in range(min(length, gamma)):
            begun = chains[k][..., None] * corrects
            rest = laws[length - k - 1]
            law += begun.reshape(begun.shape + (1,) * (rest.ndim - 1)) * rest
        law += chains[length] if length <= gamma else chains[gamma][..., None] * p  # all kept; the bonus
        laws.append(law)
    return laws[-1]


def _sample(
    params: Params, run: Run, p: torch.Tensor, q: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Streams of gamma + 1 tokens after token 0: first token, last token, drafts kept in the first round; and how many
    rounds there were and how many tokens they made, none cut off.
    """
    import torch

    gamma = params.gamma
    drawn = drawn_from(q, params.rule)
    firsts: list[np.ndarray] = []
    lasts: list[np.ndarray] = []
    kept_first: list[np.ndarray] = []
    n_rounds = n_made = 0
    for start in range(0, params.n_streams, STREAMS_AT_ONCE):
        run.progress(0.3 + 0.7 * start / params.n_streams)
        size = min(STREAMS_AT_ONCE, params.n_streams - start)
        stream = torch.zeros(size, 2 * gamma + 3, dtype=torch.int64, device=run.device)  # token 0, then all that come
        length = torch.zeros(size, dtype=torch.int64, device=run.device)
        going = torch.arange(size, device=run.device)
        while len(going):
            u = run.rand(len(going), 2 * gamma + 1)
            last = stream[going, length[going]]
            path = [last]
            for i in range(gamma):
                path.append(choose(drawn[path[-1]], u[:, i]))
            before = torch.stack(path, dim=1)  # (streams, gamma + 1): what each place has before it
            drafted = before[:, 1:]
            judged = judge(p[before], q[before[:, :-1]], drafted, u[:, gamma:-1], u[:, -1], params.rule)
            if len(kept_first) == len(firsts):  # the first round of these streams
                kept_first.append(judged.n_kept.cpu().numpy())
            for i in range(gamma):
                rows = going[judged.n_kept > i]
                stream[rows, length[rows] + 1 + i] = drafted[judged.n_kept > i, i]
            length[going] += judged.n_kept + 1
            stream[going, length[going]] = judged.next_token
            n_rounds += len(going)
            going = going[length[going] <= gamma]
        n_made += int(length.sum())
        firsts.append(stream[:, 1].cpu().numpy())
        lasts.append(stream[:, gamma + 1].cpu().numpy())
    return np.concatenate(firsts), np.concatenate(lasts), np.concatenate(kept_first), n_rounds, n_made


def _tv(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().sum() / 2)


def _pairs(law: torch.Tensor) -> torch.Tensor:
    """The law of the first and the last token. Shapes: (n, ..., n) to (n, n)."""
    return law.sum(dim=tuple(range(1, law.ndim - 1))) if law.ndim > 2 else law


def _chi_square_z(shares: np.ndarray, expected: np.ndarray, n_draws: int) -> float:
    """χ² less its mean, over its standard deviation; rare cells are put together."""
    rare = expected * n_draws < FEWEST
    seen = np.append(shares[~rare], shares[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] * n_draws < FEWEST:  # together still too rare: to the smallest of the others
        smallest = wanted[:-1].argmin()
        seen[smallest] += seen[-1]
        wanted[smallest] += wanted[-1]
        seen, wanted = seen[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    if freedom == 0:
        return 0.0
    chi_square = n_draws * ((seen - wanted) ** 2 / wanted).sum()
    return float((chi_square - freedom) / math.sqrt(2 * freedom))


def _first_token(p: torch.Tensor, q: torch.Tensor, laws: torch.Tensor) -> dict[str, np.ndarray]:
    """Probability of each first token after token 0: of the target, of the draft, and of what comes out."""
    n = len(p)
    out = laws[0].sum(dim=tuple(range(1, laws.ndim - 1)))
    return {
        "token": np.tile(list("ABCDEFGH"[:n]), 3),
        "distribution": np.repeat(["target", "draft", "speculative"], n),
        "probability": np.concatenate([p[0].numpy(), q[0].numpy(), out.numpy()]).astype(np.float32),
    }


def _by_place(laws: torch.Tensor, wanted: torch.Tensor) -> dict[str, np.ndarray]:
    """Distance to the target's law, of each token by itself and of all tokens up to it."""
    places = range(1, laws.ndim)
    rows = []
    for name in ("by_itself", "up_to_it"):
        for place in places:
            others = tuple(
                axis - 1 for axis in range(1, laws.ndim) if (axis != place if name == "by_itself" else axis > place)
            )
            one, other = (law[0].sum(dim=others) if others else law[0] for law in (laws, wanted))
            rows.append((place, name, _tv(one, other)))
    place_column, names, distances = zip(*rows, strict=True)
    return {"place": np.array(place_column), "tokens_of": np.array(names), "law_tv": np.array(distances)}
