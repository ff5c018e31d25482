"""Budgets of the RMS norms."""

import pytest
from quire.kernels.triton import norm
from quire.tests.kernels.triton.budget import Budget, bf16, combinations

BUDGETS = [
    Budget(
        "rms_norm, H = 896", lambda: norm.rms_norm(bf16(64, 896), bf16(896), 1e-6), registers=40
    ),
    Budget(
        "rms_norm, heads of D = 128",
        lambda: norm.rms_norm(bf16(64, 20, 128)[:, 16:18], bf16(128), 1e-6),
        registers=40,
    ),
    Budget(
        "fused_add_rms_norm, H = 3584",
        lambda: norm.fused_add_rms_norm(bf16(64, 3584), bf16(64, 3584), bf16(3584), 1e-6),
        registers=64,
    ),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
