"""Many models in one product against each by itself, and the losses against PyTorch's, in float64."""

import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from engine.side_by_side import bare_layer_norm, look_up, times, token_losses

MODELS, BATCH, N, WIDTH, OUT = 3, 2, 5, 4, 6
EXACT = 1e-12  # float64: some ten operations on numbers near 1


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def test_a_product_for_each_model():
    x, W = drawn(MODELS, BATCH, N, WIDTH), drawn(MODELS, WIDTH, OUT)
    alone = torch.stack([x_m @ W_m for x_m, W_m in zip(x, W, strict=True)])
    torch.testing.assert_close(times(x, W), alone, rtol=0, atol=EXACT)


@pytest.mark.parametrize("shape", [(MODELS, BATCH), (MODELS, BATCH, N)])
def test_each_model_looks_up_in_its_own_table(shape):
    table = drawn(MODELS, 7, WIDTH)
    index = torch.randint(7, shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(look_up(table, index), torch.stack([t[i] for t, i in zip(table, index, strict=True)]))


@pytest.mark.parametrize("own", [True, False])
def test_losses_are_pytorchs(own):
    logits = drawn(MODELS, BATCH, N, OUT)
    targets = torch.randint(OUT, (MODELS, BATCH, N), generator=torch.Generator().manual_seed(0))
    targets = targets if own else targets[0]
    wanted = cross_entropy(logits.flatten(0, 2), targets.expand(MODELS, BATCH, N).flatten(), reduction="none")
    torch.testing.assert_close(token_losses(logits, targets).flatten(), wanted, rtol=0, atol=EXACT)


def test_the_bare_norm_is_over_features():
    x = 2 + 3 * drawn(MODELS, BATCH, N, WIDTH)
    torch.testing.assert_close(bare_layer_norm(x), layer_norm(x, (WIDTH,)), rtol=0, atol=EXACT)
