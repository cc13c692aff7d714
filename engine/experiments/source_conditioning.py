r"""Two ways to let a text read a source: in front of it in self-attention, or by gated cross-attention.

Prefix: source and text share the matrices of self-attention and one softmax. With the sums
:math:`Z_{\text{text}}` and :math:`Z_{\text{src}}` of the exponentiated logits of each part,

.. math:: \mathrm{joint} = \lambda\,\mathrm{self} + (1-\lambda)\,\mathrm{cross},\quad
   \lambda = \frac{Z_{\text{text}}}{Z_{\text{text}} + Z_{\text{src}}}

a mixture of attention to the text and attention to the source with the same queries, keys and values, whose share
:math:`\lambda` the logits decide. ``mixture_rule`` tries others: half of each, or their sum.

Cross-attention has matrices and a softmax of its own and is added to the text behind self-attention, times a gate:

.. math:: y = h + \tanh(g)\,W_o\,\mathrm{cross}(\mathrm{LN}\,h, S),\quad h = x + \mathrm{self}(\mathrm{LN}\,x)

At :math:`g = 0` it changes nothing, and its matrices get no gradient while the gate does:
:math:`\partial L/\partial W_o\propto\tanh g`. With :math:`W_o = 0` as well, neither gets any.

Everything is drawn as before training: tokens N(0, 1), matrices N(0, 1/fan_in). The gradients are those of the mean of
the outputs times fixed random numbers. The text is causal and sees the whole source.

Sources: open-flamingo-code and mllama-code (the gate, 0 at the start).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention import attention, attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.masks import keep_causal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Params(BaseParams):
    text_len: int = number(16, low=1, high=256, log2=True)
    source_len: int = number(64, low=1, high=1024, log2=True)
    cross_gate: float = number(0.0, low=0, high=2, step=0.1)
    zero_cross_out: bool = flag(False)
    mixture_rule: str = choice("normalizers", "half_each", "plain_sum")
    d_model: int = number(32, low=8, high=256, log2=True)
    n_heads: int = number(4, low=1, high=8, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": self.d_model})


METRICS = (
    Metric("text_weight_share"),
    Metric("prefix_effect"),
    Metric("gated_effect"),
    Metric("gate_gradient"),
    Metric("cross_matrix_gradient"),
    Metric("mixture_error"),
)
PLOTS = (
    Plot("shares", table="shares", x="source_len", y="text_weight_share", by="conditioning", x_scale="log2"),
    Plot("effects", table="effects", x="cross_gate", y="source_effect", by="conditioning"),
    Plot("gradients", table="gradients", x="cross_gate", y="gradient_norm", by="gradient_to"),
)
BUDGET_S = 0.04

GATES = tuple(step / 4 for step in range(9))  # 0 to 2


def memory_bytes(params: Params) -> int:
    """The matrices and their gradients; logits of all queries with source and text, with the steps of a softmax."""
    matrices = 20 * params.d_model**2
    logits = 10 * params.n_heads * params.text_len * (params.text_len + params.source_len)
    activations = 24 * (params.text_len + params.source_len) * params.d_model
    return 4 * (matrices + logits + activations) + 2**19


def run(params: Params, run: Run) -> Result:
    """What the source does to the outputs in either way, and who learns at this gate.

    ``text_weight_share``: the weight that the last text token, which sees the whole text, keeps for the text when the
    source stands in front; mean of the heads.

    Shapes: text (text_len, d_model), source (source_len, d_model).
    """
    import torch

    text, source, probe = (run.randn(n, params.d_model) for n in (params.text_len, params.source_len, params.text_len))
    own, other = _draw_matrices(params, run), _draw_matrices(params, run)
    if params.zero_cross_out:
        other = other._replace(W_o=torch.zeros_like(other.W_o))
    run.progress(0.1)

    normed = _norm(text)
    plain = text + _attend(params, own, normed, normed, keep_causal(params.text_len, device=text.device))
    unit = plain.square().mean().sqrt()
    weights, joint, mixed = _prefix(params, own, normed, source)
    with_prefix = text + _join(joint) @ own.W_o
    run.progress(0.3)
    read = _attend(params, other, _norm(plain), source, None)

    def gated(gate: float) -> torch.Tensor:
        return plain + math.tanh(gate) * read

    prefix_effect = _apart(with_prefix, plain, unit)
    effects = [(gate, _apart(gated(gate), plain, unit)) for gate in GATES]
    run.progress(0.5)
    gradients = []
    for gate in (*GATES, params.cross_gate):
        gradients.append((gate, *_gradients(params, other, plain, source, probe, gate)))
        run.progress(0.5 + 0.3 * len(gradients) / (len(GATES) + 1))
    shares = []
    lengths = sorted({*(2**n for n in range(params.source_len.bit_length())), params.source_len})
    for done, length in enumerate(lengths):
        seen, _, _ = _prefix(params, own, normed, source[:length])
        shares.append((length, float(seen[:, -1, length:].sum(-1).mean())))
        run.progress(0.8 + 0.2 * done / len(lengths))
    alone = softmax(_text_logits(params, own, normed))[:, -1].sum(-1).mean()

    *_, gate_gradient, matrix_gradient = gradients.pop()
    metrics = {
        "text_weight_share": float(weights[:, -1, params.source_len :].sum(-1).mean()),
        "prefix_effect": prefix_effect,
        "gated_effect": _apart(gated(params.cross_gate), plain, unit),
        "gate_gradient": gate_gradient,
        "cross_matrix_gradient": matrix_gradient,
        "mixture_error": _apart(mixed, joint, joint.square().mean().sqrt()),
    }
    tables = {
        "shares": _shares(shares, float(alone)),
        "effects": _effects(effects, prefix_effect),
        "gradients": _gradient_table(gradients),
    }
    return Result(metrics, tables)


class _Matrices(NamedTuple):
    W_q: torch.Tensor
    W_k: torch.Tensor
    W_v: torch.Tensor
    W_o: torch.Tensor


def _draw_matrices(params: Params, run: Run) -> _Matrices:
    width = params.d_model
    return _Matrices(*(run.randn(width, width) * width**-0.5 for _ in range(4)))


def _norm(x: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import layer_norm

    return layer_norm(x, x.shape[-1:])


def _heads(params: Params, x: torch.Tensor) -> torch.Tensor:
    """(seq_len, d_model) to (n_heads, seq_len, d_k)."""
    return x.unflatten(-1, (params.n_heads, -1)).transpose(0, 1)


def _join(x: torch.Tensor) -> torch.Tensor:
    """(n_heads, seq_len, d_k) to (seq_len, d_model)."""
    return x.transpose(0, 1).flatten(-2)


def _attend(
    params: Params, matrices: _Matrices, x: torch.Tensor, x_kv: torch.Tensor, keep: torch.Tensor | None
) -> torch.Tensor:
    """One call of multi-head attention. Shapes: x (q_len, d_model), x_kv (kv_len, d_model); returns as x."""
    q, k, v = (_heads(params, tokens @ W) for tokens, W in zip((x, x_kv, x_kv), matrices[:3], strict=True))
    return _join(attention(q, k, v, keep=keep)) @ matrices.W_o


def _text_logits(params: Params, matrices: _Matrices, normed: torch.Tensor) -> torch.Tensor:
    """Shapes: returns (n_heads, text_len, text_len), masked."""
    q, k = _heads(params, normed @ matrices.W_q), _heads(params, normed @ matrices.W_k)
    return mask_logits(attention_logits(q, k), keep_causal(normed.shape[0], device=normed.device))


def _prefix(
    params: Params, matrices: _Matrices, normed: torch.Tensor, source: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and contexts of the text behind the source, and the contexts again as a mixture of two softmaxes.

    Shapes: weights (n_heads, text_len, source_len + text_len), contexts (n_heads, text_len, d_k).
    """
    import torch

    q = _heads(params, normed @ matrices.W_q)
    k_source, v_source = (_heads(params, source @ W) for W in (matrices.W_k, matrices.W_v))
    v_text = _heads(params, normed @ matrices.W_v)
    to_source, to_text = attention_logits(q, k_source), _text_logits(params, matrices, normed)
    weights = softmax(torch.cat((to_source, to_text), dim=-1))
    joint = context(weights, torch.cat((v_source, v_text), dim=-2))
    own, cross = context(softmax(to_text), v_text), context(softmax(to_source), v_source)
    share = torch.sigmoid(to_text.logsumexp(-1) - to_source.logsumexp(-1))[..., None]  # Z_text / (Z_text + Z_src)
    if params.mixture_rule == "normalizers":
        mixed = share * own + (1 - share) * cross
    else:
        mixed = own + cross if params.mixture_rule == "plain_sum" else (own + cross) / 2
    return weights, joint, mixed


