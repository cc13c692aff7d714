r"""A plain decoder of given sizes: which weights it has, and what each of its parts does with them.

Blocks with the norm in front, of attention (engine/attention.py; heads may share keys) and a feed-forward network
(gated or not; one, or several experts), a table of token vectors before them, a last norm and an unembedding behind.
There are no biases, no dropout and no encoding of positions: RoPE has no weights and no matrix products either.

Everything works on tensors without storage (``device="meta"``) as well, where only shapes are computed: that is enough
to count the parameters and the operations of a model that no machine here could hold. The parts are functions of their
own, so that each can be counted by itself, forward and backward.

Sources: shazeer2020, section 2 (the gated network); ainslie2023, abstract (heads that share keys).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.attention import attention

if TYPE_CHECKING:
    import torch

EPSILON = 1e-6  # of the norms

Weights = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class DecoderSizes:
    """What fixes all shapes. ``vocabulary``: different tokens; ``tied``: the table of token vectors also unembeds."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_k: int
    d_ff: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    n_experts: int = 1
    active_experts: int = 1


def block_shapes(sizes: DecoderSizes) -> dict[str, tuple[int, ...]]:
    """The weights of one block by name. Matrices are (out, in), as in torch.nn.Linear; experts stand in front."""
    d_model, d_attention, d_kv = sizes.d_model, sizes.n_heads * sizes.d_k, sizes.n_kv_heads * sizes.d_k
    shapes: dict[str, tuple[int, ...]] = {
        "norm_attention": (d_model,),
        "W_q": (d_attention, d_model),
        "W_k": (d_kv, d_model),
        "W_v": (d_kv, d_model),
        "W_o": (d_model, d_attention),
        "norm_ffn": (d_model,),
        "W_up": (sizes.n_experts, sizes.d_ff, d_model),
        "W_down": (sizes.n_experts, d_model, sizes.d_ff),
    }
    if sizes.gated:
        shapes["W_gate"] = (sizes.n_experts, sizes.d_ff, d_model)
    if sizes.n_experts > 1:
        shapes["W_router"] = (sizes.n_experts, d_model)
    return shapes


def outer_shapes(sizes: DecoderSizes) -> dict[str, tuple[int, ...]]:
    """The weights outside the blocks by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (sizes.vocabulary, sizes.d_model),
        "norm": (sizes.d_model,),
    }
    if not sizes.tied:
        shapes["unembedding"] = (sizes.vocabulary, sizes.d_model)
    return shapes


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last axis. Shapes: any, and (d_model,)."""
    mean_square = (x * x).sum(dim=-1, keepdim=True) / x.shape[-1]  # mean() without storage would load a compiler
    return x * (mean_square + EPSILON).rsqrt() * gain


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """x through the matrix of that name, and through the two thin ones beside it where there are such (LoRA).

    Shapes: x (..., in); W (out, in); W_down (rank, in), W_up (out, rank) as ``name_down`` and ``name_up``.
    """
    out = x @ weights[name].mT
    if f"{name}_up" in weights:
        out = out + x @ weights[f"{name}_down"].mT @ weights[f"{name}_up"].mT
    return out


def project(weights: Weights, sizes: DecoderSizes, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of the normed input.

    Shapes: x (batch, seq_len, d_model); q (batch, n_heads, seq_len, d_k); k, v (batch, n_kv_heads, seq_len, d_k).
    """
    normed = norm(x, weights["norm_attention"])
    q, k, v = (
        linear(weights, name, normed).unflatten(-1, (-1, sizes.d_k)).transpose(1, 2) for name in ("W_q", "W_k", "W_v")
    )
    return q, k, v


def mix(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor | None,
    attend: Callable[..., torch.Tensor] = attention,
) -> torch.Tensor:
    """Attention in which the heads of a group are rows of one product with their keys: no key is copied.

    ``attend`` is called like engine.attention.attention. Shapes: q (batch, n_heads, q_len, d_k); k, v (batch,
    n_kv_heads, kv_len, d_k); keep (q_len, kv_len); as q.
    """
    group = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, group)).flatten(2, 3)
    context = attend(rows, k, v, keep=None if keep is None else keep.repeat(group, 1))
    return context.unflatten(2, (group, -1)).flatten(1, 2)


def merge(weights: Weights, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The heads joined, projected, and added to the stream. Shapes: context as q of project, x (batch, seq_len, d)."""
    return x + linear(weights, "W_o", context.transpose(1, 2).flatten(2))


def feed_forward(weights: Weights, sizes: DecoderSizes, x: torch.Tensor) -> torch.Tensor:
    """The feed-forward network of the normed input, added to the stream.

    Tokens are dealt out to the experts in turn, and not as the router would: shapes and operations are those of a load
    that is balanced perfectly. Fewer tokens than experts leave experts idle.

    Shapes: x (batch, seq_len, d_model), as it comes out.
    """
    from torch.nn.functional import gelu, silu

    normed = norm(x, weights["norm_ffn"]).flatten(0, 1)  # (tokens, d_model)
    shares = None
    if sizes.n_experts > 1:
        shares = (normed @ weights["W_router"].mT).sigmoid()[:, : sizes.active_experts]  # (tokens, active)
        normed = normed.repeat(sizes.active_experts, 1)
    busy = min(sizes.n_experts, len(normed))
    dealt = normed.unflatten(0, (busy, -1))  # (busy experts, tokens of each, d_model)
    up, down = weights["W_up"][:busy], weights["W_down"][:busy]
    hidden = dealt @ up.mT
    hidden = silu(dealt @ weights["W_gate"][:busy].mT) * hidden if sizes.gated else gelu(hidden)
    out = (hidden @ down.mT).flatten(0, 1)
    if shares is not None:
        out = (out.unflatten(0, (sizes.active_experts, -1)) * shares.mT[..., None]).sum(dim=0)
    return x + out.view_as(x)


def unembed(weights: Weights, x: torch.Tensor) -> torch.Tensor:
    """A logit for every token of the vocabulary. Shapes: (batch, seq_len, d_model) to (batch, seq_len, vocabulary)."""
    return norm(x, weights["norm"]) @ weights.get("unembedding", weights["embedding"]).mT


def block(weights: Weights, sizes: DecoderSizes, x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """One block. Shapes: x (batch, seq_len, d_model), as it comes out; keep (seq_len, seq_len)."""
    x = merge(weights, mix(*project(weights, sizes, x), keep), x)
    return feed_forward(weights, sizes, x)


def decoder(
    outer: Weights,
    blocks: list[Weights],
    sizes: DecoderSizes,
    tokens: torch.Tensor,
    keep: torch.Tensor | None,
    run_block: Callable[[Weights, DecoderSizes, torch.Tensor, torch.Tensor | None], torch.Tensor] = block,
) -> torch.Tensor:
    """The whole model. ``run_block`` stands in for :func:`block`. Shapes: tokens (batch, seq_len) whole numbers;
    returns (batch, seq_len, vocabulary).
    """
    from torch.nn.functional import embedding

    x = embedding(tokens, outer["embedding"])
    for weights in blocks:
        x = run_block(weights, sizes, x, keep)
    return unembed(outer, x)
