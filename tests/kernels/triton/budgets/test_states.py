"""Budgets of layers that keep a state: sizes of a 4B with Gated DeltaNet, and of Granite 4 Tiny."""

import pytest
import torch
from quire.kernels.triton import states
from quire.tests.kernels.state_rows_cases import Row, states_metadata
from quire.tests.kernels.triton.budget import Budget, bf16, combinations, f32

ROWS = [Row(1, 9, place) for place in range(8)]


def multiply() -> torch.Tensor:
    x, gate = bf16(64, 16, 512).chunk(2, -1)
    return states.multiply(x, gate, "sigmoid")


def delta_rule(decays_rows: bool = False) -> torch.Tensor:
    heads = bf16(8, 64, 128)
    gates = bf16(8, 32, 128) if decays_rows else bf16(8, 32), bf16(8, 32)
    weights = f32(32), f32(32, 128) if decays_rows else f32(32)
    state = f32(9, 32, 128, 128)
    return states.gated_delta_rule(
        heads[:, :16],
        heads[:, 16:32],
        heads[:, 32:],
        *gates,
        *weights,
        state,
        states_metadata(ROWS),
        False,
    )


def scan() -> torch.Tensor:
    x, dt, b, c = bf16(8, 48, 64), bf16(8, 48), bf16(8, 1, 128), bf16(8, 1, 128)
    weights = f32(48), f32(48), f32(48)
    return states.selective_scan(x, dt, b, c, *weights, f32(9, 48, 64, 128), states_metadata(ROWS))


def conv() -> torch.Tensor:
    args = bf16(8, 8192), bf16(8192, 4), None, bf16(9, 3, 8192), states_metadata(ROWS), "silu"
    return states.short_conv(*args)


BUDGETS = [
    Budget("multiply", multiply, registers=64),
    Budget(
        "gated_rms_norm",
        lambda: states.gated_rms_norm(bf16(64, 4096), bf16(64, 4096), bf16(128), 1e-6, 128, False),
        registers=64,
    ),
    # weights lie tap by tap, and programs of one warp's width have narrow loads
    Budget("short_conv", conv, registers=64, launches=2, wide_loads=False),
    Budget("gated_delta_rule", delta_rule, registers=168),
    Budget("gated_delta_rule of rows", lambda: delta_rule(True), registers=168),
    Budget("selective_scan", scan, registers=168),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
