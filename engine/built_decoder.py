r"""Decoders built as PyTorch modules at full size without storage, so that their parameters can be counted.

One block of each kind is built, and stands for as many layers as the model has of it; the table, the positions, the
last norm and the unembedding are built once. With ``tied_embedding`` the unembedding *is* the table: the module then
lists one parameter, its state dict two entries. Parameters are read off the modules by name, never off a formula.

``BUILT`` holds the models of engine/model_shapes.py and some more, each with its source, as far as their names and
sizes could be opened.

Sources: nanogpt-sizing (GPT-2 small: 12 layers of width 768, a tied table of 50257, 1024 positions), pytorch-code
(``Linear``, ``LayerNorm``: what has a bias); gemma-hf (Gemma 7B), gemma-2b-36 (Gemma 2B); mixtral-config;
deepseek-v3-code, ``Gate`` (a bias for each routed expert) and ``MLA``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.model_shapes import SHAPES, ModelShape

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class BuiltShape(ModelShape):
    """Sizes of a decoder, also of the older kind.

    ``named_billions``  the size it was named or announced with, in 10⁹: 8 × 7 for Mixtral, 117 million for GPT-2 small
    ``active_experts``  routed experts that a token uses
    ``gated``           three matrices in an FFN, not two
    ``layer_norm``      norms have a bias beside their gain
    ``biases``          every matrix of the blocks has one
    ``n_positions``     learned vectors of positions
    ``router_bias``     the router has a number for each expert
    """

    named_billions: float = 0.0
    active_experts: int = 0
    gated: bool = True
    layer_norm: bool = False
    biases: bool = False
    n_positions: int = 0
    router_bias: bool = False


# the name, and what the sizes for a cache do not say
_OF_SHAPES: dict[str, dict[str, float]] = {
    "llama_2_7b": {"named_billions": 7},
    "llama_2_70b": {"named_billions": 70},
    "llama_3_8b": {"named_billions": 8},
    "llama_3_70b": {"named_billions": 70},
    "mistral_7b": {"named_billions": 7},
    "qwen2_5_7b": {"named_billions": 7},
    "qwen3_4b": {"named_billions": 4},
    "gemma_2_9b": {"named_billions": 9},
    "gemma_3_27b": {"named_billions": 27},
    "deepseek_v2": {"named_billions": 236, "active_experts": 6},
    "deepseek_v3": {"named_billions": 671, "active_experts": 8, "router_bias": True},
}
BUILT: dict[str, BuiltShape] = {
    "gpt_2_small": BuiltShape(
        "nanogpt-sizing",
        *(12, 768, 12, 12, 64, 3072, 50257),
        tied_embedding=True,
        named_billions=0.117,
        gated=False,
        layer_norm=True,
        biases=True,
        n_positions=1024,
    ),
    "gemma_2b": BuiltShape("gemma-2b-36", *(18, 2048, 8, 1, 256, 16384, 256000), tied_embedding=True, named_billions=2),
    "gemma_7b": BuiltShape("gemma-hf", *(28, 3072, 16, 16, 256, 24576, 256000), tied_embedding=True, named_billions=7),
    "mixtral_8x7b": BuiltShape(
        "mixtral-config",
        *(32, 4096, 32, 8, 128, 14336, 32000),
        named_billions=56,
        n_experts=8,
        active_experts=2,
        d_expert=14336,
    ),
} | {
    name: BuiltShape(**{f.name: getattr(SHAPES[name], f.name) for f in dataclasses.fields(ModelShape)} | more)
    for name, more in _OF_SHAPES.items()
}


@dataclass(frozen=True)
class Counted:
    """Parameters of a model, by part. ``listed``: numbers in a state dict, where a tied matrix stands twice."""

    parts: dict[str, int]
    used: dict[str, int]
    listed: int

    @property
    def total(self) -> int:
        """All parameters, each once."""
        return sum(self.parts.values())

    @property
    def shares(self) -> dict[str, float]:
        """Of the tables, of attention, and of the FFNs with their experts and routers."""
        of = self.parts
        groups = {
            "table_parameters": of["embedding"] + of["unembedding"],
            "attention_parameters": of["attention"],
            "ffn_parameters": of["ffn"] + of["experts"] + of["router"],
        }
        return {name: value / self.total for name, value in groups.items()}

    @property
    def active(self) -> int:
        """Those that one token meets: of the routed experts as many as it uses."""
        return sum(self.used.values())


# as the modules are called, norms and biases by themselves
PARTS = ("embedding", "unembedding", "positions", "attention", "ffn", "experts", "router", "norms", "biases")


def count(shape: BuiltShape) -> Counted:
    """Build every kind of module once, and add up the parameters by what they belong to."""
    parts, used, listed = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0), 0
    for times, module in modules(shape):
        for name, parameter in module.named_parameters():  # a shared parameter comes once
            part = _part(name)
            parts[part] += times * parameter.numel()
            met = parameter[: shape.active_experts] if part == "experts" else parameter
            used[part] += times * met.numel()
        listed += times * sum(tensor.numel() for tensor in module.state_dict().values())
    return Counted(parts, used, listed)


def _part(name: str) -> str:
    """What a parameter belongs to: gains and biases by themselves, all others by the module that holds them."""
    first, last = name.split(".")[0], name.split(".")[-1]
    if "norm" in name:
        return "norms"
    return "biases" if last == "bias" else first


def estimates(shape: BuiltShape) -> dict[str, int]:
    """What is written on whiteboards, and the sum written out term by term without norms, biases and positions."""
    layers, d_model, d_k = shape.n_layers, shape.d_model, shape.d_k
    blocks, table = 12 * layers * d_model**2, shape.vocabulary * d_model
    attention = 2 * d_model * (shape.n_heads + shape.n_kv_heads) * d_k
    if shape.kv_rank:
        to_latents = d_model * (shape.q_rank + shape.kv_rank + shape.d_rope)
        from_latents = shape.n_heads * (shape.q_rank * (d_k + shape.d_rope) + shape.kv_rank * 2 * d_k)
        attention = to_latents + from_latents + shape.n_heads * d_k * d_model
    matrices = 3 if shape.gated else 2
    sparse = layers - shape.n_dense_layers if shape.n_experts else 0
    experts = (shape.n_experts + shape.n_shared_experts) * matrices * d_model * shape.d_expert
    ffn = (layers - sparse) * matrices * d_model * shape.d_ff + sparse * (experts + d_model * shape.n_experts)
    return {
        "whiteboard": blocks,
        "whiteboard_vocabulary": blocks + table,
        "written_out": layers * attention + ffn + (1 if shape.tied_embedding else 2) * table,
    }


def modules(shape: BuiltShape) -> Iterator[tuple[int, nn.ModuleDict]]:
    """What stands outside the layers, then a block of each kind, with the number of layers that are like it."""
    yield 1, _outside(shape)
    n_sparse = shape.n_layers - shape.n_dense_layers if shape.n_experts else 0
    if shape.n_layers > n_sparse:
        yield shape.n_layers - n_sparse, _block(shape, sparse=False)
    if n_sparse:
        yield n_sparse, _block(shape, sparse=True)


def _outside(shape: BuiltShape) -> nn.ModuleDict:
    from torch import nn

    outside = nn.ModuleDict({"embedding": _table(shape.vocabulary, shape.d_model), "norm": _norm(shape, shape.d_model)})
    if shape.n_positions:
        outside["positions"] = _table(shape.n_positions, shape.d_model)
    outside["unembedding"] = _linear(shape.d_model, shape.vocabulary)
    if shape.tied_embedding:
        outside["unembedding"].weight = outside["embedding"].weight
    return outside


def _block(shape: BuiltShape, *, sparse: bool) -> nn.ModuleDict:
    from torch import nn

    d_model = shape.d_model
    block = nn.ModuleDict(
        {f"norm_{place}": _norm(shape, d_model) for place in range(shape.norms_per_layer)}
        | {"attention": _latent_attention(shape) if shape.kv_rank else _attention(shape)}
    )
    if not sparse:
        block["ffn"] = _ffn(shape, shape.d_ff)
        return block
    block["experts"] = nn.ParameterDict(
        {
            "W_up": _empty(shape.n_experts, shape.d_expert, d_model),
            "W_down": _empty(shape.n_experts, d_model, shape.d_expert),
        }
        | ({"W_gate": _empty(shape.n_experts, shape.d_expert, d_model)} if shape.gated else {})
    )
    if shape.n_shared_experts:
        block["ffn"] = _ffn(shape, shape.n_shared_experts * shape.d_expert)
    block["router"] = _linear(d_model, shape.n_experts, bias=shape.router_bias)
    return block


def _attention(shape: BuiltShape) -> nn.ModuleDict:
    """The projections of q, k, v and of the output, with norms of q and k where there are such."""
    from torch import nn

    d_attention, d_kv = shape.n_heads * shape.d_k, shape.n_kv_heads * shape.d_k
    bias = shape.biases or shape.qkv_bias
    attention = nn.ModuleDict(
        {
            "W_q": _linear(shape.d_model, d_attention, bias=bias),
            "W_k": _linear(shape.d_model, d_kv, bias=bias),
            "W_v": _linear(shape.d_model, d_kv, bias=bias),
            "W_o": _linear(d_attention, shape.d_model, bias=shape.biases),
        }
    )
    if shape.qk_norm:
        attention["q_norm"], attention["k_norm"] = _norm(shape, shape.d_k), _norm(shape, shape.d_k)
    return attention


def _latent_attention(shape: BuiltShape) -> nn.ModuleDict:
    """Down to a latent and up again, for q and for k and v; one rotary key is shared by all heads."""
    from torch import nn

    d_model, d_k, n_heads = shape.d_model, shape.d_k, shape.n_heads
    return nn.ModuleDict(
        {
            "W_down_q": _linear(d_model, shape.q_rank),
            "norm_q": _norm(shape, shape.q_rank),
            "W_up_q": _linear(shape.q_rank, n_heads * (d_k + shape.d_rope)),
            "W_down_kv": _linear(d_model, shape.kv_rank + shape.d_rope),
            "norm_kv": _norm(shape, shape.kv_rank),
            "W_up_kv": _linear(shape.kv_rank, n_heads * 2 * d_k),
            "W_o": _linear(n_heads * d_k, d_model),
        }
    )


def _ffn(shape: BuiltShape, d_ff: int) -> nn.ModuleDict:
    from torch import nn

    into = ("W_up", "W_gate") if shape.gated else ("W_up",)
    return nn.ModuleDict(
        {name: _linear(shape.d_model, d_ff, bias=shape.biases) for name in into}
        | {"W_down": _linear(d_ff, shape.d_model, bias=shape.biases)}
    )


def _linear(into: int, out: int, *, bias: bool = False) -> nn.Linear:
    return undrawn_linear()(into, out, bias=bias, device="meta")


@functools.cache
def undrawn_linear() -> type[nn.Linear]:
    """PyTorch's own, but that nothing is drawn for it: there is no storage to fill, or others draw."""
    from torch import nn

    class Undrawn(nn.Linear):  # type: ignore[misc]  # torch is not followed
        def reset_parameters(self) -> None:
            pass

    return Undrawn


def _norm(shape: BuiltShape, width: int) -> nn.Module:
    from torch import nn

    return nn.LayerNorm(width, device="meta") if shape.layer_norm else nn.RMSNorm(width, device="meta")


def _table(rows: int, width: int) -> nn.Embedding:
    """A table that is not drawn: normal numbers without storage would load a compiler."""
    from torch import nn

    return nn.Embedding.from_pretrained(_empty(rows, width), freeze=False)


def _empty(*sizes: int) -> torch.Tensor:
    import torch

    return torch.empty(sizes, device="meta")
