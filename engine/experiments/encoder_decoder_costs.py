r"""An encoder-decoder counted from its modules: parameters by part, and what it computes to write a target.

Layers are built as PyTorch modules at full size without storage. Next to the encoder-decoder stands a *single stack*:
as many layers as the decoder has, without cross-attention, which reads the source in front of the target.

Writing a target of T tokens behind a source of S: the encoder reads the source in one pass, each decoder layer makes
keys and values of its outputs, then each of T steps takes one token through the decoder, which keeps what it computed
(``encoder_once``). With ``encoder_each_step`` encoder and source keys are computed again in every step, while the
decoder still keeps its own. The single stack reads the source in one pass and takes T steps of its own.

Operations are those of matrix products, a multiply-add counting two, counted while they run on shapes; nothing is saved
on masked pairs, and the product with the vocabulary is left out.

Sources: vaswani2017, sections 3.1 to 3.4 and table 3 (sizes of the base model, the defaults); pytorch-code,
``Transformer`` (biases in all matrices, a norm behind each stack).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, Table, choice, flag, number
from engine.encoder_decoder import LayerSizes, attend, build_layer, feed_forward, parts_of, project
from engine.operations import count_operations
from engine.watching import watching

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Params(BaseParams):
    d_model: int = number(512, low=64, high=4096, step=64)
    d_ff: int = number(2048, low=64, high=16384, step=64)
    n_encoder_layers: int = number(6, low=1, high=64)
    n_decoder_layers: int = number(6, low=1, high=64)
    matrix_biases: str = choice("ffn_biases", "all_biases", "no_biases")
    cross_sublayer: bool = flag(True)
    stack_norms: bool = flag(False)
    vocabulary: int = number(37000, low=256, high=262144)
    table_sharing: str = choice("one_table", "three_tables")
    source_len: int = number(64, low=1, high=2048, log2=True)
    target_len: int = number(16, low=1, high=256, log2=True)
    encoder_runs: str = choice("encoder_once", "encoder_each_step")


METRICS = (
    Metric("encoder_layer_parameters"),
    Metric("decoder_layer_parameters"),
    Metric("decoder_extra_parameters"),
    Metric("stacks_parameters"),
    Metric("seq2seq_parameters"),
    Metric("stack_norm_parameters"),
    Metric("step_matrix_share"),
    Metric("encoder_rerun_ratio"),
    Metric("encoder_writing_share"),
    Metric("over_stack_parameters"),
    Metric("over_stack_flop"),
    Metric("writing_flop", "flop"),
)
PLOTS = (
    Plot("layer_parts", table="parts", x="layer_part", y="part_parameters", by="seq2seq_layer", mark="bar"),
    Plot(
        "writing",
        table="writing",
        x="written_tokens",
        y="flop_so_far",
        by="writing_way",
        y_scale="log10",
        y_unit="flop",
    ),
)
BUDGET_S = 0.1

PART_NAMES = {
    "self_attention": "self_attention_part",
    "cross_attention": "cross_attention_part",
    "ffn": "ffn_part",
    "norms": "norms_part",
}
REPORT_EVERY = 16  # steps
HEADS = 1  # no count of this page depends on how the width is cut into heads


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**21


def run(params: Params, run: Run) -> Result:
    """Count both kinds of layers, both stacks with their tables, and the writing of a target.

    ``stacks_parameters``      all layers of both stacks, with a last norm of each where ``stack_norms``
    ``seq2seq_parameters``     with the tables; positions are sinusoids and have none
    ``step_matrix_share``      of the matrices of a decoder layer, what a step of one token multiplies with
    ``encoder_rerun_ratio``    operations with the encoder in every step, relative to once
    ``encoder_writing_share``  of the operations in the chosen way, what makes and offers the source
    ``over_stack_...``         encoder-decoder over single stack: parameters without tables, operations of the writing
    """
    run.progress(0.0)
    sizes = _sizes(params)
    encoder, decoder = build_layer(sizes, cross=False), build_layer(sizes, cross=params.cross_sublayer)
    parts = {"encoder_layer": parts_of(encoder), "decoder_layer": parts_of(decoder)}
    of_layer = {kind: sum(counted.values()) for kind, counted in parts.items()}
    stack_norms = _stack_norms(params)
    stacks = (
        params.n_encoder_layers * of_layer["encoder_layer"]
        + params.n_decoder_layers * of_layer["decoder_layer"]
        + stack_norms
    )
    single = params.n_decoder_layers * of_layer["encoder_layer"] + stack_norms // 2
    run.progress(0.1)
    writing = _write(params, encoder, decoder, run)
    source, steps = writing.source_flop, writing.step_flop
    again = params.encoder_runs == "encoder_each_step"
    chosen_source = source * (params.target_len if again else 1)
    metrics = {
        "encoder_layer_parameters": of_layer["encoder_layer"],
        "decoder_layer_parameters": of_layer["decoder_layer"],
        "decoder_extra_parameters": of_layer["decoder_layer"] - of_layer["encoder_layer"],
        "stacks_parameters": stacks,
        "seq2seq_parameters": stacks + _tables(params),
        "stack_norm_parameters": stack_norms,
        "step_matrix_share": writing.matrix_share,
        "encoder_rerun_ratio": (params.target_len * source + sum(steps)) / (source + sum(steps)),
        "encoder_writing_share": chosen_source / (chosen_source + sum(steps)),
        "over_stack_parameters": stacks / single,
        "over_stack_flop": (source + sum(steps)) / (writing.prompt_flop + sum(writing.single_flop)),
        "writing_flop": chosen_source + sum(steps),
    }
    tables = {"parts": _parts_table(parts), "writing": _writing_table(writing)}
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _sizes(params: Params) -> LayerSizes:
    return LayerSizes(
        params.d_model,
        HEADS,
        params.d_ff,
        attention_biases=params.matrix_biases == "all_biases",
        ffn_biases=params.matrix_biases != "no_biases",
    )


def _stack_norms(params: Params) -> int:
    """Of a norm behind each stack."""
    from torch import nn

    if not params.stack_norms:
        return 0
    norms = nn.ModuleList(nn.LayerNorm(params.d_model, device="meta") for _ in range(2))
    return sum(parameter.numel() for parameter in norms.parameters())


def _tables(params: Params) -> int:
    """Token vectors of source and target, and the output matrix: one parameter, or three."""
    import torch
    from torch import nn

    def table() -> nn.Parameter:
        return nn.Parameter(torch.empty(params.vocabulary, params.d_model, device="meta"))

    first = table()
    tables = nn.ParameterDict(
        {name: first if params.table_sharing == "one_table" else table() for name in ("source", "target", "output")}
    )
    return sum(parameter.numel() for parameter in tables.parameters())  # a shared one comes once


# --------------------------------------------------------------------------------------------------------------------
# Operations


class _Writing(NamedTuple):
    """Operations of the whole stacks, and the share of a decoder layer's matrices that a step uses."""

    source_flop: int
    step_flop: list[int]
    prompt_flop: int
    single_flop: list[int]
    matrix_share: float


