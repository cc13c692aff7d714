r"""Which outputs of a transformer follow a permutation of its tokens, which stay, and what breaks the symmetry.

Without positions and mask, attention satisfies :math:`f(PX)=P\,f(X)` for every permutation matrix P: it is
equivariant as a map from sequence to sequence. The output of one query does not change when keys and values are
reordered together, nor does a symmetric pooling of all outputs. All layers that act on each token alone keep this. What
breaks it: positions that are added, rotated or put into the logits, and a causal mask. A stack with the mask alone
still reads its prefix without order in the first layer.

The stack is random, as before training: pre-norm blocks with matrices N(0, 1/fan_in), tokens N(0, 1), and a learned
table of positions drawn like the tokens. Errors are largest differences of any coordinate, in units of the root mean
square of the outputs: two layers round to some 1e-6 in float32.

Sources: vaswani2017, section 3.5; lee2019, abstract (attention on sets); zuo2024, abstract (without mask and positions
the last output does not see the order of the others).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, flag, number
from engine.encodings import alibi_bias, from_table, sinusoidal
from engine.positions import rotary_angles, rotate

if TYPE_CHECKING:
    import torch

ENCODINGS = ("no_positions", "sinusoidal", "learned_table", "rope", "alibi")


@dataclass(frozen=True)
class Params(BaseParams):
    positions: str = choice(*ENCODINGS)
    causal: bool = flag(False)
    n_layers: int = number(2, low=1, high=6)
    moved: str = choice("all_tokens", "all_but_last", "first_two", "reversed")
    bos: bool = flag(False)
    n_distinct: int = number(8, low=1, high=128, log2=True)
    seq_len: int = number(16, low=4, high=128, log2=True)
    d_model: int = number(32, low=16, high=128, log2=True)
    n_heads: int = number(4, low=1, high=8, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % (2 * self.n_heads):  # rotary positions turn pairs of coordinates
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_of_even_width", values={"d_model": self.d_model})


METRICS = (
    Metric("equivariance_error"),
    Metric("last_output_error"),
    Metric("mean_pool_error"),
    Metric("invariance_error"),
    Metric("twin_spread"),
    Metric("doubled_error"),
    Metric("one_doubled_error"),
)
PLOTS = (
    Plot(
        "by_encoding",
        table="by_encoding",
        x="positions",
        y="equivariance_error",
        by="mask",
        mark="point",
        y_scale="log10",
    ),
    Plot("by_position", table="by_position", x="position", y="output_change", by="n_layers", y_scale="log10"),
)
BUDGET_S = 0.02

DRAWN_FLOOR = 1e-17  # an error of exactly 0 is drawn here
FFN_FACTOR = 4


def memory_bytes(params: Params) -> int:
    """Weights of all layers; of the largest pass a few arrays of logits, and every layer's activations."""
    layers, tokens = max(2, params.n_layers), 2 * params.seq_len  # two sequences at once, or one that is doubled
    weights = layers * (4 + 2 * FFN_FACTOR) * params.d_model**2
    logits = 6 * params.n_heads * tokens**2
    activations = (2 * layers + 4 * FFN_FACTOR + 12) * tokens * params.d_model
    return 4 * (weights + logits + activations) + 2**16


def run(params: Params, run: Run) -> Result:
    """Outputs of one sequence and of the same tokens moved, through the same layers.

    With ``bos`` the first place holds a token of its own that never moves. ``twin_spread``: how far the outputs of
    equal tokens lie apart; ``n_distinct`` tokens repeat in turn. ``doubled_error``, ``one_doubled_error``: the change
    of the last output when all tokens (but BOS) stand in the sequence a second time, or only the first of them.

    Shapes: tokens (seq_len, d_model).
    """
    import torch

    first = int(params.bos)
    tokens, table, layers = _draw(params, run)
    order = _order(params, run, first)
    passes = len(ENCODINGS) * 2 + 3
    done = iter(range(passes))

    def outputs(batch: torch.Tensor, encoding: str = params.positions, causal: bool = params.causal) -> torch.Tensor:
        run.progress(next(done) / passes)
        return _outputs(batch, layers, encoding, causal, table, params.n_heads)

    both = torch.stack((tokens, tokens[order]))
    errors, by_layer = {}, both
    for encoding in ENCODINGS:
        for causal in (False, True):
            found = outputs(both, encoding, causal)
            errors[encoding, causal] = _apart(found[params.n_layers - 1, 1], found[params.n_layers - 1, 0, order])
            if (encoding, causal) == (params.positions, params.causal):
                by_layer = found

    still, moved = by_layer[params.n_layers - 1]
    unit = _unit(still)
    places = torch.arange(params.seq_len - first, device=tokens.device)
    twins = first + places % params.n_distinct  # where the same token stands for the first time
    doubled = outputs(torch.cat((tokens, tokens[first:]))[None])[params.n_layers - 1, 0]
    one_doubled = outputs(torch.cat((tokens[: first + 1], tokens[first:]))[None])[params.n_layers - 1, 0]
    metrics = {
        "equivariance_error": errors[params.positions, params.causal],
        "last_output_error": _apart(moved[-1], still[-1], unit),
        "mean_pool_error": _apart(moved.mean(dim=0), still.mean(dim=0), unit),
        "invariance_error": _apart(moved, still, unit),
        "twin_spread": _apart(still[first:], still[twins], unit),
        "doubled_error": _apart(doubled[-1], still[-1], unit),
        "one_doubled_error": _apart(one_doubled[-1], still[-1], unit),
    }
    tables = {"by_encoding": _by_encoding(errors), "by_position": _by_position(by_layer, params.n_layers)}
    return Result(metrics, tables)


