r"""Multi-head, grouped-query and multi-query attention: the spread of the logits, and the size of the KV cache.

Sharing keys and values between heads changes neither the width of a head nor the independence of q and k, so the
variance of q·k stays d_k, and :math:`1/\sqrt{d_k}` with it, however many heads share a key. What changes is the
cache. ``d_rope`` joins rotary dimensions, their key shared by all heads, to q and k, as in multi-head latent
attention: the width that counts is then d_k + d_rope. (The compressed cache of that method is not what is counted
here.)

Source: arXiv:2405.04434 (DeepSeek-V2), section 2.1.3 (the joined rotary key).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.attention import qk_product, scale_value
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number


@dataclass(frozen=True)
class Params(BaseParams):
    n_heads: int = number(32, low=1, high=128, log2=True)
    n_kv_heads: int = number(8, low=1, high=128, log2=True)
    d_k: int = number(128, low=1, high=512, log2=True)
    d_rope: int = number(0, low=0, high=256, step=16)
    seq_len: int = number(4096, low=1, high=2**20, log2=True)
    batch: int = number(1, low=1, high=1024, log2=True)
    cache_dtype: str = choice("bfloat16", "float16", "float32")

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            yield Problem(
                "rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values={"n_heads": self.n_heads}
            )


METRICS = (
    Metric("logits_variance"),
    Metric("scaled_logits_variance"),
    Metric("theory_variance"),
    Metric("kv_cache_bytes", "bytes"),
    Metric("kv_cache_share"),
)
PLOTS = (
    Plot(
        "variance",
        table="by_kv_heads",
        x="n_kv_heads",
        y="logits_variance",
        theory="theory_variance",
        mark="point",
        x_scale="log2",
    ),
    Plot("cache", table="by_kv_heads", x="n_kv_heads", y="kv_cache_bytes", mark="bar", x_scale="log2", y_unit="bytes"),
)
BUDGET_S = 0.05

N_POSITIONS = 32  # queries and keys of each head that are drawn to measure the spread


def memory_bytes(params: Params) -> int:
    """q and k at N_POSITIONS with their temporaries, and the logits of all heads with theirs, in float64."""
    drawn = params.n_heads * N_POSITIONS * (params.d_k + params.d_rope)
    return 8 * (6 * drawn + 4 * params.n_heads * N_POSITIONS**2)


def run(params: Params, run: Run) -> Result:
    """Spread of q·k over all heads, and the bytes of one layer's cache for ``batch`` sequences of ``seq_len``.

    The spread is measured on 32 queries and 32 keys a head; the bytes are those of tensors of the full size without
    storage. The cache holds k and v of every KV head and the rotary key once. ``kv_cache_share``: relative to a KV head
    for each head.

    Shapes: q (n_heads, 32, d_k + d_rope), k (n_kv_heads, 32, d_k + d_rope).
    """
    divisors = [n for n in range(1, params.n_heads + 1) if params.n_heads % n == 0]
    variances = {}
    for done, n_kv_heads in enumerate(divisors):
        run.progress(done / len(divisors))
        variances[n_kv_heads] = _variance(params, run, n_kv_heads)
    width = params.d_k + params.d_rope
    cache = {n_kv_heads: _cache_bytes(params, n_kv_heads) for n_kv_heads in divisors}
    metrics = {
        "logits_variance": variances[params.n_kv_heads],
        "scaled_logits_variance": variances[params.n_kv_heads] * scale_value("inv_sqrt_d_k", width) ** 2,
        "theory_variance": float(width),
        "kv_cache_bytes": float(cache[params.n_kv_heads]),
        "kv_cache_share": cache[params.n_kv_heads] / cache[params.n_heads],
    }
    table = {
        "n_kv_heads": np.array(divisors),
        "logits_variance": np.array(list(variances.values())),
        "theory_variance": np.full(len(divisors), float(width)),
        "kv_cache_bytes": np.array(list(cache.values())),
    }
    return Result(metrics, {"by_kv_heads": table})


def _variance(params: Params, run: Run, n_kv_heads: int) -> float:
    """Variance of q·k when n_heads / n_kv_heads heads in a row share a key."""
    import torch

    q = run.randn(params.n_heads, N_POSITIONS, params.d_k + params.d_rope)
    k = run.randn(n_kv_heads, N_POSITIONS, params.d_k)
    k_rope = run.randn(1, N_POSITIONS, params.d_rope).expand(n_kv_heads, -1, -1)
    k = torch.cat([k, k_rope], dim=-1).repeat_interleave(params.n_heads // n_kv_heads, dim=0)
    return float(qk_product(q, k).cpu().double().var())


def _cache_bytes(params: Params, n_kv_heads: int) -> int:
    """Bytes of k, v and the rotary key of one layer, counted from tensors without storage."""
    import torch

    def nbytes(n_heads: int, width: int) -> int:
        shape = (params.batch, n_heads, params.seq_len, width)
        return int(torch.empty(shape, dtype=getattr(torch, params.cache_dtype), device="meta").nbytes)

    return 2 * nbytes(n_kv_heads, params.d_k) + nbytes(1, params.d_rope)
