r"""One pass over a known sequence against a pass over each of its prefixes: token logits, losses and gradients.

Training scores all positions of a sequence in one pass. Generation has, for each token, only the prefix: as many passes
as tokens, of which each scores its last position. If every output depends on its prefix alone, both give the same token
logits, and with the losses added up the same gradient:

.. math:: \nabla\sum_t\ell_t=\sum_t\nabla\ell_t,\quad\ell_t=-\ln p(x_{t+1}\mid x_{\le t})

``pass_change`` changes one thing:

``as_it_should_be``        nothing
``unmasked_pass``          the one pass has no mask; the passes over prefixes keep theirs
``unmasked_everywhere``    no pass has a mask: the same model in training and in generation
``targets_not_shifted``    position t is scored against token t, which it reads, in the one pass
``prefixes_scored_whole``  a pass over a prefix scores all its positions, not the last one alone
``token_statistics``       the norms normalize each feature over the tokens of the pass
``dropout_on``             a tenth of what the layers add is dropped, drawn anew in every pass
``limited_experts``        two experts, each for half the tokens of a pass, in order; who comes late is served by none
``padded_left``            the prefixes are padded on the left to one length; padding is masked, but it is counted in
                           the positions

The decoder is random: pre-norm, GELU, tied embeddings, a table of positions or rotary ones. Everything is on the CPU in
float64, for what is equal and what is nearly so must be told apart and not every accelerator has float64.

Sources: vaswani2017, section 3.1 (mask and shifted outputs); fedus2021, section 2.2 (experts with a capacity).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.masks import keep_causal
from engine.positions import rotary_angles, rotate

if TYPE_CHECKING:
    import torch

CHANGES = (
    "as_it_should_be",
    "unmasked_pass",
    "unmasked_everywhere",
    "targets_not_shifted",
    "prefixes_scored_whole",
    "token_statistics",
    "dropout_on",
    "limited_experts",
    "padded_left",
)


@dataclass(frozen=True)
class Params(BaseParams):
    pass_change: str = choice(*CHANGES)
    positions_from: str = choice("position_table", "rotary_positions")
    seq_len: int = number(4, low=2, high=32)
    n_layers: int = number(2, low=1, high=4)
    n_heads: int = number(2, low=1, high=8, log2=True)
    d_model: int = number(16, low=16, high=64, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % (2 * self.n_heads):  # rotary positions turn pairs of coordinates
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_of_even_width", values={"d_model": self.d_model})


METRICS = (
    Metric("pass_logits_error"),
    Metric("pass_gradient_error"),
    Metric("pass_loss_difference_nats", "nats"),
    Metric("positions_off"),
    Metric("targets_read"),
    Metric("n_scored"),
    Metric("prefix_rows_ratio"),
)
PLOTS = (
    Plot("by_position", table="by_position", x="position", y="drawn_pass_error", mark="bar", y_scale="log10"),
    Plot("by_weight", table="by_weight", x="weight_name", y="drawn_pass_error", mark="bar", y_scale="log10"),
)
BUDGET_S = 0.03

VOCABULARY = 16
DROPPED = 0.1
N_EXPERTS = 2
OFF = 1e-6  # of the logits' size: above rounding, that of float32 angles too, and far below any change that is meant
DRAWN_FLOOR = 1e-17  # where an error of exactly 0 is drawn and bars begin: below rounding in float64

_SYMBOLS = {"embedding": "E", "positions": "P"}  # the others are symbols already

_Weights = dict[str, "torch.Tensor"]


def memory_bytes(params: Params) -> int:
    """Float64: weights with two gradients, and what the passes keep for the way back, one at a time."""
    d, n = params.d_model, params.seq_len
    weights = params.n_layers * (4 + 8 * N_EXPERTS) * d**2 + (VOCABULARY + n) * d
    kept = params.n_layers * n * (60 * d + 6 * params.n_heads * n) + 4 * n * VOCABULARY
    return 8 * (4 * weights + 2 * kept) + 2**20


def run(params: Params, run: Run) -> Result:
    """Score a random sequence in one pass and prefix by prefix, and compare.

    ``pass_logits_error``: the largest difference of a logit, of the logits' root mean square. ``pass_gradient_error``:
    norm of the difference of the gradients of all weights, over that of the gradient by prefixes. ``positions_off``:
    positions with a logit off by more than rounding. ``targets_read``: positions whose loss, in the one pass, has a
    gradient with respect to the vector of the very token that it is scored against. ``prefix_rows_ratio``: token
    vectors that went through the layers in the passes over prefixes, over those of the one pass.

    Shapes: tokens (seq_len + 1,); logits (seq_len, VOCABULARY).
    """
    import torch

    model = _Model(params, run)
    tokens = torch.randint(VOCABULARY, (params.seq_len + 1,), generator=run.generator)
    read, targets = tokens[:-1], tokens[1:]
    unmasked = params.pass_change in ("unmasked_pass", "unmasked_everywhere")

    run.progress(0.0)
    scored = read if params.pass_change == "targets_not_shifted" else targets
    x = model.embed(read)
    logits = model(x, masked=not unmasked)
    losses = _losses(logits, scored)
    gradient = _gradient(losses.sum(), model.weights)
    targets_read = 0
    for t in range(params.seq_len):
        run.progress(0.3 * (t + 1) / params.seq_len)
        at = t if params.pass_change == "targets_not_shifted" else t + 1
        if at < params.seq_len:  # the last target stands behind all that is read
            (to_vectors,) = torch.autograd.grad(losses[t], x, retain_graph=True)
            targets_read += bool((to_vectors[at] != 0).any())
    rows_in_pass = model.rows

    rows, prefix_losses = [], []
    summed = {name: torch.zeros_like(weight) for name, weight in model.weights.items()}
    for n in range(1, params.seq_len + 1):
        run.progress(0.3 + 0.7 * n / (params.seq_len + 1))
        prefix = _Prefix(read[:n], params.seq_len if params.pass_change == "padded_left" else n)
        out = model(
            model.embed(prefix.padded, prefix.n_padding),
            masked=params.pass_change != "unmasked_everywhere",
            n_padding=prefix.n_padding,
        )
        whole = params.pass_change == "prefixes_scored_whole"
        loss = _losses(out[-n:], targets[:n]) if whole else _losses(out[-1:], targets[n - 1 : n])
        for name, part in _gradient(loss.sum(), model.weights).items():
            summed[name] += part
        rows.append(out[-1].detach())
        prefix_losses.append(loss[-1].detach())
    rows_in_prefixes = model.rows - rows_in_pass

    by_prefix = torch.stack(rows)
    off = (logits.detach() - by_prefix).abs().amax(dim=-1) / by_prefix.square().mean().sqrt()
    squares = {name: (gradient[name] - summed[name]).square().sum() for name in summed}
    norms = {name: part.square().sum() for name, part in summed.items()}
    metrics = {
        "pass_logits_error": off.max(),
        "pass_gradient_error": (sum(squares.values()) / sum(norms.values())) ** 0.5,
        "pass_loss_difference_nats": losses.detach().mean() - torch.stack(prefix_losses).mean(),
        "positions_off": (off > OFF).sum(),
        "targets_read": targets_read,
        "n_scored": losses.numel(),
        "prefix_rows_ratio": rows_in_prefixes / rows_in_pass,
    }
    by_position: Table = {
        "position": np.arange(params.seq_len),
        "drawn_pass_error": np.maximum(off.numpy(), DRAWN_FLOOR),
    }
    by_weight: Table = {
        "weight_name": np.array([_SYMBOLS.get(name, name) for name in summed]),
        "drawn_pass_error": np.maximum(
            [math.sqrt(squares[name] / norms[name]) if norms[name] else 0.0 for name in summed], DRAWN_FLOOR
        ),
    }
    tables = {"by_position": by_position, "by_weight": by_weight}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


@dataclass
class _Prefix:
    """The first tokens of a sequence, padded on the left with token 0 to a length."""

    tokens: torch.Tensor
    length: int
    n_padding: int = field(init=False)
    padded: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        import torch

        self.n_padding = self.length - len(self.tokens)
        self.padded = torch.cat((self.tokens.new_zeros(self.n_padding), self.tokens))


class _Model:
    """The decoder with its weights; ``rows`` counts the token vectors that went through its layers."""

    def __init__(self, params: Params, run: Run) -> None:
        d = params.d_model

        def draw(*shape: int) -> torch.Tensor:
            return run.randn(*shape).cpu().double()

        self.params, self.rows = params, 0
        self.weights: _Weights = {"embedding": draw(VOCABULARY, d)}
        if params.positions_from == "position_table":
            self.weights["positions"] = draw(params.seq_len, d)
        experts = N_EXPERTS if params.pass_change == "limited_experts" else 1
        shapes = {
            **dict.fromkeys(("W_q", "W_k", "W_v", "W_o"), (params.n_layers, d, d)),
            "W_up": (params.n_layers, experts, 4 * d, d),
            "W_down": (params.n_layers, experts, d, 4 * d),
        }
        if experts > 1:
            shapes["W_router"] = (params.n_layers, experts, d)
        self.weights |= {name: draw(*shape) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
        for weight in self.weights.values():
            weight.requires_grad_()
        self.uniform: Callable[..., torch.Tensor] = lambda *shape: run.rand(*shape).cpu().double()

    def embed(self, tokens: torch.Tensor, n_padding: int = 0) -> torch.Tensor:
        """The vectors that the layers read. Shapes: (n,) to (n, d_model)."""
        x = self.weights["embedding"][tokens]
        return x + self.weights["positions"][: len(x)] if "positions" in self.weights else x

    def __call__(self, x: torch.Tensor, *, masked: bool, n_padding: int = 0) -> torch.Tensor:
        """Token logits. Padding is nobody's key but its own. Shapes: (n, d_model) to (n, VOCABULARY)."""
        import torch
        from torch.nn.functional import gelu

        self.rows += len(x)
        n, d_k = len(x), self.params.d_model // self.params.n_heads
        keep = keep_causal(n) if masked else torch.ones(n, n, dtype=torch.bool)
        keep = keep & ((torch.arange(n) >= n_padding) | torch.eye(n, dtype=torch.bool))
        angles = rotary_angles(torch.arange(n), d_k)
        for layer in range(self.params.n_layers):
            W = {name: weight[layer] for name, weight in self.weights.items() if name.startswith("W_")}
            h = self._norm(x)
            q, k, v = ((h @ W[name].mT).unflatten(-1, (-1, d_k)).transpose(0, 1) for name in ("W_q", "W_k", "W_v"))
            if self.params.positions_from == "rotary_positions":
                q, k = rotate(q, angles), rotate(k, angles)
            x = x + self._drop(attention(q, k, v, keep=keep).transpose(0, 1).flatten(1) @ W["W_o"].mT)
            h = self._norm(x)
            out = torch.stack([gelu(h @ up.mT) @ down.mT for up, down in zip(W["W_up"], W["W_down"], strict=True)])
            x = x + self._drop((self._served(h, W) * out).sum(dim=0) if "W_router" in W else out[0])
        return self._norm(x) @ self.weights["embedding"].mT / math.sqrt(self.params.d_model)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """LayerNorm without gain and bias; or each feature over the tokens of the pass. Shapes: (n, d_model)."""
        from torch.nn.functional import layer_norm

        if self.params.pass_change == "token_statistics":
            return layer_norm(x.mT, x.shape[:1]).mT
        return layer_norm(x, x.shape[1:])

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        if self.params.pass_change != "dropout_on":
            return x
        return x * (self.uniform(*x.shape) >= DROPPED) / (1 - DROPPED)

    def _served(self, h: torch.Tensor, W: _Weights) -> torch.Tensor:
        """The share of each expert in each token: of its chosen one the router's, unless that is full.

        Shapes: h (n, d_model); returns (experts, n, 1).
        """
        import torch

        shares = (h @ W["W_router"].mT).softmax(dim=-1)  # (n, experts)
        chosen = torch.nn.functional.one_hot(shares.argmax(dim=-1), N_EXPERTS)
        capacity = math.ceil(len(h) / N_EXPERTS)
        return (shares * chosen * (chosen.cumsum(dim=0) <= capacity)).mT[..., None]


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of each row. Shapes: (n, VOCABULARY) and (n,) to (n,)."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits, targets, reduction="none")


def _gradient(loss: torch.Tensor, weights: _Weights) -> _Weights:
    import torch

    parts = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
    return dict(zip(weights, parts, strict=True))
