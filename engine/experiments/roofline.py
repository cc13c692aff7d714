r"""Where attention stands under the roofline of this device: one layer in decode (one query a head) and in prefill.

Work that does :math:`I` operations a byte runs at :math:`\min(P, I\,B)` at best: :math:`P` the rate at which the
device multiplies matrices, :math:`B` the one at which it copies memory, both measured here (engine/ceilings.py).
Operations are those of the two products, a multiply-add counting two; the softmax, some ten for each logit, is left
out.

``least_bytes``: q, k and v read once, the output written once, at the size of the dtype. The logits of ``eager``
attention (engine/attention.py) pass through memory as well: written by the product, scaled, searched for their maximum,
shifted, exponentiated, summed, divided, and read by the second product, twelve times in all, with four passes over one
number for each row. ``eager_bytes`` counts these too. There is no mask, and heads that share keys are rows of one
product, so that no implementation copies a key.

Decode, the product of a vector with the cache: :math:`I = \frac{2\,h\,n}{s\,(h + g\,n)}` for :math:`h` heads,
:math:`g` KV heads, :math:`n` keys and :math:`s` bytes a number. The batch cancels, since every sequence has a cache of
its own; what moves it is :math:`h/g`.

Measured on one device, at one moment, by repeats on the same tensors; what could have stayed in a cache is displaced
before each decode. A share above 1 is possible: reading alone is cheaper than copying, and a large cache keeps more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine import ceilings, timing
from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number


@dataclass(frozen=True)
class Params(BaseParams):
    phase: str = choice("decode", "prefill")
    n_heads: int = number(8, low=1, high=64, log2=True)
    n_kv_heads: int = number(2, low=1, high=64, log2=True)
    d_k: int = number(64, low=8, high=256, log2=True)
    kv_len: int = number(256, low=16, high=2048, log2=True)
    batch: int = number(1, low=1, high=16, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            yield Problem(
                "rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values={"n_heads": self.n_heads}
            )
        logits = self.batch * self.n_heads * self.kv_len**2
        limit = MAX_LOGITS * WIDTH // max(WIDTH, self.d_k)
        if logits > limit:
            values = {"logits": logits, "limit": limit, "d_k": self.d_k}
            yield Problem("rule", "kv_len", self.kv_len, rule="too_much_prefill", values=values)


METRICS = (
    Metric("intensity_flop_per_byte", "flop/byte"),
    Metric("ridge_flop_per_byte", "flop/byte", measured=True),
    Metric("sdpa_roofline_share", measured=True),
    Metric("eager_roofline_share", measured=True),
    Metric("least_time_s", "s", measured=True),
    Metric("sdpa_time_s", "s", measured=True),
    Metric("eager_time_s", "s", measured=True),
    Metric("attention_flop", "flop"),
    Metric("least_bytes", "bytes"),
    Metric("eager_bytes", "bytes"),
    Metric("eager_intensity_flop_per_byte", "flop/byte"),
    Metric("copy_bytes_per_s", "bytes/s", measured=True),
    Metric("matmul_flop_per_s", "flop/s", measured=True),
)
PLOTS = (
    Plot(
        "roofline",
        table="points",
        x="intensity_flop_per_byte",
        y="flop_per_s",
        by="series",
        theory="roofline_flop_per_s",
        mark="point",
        x_scale="log10",
        y_scale="log10",
        x_unit="flop/byte",
        y_unit="flop/s",
        one_law=True,
        measured=("intensity_flop_per_byte", "flop_per_s", "roofline_flop_per_s"),  # x: the ridge is one of the points
    ),
)
BUDGET_S = 0.3  # once the ceilings are known; they take half a second, once a process

MAX_LOGITS, WIDTH = 2**23, 64  # of one prefill, in heads of that width, fewer in wider ones: 0.1 s on one core
SERIES = {
    ("decode", "eager"): "decode_eager",
    ("decode", "sdpa"): "decode_sdpa",
    ("prefill", "eager"): "prefill_eager",
    ("prefill", "sdpa"): "prefill_sdpa",
}
LOGIT_PASSES, ROW_PASSES = 12, 4  # of eager attention through memory


def memory_bytes(params: Params) -> int:
    """Of the ceilings, which come first; or q, k, v, the output and the logits with three copies, all keys unshared."""
    tensors = 4 * params.batch * params.n_heads * params.kv_len * params.d_k
    logits = 4 * params.batch * params.n_heads * params.kv_len**2
    return max(ceilings.MEMORY_BYTES, timing.DISPLACED_BYTES + 4 * (2 * tensors + logits))


def run(params: Params, run: Run) -> Result:
    """Counts of the chosen phase, the roofline, and the times of both implementations; all variants are in the table.

    Shapes: q (batch, n_kv_heads, n_heads / n_kv_heads · q_len, d_k), k and v (batch, n_kv_heads, kv_len, d_k).
    """
    variants = sorted({1, params.n_kv_heads, params.n_heads})
    settings = [(phase, n_kv_heads) for phase in ("decode", "prefill") for n_kv_heads in variants]
    run.progress(0.0)
    roof = ceilings.known_ceilings(run.device, run.dtype, lambda: run.progress(0.0))
    displace = timing.displacer(run.device)
    times = {}
    for done, (phase, n_kv_heads) in enumerate(settings):
        fraction = (1 + done) / (1 + len(settings))
        for implementation, seconds in _times(params, phase, n_kv_heads, run, displace, fraction).items():
            times[phase, n_kv_heads, implementation] = seconds

    size = run.dtype.itemsize
    flop, least = (
        _flop(params, _q_len(params, params.phase)),
        _least_bytes(params, params.phase, params.n_kv_heads, size),
    )
    eager = least + _logit_bytes(params, params.phase, size)
    least_s = flop / ceilings.roofline_flop_per_s(flop / least, roof)
    eager_s, sdpa_s = (times[params.phase, params.n_kv_heads, implementation] for implementation in ("eager", "sdpa"))
    metrics = {
        "intensity_flop_per_byte": flop / least,
        "ridge_flop_per_byte": ceilings.ridge_flop_per_byte(roof),
        "sdpa_roofline_share": least_s / sdpa_s,
        "eager_roofline_share": least_s / eager_s,
        "least_time_s": least_s,
        "sdpa_time_s": sdpa_s,
        "eager_time_s": eager_s,
        "attention_flop": float(flop),
        "least_bytes": float(least),
        "eager_bytes": float(eager),
        "eager_intensity_flop_per_byte": flop / eager,
        "copy_bytes_per_s": roof.copy_bytes_per_s,
        "matmul_flop_per_s": roof.matmul_flop_per_s,
    }
    return Result(metrics, {"points": _points(params, times, roof, size)})


def _q_len(params: Params, phase: str) -> int:
    return 1 if phase == "decode" else params.kv_len


def _flop(params: Params, q_len: int) -> int:
    """Of the products q·k and weights·v."""
    return 4 * params.batch * params.n_heads * q_len * params.kv_len * params.d_k


def _least_bytes(params: Params, phase: str, n_kv_heads: int, size: int) -> int:
    queries = params.batch * params.n_heads * _q_len(params, phase) * params.d_k
    keys = params.batch * n_kv_heads * params.kv_len * params.d_k
    return size * (2 * queries + 2 * keys)


def _logit_bytes(params: Params, phase: str, size: int) -> int:
    rows = params.batch * params.n_heads * _q_len(params, phase)
    return size * rows * (LOGIT_PASSES * params.kv_len + ROW_PASSES)


def _times(
    params: Params, phase: str, n_kv_heads: int, run: Run, displace: Callable[[], object], fraction: float
) -> dict[str, float]:
    """Seconds of each implementation."""
    from torch.nn.functional import scaled_dot_product_attention

    rows = params.n_heads // n_kv_heads * _q_len(params, phase)
    varied = functools.partial(timing.varied, device=run.device, dtype=run.dtype)
    q = varied(params.batch, n_kv_heads, rows, params.d_k)
    k = varied(params.batch, n_kv_heads, params.kv_len, params.d_k)
    v = varied(params.batch, n_kv_heads, params.kv_len, params.d_k)
    calls: dict[str, Callable[[], object]] = {
        "eager": lambda: attention(q, k, v),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v),
    }

    # a prefill has its operands in the cache for most of its time anyway
    before = displace if phase == "decode" else timing.nothing
    return {
        name: timing.wall_time_s(call, run.device, lambda: run.progress(fraction), before=before)
        for name, call in calls.items()
    }


def _points(
    params: Params, times: dict[tuple[str, int, str], float], roof: ceilings.Ceilings, size: int
) -> dict[str, np.ndarray]:
    """A row for each measured time, and three for the roofline: its corner, and ends beyond all points."""
    rows = []
    for (phase, n_kv_heads, implementation), seconds in times.items():
        flop = _flop(params, _q_len(params, phase))
        intensity = flop / _least_bytes(params, phase, n_kv_heads, size)
        rows.append((SERIES[phase, implementation], intensity, flop / seconds))
    table = ceilings.under_roofline("series", rows, roof, x="intensity_flop_per_byte")
    variants = [_variant(params, n_kv_heads) for _, n_kv_heads, _ in times]
    return {**table, "variant": np.array(variants + ["roofline"] * (len(table["series"]) - len(variants)))}


def _variant(params: Params, n_kv_heads: int) -> str:
    return "MHA" if n_kv_heads == params.n_heads else "MQA" if n_kv_heads == 1 else "GQA"
