r"""What fewer KV heads change in the bill of a model: parameters, cache, operations, and the bytes of a decode step.

A published model gets ``n_kv_heads`` KV heads in place of its own. One layer runs on tensors without storage, and is
counted as it runs: over ``seq_len`` tokens at once (prefill, no mask) and with one new token behind ``seq_len`` cached
ones (decode). The query heads of a group are rows of one product with their keys, so nothing of the saving or its
absence is written into the count.

``shared``    the kernel reads the k and v of a group once
``repeated``  k and v are first written out for every query head, as eager code with ``repeat_interleave`` does

A step reads the weights once for the whole batch, and the cache of each sequence; q, k, v and the output of attention
are counted as a fused kernel moves them. Other activations, norms, biases and the softmax are left out, the logits
never leave the chip. ``widened``: the FFN gets the parameters that the projections of k and v lost.

``n_gpus`` in tensor parallelism: everything is that of one GPU; KV heads are copied where there are fewer than GPUs.

Sources: ainslie2023, section 2.2; touvron2023b, appendix A.2.1 (widened FFN, KV heads copied to all GPUs);
vllm-code, ``ModelConfig.get_num_kv_heads``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import context, qk_product
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.grouped_heads import count_copies, group_rows, ungroup_rows
from engine.model_shapes import SHAPES, ModelShape, cached, weights
from engine.operations import count_operations

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("llama_3_8b", "llama_2_7b", "llama_2_70b", "llama_3_70b", "qwen2_5_7b", "qwen3_4b")
    n_kv_heads: int = number(8, low=1, high=64, log2=True)
    seq_len: int = number(8192, low=1, high=131072, log2=True)
    batch: int = number(32, low=1, high=1024, log2=True)
    cache_dtype: str = choice("bfloat16", "float8")
    kv_reading: str = choice("shared", "repeated")
    ffn_size: str = choice("kept", "widened")
    n_gpus: int = number(1, low=1, high=64, log2=True)

    def rules(self) -> Iterator[Problem]:
        n_heads = SHAPES[self.model].n_heads
        values: dict[str, object] = {"n_heads": n_heads}
        if n_heads % self.n_kv_heads:
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if n_heads % self.n_gpus:
            yield Problem("rule", "n_gpus", self.n_gpus, rule="gpus_divide_heads", values=values)
        elif self.n_kv_heads % self.n_gpus and self.n_gpus % self.n_kv_heads:
            values = {"n_kv_heads": self.n_kv_heads}
            yield Problem("rule", "n_gpus", self.n_gpus, rule="gpus_share_kv_heads", values=values)


METRICS = (
    Metric("kv_cache_share"),
    Metric("step_bytes_share"),
    Metric("prefill_flop_share"),
    Metric("model_cache_bytes", "bytes"),
    Metric("decode_step_bytes", "bytes"),
    Metric("prefill_flop", "flop"),
    Metric("decode_attention_flop_per_byte", "flop/byte"),
    Metric("step_attention_bytes", "bytes"),
    Metric("step_weight_bytes", "bytes"),
    Metric("step_copied_bytes", "bytes"),
    Metric("decode_step_flop", "flop"),
    Metric("projection_flop", "flop"),
    Metric("score_flop", "flop"),
    Metric("attention_block_flop", "flop"),
    Metric("n_parameters"),
    Metric("parameters_of_model"),
    Metric("ffn_width"),
)
PLOTS = (
    Plot("bill", table="by_kv_heads", x="n_kv_heads", y="relative_to_mha", by="bill_item", x_scale="log2"),
    Plot(
        "per_token",
        table="by_batch",
        x="batch",
        y="step_gib_per_token",
        by="sharing",
        x_scale="log2",
        y_scale="log10",
    ),
    Plot("per_gpu", table="by_gpus", x="n_gpus", y="cache_gib_on_gpu", by="sharing", x_scale="log2", y_scale="log2"),
)
BUDGET_S = 0.1

GIB = 2**30
PROJECTIONS = ("W_q", "W_k", "W_v", "W_o")
BATCHES = tuple(2**n for n in range(0, 11, 2))


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**20


class _Bill(NamedTuple):
    """Of all layers, on one GPU."""

    projection_flop: int
    score_flop: int
    prefill_flop: int
    step_score_flop: int
    step_flop: int
    weight_bytes: int
    moved_bytes: int  # by the attention of a step
    copied_bytes: int  # of these, to write k and v out for every head
    cache_bytes: int
    attention_parameters: int
    parameters: int


def run(params: Params, run: Run) -> Result:
    """The bill with the chosen number of KV heads, relative to MHA for every other, by batch and by number of GPUs."""
    shape = SHAPES[params.model]
    run.progress(0.0)
    divisors = [n for n in range(1, shape.n_heads + 1) if _allowed(shape.n_heads, n, params.n_gpus)]
    bills = {}
    for done, n_kv_heads in enumerate(divisors):
        run.progress(0.6 * done / len(divisors))
        bills[n_kv_heads] = _bill(params, n_kv_heads)
    bill, mha = bills[params.n_kv_heads], bills[shape.n_heads]
    items = {
        "kv_cache": [b.cache_bytes / mha.cache_bytes for b in bills.values()],
        "bytes_of_a_step": [
            (b.weight_bytes + b.moved_bytes) / (mha.weight_bytes + mha.moved_bytes) for b in bills.values()
        ],
        "attention_matrices": [b.attention_parameters / mha.attention_parameters for b in bills.values()],
        "flop_of_a_step": [b.step_flop / mha.step_flop for b in bills.values()],
        "flop_of_a_prefill": [b.prefill_flop / mha.prefill_flop for b in bills.values()],
    }
    at = divisors.index(params.n_kv_heads)
    metrics = {
        "kv_cache_share": items["kv_cache"][at],
        "step_bytes_share": items["bytes_of_a_step"][at],
        "prefill_flop_share": items["flop_of_a_prefill"][at],
        "model_cache_bytes": bill.cache_bytes,
        "decode_step_bytes": bill.weight_bytes + bill.moved_bytes,
        "prefill_flop": bill.prefill_flop,
        "decode_attention_flop_per_byte": bill.step_score_flop / bill.moved_bytes,
        "step_attention_bytes": bill.moved_bytes,
        "step_weight_bytes": bill.weight_bytes,
        "step_copied_bytes": bill.copied_bytes,
        "decode_step_flop": bill.step_flop,
        "projection_flop": bill.projection_flop,
        "score_flop": bill.score_flop,
        "attention_block_flop": bill.projection_flop + bill.score_flop,
        "n_parameters": bill.attention_parameters,
        "parameters_of_model": bill.parameters,
        "ffn_width": _shared(params, params.n_kv_heads).d_ff,
    }
    run.progress(0.6)
    tables = {
        "by_kv_heads": {
            "n_kv_heads": np.tile(divisors, len(items)),
            "bill_item": np.repeat(list(items), len(divisors)),
            "relative_to_mha": np.concatenate(list(items.values())),
        },
        "by_batch": _by_batch(params, bills),
        "by_gpus": _by_gpus(params, shape),
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _allowed(n_heads: int, n_kv_heads: int, n_gpus: int) -> bool:
    return n_heads % n_kv_heads == 0 and (n_kv_heads % n_gpus == 0 or n_gpus % n_kv_heads == 0)


def _names(n_heads: int, n_kv_heads: int) -> dict[int, str]:
    """MHA and MQA, and the chosen number if it is neither."""
    return {n_heads: "MHA", n_kv_heads: "GQA"} | {n_heads: "MHA", 1: "MQA"}


def _by_batch(params: Params, bills: dict[int, _Bill]) -> Table:
    """Bytes of a step for each token that it makes. One sequence moves its own share of the batch's cache."""
    rows = []
    for n_kv_heads, name in _names(SHAPES[params.model].n_heads, params.n_kv_heads).items():
        if n_kv_heads in bills:
            bill = bills[n_kv_heads]
            rows += [(b, name, bill.weight_bytes / b + bill.moved_bytes / params.batch) for b in BATCHES]
    batches, names, moved = zip(*rows, strict=True)
    return {
        "batch": np.array(batches),
        "sharing": np.array(names),
        "step_gib_per_token": np.array(moved) / GIB,
    }


