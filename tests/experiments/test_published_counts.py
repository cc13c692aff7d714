"""published_counts against the totals that were published for these models."""

import pytest

from engine.built_decoder import BUILT
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run
from tests.released_parameters import RELEASED_PARAMETERS

NAME = "published_counts"
# in 10⁹, as their makers say: all, and active
BILLIONS = {"mixtral_8x7b": (47, 13), "deepseek_v2": (236, 21), "deepseek_v3": (671, 37)}


def law(experiment: Experiment) -> None:
    for model, parameters in RELEASED_PARAMETERS.items():
        m = run(experiment, model=model).metrics
        assert m["model_parameters"] == parameters == m["active_parameters"], model
    for model, (total, active) in BILLIONS.items():
        m = run(experiment, model=model).metrics
        assert round(m["model_parameters"] / 1e9) == total, model
        # of DeepSeek-V3 they leave the lookup table out, a billion; of the others that changes no digit
        assert round(m["active_without_lookup"] / 1e9) == active, model
        assert m["active_parameters"] - m["active_without_lookup"] == BUILT[model].vocabulary * BUILT[model].d_model
    m = run(experiment, model="deepseek_v3").metrics
    assert round(m["active_without_lookup"] / 1e9, 1) == 36.6  # with the unembedding, says its documentation
    m = run(experiment, model="gemma_2b").metrics
    assert m["listed_parameters"] == 3_030_460_416  # summed over the state dict by a reader
    assert m["active_without_lookup"] == m["model_parameters"]  # its table multiplies as the unembedding
    m = run(experiment, model="qwen2_5_7b").metrics
    assert round(m["without_tables"] / 1e9, 2) == 6.53  # as its card says
    untied = run(experiment, model="gemma_2b", table_sharing="two_tables").metrics
    assert untied["model_parameters"] == untied["listed_parameters"] == 3_030_460_416
    tied = run(experiment, model="llama_3_8b", table_sharing="one_table").metrics
    assert tied["model_parameters"] == 8_030_261_248 - 128256 * 4096
    wider = run(experiment, model="llama_2_7b", vocabulary_factor=4).metrics
    assert wider["model_parameters"] == 6_738_415_616 + 3 * 2 * 32000 * 4096
    for model in BUILT:
        m = run(experiment, model=model).metrics
        shares = m["embedding_share"] + m["attention_parameter_share"] + m["ffn_parameter_share"] + m["vector_share"]
        positions = 1024 * 768 / m["model_parameters"] if model == "gpt_2_small" else 0
        assert shares + positions == pytest.approx(1, abs=1e-12), model
        assert m["written_out_ratio"] == pytest.approx(1 - m["vector_share"] - positions, abs=1e-12), model


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"active_parameters": counted.active', '"active_parameters": counted.total'),
        ('"listed_parameters": counted.listed', '"listed_parameters": counted.total'),
        ('params.table_sharing == "one_table"', "shape.tied_embedding"),
        ("round(params.vocabulary_factor * shape.vocabulary)", "shape.vocabulary"),
        ("(0 if shape.tied_embedding else", "(0 if not shape.tied_embedding else"),
        ('("embedding", "unembedding", "positions")', '("embedding", "positions")'),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_square_fits_heads_that_fill_the_width():
    assert run(get(NAME), model="llama_2_7b").metrics["attention_to_square"] == 1
    assert run(get(NAME), model="gemma_7b").metrics["attention_to_square"] == pytest.approx(16 * 256 / 3072)
