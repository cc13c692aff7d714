r"""What a training step keeps for each parameter: weights, gradients, a master copy, moments, counted in bytes.

A small decoder runs forward and backward on this device, and its optimizer makes one step. Weights are views of one
flat buffer, as in sharded training, so the gradient is one too; then the storage of everything that outlives the step
is added up. Bytes for a parameter do not depend on the size of the model; ``model`` says how many parameters there are.

``sharded_states`` leaves of the optimizer's states, then of the gradients too, then of the weights too, only the share
of one of ``data_parallel_gpus``. ``adapters`` trains thin matrices beside W_q and W_v and keeps all others as they are.
Activations, buffers for communication and casts that are freed again are not counted: a step needs them on top.

Sources: megatron-dist-optimizer (16 and 18 bytes a parameter, and 6 + 12/d); deepspeed-zero (the three shares);
pytorch-code, ``Adam._init_group`` (moments in the format of the weights).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, number
from engine.built_decoder import BUILT, count, modules
from engine.training import OPTIMIZERS
from engine.transformer_block import DecoderSizes, block_shapes, decoder, outer_shapes

if TYPE_CHECKING:
    import torch

PLAIN_MODELS = tuple(name for name, shape in BUILT.items() if not shape.kv_rank)  # that have a W_q and a W_v
RECIPES = ("all_float32", "master_and_float32_gradients", "master_and_bfloat16_gradients", "all_bfloat16")
SHARDED = ("nothing_sharded", "optimizer_sharded", "gradients_sharded", "weights_sharded")


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("llama_2_7b", *(name for name in PLAIN_MODELS if name != "llama_2_7b"))
    training_recipe: str = choice(*RECIPES)
    optimizer: str = choice("adam", "sgd")
    trained: str = choice("everything", "adapters")
    adapter_rank: int = number(8, low=1, high=64, log2=True)
    sharded_states: str = choice(*SHARDED)
    data_parallel_gpus: int = number(8, low=2, high=64, log2=True)

    def unread(self) -> frozenset[str]:
        unread = set() if self.trained == "adapters" else {"adapter_rank"}
        return frozenset(unread if self.sharded_states != "nothing_sharded" else unread | {"data_parallel_gpus"})

    def rules(self) -> Iterator[Problem]:
        if GPU_UNIT % self.data_parallel_gpus:
            yield Problem("rule", "data_parallel_gpus", self.data_parallel_gpus, rule="gpus_power_of_two")


METRICS = (
    Metric("state_bytes_per_parameter", "bytes"),
    Metric("model_state_bytes", "bytes"),
    Metric("state_to_weights"),
    Metric("weight_bytes_per_parameter", "bytes"),
    Metric("gradient_bytes_per_parameter", "bytes"),
    Metric("master_bytes_per_parameter", "bytes"),
    Metric("moment_bytes_per_parameter", "bytes"),
    Metric("frozen_bytes_per_parameter", "bytes"),
    Metric("trained_parameters"),
)
PLOTS = (
    Plot("recipes", table="by_recipe", x="training_recipe", y="bytes_per_parameter", by="kept_state", mark="bar"),
    Plot(
        "gpus",
        table="by_gpus",
        x="data_parallel_gpus",
        y="state_gib",
        by="sharded_states",
        x_scale="log2",
        y_scale="log2",
    ),
)
BUDGET_S = 0.1

GIB = 2**30
GPU_UNIT = 64  # every buffer below has a multiple of so many numbers
DRAWN_GPUS = (1, 8, 64)
SIZES = DecoderSizes(n_layers=1, d_model=64, n_heads=4, n_kv_heads=2, d_k=16, d_ff=64, vocabulary=64)
ADAPTED = ("W_q", "W_v")
KEPT = {"weight": "weight_kept", "gradient": "gradient_kept", "master": "master_kept", "moment": "moment_kept"}


def memory_bytes(params: Params) -> int:
    """Some thirty thousand numbers, in all formats together, several times over."""
    return 2**24


def run(params: Params, run: Run) -> Result:
    """Make a step in each recipe, and count what is kept; then set it against the number of GPUs.

    ``state_bytes_per_parameter``  of a trained parameter, on one GPU; the next ones are its parts
    ``model_state_bytes``          of the chosen model on one GPU, frozen weights included
    ``state_to_weights``           all of it, relative to the model's weights in 16 bits, adapters included, unsharded
    """
    import torch

    run.progress(0.0)
    passes = {storage: _backward(params, storage, run) for storage in ("float32", "bfloat16")}
    run.progress(0.5)
    flat, gradient, frozen = passes[_storage_format(params.training_recipe)]
    trained_numbers, frozen_numbers = _numbers(params)

    def bytes_of(sharded: str, gpus: int) -> tuple[dict[str, float], float]:
        """For each trained parameter what is kept, and for each frozen one, on one of so many GPUs."""
        kept = _kept(params, params.training_recipe, flat, gradient, sharded, gpus)
        frozen_bytes = _storage(_share(frozen, gpus).clone() if sharded == "weights_sharded" else frozen)
        return _per_number(kept, flat), frozen_bytes / max(1, frozen.numel())

    def of_model(sharded: str, gpus: int) -> float:
        trained_bytes, frozen_bytes = bytes_of(sharded, gpus)
        return trained_numbers * sum(trained_bytes.values()) + frozen_numbers * frozen_bytes

    here, frozen_bytes = bytes_of(params.sharded_states, params.data_parallel_gpus)
    state = of_model(params.sharded_states, params.data_parallel_gpus)
    in_16_bits = torch.empty(trained_numbers + frozen_numbers, dtype=torch.bfloat16, device="meta").nbytes
    metrics = {
        "state_bytes_per_parameter": sum(here.values()),
        "model_state_bytes": state,
        "state_to_weights": state / in_16_bits,
        **{f"{name}_bytes_per_parameter": value for name, value in here.items()},
        "frozen_bytes_per_parameter": frozen_bytes,
        "trained_parameters": trained_numbers,
    }
    by_recipe = {}
    for recipe in RECIPES:
        of_recipe, its_gradient, _ = passes[_storage_format(recipe)]
        kept = _kept(params, recipe, of_recipe, its_gradient, params.sharded_states, params.data_parallel_gpus)
        by_recipe[recipe] = _per_number(kept, of_recipe)
    run.progress(0.7)
    rows = [(sharded, gpus) for sharded in SHARDED for gpus in DRAWN_GPUS]
    tables = {
        "by_recipe": {
            "training_recipe": np.repeat(RECIPES, len(KEPT)),
            "kept_state": np.tile([*KEPT.values()], len(RECIPES)),
            "bytes_per_parameter": np.array([by_recipe[recipe][name] for recipe in RECIPES for name in KEPT]),
        },
        "by_gpus": {
            "data_parallel_gpus": np.array([gpus for _, gpus in rows]),
            "sharded_states": np.array([sharded for sharded, _ in rows]),
            "state_gib": np.array([of_model(sharded, gpus) / GIB for sharded, gpus in rows]),
        },
    }
    return Result({metric.name: float(metrics[metric.name]) for metric in METRICS}, tables)


def _numbers(params: Params) -> tuple[int, int]:
    """Trained and frozen parameters of the chosen model. Adapters come on top of what it has."""
    import torch

    shape = BUILT[params.model]
    total = count(shape).total
    if params.trained == "everything":
        return total, 0
    adapters = 0
    for times, module in modules(shape):
        for name, matrix in module.named_modules():
            if name.split(".")[-1] in ADAPTED:
                for width in (matrix.in_features, matrix.out_features):
                    adapters += times * torch.empty(params.adapter_rank, width, device="meta").numel()
    return adapters, total


def _storage_format(recipe: str) -> str:
    """What the weights that the model multiplies by are stored in."""
    return "float32" if recipe == "all_float32" else "bfloat16"


def _backward(params: Params, storage: str, run: Run) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The trained weights, their gradient, and the frozen weights, each as one flat buffer.

    Shapes: (numbers,); a buffer is cut into the matrices that it holds, so autograd gives its gradient as one.
    """
    import torch
    from torch.nn.functional import cross_entropy

    block = block_shapes(SIZES)
    shapes = {**outer_shapes(SIZES), **block}
    thin: dict[str, tuple[int, ...]] = {}
    if params.trained == "adapters":
        thin = {f"{name}_down": (params.adapter_rank, block[name][-1]) for name in ADAPTED}
        thin |= {f"{name}_up": (block[name][0], params.adapter_rank) for name in ADAPTED}
    trained, frozen = (thin, shapes) if thin else (shapes, {})
    flat, rest = (
        torch.linspace(-0.02, 0.02, sum(map(_size, of.values())), device=run.device).to(getattr(torch, storage))
        for of in (trained, frozen)
    )
    flat.requires_grad_()
    cut = _cut(flat, trained) | _cut(rest, frozen)
    outer = {name: cut[name] for name in outer_shapes(SIZES)}
    tokens = torch.arange(9, device=run.device)[None]  # bytes do not depend on what is learned from what
    logits = decoder(outer, [{k: v for k, v in cut.items() if k not in outer}], SIZES, tokens[:, :-1], None)
    loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    (gradient,) = torch.autograd.grad(loss, flat)
    return flat.detach(), gradient, rest


