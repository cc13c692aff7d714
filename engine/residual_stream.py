r"""Stacks of transformer layers that differ in one thing: where the norm stands, and whether there is a residual path.

A layer is two branches f, of attention and of a feed-forward network (GELU). What a branch does to the stream x is

``bare``         x + f(x)
``pre_norm``     x + f(norm(x))
``post_norm``    norm(skip_scale · x + f(x))
``output_norm``  x + norm(f(x))
``sandwich``     x + norm(f(norm(x)))

and the same without "x +" where ``residual`` is false. Norms have neither gain nor bias: those start as 1 and 0, where
they change nothing. All tensors have a leading axis ``model``: several seeds, learning rates or placements side by
side, each of which trains as it would alone if the loss is summed over that axis.

Source: xiong2020, figure 1 and section 3.2 (post and pre).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.attention import attention
from engine.norms import NORM_EPSILON, norm_statistics, normalize
from engine.side_by_side import times

if TYPE_CHECKING:
    import torch

PLACEMENTS = ("bare", "pre_norm", "post_norm", "output_norm", "sandwich")
BRANCHES = ("attention", "ffn")

Weights = dict[str, "torch.Tensor"]
Attend = Callable[..., "torch.Tensor"]


@dataclass(frozen=True)
class Wiring:
    """How branches are joined. ``skip_scale`` is read by ``post_norm`` only."""

    placement: str = "pre_norm"
    residual: bool = True
    skip_scale: float = 1.0
    normalization: str = "layer_norm"


class Step(NamedTuple):
    """After one branch: what it gave, and the stream with it. Shapes: (model, batch, seq_len, d_model) each."""

    branch: torch.Tensor
    stream: torch.Tensor


def stack_shapes(n_layers: int, d_model: int, d_ff: int) -> dict[str, tuple[int, ...]]:
    """The weights of one stack by name, layers in front. A vector is multiplied from the left: (in, out)."""
    square = (n_layers, d_model, d_model)
    return {
        "W_q": square,
        "W_k": square,
        "W_v": square,
        "W_o": square,
        "W_up": (n_layers, d_model, d_ff),
        "W_down": (n_layers, d_ff, d_model),
    }


def draw_stack(randn: Callable[..., torch.Tensor], n_layers: int, d_model: int, d_ff: int) -> Weights:
    """Weights of one stack, N(0, 1/fan_in): no axis ``model`` yet. ``randn`` is called with a shape for each."""
    return {name: randn(*s) / math.sqrt(s[1]) for name, s in stack_shapes(n_layers, d_model, d_ff).items()}


def deep_norm_scales(n_layers: int) -> tuple[float, float]:
    """DeepNorm's constants for a stack without cross-attention: what the stream is multiplied by in front of the norm,
    and what W_v, W_o, W_up and W_down are multiplied by when they are drawn. Source: torchscale-code, ``decoder.py``.
    """
    return (2 * n_layers) ** 0.25, (8 * n_layers) ** -0.25


def walk(
    weights: Weights,
    x: torch.Tensor,
    wiring: Wiring,
    *,
    n_heads: int = 1,
    keep: torch.Tensor | None = None,
    attend: Attend = attention,
    branches: tuple[str, ...] = BRANCHES,
    carried: torch.Tensor | float = 1.0,
) -> Iterator[Step]:
    """Every branch in turn, attention and then the feed-forward network of each layer; or only one of the two.

    ``attend`` is called like :func:`engine.attention.attention`, with the heads as an axis of their own; an experiment
    that normalizes queries or caps logits puts its own there. The last norm, which ``pre_norm`` and others need in
    front of the unembedding, is for the caller. ``carried`` multiplies every x that is added to: a tensor with 1 for
    some models and 0 for others lets stacks with and without a residual path run side by side.

    Shapes: weights as :func:`stack_shapes` behind (model, ...); x (model, batch, seq_len, d_model); keep (seq_len,
    seq_len); carried a number or (model, 1, 1, 1). Raises: KeyError for an unknown norm, ValueError for an unknown
    placement.
    """
    if wiring.placement not in PLACEMENTS:
        raise ValueError(f"placement {wiring.placement!r} is none of {', '.join(PLACEMENTS)}")
    for of_layer in _layers(weights):
        for name in branches:
            read = _norm(x, wiring) if wiring.placement in ("pre_norm", "sandwich") else x
            branch = _branch(name, of_layer, read, n_heads, keep, attend)
            if wiring.placement in ("output_norm", "sandwich"):
                branch = _norm(branch, wiring)
            skip = wiring.skip_scale if wiring.placement == "post_norm" else 1.0
            x = carried * skip * x + branch if wiring.residual else branch
            if wiring.placement == "post_norm":
                x = _norm(x, wiring)
            yield Step(branch, x)


def walk_side_by_side(
    weights: Weights,
    x: torch.Tensor,
    wirings: Sequence[Wiring],
    *,
    n_heads: int = 1,
    keep: torch.Tensor | None = None,
) -> Iterator[Step]:
    """As :func:`walk`, each model with a wiring of its own: all with a residual path and with LayerNorm.

    Where some of them have a norm, all are normalized, and each takes the result or what it was: a mixture with weights
    0 and 1, exact also for gradients. So five placements take little longer than one.

    Shapes: one wiring for each model; the rest as in :func:`walk`. Raises: ValueError for other wirings.
    """
    import torch
    from torch.nn.functional import layer_norm

    if any(wiring.normalization != "layer_norm" or not wiring.residual for wiring in wirings):
        raise ValueError("walk_side_by_side: wanted LayerNorm and a residual path in every wiring")

    def of_models(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=x.device, dtype=x.dtype).view(-1, 1, 1, 1)

    def norm_at(*placements: str) -> Callable[[torch.Tensor], torch.Tensor]:
        there = [float(wiring.placement in placements) for wiring in wirings]
        if not any(there):
            return lambda y: y
        share = of_models(there)
        return lambda y: torch.lerp(y, layer_norm(y, y.shape[-1:], eps=NORM_EPSILON), share)

    before, behind, after = norm_at("pre_norm", "sandwich"), norm_at("output_norm", "sandwich"), norm_at("post_norm")
    skip = of_models([wiring.skip_scale if wiring.placement == "post_norm" else 1.0 for wiring in wirings])
    for of_layer in _layers(weights):
        for name in BRANCHES:
            read = before(x)
            branch = behind(_branch(name, of_layer, read, n_heads, keep, attention))
            x = after(skip * x + branch)
            yield Step(branch, x)


def _layers(weights: Weights) -> Iterator[Weights]:
    """The weights layer by layer. Unbound at once: cut out one by one, backward would add up as many full tensors."""
    for parts in zip(*(weight.unbind(1) for weight in weights.values()), strict=True):
        yield dict(zip(weights, parts, strict=True))


def _branch(
    name: str, weights: Weights, read: torch.Tensor, n_heads: int, keep: torch.Tensor | None, attend: Attend
) -> torch.Tensor:
    return _attention(weights, read, n_heads, keep, attend) if name == "attention" else _ffn(weights, read)


def _norm(x: torch.Tensor, wiring: Wiring) -> torch.Tensor:
    return normalize(x, norm_statistics(x, wiring.normalization))


def _attention(
    weights: Weights, x: torch.Tensor, n_heads: int, keep: torch.Tensor | None, attend: Attend
) -> torch.Tensor:
    def heads(name: str) -> torch.Tensor:
        return times(x, weights[name]).unflatten(-1, (n_heads, -1)).transpose(2, 3)

    context = attend(heads("W_q"), heads("W_k"), heads("W_v"), keep=keep)
    return times(context.transpose(2, 3).flatten(3), weights["W_o"])


def _ffn(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import gelu

    return times(gelu(times(x, weights["W_up"])), weights["W_down"])
