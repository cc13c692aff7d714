r"""What it costs a target to judge several tokens at once rather than one, by the roofline of a device.

One step of a decoder with the shape of Llama 3 8B, in 16 bits, for ``batch`` sequences that each bring ``n_new`` tokens
to a cache of ``kv_len``. Operations are counted while the step runs on tensors without storage; bytes are those of the
tensors: the weights once, every sequence's keys and values once, whatever the number of its new tokens. Linear layers
and attention run one after the other, each at :math:`\max(\text{FLOP}/P,\ \text{bytes}/B)`. ``verify_cost`` is the time
of a step with :math:`\gamma+1` new tokens over that of a step with one.

With ``n_experts`` above 1 the FFN is cut into experts. ``experts_per_token`` of them serve a token, and together do the
work of the dense FFN; which, is drawn for each token by itself. Every expert that somebody needs is read once.

A bound, not a measurement: a kernel reaches neither rate, activations and what starts a kernel are left out, and tokens
of one text choose more like experts than independent draws do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import context, qk_product
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, number
from engine.operations import count_operations

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    batch: int = number(1, low=1, high=1024, log2=True)
    kv_len: int = number(1024, low=128, high=131072, log2=True)
    gamma: int = number(4, low=1, high=15)
    n_kv_heads: int = number(8, low=1, high=32, log2=True)
    n_experts: int = number(1, low=1, high=256, log2=True)
    experts_per_token: int = number(1, low=1, high=8, log2=True)
    matmul_tflop_per_s: float = number(989.0, low=0.1, high=5000)
    memory_gb_per_s: float = number(3350.0, low=10, high=20000)

    def rules(self) -> Iterator[Problem]:
        if self.experts_per_token > self.n_experts:
            yield Problem(
                "rule",
                "experts_per_token",
                self.experts_per_token,
                rule="experts_for_a_token",
                values={"n_experts": self.n_experts},
            )


METRICS = (
    Metric("verify_cost"),
    Metric("extra_token_cost"),
    Metric("decode_weights_share"),
    Metric("experts_read_ratio"),
    Metric("decode_intensity_flop_per_byte", "flop/byte"),
    Metric("verify_intensity_flop_per_byte", "flop/byte"),
    Metric("all_weights_bytes", "bytes"),
    Metric("step_cache_bytes", "bytes"),
)
PLOTS = (Plot("cost", table="by_batch", x="batch", y="verify_cost", by="kv_len", x_scale="log2"),)
BUDGET_S = 0.05

N_LAYERS, D_MODEL, N_HEADS, D_K, D_FF, N_TOKENS = 32, 4096, 32, 128, 14336, 128256
BATCHES = tuple(2**i for i in range(11))
DRAWS = 4  # routings drawn, as of so many layers


class _Bill(NamedTuple):
    """Of one sequence, all layers: operations of both parts, and bytes of its cache."""

    linear_flop: int
    attention_flop: int
    cache_bytes: int


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is drawn are the experts of every token."""
    tokens = max(BATCHES[-1], params.batch) * (params.gamma + 1)
    return 2**20 + (0 if params.n_experts == 1 else 24 * tokens * params.n_experts)


def run(params: Params, run: Run) -> Result:
    """The chosen step, and the cost by batch for the chosen cache beside a short and a long one."""
    run.progress(0.0)
    experts = _experts_read(params, run)
    attention_bytes, expert_bytes = _weights_bytes(params)
    caches = sorted({1024, params.kv_len, 131072})
    bills = {(kv_len, n_new): _bill(params, kv_len, n_new) for kv_len in caches for n_new in (1, params.gamma + 1)}

    def parts(batch: int, kv_len: int, n_new: int) -> tuple[float, float, float, float]:
        """Operations and bytes of the linear layers, and of attention."""
        bill = bills[kv_len, n_new]
        weights = attention_bytes + expert_bytes * experts[batch, n_new]
        return batch * bill.linear_flop, weights, batch * bill.attention_flop, batch * bill.cache_bytes

    def time_s(batch: int, kv_len: int, n_new: int) -> float:
        linear_flop, weights, attention_flop, cache = parts(batch, kv_len, n_new)
        P, B = params.matmul_tflop_per_s * 1e12, params.memory_gb_per_s * 1e9
        return max(linear_flop / P, weights / B) + max(attention_flop / P, cache / B)

    def cost(batch: int, kv_len: int) -> float:
        return time_s(batch, kv_len, params.gamma + 1) / time_s(batch, kv_len, 1)

    decode, verify = (parts(params.batch, params.kv_len, n_new) for n_new in (1, params.gamma + 1))
    verify_cost = cost(params.batch, params.kv_len)
    metrics = {
        "verify_cost": verify_cost,
        "extra_token_cost": (verify_cost - 1) / params.gamma,
        "decode_weights_share": decode[1] / (decode[1] + decode[3]),
        "experts_read_ratio": experts[params.batch, params.gamma + 1] / experts[params.batch, 1],
        "decode_intensity_flop_per_byte": (decode[0] + decode[2]) / (decode[1] + decode[3]),
        "verify_intensity_flop_per_byte": (verify[0] + verify[2]) / (verify[1] + verify[3]),
        "all_weights_bytes": float(attention_bytes + expert_bytes * params.n_experts),
        "step_cache_bytes": float(decode[3]),
    }
    batches = sorted({*BATCHES, params.batch})
    table = {
        "batch": np.tile(batches, len(caches)),
        "kv_len": np.repeat(caches, len(batches)),
        "verify_cost": np.array([cost(batch, kv_len) for kv_len in caches for batch in batches]),
    }
    return Result(metrics, {"by_batch": table})


