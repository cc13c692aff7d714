"""attention_backends: what is kept and made by PyTorch's implementations on the CPU, against hand counts."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.base import ParamsError
from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "attention_backends"
SMALL = {"seq_len": 64, "n_heads": 2, "d_k": 16}
N, D, H = 64, 16, 2


def law(experiment: Experiment) -> None:
    m = run(experiment, **SMALL).metrics
    assert m["fused_taken"] == 1
    assert m["kept_bytes"] == 4 * H * (4 * N * D + N)  # q, k, v, the output and the log-sum-exp
    assert m["math_kept_bytes"] == 4 * H * (3 * N * D + N * N)  # q, k, v and the weights
    assert m["largest_tensor_bytes"] == 4 * H * N * D
    assert m["math_largest_tensor_bytes"] == 4 * H * N * N
    assert 0 < m["output_difference"] < 1e-5  # float32, two orders of summing
    assert m["taken_time_s"] > 0
    assert m["math_time_s"] > 0
    narrow = run(experiment, **SMALL, asked="narrow_values").metrics
    assert narrow["fused_taken"] == 0
    assert narrow["kept_bytes"] == narrow["math_kept_bytes"]
    assert narrow["output_difference"] == 0
    assert run(experiment, **SMALL, asked="dropout_on_weights").metrics["fused_taken"] == 0
    one = run(experiment, **SMALL, queries_at_once="one").metrics
    assert one["math_largest_tensor_bytes"] < m["math_largest_tensor_bytes"]
    masked = run(experiment, **SMALL, asked="mask_tensor").metrics
    assert masked["kept_bytes"] == m["kept_bytes"] + 4 * N * N  # the mask, made a number for each pair
    causal = run(experiment, **SMALL, asked="is_causal").metrics
    assert causal["kept_bytes"] == m["kept_bytes"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stack.enter_context(sdpa_kernel(SDPBackend.MATH))", "pass"),
        ('params.d_k // 2 if params.asked == "narrow_values"', 'params.d_k if params.asked == "narrow_values"'),
        ('options["dropout_p"] = 0.1', "pass"),
        ("if not func.is_view", "if func.is_view"),
        ('1 if params.queries_at_once == "one" else seq_len', "seq_len"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("number_format", ["bfloat16", "float16"])
def test_formats(number_format):
    m = run(get(NAME), **SMALL, number_format=number_format).metrics
    assert m["kept_bytes"] == H * (2 * 4 * N * D + 4 * N)


def test_the_choice_is_left_as_it_was_and_so_are_random_numbers():
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    run(get(NAME), **SMALL, asked="dropout_on_weights")
    assert torch.rand(1) == wanted
    assert torch.backends.cuda.flash_sdp_enabled()
    q = torch.ones(1, 1, 4, 8)
    assert scaled_dot_product_attention(q, q, q).shape == q.shape


def test_training_takes_the_backward_pass_along():
    assert run(get(NAME), **SMALL, training=True).metrics["kept_bytes"] == 4 * H * (4 * N * D + N)


def test_refusals():
    params = get(NAME).Params
    with pytest.raises(ParamsError, match="too_many_logits_to_time"):
        params(seq_len=2048, n_heads=16)
    with pytest.raises(ParamsError, match="is_causal_hides_from_one_query"):
        params(asked="is_causal", queries_at_once="one")
