"""Budgets of products of fixed tiles: tensor cores, and weights copied without passing through
registers.
"""

import pytest
from quire.kernels.triton import product
from quire.tests.kernels.triton.budget import Budget, bf16, combinations, compile_launches, f32

CONTAINS = {80: (r"\bHMMA\b", r"\bLDGSTS\S*\.128\b"), 90: (r"\bHGMMA\b", r"\bLDGSTS\S*\.128\b")}


def call(rows: int, inputs: int, outputs: int):
    multiply = product.pack_linear(bf16(outputs, inputs), bf16(outputs))
    return lambda: multiply(bf16(rows, inputs))


BUDGETS = [
    Budget("one row, 4864 x 896", call(1, 4864, 896), 168, 74 * 1024, contains=CONTAINS),
    Budget("512 rows, 896 x 9728", call(512, 896, 9728), 255, 100 * 1024, contains=CONTAINS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    for launch in budget.check(arch):
        print(launch)


@pytest.mark.slow
def test_nothing_spills_in_fp32():
    multiply = product.pack_linear(f32(896, 896), None)
    for rows in (1, 512):
        (launch,) = compile_launches(lambda rows=rows: multiply(f32(rows, 896)), 90)
        assert launch.stack == 0, str(launch)


def test_pieces_depend_on_the_weight_alone():
    assert [product.piece_of(*shape) for shape in ((4864, 896), (896, 9728), (18944, 3584))] == [
        256,
        448,
        3840,
    ]
