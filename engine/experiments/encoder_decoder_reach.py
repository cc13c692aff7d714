r"""What each state of an encoder-decoder, of an encoder and of a decoder-only stack depends on, by replacing tokens.

All layers come from the same modules (engine/encoder_decoder.py) with drawn weights. Row r, column c of the map: how
much the last state of token r changes when token c is replaced by another, in root mean squares of the states.

``encoder_decoder``   source tokens through the encoder, target tokens through the decoder, which reads the encoder
``encoder_only``      source and target as one sequence, every token sees every other
``decoder_only``      source and target as one sequence under a causal mask, no cross-attention

The decoder reads what comes out of the encoder's last layer, in each of its layers. ``memory_depth`` and
``reading_layers`` rewire that: layer i of the decoder reads layer i of the encoder, or only the first one reads at all.
``last_memory_reached`` and ``later_memory_reached`` show the wiring: the first replaces the weights of the encoder's
last layer and looks at the state behind the decoder's first layer, the second gives every decoder layer but the first
the encoder's states of another source and looks at the last states. Score pairs are counted where the weights are not
0, for one head of one layer.

``bare_decoder_error`` compares the decoder's layers without their cross-attention with PyTorch's *encoder* layers that
hold the same weights and get a causal mask, as one stack over source and target.

Norms stand behind each sum as in the original, or before each sub-layer; ``stack_norm_change`` is what one more norm
behind each stack would change.

Sources: vaswani2017, sections 3.1 and 3.2.3; pytorch-code, ``TransformerEncoderLayer``, ``Transformer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.attention import attention, attention_logits, context, mask_logits, softmax
from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, Table, choice, number
from engine.encoder_decoder import LayerSizes, build_layer, draw_layer, layer_norm, run_layer
from engine.masks import keep_causal

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Params(BaseParams):
    stack_kind: str = choice("encoder_decoder", "encoder_only", "decoder_only")
    source_len: int = number(6, low=1, high=24)
    target_len: int = number(5, low=2, high=24)
    target_mask: str = choice("causal_target", "open_target")
    memory_depth: str = choice("last_encoder_layer", "same_depth")
    reading_layers: str = choice("every_decoder_layer", "first_decoder_layer")
    norm_position: str = choice("norm_behind_sum", "norm_before_sublayer")
    n_layers: int = number(2, low=2, high=8)
    d_model: int = number(32, low=16, high=64, log2=True)
    n_heads: int = number(4, low=1, high=8, log2=True)

    def rules(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            yield Problem("rule", "n_heads", self.n_heads, rule="heads_divide_width", values={"d_model": self.d_model})


METRICS = (
    Metric("source_on_source_share"),
    Metric("source_on_target_pairs"),
    Metric("target_on_source_pairs"),
    Metric("target_on_later_pairs"),
    Metric("encoder_score_pairs"),
    Metric("decoder_score_pairs"),
    Metric("cross_score_pairs"),
    Metric("last_memory_reached"),
    Metric("later_memory_reached"),
    Metric("bare_decoder_error"),
    Metric("memory_size"),
    Metric("stack_norm_change"),
)
PLOTS = (
    Plot("reach", table="reach", mark="heat", x="replaced_token", y="state_of_token", value="state_change_log10"),
    Plot("score_pairs", table="score_pairs", x="attention_kind", y="visible_pairs", mark="bar"),
)
BUDGET_S = 0.05

ATTENTION_NAMES = {
    "encoder_attention_pairs": "encoder_score_pairs",
    "decoder_attention_pairs": "decoder_score_pairs",
    "cross_attention_pairs": "cross_score_pairs",
}
FFN_FACTOR = 4
FLOOR = -6  # of the map, in powers of ten: below this it is rounding
ROUNDINGS = 100  # a change above so many roundings is a dependence


def memory_bytes(params: Params) -> int:
    """A copy of both sequences for each token, with logits and the hidden rows of an FFN; all weights."""
    n = params.source_len + params.target_len
    a_copy = n * (params.d_model * (8 + FFN_FACTOR) + 6 * params.n_heads * n)
    weights = 3 * params.n_layers * (16 + 12) * params.d_model**2
    return 4 * ((n + 4) * a_copy + weights) + 2**20


def run(params: Params, run: Run) -> Result:
    """The map of the chosen stack; everything else of the encoder-decoder.

    ``source_on_source_share``  of the pairs of a source token's state and a source token, those that depend
    ``source_on_target_pairs``  source states and target tokens; ``target_on_source_pairs`` the other way
    ``target_on_later_pairs``   target states and later target tokens
    ``memory_size``             root mean square of the encoder's outputs
    ``stack_norm_change``       of the outputs, with a norm behind both stacks, in root mean squares

    Shapes: source (source_len, d_model), target (target_len, d_model), copies in front.
    """
    import torch

    model = _Model(params, run)
    n_source, n = params.source_len, params.source_len + params.target_len
    tokens, others = run.randn(n, params.d_model), run.randn(n, params.d_model)
    other_source = run.randn(n_source, params.d_model)
    each = torch.arange(n, device=run.device)
    copies = tokens.repeat(n + 1, 1, 1)  # the last one stays as it is
    copies[each, each] = others
    run.progress(0.1)
    with torch.no_grad():
        states = model.states(copies)
        run.progress(0.6)
        unit = states[-1].square().mean().sqrt()
        change = (states[:-1] - states[-1]).abs().amax(dim=-1).T / unit  # (state, replaced token)

        source, target = tokens[:n_source], tokens[n_source:]
        pairs = _Pairs()
        memories = model.encode(source, mix=pairs.mix)
        encoder_pairs = pairs.counted[0]
        pairs.counted.clear()
        outputs = model.decode(target, memories, mix=pairs.mix)
        out_unit = outputs[-1].square().mean().sqrt()
        run.progress(0.7)
        beyond_first = model.decode(target, memories, later=model.encode(other_source))[-1]
        redrawn = model.encode(source, last=model.other_layer)
        first_state = model.decode(target, redrawn)[0]
        run.progress(0.8)
        bare_error = _bare_decoder_error(model, tokens)
        plain_norm = torch.nn.LayerNorm(params.d_model, device=run.device, dtype=run.dtype)
        renormed = [layer_norm(plain_norm, memory) for memory in memories]
        normed_out = layer_norm(plain_norm, model.decode(target, renormed)[-1])
        run.progress(0.9)
    depends = (change > ROUNDINGS * torch.finfo(run.dtype).eps).cpu()
    later = keep_causal(params.target_len, diagonal=0).logical_not()
    memory_size = memories[-1].square().mean().sqrt()
    metrics = {
        "source_on_source_share": float(depends[:n_source, :n_source].sum()) / n_source**2,
        "source_on_target_pairs": depends[:n_source, n_source:].sum(),
        "target_on_source_pairs": depends[n_source:, :n_source].sum(),
        "target_on_later_pairs": (depends[n_source:, n_source:] & later).sum(),
        "encoder_score_pairs": encoder_pairs,
        "decoder_score_pairs": pairs.counted[0],
        "cross_score_pairs": pairs.counted[1],
        "last_memory_reached": _apart(first_state, outputs[0]),
        "later_memory_reached": (beyond_first - outputs[-1]).abs().max() / out_unit,
        "bare_decoder_error": bare_error,
        "memory_size": memory_size,
        "stack_norm_change": (normed_out - outputs[-1]).abs().max() / out_unit,
    }
    tables = {
        "reach": _reach(change, n_source),
        "score_pairs": {
            "attention_kind": np.array([*ATTENTION_NAMES]),
            "visible_pairs": np.array([float(metrics[counted]) for counted in ATTENTION_NAMES.values()]),
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


_Mix = Callable[..., "torch.Tensor"]


class _Model:
    """The layers of both stacks, and how they are wired."""

    def __init__(self, params: Params, run: Run) -> None:
        self.params = params
        sizes = LayerSizes(params.d_model, params.n_heads, FFN_FACTOR * params.d_model)

        def layers(number: int, *, cross: bool) -> list[nn.ModuleDict]:
            built = (build_layer(sizes, cross=cross, device=run.device, dtype=run.dtype) for _ in range(number))
            return [draw_layer(layer, run.randn) for layer in built]

        self.encoder = layers(params.n_layers, cross=False)
        self.decoder = layers(params.n_layers, cross=True)
        (self.other_layer,) = layers(1, cross=False)
        self.norm_first = params.norm_position == "norm_before_sublayer"

    def encode(
        self, x: torch.Tensor, *, last: nn.ModuleDict | None = None, mix: _Mix = attention
    ) -> list[torch.Tensor]:
        """What each layer gives. ``last`` stands in for the last layer. Shapes: (..., source_len, d_model) each."""
        memories = []
        for layer in [*self.encoder[:-1], last if last is not None else self.encoder[-1]]:
            x = run_layer(layer, x, self.params.n_heads, norm_first=self.norm_first, mix=mix)
            memories.append(x)
        return memories

    def decode(
        self,
        x: torch.Tensor,
        memories: list[torch.Tensor],
        *,
        later: list[torch.Tensor] | None = None,
        mix: _Mix = attention,
    ) -> list[torch.Tensor]:
        """What each layer gives. ``later``: what all layers but the first read. Shapes: (..., target_len, d_model)."""
        keep = None
        if self.params.target_mask == "causal_target":
            keep = keep_causal(x.shape[-2], device=x.device)
        states = []
        for depth, layer in enumerate(self.decoder):
            readable = memories if later is None or depth == 0 else later
            memory = readable[depth if self.params.memory_depth == "same_depth" else -1]
            reads = depth == 0 or self.params.reading_layers == "every_decoder_layer"
            x = run_layer(
                layer,
                x,
                self.params.n_heads,
                memory=memory if reads else None,
                keep=keep,
                norm_first=self.norm_first,
                mix=mix,
            )
            states.append(x)
        return states

    def bare_decoder(self, x: torch.Tensor) -> torch.Tensor:
        """The decoder's layers without cross-attention, over one sequence. Shapes: (..., seq_len, d_model)."""
        keep = keep_causal(x.shape[-2], device=x.device)
        for layer in self.decoder:
            x = run_layer(layer, x, self.params.n_heads, keep=keep, norm_first=self.norm_first)
        return x

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """The last states of source and target in the chosen stack. Shapes: (..., both lengths, d_model)."""
        import torch

        if self.params.stack_kind == "encoder_only":
            return self.encode(tokens)[-1]
        if self.params.stack_kind == "decoder_only":
            return self.bare_decoder(tokens)
        source, target = tokens.split([self.params.source_len, self.params.target_len], dim=-2)
        memories = self.encode(source)
        return torch.cat((memories[-1], self.decode(target, memories)[-1]), dim=-2)


