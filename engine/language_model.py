r"""A small causal transformer of our own, trained by ``tools/train_language_model.py``, its weights in the repository.

Three layers of four heads, pre-norm, rotary positions, GELU, tied embeddings, one token a character (engine/corpus.py):

    x = E[token];  x += W_o · attention(LN x);  x += W_down · gelu(W_up · LN x);  token logits = E · LN x / √d_model

What it is good for and what not: engine/trained/README.md.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine import attention as reference
from engine.base import data_file
from engine.corpus import N_TOKENS
from engine.positions import rotary_angles, rotate

if TYPE_CHECKING:
    import torch

N_LAYERS = 3
N_HEADS = 4
D_MODEL = 128
D_K = D_MODEL // N_HEADS
D_FF = 4 * D_MODEL
SUBLAYERS = tuple(f"L{layer} {kind}" for layer in range(N_LAYERS) for kind in ("attention", "FFN"))  # in their order
HEADS = tuple(f"L{layer}H{head}" for layer in range(N_LAYERS) for head in range(N_HEADS))  # their names, from 0
SEQ_LEN = 128  # longest text; rotary positions would go on, but were never trained there
FILES = ("trained/model.npz",)
# Of that file. Code that runs another model is other code, and its receipts become stale.
SHA256 = "039fb8148c46e2d16180f4773daa050eba62af1235e8a738848345629e317304"

Weights = Mapping[str, "torch.Tensor"]
Edit = Callable[[int, "torch.Tensor"], "torch.Tensor"]
SublayerEdit = Callable[[str, "torch.Tensor"], "torch.Tensor"]
Norm = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


def shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight; a layer's are ``0.W_q``, ``0.W_k``, ... and a norm's gain is ``0.norm_1``."""
    layer = {
        "norm_1": (D_MODEL,),
        "W_q": (D_MODEL, D_MODEL),
        "W_k": (D_MODEL, D_MODEL),
        "b_q": (D_MODEL,),
        "b_k": (D_MODEL,),
        "W_v": (D_MODEL, D_MODEL),
        "W_o": (D_MODEL, D_MODEL),
        "norm_2": (D_MODEL,),
        "W_up": (D_FF, D_MODEL),
        "W_down": (D_MODEL, D_FF),
    }
    named = {f"{number}.{name}": shape for number in range(N_LAYERS) for name, shape in layer.items()}
    return {"embedding": (N_TOKENS, D_MODEL)} | named | {"norm": (D_MODEL,)}


