"""Budgets of layers on blocks: no spills, and integer products on the tensor cores."""

import pytest
import torch
from quire.kernels.reference.gguf_blocks import row_bytes
from quire.kernels.reference.gguf_linear import TYPES
from quire.kernels.triton.blocks import BlockLinear
from quire.tests.kernels.triton.budget import Budget, bf16, combinations

DECODE = {80: (r"\bIMMA\b",), 90: (r"\bIMMA\b",)}
PROMPT = {80: (r"\bIMMA\b",), 90: (r"\bIGMMA\b",)}


def budget(type: str, num_rows: int, registers: int) -> Budget:
    blocks = torch.zeros(128, row_bytes(512, type), dtype=torch.uint8)
    layer = BlockLinear([blocks], [type], None, torch.bfloat16)
    return Budget(
        f"{type}, {num_rows} rows",
        lambda: layer(bf16(num_rows, 512)),
        registers,
        launches=2,
        wide_loads=False,
        contains=DECODE if num_rows <= 16 else PROMPT,
    )


BUDGETS = [budget(type, 4, 160) for type in TYPES] + [budget(type, 300, 224) for type in TYPES]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
