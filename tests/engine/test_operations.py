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


def test_reductions_count_the_numbers_that_go_in():
    a = torch.randn(5, 3)
    with count_operations() as counted:
        a.sum(-1), a.amax(-1)
    assert counted.elementwise == 2 * 15


def test_a_backward_pass_is_counted_as_well():
    x, W = torch.randn(5, 7, requires_grad=True), torch.randn(3, 7, requires_grad=True)
    grad = torch.ones(5, 3)
    with count_operations() as forward:
        y = x @ W.mT
    with count_operations() as backward:
        torch.autograd.grad(y, (x, W), grad)
    assert (forward.products, backward.products) == (2 * 5 * 7 * 3, 2 * 2 * 5 * 7 * 3)


def test_bytes_are_those_that_go_in_and_come_out():
    a, b = torch.randn(5, 7), torch.randn(7, 3).half()
    with count_operations() as counted:
        c = a @ b.float()
        (c + 1).view(15)  # a view is free
    assert counted.product_bytes == 4 * (5 * 7 + 7 * 3 + 5 * 3)
    assert counted.other_bytes == (2 + 4) * 7 * 3 + 2 * 4 * 5 * 3


def test_shapes_without_storage_are_those_that_pytorch_gives():
    def work(a, b, grad):
        c = (a / b + 1) * a - b
        d = (-c).masked_fill(b == 0, 0.0)
        e = torch.nn.functional.silu(d).exp().rsqrt() + (a.half() * 2)
        return c, d, e, torch.autograd.grad(e.sum(-1), a, grad)[0]

    found = []
    for device in ("cpu", "meta"):
        a = torch.ones(2, 5, 1, requires_grad=True, device=device)
        b, grad = torch.ones(5, 3, device=device), torch.ones(2, 5, device=device)
        with count_operations() as counted:
            found.append([(t.shape, t.dtype) for t in work(a, b, grad)] + [counted])
    assert found[0] == found[1]


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
