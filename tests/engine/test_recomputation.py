"""Computing again changes no gradient, and costs what PyTorch's own checkpoint costs."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from engine.attention import attention
from engine.operations import count_operations
from engine.recomputation import RUN_BLOCK, again, attention_without_weights
from engine.transformer_block import block, decoder
from tests.engine.test_transformer_block import SIZES, model, tokens_of

KEEP = torch.ones(7, 7, dtype=torch.bool).tril()


def gradients(run_block, unwanted=()):
    outer, blocks = model(SIZES)
    weights = {("outer", n): w for n, w in outer.items()}
    weights |= {(i, n): w for i, of_block in enumerate(blocks) for n, w in of_block.items()}
    for name, weight in weights.items():
        weight.requires_grad_(name not in unwanted)
    logits = decoder(outer, blocks, SIZES, tokens_of(SIZES), KEEP, run_block)
    with count_operations() as counted:
        logits.square().sum().backward()
    return {name: w.grad for name, w in weights.items()}, counted.products


@pytest.mark.parametrize("name", ["attention_weights", "whole_blocks"])
@pytest.mark.parametrize("unwanted", [(), (("outer", "embedding"), (0, "W_q"), (1, "W_up"))])
def test_gradients_are_those_of_what_was_kept(name, unwanted):
    kept, few = gradients(block, unwanted)
    found, more = gradients(RUN_BLOCK[name], unwanted)
    assert more > few
    for key, expected in kept.items():
        if expected is None:
            assert found[key] is None
        else:  # float64; the same products in another order
            torch.testing.assert_close(found[key], expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())


def test_attention_without_its_weights_takes_five_products_backward():
    q, k, v = (torch.randn(1, 2, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with count_operations() as forward:
        out = attention_without_weights(q, k, v, keep=KEEP)
    with count_operations() as backward:
        found = torch.autograd.grad(out.sum(), (q, k, v))
    assert 2 * backward.products == 5 * forward.products
    expected = torch.autograd.grad(attention(q, k, v, keep=KEEP).sum(), (q, k, v))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_whole_block_again_costs_what_pytorchs_checkpoint_costs():
    def theirs(weights, sizes, x, keep):
        return checkpoint(block, weights, sizes, x, keep, use_reentrant=False, early_stop=False)

    def stopping(weights, sizes, x, keep):
        return checkpoint(block, weights, sizes, x, keep, use_reentrant=False)

    kept = gradients(block)[1]
    again_, reference, early = (gradients(f)[1] - kept for f in (RUN_BLOCK["whole_blocks"], theirs, stopping))
    assert again_ == reference
    # PyTorch's default ends once all inputs of the backward pass are there: it skips the last product of each block
    last_products = 2 * 14 * SIZES.d_ff * SIZES.d_model * SIZES.n_layers
    assert early == reference - last_products


def test_what_wants_no_gradient_gets_none():
    x, y = torch.ones(3, requires_grad=True), torch.ones(3)
    out = again(lambda x, y: x * y, x, y)
    out.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
    assert y.grad is None
