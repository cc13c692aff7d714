r"""How many operations must wait for one another before the last token's logits are there, for three kinds of layer.

Every operation is watched as it runs: its place in the chain is one more than the highest place among its inputs. The
longest chain is what no amount of parallel hardware shortens, however many operations stand beside it. A layer is

``attention_layer``       causal attention and a feed-forward network, pre-norm; keys and values are kept for later
``nonlinear_recurrence``  :math:`h_t=\tanh(W_xx_t+W_hh_{t-1})`, as in an RNN or, with gates, in an LSTM
``scan_layer``            :math:`h_t=a_t h_{t-1}+b_t` with :math:`a_t,b_t` from :math:`x_t` alone, as in a state-space
                          model: such steps can be combined in pairs, pairs of pairs, and so on, once all are known

and the tokens are

``tokens_known``      all there before the pass, as in training, in a prompt, and among drafted tokens that are verified
``tokens_generated``  each the most likely one after those before it

An operation is a call of PyTorch that computes (a matrix product, a sum, an exponential); what only moves numbers or
looks them up is free. Inside of one there is a chain too, of additions, which grows with the logarithm of what is
summed; it is not counted here, nor is any time. All is computed on the CPU: what waits for what is the same everywhere.

Source: martin2018, abstract (nonlinear recurrences block training along the sequence, linear ones can be scanned).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.masks import keep_causal
from engine.operations import MOVES
from engine.watching import watching

if TYPE_CHECKING:
    import torch

LAYERS = ("attention_layer", "nonlinear_recurrence", "scan_layer")
ORIGINS = ("tokens_known", "tokens_generated")
CASES = (  # of each kind of layer both origins
    "attention_layer_tokens_known",
    "attention_layer_tokens_generated",
    "nonlinear_recurrence_tokens_known",
    "nonlinear_recurrence_tokens_generated",
    "scan_layer_tokens_known",
    "scan_layer_tokens_generated",
)


@dataclass(frozen=True)
class Params(BaseParams):
    sequence_layer: str = choice(*LAYERS)
    tokens_are: str = choice(*ORIGINS)
    seq_len: int = number(6, low=2, high=64)
    n_layers: int = number(1, low=1, high=4)

    def rules(self) -> Iterator[Problem]:
        if self.seq_len * self.n_layers > MOST_CELLS:
            values = {"most": MOST_CELLS}
            yield Problem("rule", "n_layers", self.n_layers, rule="tokens_times_layers", values=values)


METRICS = (
    Metric("chain_of_operations"),
    Metric("chain_per_further_token"),
    Metric("stepwise_difference"),
)
PLOTS = (Plot("chains", table="chains", x="position", y="chain_length", by="chain_of", mark="point", y_scale="log10"),)
BUDGET_S = 0.05

MOST_CELLS = 128  # tokens times layers; each takes some thirty watched operations, in six cases
D_MODEL = 32
N_HEADS = 2
VOCABULARY = 16
OTHER_MOVES = ("stack", "split", "index", "constant_pad_nd", "full", "zeros_like", "lift_fresh")

_Weights = dict[str, "torch.Tensor"]


def memory_bytes(params: Params) -> int:
    """The weights, and all that the two runs of a kind of layer make: the watch keeps what it has seen."""
    d, n = D_MODEL, params.seq_len
    weights = params.n_layers * 16 * d**2 + VOCABULARY * d
    made = params.n_layers * n * (80 * d + 12 * N_HEADS * n + 2 * n * d)  # keys and values are copied at each step
    return 4 * (weights + 2 * made) + 1000 * 64 * params.n_layers * n + 2**22


def run(params: Params, run: Run) -> Result:
    """Run all three kinds of layer on known and on generated tokens, and follow their chains.

    ``chain_of_operations`` of the chosen case: operations in a row up to the logits of the last position.
    ``chain_per_further_token``: what it has more than the chain of a single token, for each token after the first.
    ``stepwise_difference``: the largest difference, of the logits' root mean square, between one call on all known
    tokens and a call for each of them.
    """
    import torch

    chains: dict[str, list[int]] = {}
    with torch.no_grad():
        for number, kind in enumerate(LAYERS):
            weights = _draw_weights(params, run, kind)
            tokens = torch.randint(VOCABULARY, (params.seq_len,), generator=run.generator)
            for origin in ORIGINS:
                step = (number + (origin == "tokens_generated") / 3) / len(LAYERS)
                layers = _KINDS[kind](params, weights)
                chains[f"{kind}_{origin}"] = _follow(params, partial(run.progress, step), layers, tokens, origin)
            if kind == params.sequence_layer:
                progress = partial(run.progress, (number + 2 / 3) / len(LAYERS))
                difference = _stepwise_difference(params, progress, kind, weights, tokens)

    chain = chains[f"{params.sequence_layer}_{params.tokens_are}"]
    single = chains[f"{params.sequence_layer}_tokens_generated"][0]  # nothing is generated yet: a pass over one token
    metrics = {
        "chain_of_operations": chain[-1],
        "chain_per_further_token": (chain[-1] - single) / (params.seq_len - 1),
        "stepwise_difference": difference,
    }
    table: Table = {
        "position": np.tile(np.arange(params.seq_len), len(CASES)),
        "chain_length": np.concatenate([np.array(chains[case]) for case in CASES]),
        "chain_of": np.repeat(CASES, params.seq_len),
    }
    return Result({name: float(value) for name, value in metrics.items()}, {"chains": table})


# --------------------------------------------------------------------------------------------------------------------
# Following the chains


class _Watch:
    """The place of every tensor in its chain of computing operations."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []  # else a new tensor could get the identity of one that is gone

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        computes = func.overloadpacket.__name__ not in MOVES + OTHER_MOVES
        place = max((self.place(x) for x in (*_tensors(args), *_tensors(kwargs.values()))), default=0) + computes
        for x in _tensors((out,)):
            self._places[id(x)] = place
            self._alive.append(x)

    def place(self, x: torch.Tensor) -> int:
        """0 for what was there before."""
        return self._places.get(id(x), 0)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    import torch

    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _follow(
    params: Params, progress: Callable[[], None], layers: _Layers, tokens: torch.Tensor, origin: str
) -> list[int]:
    """Length of the chain up to the logits of each position."""
    watch = _Watch()
    progress()
    with watching(watch.see):
        if origin == "tokens_known":
            return [watch.place(logits) for logits in layers.read(tokens)]
        chain, token = [], tokens[:1]
        for _ in range(params.seq_len):
            progress()
            (logits,) = layers.read(token)
            chain.append(watch.place(logits))
            token = logits.argmax(dim=-1)
    return chain


