"""engine/attention.py against PyTorch's own attention, autograd, closed forms and exact arithmetic."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
import torch.nn.functional as F

from engine.attention import (
    SCALE_RULES,
    attention,
    attention_logits,
    context,
    entropy_nats,
    jacobian_norm,
    mask_logits,
    row_norm,
    scale_value,
    softmax,
    softmax_gradient,
    softmax_jacobian,
    unit_norm,
)

EXACT = 1e-13  # float64 keeps 1e-16; sums of at most some hundred terms and a few steps lose two to three digits


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std


def qkv(batch=2, n_heads=3, q_len=5, kv_len=7, d_k=16, d_v=11):
    return (
        normal(batch, n_heads, q_len, d_k),
        normal(batch, n_heads, kv_len, d_k, seed=1),
        normal(batch, n_heads, kv_len, d_v, seed=2),
    )


# --------------------------------------------------------------------------------------------------------------------
# The forward steps, against torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("sizes", [{}, {"d_k": 1}, {"kv_len": 1}, {"q_len": 1}, {"d_v": 16, "q_len": 7}, {"d_k": 65}])
def test_is_scaled_dot_product_attention(sizes):
    q, k, v = qkv(**sizes)
    torch.testing.assert_close(attention(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(
    ("rule", "settings", "scale"),
    [
        ("none", {}, 1.0),
        ("inv_d_k", {}, 1 / 16),
        ("factor", {"factor": 0.5}, 0.5 / 4),
        ("learnable_tau", {"tau": 2.5}, 0.4),
    ],
)
def test_a_rule_is_the_scale_argument_of_pytorch(rule, settings, scale):
    q, k, v = qkv()
    want = F.scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(attention(q, k, v, rule=rule, **settings), want, rtol=EXACT, atol=EXACT)
    assert scale_value(rule, 16, **settings) == pytest.approx(scale, rel=1e-15)


def test_cosine_is_pytorchs_cosine_similarity_over_tau():
    q, k, v = qkv()
    cosine = F.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    torch.testing.assert_close(attention_logits(q, k, "cosine", tau=0.1), cosine / 0.1, rtol=EXACT, atol=EXACT)
    want = F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, scale=10.0)
    torch.testing.assert_close(attention(q, k, v, rule="cosine", tau=0.1), want, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(attention(3 * q, 5 * k, v, rule="cosine", tau=0.1), want, rtol=EXACT, atol=EXACT)


def test_a_mask_is_pytorchs_mask():
    q, k, v = qkv(q_len=6, kv_len=6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v, keep=causal), want, rtol=EXACT, atol=EXACT)
    some = normal(2, 1, 6, 6, seed=3) > 0
    some[..., 0] = True  # no row without a key
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=some)
    torch.testing.assert_close(attention(q, k, v, keep=some), want, rtol=EXACT, atol=EXACT)
    weights = softmax(mask_logits(attention_logits(q, k), some))
    assert torch.all(weights.masked_select(~some) == 0)


def test_a_row_masked_throughout_is_nan_as_in_pytorch():
    logits = mask_logits(normal(2, 4), torch.tensor([[True], [False]]))
    weights = softmax(logits)
    assert torch.equal(weights.isnan(), torch.softmax(logits, dim=-1).isnan())
    assert weights[1].isnan().all()
    assert jacobian_norm(weights)[1].isnan()


def test_fewer_leading_axes_give_the_same():
    q, k, v = qkv()
    torch.testing.assert_close(attention(q[1, 2], k[1, 2], v[1, 2]), attention(q, k, v)[1, 2], rtol=EXACT, atol=EXACT)


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"got 'sqrt'.*inv_sqrt_d_k"):
        scale_value("sqrt", 64)
    assert {scale_value(rule, 1) for rule in SCALE_RULES} == {1.0}  # at d_k = 1 all rules are the same


# --------------------------------------------------------------------------------------------------------------------
# Softmax and what is measured on its weights


@pytest.mark.parametrize("std", [0.0, 1.0, 8.0, 64.0])
def test_softmax_is_pytorchs_and_does_not_see_a_shift(std):
    logits = normal(50, 33, std=std)
    torch.testing.assert_close(softmax(logits), torch.softmax(logits, dim=-1), rtol=1e-13, atol=0)
    # a shift of 1024 rounds the logits to multiples of 2^-43: that much may change, relative to each weight
    torch.testing.assert_close(softmax(logits + 1024), softmax(logits), rtol=2**-42 * 4, atol=0)


def test_weights_of_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 1e4 - 1, -1e4], [-3e38, 0.0, 3e38]])
    assert softmax(logits).isfinite().all()
    assert softmax(logits).sum(dim=-1).tolist() == pytest.approx([1, 1])


def test_entropy_of_uniform_one_hot_and_between():
    uniform, one_hot = torch.full((64,), 1 / 64, dtype=torch.float64), torch.eye(64, dtype=torch.float64)[3]
    half = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    assert entropy_nats(uniform).item() == pytest.approx(math.log(64), rel=1e-14)
    assert entropy_nats(one_hot).item() == 0
    assert entropy_nats(half).item() == pytest.approx(math.log(2), rel=1e-14)
    weights = softmax(normal(20, 9))
    want = torch.distributions.Categorical(probs=weights).entropy()
    torch.testing.assert_close(entropy_nats(weights), want, rtol=EXACT, atol=0)


def test_context_of_uniform_weights_is_the_mean_value():
    v = normal(7, 4)
    torch.testing.assert_close(context(softmax(torch.zeros(3, 7, dtype=torch.float64)), v)[1], v.mean(dim=0))


@pytest.mark.parametrize("std", [0.1, 1.0, 4.0])
def test_jacobian_is_autograds(std):
    logits = normal(9, std=std)
    want = torch.autograd.functional.jacobian(lambda z: torch.softmax(z, dim=-1), logits)
    got = softmax_jacobian(softmax(logits))
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    assert got.sum(dim=-1).abs().max() < EXACT  # a shift of all logits changes nothing
    assert torch.linalg.eigvalsh(got).max() <= 0.5 + EXACT


def test_jacobian_norm_in_closed_form():
    def norm(*weights: float) -> float:
        return jacobian_norm(torch.tensor(weights, dtype=torch.float64)).item()

    assert norm(*[1 / 64] * 64) == pytest.approx(math.sqrt(63) / 64, rel=1e-14)  # uniform: √(n-1)/n
    assert norm(0.5, 0.5, 0, 0) == pytest.approx(0.5, rel=1e-14)  # a tie of two: the largest possible
    assert norm(0, 1, 0) == 0  # one-hot
    assert norm(1) == 0
    assert norm(0.9, 0.1) == pytest.approx(2 * 0.09, rel=1e-14)  # two keys: 2 w (1 - w)


@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
def test_jacobian_norm_is_the_norm_of_the_matrix(std):
    weights = softmax(normal(200, 17, std=std))
    want = softmax_jacobian(weights).flatten(1).norm(dim=-1)
    # the matrix itself cancels in 1 - w: at std 3 the largest weight reaches 1 - 1e-3, three digits of 1e-16 are gone
    torch.testing.assert_close(jacobian_norm(weights), want, rtol=1e-12, atol=0)


def exact_jacobian_norm(logits: list[float]) -> float:
    """In decimal arithmetic with 400 digits, straight from the definition of the matrix."""
    with localcontext() as arithmetic:
        arithmetic.prec = 400
        powers = [Decimal(z).exp() for z in logits]
        weights = [p / sum(powers) for p in powers]
        entries = [(w * ((i == j) - u)) ** 2 for i, w in enumerate(weights) for j, u in enumerate(weights)]
        return float(sum(entries).sqrt())


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 2.0**-53), (torch.float32, 2.0**-24)])
@pytest.mark.parametrize("std", [1.0, 8.0, 20.0])
def test_jacobian_norm_keeps_its_digits_on_saturated_rows(dtype, rounding, std):
    logits = normal(40, 8, std=std).to(dtype)
    want = torch.tensor([exact_jacobian_norm(row) for row in logits.tolist()], dtype=torch.float64)
    got = jacobian_norm(softmax(logits)).double()
    # a logit of size x makes exp wrong by x roundings, and some ten steps follow; nothing cancels
    torch.testing.assert_close(got, want, rtol=(float(logits.abs().max()) * 2 + 10) * rounding, atol=0)
    assert std < 20 or want.min() < 1e-12  # rows on which a difference of numbers near 1 would leave nothing


def test_jacobian_norm_is_zero_only_where_the_weights_are():
    def norms(gaps: list[float], dtype: torch.dtype) -> list[float]:
        return jacobian_norm(softmax(torch.tensor([[0.0, -gap] for gap in gaps], dtype=dtype))).tolist()

    assert norms([17.0], torch.float16)[0] > 0
    assert norms([17.5], torch.float16)[0] == 0
    assert norms([87.0], torch.float32)[0] == pytest.approx(2 * math.exp(-87), rel=1e-5)  # exp(-87) rounded at size 87
    assert norms([104.5], torch.float32)[0] == 0
    assert norms([700.0], torch.float64)[0] == pytest.approx(2 * math.exp(-700), rel=1e-12)


@pytest.mark.parametrize("std", [0.1, 1.0, 4.0])
def test_softmax_gradient_is_autograds(std):
    logits, upstream = normal(6, 12, std=std).requires_grad_(), normal(6, 12, seed=5)
    torch.softmax(logits, dim=-1).backward(upstream)
    torch.testing.assert_close(softmax_gradient(softmax(logits), upstream), logits.grad, rtol=1e-11, atol=1e-15)


def test_softmax_gradient_keeps_its_digits_in_float32_on_saturated_rows():
    logits, upstream = normal(100, 16, std=30), normal(100, 16, seed=5)
    want = row_norm(softmax_gradient(softmax(logits.float().double()), upstream.float().double()))
    got = row_norm(softmax_gradient(softmax(logits.float()), upstream.float())).double()
    assert want.min() < 1e-20
    # exp of a logit gap of 200 is wrong by 200 roundings of 6e-8; ten times that where two terms happen to cancel
    kept = want > 1e-36  # float32 weights below 1e-38 lose digits
    torch.testing.assert_close(got[kept], want[kept], rtol=1e-4, atol=0)
    two_keys = torch.tensor([0.0, -40.0])
    grad = softmax_gradient(softmax(two_keys), torch.tensor([1.0, 3.0]))
    assert grad.tolist() == pytest.approx([-2 * math.exp(-40), 2 * math.exp(-40)], rel=1e-5)


def test_row_norm_does_not_underflow():
    x = normal(30, 7)
    torch.testing.assert_close(row_norm(x), x.norm(dim=-1), rtol=EXACT, atol=0)
    small = (x * 1e-30).float()
    torch.testing.assert_close(row_norm(small), x.norm(dim=-1).float() * 1e-30, rtol=1e-6, atol=0)
    assert row_norm(torch.zeros(2, 3)).tolist() == [0, 0]
    assert row_norm(torch.full((100,), 1000.0, dtype=torch.float16)).item() == pytest.approx(1e4)  # squares are 1e6


def test_unit_norm():
    x = normal(4, 9)
    torch.testing.assert_close(unit_norm(x), F.normalize(x, dim=-1), rtol=EXACT, atol=EXACT)
    assert unit_norm(torch.zeros(3)).isnan().all()
