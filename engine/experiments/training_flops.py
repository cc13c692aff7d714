r"""What the backward pass costs, counted while autograd runs it: which gradients are wanted decides.

The product :math:`y=xW^\top` has two gradients, :math:`\partial L/\partial x=g\,W` and
:math:`\partial L/\partial W=g^\top x`, each a product as large as the first. Where both are wanted, the backward pass
costs twice the forward pass: with weights that are all trained, and also between activations, as in attention. Frozen
weights want one of them; what lies below the lowest trained weight wants none. Activations that are not kept are
computed again, which is work of the machine and not of the model.

A whole decoder runs forward and backward on tensors without storage, so only shapes are computed. Operations are those
of the matrix products, a multiply-add counting two.

Sources: pytorch-code, ``sdpa_backward_flop_count`` (five products of a kernel that keeps no weights) and
``checkpoint`` (what is run again); llm-foundry-benchmarks (MFU and HFU).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Result, Run, choice, number
from engine.operations import count_operations
from engine.recomputation import RUN_BLOCK, again, attention_without_weights
from engine.transformer_block import DecoderSizes, block_shapes, decoder, outer_shapes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    trained: str = choice("everything", "matrices", "last_block", "head_only", "adapters")
    recompute: str = choice("keep_all", "attention_weights", "whole_blocks")
    n_layers: int = number(2, low=1, high=8)
    d_model: int = number(256, low=64, high=4096, log2=True)
    ffn_ratio: int = number(4, low=1, high=8)
    seq_len: int = number(256, low=16, high=65536, log2=True)
    vocabulary: int = number(1024, low=16, high=131072, log2=True)
    adapter_rank: int = number(8, low=1, high=64, log2=True)


METRICS = (
    Metric("backward_to_forward"),
    Metric("recomputed_to_forward"),
    Metric("executed_to_forward"),
    Metric("attention_backward_to_forward"),
    Metric("forward_flop", "flop"),
    Metric("backward_flop", "flop"),
    Metric("recomputed_flop", "flop"),
    Metric("six_n_ratio"),
    Metric("hfu_to_mfu"),
)
PLOTS = (Plot("passes", table="passes", mark="bar", x="trained", y="relative_flop", by="pass"),)
BUDGET_S = 0.2

D_K = 64
ADAPTED = ("W_q", "W_v")  # the matrices that get thin ones beside them


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**22


def run(params: Params, run: Run) -> Result:
    """Count one training step of a decoder, and the same with each choice of what is trained.

    ``backward_to_forward`` leaves out what is computed again, ``recomputed_to_forward`` is that, and
    ``executed_to_forward`` all three passes together. ``attention_backward_to_forward``: of the two products of
    attention alone, with its recomputation. ``six_n_ratio``: 6 × all parameters × tokens, relative to what the model
    needs without recomputation. ``hfu_to_mfu``: what is executed, relative to that.
    """
    settings = ("everything", "matrices", "last_block", "head_only", "adapters")
    steps = {}
    for done, trained in enumerate(settings):
        run.progress(done / len(settings))
        steps[trained] = _step(params, trained)
    step = steps[params.trained]
    core_forward, core_backward = _attention_alone(params)
    metrics = {
        "backward_to_forward": step["backward_pass"] / step["forward_pass"],
        "recomputed_to_forward": step["recomputed"] / step["forward_pass"],
        "executed_to_forward": sum(step[name] for name in PASSES) / step["forward_pass"],
        "attention_backward_to_forward": core_backward / core_forward,
        "forward_flop": step["forward_pass"],
        "backward_flop": step["backward_pass"],
        "recomputed_flop": step["recomputed"],
        "six_n_ratio": 6 * step["n_parameters"] * params.seq_len / (step["forward_pass"] + step["backward_pass"]),
        "hfu_to_mfu": sum(step[name] for name in PASSES) / (step["forward_pass"] + step["backward_pass"]),
    }
    table = {
        "trained": np.repeat(settings, len(PASSES)),
        "pass": np.tile(PASSES, len(settings)),
        "relative_flop": np.array([steps[s][name] / steps[s]["forward_pass"] for s in settings for name in PASSES]),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"passes": table})


PASSES = ("forward_pass", "backward_pass", "recomputed")


def _step(params: Params, trained: str) -> dict[str, int]:
    """Operations of the three passes, and the parameters of the model."""
    kept = _passes(params, trained, "keep_all")
    counted = {"forward_pass": kept[0], "backward_pass": kept[1], "recomputed": 0, "n_parameters": kept[2]}
    if params.recompute != "keep_all":
        counted["recomputed"] = _passes(params, trained, params.recompute)[1] - kept[1]
    return counted


def _passes(params: Params, trained: str, recompute: str) -> tuple[int, int, int]:
    """Operations forward and backward of one sequence, and the numbers in all weights."""
    import torch

    n_heads = params.d_model // D_K
    sizes = DecoderSizes(
        n_layers=params.n_layers,
        d_model=params.d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_k=D_K,
        d_ff=params.ffn_ratio * params.d_model,
        vocabulary=params.vocabulary,
        gated=False,
    )
    outer = {name: _empty(*shape) for name, shape in outer_shapes(sizes).items()}
    blocks = [{name: _empty(*shape) for name, shape in block_shapes(sizes).items()} for _ in range(sizes.n_layers)]
    adapters: list[torch.Tensor] = []
    if trained == "adapters":
        for weights in blocks:
            for name in ADAPTED:
                out, into = weights[name].shape
                weights[f"{name}_down"] = _empty(params.adapter_rank, into)
                weights[f"{name}_up"] = _empty(out, params.adapter_rank)
                adapters += [weights[f"{name}_down"], weights[f"{name}_up"]]
    of_blocks = [list(weights.values()) for weights in blocks]
    matrices = [w for weights in blocks for name, w in weights.items() if name.startswith("W_")]
    everything = [*outer.values(), *(w for weights in of_blocks for w in weights)]
    wanted = {
        "everything": everything,
        "matrices": [*matrices, outer["unembedding"]],
        "last_block": of_blocks[-1],
        "head_only": [outer["unembedding"]],
        "adapters": adapters,
    }[trained]
    for weight in wanted:
        weight.requires_grad_()

    tokens = torch.empty(1, params.seq_len, device="meta", dtype=torch.long)
    keep = torch.empty(params.seq_len, params.seq_len, device="meta", dtype=torch.bool)
    with count_operations() as forward:
        logits = decoder(outer, blocks, sizes, tokens, keep, RUN_BLOCK[recompute])
    with count_operations() as backward:
        torch.autograd.grad(logits, wanted, torch.empty_like(logits))
    return forward.products, backward.products, sum(w.numel() for w in everything)


def _attention_alone(params: Params) -> tuple[int, int]:
    """Operations forward and backward of attention between q, k and v that all want gradients."""
    import torch

    q, k, v = (_empty(1, params.d_model // D_K, params.seq_len, D_K).requires_grad_() for _ in range(3))
    keep = torch.empty(params.seq_len, params.seq_len, device="meta", dtype=torch.bool)

    def work(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, keep=keep)

    call: Callable[..., torch.Tensor] = {
        "keep_all": work,
        "attention_weights": lambda q, k, v: attention_without_weights(q, k, v, keep=keep),
        "whole_blocks": lambda q, k, v: again(work, q, k, v),
    }[params.recompute]
    with count_operations() as forward:
        out = call(q, k, v)
    with count_operations() as backward:
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    return forward.products, backward.products


def _empty(*shape: int) -> torch.Tensor:
    import torch

    return torch.empty(*shape, device="meta")
