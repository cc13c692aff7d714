r"""Products of two features, learned: by attention alone, with a feed-forward network behind it, and with a gate.

``n_products`` pairs of random signs a, b come in; output i has to be the sign of a_i · b_i, XOR of two bits. No linear
map does that: a threshold on a function of a plus one of b gets three of its four cases right at most.

``one_token``   both stand in one token, the only one:        x = (a E_a + b E_b + p_reader)
``two_tokens``  a third token reads them, always the same:    x = (a E_a + p_a,  b E_b + p_b,  p_reader)

Then x += attention(x), and the last token's class logits are W_out x. Variants put one thing more in between and have,
but for the first, equally many parameters:

``one_attention_layer``   nothing
``more_attention``    further attention layers over all tokens, in place of the network
``linear_ffn``        W_down W_up x, added to x: the matrices without the function between them
``gelu_ffn``          W_down gelu(W_up x)
``swiglu_ffn``        W_down (silu(W_gate x) ∘ W_up x), of two thirds of the hidden width

There are no norms, so softmax and the units' function are the only steps that are not linear. Over one token softmax
gives the weight 1, and attention is a matrix. Over several a query that has read a gets logits that are products with
b, so further layers do learn products.

Matrices are drawn with variance 1/fan-in, those that write into x with standard deviations halved. All variants of a
seed begin with the same first layer and see the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention_logits, context, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.training import DRAW_STEPS, Adam, stream

if TYPE_CHECKING:
    import torch

TRAINS = True


@dataclass(frozen=True)
class Params(BaseParams):
    features_in: str = choice("one_token", "two_tokens")
    n_products: int = number(8, low=1, high=32)
    ffn_params_in_layers: int = number(2, low=1, high=4)
    n_heads: int = number(4, low=1, high=12)
    learning_rate: float = number(0.003, low=0.0001, high=0.1)
    steps: int = number(400, low=10, high=4000, step=10)
    n_seeds: int = number(1, low=1, high=8)

    def rules(self) -> Iterator[Problem]:
        if WIDTH % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": WIDTH})

    def unread(self) -> frozenset[str]:
        # over one token every head has the weight 1, and heads side by side are one matrix however they are cut
        return frozenset({"n_heads"} if self.features_in == "one_token" else ())


WIDTH = 48  # of the model: 4/3 of it, and 2/3 of its multiples, are whole numbers
N_SEQUENCES = 32  # of a batch
N_EVALUATION = 512  # sequences: with 16 products the standard error of the share that is right is at most 0.006
N_RECORDS = 20  # points of a curve after the one at step 0
VARIANTS = ("one_attention_layer", "more_attention", "linear_ffn", "gelu_ffn", "swiglu_ffn")

METRICS = (
    *(Metric(f"accuracy_mean_{variant}") for variant in VARIANTS),
    *(Metric(f"accuracy_{suffix}_{variant}") for variant in VARIANTS for suffix in ("min", "max")),
    *(Metric(f"n_parameters_{variant}") for variant in VARIANTS),
)
PLOTS = (
    Plot("accuracy", "curves", "step", "accuracy_mean", by="variant", low="accuracy_low", high="accuracy_high"),
    Plot("loss", "curves", "step", "loss_mean", by="variant", low="loss_low", high="loss_high", y_unit="nats"),
)
BUDGET_S = 10.0

_Weights = dict[str, "torch.Tensor"]


class _Signs(NamedTuple):
    """±1. Shapes: a, b (model, batch, n_products)."""

    a: torch.Tensor
    b: torch.Tensor


def memory_bytes(params: Params) -> int:
    """_Weights with gradients and moments of all variants, one variant's activations, the batches drawn at once."""
    layers = params.ffn_params_in_layers + 1
    weights = len(VARIANTS) * (4 * layers * WIDTH + 3 * params.n_products + 3) * WIDTH
    activations = N_EVALUATION * (30 * WIDTH + 27 * params.n_heads + 6 * WIDTH * layers)
    drawn = 4 * (DRAW_STEPS * N_SEQUENCES + N_EVALUATION) * params.n_products
    return 8 * params.n_seeds * (5 * weights + activations + drawn)


