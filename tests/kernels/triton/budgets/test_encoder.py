"""Budgets of encoders: no spills, tensor cores, loads of 16 bytes at a time."""

import pytest
import torch
from quire.kernels.triton import activation, norm
from quire.kernels.triton.attention_encoder import encoder_attention
from quire.tests.kernels.encoder_cases import encoder_metadata, make_bias
from quire.tests.kernels.triton.budget import Budget, bf16, combinations

TENSOR_CORES = {80: (r"\bHMMA\b", r"\bLDGSTS\S*\.128\b"), 90: (r"\bHGMMA\b", r"\bLDGSTS\S*\.128\b")}


def budget(name: str, registers: int, shared_kib: int, heads: tuple[int, int, int], *options):
    """heads: (NQ, NKV, D); options: window and bias, if any."""
    num_heads, num_kv_heads, size = heads
    qkv = torch.empty(300, num_heads + 2 * num_kv_heads, size, dtype=torch.bfloat16)
    parts = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    metadata = encoder_metadata([200, 100])

    def call() -> torch.Tensor:
        metadata.scratch.clear()
        return encoder_attention(*parts, metadata, 0.1, *options)

    return Budget(name, call, registers, shared_kib * 1024, contains=TENSOR_CORES)


BUDGETS = [budget("heads of 72", 192, 81, (16, 16, 72))]
OTHERS = [
    budget("heads of 32", 112, 33, (12, 12, 32)),
    budget("heads of 64", 184, 65, (16, 16, 64)),
    budget("heads of 64, window", 192, 65, (12, 12, 64), 64),
    budget("heads of 64, bias", 200, 129, (12, 12, 64), 0, make_bias(12, 128)),
    budget("heads of 80", 192, 81, (16, 16, 80)),
    budget("heads of 96", 200, 97, (16, 16, 96)),
    budget("heads of 128", 232, 129, (16, 2, 128)),
    budget("heads of 256", 208, 129, (3, 1, 256)),
    Budget(
        "layer_norm, H = 1152",
        lambda: norm.layer_norm(bf16(64, 1152), bf16(1152), bf16(1152), 1e-6),
        registers=48,
    ),
    Budget(
        "fused_add_layer_norm, H = 768",
        lambda: norm.fused_add_layer_norm(
            bf16(64, 768), bf16(64, 768), bf16(768), bf16(768), 1e-12
        ),
        registers=40,
    ),
    Budget("gelu, I = 3072", lambda: activation.gelu(bf16(64, 3072)), registers=40),
    Budget("gelu_tanh, I = 4304", lambda: activation.gelu_tanh(bf16(64, 4304)), registers=40),
    Budget("gelu_and_mul, I = 1152", lambda: activation.gelu_and_mul(bf16(64, 2304)), registers=40),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "arch"), combinations(OTHERS), ids=str)
def test_other_budgets(budget, arch):
    budget.check(arch)