def _empty(*shape: int) -> torch.Tensor:
    """A tensor with a shape and no storage."""
    import torch

    return torch.empty(*shape, device="meta", dtype=torch.float16)


def _attention_weights(params: Params) -> list[torch.Tensor]:
    """W_q, W_k, W_v, W_o of one layer. Shapes: (out, in)."""
    kv_width = params.n_kv_heads * D_K
    return [
        _empty(N_HEADS * D_K, D_MODEL),
        _empty(kv_width, D_MODEL),
        _empty(kv_width, D_MODEL),
        _empty(D_MODEL, N_HEADS * D_K),
    ]


def _expert_weights(params: Params) -> list[torch.Tensor]:
    """W_gate, W_up, W_down of one expert: of one, the dense FFN. Shapes: (out, in)."""
    width = D_FF // params.experts_per_token
    return [_empty(width, D_MODEL), _empty(width, D_MODEL), _empty(D_MODEL, width)]


def _bill(params: Params, kv_len: int, n_new: int) -> _Bill:
    """Run one layer for one sequence, and the head that names tokens, and count.

    Shapes: x (n_new, in); q (n_kv_heads, n_heads / n_kv_heads · n_new, d_k), k and v (n_kv_heads, kv_len, d_k): heads
    that share keys are rows of one product.
    """
    serving = _attention_weights(params) + _expert_weights(params) * params.experts_per_token
    layer = [(_empty(n_new, W.shape[1]), W) for W in serving]
    x, head = _empty(n_new, D_MODEL), _empty(N_TOKENS, D_MODEL)
    q = _empty(params.n_kv_heads, N_HEADS // params.n_kv_heads * n_new, D_K)
    k, v = (_empty(params.n_kv_heads, kv_len, D_K) for _ in range(2))
    with count_operations() as linear:
        for inputs, W in layer:
            _ = inputs @ W.mT
    with count_operations() as naming:
        _ = x @ head.mT
    with count_operations() as products:
        _ = context(qk_product(q, k), v)
    return _Bill(
        linear_flop=N_LAYERS * linear.products + naming.products,
        attention_flop=N_LAYERS * products.products,
        cache_bytes=N_LAYERS * (k.nbytes + v.nbytes),
    )


def _weights_bytes(params: Params) -> tuple[int, int]:
    """Bytes of all weights but the FFN's, and of one expert in every layer; the embedding is a look-up."""
    shared = N_LAYERS * sum(W.nbytes for W in _attention_weights(params)) + _empty(N_TOKENS, D_MODEL).nbytes
    return shared, N_LAYERS * sum(W.nbytes for W in _expert_weights(params))


def _experts_read(params: Params, run: Run) -> dict[tuple[int, int], float]:
    """How many experts some token of the step needs, by batch and new tokens: the mean of a few routings."""
    import torch

    batches = sorted({*BATCHES, params.batch})
    counts = (1, params.gamma + 1)
    if params.n_experts == 1:
        return {(batch, n_new): 1.0 for batch in batches for n_new in counts}
    read = {(batch, n_new): 0.0 for batch in batches for n_new in counts}
    for draw in range(DRAWS):
        run.progress(0.8 * draw / DRAWS)
        score = run.rand(batches[-1] * counts[-1], params.n_experts)
        chosen = score.topk(params.experts_per_token, dim=-1).indices
        needed = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, True).cpu().numpy()
        first = np.where(needed.any(axis=0), needed.argmax(axis=0), len(needed))  # the first token that needs each
        for batch, n_new in read:
            read[batch, n_new] += float((first < batch * n_new).sum()) / DRAWS
    return read