def run(params: Params, run: Run) -> Result:
    """Train the variants on the same batches, and measure all of them 20 times on the way, on fixed sequences.

    ``accuracy``: share of the outputs with the right sign; guessing gives one half. ``low`` and ``high`` are the
    lowest and highest seed. ``n_parameters_*`` are counted from the tensors of one model.
    """
    first_seed = run.generator.initial_seed()
    seeds = [first_seed + i for i in range(params.n_seeds)]
    variants = _draw_variants(params, run, seeds)
    optimizers = {name: Adam(list(weights.values()), params.learning_rate) for name, weights in variants.items()}
    dtype = next(iter(variants["gelu_ffn"].values())).dtype
    batches = _batches(params, run, seeds, dtype)
    evaluation = _for_models(run, dtype, [_draw(params, stream(seed, "evaluation"), N_EVALUATION) for seed in seeds])
    due = {round(i * params.steps / N_RECORDS) for i in range(N_RECORDS + 1)}
    records: dict[int, dict[str, _Record]] = {}
    latest: Result | None = None
    sizes = {name: sum(w[0].numel() for w in weights.values()) for name, weights in variants.items()}
    for step in range(params.steps + 1):
        run.progress(step / (params.steps + 1), latest)
        if step in due:
            records[step] = {name: _measure(params, name, w, evaluation) for name, w in variants.items()}
            latest = _result(records, sizes, step / params.steps)
        if step < params.steps:
            batch = next(batches)
            for name, weights in variants.items():
                for weight in weights.values():
                    weight.grad = None
                _losses(_forward(params, name, weights, batch), batch).sum().backward()
                optimizers[name].step()
    assert latest is not None
    return latest


# --------------------------------------------------------------------------------------------------------------------
# What is drawn


def _shapes(params: Params, variant: str) -> dict[str, tuple[int, int]]:
    """Name and (out, in) of each matrix; ``0.W_q`` is of the first attention layer."""
    attention = dict.fromkeys(("W_q", "W_k", "W_v", "W_o"), (WIDTH, WIDTH))
    n_layers = 1 + (params.ffn_params_in_layers if variant == "more_attention" else 0)
    named = {f"{layer}.{name}": shape for layer in range(n_layers) for name, shape in attention.items()}
    hidden = 2 * WIDTH * params.ffn_params_in_layers  # two matrices of this width are as many numbers as four squares
    if variant in ("linear_ffn", "gelu_ffn"):
        named |= {"W_up": (hidden, WIDTH), "W_down": (WIDTH, hidden)}
    elif variant == "swiglu_ffn":
        gated = 2 * hidden // 3
        named |= {"W_up": (gated, WIDTH), "W_gate": (gated, WIDTH), "W_down": (WIDTH, gated)}
    return named


def _draw_variants(params: Params, run: Run, seeds: list[int]) -> dict[str, _Weights]:
    """The weights of the variants at step 0, those of all seeds side by side. Shapes: (model, out, in)."""
    import torch

    dtype = torch.float64 if run.dtype == torch.float64 else torch.float32  # lower ones would round the updates away
    drawn: dict[str, list[_Weights]] = {name: [] for name in VARIANTS}
    for seed in seeds:
        generator = stream(seed, "init")
        n = params.n_products
        shared = {"E_a": (WIDTH, n), "E_b": (WIDTH, n), "p": (3, WIDTH), "W_out": (n, WIDTH)}
        shared |= _shapes(params, "one_attention_layer")
        common = {name: _matrix(name, shape, generator) for name, shape in shared.items()}
        for variant in VARIANTS:
            own = _shapes(params, variant)
            drawn[variant].append(
                common | {name: _matrix(name, own[name], generator) for name in own if name not in common}
            )
    variants = {
        variant: {name: torch.stack([w[name] for w in weights]).to(run.device, dtype) for name in weights[0]}
        for variant, weights in drawn.items()
    }
    for weights in variants.values():
        for weight in weights.values():
            weight.requires_grad_()
    return variants