def _stepwise_difference(
    params: Params, progress: Callable[[], None], kind: str, weights: _Weights, tokens: torch.Tensor
) -> float:
    import torch

    at_once = torch.cat(_KINDS[kind](params, weights).read(tokens))
    layers = _KINDS[kind](params, weights)
    rows: list[torch.Tensor] = []
    for token in tokens.split(1):
        progress()
        rows += layers.read(token)
    return float((torch.cat(rows) - at_once).abs().max() / at_once.square().mean().sqrt())


# --------------------------------------------------------------------------------------------------------------------
# The layers


def _draw_weights(params: Params, run: Run, kind: str) -> _Weights:
    """Matrices of variance 1/fan-in; those of the state of a recurrence half as large."""
    d, n = D_MODEL, params.n_layers
    names = {
        "attention_layer": ("W_q", "W_k", "W_v", "W_o", "W_up", "W_down"),
        "nonlinear_recurrence": ("W_x", "W_h"),
        "scan_layer": ("W_a", "W_b"),
    }[kind]
    shapes = {"W_up": (n, 4 * d, d), "W_down": (n, d, 4 * d)}
    drawn = {name: run.randn(*shapes.get(name, (n, d, d))).cpu() for name in names}
    drawn = {name: W / math.sqrt(W.shape[-1]) / (2 if name == "W_h" else 1) for name, W in drawn.items()}
    return drawn | {"embedding": run.randn(VOCABULARY, d).cpu()}


