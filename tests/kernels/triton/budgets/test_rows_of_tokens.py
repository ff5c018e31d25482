"""Budgets of operations on each token's row: activation, rotary embedding, rows of tables, writes
to the cache.
"""

import pytest
import torch
from quire.kernels.ops import kv_cache_row
from quire.kernels.triton import activation, kv_cache, rotary, rows
from quire.tests.kernels.triton.budget import Budget, bf16, combinations, f32, i32, i64


def rotate(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    query, key, _ = bf16(64, num_heads + 2 * num_kv_heads, head_dim).split(
        (num_heads, num_kv_heads, num_kv_heads), 1
    )
    rotary.rotary_embedding(i64(64), query, key, f32(4096, head_dim))


def rotate_and_store(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: bool,
    cache_dtype: torch.dtype = torch.bfloat16,
) -> None:
    query, key, value = bf16(64, num_heads + 2 * num_kv_heads, head_dim).split(
        (num_heads, num_kv_heads, num_kv_heads), 1
    )
    caches = (torch.empty(9, 16, num_kv_heads, head_dim, dtype=cache_dtype) for _ in range(2))
    norms = (bf16(head_dim), bf16(head_dim), 1e-6) if norm else (None, None, 0.0)
    rotary.fused_qk_rope_reshape_and_cache(
        i64(64), query, key, value, f32(4096, head_dim), *caches, i64(64), *norms
    )


def store(
    num_heads: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype = torch.bfloat16
) -> None:
    _, key, value = bf16(64, num_heads + 2 * num_kv_heads, head_dim).split(
        (num_heads, num_kv_heads, num_kv_heads), 1
    )
    row = kv_cache_row(head_dim, cache_dtype)
    caches = (torch.empty(9, 16, num_kv_heads, row, dtype=cache_dtype) for _ in range(2))
    kv_cache.reshape_and_cache(key, value, *caches, i64(64))


def copy(num_kv_heads: int, head_dim: int) -> None:
    caches = [bf16(9, 16, num_kv_heads, head_dim) for _ in range(4)]
    kv_cache.copy_blocks(caches[:2], caches[2:], torch.zeros(3, 2, dtype=torch.int64))


FP8 = torch.float8_e4m3fn
SATURATING = {90: (r"\bF2FP\.SATFINITE\.E4M3\.F32",)}
BUDGETS = [
    Budget("silu_and_mul", lambda: activation.silu_and_mul(bf16(64, 2 * 4864)), registers=40),
    Budget("gather_rows", lambda: rows.embedding(i32(64), bf16(1000, 896)), registers=32),
    Budget("rotary, D = 128", lambda: rotate(28, 4, 128), registers=64),
    Budget("rotary and cache, D = 64", lambda: rotate_and_store(14, 2, 64, False), registers=64),
    Budget(
        "rotary and cache, norms, D = 128", lambda: rotate_and_store(16, 8, 128, True), registers=80
    ),
    Budget("reshape_and_cache", lambda: store(28, 4, 128), registers=48),
    Budget(
        "rotary and fp8 cache",
        lambda: rotate_and_store(16, 8, 128, True, FP8),
        registers=64,
        contains=SATURATING,
        archs=(90,),
    ),
    Budget(
        "reshape_and_cache, fp8",
        lambda: store(28, 4, 128, FP8),
        registers=32,
        contains=SATURATING,
        archs=(90,),
    ),
    Budget("reshape_and_cache, int8", lambda: store(28, 4, 128, torch.int8), registers=80),
    Budget("copy_blocks", lambda: copy(4, 128), registers=56),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
