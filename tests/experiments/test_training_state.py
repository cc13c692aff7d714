"""training_state against the bytes of the formats by hand, and PyTorch's own optimizers."""

import pytest
import torch

from engine.base import ParamsError
from engine.experiments.training_state import RECIPES, SHARDED
from engine.registry import Experiment, get
from engine.training import OPTIMIZERS
from tests.harness import assert_law_catches, run

NAME = "training_state"
# weight, gradient, master copy, and one moment
FORMATS = {
    "all_float32": (4, 4, 0, 4),
    "master_and_float32_gradients": (2, 4, 4, 4),
    "master_and_bfloat16_gradients": (2, 2, 4, 4),
    "all_bfloat16": (2, 2, 0, 2),
}
N_MOMENTS = {"adam": 2, "sgd": 1}
LLAMA = 6_738_415_616


def law(experiment: Experiment) -> None:
    for recipe in RECIPES:
        weight, gradient, master, moment = FORMATS[recipe]
        for optimizer, n_moments in N_MOMENTS.items():
            for level, sharded in enumerate(SHARDED):
                for gpus in (2, 16):
                    m = run(
                        experiment,
                        training_recipe=recipe,
                        optimizer=optimizer,
                        sharded_states=sharded,
                        data_parallel_gpus=gpus,
                    ).metrics
                    parts = [gpus if level >= wanted else 1 for wanted in (1, 2, 3)]
                    expected = (master + n_moments * moment) / parts[0] + gradient / parts[1] + weight / parts[2]
                    assert m["state_bytes_per_parameter"] == expected, (recipe, optimizer, sharded, gpus)
                    assert m["model_state_bytes"] == LLAMA * expected
                    assert m["state_to_weights"] == expected / 2
        m = run(experiment, training_recipe=recipe, trained="adapters", adapter_rank=4).metrics
        adapters = 32 * 2 * 4 * (4096 + 4096)  # beside W_q and W_v of every layer
        assert m["trained_parameters"] == adapters
        of_trained = weight + gradient + master + 2 * moment
        assert m["model_state_bytes"] == adapters * of_trained + LLAMA * weight
    m = run(experiment, trained="adapters", sharded_states="weights_sharded", data_parallel_gpus=8).metrics
    assert m["frozen_bytes_per_parameter"] == 4 / 8
    shared = run(experiment, model="llama_3_8b", trained="adapters", adapter_rank=4).metrics["trained_parameters"]
    assert shared == 32 * 4 * (4096 + 4096 + 4096 + 1024)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gradient = gradient.float()", "gradient = gradient"),
        ("own.float() if with_master else own", "own"),
        ('("first", "second", "velocity")', '("first", "velocity")'),
        ("_share(gradient, gpus).clone() if level >= 2", "_share(gradient, gpus) if level >= 2"),  # a view keeps all
        ("flat[: len(flat) // gpus]", "flat"),
        ('"master": [stepped] if with_master else [],', '"master": [],'),
        ("for width in (matrix.in_features, matrix.out_features)", "for width in (matrix.in_features,)"),
    ],
)
def test_law_holds_and_catches_a_broken_engine(old, new):
    assert_law_catches(law, NAME, old, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_optimizers_keep_what_pytorch_keeps(dtype):
    """As many numbers in the same format, but for a counter of steps."""
    for name, theirs in (("adam", torch.optim.AdamW), ("sgd", lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))):
        weight = torch.zeros(10, 7, dtype=dtype, requires_grad=True)
        weight.grad = torch.ones_like(weight)
        optimizer = theirs([weight])
        optimizer.step()
        kept = [t for key, t in optimizer.state[weight].items() if key != "step"]
        ours = OPTIMIZERS[name]([weight], 1e-3)
        ours.step()
        tensors = [t for value in vars(ours).values() if isinstance(value, list) for t in value if t is not weight]
        assert sorted(map(str, (t.dtype for t in kept))) == sorted(map(str, (t.dtype for t in tensors)))
        assert sum(t.nbytes for t in kept) == sum(t.nbytes for t in tensors)


def test_the_step_moves_the_weights():
    """What is counted took part in a step: a master copy ends where the optimizer left it."""
    module = get(NAME).run.__globals__
    flat, gradient = torch.ones(128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    params = get(NAME).Params()
    kept = module["_kept"](params, "master_and_bfloat16_gradients", flat, gradient, "optimizer_sharded", 2)
    assert kept["master"][0].dtype == torch.float32
    assert (kept["master"][0] < 1).all()
    assert len(kept["master"][0]) == 64
    assert (flat == 1).all()  # the input stays as it is


def test_refuses_shares_that_are_not_equal():
    with pytest.raises(ParamsError, match="gpus_power_of_two"):
        get(NAME).Params(data_parallel_gpus=3)
