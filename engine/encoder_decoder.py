r"""Encoder layers and decoder layers of the original Transformer, as PyTorch modules.

A layer is a row of sub-layers, each with a norm: ``self_attention``, in a decoder layer also ``cross_attention``, and
``ffn`` (ReLU). What a sub-layer f does to x is

behind the sum           norm(x + f(x)), as in the original
``norm_first``           x + f(norm(x)), as in most models since

Queries come from x in every attention. Keys and values come from x in self-attention, in cross-attention from
``memory``, which are the outputs of the encoder's last layer. An encoder layer and a decoder layer without its
``cross_attention`` have the same modules; whether tokens see later ones is decided by the mask that is passed.

On ``device="meta"`` modules have no storage: enough to count parameters and operations at full size. What the modules
compute is spelled out here, in operations that need no storage: PyTorch's own load a compiler there.

Sources: vaswani2017, sections 3.1 to 3.3; xiong2020, figure 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.attention import attention
from engine.built_decoder import undrawn_linear

if TYPE_CHECKING:
    import torch
    from torch import nn

SUBLAYERS = ("self_attention", "cross_attention", "ffn")


@dataclass(frozen=True)
class LayerSizes:
    """What fixes the shapes of a layer. The paper writes its projections as matrices, its FFN with biases."""

    d_model: int
    n_heads: int
    d_ff: int
    attention_biases: bool = False
    ffn_biases: bool = True


def build_layer(sizes: LayerSizes, *, cross: bool, device: Any = "meta", dtype: Any = None) -> nn.ModuleDict:
    """A layer whose matrices hold nothing yet: see :func:`draw_layer`. ``cross``: with a sub-layer for the source."""
    from torch import nn

    d_model, where = sizes.d_model, {"device": device, "dtype": dtype}

    def linear(into: int, out: int, *, bias: bool) -> nn.Linear:
        return undrawn_linear()(into, out, bias=bias, **where)

    def projections() -> nn.ModuleDict:
        return nn.ModuleDict(
            {name: linear(d_model, d_model, bias=sizes.attention_biases) for name in ("W_q", "W_k", "W_v", "W_o")}
        )

    names = [name for name in SUBLAYERS if cross or name != "cross_attention"]
    layer = nn.ModuleDict({f"norm_{name}": nn.LayerNorm(d_model, **where) for name in names})
    layer["self_attention"] = projections()
    if cross:
        layer["cross_attention"] = projections()
    layer["ffn"] = nn.ModuleDict(
        {
            "W_up": linear(d_model, sizes.d_ff, bias=sizes.ffn_biases),
            "W_down": linear(sizes.d_ff, d_model, bias=sizes.ffn_biases),
        }
    )
    return layer


def draw_layer(layer: nn.ModuleDict, randn: Callable[..., torch.Tensor]) -> nn.ModuleDict:
    """The layer with matrices N(0, 1/fan_in) and biases of 0, in place. ``randn`` is called with a shape for each."""
    import torch

    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if ".W_" in name:
                matrix = name.endswith("weight")
                parameter.copy_(randn(*parameter.shape) * parameter.shape[1] ** -0.5) if matrix else parameter.zero_()
    return layer.requires_grad_(False)


def parts_of(layer: nn.ModuleDict) -> dict[str, int]:
    """Parameters of each sub-layer, and of all norms together as ``norms``."""
    parts = dict.fromkeys((*SUBLAYERS, "norms"), 0)
    for name, parameter in layer.named_parameters():
        first = name.split(".")[0]
        parts["norms" if first.startswith("norm_") else first] += parameter.numel()
    return parts


def run_layer(
    layer: nn.ModuleDict,
    x: torch.Tensor,
    n_heads: int,
    *,
    memory: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    norm_first: bool = False,
    mix: Callable[..., torch.Tensor] = attention,
) -> torch.Tensor:
    """One layer over a whole sequence. ``cross_attention`` is skipped where there is no ``memory``, its norm too.

    ``mix`` is called like :func:`engine.attention.attention`, once for each attention in the order of SUBLAYERS.

    Shapes: x (..., seq_len, d_model), as it comes out; memory (..., source_len, d_model); keep (seq_len, seq_len).
    """
    for name in SUBLAYERS:
        if name not in layer or (name == "cross_attention" and memory is None):
            continue
        norm = layer[f"norm_{name}"]
        read = layer_norm(norm, x) if norm_first else x
        if name == "ffn":
            branch = feed_forward(layer["ffn"], read)
        else:
            source = memory if name == "cross_attention" and memory is not None else read
            keys = project(layer[name], source, n_heads)
            seen = keep if name == "self_attention" else None
            branch = attend(layer[name], read, *keys, keep=seen, mix=mix)
        x = x + branch if norm_first else layer_norm(norm, x + branch)
    return x


def project(matrices: nn.ModuleDict, source: torch.Tensor, n_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence. Shapes: (..., source_len, d_model) to (..., n_heads, source_len, d_k) each."""
    k, v = (linear(matrices[name], source).unflatten(-1, (n_heads, -1)).transpose(-3, -2) for name in ("W_k", "W_v"))
    return k, v


def attend(
    matrices: nn.ModuleDict,
    x: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    keep: torch.Tensor | None = None,
    mix: Callable[..., torch.Tensor] = attention,
) -> torch.Tensor:
    """What the rows of x read from the keys and values that :func:`project` returned.

    Shapes: x (..., seq_len, d_model), as it comes out; keep (seq_len, kv_len).
    """
    q = linear(matrices["W_q"], x).unflatten(-1, (k.shape[-3], -1)).transpose(-3, -2)
    return linear(matrices["W_o"], mix(q, k, v, keep=keep).transpose(-3, -2).flatten(-2))


def feed_forward(matrices: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """The FFN with its ReLU. Shapes: (..., d_model), as it comes out."""
    hidden = linear(matrices["W_up"], x)
    return linear(matrices["W_down"], hidden.masked_fill(hidden <= 0, 0.0))


def linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What the module computes. Shapes: (..., in) to (..., out)."""
    out = x @ module.weight.mT
    return out if module.bias is None else out + module.bias


def layer_norm(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """What the module computes. Shapes: (..., d_model), as it comes out."""
    centred = x - x.sum(dim=-1, keepdim=True) / x.shape[-1]
    variance = (centred * centred).sum(dim=-1, keepdim=True) / x.shape[-1]
    return centred * (variance + norm.eps).rsqrt() * norm.weight + norm.bias
