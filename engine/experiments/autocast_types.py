r"""What ``torch.autocast`` does, found by running it: which type each operation gives out, and what a block then keeps.

Each operation is run twice under autocast, on float32 and on bfloat16 numbers, and the type of
what comes out is looked at. Products take the 16-bit type whatever they are given; some operations go back to float32
(which ones differs from device to device); the rest run in the type they are given, sums of both types in float32.

Then a transformer block is run forward and back in three ways, and the bytes of what it keeps are added up:

``float32``       everything in float32
``autocast``      float32 weights, the forward pass and the loss under autocast
``cast_weights``  weights and input converted to the 16-bit type beforehand, no autocast

All numbers are those of autocast on the CPU, which every machine has; the chart of the operations also shows the
accelerator in use, if autocast works there. The state is what stays from step to step: a weight, its gradient, and
Adam's two moments, which optimizers make like the weight.

Source: pytorch-amp, section "Autocast Op Reference".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

MAX_WORK = 2**23  # batch · seq_len · d_model²: 0.5 s a regime where bfloat16 is multiplied without instructions
REGIMES = ("autocast", "cast_weights", "float32")
PARTS = ("kept_attention", "kept_ffn", "kept_norms", "kept_loss", "kept_cast_weights")


@dataclass(frozen=True)
class Params(BaseParams):
    precision_regime: str = choice(*REGIMES)
    batch: int = number(2, low=1, high=8, log2=True)
    seq_len: int = number(64, low=4, high=256, log2=True)
    d_model: int = number(64, low=16, high=512, log2=True)
    n_heads: int = number(4, low=1, high=16, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": self.d_model})
        work = self.batch * self.seq_len * self.d_model**2
        if work > MAX_WORK:
            values = {"product": work, "limit": MAX_WORK}
            yield Problem("rule", "d_model", self.d_model, rule="autocast_too_large", values=values)


METRICS = (
    Metric("kept_activation_bytes", "bytes"),
    Metric("kept_cast_weight_bytes", "bytes"),
    Metric("state_bytes_per_weight", "bytes"),
    Metric("residual_bits"),
    Metric("weight_bits"),
    Metric("weight_gradient_bits"),
    Metric("qk_bits"),
    Metric("softmax_bits"),
    Metric("loss_bits"),
    Metric("operations_to_low"),
    Metric("operations_back_to_float32"),
)
PLOTS = (
    Plot("given_low", "given_low", x="torch_operation", y="given_out_bits", by="autocast_place", mark="point"),
    Plot("given_float32", "given_float32", x="torch_operation", y="given_out_bits", by="autocast_place", mark="point"),
    Plot("kept", table="kept", x="precision_regime", y="kept_kib_of", by="kept_tensor", mark="bar"),
)
BUDGET_S = 0.015


def memory_bytes(params: Params) -> int:
    """Weights with gradients and casts, and what the block keeps and computes on the way, forward and back."""
    tokens = params.batch * params.seq_len
    weights = 12 * params.d_model**2 + 2 * params.d_model
    return 4 * (6 * weights + tokens * (60 * params.d_model + 10 * params.n_heads * params.seq_len)) + 2**20


def run(params: Params, run: Run) -> Result:
    """The types that operations give out, then a block forward and back; the metrics are those of the chosen regime.

    ``kept_activation_bytes``: of the tensors that autograd keeps for the backward pass, each storage once, the weights
    themselves and the input left out; ``kept_cast_weight_bytes`` are those among them that hold weights, cast.
    ``state_bytes_per_weight``: of the weights, their gradients and two moments, over the number of weights. Bits are
    those of one number: of the residual stream after the block, of the product q·k, of the weights after the softmax,
    of the loss, of a weight and of its gradient.

    Shapes: x (batch, seq_len, d_model).
    """
    import torch

    low = torch.bfloat16  # float16 is treated alike
    found = {"on_cpu": _given_out(torch.device("cpu"), low)}
    if run.device.type != "cpu" and _works(run.device, low):
        found["on_accelerator"] = _given_out(run.device, low)
    run.progress(0.3)
    by_regime, kept = _block(params, run, low)
    metrics = by_regime[params.precision_regime]
    here = found["on_cpu"]
    names = {name for name, _ in here} - {"torch_add_to_float32"}  # of which one operand is float32 either way
    metrics["operations_to_low"] = float(sum(here[name, "float32_in"] == 16 for name in names))
    metrics["operations_back_to_float32"] = float(sum(here[name, "low_in"] == 32 for name in names))
    tables = {
        "given_low": _operations_table(found, "low_in"),
        "given_float32": _operations_table(found, "float32_in"),
        "kept": kept,
    }
    return Result({m.name: float(metrics[m.name]) for m in METRICS}, tables)


# --------------------------------------------------------------------------------------------------------------------
# One operation at a time


def _operations(x: torch.Tensor, other: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Operations of a transformer by name. Shapes: x (8, 8) of either type, other (8, 8) float32."""
    import torch
    from torch.nn import functional as F

    target = torch.zeros(8, dtype=torch.int64).to(x.device)
    return {
        "torch_linear": lambda: F.linear(x, other),
        "torch_matmul": lambda: x @ x,
        "torch_softmax": lambda: x.softmax(dim=-1),
        "torch_layer_norm": lambda: F.layer_norm(x, (8,)),
        "torch_rms_norm": lambda: F.rms_norm(x, (8,)),
        "torch_gelu": lambda: F.gelu(x),
        "torch_exp": lambda: x.exp(),
        "torch_sum": lambda: x.sum(dim=-1),
        "torch_add": lambda: x + x,
        "torch_add_to_float32": lambda: x + other,
        "torch_cross_entropy": lambda: F.cross_entropy(x, target),
    }


