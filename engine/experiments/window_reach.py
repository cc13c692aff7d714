r"""How far back a stack of windowed layers reaches, and how much of what it is made of lies there.

A layer whose queries see the last :math:`W` keys, their own among them, moves information by at most :math:`W-1`
places, so :math:`L` layers reach :math:`L(W-1)+1` tokens. That is where an influence can come from at all. How much
comes from there is another question, measured here by the Jacobian of the last token's output with respect to each
input token: the *influence* of a token is the Frobenius norm of its block. A token out of reach has exactly 0.

=========================  ============================================================================================
``random_layers``          pre-norm transformer layers as before training: random matrices, RoPE, residual path, FFN
``moving_means_and_skip``  :math:`x \leftarrow x + Ax`, a row of :math:`A` uniform over the keys that it sees
``moving_means``           :math:`x \leftarrow Ax` without the residual path: one moving average behind the other
=========================  ============================================================================================

``distance_slope`` adds so much to a logit for each token of distance: below 0 heads look near, as with ALiBi, above 0
they look at the far end of their window, which is what relaying takes. ``global_every``: each layer of that number
sees all earlier tokens, as in models that mix local and global layers.

Computed in float64 on the CPU: not every accelerator has float64, and 0 must mean out of reach and not too small.

Sources: mistral-code, README (the reach); gemma-code, ``gemma3_27b`` (one global layer behind five local ones).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.decoding import StackSizes, draw_layers, finish, project
from engine.masks import keep_causal, keep_window
from engine.positions import rotary_angles

if TYPE_CHECKING:
    import torch

STACKS = ("random_layers", "moving_means_and_skip", "moving_means")


@dataclass(frozen=True)
class Params(BaseParams):
    layer_kind: str = choice(*STACKS)
    window: int = number(8, low=1, high=64, log2=True)
    n_layers: int = number(4, low=1, high=12)
    global_every: int = number(0, low=0, high=12)
    distance_slope: float = number(0.0, low=-1.0, high=1.0, step=0.125)
    seq_len: int = number(32, low=8, high=128)

    def rules(self) -> Iterator[Problem]:
        widest = self.seq_len if 0 < self.global_every <= self.n_layers else min(self.window, self.seq_len)
        if abs(self.distance_slope) * (widest - 1) * self.n_layers > MAX_EXPONENT:
            values = {"limit": MAX_EXPONENT}
            yield Problem("rule", "distance_slope", self.distance_slope, rule="influence_vanishes", values=values)


METRICS = (
    Metric("reach_tokens"),
    Metric("beyond_window_share"),
    Metric("influence_mean_distance"),
    Metric("influence_distance_std"),
    Metric("tokens_with_90_percent"),
    Metric("edge_over_largest"),
)
PLOTS = (
    Plot("by_distance", table="by_distance", x="tokens_back", y="influence_share", by="layer_kind"),
    Plot("by_depth", table="by_depth", x="layer_depth", y="tokens_back", by="window_extent", mark="point"),
)
BUDGET_S = 0.1

D_MODEL, N_HEADS = 12, 2
MAX_EXPONENT = 300  # e^-300 of a path's weight is still far from the smallest float64


def memory_bytes(params: Params) -> int:
    """Float64: what backward needs of every layer, for one copy of the text for each coordinate of the output."""
    logits = 8 * N_HEADS * params.seq_len**2
    activations = 40 * params.seq_len * D_MODEL
    return 8 * D_MODEL * (params.n_layers + 2) * (logits + activations) + 2**16


def run(params: Params, run: Run) -> Result:
    """The influence of every token of a random text on the last one's output, behind each layer.

    ``reach_tokens``: tokens with any influence, the last one itself among them. ``beyond_window_share``: of all
    influence, that of tokens which the last layer alone does not see. ``influence_mean_distance`` and
    ``influence_distance_std``: of the distance, weighted with the influence. ``tokens_with_90_percent``: the fewest
    last tokens that hold nine tenths of it. ``edge_over_largest``: that of the farthest token with any, over the
    largest.
    """
    run.progress(0.0)
    sizes = StackSizes(params.n_layers, N_HEADS, N_HEADS, D_MODEL)
    layers = draw_layers(sizes, lambda *shape: run.randn(*shape).cpu().double())
    text = run.randn(params.seq_len, D_MODEL).cpu().double()
    shares = {}
    for done, kind in enumerate(STACKS):
        found: list[np.ndarray] = []
        for share in _influences(params, kind, layers, text, every_depth=kind == params.layer_kind):
            run.progress((done + len(found) / params.n_layers) / len(STACKS))
            found.append(share)
        shares[kind] = found[-1]
        if kind == params.layer_kind:
            depths = found
    tables = {"by_distance": _by_distance(shares), "by_depth": _by_depth(params, depths)}
    return Result(_measure(params, shares[params.layer_kind]), tables)


def _influences(
    params: Params, kind: str, layers: list[dict[str, torch.Tensor]], text: torch.Tensor, *, every_depth: bool
) -> Iterator[np.ndarray]:
    """Behind each layer, or the last, the influence of each token on the last one, as shares, the nearest first.

    One copy of the text for each coordinate of the output gives the whole Jacobian in one pass backward.

    Shapes: text (seq_len, d_model); yields (seq_len,).
    """
    import torch

    x = text[None].repeat(D_MODEL, 1, 1) if kind == "random_layers" else torch.ones_like(text[None, :, :1])
    x.requires_grad_()
    for depth, out in enumerate(_pass(params, kind, layers, x), start=1):
        if depth < params.n_layers and not every_depth:
            continue
        wanted = out[:, -1].diagonal().sum()
        (jacobian,) = torch.autograd.grad(wanted, x, retain_graph=depth < params.n_layers)  # (copies, seq_len, width)
        norms = jacobian.square().sum(dim=(0, 2)).sqrt().flip(0)
        yield (norms / norms.sum()).numpy()


def _pass(params: Params, kind: str, layers: list[dict[str, torch.Tensor]], x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The outputs of each layer. Shapes: x (batch, seq_len, width), yielded in the same shape."""
    import torch

    order = torch.arange(params.seq_len)
    bias = params.distance_slope * (order[:, None] - order).to(x.dtype)
    angles = rotary_angles(order, D_MODEL // N_HEADS)
    for place, layer in enumerate(layers, start=1):
        keep = _keep(params, place)
        if kind == "random_layers":
            q, k, v = project(layer, x, angles, N_HEADS)
            weights = softmax(mask_logits(attention_logits(q, k) + bias, keep))
            x = finish(layer, x, context(weights, v))
        else:
            mean = context(softmax(mask_logits(bias, keep)), x)
            x = x + mean if kind == "moving_means_and_skip" else mean
        yield x


def _keep(params: Params, place: int) -> torch.Tensor:
    """What the queries of a layer see; the layers count from 1."""
    if params.global_every and place % params.global_every == 0:
        return keep_causal(params.seq_len)
    return keep_window(params.seq_len, window=params.window)


def _measure(params: Params, share: np.ndarray) -> dict[str, float]:
    distance = np.arange(len(share))
    mean = float((share * distance).sum())
    return {
        "reach_tokens": float(_reach(share)),
        "beyond_window_share": float(share[params.window :].sum()),
        "influence_mean_distance": mean,
        "influence_distance_std": float(np.sqrt((share * (distance - mean) ** 2).sum())),
        "tokens_with_90_percent": float(_holding(share, 0.9)),
        "edge_over_largest": float(share[_reach(share) - 1] / share.max()),
    }


def _reach(share: np.ndarray) -> int:
    return int(np.flatnonzero(share)[-1]) + 1


def _holding(share: np.ndarray, part: float) -> int:
    """How many of the last tokens it takes to hold that part."""
    return int(np.searchsorted(share.cumsum(), part - 1e-12)) + 1


def _by_distance(shares: dict[str, np.ndarray]) -> Table:
    n = len(next(iter(shares.values())))
    return {
        "tokens_back": np.tile(np.arange(n), len(STACKS)),
        "layer_kind": np.repeat(STACKS, n),
        "influence_share": np.concatenate([shares[kind] for kind in STACKS]),
    }


def _by_depth(params: Params, depths: list[np.ndarray]) -> Table:
    """The reach of the chosen stack, what holds 90 % of the influence, and the usual estimate of the reach."""
    n = params.n_layers
    extents = {
        "reached": [_reach(share) for share in depths],
        "holds_90_percent": [_holding(share, 0.9) for share in depths],
        "layers_times_window": [params.window * depth for depth in range(1, n + 1)],
    }
    return {
        "layer_depth": np.tile(np.arange(1, n + 1), len(extents)),
        "window_extent": np.repeat(list(extents), n),
        "tokens_back": np.concatenate([np.array(x) for x in extents.values()]),
    }
