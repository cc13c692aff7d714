"""The same seed on an accelerator: the CPU's numbers, within the rounding of float32."""

import pytest

from engine import devices, registry
from engine.base import make_run
from tests.experiments.test_common import DTYPE_MATTERS, NAMES, small

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


@pytest.mark.skipif(not ACCELERATORS, reason="this machine has no accelerator: nothing was compared with the CPU")
@pytest.mark.parametrize("name", NAMES if ACCELERATORS else ["every experiment"])
@pytest.mark.parametrize("device", ACCELERATORS or ["none"])
def test_a_seed_means_the_same_numbers_as_on_the_cpu(device, name):
    assert not differences(name, device)