def _works(device: torch.device, low: torch.dtype) -> bool:
    """Whether autocast does anything on a device: whether it multiplies float32 numbers in the 16-bit type."""
    import torch

    ones = torch.ones(8, 8).to(device)
    with torch.autocast(device.type, low):
        return bool((ones @ ones).dtype == low)


def _given_out(device: torch.device, low: torch.dtype) -> dict[tuple[str, str], int]:
    """Bits of a number that each operation gives out under autocast, by its name and the type it was given."""
    import torch

    other = torch.ones(8, 8).to(device)
    found = {}
    with torch.no_grad(), torch.autocast(device.type, low):
        for given, x in (("float32_in", other), ("low_in", other.to(low))):
            for name, operation in _operations(x, other).items():
                found[name, given] = 8 * operation().element_size()
    return found


def _operations_table(found: dict[str, dict[tuple[str, str], int]], given: str) -> Table:
    """A row for each operation that was given this type; those of an accelerator stand beside the CPU's."""
    rows = [
        (place, name, bits)
        for place, of in found.items()
        for (name, was_given), bits in of.items()
        if was_given == given
    ]
    places, names, bits = zip(*rows, strict=True)
    return {"autocast_place": np.array(places), "torch_operation": np.array(names), "given_out_bits": np.array(bits)}


# --------------------------------------------------------------------------------------------------------------------
# A block


def _block(params: Params, run: Run, low: torch.dtype) -> tuple[dict[str, dict[str, float]], Table]:
    """The block in each regime, with the same numbers: the metrics by regime, and the table of what is kept."""
    import torch

    n = params.d_model
    shapes = {"W_qkv": (3 * n, n), "W_o": (n, n), "W_up": (4 * n, n), "W_down": (n, 4 * n)}
    weights = {name: torch.ones(shape) / shape[1] for name, shape in shapes.items()}  # types don't depend on numbers
    x, target = torch.ones(params.batch, params.seq_len, n), torch.zeros(params.batch, params.seq_len, n)
    metrics = {}
    columns: list[tuple[str, str, float]] = []
    for place, regime in enumerate(REGIMES):
        run.progress(0.3 + 0.2 * place)
        metrics[regime], kept = _one_regime(params, regime, low, weights, x, target)
        columns += [(regime, part, size / 1024) for part, size in kept.items()]
    regimes, parts, kib = zip(*columns, strict=True)
    return metrics, {
        "precision_regime": np.array(regimes),
        "kept_tensor": np.array(parts),
        "kept_kib_of": np.array(kib),
    }


def _one_regime(
    params: Params,
    regime: str,
    low: torch.dtype,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    target: torch.Tensor,
) -> tuple[dict[str, float], dict[str, int]]:
    """A pre-norm block of attention and feed-forward network with a squared error, forward and back.

    Shapes: x, target (batch, seq_len, d_model). Returns the metrics, and the bytes kept by part of the block.
    """
    import torch
    from torch.nn.functional import gelu, layer_norm, mse_loss

    dtype, width = low if regime == "cast_weights" else torch.float32, (params.d_model,)
    weights = {name: weight.to(dtype, copy=True).requires_grad_() for name, weight in weights.items()}
    x = x.to(dtype, copy=True).requires_grad_()  # as in the middle of a model
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, target, *weights.values())}
    held: dict[int, torch.Tensor] = {}  # kept alive, so that no other tensor gets its place
    part, kept = "", dict.fromkeys(PARTS, 0)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in held:
            held[storage.data_ptr()] = tensor
            kept["kept_cast_weights" if _comes_from_a_weight(tensor) else part] += storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", low, enabled=regime == "autocast"),
    ):
        part = "kept_norms"
        normed = layer_norm(x, width)
        part = "kept_attention"
        qkv = (normed @ weights["W_qkv"].mT).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (params.n_heads, -1)).transpose(1, 2) for y in qkv)
        qk = q @ k.mT
        rows = (qk / math.sqrt(params.d_model // params.n_heads)).softmax(dim=-1)
        x = x + (rows @ v).transpose(1, 2).flatten(2) @ weights["W_o"].mT
        part = "kept_norms"
        normed = layer_norm(x, width)
        part = "kept_ffn"
        x = x + gelu(normed @ weights["W_up"].mT) @ weights["W_down"].mT
        part = "kept_loss"
        loss = mse_loss(x.float(), target)
    loss.backward()
    gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
    moments = [torch.zeros_like(weight, requires_grad=False) for weight in weights.values() for _ in range(2)]
    numbers = sum(weight.numel() for weight in weights.values())
    metrics = {
        "kept_activation_bytes": sum(kept.values()),
        "kept_cast_weight_bytes": kept["kept_cast_weights"],
        "state_bytes_per_weight": sum(t.nbytes for t in (*weights.values(), *gradients, *moments)) / numbers,
        "residual_bits": 8 * x.element_size(),
        "weight_bits": 8 * weights["W_o"].element_size(),
        "weight_gradient_bits": 8 * gradients[0].element_size(),
        "qk_bits": 8 * qk.element_size(),
        "softmax_bits": 8 * rows.element_size(),
        "loss_bits": 8 * loss.element_size(),
    }
    return metrics, kept


def _comes_from_a_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a weight that was only cast and turned: its graph leads to a leaf without a branch."""
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is not None and node.name().endswith("AccumulateGrad")