def _by_gpus(params: Params, shape: ModelShape) -> Table:
    """Cache of the batch on one GPU."""
    rows = []
    for n_kv_heads, name in _names(shape.n_heads, params.n_kv_heads).items():
        for n_gpus in (1, 2, 4, 8, 16, 32, 64):
            if shape.n_heads % n_gpus == 0 and _allowed(shape.n_heads, n_kv_heads, n_gpus):
                kept = cached(_shared(params, n_kv_heads), _inputs(params, shape), n_gpus)
                rows.append((n_gpus, name, shape.n_layers * sum(t.nbytes for t in kept)))
    gpus, names, held = zip(*rows, strict=True)
    return {
        "n_gpus": np.array(gpus),
        "sharing": np.array(names),
        "cache_gib_on_gpu": np.array(held) / GIB,
    }


# --------------------------------------------------------------------------------------------------------------------
# Counting


def _shared(params: Params, n_kv_heads: int) -> ModelShape:
    """The model with so many KV heads, and with a wider FFN where that is asked for."""
    shape = SHAPES[params.model]
    lost = 2 * (shape.n_heads - n_kv_heads) * shape.d_k  # rows of W_k and W_v, each as wide as the model
    d_ff = shape.d_ff + round(lost / 3) if params.ffn_size == "widened" else shape.d_ff  # a gated FFN has three rows
    return dataclasses.replace(shape, n_kv_heads=n_kv_heads, d_ff=d_ff)


