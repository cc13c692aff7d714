r"""Which attention PyTorch takes on this device, and its time and memory beside the plain one that it falls back to.

``scaled_dot_product_attention`` has several implementations: fused kernels (FlashAttention, memory-efficient, cuDNN;
on the CPU a FlashAttention of its own) and the one it calls math, a dozen operations with whole matrices of logits and
weights between them. It takes the first one in its order that accepts the call, and does not say which. Here the
operations that run are watched, so what is shown is what was taken, not what was asked for.

Kept memory: what autograd holds for the backward pass, each piece once. The largest tensor: of those that one operation
hands to the next; buffers inside a kernel are not seen. Times are of this device at this moment.

Source: pytorch-code, ``select_sdp_backend_cpp`` and ``SDPBackend``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine import flash, timing
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.watching import watching

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    seq_len: int = number(256, low=16, high=2048, log2=True)
    n_heads: int = number(2, low=1, high=16, log2=True)
    d_k: int = number(64, low=8, high=256, log2=True)
    queries_at_once: str = choice("all", "one")
    asked: str = choice("nothing_more", "is_causal", "mask_tensor", "narrow_values", "dropout_on_weights")
    number_format: str = choice("float32", "bfloat16", "float16")
    training: bool = flag(False)

    def rules(self) -> Iterator[Problem]:
        logits = self.n_heads * self.seq_len**2
        limit = MAX_LOGITS * WIDTH // max(WIDTH, self.d_k)
        if logits > limit:
            values = {"logits": logits, "limit": limit, "d_k": self.d_k}
            yield Problem("rule", "seq_len", self.seq_len, rule="too_many_logits_to_time", values=values)
        if self.asked == "is_causal" and self.queries_at_once == "one":
            yield Problem("rule", "asked", self.asked, rule="is_causal_hides_from_one_query")


METRICS = (
    Metric("fused_taken"),
    Metric("taken_time_s", "s", measured=True),
    Metric("math_time_s", "s", measured=True),
    Metric("kept_bytes", "bytes"),
    Metric("math_kept_bytes", "bytes"),
    Metric("largest_tensor_bytes", "bytes"),
    Metric("math_largest_tensor_bytes", "bytes"),
    Metric("output_difference"),
)
PLOTS = (
    Plot(
        "times",
        table="by_length",
        x="seq_len",
        y="time_ms",
        by="backend",
        x_scale="log2",
        y_scale="log10",
        measured=("time_ms",),
    ),
    Plot("kept", table="by_length", x="seq_len", y="kept_kib", by="backend", x_scale="log2", y_scale="log2"),
)
BUDGET_S = 0.06

MAX_LOGITS, WIDTH = 2**22, 64  # of one call, in heads of that width, fewer in wider ones: 0.1 s on one core
SHORTER = (4, 2, 1)  # the lengths of the plots: the chosen one and its parts
ONE_AT_A_TIME = threading.Lock()  # what forces an implementation holds for the whole process
FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash_kernel",
    "_scaled_dot_product_flash_attention": "flash_kernel",
    "_scaled_dot_product_efficient_attention": "efficient_kernel",
    "_scaled_dot_product_cudnn_attention": "cudnn_kernel",
    "_scaled_dot_product_fused_attention_overrideable": "other_kernel",
}


def memory_bytes(params: Params) -> int:
    """Inputs, outputs and gradients, and eight matrices of logits."""
    logits = params.n_heads * params.seq_len**2
    return 4 * (8 * logits + 12 * params.n_heads * params.seq_len * params.d_k) + 2**20


@dataclass
class _Seen:
    """What one implementation did: which it was, its output, the bytes kept and of the largest tensor, its time."""

    backend: str
    out: torch.Tensor
    kept_bytes: int
    largest_tensor_bytes: int
    time_s: float


def run(params: Params, run: Run) -> Result:
    """The chosen call as PyTorch decides it, and by its math implementation, at three lengths.

    ``fused_taken``: 1 if one of the fused kernels ran. ``output_difference``: the largest between the two, where no
    dropout makes them differ.

    Shapes: q (1, n_heads, q_len, d_k); k (1, n_heads, seq_len, d_k); v the same, or of half the width.
    """
    pairs = {}
    for done, part in enumerate(SHORTER):
        seq_len = params.seq_len // part
        inputs = _inputs(params, seq_len, run)
        with ONE_AT_A_TIME:
            pairs[seq_len] = [_seen(params, inputs, force, run, done / len(SHORTER)) for force in (False, True)]
    taken, plain = pairs[params.seq_len]
    difference = 0.0 if params.asked == "dropout_on_weights" else (taken.out - plain.out).abs().max()
    metrics = {
        "fused_taken": taken.backend != "math_kernel",
        "taken_time_s": taken.time_s,
        "math_time_s": plain.time_s,
        "kept_bytes": taken.kept_bytes,
        "math_kept_bytes": plain.kept_bytes,
        "largest_tensor_bytes": taken.largest_tensor_bytes,
        "math_largest_tensor_bytes": plain.largest_tensor_bytes,
        "output_difference": difference,
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"by_length": _by_length(pairs)})


def _inputs(params: Params, seq_len: int, run: Run) -> list[torch.Tensor]:
    """Numbers in [-1, 1] that need no seed: neither time nor memory depends on them."""
    import torch

    q_len = 1 if params.queries_at_once == "one" else seq_len
    d_v = params.d_k // 2 if params.asked == "narrow_values" else params.d_k
    dtype = getattr(torch, params.number_format)
    shapes = ((q_len, params.d_k), (seq_len, params.d_k), (seq_len, d_v))
    return [timing.varied(1, params.n_heads, *shape, device=run.device, dtype=dtype) for shape in shapes]


def _call(params: Params, inputs: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The call with what is asked of it. A mask tensor hides nothing: it is the same work as one that does."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = inputs
    options: dict[str, Any] = {}
    if params.asked == "is_causal":
        options["is_causal"] = True
    elif params.asked == "mask_tensor":
        options["attn_mask"] = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
    elif params.asked == "dropout_on_weights":
        options["dropout_p"] = 0.1
    return lambda: scaled_dot_product_attention(q, k, v, **options)


def _seen(params: Params, inputs: list[torch.Tensor], force_math: bool, run: Run, fraction: float) -> _Seen:
    """The call watched once, and then timed by itself."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with contextlib.ExitStack() as stack:
        stack.enter_context(_random_state_kept(run.device))  # dropout draws from torch's own generators
        if force_math:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        leaves = [x.detach().requires_grad_() for x in inputs]
        call = _call(params, leaves)
        with flash.count_kept() as kept, _watched() as watched:
            out = call()
        if params.training:

            def work() -> object:
                return torch.autograd.grad(call().sum(), leaves)
        else:
            work = _call(params, inputs)
        time_s = timing.wall_time_s(work, run.device, lambda: run.progress(fraction))
    return _Seen(watched.backend, out.detach(), kept.bytes, watched.largest_tensor_bytes, time_s)


