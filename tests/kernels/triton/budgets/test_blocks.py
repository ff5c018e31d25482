"""Budgets of layers on blocks: no spills, and products on the tensor cores, of integers or, with
FP8, of bf16.
"""

import pytest
import torch
from quire.kernels.reference.gguf_blocks import row_bytes
from quire.kernels.reference.gguf_linear import TYPES
from quire.kernels.triton.blocks import BlockLinear
from quire.tests.kernels.triton.budget import Budget, bf16, combinations

DECODE = {80: (r"\bIMMA\b",), 90: (r"\bIMMA\b",)}
PROMPT = {80: (r"\bIMMA\b",), 90: (r"\bIGMMA\b",)}


def budget(
    type: str,
    num_rows: int,
    registers: int,
    contains: dict[int, tuple[str, ...]] | None = None,
    launches: int = 2,
    archs: tuple[int, ...] = (80, 90),
) -> Budget:
    blocks = torch.zeros(128, row_bytes(512, type), dtype=torch.uint8)
    layer = BlockLinear([blocks], [type], None, torch.bfloat16)
    return Budget(
        f"{type}, {num_rows} rows",
        lambda: layer(bf16(num_rows, 512)),
        registers,
        launches=launches,
        wide_loads=False,
        contains=contains or (DECODE if num_rows <= 16 else PROMPT),
        archs=archs,
    )


# few rows are summed in pieces
BUDGETS = [budget(type, 4, 160, launches=3) for type in TYPES] + [
    budget(type, 300, 224) for type in TYPES
]
FP8 = [
    budget("FP8_128", 4, 80, {80: (r"\bHMMA\b",), 90: (r"\bHMMA\b",)}, launches=1),
    budget("FP8_128", 300, 192, {80: (r"\bHMMA\b",), 90: (r"\bHGMMA\b",)}, launches=1),
    budget("FP8_32", 300, 144, {80: (r"\bHMMA\b",), 90: (r"\bHGMMA\b",)}, launches=1),
]
IN_FP8 = [
    budget("FP8_128_GROUP", 300, 248, {90: (r"\bQGMMA\b",)}, archs=(90,)),
    budget("FP8_128_TOKEN", 4, 80, {90: (r"\bHMMA\b",)}, archs=(90,)),
    budget("FP8_128_STATIC", 300, 248, {90: (r"\bQGMMA\b",)}, archs=(90,)),
    budget("FP8_32_GROUP", 50, 144, {90: (r"\bQGMMA\b",)}, archs=(90,)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "arch"), combinations(FP8), ids=str)
def test_fp8_keeps_numbers_that_are_subnormal(budget, arch):
    """They become fp32's on the way, so no product may flush them."""
    launches = budget.check(arch)
    assert not any(launch.count(r"\bFMUL\.FTZ\b") for launch in launches)


@pytest.mark.parametrize(("budget", "arch"), combinations(IN_FP8[:1]), ids=str)
def test_the_tensor_cores_multiply_fp8(budget, arch):
    budget.check(arch)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "arch"), combinations(IN_FP8[1:] + BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
