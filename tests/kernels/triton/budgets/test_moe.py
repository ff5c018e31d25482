"""Budgets of mixtures of experts."""

from collections.abc import Callable

import pytest
import torch
from quire.kernels.moe import ClampedSwiGLU, Experts
from quire.kernels.reference.gguf_blocks import row_bytes
from quire.kernels.triton import moe
from quire.kernels.triton.blocks import BlockLinear
from quire.kernels.triton.quantized import QuantizedLinear
from quire.tests.kernels.case import DenseLayer
from quire.tests.kernels.triton.budget import Budget, bf16, combinations

PLAIN = (None, 8, "softmax", True, 1.0, 1, 1)
GROUPED = (torch.zeros(256), 8, "sigmoid", True, 2.5, 8, 4)


def fused_moe() -> torch.Tensor:
    """Of Qwen3-30B-A3B's sizes, with fewer experts."""
    experts = Experts(
        [DenseLayer(bf16(1536, 2048)) for _ in range(16)],
        [DenseLayer(bf16(2048, 768)) for _ in range(16)],
        "silu",
    )
    ids = torch.zeros(64, 8, dtype=torch.int32)
    return moe.fused_moe(bf16(64, 2048), ids, torch.zeros(64, 8), experts)


def clamped() -> torch.Tensor:
    """Of gpt-oss-20b's sizes, with fewer experts."""
    experts = Experts(
        [DenseLayer(bf16(5760, 2880), bf16(5760)) for _ in range(8)],
        [DenseLayer(bf16(2880, 2880), bf16(2880)) for _ in range(8)],
        ClampedSwiGLU(1.702, 7.0),
    )
    ids = torch.zeros(64, 4, dtype=torch.int32)
    return moe.fused_moe(bf16(64, 2880), ids, torch.zeros(64, 4), experts)


def in_fp8(type: str) -> Callable[[], torch.Tensor]:
    """Of Qwen3-30B-A3B's sizes, with fewer experts. They are packed when a model is loaded, which
    may wait.
    """
    first, last = (
        BlockLinear([torch.zeros(n, row_bytes(k, type)).byte()], [type], None, torch.bfloat16)
        for n, k in ((1536, 2048), (2048, 768))
    )
    experts = Experts([first] * 2, [last] * 2, "silu")
    ids = torch.zeros(64, 2, dtype=torch.int32)
    return lambda: moe.fused_moe(bf16(64, 2048), ids, torch.zeros(64, 2), experts)


def quantized(bits: int) -> Callable[[], torch.Tensor]:
    """Of Qwen3-30B-A3B's columns, with fewer experts and rows."""
    first = QuantizedLinear(torch.ones(128, 2048).bfloat16(), None, bits)
    last = QuantizedLinear(torch.ones(2048, 64).bfloat16(), None, bits)
    experts = Experts([first] * 2, [last] * 2, "silu")
    ids = torch.zeros(64, 2, dtype=torch.int32)
    return lambda: moe.fused_moe(bf16(64, 2048), ids, torch.zeros(64, 2), experts)


BUDGETS = [
    # small kernels beside the products: none has loads of 16 bytes everywhere
    Budget("fused_moe", fused_moe, registers=255, launches=4, wide_loads=False),
    Budget("fused_moe, clamped", clamped, registers=255, launches=4, wide_loads=False),
    Budget(
        "route_experts, E = 128",
        lambda: moe.route_experts(torch.zeros(64, 128), *PLAIN),
        registers=64,
        wide_loads=False,
    ),
    Budget(
        "route_experts, groups",
        lambda: moe.route_experts(torch.zeros(64, 256), *GROUPED),
        registers=64,
        wide_loads=False,
    ),
    Budget(
        "count_experts",
        lambda: moe.count_experts(
            torch.zeros(64, 8, dtype=torch.int32),
            torch.zeros(64, dtype=torch.int64),
            torch.zeros(128, dtype=torch.int64),
        ),
        registers=40,
        wide_loads=False,
    ),
    Budget(
        "scale_by_expert",
        lambda: moe.scale_by_expert(
            torch.zeros(64, 8), torch.zeros(64, 8, dtype=torch.int32), torch.zeros(128)
        ),
        registers=40,
    ),
    Budget(
        "add_gated",
        lambda: moe.add_gated(bf16(64, 2048), torch.zeros(64, 1), bf16(64, 2048)),
        registers=40,
    ),
]

OTHERS = [
    Budget(
        f"fused_moe, int{bits}",
        quantized(bits),
        launches=6,
        wide_loads=False,
        contains={80: (r"\bIMMA\b",), 90: (r"\bIGMMA\b",)},
    )
    for bits in (8, 4)
] + [
    Budget("fused_moe, FP8", in_fp8("FP8_128"), launches=4, wide_loads=False),
    Budget(
        "fused_moe, rows in FP8",
        in_fp8("FP8_128_GROUP"),
        launches=6,
        wide_loads=False,
        contains={90: (r"\bQGMMA\b",)},
        archs=(90,),
    ),
    Budget(
        "fused_moe, static FP8",
        in_fp8("FP8_128_STATIC"),
        launches=6,
        wide_loads=False,
        contains={90: (r"\bQGMMA\b",)},
        archs=(90,),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "arch"), combinations(OTHERS), ids=str)
def test_other_budgets(budget, arch):
    budget.check(arch)


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
