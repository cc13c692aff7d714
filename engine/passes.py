"""What one pass of a published model computes and moves: over a prompt, over one new token, or anything between.

A pass takes ``q_len`` new tokens of each of ``batch`` sequences, which hold ``kv_len`` behind it. Every matrix meets
all new tokens of all sequences at once and is read once for them; keys and values of a sequence are read once for its
own queries. Logits are made for the last token of each sequence alone.

Products run on tensors of full size without storage: operations are counted while they run, bytes are those of the
tensors. Each product reads its input and writes its output, as if each had a kernel of its own; norms, rotations, the
gate and the residual are thought of as part of the kernels beside them, and scores never leave theirs. Less is moved
only where products are joined in one kernel, or where what one wrote is still in a cache of the device when the next
reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from engine.model_shapes import ModelShape, cached, weights
from engine.operations import count_operations

if TYPE_CHECKING:
    import torch

LINEAR, ATTENTION = "linear_layers", "attention_part"


class Work(NamedTuple):
    """One kind of operation in all its layers. Operations of a product are two for a multiply-add."""

    part: str
    flop: int
    weight_bytes: int
    cache_bytes: int
    activation_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    def compute_s(self, flop_per_s: float) -> float:
        """Seconds of its operations alone."""
        return self.flop / flop_per_s

    def memory_s(self, bytes_per_s: float) -> float:
        """Seconds of its bytes alone."""
        return self.bytes / bytes_per_s

    def time_s(self, flop_per_s: float, bytes_per_s: float) -> float:
        """The least time: computing and moving overlap at best."""
        return max(self.compute_s(flop_per_s), self.memory_s(bytes_per_s))


def pass_work(
    shape: ModelShape,
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    weight_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    activation_dtype: torch.dtype,
) -> list[Work]:
    """The operations of a pass, one kernel after the other. For models in which every layer sees every token."""
    return [
        *linear_work(shape, batch * q_len, batch, weight_dtype, activation_dtype),
        attention_work(shape, batch, q_len, kv_len, cache_dtype, activation_dtype),
    ]


def pass_time_s(works: Sequence[Work], flop_per_s: float, bytes_per_s: float) -> float:
    """The least time of operations that run one after the other."""
    return sum(work.time_s(flop_per_s, bytes_per_s) for work in works)


@functools.lru_cache(maxsize=1024)
def linear_work(
    shape: ModelShape, rows: int, last_rows: int, weight_dtype: torch.dtype, activation_dtype: torch.dtype
) -> tuple[Work, ...]:
    """All that reads weights, for ``rows`` tokens, ``last_rows`` of which are asked for logits."""
    works = []
    for name, n_layers, weight in weights(shape, weight_dtype):
        if name == "embedding":
            works.append(Work(LINEAR, 0, 0, 0, rows * weight[0].nbytes))  # a row for each token
            if not shape.tied_embedding:
                continue
        if weight.ndim == 1 or "norm" in name:  # gains and biases: read, and no product
            works.append(Work(LINEAR, 0, n_layers * weight.nbytes, 0, 0))
            continue
        given = last_rows if name in ("embedding", "output") else rows
        works += [
            Work(LINEAR, *(n_layers * n for n in (flop, matrix.nbytes, 0, moved)))
            for matrix in _matrices(name, weight)
            for flop, moved in (_product(given, *matrix.shape, activation_dtype),)
        ]
    return tuple(works)


def _matrices(name: str, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The matrices of a weight, (width out, width in) each; of an FFN up, gate and down."""
    if name == "ffn":
        up, gate, down = weight
        yield from (up, gate, down.mT)
    else:
        yield weight


@functools.lru_cache(maxsize=4096)
def _product(rows: int, width_out: int, width_in: int, dtype: torch.dtype) -> tuple[int, int]:
    """Operations of a product, and bytes of its input and its output."""
    import torch

    x = torch.empty(rows, width_in, dtype=dtype, device="meta")
    matrix = torch.empty(width_in, width_out, dtype=dtype, device="meta")
    with count_operations() as counted:
        out = torch.mm(x, matrix)
    return counted.products, x.nbytes + out.nbytes


@functools.lru_cache(maxsize=1024)
def attention_work(
    shape: ModelShape, batch: int, q_len: int, kv_len: int, cache_dtype: torch.dtype, activation_dtype: torch.dtype
) -> Work:
    """q·k and weights·v over the pairs that the causal mask keeps; the cache read once, its new tokens written.

    Shapes: q and the context (batch, n_heads, q_len, d_k).
    """
    import torch

    def kept(tokens: int) -> int:
        x = torch.empty(batch, tokens, shape.d_model, dtype=cache_dtype, device="meta")
        return sum(tensor.nbytes for tensor in cached(shape, x))

    pairs = int(torch.arange(kv_len - q_len + 1, kv_len + 1).sum())  # keys that each of the queries sees
    q = torch.empty(batch * shape.n_heads, 1, shape.d_k, device="meta")  # of one pair in every head
    with count_operations() as counted:
        torch.bmm(torch.bmm(q, q.mT), q)
    context = torch.empty(batch, shape.n_heads, q_len, shape.d_k, dtype=activation_dtype, device="meta")
    moved = shape.n_layers * 2 * context.nbytes  # q as well
    cache_bytes = shape.n_layers * (kept(kv_len) + kept(q_len))
    return Work(ATTENTION, shape.n_layers * pairs * counted.products, 0, cache_bytes, moved)
