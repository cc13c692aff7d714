r"""The gradients of a trained language model in 16 bits: what float16 is too short for, and what a loss scale does.

The loss is a mean over tokens, so every gradient inside the model is divided by their number: ``averaged_tokens``, of
which the drawn texts are a sample. Where activations are float16, so are their gradients, and what is below half of its
smallest number is lost on the way, whatever the optimizer does later. The loss times S makes all of them S times as
large (the backward pass is linear), and the gradients of the weights are divided by S in float32. Too large an S makes
some of them infinite.

Weights and activations are stored in ``low_dtype``, as in a model that was cast; the loss, from the token logits on, is
float32. The reference computes in float32, with the same texts and with the weights as they are in the format: what is
measured is the error of the passes, not of the weights.

Source: pytorch-amp, section "Gradient Scaling".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine import inputs, language_model
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.language_model import FILES as FILES  # a run reads the model's weights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    low_dtype: str = choice("float16", "bfloat16", "float32")
    loss_scale_log2: int = number(0, low=0, high=40)
    averaged_tokens: int = number(4096, low=64, high=2**24, log2=True)
    source: str = choice("stories", "repeats")
    n_texts: int = number(1, low=1, high=8, log2=True)
    seq_len: int = number(32, low=8, high=128, log2=True)

    def rules(self) -> Iterator[Problem]:
        if (tokens := self.n_texts * self.seq_len) > MOST_TOKENS:
            values = {"tokens": tokens, "limit": MOST_TOKENS}
            yield Problem("rule", "seq_len", self.seq_len, rule="too_many_tokens_backward", values=values)


METRICS = (
    Metric("gradients_lost_share"),
    Metric("gradient_error_low"),
    Metric("gradients_not_finite_share"),
    Metric("weight_gradient_rms"),
    Metric("logit_gradients_lost_share"),
    Metric("token_gradients_lost_share"),
    Metric("largest_gradient"),
)
PLOTS = (
    Plot("histogram", table="histogram", x="gradient_size", y="gradient_share", by="gradient_of", x_scale="log10"),
    Plot("by_scale", table="by_scale", x="loss_scale", y="outside_share", by="lost_or_infinite", x_scale="log10"),
)
BUDGET_S = 0.02
MOST_TOKENS = 512  # 0.7 s backward where bfloat16 is multiplied without instructions

ACTIVATIONS = ("token_logits", "attention_logits", "attention_values")
LOSS_SCALES = range(0, 41, 4)
EXPONENTS = range(-48, 5)  # of the histogram; what is smaller counts in the first, what is larger in the last


def memory_bytes(params: Params) -> int:
    """Weights with gradients in two formats, and two passes with all that they keep."""
    tokens = params.n_texts * params.seq_len
    a_pass = (
        language_model.N_LAYERS
        * tokens
        * (20 * language_model.D_MODEL + 4 * language_model.D_FF + 8 * language_model.N_HEADS * params.seq_len)
    )
    return 4 * (6 * 620_000 + 3 * a_pass)


def run(params: Params, run: Run) -> Result:
    """One pass forward and back in float32, and one in the format, with the loss scale.

    Over all weights: ``gradients_lost_share`` of those not 0 in float32 that are 0 in the format;
    ``gradient_error_low``, the length of the difference over the length of the gradient, where not-finite numbers count
    as 0; ``gradients_not_finite_share``. ``logit_gradients_lost_share`` and ``token_gradients_lost_share``: the same
    for the gradients at the attention logits and the token logits, all divided by S. ``largest_gradient``: the largest
    of any activation that is looked at, times S.

    Shapes: tokens (n_texts, seq_len).
    """
    import torch

    texts = inputs.draw_texts(run, params.source, params.n_texts, params.seq_len)
    dtype = getattr(torch, params.low_dtype)
    stored = {name: weight.to(dtype) for name, weight in language_model.load_weights(run.device, torch.float32).items()}
    low = _backward(params, stored, texts.tokens, params.loss_scale_log2)
    run.progress(0.4)
    exact = _backward(params, {name: weight.float() for name, weight in stored.items()}, texts.tokens, 0)
    run.progress(0.9)
    wanted, got = exact["weights"], low["weights"]
    finite = got.abs() < math.inf  # not of NaN either
    difference = (torch.where(finite, got, 0) - wanted).norm() / wanted.norm()
    metrics = {
        "gradients_lost_share": _lost(wanted, got),
        "gradient_error_low": difference.item(),
        "gradients_not_finite_share": 1 - finite.float().mean().item(),
        "weight_gradient_rms": wanted.square().mean().sqrt().item(),
        "logit_gradients_lost_share": _lost(exact["attention_logits"], low["attention_logits"]),
        "token_gradients_lost_share": _lost(exact["token_logits"], low["token_logits"]),
        "largest_gradient": max(exact[name].abs().max().item() for name in ACTIVATIONS) * 2.0**params.loss_scale_log2,
    }
    return Result(metrics, {"histogram": _histogram(exact), "by_scale": _by_scale(params, exact)})


def _backward(
    params: Params, stored: dict[str, torch.Tensor], tokens: torch.Tensor, loss_scale_log2: int
) -> dict[str, torch.Tensor]:
    """Gradients of all weights, and at three places on the way, divided by the loss scale; one vector each, float32.

    The gradients at the attention's logits are those of the pairs that the mask lets through: the others have none.
    """
    import torch

    weights = {name: weight.detach().requires_grad_() for name, weight in stored.items()}
    trace = language_model.Trace()
    token_logits = language_model.forward(weights, tokens, trace=trace)
    loss = language_model.token_losses(token_logits.float(), tokens).sum() / params.averaged_tokens
    places = [*weights.values(), token_logits, *trace.logits, *trace.v]
    gradients = torch.autograd.grad(loss * 2.0**loss_scale_log2, places)
    found = [g.cpu().float() * 2.0**-loss_scale_log2 for g in gradients]
    n, layers = len(weights), language_model.N_LAYERS
    seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    return {
        "weights": torch.cat([g.flatten() for g in found[:n]]),
        "token_logits": found[n].flatten(),
        "attention_logits": torch.cat([g[..., seen].flatten() for g in found[n + 1 : n + 1 + layers]]),
        "attention_values": torch.cat([g.flatten() for g in found[n + 1 + layers :]]),
    }


def _lost(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Share of the numbers that are 0 in ``got`` among those that are not in ``wanted``."""
    there = wanted.count_nonzero().item()
    return float((wanted * (got == 0)).count_nonzero().item() / max(1, there))


