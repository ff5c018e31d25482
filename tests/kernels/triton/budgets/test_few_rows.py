"""Budgets of products of few rows: tensor cores, weights copied by 16 bytes without passing through
registers, and programs small enough for four on a multiprocessor.
"""

import pytest
import torch
from quire.kernels.triton import few_rows
from quire.tests.kernels.triton.budget import Budget, bf16, combinations, compile_launches, f32

CONTAINS = dict.fromkeys((80, 90), (r"\bHMMA\b", r"\bLDGSTS\S*\.128\b"))
REGISTERS = 65536 // few_rows.PROGRAMS * 132 // 128  # of a thread, so that four programs fit
SHARED = {80: 40 * 1024, 90: 56 * 1024}  # bytes of a program: 160 KB and 224 KB for four


def call(rows: int, inputs: int, outputs: int, *, norm=False, gate="", residual=False, make=bf16):
    weight, bias = make(outputs, inputs), make(outputs)
    counters = few_rows.make_counters(weight)
    norm = (make(inputs), 1e-6) if norm else None
    return lambda: few_rows.multiply_tiles(
        make(rows, inputs),
        weight,
        bias,
        counters,
        norm,
        gate,
        make(rows, outputs) if residual else None,
    )


BUDGETS = [
    Budget(
        "norm, 896 x 1152", call(1, 896, 1152, norm=True), REGISTERS, SHARED[80], contains=CONTAINS
    ),
    Budget(
        "4 rows, norm and gate, 3584 x 37888",
        call(4, 3584, 37888, norm=True, gate="silu"),
        REGISTERS,
        SHARED[90],
        contains=CONTAINS,
        archs=(90,),
    ),
    Budget(
        "16 rows, residual, 4864 x 896",
        call(16, 4864, 896, residual=True),
        REGISTERS,
        SHARED[80],
        contains=CONTAINS,
    ),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    for launch in budget.check(arch):
        print(launch)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
def test_nothing_spills_in_fp32(rows):
    some = call(rows, 896, 9728, norm=True, gate="gelu", make=f32)
    (launch,) = compile_launches(some, 90)
    assert launch.stack == 0, str(launch)


def test_tiles_depend_on_the_weight_alone():
    def of(inputs: int, outputs: int) -> tuple[int, int]:
        tile = few_rows._tile(inputs, outputs, 2)
        return tile["COLUMNS"], -(-inputs // tile["PIECE"])

    shapes = (896, 1152), (896, 896), (896, 9728), (4864, 896), (3584, 37888), (18944, 3584)
    assert [of(*shape) for shape in shapes] == [
        (16, 3),
        (16, 3),
        (16, 1),
        (16, 10),
        (32, 1),
        (16, 3),
    ]


def test_rows_are_chosen_by_the_weights_bytes():
    small, large = torch.empty(2, 2**19), torch.empty(2**21, 2**11, device="meta")
    chosen = [
        [few_rows.is_for_few_rows(rows, weight, has_norm) for rows in (0, 1, 3, 4, 5, 16, 17)]
        for weight in (small, large)
        for has_norm in (False, True)
    ]
    without_norm = [False, True, True, True, True, True, False]
    assert chosen == [
        without_norm,
        [False, True, False, False, False, False, False],
        without_norm,
        [False, True, True, True, False, False, False],
    ]
