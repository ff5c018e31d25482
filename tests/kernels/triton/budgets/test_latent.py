"""Budgets of multi-head latent attention: sizes of DeepSeek V2 Lite and GLM-4.7-Flash."""

import pytest
import torch
from quire.kernels.ops import AttentionMetadata
from quire.kernels.triton import latent
from quire.tests.kernels.triton.budget import Budget, bf16, combinations, i32, i64


def attention(num_heads: int, dtype: torch.dtype = torch.bfloat16, query_len: int = 1):
    counts = [query_len] * 8
    metadata = AttentionMetadata(
        i32(9),
        i32(8),
        i32(8, 256),
        i64(8 * query_len),
        8 if query_len == 1 else 0,
        counts,
        counts,
    )
    query = torch.empty(8 * query_len, num_heads, 512, dtype=dtype)
    rotary = torch.empty(8 * query_len, num_heads, 64, dtype=dtype)
    cache = torch.empty(9, 16, 1, 576, dtype=dtype)
    return lambda: latent.latent_attention(query, rotary, cache, metadata, 0.1)


def store():
    return latent.store_latents(bf16(8, 512), bf16(8, 64), bf16(9, 16, 1, 576), i64(8))


BUDGETS = [
    Budget("latent_attention, 16 heads", attention(16), contains={90: (r"\bHMMA\b",)}),
    Budget("latent_attention, 20 heads, fp32", attention(20, torch.float32), archs=(90,)),
    Budget("latent_attention, prompts", attention(20, query_len=3), archs=(90,)),
    Budget("store_latents", store, registers=64, wide_loads=False),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