def _histogram(exact: dict[str, torch.Tensor]) -> Table:
    """Share of the gradients in each power of two, at each place, without the loss scale; what is 0 is left out."""
    columns: dict[str, list[np.ndarray]] = {"gradient_size": [], "gradient_of": [], "gradient_share": []}
    for name in ACTIVATIONS:
        values = exact[name].abs().numpy()
        values = values[values > 0]
        exponents = np.clip(np.frexp(values)[1] - 1, EXPONENTS[0], EXPONENTS[-1])
        shares = np.bincount(exponents - EXPONENTS[0], minlength=len(EXPONENTS)) / max(1, len(values))
        columns["gradient_size"].append(2.0 ** np.array(EXPONENTS))
        columns["gradient_of"].append(np.full(len(EXPONENTS), name))
        columns["gradient_share"].append(shares)
    return {name: np.concatenate(parts) for name, parts in columns.items()}


def _by_scale(params: Params, exact: dict[str, torch.Tensor]) -> Table:
    """For each loss scale: the share of all activation gradients that the format would make 0, or infinite."""
    import torch

    dtype = getattr(torch, params.low_dtype)
    values = torch.cat([exact[name] for name in ACTIVATIONS]).float()
    values = values[values != 0]
    lost, infinite = [], []
    for power in LOSS_SCALES:
        stored = (values * 2.0**power).to(dtype)
        lost.append((stored == 0).cpu().double().mean().item())
        infinite.append((stored.abs() == math.inf).cpu().double().mean().item())
    return {
        "loss_scale": np.tile(2.0 ** np.array(LOSS_SCALES), 2),
        "lost_or_infinite": np.repeat(["lost_to_zero", "became_infinite"], len(LOSS_SCALES)),
        "outside_share": np.array(lost + infinite),
    }
