"""autocast_types against what each tensor of a block must hold, and CUDA's operations as the card tells them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.registry import Experiment, get
from tests.harness import assert_law_catches, run

NAME = "autocast_types"
ROOT = Path(__file__).parents[2]


def kept_bytes(p: dict) -> dict[str, int]:
    """What the backward pass of the block needs, tensor by tensor, with bytes of a number by regime.

    n tokens of width d, h heads: every product needs both factors, softmax its result, GELU and a norm what they were
    given; a norm two float32 numbers a row, in the type of its input.
    """
    n, d, h, length = p["batch"] * p["seq_len"], p["d_model"], p["n_heads"], p["seq_len"]
    rows = n * h * length
    size = {"float32": 4, "autocast": 2, "cast_weights": 2}[p["precision_regime"]]
    residual = 4 if p["precision_regime"] == "autocast" else size  # the stream and what the norms give out
    products = n * d * size  # the first norm's result, as the projection takes it
    products += 3 * n * d * size  # q, k, v: one tensor of the projection, and what the products take of it
    return {"products": products, "rows": rows * size, "norms": n * d * residual}


def law(experiment: Experiment) -> None:
    for regime, weight, state, residual, softmax in (
        ("float32", 32, 16, 32, 32),
        ("autocast", 32, 16, 32, 16),
        ("cast_weights", 16, 8, 16, 16),
    ):
        for sizes in ({}, {"batch": 1, "seq_len": 32, "d_model": 32, "n_heads": 2}):
            given = {"precision_regime": regime} | sizes
            p = experiment.Params.defaults() | given
            result = run(experiment, **given)
            got = result.metrics
            assert got["weight_bits"] == got["weight_gradient_bits"] == weight
            assert got["state_bytes_per_weight"] == state
            assert got["residual_bits"] == residual
            assert got["softmax_bits"] == got["qk_bits"] == softmax
            assert got["loss_bits"] == 32
            d = p["d_model"]
            # autocast keeps each weight once more, in 16 bits, for the product of the backward pass
            assert got["kept_cast_weight_bytes"] == (2 * 12 * d * d if regime == "autocast" else 0)
            table = result.tables["kept"]
            mine = table["precision_regime"] == regime
            assert 1024 * table["kept_kib_of"][mine].sum() == pytest.approx(got["kept_activation_bytes"])
            least = kept_bytes(p)
            by_part = dict(zip(table["kept_tensor"][mine], 1024 * table["kept_kib_of"][mine], strict=True))
            assert by_part["kept_attention"] >= least["products"] + least["rows"]
            # the scale's own copy of the rows, q·k, and the transposed context come on top, no more
            assert by_part["kept_attention"] <= 2 * (least["products"] + least["rows"]) + least["norms"]
    tables = run(experiment).tables
    out = {
        given: dict(zip(tables[given]["torch_operation"], tables[given]["given_out_bits"], strict=True))
        for given in ("given_float32", "given_low")
    }
    low_anyway = {name for name, bits in out["given_float32"].items() if bits == 16}
    float32_anyway = {name for name, bits in out["given_low"].items() if bits == 32}
    assert low_anyway == {"torch_linear", "torch_matmul"}  # on the CPU, torch 2.13
    assert float32_anyway == {"torch_cross_entropy", "torch_add_to_float32"}
    assert run(experiment).metrics["operations_to_low"] == 2
    assert run(experiment).metrics["operations_back_to_float32"] == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('enabled=regime == "autocast"', "enabled=False"),
        ('low if regime == "cast_weights" else torch.float32', "torch.float32"),
        ("storage.data_ptr() not in own and", ""),  # the weights themselves count
        ('"kept_cast_weights" if _comes_from_a_weight(tensor) else part', "part"),
        ("for _ in range(2)]\n    numbers", "for _ in range(1)]\n    numbers"),  # one moment, as of momentum
        ('("low_in", other.to(low))', '("low_in", other)'),
    ],
)
def test_law_holds_and_catches_a_broken_experiment(old, new):
    assert_law_catches(law, NAME, old, new)


def test_a_wide_block_with_few_tokens_keeps_more_under_autocast_than_without():
    sizes = {"batch": 1, "seq_len": 16, "d_model": 256}
    kept = {
        r: run(get(NAME), precision_regime=r, **sizes).metrics["kept_activation_bytes"] for r in ("autocast", "float32")
    }
    assert kept["autocast"] > 2 * kept["float32"]


@pytest.mark.parametrize("regime", ["autocast", "float32", "cast_weights"])
def test_the_state_is_as_large_as_the_one_that_adam_itself_makes(regime):
    weight = torch.ones(64, 64, dtype=torch.bfloat16 if regime == "cast_weights" else torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=regime == "autocast"):
        loss = (torch.ones(2, 64, dtype=weight.dtype) @ weight).float().square().mean()
    loss.backward()
    adam = torch.optim.Adam([weight])
    adam.step()
    moments = [value for name, value in adam.state[weight].items() if name != "step"]
    size = sum(t.nbytes for t in (weight, weight.grad, *moments)) / weight.numel()
    assert run(get(NAME), precision_regime=regime).metrics["state_bytes_per_weight"] == size


def test_cuda_sends_more_operations_back_to_float32_as_the_card_says():
    # Tensors without storage go through the same dispatcher, also where there is no GPU. In a process of its own:
    # loading what they need takes seconds, and autograd on them ends the process.
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from engine.experiments.autocast_types import _operations
with FakeTensorMode(), torch.no_grad():
    other = torch.empty(8, 8, device="cuda")
    x = torch.empty(8, 8, device="cuda", dtype=torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    print(*sorted(n for n, operation in _operations(x, other).items() if operation().dtype == torch.float32))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    back = "add_to_float32 cross_entropy exp layer_norm rms_norm softmax sum"
    assert done.stdout.split() == [f"torch_{name}" for name in back.split()]
