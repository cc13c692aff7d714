r"""What RMSNorm saves over LayerNorm: learned numbers, reductions, operations, bytes moved and bytes kept, counted.

Each norm is run three ways on a few tokens, on the CPU, while every operation is watched:

``step_by_step``  as written in a few lines of code, each of them a kernel that reads its tensors and writes its result
``one_kernel``    a fused kernel: the token and the gain (and bias) are read once, the output is written once, and what
                  the backward pass needs beside the input is one number a token, or two
``torch_call``    ``torch.nn.functional.rms_norm`` and ``layer_norm`` on a CPU, without a GPU's fused kernels:
                  what they break into is up to the version of PyTorch

The matrix behind the norm is W_q, W_k and W_v together, d to 3d: what the norm's operations are to be compared with.

Sources: pytorch-code, ``LayerNorm``, ``RMSNorm``; ivanov2020, abstract (training is bound by data movement).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, flag, number
from engine.operations import REDUCTIONS, count_operations
from engine.watching import watching

if TYPE_CHECKING:
    import torch

NORMS = ("rms_norm", "layer_norm")
WAYS = ("step_by_step", "one_kernel", "torch_call")


@dataclass(frozen=True)
class Params(BaseParams):
    normalization: str = choice(*NORMS)
    norm_bias: bool = flag(False)
    norm_computed: str = choice(*WAYS)
    d_model: int = number(4096, low=64, high=16384, log2=True)
    normed_tokens: int = number(1024, low=1, high=2**20, log2=True)
    number_format: str = choice("bfloat16", "float16", "float32")


METRICS = (
    Metric("norm_moved_bytes", "bytes"),
    Metric("norm_kept_bytes", "bytes"),
    Metric("norm_parameters"),
    Metric("norm_reductions"),
    Metric("norm_steps"),
    Metric("operations_per_number"),
    Metric("norm_flop_share"),
    Metric("norm_byte_share"),
)
PLOTS = (
    Plot("moved", table="ways", x="norm_computed", y="accesses_per_number", by="normalization", mark="bar"),
    Plot("kept", table="ways", x="norm_computed", y="kept_per_number", by="normalization", mark="bar"),
)
BUDGET_S = 0.05

EPSILON = 1e-6


def memory_bytes(params: Params) -> int:
    """Two and four tokens with a few temporaries; the matrix has no storage."""
    return 8 * 64 * params.d_model + 2**18


def run(params: Params, run: Run) -> Result:
    """Count the chosen norm in the chosen way; the table has both norms in all ways.

    ``norm_moved_bytes``: of the forward pass, what its operations read and write. ``norm_kept_bytes``: what is kept
    for the backward pass, each piece of memory once. ``norm_parameters``: of PyTorch's module. ``norm_reductions``,
    ``norm_steps``: operations that reduce, and all that compute; in one kernel the reductions of the steps are still
    there. ``operations_per_number``: elementwise operations, reductions and roots of the steps by the numbers of the
    input. ``norm_flop_share`` and ``norm_byte_share``: of the norm and the matrix behind it together.
    """
    bias = params.norm_bias
    found = _counted(params, params.normalization, params.norm_computed)
    run.progress(0.3)
    steps = _counted(params, params.normalization, "step_by_step")
    numbers = params.normed_tokens * params.d_model
    flop, moved = _matrix(params)
    metrics = {
        "norm_moved_bytes": found.moved,
        "norm_kept_bytes": found.kept,
        "norm_parameters": _parameters(params.normalization, params.d_model, bias),
        "norm_reductions": steps.reductions,
        "norm_steps": found.steps,
        "operations_per_number": steps.operations / numbers,
        "norm_flop_share": steps.operations / (steps.operations + flop),
        "norm_byte_share": found.moved / (found.moved + moved),
    }
    run.progress(0.5)
    rows = [(way, kind, _counted(params, kind, way)) for way in WAYS for kind in NORMS]
    itemsize = found.itemsize
    table: Table = {
        "norm_computed": np.array([way for way, _, _ in rows]),
        "normalization": np.array([kind for _, kind, _ in rows]),
        "accesses_per_number": np.array([count.moved / numbers / itemsize for *_, count in rows]),
        "kept_per_number": np.array([count.kept / numbers / itemsize for *_, count in rows]),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"ways": table})


@dataclass
class _Count:
    moved: int
    kept: int
    steps: int
    reductions: int
    operations: int
    itemsize: int


def _counted(params: Params, kind: str, way: str) -> _Count:
    """Run the norm on two tokens and on four, and count.

    Every tensor has one part for each token or is there once, so two counts give those of any number of tokens.
    """
    two, four = (_at(params, kind, way, tokens) for tokens in (2, 4))

    def at_all(name: str) -> int:
        of_two, of_four = getattr(two, name), getattr(four, name)
        return int(of_two + (of_four - of_two) // 2 * (params.normed_tokens - 2))

    operations = at_all("operations")
    return _Count(at_all("moved"), at_all("kept"), two.steps, two.reductions, operations, two.itemsize)


def _at(params: Params, kind: str, way: str, tokens: int) -> _Count:
    """Shapes: x (tokens, d_model), gain and bias (d_model,). On the CPU, whatever the device of the run."""
    import torch

    form = getattr(torch, params.number_format)
    x = torch.ones(tokens, params.d_model, dtype=form, requires_grad=True)
    learned = [torch.ones(params.d_model, dtype=form, requires_grad=True) for _ in range(2 if params.norm_bias else 1)]
    if way == "one_kernel":
        return _one_kernel(x, learned, kind)
    function: Callable[..., torch.Tensor] = {
        ("step_by_step", "rms_norm"): _rms_steps,
        ("step_by_step", "layer_norm"): _layer_steps,
        ("torch_call", "rms_norm"): _torch_rms,
        ("torch_call", "layer_norm"): _torch_layer,
    }[way, kind]
    kept: set[Any] = set()  # pieces of memory

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage())
        return tensor

    names: list[str] = []
    moved = 0

    def seen(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal moved
        if func.is_view or func.overloadpacket.__name__ == "detach":
            return
        names.append(func.overloadpacket.__name__)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        moved += sum(t.nbytes for t in (*args, *outs) if isinstance(t, torch.Tensor))

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), watching(seen):
        function(x, *learned)
    operations = 0
    if way == "step_by_step":
        with torch.no_grad(), count_operations() as counted:
            function(x, *learned)
        operations = counted.total
    reductions = sum(name in REDUCTIONS for name in names)
    kept_bytes = sum(storage.nbytes() for storage in kept)
    return _Count(moved, kept_bytes, len(names), reductions, operations, x.element_size())


def _one_kernel(x: torch.Tensor, learned: list[torch.Tensor], kind: str) -> _Count:
    """Each tensor once: read x and what is learned, write the output and the statistics, kept in float32."""
    import torch

    statistics = [torch.empty(x.shape[0], 1) for _ in range(1 if kind == "rms_norm" else 2)]
    beside = sum(tensor.nbytes for tensor in statistics)
    moved = 2 * x.nbytes + sum(tensor.nbytes for tensor in learned) + beside
    return _Count(moved, x.nbytes + learned[0].nbytes + beside, 1, 0, 0, x.element_size())


def _rms_steps(x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    mean_square = x.square().mean(dim=-1, keepdim=True)
    out = x * (mean_square + EPSILON).rsqrt() * gain
    return out if bias is None else out + bias


def _layer_steps(x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    out = centred * (variance + EPSILON).rsqrt() * gain
    return out if bias is None else out + bias


def _torch_rms(x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    from torch.nn.functional import rms_norm

    out = rms_norm(x, x.shape[-1:], gain, EPSILON)
    return out if bias is None else out + bias


def _torch_layer(x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    from torch.nn.functional import layer_norm

    return layer_norm(x, x.shape[-1:], gain, bias, EPSILON)


def _parameters(kind: str, d_model: int, bias: bool) -> int:
    """Learned numbers of PyTorch's module; its RMSNorm has no bias to learn, so one is counted beside it."""
    from torch import nn

    layer = kind == "layer_norm"
    module = nn.LayerNorm(d_model, bias=bias, device="meta") if layer else nn.RMSNorm(d_model, device="meta")
    counted = sum(int(parameter.numel()) for parameter in module.parameters())
    return counted + (d_model if bias and not layer else 0)


def _matrix(params: Params) -> tuple[int, int]:
    """Operations and bytes of the product behind the norm."""
    import torch

    form = getattr(torch, params.number_format)
    x = torch.empty(params.normed_tokens, params.d_model, device="meta", dtype=form)
    W = torch.empty(params.d_model, 3 * params.d_model, device="meta", dtype=form)
    with count_operations() as counted:
        x @ W
    return counted.products, counted.product_bytes
