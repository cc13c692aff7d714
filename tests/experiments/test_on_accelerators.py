"""The same seed on an accelerator: the CPU's numbers, within the rounding of float32.

Where there is none, a pretended one stands in, which shows all but how real hardware rounds.
"""

import pytest
import torch

from engine import devices, registry
from engine.base import make_run
from tests.elsewhere import DEVICE, Elsewhere
from tests.experiments.test_common import DTYPE_MATTERS, NAMES, equal, settings
from tests.harness import small

# Runs that take times ask the device for its clock, which a pretended one lacks: test_timing.py has stand-ins for it.
UNTIMED = [name for name in NAMES if not registry.get(name).measures_time]
ACCELERATORS = [device.id for device in devices.available() if device.kind != "cpu"]


def differences(name, device, seed=0):
    """The metrics in which a seed's numbers on a device are not seed 0's on the CPU."""
    experiment = registry.get(name)
    params = experiment.Params(**small(experiment))
    there = experiment.run(params, make_run(seed, device)).metrics
    here = experiment.run(params, make_run(0)).metrics
    return [
        metric
        for metric in sorted(set(here) - set(DTYPE_MATTERS.get(name, {})))
        # both round to float32, each in an order of its own: twice what float32 may differ from float64 in the suite
        if there[metric] != pytest.approx(here[metric], rel=4e-3, abs=4e-3 if metric.endswith("_share") else 2e-5)
    ]


def test_the_comparison_tells_one_seed_from_another():
    assert not differences("qk_variance", "cpu")
    assert differences("qk_variance", "cpu", seed=1)


@pytest.mark.parametrize("name", UNTIMED)
def test_a_run_keeps_its_tensors_on_its_device(name):
    experiment = registry.get(name)
    for setting in settings(experiment):
        params = experiment.Params(**setting)
        here = experiment.run(params, make_run(3))
        with Elsewhere():
            there = experiment.run(params, make_run(3, str(DEVICE)))
        assert equal(name, here, there), setting


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda x: x + torch.ones(3), "on one device"),
        (lambda x: torch.cat((x, torch.ones(3))), "on one device"),
        (lambda x: torch.ones(3)[x > 0], "on one device"),
        (lambda x: x.numpy(), "use Tensor.cpu"),
        (lambda x: x.double(), "float64"),
        (lambda x: torch.randn(3, device=x.device, generator=torch.Generator()), "generator"),
    ],
)
def test_the_pretended_accelerator_refuses_what_real_ones_refuse(fault, words):
    with Elsewhere():
        x = torch.arange(3.0).to(DEVICE)
        assert x.device == DEVICE
        assert (2 * x + torch.tensor(1.0)).cpu().tolist() == [1, 3, 5]
        assert x[torch.tensor([2])].tolist() == [2]
        with pytest.raises((RuntimeError, TypeError), match=words):
            fault(x)


@pytest.mark.skipif(not ACCELERATORS, reason="no accelerator here: how one rounds was not compared with the CPU")
@pytest.mark.parametrize("name", NAMES if ACCELERATORS else ["every experiment"])
@pytest.mark.parametrize("device", ACCELERATORS or ["none"])
def test_a_seed_means_the_same_numbers_as_on_the_cpu(device, name):
    assert not differences(name, device)
