"""Rotary position embedding in Triton.
May know: torch, triton, the contracts.
Must not know: models, requests."""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, TILE, is_cuda


@triton.jit
def _rotate(x_ptr, head, num_heads, head_stride, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """In place, at x_ptr one token's heads: `head` [HEADS], each of them below num_heads; cos, sin [BLOCK] f32"""
    column = tl.arange(0, BLOCK)
    mask = (head < num_heads)[:, None] & (column < HALF)[None, :]
    first_ptrs = x_ptr + head[:, None] * head_stride + column[None, :]
    first, second = tl.load(first_ptrs, mask=mask, other=0.0), tl.load(first_ptrs + HALF, mask=mask, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    tl.store(first_ptrs, (a * cos[None, :] - b * sin[None, :]).to(first.dtype), mask=mask)
    tl.store(first_ptrs + HALF, (b * cos[None, :] + a * sin[None, :]).to(first.dtype), mask=mask)


@triton.jit
def rotary_kernel(
    positions_ptr, query_ptr, key_ptr, cos_sin_ptr, query_stride, query_head_stride, key_stride, key_head_stride, num_heads, num_kv_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One token's next HEADS heads to a program: the queries', then the keys'"""
    token, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    angle_ptrs = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + column
    dtype = query_ptr.dtype.element_ty
    cos = tl.load(angle_ptrs, mask=column < HALF, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(angle_ptrs + HALF, mask=column < HALF, other=0.0).to(dtype).to(tl.float32)
    num_query_pieces = tl.cdiv(num_heads, HEADS)
    head = tl.arange(0, HEADS)
    if piece < num_query_pieces:
        _rotate(query_ptr + token * query_stride, piece * HEADS + head, num_heads, query_head_stride, cos, sin, HALF, BLOCK)
    else:
        _rotate(key_ptr + token * key_stride, (piece - num_query_pieces) * HEADS + head, num_kv_heads, key_head_stride, cos, sin, HALF, BLOCK)


@register("rotary_embedding", name="triton", predicate=is_cuda, priority=PRIORITY)
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    num_heads, num_kv_heads, half = query.shape[1], key.shape[1], cos_sin_cache.shape[1] // 2
    block = triton.next_power_of_2(half)
    # Each thread has 8 elements of both halves, or 16 bytes in bf16; more heads than there are would be threads without work.
    heads = min(max(1, TILE // block), triton.next_power_of_2(max(num_heads, num_kv_heads)))
    grid = (len(query), triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    rotary_kernel[grid](
        positions, query, key, cos_sin_cache, query.stride(0), query.stride(1), key.stride(0), key.stride(1), num_heads, num_kv_heads,
        HALF=half, BLOCK=block, HEADS=heads, num_warps=max(1, heads * block // 256),
    )  # fmt: skip