def _write(params: Params, encoder: nn.ModuleDict, decoder: nn.ModuleDict, run: Run) -> _Writing:
    """One layer of each kind is run; all layers of a stack do the same work."""
    import torch

    heads, d_k, length = HEADS, params.d_model // HEADS, params.source_len
    source, token = (torch.empty(rows, params.d_model, device="meta") for rows in (length, 1))
    # the single stack does the same to the source
    encoding = _flop(_pass_rows, encoder, params, source) + _reading_flop(heads, length, d_k, length)
    offering = _flop(project, decoder["cross_attention"], source, heads) if params.cross_sublayer else 0
    asking = _reading_flop(heads, 1, d_k, length) if params.cross_sublayer else 0
    step, single_step = (_flop(_pass_rows, layer, params, token) for layer in (decoder, encoder))

    steps, single = [], []
    for done in range(params.target_len):
        if done % REPORT_EVERY == 0:
            run.progress(0.2 + 0.8 * done / params.target_len)
        steps.append(params.n_decoder_layers * (step + asking + _reading_flop(heads, 1, d_k, done + 1)))
        single.append(params.n_decoder_layers * (single_step + _reading_flop(heads, 1, d_k, length + done + 1)))
    return _Writing(
        source_flop=params.n_encoder_layers * encoding + params.n_decoder_layers * offering,
        step_flop=steps,
        prompt_flop=params.n_decoder_layers * encoding,
        single_flop=single,
        matrix_share=_multiplied(decoder, params, token) / sum(p.numel() for p in decoder.parameters() if p.dim() == 2),
    )


def _pass_rows(layer: nn.ModuleDict, params: Params, x: torch.Tensor) -> torch.Tensor:
    """Rows through all matrices of a layer that apply to them. What is read from keys and values is counted apart."""
    k, _ = project(layer["self_attention"], x, HEADS)
    x = x + attend(layer["self_attention"], x, k, k, mix=_unread)
    if "cross_attention" in layer:
        x = x + attend(layer["cross_attention"], x, k, k, mix=_unread)
    return x + feed_forward(layer["ffn"], x)


def _unread(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: None) -> torch.Tensor:
    """What is of the shape of a context."""
    return q


@functools.lru_cache(maxsize=4096)
def _reading_flop(heads: int, rows: int, d_k: int, kv_len: int) -> int:
    """q·k and weights · v."""
    import torch

    q, k, v = (torch.empty(heads, *shape, device="meta") for shape in ((rows, d_k), (d_k, kv_len), (kv_len, d_k)))
    return _flop(lambda: torch.bmm(torch.bmm(q, k), v))


def _multiplied(layer: nn.ModuleDict, params: Params, token: torch.Tensor) -> int:
    """Numbers of the matrices that one token is multiplied with."""
    import torch

    met = 0

    def seen(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        nonlocal met
        met += args[1].numel() if func.overloadpacket.__name__ == "mm" else 0

    with torch.no_grad(), watching(seen), count_operations():  # which keeps what has no storage from being computed
        _pass_rows(layer, params, token)
    return met


def _flop(work: Callable[..., object], *args: object) -> int:
    import torch

    with torch.no_grad(), count_operations() as counted:
        work(*args)
    return counted.products


# --------------------------------------------------------------------------------------------------------------------
# Tables


def _parts_table(parts: dict[str, dict[str, int]]) -> Table:
    return {
        "layer_part": np.array([PART_NAMES[part] for counted in parts.values() for part in counted]),
        "seq2seq_layer": np.array([kind for kind, counted in parts.items() for _ in counted]),
        "part_parameters": np.array([n for counted in parts.values() for n in counted.values()], dtype=float),
    }


def _writing_table(writing: _Writing) -> Table:
    steps = np.cumsum(writing.step_flop)
    tokens = np.arange(1, len(steps) + 1)
    series = {
        "encoder_once": writing.source_flop + steps,
        "encoder_each_step": writing.source_flop * tokens + steps,
        "single_stack": writing.prompt_flop + np.cumsum(writing.single_flop),
    }
    return {
        "written_tokens": np.tile(tokens, len(series)),
        "writing_way": np.repeat([*series], len(tokens)),
        "flop_so_far": np.concatenate([*series.values()]).astype(float),
    }