def _empty(*sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    import torch

    return torch.empty(sizes, dtype=dtype or torch.bfloat16, device="meta")


def _inputs(params: Params, shape: ModelShape) -> torch.Tensor:
    """What the cache of the batch is made from. Shapes: (batch, seq_len, d_model)."""
    import torch

    dtype = torch.bfloat16 if params.cache_dtype == "bfloat16" else torch.float8_e4m3fn
    return _empty(params.batch, params.seq_len, shape.d_model, dtype=dtype)


def _bill(params: Params, n_kv_heads: int) -> _Bill:
    import torch

    shape = _shared(params, n_kv_heads)
    parts = list(weights(shape, torch.bfloat16, params.n_gpus))
    layers = {name: (n, W) for name, n, W in parts if name in (*PROJECTIONS, "ffn")}
    unembedding = next(W for name, _, W in parts if name == ("embedding" if shape.tied_embedding else "output"))
    # only the last token of a prompt needs the logits over the vocabulary, and every token of a step
    prompt = _weight_flop(layers | {"output": (1, unembedding)}, {"output": 1}, params.seq_len)
    step = _weight_flop(layers | {"output": (1, unembedding)}, {}, params.batch)
    projections = sum(prompt[name] for name in PROJECTIONS)
    scores = shape.n_layers * _score_flop(params, shape, 1, params.seq_len)
    step_scores = shape.n_layers * _score_flop(params, shape, params.batch, 1)
    moved, copied = _attention_bytes(params, shape)
    read = sum(n * W.nbytes for name, n, W in parts if name != "embedding" or shape.tied_embedding)
    kept = cached(shape, _inputs(params, shape), params.n_gpus)
    return _Bill(
        projection_flop=projections,
        score_flop=scores,
        prefill_flop=sum(prompt.values()) + scores,
        step_score_flop=step_scores,
        step_flop=sum(step.values()) + step_scores,
        weight_bytes=read,
        moved_bytes=shape.n_layers * moved,
        copied_bytes=shape.n_layers * copied,
        cache_bytes=shape.n_layers * sum(t.nbytes for t in kept),
        attention_parameters=sum(W.numel() for name, _, W in parts if name in PROJECTIONS),
        parameters=sum(n * W.numel() for _, n, W in parts),
    )


def _weight_flop(parts: dict[str, tuple[int, torch.Tensor]], fewer: dict[str, int], n_tokens: int) -> dict[str, int]:
    """Operations of the products of so many tokens, or ``fewer``, with the weights of all layers that have them.

    Shapes: W (out, in), of the FFN (3, d_ff, in).
    """
    inputs = {name: _empty(fewer.get(name, n_tokens), W.shape[-1]) for name, (_, W) in parts.items()}
    found, before = {}, 0
    with count_operations() as counted:
        for name, (n_layers, W) in parts.items():
            x = inputs[name]
            if name == "ffn":
                _ = x @ W[0].mT
                _ = (x @ W[1].mT) @ W[2]
            else:
                _ = x @ W.mT
            found[name], before = n_layers * (counted.products - before), counted.products
    return found


def _heads(params: Params, shape: ModelShape, batch: int, q_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and the keys or values that they meet, on one GPU.

    Shapes: q (batch, query heads, q_len, d_k); k (batch, KV heads, seq_len, d_k).
    """
    q = _empty(batch, shape.n_heads // params.n_gpus, q_len, shape.d_k)
    kept, _ = cached(shape, _empty(batch, params.seq_len, shape.d_model), params.n_gpus)
    return q, kept


def _score_flop(params: Params, shape: ModelShape, batch: int, q_len: int) -> int:
    """Operations of q·k and weights · v of one layer; softmax keeps the shape and is left out."""
    q, k = _heads(params, shape, batch, q_len)
    with count_operations() as counted:
        _ = context(qk_product(group_rows(q, k.shape[1]), k), k)
    return counted.products


def _attention_bytes(params: Params, shape: ModelShape) -> tuple[int, int]:
    """Bytes that the attention of one layer moves in a step, and those of them that only write k and v out."""
    import torch

    q, _ = _heads(params, shape, params.batch, 1)
    k, v = cached(shape, _inputs(params, shape), params.n_gpus)
    copied = 0
    if params.kv_reading == "repeated" and q.shape[1] > k.shape[1]:
        with count_copies() as copies:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        copied = copies.read + copies.written
    logits = _empty(*group_rows(q, k.shape[1]).shape[:-1], params.seq_len)
    mixed = ungroup_rows(context(logits, v.to(torch.bfloat16)), q.shape[1] // k.shape[1])
    return copied + q.nbytes + k.nbytes + v.nbytes + mixed.nbytes, copied
