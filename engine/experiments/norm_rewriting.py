r"""A trained Pre-LN model rewritten as a Pre-RMSNorm one, and its gains folded away: what is exact, what is nearly so.

LayerNorm subtracts a token's mean, :math:`x-\mathrm{mean}(x)\mathbf 1=Cx`, where C is
:math:`I-\frac1d\mathbf 1\mathbf 1^\top`, and RMSNorm of Cx is LayerNorm of x. In a Pre-LN model the stream x is a sum
of what the table and the matrices W_o and W_down wrote, and it is read through norms only. So C can be applied to what
writes, once and for all:

.. math:: CE,\quad CW_o,\quad CW_{down}\ \Rightarrow\ \text{every stream is } Cx\ \Rightarrow\ \mathrm{RMS}=\mathrm{LN}

A gain stands before a matrix and goes into its columns: :math:`W(g\odot\hat x)=(W\,\mathrm{diag}\,g)\hat x`. The last
one needs a table of its own for the unembedding, for the tied one also writes.

The model is that of engine/language_model.py: LayerNorm with a gain and no bias, no biases in what writes. With
``uniform_added`` that multiple of the vector of ones is added to the table: a LayerNorm model can't see it.

Sources: jiang2023b, abstract (the equivalence); slicegpt-code, ``layernorm_fusion.py`` (both steps); gupta2024,
abstract (the mean of trained streams); graef2024, abstract (folding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, number
from engine.inputs import draw_texts
from engine.language_model import (
    D_FF,
    D_MODEL,
    N_HEADS,
    N_LAYERS,
    Weights,
    draw_weights,
    forward_fast,
    load_weights,
    shapes,
    token_losses,
)
from engine.norms import norm_statistics, normalize

if TYPE_CHECKING:
    import torch

SHOWN = ("layer_norm_kept", "rms_exchanged", "centred_and_rms", "centred_folded_and_rms", "gains_left_out")
REWRITINGS = (*SHOWN, "centred_all_but_table", "gains_folded", "folded_into_tied_table")
N_NORMS = 2 * N_LAYERS + 1


@dataclass(frozen=True)
class Params(BaseParams):
    norm_rewriting: str = choice("centred_and_rms", *(name for name in REWRITINGS if name != "centred_and_rms"))
    uniform_added: float = number(1.0, low=0, high=8, step=0.25)
    weights_taken: str = choice("after_training", "before_training")
    source: str = choice("stories", "repeats")
    n_texts: int = number(2, low=1, high=16, log2=True)
    seq_len: int = number(16, low=8, high=128, log2=True)


METRICS = (
    Metric("rewritten_logits_change"),
    Metric("rewriting_loss_added_nats", "nats"),
    Metric("uniform_share_times_d"),
    Metric("first_uniform_share_times_d"),
    Metric("last_uniform_share_times_d"),
    Metric("rewritten_loss_nats", "nats"),
    Metric("kept_loss_nats", "nats"),
    Metric("gain_numbers"),
)
PLOTS = (
    Plot("losses", table="losses", x="norm_rewriting", y="rewritten_loss_nats", mark="bar"),
    Plot("changes", table="losses", x="norm_rewriting", y="rewritten_logits_change", mark="point", y_scale="log10"),
    Plot("uniform", table="uniform", x="norm_number", y="uniform_share_times_d", by="stream_of", mark="point"),
)
BUDGET_S = 0.2

CHANGE_FLOOR = 1e-9  # of the chart: no change at all has no logarithm
TOKENS_AT_ONCE = 512


def memory_bytes(params: Params) -> int:
    """One pass over some of the texts, the logits of all under two forms, and some copies of the model."""
    tokens = params.n_texts * params.seq_len
    model = sum(math.prod(shape) for shape in shapes().values())
    one_pass = 16 * D_MODEL + 3 * D_FF + 4 * N_HEADS * params.seq_len
    return 4 * (min(tokens, TOKENS_AT_ONCE + params.seq_len) * one_pass + 6 * model + 8 * tokens * N_NORMS * D_MODEL)


def run(params: Params, run: Run) -> Result:
    """Read texts with the model as it is and in rewritten forms, the chosen one among them.

    ``rewritten_logits_change``: root mean square of the change of the token logits over that of the logits.
    ``uniform_share_times_d``: share of a stream's squared length that lies along the vector of ones, times d_model, so
    that a vector of random direction has 1; mean over the tokens and the norms of the model before it is rewritten,
    ``first_...`` and ``last_...`` for the norm of the first layer's attention and the last one. ``gain_numbers``:
    learned numbers that its norms still have after the rewriting.

    Shapes: tokens (n_texts, seq_len).
    """
    model = _model(params, run)
    tokens = draw_texts(run, params.source, params.n_texts, params.seq_len).tokens
    kept = _read(model, tokens, "layer_norm", run)
    rows: dict[str, list[float]] = {"rewritten_logits_change": [], "rewritten_loss_nats": []}
    after, numbers = kept[1], 0
    compared = SHOWN if params.norm_rewriting in SHOWN else (*SHOWN, params.norm_rewriting)
    for done, name in enumerate(compared):
        run.progress((1 + done) / (1 + len(compared)))
        form, kind = _rewritten(model, name)
        logits, stream = kept if name == "layer_norm_kept" else _read(form, tokens, kind, run)
        change = (logits - kept[0]).square().mean().sqrt() / kept[0].square().mean().sqrt()
        rows["rewritten_logits_change"].append(change.item())
        rows["rewritten_loss_nats"].append(token_losses(logits, tokens.cpu()).mean().item())
        if name == params.norm_rewriting:
            after = stream
            numbers = sum(gain.numel() for key, gain in form.items() if "norm" in key and bool((gain != 1).any()))
    chosen = compared.index(params.norm_rewriting)
    kept_loss = token_losses(kept[0], tokens.cpu()).mean().item()
    before = _uniform_shares(kept[1])
    metrics = {
        "rewritten_logits_change": rows["rewritten_logits_change"][chosen],
        "rewriting_loss_added_nats": rows["rewritten_loss_nats"][chosen] - kept_loss,
        "uniform_share_times_d": before.mean(),
        "first_uniform_share_times_d": before[0],
        "last_uniform_share_times_d": before[-1],
        "rewritten_loss_nats": rows["rewritten_loss_nats"][chosen],
        "kept_loss_nats": kept_loss,
        "gain_numbers": float(numbers),
    }
    losses: Table = {"norm_rewriting": np.array(compared)}
    losses["rewritten_loss_nats"] = np.array(rows["rewritten_loss_nats"])
    losses["rewritten_logits_change"] = np.maximum(np.array(rows["rewritten_logits_change"]), CHANGE_FLOOR)
    uniform: Table = {
        "norm_number": np.tile(np.arange(1, N_NORMS + 1), 2),
        "uniform_share_times_d": np.concatenate([before, _uniform_shares(after)]),
        "stream_of": np.repeat(["model_as_it_is", "model_rewritten"], N_NORMS),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"losses": losses, "uniform": uniform})


def _model(params: Params, run: Run) -> dict[str, torch.Tensor]:
    """The weights with a table for reading tokens and another for the logits."""
    if params.weights_taken == "after_training":
        weights: Weights = load_weights(run.device, run.dtype)
    else:
        drawn = draw_weights(run.generator)
        weights = {name: weight.to(run.device, run.dtype) for name, weight in drawn.items()}
    model = dict(weights)
    model["unembedding"] = weights["embedding"]
    model["embedding"] = weights["embedding"] + params.uniform_added
    return model


def _centred(weight: torch.Tensor, dim: int) -> torch.Tensor:
    return weight - weight.mean(dim=dim, keepdim=True)


def _rewritten(model: dict[str, torch.Tensor], name: str) -> tuple[dict[str, torch.Tensor], str]:
    """The weights in another form, and the norm that goes with them."""
    import torch

    form, kind = dict(model), "rms_norm" if name.startswith(("rms", "centred")) else "layer_norm"
    if name.startswith("centred"):
        for layer in range(N_LAYERS):
            for writer in ("W_o", "W_down"):  # rows are the features that they write
                form[f"{layer}.{writer}"] = _centred(model[f"{layer}.{writer}"], 0)
        if name != "centred_all_but_table":
            form["embedding"] = _centred(model["embedding"], 1)
    if "folded" in name:
        readers: dict[str, tuple[str, ...]] = {"norm": ("unembedding",)}
        for layer in range(N_LAYERS):
            readers[f"{layer}.norm_1"] = tuple(f"{layer}.{matrix}" for matrix in ("W_q", "W_k", "W_v"))
            readers[f"{layer}.norm_2"] = (f"{layer}.W_up",)
        for gain, matrices in readers.items():
            for matrix in matrices:
                form[matrix] = form[matrix] * model[gain]  # columns are the features that they read
    if name == "folded_into_tied_table":
        form["embedding"] = form["embedding"] * model["norm"]
    if "folded" in name or name == "gains_left_out":
        form |= {key: torch.ones_like(gain) for key, gain in model.items() if "norm" in key}
    return form, kind


def _read(
    form: dict[str, torch.Tensor], tokens: torch.Tensor, kind: str, run: Run
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Token logits and the stream before each norm, in float64 on the CPU."""
    import torch

    logits, streams = [], []
    for chunk in tokens.split(max(1, TOKENS_AT_ONCE // tokens.shape[1])):
        stream: list[torch.Tensor] = []

        def norm(x: torch.Tensor, gain: torch.Tensor, stream: list[torch.Tensor] = stream) -> torch.Tensor:
            stream.append(x.cpu().double())
            return normalize(x, norm_statistics(x, kind)) * gain

        logits.append(forward_fast(form, chunk, norm=norm).cpu().double())
        streams.append(stream)
        run.check_stop()
    return torch.cat(logits), [torch.cat(of_norm) for of_norm in zip(*streams, strict=True)]


def _uniform_shares(streams: list[torch.Tensor]) -> np.ndarray:
    """Share of the squared length along the vector of ones, times d_model; means over tokens. Shapes: (norm,)."""
    return np.array([(x.mean(-1).square() / x.square().mean(-1)).mean().item() * D_MODEL for x in streams])
