"""Writing to the paged KV cache in Triton.
May know: torch, triton, the contracts.
Must not know: models, requests."""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, TILE, is_cuda


@triton.jit
def reshape_and_cache_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr, num_rows, heads, key_stride, key_head_stride, value_stride, value_head_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS of all tokens' heads to a program, `heads` of each token"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64), row % heads
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token, mask=row < num_rows, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (column < SIZE)[None, :]
    key = tl.load(key_ptr + (token * key_stride + head * key_head_stride)[:, None] + column[None, :], mask=mask)
    value = tl.load(value_ptr + (token * value_stride + head * value_head_stride)[:, None] + column[None, :], mask=mask)
    place = ((slot * heads + head) * SIZE)[:, None] + column[None, :]
    tl.store(key_cache_ptr + place, key, mask=mask)
    tl.store(value_cache_ptr + place, value, mask=mask)


@register("reshape_and_cache", name="triton", predicate=is_cuda, priority=PRIORITY)
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    num_rows, heads, size = key.shape[0] * key.shape[1], key.shape[1], key.shape[2]
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    reshape_and_cache_kernel[(triton.cdiv(num_rows, rows),)](
        key, value, key_cache, value_cache, slot_mapping, num_rows, heads, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        SIZE=size, BLOCK=block, ROWS=rows,
    )  # fmt: skip