def _gradients(
    params: Params,
    matrices: _Matrices,
    plain: torch.Tensor,
    source: torch.Tensor,
    probe: torch.Tensor,
    gate: float,
) -> tuple[float, float]:
    """Size of the gradient to the gate, and norm of that to all four matrices of the cross-attention."""
    import torch

    with torch.enable_grad():
        learned = _Matrices(*(W.detach().requires_grad_() for W in matrices))
        learned_gate = torch.tensor(gate, dtype=plain.dtype, device=plain.device, requires_grad=True)
        out = plain + torch.tanh(learned_gate) * _attend(params, learned, _norm(plain), source, None)
        to_gate, *to_matrices = torch.autograd.grad((out * probe).mean(), (learned_gate, *learned))
    return float(to_gate.abs()), float(torch.stack([g.norm() for g in to_matrices]).norm())


def _apart(outputs: torch.Tensor, others: torch.Tensor, unit: torch.Tensor) -> float:
    """The largest difference of any coordinate."""
    return float((outputs - others).abs().max() / unit)


def _shares(shares: list[tuple[int, float]], alone: float) -> Table:
    """Of the weight in self-attention, what is left for the text; with cross-attention the source is not in it."""
    lengths, left = (list(column) for column in zip(*shares, strict=True))
    return {
        "source_len": np.array(lengths * 2),
        "text_weight_share": np.array(left + [alone] * len(left)),
        "conditioning": np.repeat(["source_as_prefix", "gated_cross_attention"], len(left)),
    }


def _effects(effects: list[tuple[float, float]], prefix_effect: float) -> Table:
    gates, found = (list(column) for column in zip(*effects, strict=True))
    return {
        "cross_gate": np.array(gates * 2),
        "source_effect": np.array([prefix_effect] * len(found) + found),
        "conditioning": np.repeat(["source_as_prefix", "gated_cross_attention"], len(found)),
    }


def _gradient_table(gradients: list[tuple[float, float, float]]) -> Table:
    gates, to_gate, to_matrices = (list(column) for column in zip(*gradients, strict=True))
    return {
        "cross_gate": np.array(gates * 2),
        "gradient_norm": np.array(to_gate + to_matrices),
        "gradient_to": np.repeat(["the_gate", "cross_matrices"], len(gates)),
    }
