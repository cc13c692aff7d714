"""The sizes of published models, their weights, and what one attention layer of theirs keeps in the cache.

Everything is a tensor of its full size without storage, so it can be counted and costs nothing. ``SHAPES`` holds only
models whose configuration was opened; each names where.

Sources: torchtune-code, ``_model_builders.py`` of Llama 2, Llama 3, Mistral and Qwen2.5; mistral-config (the window);
qwen3-config; gemma-pytorch, ``get_config_for_9b`` (Gemma 2); gemma-code, ``gemma3_27b``; deepseek-v3-code,
``config_236B.json`` (DeepSeek-V2), and ``MLA`` (what is cached); vllm-deepseek-v3, the defaults (DeepSeek-V3);
vllm-code, ``ModelConfig.get_num_kv_heads`` (KV heads on one of several GPUs).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with gated FFNs and RMSNorm. ``d_k``: the head width of q, k and v without joined dimensions.

    ``layers_of_window``   the kinds of its layers, repeated to ``n_layers``: True keeps only the last ``window`` tokens
    ``kv_rank``            of latent attention: k and v come from a latent of that width, and ``d_rope`` rotary
                           dimensions, their key shared by all heads, are joined to q and k; 0 for k and v of KV heads
    ``q_rank``             of latent attention: q comes from a latent as well
    ``n_experts``          of the layers behind the first ``n_dense_layers``, each ``d_expert`` wide, beside
                           ``n_shared_experts`` that every token uses; 0 for one FFN of width ``d_ff`` in every layer
    """

    source: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_k: int
    d_ff: int
    vocabulary: int
    tied_embedding: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    window: int = 0
    layers_of_window: tuple[bool, ...] = (False,)
    kv_rank: int = 0
    q_rank: int = 0
    d_rope: int = 0
    n_dense_layers: int = 0
    n_experts: int = 0
    n_shared_experts: int = 0
    d_expert: int = 0

    def n_layers_of_window(self) -> int:
        """How many layers keep only their window."""
        kinds = self.layers_of_window
        return sum(kinds[layer % len(kinds)] for layer in range(self.n_layers))


