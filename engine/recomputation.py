"""What a training step does not keep, it computes again in its backward pass: attention weights, or whole blocks.

The results are those of the plain functions (engine/transformer_block.py), forward and backward; memory and operations
are not.

Sources: dao2022, section 3.1 (weights computed again from q and k); pytorch-code, ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.attention import attention, attention_logits, mask_logits, scale_value, softmax, softmax_gradient
from engine.transformer_block import DecoderSizes, Weights, block, feed_forward, merge, mix, project

if TYPE_CHECKING:
    import torch


def attention_without_weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, keep: torch.Tensor) -> torch.Tensor:
    """Attention that keeps q, k and v for its backward pass, and computes the weights there once more.

    As fused kernels do: five products backward, not four. Shapes: as attention.
    """
    import torch

    class Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(q, k, v)
            return attention(q, k, v, keep=keep)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, k, v = ctx.saved_tensors
            weights = softmax(mask_logits(attention_logits(q, k), keep))
            grad_logits = softmax_gradient(weights, grad @ v.mT) * scale_value("inv_sqrt_d_k", q.shape[-1])
            return grad_logits @ k, grad_logits.mT @ q, weights.mT @ grad

    out: torch.Tensor = Attention.apply(q, k, v)
    return out


def block_without_weights(weights: Weights, sizes: DecoderSizes, x: torch.Tensor, keep: Any) -> torch.Tensor:
    """A block whose attention weights are computed again. Shapes: as transformer_block.block."""
    mixed = mix(*project(weights, sizes, x), keep, attention_without_weights)
    return feed_forward(weights, sizes, merge(weights, mixed, x))


def block_again(weights: Weights, sizes: DecoderSizes, x: torch.Tensor, keep: Any) -> torch.Tensor:
    """A block of which only the input is kept. Shapes: as transformer_block.block."""
    names = list(weights)

    def work(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return block(dict(zip(names, values, strict=True)), sizes, x, keep)

    return again(work, x, *weights.values())


def again(work: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """``work`` on its inputs, of which nothing else is kept: the backward pass runs the whole of it again.

    torch.utils.checkpoint does the same, but its first use imports torch._dynamo: one second and 70 MB in every
    process.
    """
    import torch

    class Again(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*inputs)
            return work(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            wanted = ctx.needs_input_grad
            inputs = [x.detach().requires_grad_(w) for x, w in zip(ctx.saved_tensors, wanted, strict=True)]
            with torch.enable_grad():
                out = work(*inputs)
            found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad))
            return tuple(next(found) if w else None for w in wanted)

    out: torch.Tensor = Again.apply(*inputs)
    return out


RUN_BLOCK = {
    "keep_all": block,
    "attention_weights": block_without_weights,
    "whole_blocks": block_again,
}  # for transformer_block.decoder
