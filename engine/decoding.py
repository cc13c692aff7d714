r"""Decoding with a KV cache: a prompt in one pass, then new tokens behind it, each layer adding its keys and values.

The stack is that of engine/language_model.py for any number of layers and heads, with keys that several heads may
share, on vectors instead of tokens. A layer is a mapping with its names, matrices (width out, width in):

    x += W_o · attention(LN x);  x += W_down · gelu(W_up · LN x)

q and k are turned by rotary angles, and keys are cached turned. Biases of q and k and gains of the norms are used where
they are given. :func:`extend` without anything in the cache is the pass over a whole sequence.

:func:`count_pass` takes the bill of a pass without computing it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine import attention as reference
from engine.masks import keep_causal
from engine.operations import count_operations
from engine.positions import rotary_angles, rotate

if TYPE_CHECKING:
    import torch

FFN_FACTOR = 4
Layer = Mapping[str, "torch.Tensor"]
Mask = Callable[[int, int], "torch.Tensor | None"]
Attend = Callable[[int, "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor | None"], "torch.Tensor"]


@dataclass(frozen=True)
class StackSizes:
    """Sizes of a stack; heads of width d_model / n_heads."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int

    @property
    def d_k(self) -> int:
        return self.d_model // self.n_heads

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Name and shape of the matrices of one layer."""
        shared = self.n_kv_heads * self.d_k
        return {
            "W_q": (self.d_model, self.d_model),
            "W_k": (shared, self.d_model),
            "W_v": (shared, self.d_model),
            "W_o": (self.d_model, self.d_model),
            "W_up": (FFN_FACTOR * self.d_model, self.d_model),
            "W_down": (self.d_model, FFN_FACTOR * self.d_model),
        }


def draw_layers(sizes: StackSizes, normal: Callable[..., torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Layers before training: matrices N(0, 1/fan_in) from a source of standard normal numbers."""
    return [
        {name: normal(*shape) / shape[1] ** 0.5 for name, shape in sizes.shapes().items()}
        for _ in range(sizes.n_layers)
    ]


class KVCache:
    """Keys and values of every layer, in the order of the tokens.

    Without ``room`` it grows: each token makes a longer tensor, into which everything is copied. With it, zeros for so
    many tokens are laid out at the first use, and each token is written into its place.

    ``written_bytes``: what was written so far, of tensors that were copied as of slots that were filled.
    """

    def __init__(self, n_layers: int, room: int | None = None) -> None:
        self.room = room
        self.written_bytes = 0
        self.keys: list[torch.Tensor | None] = [None] * n_layers
        self.values: list[torch.Tensor | None] = [None] * n_layers
        self._lengths = [0] * n_layers

    def __len__(self) -> int:
        """Tokens that every layer holds."""
        return min(self._lengths)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, these behind the others. Shapes: (..., n_kv_heads, q_len, d_k).

        Raises: IndexError where there is no room left.
        """
        start = self._lengths[layer]
        if self.room is not None and start + k.shape[-2] > self.room:
            raise IndexError(
                f"cache of layer {layer}: got {k.shape[-2]} tokens behind {start}, has room for {self.room}"
            )
        self._lengths[layer] = start + k.shape[-2]
        for stored, new in ((self.keys, k), (self.values, v)):
            stored[layer] = self._put(stored[layer], new, start)
        return self.stored(layer)

    def stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, without the room that is still empty."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        return keys[..., : self._lengths[layer], :], values[..., : self._lengths[layer], :]

    def truncate(self, length: int) -> None:
        """Forget all tokens behind the first ``length``."""
        self._lengths = [min(length, held) for held in self._lengths]
        if self.room is None:
            for stored in (self.keys, self.values):
                stored[:] = [x if x is None else x[..., :length, :] for x in stored]

    def _put(self, held: torch.Tensor | None, new: torch.Tensor, start: int) -> torch.Tensor:
        import torch

        if self.room is None:
            whole = new if held is None else torch.cat((held, new), dim=-2)
            self.written_bytes += whole.nbytes
            return whole
        if held is None:
            held = new.new_zeros((*new.shape[:-2], self.room, new.shape[-1]))
        held[..., start : start + new.shape[-2], :] = new
        self.written_bytes += new.nbytes
        return held


def extend(
    layers: Sequence[Layer],
    x: torch.Tensor,
    cache: KVCache,
    *,
    n_heads: int,
    mask: Mask | None = None,
    positions: torch.Tensor | None = None,
    attend: Attend | None = None,
) -> torch.Tensor:
    """Outputs of new tokens behind those in the cache, which holds them as well afterwards.

    ``mask`` makes the keep-mask for a number of queries and of keys, None for no mask: causal with the last query on
    the last key, unless given. ``positions`` of the new tokens go on where the cache ends, unless given. ``attend``
    stands in for the attention of a layer: it is given its number, q, all keys and values, repeated for the heads that
    share them, and the keep-mask.

    Shapes: x (..., q_len, d_model), returned in the same shape.
    """
    import torch

    q_len, kv_len = x.shape[-2], len(cache) + x.shape[-2]
    if positions is None:
        positions = torch.arange(len(cache), kv_len, device=x.device)
    keep = mask(q_len, kv_len) if mask else keep_causal(q_len, kv_len, device=x.device)
    angles = rotary_angles(positions, layers[0]["W_q"].shape[0] // n_heads)
    for number, layer in enumerate(layers):
        q, k, v = project(layer, x, angles, n_heads)
        keys, values = cache.append(number, k, v)
        keys, values = share(keys, values, n_heads)
        context = attend(number, q, keys, values, keep) if attend else reference.attention(q, keys, values, keep=keep)
        x = finish(layer, x, context)
    return x


def project(
    layer: Layer, x: torch.Tensor, angles: torch.Tensor, n_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k turned, and v. Shapes: x (..., q_len, d_model), angles (q_len, d_k / 2); returns q (..., n_heads, q_len,
    d_k), k and v (..., n_kv_heads, q_len, d_k).
    """
    d_k = layer["W_q"].shape[0] // n_heads
    normed = norm(x, layer.get("norm_1"))

    def heads(name: str, bias: str) -> torch.Tensor:
        product = normed @ layer[name].mT
        if bias in layer:
            product = product + layer[bias]
        return product.unflatten(-1, (-1, d_k)).transpose(-3, -2)

    return rotate(heads("W_q", "b_q"), angles), rotate(heads("W_k", "b_k"), angles), heads("W_v", "b_v")


