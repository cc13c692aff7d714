r"""How many experts of a mixture a step has to read for a batch of tokens, and how many tokens share each.

Each token is served by ``experts_per_token`` of ``n_experts``, drawn without repetition and for each token by itself:
the largest of noisy scores, Gumbel noise on the logarithm of how popular an expert is. An expert that somebody needs is
read once for all who need it. With equal popularity some :math:`N\,(1-(1-k/N)^B)` of N are read for B tokens. Real
tokens of one text choose more alike than independent draws do, so these are more experts than a real batch reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, number


@dataclass(frozen=True)
class Params(BaseParams):
    n_experts: int = number(256, low=2, high=512, log2=True)
    experts_per_token: int = number(8, low=1, high=16, log2=True)
    batch: int = number(32, low=1, high=4096, log2=True)
    popularity: float = number(0.0, low=0.0, high=2.0, step=0.25)

    def rules(self) -> Iterator[Problem]:
        if self.experts_per_token > self.n_experts:
            values = {"n_experts": self.n_experts}
            yield Problem(
                "rule", "experts_per_token", self.experts_per_token, rule="experts_for_a_token", values=values
            )


METRICS = (
    Metric("experts_read"),
    Metric("experts_read_share"),
    Metric("tokens_per_expert"),
)
PLOTS = (
    Plot("reads", table="by_batch", x="batch", y="experts_read", theory="equal_experts_read", x_scale="log2"),
    Plot(
        "sharing",
        table="by_batch",
        x="batch",
        y="tokens_per_expert",
        theory="tokens_of_dense_ffn",
        x_scale="log2",
        y_scale="log10",
    ),
)
BUDGET_S = 0.1

N_LAYERS = 8  # routings drawn, as of so many layers
BATCHES = tuple(2**n for n in range(10))


def memory_bytes(params: Params) -> int:
    """Scores of one layer with the noise they are made of, and what is chosen."""
    tokens: int = max(BATCHES[-1], params.batch)
    return 2**20 + 20 * tokens * params.n_experts


def run(params: Params, run: Run) -> Result:
    """Means over the layers, for the chosen batch; the smaller ones of the curve are its first tokens."""
    batches = sorted({*BATCHES, params.batch})
    read = np.zeros(len(batches))
    for layer in range(N_LAYERS):
        run.progress(layer / N_LAYERS)
        first = _first_tokens(params, run, batches[-1])
        read += [(first < batch).sum() / N_LAYERS for batch in batches]
    chosen = read[batches.index(params.batch)]
    k, n = params.experts_per_token, params.n_experts
    table = {
        "batch": np.array(batches),
        "experts_read": read,
        "tokens_per_expert": k * np.array(batches) / read,
        "equal_experts_read": n * (1 - (1 - k / n) ** np.array(batches)),
        "tokens_of_dense_ffn": np.array(batches, dtype=np.float64),
    }
    metrics = {
        "experts_read": float(chosen),
        "experts_read_share": float(chosen) / n,
        "tokens_per_expert": k * params.batch / float(chosen),
    }
    return Result(metrics, {"by_batch": table})


def _first_tokens(params: Params, run: Run, n_tokens: int) -> np.ndarray:
    """The first token that needs each expert, ``n_tokens`` where none does.

    Shapes: scores (n_tokens, n_experts), returns (n_experts,).
    """
    import torch

    noise = run.rand(n_tokens, params.n_experts)
    tiny = torch.finfo(torch.float32).tiny  # the smallest that is drawn is 0, whose logarithm no sort can place
    gumbel = -torch.log(-torch.log(noise.clamp(tiny, 1 - 2**-24)))
    ranks = torch.arange(1, params.n_experts + 1, device=run.device)
    scores = gumbel - params.popularity * torch.log(ranks.to(run.dtype))
    chosen = scores.topk(params.experts_per_token, dim=-1).indices
    tokens = torch.arange(n_tokens, device=run.device)[:, None].expand_as(chosen)
    first = torch.full((params.n_experts,), n_tokens, device=run.device)
    first.scatter_reduce_(0, chosen.flatten(), tokens.flatten(), "amin")
    return np.asarray(first.cpu())