def _draw(params: Params, run: Run) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, torch.Tensor]]]:
    """Tokens, a learned table long enough for the doubled sequence, and the matrices of each layer."""
    import torch

    vocabulary, bos = run.randn(params.n_distinct, params.d_model), run.randn(1, params.d_model)
    first = int(params.bos)
    repeated = vocabulary[torch.arange(params.seq_len - first, device=vocabulary.device) % params.n_distinct]
    table = run.randn(2 * params.seq_len, params.d_model)
    layers = []
    for _ in range(max(2, params.n_layers)):
        shapes = dict.fromkeys(("W_q", "W_k", "W_v", "W_o"), (params.d_model, params.d_model))
        shapes["W_up"] = (params.d_model, FFN_FACTOR * params.d_model)
        shapes["W_down"] = (FFN_FACTOR * params.d_model, params.d_model)
        layers.append({name: run.randn(*shape) / shape[0] ** 0.5 for name, shape in shapes.items()})
    return torch.cat((bos[:first], repeated)), table, layers


def _order(params: Params, run: Run, first: int) -> torch.Tensor:
    """Which token stands at each place after the move. Shapes: returns (seq_len,) of int64."""
    import torch

    order = torch.arange(params.seq_len, device=run.device)
    if params.moved == "first_two":
        order[first : first + 2] = order[first : first + 2].flip(0)
    elif params.moved == "reversed":
        order[first:] = order[first:].flip(0)
    else:
        last = params.seq_len - (params.moved == "all_but_last")
        cycle = first + run.rand(last - first).argsort()
        order[cycle] = cycle.roll(1)  # one random cycle, so that none of them keeps its place
    return order


def _outputs(
    x: torch.Tensor,
    layers: list[dict[str, torch.Tensor]],
    encoding: str,
    causal: bool,
    table: torch.Tensor,
    n_heads: int,
) -> torch.Tensor:
    """What the stack says after each layer. Shapes: x (batch, seq_len, d_model); returns (n_layers, *x.shape)."""
    import torch
    from torch.nn.functional import gelu, layer_norm

    seq_len, d_model = x.shape[-2:]
    places = torch.arange(seq_len, device=x.device)
    keep = places <= places[:, None]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (n_heads, -1)).transpose(-3, -2)  # (batch, n_heads, seq_len, d_k)

    if encoding == "sinusoidal":
        x = x + sinusoidal(places, d_model).to(x.dtype)
    elif encoding == "learned_table":
        x = x + from_table(table, places)

    found = []
    for layer in layers:
        normed = layer_norm(x, (d_model,))
        q, k, v = (heads(normed @ layer[name]) for name in ("W_q", "W_k", "W_v"))
        if encoding == "rope":
            angles = rotary_angles(places, d_model // n_heads)
            q, k = rotate(q, angles), rotate(k, angles)
        logits = attention_logits(q, k)
        if encoding == "alibi":
            logits = logits + alibi_bias(n_heads, places, places).to(x.dtype)
        weights = softmax(mask_logits(logits, keep) if causal else logits)
        x = x + context(weights, v).transpose(-3, -2).flatten(-2) @ layer["W_o"]
        x = x + gelu(layer_norm(x, (d_model,)) @ layer["W_up"]) @ layer["W_down"]
        found.append(x)
    return torch.stack(found)


def _unit(outputs: torch.Tensor) -> torch.Tensor:
    """Root mean square of all coordinates."""
    return outputs.square().mean().sqrt()


def _apart(outputs: torch.Tensor, others: torch.Tensor, unit: torch.Tensor | None = None) -> float:
    """The largest difference of any coordinate, in units of the root mean square of the others unless one is given."""
    return float((outputs - others).abs().max() / (_unit(others) if unit is None else unit))


def _by_encoding(errors: dict[tuple[str, bool], float]) -> Table:
    """Each encoding with and without the mask."""
    return {
        "positions": np.array([encoding for encoding, _ in errors]),
        "mask": np.array(["causal_mask" if causal else "no_mask" for _, causal in errors]),
        "equivariance_error": np.array(list(errors.values())).clip(DRAWN_FLOOR),
    }


def _by_position(by_layer: torch.Tensor, n_layers: int) -> Table:
    """How much the output at each place differs after the move, by the number of layers up to there."""
    shown = sorted({1, 2, n_layers})
    seq_len = by_layer.shape[-2]
    changes = []
    for n in shown:
        still, moved = by_layer[n - 1]
        changes.append(((moved - still).abs().amax(dim=-1) / _unit(still)).cpu().double().numpy().clip(DRAWN_FLOOR))
    return {
        "n_layers": np.repeat(shown, seq_len),
        "position": np.tile(np.arange(seq_len), len(shown)),
        "output_change": np.concatenate(changes),
    }
