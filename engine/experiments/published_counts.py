r"""Parameters of published models, counted from modules built to their sizes: in all, active, and without the tables.

Each kind of block is built once, at full size and without storage; a model is what stands outside its layers and so
many blocks of each kind. Three counts go by the name of N: all parameters (what has to be stored), the active ones
(what one token meets, in a mixture of experts), and those without the tables (what some scaling laws count). Beside
them stand the size in the name, two estimates from a whiteboard, and the numbers in a state dict, which lists a tied
matrix twice.

Sources: deepseek-v3-weights (671B, active 36.6B with the unembedding); jiang2024, abstract (47B and 13B); gemma-2b-36
(2,506,172,416, and 3,030,460,416 from a state dict); qwen25-card (7.61B, 6.53B without embedding); gpt-2-readme (117M
and 124M); pearce2024 (what scaling laws count).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from engine.base import BaseParams, Metric, Plot, Result, Run, choice, number
from engine.built_decoder import BUILT, BuiltShape, Counted, count, estimates


@dataclass(frozen=True)
class Params(BaseParams):
    model: str = choice("llama_2_7b", *(name for name in BUILT if name != "llama_2_7b"))
    table_sharing: str = choice("published_tables", "one_table", "two_tables")
    vocabulary_factor: float = number(1.0, low=0.25, high=8.0, step=0.25)


METRICS = (
    Metric("model_parameters"),
    Metric("name_ratio"),
    Metric("whiteboard_ratio"),
    Metric("active_parameters"),
    Metric("active_without_lookup"),
    Metric("without_tables"),
    Metric("listed_parameters"),
    Metric("whiteboard_vocabulary_ratio"),
    Metric("written_out_ratio"),
    Metric("embedding_share"),
    Metric("attention_parameter_share"),
    Metric("ffn_parameter_share"),
    Metric("vector_share"),
    Metric("attention_to_square"),
)
PLOTS = (
    Plot("names", table="by_model", x="model", y="count_over_name", by="parameters_counted", mark="bar"),
    Plot("estimates", table="by_estimate", x="model", y="estimate_ratio", by="parameter_estimate", mark="bar"),
    Plot("parts", table="by_part", x="model", y="parameter_share", by="parameter_part", mark="bar"),
)
BUDGET_S = 0.05

DRAWN_MODELS = ("gpt_2_small", "gemma_2b", "llama_2_7b", "llama_3_8b", "mixtral_8x7b", "deepseek_v3")


def memory_bytes(params: Params) -> int:
    """Tensors have no storage; what is left is Python's own."""
    return 2**21


def run(params: Params, run: Run) -> Result:
    """Count the chosen model, and beside it some others.

    ``name_ratio``            all parameters, relative to the size in the name
    ``active_parameters``     those that one token meets, of the routed experts as many as it uses
    ``active_without_lookup`` without the table of token vectors, unless the unembedding is the same matrix
    ``without_tables``        neither table, unembedding nor learned positions
    ``listed_parameters``     numbers in the state dict, where a tied matrix stands twice
    ``attention_to_square``   matrices of attention, relative to 4 d² a layer
    """
    built = {name: _with_tables(shape, params) for name, shape in BUILT.items()}
    names = list(dict.fromkeys((*DRAWN_MODELS, params.model)))
    counts = {}
    for done, name in enumerate(names):
        run.progress(done / len(names))
        counts[name] = count(built[name])
    shape, counted = built[params.model], counts[params.model]
    shares, written = counted.shares, _ratios(shape, counted)
    metrics = {
        "model_parameters": counted.total,
        "name_ratio": counted.total / (1e9 * shape.named_billions),
        "whiteboard_ratio": written["whiteboard"],
        "active_parameters": counted.active,
        "active_without_lookup": _without_lookup(shape, counted),
        "without_tables": _without_tables(counted),
        "listed_parameters": counted.listed,
        "whiteboard_vocabulary_ratio": written["whiteboard_vocabulary"],
        "written_out_ratio": written["written_out"],
        "embedding_share": shares["table_parameters"],
        "attention_parameter_share": shares["attention_parameters"],
        "ffn_parameter_share": shares["ffn_parameters"],
        "vector_share": (counted.parts["norms"] + counted.parts["biases"]) / counted.total,
        "attention_to_square": counted.parts["attention"] / (4 * shape.n_layers * shape.d_model**2),
    }
    ratios = {name: _ratios(built[name], counts[name]) for name in names}
    parts = {name: counts[name].shares for name in names}
    over_name = {
        name: {
            "all_counted": counts[name].total,
            "active_counted": counts[name].active,
            "without_tables_counted": _without_tables(counts[name]),
        }
        for name in names
    }
    tables = {
        "by_model": {
            "model": np.repeat(names, 3),
            "parameters_counted": np.tile([*over_name[params.model]], len(names)),
            "count_over_name": np.array(
                [n / (1e9 * built[name].named_billions) for name in names for n in over_name[name].values()]
            ),
        },
        "by_estimate": {
            "model": np.repeat(names, len(written)),
            "parameter_estimate": np.tile([*written], len(names)),
            "estimate_ratio": np.array([ratio for name in names for ratio in ratios[name].values()]),
        },
        "by_part": {
            "model": np.repeat(names, len(shares)),
            "parameter_part": np.tile([*shares], len(names)),
            "parameter_share": np.array([share for name in names for share in parts[name].values()]),
        },
    }
    return Result({name: float(value) for name, value in metrics.items()}, tables)


def _with_tables(shape: BuiltShape, params: Params) -> BuiltShape:
    """The model with tables for so many times its tokens, as published, as one matrix, or as two."""
    tied = shape.tied_embedding if params.table_sharing == "published_tables" else params.table_sharing == "one_table"
    vocabulary = round(params.vocabulary_factor * shape.vocabulary)
    return dataclasses.replace(shape, tied_embedding=tied, vocabulary=vocabulary)


def _without_lookup(shape: BuiltShape, counted: Counted) -> int:
    """Active parameters; a table that is tied multiplies as the unembedding does, and stays."""
    return counted.active - (0 if shape.tied_embedding else counted.parts["embedding"])


def _without_tables(counted: Counted) -> int:
    return counted.total - sum(counted.parts[part] for part in ("embedding", "unembedding", "positions"))


def _ratios(shape: BuiltShape, counted: Counted) -> dict[str, float]:
    return {name: value / counted.total for name, value in estimates(shape).items()}