SHAPES = {
    "llama_2_7b": ModelShape("torchtune-code", 32, 4096, 32, 32, 128, 11008, 32000),
    "llama_2_70b": ModelShape("torchtune-code", 80, 8192, 64, 8, 128, 28672, 32000),
    "llama_3_8b": ModelShape("torchtune-code", 32, 4096, 32, 8, 128, 14336, 128256),
    "llama_3_70b": ModelShape("torchtune-code", 80, 8192, 64, 8, 128, 28672, 128256),
    "mistral_7b": ModelShape(
        "mistral-config", 32, 4096, 32, 8, 128, 14336, 32000, window=4096, layers_of_window=(True,)
    ),
    "qwen2_5_7b": ModelShape("torchtune-code", 28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    "qwen3_4b": ModelShape("qwen3-config", 36, 2560, 32, 8, 128, 9728, 151936, tied_embedding=True, qk_norm=True),
    "gemma_2_9b": ModelShape(
        "gemma-pytorch",
        *(42, 3584, 16, 8, 256, 14336, 256000),
        tied_embedding=True,
        norms_per_layer=4,
        window=4096,
        layers_of_window=(True, False),
    ),
    "gemma_3_27b": ModelShape(
        "gemma-code",
        *(62, 5376, 32, 16, 128, 21504, 262144),
        tied_embedding=True,
        qk_norm=True,
        norms_per_layer=4,
        window=1024,
        layers_of_window=(True, True, True, True, True, False),
    ),
    "deepseek_v2": ModelShape(
        "deepseek-v3-code",
        *(60, 5120, 128, 128, 128, 12288, 102400),
        kv_rank=512,
        q_rank=1536,
        d_rope=64,
        n_dense_layers=1,
        n_experts=160,
        n_shared_experts=2,
        d_expert=1536,
    ),
    "deepseek_v3": ModelShape(
        "vllm-deepseek-v3",
        *(61, 7168, 128, 128, 128, 18432, 129280),
        kv_rank=512,
        q_rank=1536,
        d_rope=64,
        n_dense_layers=3,
        n_experts=256,
        n_shared_experts=1,
        d_expert=2048,
    ),
}
# every layer sees every token, with keys and values of heads and one FFN
PLAIN_SHAPES = tuple(name for name, s in SHAPES.items() if not (s.window or s.kv_rank or s.n_experts))


def kv_heads_on_one(shape: ModelShape, n_gpus: int) -> int:
    """KV heads that one of ``n_gpus`` in tensor parallelism holds: at least one, so they are copied beyond that."""
    return max(1, shape.n_kv_heads // n_gpus)


def weights(shape: ModelShape, dtype: torch.dtype, n_gpus: int = 1) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Name, number of layers that have it, and one tensor of each kind of weight, on one of ``n_gpus``.

    Tensor parallelism as is usual: heads, FFN and vocabulary are divided; norms, and the down-projections of latent
    attention, which serve all heads, are on every GPU. KV heads are copied where there are fewer of them than GPUs.
    """
    import torch

    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    def part(size: int) -> int:
        return math.ceil(size / n_gpus)

    d_model, d_k, n_layers = shape.d_model, shape.d_k, shape.n_layers
    q_width = part(shape.n_heads) * (d_k + shape.d_rope)
    kv_width = kv_heads_on_one(shape, n_gpus) * d_k
    yield "embedding", 1, empty(part(shape.vocabulary), d_model)
    if not shape.tied_embedding:
        yield "output", 1, empty(part(shape.vocabulary), d_model)
    yield "final_norm", 1, empty(d_model)
    yield "norm", n_layers, empty(shape.norms_per_layer, d_model)
    if shape.kv_rank:
        yield "W_down_q", n_layers, empty(shape.q_rank, d_model)
        yield "W_up_q", n_layers, empty(q_width, shape.q_rank)
        yield "W_down_kv", n_layers, empty(shape.kv_rank + shape.d_rope, d_model)
        yield "W_up_kv", n_layers, empty(part(shape.n_heads) * 2 * d_k, shape.kv_rank)
        yield "latent_norm", n_layers, empty(shape.q_rank + shape.kv_rank)
    else:
        yield "W_q", n_layers, empty(q_width, d_model)
        yield "W_k", n_layers, empty(kv_width, d_model)
        yield "W_v", n_layers, empty(kv_width, d_model)
    if shape.qkv_bias:
        yield "qkv_bias", n_layers, empty(q_width + 2 * kv_width)
    if shape.qk_norm:
        yield "qk_norm", n_layers, empty(2, d_k)
    yield "W_o", n_layers, empty(d_model, part(shape.n_heads) * d_k)
    n_dense = shape.n_dense_layers if shape.n_experts else n_layers
    yield "ffn", n_dense, empty(3, part(shape.d_ff), d_model)
    if shape.n_experts:
        n_sparse, n_experts = n_layers - n_dense, shape.n_experts + shape.n_shared_experts
        yield "experts", n_sparse, empty(n_experts, 3, part(shape.d_expert), d_model)
        yield "router", n_sparse, empty(shape.n_experts, d_model)


def cached(shape: ModelShape, x: torch.Tensor, n_gpus: int = 1, *, window: int = 0) -> tuple[torch.Tensor, ...]:
    """What one attention layer keeps of its inputs for later queries: k and v, or the latent and the rotary key.

    ``window``: only so many of the last tokens are kept, 0 for all.

    Shapes: x (batch, seq_len, d_model); k, v (batch, KV heads, kept, width) or latent (batch, kept, kv_rank).
    """
    import torch

    def project(width: int) -> torch.Tensor:
        return x @ torch.empty(x.shape[-1], width, dtype=x.dtype, device=x.device)

    if shape.kv_rank:  # one latent for all heads: there is nothing to divide among GPUs
        latent, k_rope = project(shape.kv_rank + shape.d_rope).split((shape.kv_rank, shape.d_rope), dim=-1)
        kept: tuple[torch.Tensor, ...] = (latent, k_rope)
    else:
        n_kv_heads = kv_heads_on_one(shape, n_gpus)
        widths = (shape.d_k + shape.d_rope, shape.d_k)
        kept = tuple(project(n_kv_heads * width).unflatten(-1, (n_kv_heads, width)).transpose(1, 2) for width in widths)
    return tuple(t[..., -window:, :].clone() for t in kept)  # a slice alone would keep all tokens in memory
