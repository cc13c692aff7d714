r"""Parameters of a decoder of any sizes, counted part by part from its modules, beside what is written on whiteboards.

Each kind of block is built once from PyTorch's modules, at full size and without storage, and its parameters are added
up as many times as the model has such layers. Beside the count stand :math:`12\,l\,d^2`, the same with one table of
:math:`V d` added, and the sum written out:

.. math:: l\,(2\,d\,h\,d_k+2\,d\,h_{kv}\,d_k+m\,d\,d_{ff}\,E)+t\,V d

with m matrices in an FFN, E experts, and t tables, one if the unembedding is the table of token vectors. For a mixture
its routers are added. What the sum leaves out are vectors (norms and biases) and learned positions.

Sources: nanogpt-sizing (the parts of GPT-2 small); pearce2024 (which parameters scaling laws count).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.base import BaseParams, Metric, Plot, Problem, Result, Run, choice, flag, number
from engine.built_decoder import BuiltShape, count, estimates


@dataclass(frozen=True)
class Params(BaseParams):
    n_layers: int = number(32, low=1, high=128)
    d_model: int = number(4096, low=64, high=16384, step=64)
    n_heads: int = number(32, low=1, high=128)
    n_kv_heads: int = number(32, low=1, high=128)
    d_k: int = number(128, low=8, high=256, step=8)
    d_ff: int = number(11008, low=64, high=65536, step=64)
    ffn: str = choice("gated", "plain")
    n_experts: int = number(1, low=1, high=256, log2=True)
    active_experts: int = number(1, low=1, high=16)
    vocabulary: int = number(32000, low=256, high=262144)
    tied_embedding: bool = flag(False)
    matrix_biases: str = choice("no_biases", "qkv_biases", "all_biases")
    norm_vectors: str = choice("gain_alone", "gain_and_bias")
    learned_positions: int = number(0, low=0, high=131072)

    def rules(self) -> Iterator[Problem]:
        if self.n_heads % self.n_kv_heads:
            values: dict[str, object] = {"n_heads": self.n_heads}
            yield Problem("rule", "n_kv_heads", self.n_kv_heads, rule="groups_divide_heads", values=values)
        if self.active_experts > self.n_experts:
            values = {"n_experts": self.n_experts}
            yield Problem("rule", "active_experts", self.active_experts, rule="active_within_experts", values=values)


METRICS = (
    Metric("model_parameters"),
    Metric("whiteboard_ratio"),
    Metric("written_out_ratio"),
    Metric("whiteboard_vocabulary_ratio"),
    Metric("attention_parameters"),
    Metric("ffn_parameters"),
    Metric("table_parameters"),
    Metric("embedding_share"),
    Metric("attention_parameter_share"),
    Metric("ffn_parameter_share"),
    Metric("vector_share"),
    Metric("active_parameters"),
    Metric("listed_ratio"),
)
PLOTS = (
    Plot("parts", table="by_part", x="parameter_part", y="parameter_share", mark="bar"),
    Plot("widths", table="by_width", x="d_model", y="parameter_share", by="parameter_part", x_scale="log2"),
    Plot("estimates", table="estimates", x="parameter_estimate", y="estimate_ratio", mark="bar"),
)
BUDGET_S = 0.05

PART_NAMES = {
    "embedding": "embedding_of_model",
    "unembedding": "unembedding_of_model",
    "positions": "positions_of_model",
    "attention": "attention_of_model",
    "ffn": "ffn_of_model",
    "experts": "experts_of_model",
    "router": "router_of_model",
    "norms": "norms_of_model",
    "biases": "biases_of_model",
}
WIDTHS = tuple(2**n for n in range(8, 15))


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**21


def run(params: Params, run: Run) -> Result:
    """Count the model, then models of other widths with the same depth, vocabulary and proportions.

    ``..._ratio``          an estimate relative to the count
    ``ffn_parameters``     of all experts, with the router
    ``table_parameters``   the table of token vectors, and the unembedding where it is another matrix
    ``vector_share``       of norms and biases
    ``active_parameters``  those that a token meets, the table included
    ``listed_ratio``       numbers in the state dict, where a tied matrix stands twice, relative to the parameters
    """
    run.progress(0.0)
    shape = _shape(params)
    counted = count(shape)
    written = {name: value / counted.total for name, value in estimates(shape).items()}
    shares = counted.shares
    metrics = {
        "model_parameters": counted.total,
        "whiteboard_ratio": written["whiteboard"],
        "written_out_ratio": written["written_out"],
        "whiteboard_vocabulary_ratio": written["whiteboard_vocabulary"],
        "attention_parameters": counted.parts["attention"],
        "ffn_parameters": sum(counted.parts[part] for part in ("ffn", "experts", "router")),
        "table_parameters": counted.parts["embedding"] + counted.parts["unembedding"],
        "embedding_share": shares["table_parameters"],
        "attention_parameter_share": shares["attention_parameters"],
        "ffn_parameter_share": shares["ffn_parameters"],
        "vector_share": (counted.parts["norms"] + counted.parts["biases"]) / counted.total,
        "active_parameters": counted.active,
        "listed_ratio": counted.listed / counted.total,
    }
    run.progress(0.2)
    by_width = {width: count(_of_width(shape, width)).shares for width in WIDTHS}
    present = [part for part in PART_NAMES if counted.parts[part]]
    tables = {
        "by_part": {
            "parameter_part": np.array([PART_NAMES[part] for part in present]),
            "parameter_share": np.array([counted.parts[part] / counted.total for part in present]),
        },
        "by_width": {
            "d_model": np.repeat(WIDTHS, len(shares)),
            "parameter_part": np.tile([*shares], len(WIDTHS)),
            "parameter_share": np.array([share for of_width in by_width.values() for share in of_width.values()]),
        },
        "estimates": {
            "parameter_estimate": np.array([*written]),
            "estimate_ratio": np.array([*written.values()]),
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _shape(params: Params) -> BuiltShape:
    sparse = params.n_experts > 1
    return BuiltShape(
        source="",
        n_layers=params.n_layers,
        d_model=params.d_model,
        n_heads=params.n_heads,
        n_kv_heads=params.n_kv_heads,
        d_k=params.d_k,
        d_ff=params.d_ff,
        vocabulary=params.vocabulary,
        tied_embedding=params.tied_embedding,
        qkv_bias=params.matrix_biases == "qkv_biases",
        biases=params.matrix_biases == "all_biases",
        gated=params.ffn == "gated",
        layer_norm=params.norm_vectors == "gain_and_bias",
        n_positions=params.learned_positions,
        n_experts=params.n_experts if sparse else 0,
        active_experts=params.active_experts if sparse else 0,
        d_expert=params.d_ff,
    )


def _of_width(shape: BuiltShape, d_model: int) -> BuiltShape:
    """The same with every width in proportion. Heads become wider rather than more: only their product counts."""

    def scaled(width: int) -> int:
        return max(1, round(width * d_model / shape.d_model))

    return dataclasses.replace(
        shape, d_model=d_model, d_k=scaled(shape.d_k), d_ff=scaled(shape.d_ff), d_expert=scaled(shape.d_expert)
    )