@contextlib.contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    import torch

    generators: list[Any] = [torch] if device.type == "cpu" else [torch, getattr(torch, device.type)]
    states = [generator.get_rng_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_rng_state(state)


@dataclass
class _Watched:
    backend: str = "math_kernel"
    largest_tensor_bytes: int = 0


@contextlib.contextmanager
def _watched() -> Iterator[_Watched]:
    """Which implementation runs inside the block, and the largest tensor that one of its operations makes."""
    import torch

    watched = _Watched()

    def seen(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        watched.backend = FUSED.get(func.overloadpacket.__name__, watched.backend)
        if not func.is_view:
            made = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)]
            watched.largest_tensor_bytes = max([watched.largest_tensor_bytes, *(x.nbytes for x in made)])

    with watching(seen):
        yield watched


def _by_length(pairs: dict[int, list[_Seen]]) -> Table:
    """Time and kept memory of each length, of what was taken and of the math implementation."""
    rows = [
        (seq_len, seen.backend if n == 0 else "forced_math", seen.time_s * 1e3, seen.kept_bytes / 1024)
        for seq_len, both in pairs.items()
        for n, seen in enumerate(both)
    ]
    lengths, backends, times, kept = zip(*rows, strict=True)
    return {
        "seq_len": np.array(lengths),
        "backend": np.array(backends),
        "time_ms": np.array(times),
        "kept_kib": np.array(kept),
    }
