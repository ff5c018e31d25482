"""Budgets of int8 and int4 layers: no spills, integer products on the tensor cores."""

import pytest
import torch
from quire.kernels.triton.quantized import QuantizedLinear
from quire.tests.kernels.triton.budget import Budget, bf16, combinations

DECODE = {80: (r"\bIMMA\b",), 90: (r"\bIMMA\b",)}
PROMPT = {80: (r"\bIMMA\b",), 90: (r"\bIGMMA\b",)}


def budget(bits: int, num_rows: int, registers: int) -> Budget:
    layer = QuantizedLinear(torch.ones(128, 512).bfloat16(), None, bits)
    return Budget(
        f"int{bits}, {num_rows} rows",
        lambda: layer(bf16(num_rows, 512)),
        registers,
        launches=3 if num_rows <= 16 else 2,  # few rows are summed in pieces
        wide_loads=False,
        contains=DECODE if num_rows <= 16 else PROMPT,
    )


BUDGETS = [budget(4, 4, 56)]
OTHERS = [budget(8, 4, 56), budget(8, 300, 184), budget(4, 300, 136)]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "arch"), combinations(OTHERS), ids=str)
def test_other_budgets(budget, arch):
    budget.check(arch)