class _Layers(ABC):
    """A stack of layers of one kind that remembers what it has read."""

    def __init__(self, params: Params, weights: _Weights) -> None:
        self.params, self.weights = params, weights
        like = weights["embedding"]
        names = [name for name in weights if name.startswith("W_")]
        self.matrices = [{name: weights[name][layer].mT for name in names} for layer in range(params.n_layers)]
        self.unembedding = like.mT
        self.state = [like.new_zeros(1, D_MODEL) for _ in range(params.n_layers)]
        self.keys = [like.new_zeros(N_HEADS, 0, D_MODEL // N_HEADS) for _ in range(params.n_layers)]
        self.values = list(self.keys)
        self.keep = keep_causal(params.seq_len)

    def read(self, tokens: torch.Tensor) -> Sequence[torch.Tensor]:
        """Logits of new tokens behind those that were read. Shapes: (n,) to n times (1, VOCABULARY)."""
        from torch.nn.functional import embedding

        xs: Sequence[torch.Tensor] = (embedding(tokens, self.weights["embedding"]),)
        for layer in range(self.params.n_layers):
            xs = self._layer(layer, self.matrices[layer], xs)
        rows = [self._norm(x) @ self.unembedding for x in xs]
        return [row for part in rows for row in part.split(1)]

    @abstractmethod
    def _layer(self, layer: int, W: _Weights, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What a layer makes of its input, whole or in rows, as it can. Shapes: (n, d_model) in all."""

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.functional import layer_norm

        return layer_norm(x, x.shape[-1:])


class _Attention(_Layers):
    def _layer(self, layer: int, W: _Weights, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        import torch
        from torch.nn.functional import gelu

        (x,) = xs
        h = self._norm(x)
        q, k, v = ((h @ W[name]).unflatten(-1, (N_HEADS, -1)).transpose(0, 1) for name in ("W_q", "W_k", "W_v"))
        self.keys[layer] = torch.cat((self.keys[layer], k), dim=1)
        self.values[layer] = torch.cat((self.values[layer], v), dim=1)
        kv_len = self.keys[layer].shape[1]
        keep = self.keep[kv_len - len(x) : kv_len, :kv_len]
        context = attention(q, self.keys[layer], self.values[layer], keep=keep)
        x = x + context.transpose(0, 1).flatten(1) @ W["W_o"]
        return (x + gelu(self._norm(x) @ W["W_up"]) @ W["W_down"],)


class _Recurrence(_Layers):
    def _layer(self, layer: int, W: _Weights, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        out = []
        for x in (row for part in xs for row in part.split(1)):  # in rows: none waits for a later one
            self.state[layer] = (self._norm(x) @ W["W_x"] + self.state[layer] @ W["W_h"]).tanh()
            out.append(x + self.state[layer])
        return out


class _Scan(_Layers):
    def _layer(self, layer: int, W: _Weights, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        import torch

        (x,) = xs
        h = self._norm(x)
        a, b = (h @ W["W_a"]).sigmoid(), h @ W["W_b"]
        reach = 1
        while reach < len(x):  # after each round (a, b) of a row stand for twice as many steps up to it
            earlier_a = torch.cat((torch.ones_like(a[:reach]), a[:-reach]))
            earlier_b = torch.cat((torch.zeros_like(b[:reach]), b[:-reach]))
            a, b, reach = a * earlier_a, a * earlier_b + b, 2 * reach
        states = a * self.state[layer] + b
        self.state[layer] = states[-1:]
        return (x + states,)


_KINDS: dict[str, Callable[[Params, _Weights], _Layers]] = {
    "attention_layer": _Attention,
    "nonlinear_recurrence": _Recurrence,
    "scan_layer": _Scan,
}