def draw_weights(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights before training: N(0, 1/fan_in), what writes into the residual stream divided by √(2 n_layers) on top.

    The embedding is N(0, 1), so that a layer's output does not drown the token it is added to, and so are the biases of
    q and k: turned by the rotary angles they make each head prefer some distances from the start. Gains are 1.
    """
    import torch

    drawn = {}
    for name, shape in shapes().items():
        if "norm" in name:
            drawn[name] = torch.ones(shape)
            continue
        std = 1.0 if len(shape) == 1 or name == "embedding" else shape[1] ** -0.5
        if name.endswith(("W_o", "W_down")):
            std /= math.sqrt(2 * N_LAYERS)
        drawn[name] = std * torch.randn(shape, generator=generator)
    return drawn


class DamagedWeights(OSError):
    """The file of the weights is not the one that this code was written for."""


@functools.cache
def _from_file() -> dict[str, torch.Tensor]:
    import numpy as np
    import torch

    file = data_file(FILES[0])
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != SHA256:
        raise DamagedWeights(f"{file}: got SHA-256 {found}, wanted {SHA256}; restore the file from the repository")
    with np.load(file, allow_pickle=False) as stored:
        return {name: torch.from_numpy(stored[name].astype(np.float32)) for name in shapes()}


def load_weights(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The trained weights, stored in 16 bits, as float32 or ``dtype``. Shared: don't write to them.

    Raises: DamagedWeights.
    """
    return {name: weight.to(device, dtype or weight.dtype) for name, weight in _from_file().items()}


@dataclass
class Trace:
    """What a pass leaves behind, one tensor a layer.

    Shapes: q, k, v, context (batch, n_heads, seq_len, d_k); logits (scaled, before the mask) and weights
    (batch, n_heads, seq_len, seq_len).
    """

    q: list[torch.Tensor] = field(default_factory=list)
    k: list[torch.Tensor] = field(default_factory=list)
    v: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    context: list[torch.Tensor] = field(default_factory=list)


def forward(
    weights: Weights,
    tokens: torch.Tensor,
    *,
    factor: float = 1.0,
    trace: Trace | None = None,
    edit_weights: Edit | None = None,
    edit_context: Edit | None = None,
    edit_out: SublayerEdit | None = None,
    edit_hidden: SublayerEdit | None = None,
) -> torch.Tensor:
    """Token logits, by the eager reference of engine/attention.py; a trace keeps the steps.

    ``factor`` multiplies the scale 1/√d_k the model was trained with. ``edit_weights`` and ``edit_context`` are given
    the layer and its attention weights (after the softmax) or context, ``edit_out`` and ``edit_hidden`` a name of
    :data:`SUBLAYERS` and what it is about to add to the residual stream, or a network's hidden units; each returns what
    is used instead.

    Shapes: tokens (batch, seq_len) of int64; added (batch, seq_len, d_model), hidden (batch, seq_len, d_ff); returns
    (batch, seq_len, n_tokens).
    """
    import torch

    seq_len = tokens.shape[-1]
    keep = torch.ones(seq_len, seq_len, dtype=torch.bool, device=tokens.device).tril()
    scale = factor / math.sqrt(D_K)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        logits = reference.qk_product(q, k) * scale
        row = reference.softmax(reference.mask_logits(logits, keep))
        if edit_weights:
            row = edit_weights(layer, row)
        mixed = reference.context(row, v)
        if edit_context:
            mixed = edit_context(layer, mixed)
        if trace:
            for kept, tensor in zip(
                (trace.q, trace.k, trace.v, trace.logits, trace.weights, trace.context),
                (q, k, v, logits, row, mixed),
                strict=True,
            ):
                kept.append(tensor)
        return mixed

    return _pass(weights, tokens, attend, edit_out=edit_out, edit_hidden=edit_hidden)


def forward_fast(
    weights: Weights, tokens: torch.Tensor, *, factor: float = 1.0, norm: Norm | None = None
) -> torch.Tensor:
    """The same token logits by PyTorch's fused attention, for training and where only the loss counts.

    ``norm`` is given the stream and the gain at each norm, in turn, and stands in for LayerNorm. Weights with an
    ``unembedding`` use it in place of the table. Shapes: as :func:`forward`.
    """
    from torch.nn.functional import scaled_dot_product_attention

    scale = factor / math.sqrt(D_K)

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    return _pass(weights, tokens, attend, norm=norm)


def _pass(
    weights: Weights,
    tokens: torch.Tensor,
    attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    edit_out: SublayerEdit | None = None,
    edit_hidden: SublayerEdit | None = None,
    norm: Norm | None = None,
) -> torch.Tensor:
    import torch
    from torch.nn.functional import gelu, layer_norm

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, weights[name]) if norm else layer_norm(x, (D_MODEL,), weights[name])

    def kept(_: str, x: torch.Tensor) -> torch.Tensor:
        return x

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (N_HEADS, D_K)).transpose(-3, -2)  # (batch, n_heads, seq_len, d_k)

    edit_out, edit_hidden = edit_out or kept, edit_hidden or kept
    angles = rotary_angles(torch.arange(tokens.shape[-1], device=tokens.device), D_K)
    x = weights["embedding"][tokens]
    for layer in range(N_LAYERS):
        attention_name, ffn_name = SUBLAYERS[2 * layer : 2 * layer + 2]
        read = normed(x, f"{layer}.norm_1")
        q, k, v = (heads(read @ weights[f"{layer}.{name}"].mT) for name in ("W_q", "W_k", "W_v"))
        q, k = (x + weights[f"{layer}.{name}"].unflatten(0, (N_HEADS, 1, D_K)) for x, name in ((q, "b_q"), (k, "b_k")))
        mixed = attend(layer, rotate(q, angles), rotate(k, angles), v)
        x = x + edit_out(attention_name, mixed.transpose(-3, -2).flatten(-2) @ weights[f"{layer}.W_o"].mT)
        hidden = edit_hidden(ffn_name, gelu(normed(x, f"{layer}.norm_2") @ weights[f"{layer}.W_up"].mT))
        x = x + edit_out(ffn_name, hidden @ weights[f"{layer}.W_down"].mT)
    return unembed(weights, normed(x, "norm"))


def unembed(weights: Weights, normed: torch.Tensor) -> torch.Tensor:
    """Token logits of the normed stream. Shapes: (..., d_model) to (..., n_tokens)."""
    return normed @ weights.get("unembedding", weights["embedding"]).mT / math.sqrt(D_MODEL)


def token_losses(token_logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of each next token. Shapes: (batch, seq_len, n_tokens) and (batch, seq_len) to
    (batch, seq_len - 1).
    """
    from torch.nn.functional import cross_entropy

    return cross_entropy(token_logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
