r"""A feed-forward network as a key-value memory: how many random facts it holds, by its hidden width.

A fact is a key, a random vector x of length √d_model, and one of ``n_answers`` answers, each a random vector u_c of
length 1. A memory holds it when its output for the key has its largest product with the right answer's vector.

``matrix_memory``   W x, W d_model × d_model: the least-squares map from the keys to the answers
``fitted_ffn``      W_down φ(W_up x + b): W_up and b random, W_down by least squares
``lookup_ffn``      one hidden unit a fact: W_up holds the key, W_down the answer, as long as there are units

Least squares fits as many random facts exactly as the matrix that is fitted has inputs of rank: d_model for
``matrix_memory``, ``d_ff`` behind the units; beyond, a share 1 - rank/n of the squared answers is left over (the mean
over random answers), and the largest product is right for some time still. ``key_noise`` asks with keys to which noise
of that standard deviation was added, behind the fit.

The fit is computed in float64 on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, choice, number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    n_facts: int = number(64, low=8, high=1024, log2=True)
    d_ff: int = number(64, low=8, high=512, log2=True)
    d_model: int = number(16, low=8, high=64, log2=True)
    n_answers: int = number(64, low=2, high=256, log2=True)
    unit_function: str = choice("gelu_unit", "relu_unit", "linear_unit")
    key_noise: float = number(0.0, low=0, high=1, step=0.05)


MEMORIES = ("matrix_memory", "fitted_ffn", "lookup_ffn")
GRID = (8, 16, 32, 64, 128, 256, 512)  # numbers of facts on the curves, up to the longest list
THRESHOLD = 0.7  # of the squared length of a key: below it a unit of the lookup stays silent

METRICS = (
    *(Metric(f"{measure}_{memory}") for measure in ("recall", "left_over") for memory in MEMORIES),
    Metric("hidden_rank"),
)
PLOTS = (
    Plot("recall", table="by_facts", x="n_facts", y="fact_recall", by="memory", x_scale="log2"),
    Plot("left_over", table="by_facts", x="n_facts", y="answer_left_over", by="memory", x_scale="log2"),
)
BUDGET_S = 0.3


def memory_bytes(params: Params) -> int:
    """The longest list of facts with its hidden units, twice for the fit, and products with all answers."""
    n = max(GRID[-1], params.n_facts)
    return 8 * (n * (8 * params.d_ff + 12 * params.d_model + 4 * params.n_answers) + 6 * params.d_ff**2) + 2**22


def run(params: Params, run: Run) -> Result:
    """Draw facts, let each memory hold the first of them, and ask for all that it was given.

    ``recall_*``: share of the facts that are answered right. ``left_over_*``: squared distance of the outputs for the
    keys themselves from the answers' vectors, over the squared length of these.

    Shapes: keys (n, d_model), answers (n_answers, d_model), right (n,).
    """
    import torch

    def drawn(*shape: int) -> torch.Tensor:
        return run.randn(*shape).cpu().double()

    longest = max(GRID[-1], params.n_facts)
    keys = drawn(longest, params.d_model)
    keys = keys / keys.norm(dim=-1, keepdim=True) * math.sqrt(params.d_model)
    asked = keys + params.key_noise * drawn(longest, params.d_model)
    answers = drawn(params.n_answers, params.d_model)
    answers = answers / answers.norm(dim=-1, keepdim=True)  # then an exact output has its largest product with its own
    right = (run.rand(longest).cpu().double() * params.n_answers).long().clamp_max(params.n_answers - 1)
    W_up = drawn(params.d_ff, params.d_model) / math.sqrt(params.d_model)
    bias = drawn(params.d_ff)

    def features(x: torch.Tensor) -> torch.Tensor:
        return _unit(x @ W_up.mT + bias, params.unit_function)

    sizes = sorted({*GRID, params.n_facts})
    found: dict[int, dict[str, tuple[float, float]]] = {}
    ranks = {}
    for done, n in enumerate(sizes):
        run.progress(done / len(sizes))
        wanted = answers[right[:n]]
        hidden, stored = features(keys[:n]), keys[: min(n, params.d_ff)]
        outputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
            "matrix_memory": _fitted(keys[:n], wanted, (keys[:n], asked[:n])),
            "fitted_ffn": _fitted(hidden, wanted, (hidden, features(asked[:n]))),
            "lookup_ffn": (_lookup(stored, wanted, keys[:n]), _lookup(stored, wanted, asked[:n])),
        }
        found[n] = {name: _compare(*out, answers, right[:n]) for name, out in outputs.items()}
        if n == params.n_facts:
            ranks[n] = torch.linalg.matrix_rank(hidden).item()
    own = found[params.n_facts]
    metrics = {f"recall_{name}": own[name][0] for name in MEMORIES}
    metrics |= {f"left_over_{name}": own[name][1] for name in MEMORIES}
    metrics["hidden_rank"] = ranks[params.n_facts]
    table = {
        "n_facts": np.repeat(sizes, len(MEMORIES)),
        "memory": np.tile(MEMORIES, len(sizes)),
        "fact_recall": np.array([found[n][name][0] for n in sizes for name in MEMORIES]),
        "answer_left_over": np.array([found[n][name][1] for n in sizes for name in MEMORIES]),
    }
    return Result({metric.name: float(metrics[metric.name]) for metric in METRICS}, {"by_facts": table})


def _unit(hidden: torch.Tensor, unit_function: str) -> torch.Tensor:
    from torch.nn.functional import gelu, relu

    if unit_function == "linear_unit":
        return hidden
    return gelu(hidden) if unit_function == "gelu_unit" else relu(hidden)


def _fitted(
    inputs: torch.Tensor, wanted: torch.Tensor, asked: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the least-squares map, the shortest of all where there are several. Shapes: (n, d_model) each."""
    import torch

    fit = torch.linalg.pinv(inputs) @ wanted
    return asked[0] @ fit, asked[1] @ fit


def _lookup(stored: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each stored key has a unit of its own, whose output weights are its answer."""
    from torch.nn.functional import relu

    d_model = stored.shape[-1]
    hidden = relu(x @ stored.mT / d_model - THRESHOLD) / (1 - THRESHOLD)  # 1 for the stored key itself
    return hidden @ wanted[: len(stored)]


def _compare(
    out: torch.Tensor, out_asked: torch.Tensor, answers: torch.Tensor, right: torch.Tensor
) -> tuple[float, float]:
    """Share of the asked facts that are right, and what is left over of the answers for the keys themselves."""
    wanted = answers[right]
    recall = ((out_asked @ answers.mT).argmax(dim=-1) == right).to(out.dtype).mean()
    return recall.item(), ((out - wanted).square().sum() / wanted.square().sum()).item()
