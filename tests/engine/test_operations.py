"""count_operations against PyTorch's own counter and against counting by hand."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.operations import UncountedOperation, count_operations


def test_products_agree_with_pytorchs_counter():
    a, b, many = torch.randn(5, 7), torch.randn(7, 3), torch.randn(4, 5, 7)

    def work():
        return a @ b, many @ b, many @ many.mT, torch.einsum("bij,jk->bik", many, b)

    with FlopCounterMode(display=False) as theirs:
        work()
    with count_operations() as ours:
        work()
    assert ours.products == theirs.get_total_flops() == 2 * (5 * 7 * 3 + 2 * 4 * 5 * 7 * 3 + 4 * 5 * 7 * 5)
    assert ours.total == ours.products


def test_elementwise_work_counts_the_numbers_that_come_out():
    a, b = torch.randn(5, 1), torch.randn(1, 3)
    with count_operations() as counted:
        ((a + b) * 2).tanh()
    assert (counted.products, counted.elementwise, counted.transcendental) == (0, 30, 15)


def test_what_has_no_rule_is_refused():
    a = torch.randn(3)
    with pytest.raises(UncountedOperation, match=r"aten\.cumsum"), count_operations():
        a.cumsum(0)


def test_counting_ends_with_the_block():
    a = torch.randn(3)
    with count_operations() as counted:
        a + a
    a + a
    assert counted.total == 3


def test_counting_does_not_import_the_compiler():
    code = """
import sys, torch
from engine.operations import count_operations
x = torch.ones(2, 2)
with count_operations() as counted:
    x @ x
assert counted.products == 16
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
