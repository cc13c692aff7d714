r"""Layers that let tokens meet: operations, steps that must wait for each other, and how far a signal has to travel.

Table 1 of vaswani2017, measured. One sequence, one layer of width d, no FFN:

``self_attention``       every query with every key; ``window_attention`` with the last few
``linear_attention``     k vᵀ summed over the tokens to d_k × d_k numbers a head, read by q; no softmax, no divisor
``recurrent_layer``      h = tanh(W_x x + W_h h), token by token; ``lstm_layer`` the same with four gates
``convolution``          a product with each of the taps, over the last tokens; ``dilated_convolution`` with gaps that
                         are multiplied by the number of taps from layer to layer

Attention has four projections in front and behind. Table 1 leaves them out; here they can be counted.

Operations are those of the products, counted on tensors without storage. The longest chain is that of products in the
graph which autograd records of one layer that runs. How far a signal travels is found with a NaN in the first token,
which spoils whatever is computed from it: steps from token to token in a recurrent layer, else layers of a stack.

Source: vaswani2017, table 1 and section 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.attention import context, qk_product, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.operations import count_operations

if TYPE_CHECKING:
    import torch

KINDS = (
    "self_attention",
    "window_attention",
    "linear_attention",
    "recurrent_layer",
    "lstm_layer",
    "convolution",
    "dilated_convolution",
)
RECURRENT = ("recurrent_layer", "lstm_layer")


@dataclass(frozen=True)
class Params(BaseParams):
    mixing_layer: str = choice(*KINDS)
    seq_len: int = number(64, low=2, high=1024, log2=True)
    d_model: int = number(512, low=16, high=8192, log2=True)
    n_heads: int = number(8, low=1, high=64, log2=True)
    projections_counted: bool = flag(False)
    window: int = number(16, low=2, high=256, log2=True)
    conv_taps: int = number(3, low=2, high=15)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": self.d_model})


METRICS = (
    Metric("layer_flop", "flop"),
    Metric("signal_steps"),
    Metric("longest_chain"),
    Metric("flop_to_recurrent"),
    Metric("flop_to_lstm"),
)
PLOTS = (
    Plot(
        "operations",
        table="operations",
        x="seq_len",
        y="layer_gflop",
        by="mixing_layer",
        x_scale="log2",
        y_scale="log10",
    ),
    Plot("signal", table="signal", x="seq_len", y="signal_steps", by="mixing_layer", x_scale="log2", y_scale="log2"),
)
BUDGET_S = 0.02

LENGTHS = (16, 128, 1024, 8192)
SIGNAL_LENGTHS = (4, 16, 64)
TRACED_WIDTH = 4  # a signal travels as far in narrow layers


def memory_bytes(params: Params) -> int:
    """Of what runs with storage: narrow tensors, one matrix of weights, windows, and the graph of a recurrent layer."""
    n = max(params.seq_len, SIGNAL_LENGTHS[-1])
    return 8 * (8 * n * n + 8 * n * TRACED_WIDTH * max(params.window, params.conv_taps)) + 2**14 * n + 2**20


def run(params: Params, run: Run) -> Result:
    """Counts of the chosen kind, and of all kinds for the charts.

    ``signal_steps``       from the first token to the last, see above
    ``longest_chain``      products of one layer that wait for each other, projections of attention included
    ``flop_to_recurrent``  operations over those of a plain recurrent layer; ``flop_to_lstm`` over those of an LSTM
    """
    run.progress(0.0)
    flop = {kind: _flop(params, kind, params.seq_len) for kind in (params.mixing_layer, *RECURRENT)}
    run.progress(0.1)
    chain = _longest_chain(params, run)
    run.progress(0.4)
    mine = flop[params.mixing_layer]
    metrics = {
        "layer_flop": mine,
        "signal_steps": _signal_steps(params, params.mixing_layer, params.seq_len, run),
        "longest_chain": chain,
        "flop_to_recurrent": mine / flop["recurrent_layer"],
        "flop_to_lstm": mine / flop["lstm_layer"],
    }
    run.progress(0.6)
    tables = {"operations": _operations(params), "signal": _signal(params, run)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


# --------------------------------------------------------------------------------------------------------------------
# The layers. Shapes: x (n, d), as it comes out; weights (d, d), of an LSTM (d, 4 d). Softmax and what squashes a state
# multiply no matrices: `bare` leaves them out.


def _attend(
    kind: str, params: Params, x: torch.Tensor, matrix: Callable[[int], torch.Tensor], bare: bool
) -> torch.Tensor:
    """Attention of any kind with its four projections, which is left at q, k and v = x if they are not counted."""
    projected = params.projections_counted or not bare
    n_heads = min(params.n_heads, x.shape[-1])
    q, k, v = (
        (x @ matrix(1) if projected else x).unflatten(-1, (n_heads, -1)).transpose(0, 1) for _ in range(3)
    )  # (n_heads, n, d_k)
    if kind == "linear_attention":
        mixed = q @ (k.mT @ v)
    elif kind == "self_attention":
        logits = qk_product(q, k)
        mixed = context(logits if bare else softmax(logits), v)
    else:
        mixed = _in_window(q, k, v, params.window, bare)
    out = mixed.transpose(0, 1).flatten(1)
    return out @ matrix(1) if projected else out


def _in_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, bare: bool) -> torch.Tensor:
    """Each query with the keys up to its own that lie in the window, gathered for it. Shapes: (n_heads, n, d_k)."""
    import torch

    keys, values = (_gathered(x, window) for x in (k, v))  # (n_heads, n, window, d_k)
    logits = qk_product(q[..., None, :], keys)
    if not bare:
        real = _gathered(torch.ones_like(q[..., :1]), window)  # 0 before the first token
        logits = softmax(logits.masked_fill(real.mT == 0, -torch.inf))
    return context(logits, values).squeeze(-2)


def _gathered(x: torch.Tensor, count: int) -> torch.Tensor:
    """For each token itself and those before it, zeros in front of the first.

    Without storage only the shape is made: moving numbers about is no operation.

    Shapes: (..., n, d) to (..., n, count, d).
    """
    from torch.nn.functional import pad

    if x.is_meta:
        return x[..., None, :].expand(*x.shape[:-1], count, -1)
    return pad(x, (0, 0, count - 1, 0)).unfold(-2, count, 1).mT


def _moved_back(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """Each token in the place of a later one, zeros in front; without storage only the shape. Shapes: (n, d) both."""
    from torch.nn.functional import pad

    return x if x.is_meta else pad(x, (0, 0, min(tokens, len(x)), 0))[: len(x)]


def _convolve(x: torch.Tensor, matrix: Callable[[int], torch.Tensor], taps: int, gap: int) -> torch.Tensor:
    out = x @ matrix(1)
    for tap in range(1, taps):
        out = out + _moved_back(x, tap * gap) @ matrix(1)
    return out


def _recur(
    kind: str, rows: list[torch.Tensor], matrix: Callable[[int], torch.Tensor], bare: bool
) -> Iterator[torch.Tensor]:
    """The state after each token. Shapes: rows (1, d), as they come out."""
    gates = 4 if kind == "lstm_layer" else 1
    W_x, W_h = matrix(gates), matrix(gates)
    h = c = rows[0] * 0
    for row in rows:
        mixed = row @ W_x + h @ W_h
        if kind == "lstm_layer":
            opened, kept, shown, new = mixed.unflatten(-1, (4, -1)).unbind(-2)
            if not bare:
                opened, kept, shown, new = opened.sigmoid(), kept.sigmoid(), shown.sigmoid(), new.tanh()
            c = kept * c + opened * new
            h = shown * (c if bare else c.tanh())
        else:
            h = mixed if bare else mixed.tanh()
        yield h


def _mix(params: Params, kind: str, x: torch.Tensor, layer: int, matrix: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """One layer that is not recurrent; ``layer`` counts from 0."""
    if kind == "convolution":
        return _convolve(x, matrix, params.conv_taps, 1)
    if kind == "dilated_convolution":
        return _convolve(x, matrix, params.conv_taps, params.conv_taps**layer)
    return _attend(kind, params, x, matrix, bare=x.is_meta)


# --------------------------------------------------------------------------------------------------------------------
# What is measured on them


def _flop(params: Params, kind: str, n: int) -> int:
    """Of one layer over n tokens. A recurrent layer does the same for each of them, and is counted on one."""
    return n * _counted(params, kind, 1) if kind in RECURRENT else _counted(params, kind, n)


def _counted(params: Params, kind: str, n: int) -> int:
    """Of a recurrent layer over a single token, of another one over n."""
    import torch

    d = params.d_model
    x = torch.empty(n, d, device="meta")
    matrices = {columns: torch.empty(d, columns * d, device="meta") for columns in (1, 4)}  # one stands for all
    with count_operations() as counted:
        if kind in RECURRENT:
            list(_recur(kind, [x], matrices.__getitem__, bare=True))
        else:
            _mix(params, kind, x, 0, matrices.__getitem__)
    return counted.products


def _longest_chain(params: Params, run: Run) -> int:
    """Products on the longest way through the graph of one layer."""
    import torch

    n, d = params.seq_len, TRACED_WIDTH
    ones = functools.partial(torch.ones, device=run.device, dtype=run.dtype)

    def matrix(columns: int) -> torch.Tensor:
        return (ones(d, columns * d) / (d * n)).requires_grad_()

    x = ones(n, d)
    if params.mixing_layer in RECURRENT:
        out = [*_recur(params.mixing_layer, [*x.split(1)], matrix, bare=False)][-1]
    else:
        out = _mix(params, params.mixing_layer, x, 0, matrix)
    return _products_behind(out.grad_fn)


def _products_behind(last: Any) -> int:
    """The most products on a way from that node of a graph back to a leaf. Chains are long: no recursion."""
    longest: dict[Any, int] = {}
    waiting = [last]
    while waiting:
        node = waiting[-1]
        before = [earlier for earlier, _ in node.next_functions if earlier is not None]
        unknown = [earlier for earlier in before if earlier not in longest]
        if unknown:
            waiting += unknown
            continue
        waiting.pop()
        own = node.name().startswith(("MmBackward", "BmmBackward", "AddmmBackward"))
        longest[node] = own + max((longest[earlier] for earlier in before), default=0)
    return longest[last]


def _signal_steps(params: Params, kind: str, n: int, run: Run) -> int:
    """Steps until what the first token holds has reached the last one."""
    import torch

    d = TRACED_WIDTH
    x = torch.zeros(n, d, device=run.device, dtype=run.dtype)
    x[0] = torch.nan

    def matrix(columns: int) -> torch.Tensor:
        return torch.ones(d, columns * d, device=run.device, dtype=run.dtype)

    if kind in RECURRENT:
        states = [*_recur(kind, [*x.split(1)], matrix, bare=False)]
        return int(torch.cat(states).isnan().all(dim=-1).sum()) - 1  # the first token is where it starts
    for layer in range(n):
        run.check_stop()
        x = _mix(params, kind, x, layer, matrix)
        if bool(x[-1].isnan().all()):
            return layer + 1
    return n  # it moves by a token in each layer, at the least


def _operations(params: Params) -> Table:
    """Operations of one layer of each kind, by the length; gaps between the taps change none."""
    kinds = [kind for kind in KINDS if kind != "dilated_convolution"]
    return {
        "seq_len": np.tile(LENGTHS, len(kinds)),
        "mixing_layer": np.repeat(kinds, len(LENGTHS)),
        "layer_gflop": np.array([_flop(params, kind, n) for kind in kinds for n in LENGTHS]) / 1e9,
    }


def _signal(params: Params, run: Run) -> Table:
    """How far a signal travels in each kind, by the length."""
    steps = []
    for done, kind in enumerate(KINDS):
        run.progress(0.7 + 0.3 * done / len(KINDS))
        steps += [_signal_steps(params, kind, n, run) for n in SIGNAL_LENGTHS]
    return {
        "seq_len": np.tile(SIGNAL_LENGTHS, len(KINDS)),
        "mixing_layer": np.repeat(KINDS, len(SIGNAL_LENGTHS)),
        "signal_steps": np.array(steps),
    }