def _kept(
    params: Params, recipe: str, flat: torch.Tensor, gradient: torch.Tensor, sharded: str, gpus: int
) -> dict[str, list[torch.Tensor]]:
    """Every tensor of one GPU that outlives an optimizer step, by what it is."""
    level = SHARDED.index(sharded)
    weights = flat.clone()
    if recipe == "master_and_float32_gradients":
        gradient = gradient.float()  # accumulated there over micro-batches; the one in 16 bits is freed
    own = _share(weights, gpus) if level >= 1 else weights  # what this GPU's optimizer updates
    with_master = recipe.startswith("master")
    stepped = own.float() if with_master else own
    stepped.grad = (_share(gradient, gpus) if level >= 1 else gradient).to(stepped.dtype)
    optimizer = OPTIMIZERS[params.optimizer]([stepped], 1e-3)
    optimizer.step()
    own.copy_(stepped)
    moments = [value for name, value in vars(optimizer).items() if name in ("first", "second", "velocity")]
    return {
        "weight": [_share(weights, gpus).clone() if level >= 3 else weights],
        "gradient": [_share(gradient, gpus).clone() if level >= 2 else gradient],
        "master": [stepped] if with_master else [],
        "moment": [tensor for of_kind in moments for tensor in of_kind],
    }


def _share(flat: torch.Tensor, gpus: int) -> torch.Tensor:
    """What the first of so many GPUs holds of a buffer. Shapes: (numbers,) to (numbers / gpus,)."""
    return flat[: len(flat) // gpus]


def _per_number(kept: dict[str, list[torch.Tensor]], flat: torch.Tensor) -> dict[str, float]:
    return {name: sum(map(_storage, tensors)) / flat.numel() for name, tensors in kept.items()}


def _storage(tensor: torch.Tensor) -> int:
    """Bytes that a tensor keeps alive. A share that is a view would keep the whole buffer."""
    return int(tensor.untyped_storage().nbytes())


def _cut(flat: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A buffer as the matrices that it holds, without a copy."""
    pieces = flat.split([_size(shape) for shape in shapes.values()]) if shapes else ()
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