def _matrix(name: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    import torch

    std = 1.0 if name == "p" else shape[1] ** -0.5
    if name.endswith(("W_o", "W_down")):
        std /= 2
    return std * torch.randn(shape, generator=generator)


def _draw(params: Params, generator: torch.Generator, *shape: int) -> _Signs:
    import torch

    signs = 2.0 * torch.randint(2, (2, *shape, params.n_products), generator=generator) - 1
    return _Signs(signs[0], signs[1])


def _for_models(run: Run, dtype: torch.dtype, drawn: list[_Signs]) -> _Signs:
    import torch

    return _Signs(*(torch.stack(parts).to(run.device, dtype) for parts in zip(*drawn, strict=True)))


def _batches(params: Params, run: Run, seeds: list[int], dtype: torch.dtype) -> Iterator[_Signs]:
    """One batch for each seed, step after step."""
    streams = [stream(seed, "train") for seed in seeds]
    while True:
        block = _for_models(run, dtype, [_draw(params, g, DRAW_STEPS, N_SEQUENCES) for g in streams])
        for step in range(DRAW_STEPS):
            yield _Signs(block.a[:, step], block.b[:, step])


# --------------------------------------------------------------------------------------------------------------------
# The model


def _forward(params: Params, variant: str, weights: _Weights, signs: _Signs) -> torch.Tensor:
    """The reader's logits. Shapes: (model, batch, n_products)."""
    import torch

    p = weights["p"][:, :, None]  # (model, 3, 1, d_model)
    a, b = signs.a @ weights["E_a"].mT, signs.b @ weights["E_b"].mT
    if params.features_in == "one_token":
        x = (a + b + p[:, 2])[:, :, None]  # (model, batch, 1, d_model)
    else:
        x = torch.stack((a + p[:, 0], b + p[:, 1], p[:, 2].expand_as(a)), dim=2)  # (model, batch, 3, d_model)
    n_layers = sum(name.endswith("W_q") for name in weights)
    for layer in range(n_layers):
        x = x + _attend(params.n_heads, weights, layer, x)
    reader = x[:, :, -1]
    return (reader + _network(variant, weights, reader)) @ weights["W_out"].mT


def _attend(n_heads: int, weights: _Weights, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Shapes: x and what is returned (model, batch, n_tokens, d_model)."""
    tokens = x.flatten(1, 2)  # one product a model, not one a sequence

    def heads(name: str) -> torch.Tensor:  # (model, batch, n_heads, n_tokens, d_k)
        made = tokens @ weights[f"{layer}.{name}"].mT
        return made.unflatten(1, x.shape[1:3]).unflatten(-1, (n_heads, -1)).transpose(2, 3)

    mixed = context(softmax(attention_logits(heads("W_q"), heads("W_k"))), heads("W_v"))
    out = mixed.transpose(2, 3).flatten(3).flatten(1, 2) @ weights[f"{layer}.W_o"].mT
    return out.view(x.shape)


def _network(variant: str, weights: _Weights, x: torch.Tensor) -> torch.Tensor:
    import torch
    from torch.nn.functional import gelu, silu

    if "W_up" not in weights:
        return torch.zeros_like(x)
    hidden = x @ weights["W_up"].mT
    if variant == "gelu_ffn":
        hidden = gelu(hidden)
    elif variant == "swiglu_ffn":
        hidden = silu(x @ weights["W_gate"].mT) * hidden
    return hidden @ weights["W_down"].mT


def _losses(class_logits: torch.Tensor, signs: _Signs) -> torch.Tensor:
    """Mean logistic loss of each model, in nats. Shapes: (model,)."""
    from torch.nn.functional import softplus

    return softplus(-signs.a * signs.b * class_logits).mean(dim=(1, 2))


# --------------------------------------------------------------------------------------------------------------------
# What is measured


class _Record(NamedTuple):
    """One variant at one step. Shapes: (model,) each."""

    accuracy: np.ndarray
    loss: np.ndarray


def _measure(params: Params, variant: str, weights: _Weights, signs: _Signs) -> _Record:
    import torch

    with torch.no_grad():
        class_logits = _forward(params, variant, weights, signs)
        accuracy = (class_logits * signs.a * signs.b > 0).to(class_logits.dtype).mean(dim=(1, 2))
        loss = _losses(class_logits, signs)
    return _Record(*(values.cpu().double().numpy() for values in (accuracy, loss)))


def _result(records: dict[int, dict[str, _Record]], sizes: dict[str, int], done: float) -> Result:
    """Metrics and curves of what is recorded so far."""
    steps, last = list(records), list(records.values())[-1]
    metrics = {}
    for variant in VARIANTS:
        accuracy = last[variant].accuracy
        metrics[f"accuracy_mean_{variant}"] = accuracy.mean()
        metrics[f"accuracy_min_{variant}"], metrics[f"accuracy_max_{variant}"] = accuracy.min(), accuracy.max()
        metrics[f"n_parameters_{variant}"] = sizes[variant]
    curves: Table = {"step": np.repeat(steps, len(VARIANTS)), "variant": np.tile(VARIANTS, len(steps))}
    for name in ("accuracy", "loss"):
        of_seeds = np.array([getattr(record[v], name) for record in records.values() for v in VARIANTS])
        curves[f"{name}_mean"] = of_seeds.mean(axis=1)
        curves[f"{name}_low"], curves[f"{name}_high"] = of_seeds.min(axis=1), of_seeds.max(axis=1)
    return Result({metric.name: float(metrics[metric.name]) for metric in METRICS}, {"curves": curves}, done)