@dataclass
class _Pairs:
    """Attention that counts, for the first head, which keys have weight."""

    counted: list[int] = field(default_factory=list)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        logits = attention_logits(q, k)
        weights = softmax(logits if keep is None else mask_logits(logits, keep))
        self.counted.append(int((weights[0] > 0).sum()))
        return context(weights, v)


def _bare_decoder_error(model: _Model, tokens: torch.Tensor) -> float:
    """PyTorch's encoder layers with the decoder's weights and a causal mask, against the decoder's own layers."""
    import torch

    x = tokens
    hidden = ~keep_causal(x.shape[-2], device=x.device)  # there True is hidden
    for layer in model.decoder:
        theirs = torch.nn.TransformerEncoderLayer(
            model.params.d_model,
            model.params.n_heads,
            FFN_FACTOR * model.params.d_model,
            dropout=0.0,
            batch_first=True,
            norm_first=model.norm_first,
            device="meta",
        )
        own = layer["self_attention"]
        weights = {
            "self_attn.in_proj_weight": torch.cat([own[name].weight for name in ("W_q", "W_k", "W_v")]),
            "self_attn.in_proj_bias": x.new_zeros(3 * x.shape[-1]),
            "self_attn.out_proj.weight": own["W_o"].weight,
            "self_attn.out_proj.bias": x.new_zeros(x.shape[-1]),
        }
        for name, module in (
            ("linear1", layer["ffn"]["W_up"]),
            ("linear2", layer["ffn"]["W_down"]),
            ("norm1", layer["norm_self_attention"]),
            ("norm2", layer["norm_ffn"]),
        ):
            weights |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
        theirs.load_state_dict(weights, assign=True)
        mask = hidden if model.params.target_mask == "causal_target" else None
        x = theirs(x[None], src_mask=mask)[0]
    return _apart(x, model.bare_decoder(tokens))


def _apart(states: torch.Tensor, others: torch.Tensor) -> float:
    """The largest difference of any coordinate, in root mean squares of the others."""
    return float((states - others).abs().max() / others.square().mean().sqrt())


def _reach(change: torch.Tensor, n_source: int) -> Table:
    """Tokens are named "place letter", s of the source and t of the target: the axis shows the letter."""
    values = change.cpu().double().numpy()
    n = len(values)
    names = np.array([f"{place} {'s' if place < n_source else 't'}" for place in range(n)])
    rows, columns = np.indices(values.shape)
    return {
        "replaced_token": names[columns.ravel()],
        "state_of_token": names[rows.ravel()],
        "state_change_log10": np.log10(values.clip(10.0**FLOOR)).ravel().astype(np.float32),
    }
