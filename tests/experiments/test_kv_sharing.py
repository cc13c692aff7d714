"""kv_sharing against the sizes and operations of the models written out by hand."""

import pytest

from engine.base import ParamsError
from engine.experiments import kv_sharing
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "kv_sharing"
# layers, model width, query heads, head width, FFN width, vocabulary, whether the embedding unembeds
SIZES = {
    "llama_3_8b": (32, 4096, 32, 128, 14336, 128256, False),
    "llama_2_70b": (80, 8192, 64, 128, 28672, 32000, False),
    "qwen3_4b": (36, 2560, 32, 128, 9728, 151936, True),
}
CASES = (
    ("llama_3_8b", 32, {}),
    ("llama_3_8b", 8, {"seq_len": 1000, "batch": 4}),
    ("llama_3_8b", 8, {"kv_reading": "repeated"}),
    ("llama_3_8b", 32, {"kv_reading": "repeated"}),  # nothing to repeat
    ("llama_3_8b", 4, {"cache_dtype": "float8"}),
    ("llama_3_8b", 2, {"cache_dtype": "float8", "kv_reading": "repeated"}),
    ("qwen3_4b", 8, {"seq_len": 512}),
    ("llama_2_70b", 1, {"n_gpus": 8}),
    ("llama_2_70b", 8, {"n_gpus": 8}),
    ("llama_2_70b", 8, {"n_gpus": 4}),
    ("llama_3_8b", 8, {"ffn_size": "widened"}),
)


def law(experiment: Experiment) -> None:
    for model, g, p in CASES:
        m = run(experiment, model=model, n_kv_heads=g, **p).metrics
        layers, d, h, d_k, d_ff, vocabulary, tied = SIZES[model]
        n, batch, gpus = p.get("seq_len", 8192), p.get("batch", 32), p.get("n_gpus", 1)
        if p.get("ffn_size") == "widened":
            d_ff += round(2 * (h - g) * d_k / 3)
            mha = run(experiment, model=model, n_kv_heads=h).metrics
            # three rows of the FFN for what two matrices lost: at most one and a half rows a layer are rounded away
            assert abs(m["parameters_of_model"] - mha["parameters_of_model"]) <= 1.5 * d * layers
        h, g, d_ff, vocabulary = h // gpus, max(1, g // gpus), d_ff // gpus, vocabulary // gpus
        matrices = 2 * d * d_k * (h + g)
        assert m["n_parameters"] == matrices
        assert m["projection_flop"] == 2 * layers * n * matrices
        assert m["score_flop"] == 4 * layers * h * n**2 * d_k  # whatever the number of KV heads
        assert m["attention_block_flop"] == m["projection_flop"] + m["score_flop"]
        linear = layers * (matrices + 3 * d * d_ff)
        assert m["prefill_flop"] == 2 * n * linear + m["score_flop"] + 2 * d * vocabulary
        assert m["decode_step_flop"] == 2 * batch * (linear + d * vocabulary) + 4 * layers * batch * h * n * d_k
        size = 1 if p.get("cache_dtype") == "float8" else 2
        cache = layers * batch * n * 2 * g * d_k * size
        assert m["model_cache_bytes"] == cache
        q_and_out = layers * batch * 2 * h * d_k * 2
        copies = cache + cache * h // g if p.get("kv_reading") == "repeated" and h > g else 0
        read = cache * h // g if copies else cache
        assert m["step_copied_bytes"] == copies
        assert m["step_attention_bytes"] == copies + read + q_and_out
        assert m["decode_attention_flop_per_byte"] == 4 * layers * batch * h * n * d_k / m["step_attention_bytes"]
        assert m["decode_step_bytes"] == m["step_attention_bytes"] + m["step_weight_bytes"]
        norms = layers * (2 * d + (2 * d_k if model == "qwen3_4b" else 0)) + d
        assert m["step_weight_bytes"] == 2 * (linear + d * vocabulary + norms)
        assert m["parameters_of_model"] == linear + norms + d * vocabulary * (1 if tied else 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("group_rows(q, k.shape[1]), k)", "group_rows(q[:, : k.shape[1]], k.shape[1]), k)"),  # a query for each KV head
        ("return copied + q.nbytes", "return q.nbytes"),  # copies that cost nothing
        ("copies.read + copies.written", "copies.written"),
        ('if name != "embedding" or shape.tied_embedding', 'if name != "embedding"'),
        ("(x @ W[1].mT) @ W[2]", "x @ W[1].mT"),  # two matrices of the FFN
        ('{"output": 1}, params.seq_len', "{}, params.seq_len"),  # logits for every token of a prompt
        ("round(lost / 3)", "round(lost / 2)"),
        ("shape.n_heads // params.n_gpus, q_len", "shape.n_heads, q_len"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


def test_the_tables_say_what_the_metrics_say():
    result = run(get(NAME), n_kv_heads=4)
    mha = run(get(NAME), n_kv_heads=32)
    table = result.tables["by_kv_heads"]
    for item, metric in (
        ("kv_cache", "model_cache_bytes"),
        ("bytes_of_a_step", "decode_step_bytes"),
        ("attention_matrices", "n_parameters"),
        ("flop_of_a_step", "decode_step_flop"),
        ("flop_of_a_prefill", "prefill_flop"),
    ):
        row = (table["bill_item"] == item) & (table["n_kv_heads"] == 4)
        assert table["relative_to_mha"][row] == result.metrics[metric] / mha.metrics[metric], item
    for share, item in (
        ("kv_cache_share", "kv_cache"),
        ("step_bytes_share", "bytes_of_a_step"),
        ("prefill_flop_share", "flop_of_a_prefill"),
    ):
        row = (table["bill_item"] == item) & (table["n_kv_heads"] == 4)
        assert result.metrics[share] == table["relative_to_mha"][row], share
    batches = result.tables["by_batch"]
    assert set(batches["sharing"]) == {"MHA", "GQA", "MQA"}
    for batch in kv_sharing.BATCHES[:3]:
        m = run(get(NAME), n_kv_heads=4, batch=batch).metrics
        row = (batches["batch"] == batch) & (batches["sharing"] == "GQA")
        assert batches["step_gib_per_token"][row] == pytest.approx(m["decode_step_bytes"] / batch / 2**30, rel=1e-12)
    gpus = result.tables["by_gpus"]
    for n_gpus in (1, 8, 32):
        row = (gpus["n_gpus"] == n_gpus) & (gpus["sharing"] == "MQA")
        assert gpus["cache_gib_on_gpu"][row] == 32 * 32 * 8192 * 2 * 128 * 2 / 2**30  # one KV head on every GPU


def test_refuses_what_cannot_be_divided():
    with pytest.raises(ParamsError, match="groups_divide_heads"):
        get(NAME).Params(model="qwen2_5_7b", n_kv_heads=8)
    with pytest.raises(ParamsError, match="gpus_divide_heads"):
        get(NAME).Params(n_gpus=64)
