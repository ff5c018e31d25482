"""A kernel from outside that returns another shape or dtype is named; others are left alone."""

from __future__ import annotations

import pytest
import torch
from quire.executor.plugins import PluginFault
from quire.executor.result_checks import RESULTS, check_results
from quire.kernels import registry
from quire.kernels.registry import register, select
from quire.tests.kernels import cases


@pytest.fixture
def registered():
    names = []

    def add(op: str, kernel) -> None:
        kernel.__module__ = "checked_kernels"
        register(op, name="mine")(kernel)
        names.append(op)

    yield add
    for op in names:
        registry.unregister(op, "mine")


def test_a_wrong_result_is_named(registered):
    registered("silu_and_mul", lambda x: x[:, ::2].sigmoid()[:, ::2])
    registered("rms_norm", lambda x, weight, eps: x.double())
    registered("gelu_tanh_and_mul", lambda x: None)
    ops = select("cpu", torch.float32)
    check_results(ops)
    x = torch.randn(3, 8)
    problem = "the module checked_kernels failed: its implementation 'mine' of "
    with pytest.raises(
        PluginFault, match=rf"{problem}silu_and_mul returns \[3, 2\] torch.float32, "
    ):
        ops.silu_and_mul(x)
    with pytest.raises(PluginFault, match=r"\[3, 8\] torch.float64, not \[3, 8\] torch.float32"):
        ops.rms_norm(x, torch.ones(8), 1e-6)
    with pytest.raises(PluginFault, match=r"returns NoneType, not \[3, 4\]"):
        ops.gelu_tanh_and_mul(x)


def test_a_right_one_returns_what_it_did(registered):
    registered("silu_and_mul", lambda x: x[:, :4] * 2)
    ops = select("cpu", torch.float32)
    check_results(ops)
    x = torch.randn(3, 8)
    assert torch.equal(ops.silu_and_mul(x), x[:, :4] * 2)


def test_kernels_of_the_package_are_not_wrapped():
    ops, checked = select("cpu", torch.float32), select("cpu", torch.float32)
    check_results(checked)
    assert all(getattr(ops, op) is getattr(checked, op) for op in RESULTS)


@pytest.mark.parametrize("op", sorted(op for op in RESULTS if hasattr(cases, op)))
def test_the_expected_results_are_those_of_the_reference(op):
    [reference] = (one for one in registry.implementations(op) if one.name == "reference")

    def compare(*args):
        result = reference.function(*args)
        assert (tuple(result.shape), result.dtype) == RESULTS[op](*args)
        return result

    for case in getattr(cases, op)(torch.bfloat16):
        case.run(compare)
