"""Budgets of LoRA adapters: the projections of a 0.5B, and an output head's logits."""

import pytest
import torch
from quire.kernels.lora import LORA_BLOCK, first_blocks
from quire.kernels.triton import lora
from quire.tests.kernels.triton.budget import Budget, bf16, combinations, f32, i32
from torch import Tensor

PLACES, RANK = 4, 16


def add_lora(y: Tensor, size: int, slices: list[int], by_index: bool = False) -> None:
    lora.add_lora(
        y,
        bf16(len(y), size),
        bf16(PLACES, len(slices), RANK, size),
        bf16(PLACES, first_blocks(slices)[-1], RANK, LORA_BLOCK),
        f32(PLACES, len(slices)),
        i32(PLACES, len(slices)),
        i32(256),
        torch.arange(len(y)).to(y.device) if by_index else None,
        slices,
    )


BUDGETS = [
    Budget(
        "add_lora, q, k and v",
        lambda: add_lora(bf16(64, 1408), 896, [896, 256, 256]),
        registers=80,
        launches=4,
    ),
    Budget(
        "add_lora, logits",
        lambda: add_lora(f32(8, 4096), 896, [4096], by_index=True),
        registers=80,
        launches=2,
    ),
    Budget(
        "add_lora_embedding",
        lambda: lora.add_lora_embedding(
            bf16(64, 896),
            i32(64),
            bf16(PLACES, 1000, RANK),
            bf16(PLACES, 896 // LORA_BLOCK, RANK, LORA_BLOCK),
            f32(PLACES, 1),
            i32(PLACES, 1),
            i32(64),
        ),
        registers=64,
        launches=2,
        wide_loads=False,  # a row of A has as many numbers as ranks
    ),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