def share(keys: torch.Tensor, values: torch.Tensor, n_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values repeated for the heads that share them: n_heads / n_kv_heads in a row."""
    groups = n_heads // keys.shape[-3]
    if groups == 1:
        return keys, values
    return keys.repeat_interleave(groups, dim=-3), values.repeat_interleave(groups, dim=-3)


def finish(layer: Layer, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """What the layer makes of x and of what its heads read. Shapes: context (..., n_heads, q_len, d_k)."""
    from torch.nn.functional import gelu

    x = x + context.transpose(-3, -2).flatten(-2) @ layer["W_o"].mT
    return x + gelu(norm(x, layer.get("norm_2")) @ layer["W_up"].mT) @ layer["W_down"].mT


def norm(x: torch.Tensor, gain: torch.Tensor | None = None) -> torch.Tensor:
    """LayerNorm without a bias."""
    from torch.nn.functional import layer_norm

    return layer_norm(x, x.shape[-1:], gain)


# --------------------------------------------------------------------------------------------------------------------
# The bill


class PassBill(NamedTuple):
    """What the products of one pass take; operations are two for a multiply-add."""

    linear_flop: int  # projections and FFN
    score_flop: int  # q·k and weights·v
    score_entries: int

    @property
    def flop(self) -> int:
        return self.linear_flop + self.score_flop


def count_pass(sizes: StackSizes, batch: int, q_len: int, kv_len: int, *, last_rows: int | None = None) -> PassBill:
    """The products of a pass of ``q_len`` tokens that end a sequence of ``kv_len``, counted while they run on shapes.

    ``last_rows``: how many outputs are asked for. In the last layer the other tokens need a key and a value then, and
    nothing else; in those before it everything, for their outputs are what the next layer makes keys of.

    Layers of one kind are alike: one is run and counted for all. The norms, the softmax and the mask are left out.
    """
    rows = q_len if last_rows is None else last_rows
    below, last = _count_layer(sizes, batch, q_len, q_len, kv_len), _count_layer(sizes, batch, rows, q_len, kv_len)
    return PassBill(*(n * (sizes.n_layers - 1) + m for n, m in zip(below, last, strict=True)))


def _count_layer(sizes: StackSizes, batch: int, rows: int, kv_rows: int, kv_len: int) -> PassBill:
    return PassBill(_linear_flop(sizes, batch * rows, batch * kv_rows), *_score_counts(sizes, batch, rows, kv_len))


@functools.lru_cache(maxsize=4096)
def _linear_flop(sizes: StackSizes, rows: int, kv_rows: int) -> int:
    import torch

    products = []
    for name, (width_out, width_in) in sizes.shapes().items():
        given = kv_rows if name in ("W_k", "W_v") else rows
        products.append([torch.empty(shape, device="meta") for shape in ((given, width_in), (width_in, width_out))])
    with count_operations() as counted:
        for x, matrix in products:
            torch.mm(x, matrix)
    return counted.products


@functools.lru_cache(maxsize=4096)
def _score_counts(sizes: StackSizes, batch: int, rows: int, kv_len: int) -> tuple[int, int]:
    import torch

    heads = batch * sizes.n_heads  # those that share a key read the same one: as many products
    shapes = (rows, sizes.d_k), (sizes.d_k, kv_len), (kv_len, sizes.d_k)
    q, k, v = (torch.empty(heads, *shape, device="meta") for shape in shapes)
    with count_operations() as counted:
        logits = torch.bmm(q, k)
        torch.bmm(logits, v)
    return counted.products, logits.numel()
