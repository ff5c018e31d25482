"""Implements LoRA adapters in Triton.

Must not know: models, requests.

A program computes one row, so that a row's bits do not depend on the others. Grids depend on shapes
alone, so programs of rows without an adapter end at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lora import LORA_BLOCK, first_blocks
from ..registry import register
from .device import PRIORITY, is_cuda

_SIZE_BLOCK, _COLUMN_BLOCK = 256, 512


@triton.jit
def place_of_row(adapters_ptr, indices_ptr, row, BY_INDEX: tl.constexpr):
    token = row
    if BY_INDEX:
        token = tl.load(indices_ptr + row).to(tl.int64)
    return tl.load(adapters_ptr + token).to(tl.int64)


@triton.jit
def lora_low_kernel(
    x_ptr,
    a_ptr,
    scales_ptr,
    ranks_ptr,
    adapters_ptr,
    indices_ptr,
    low_ptr,
    x_stride,
    SIZE: tl.constexpr,
    SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_INDEX: tl.constexpr,
):
    """low [T, SLICES, MAX_RANK] f32: scale * A x of one row and slice, RANKS ranks at a time."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1)
    place = place_of_row(adapters_ptr, indices_ptr, row, BY_INDEX)
    if place >= 0:
        pair = place * SLICES + s
        rank = tl.load(ranks_ptr + pair)
        scale = tl.load(scales_ptr + pair)
        k = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
        sums = tl.zeros((RANKS,), tl.float32)
        for start in range(0, SIZE, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
            a = tl.load(
                a_ptr + (pair * MAX_RANK + k[:, None]) * SIZE + i[None, :],
                mask=(k[:, None] < rank) & (i[None, :] < SIZE),
                other=0.0,
            ).to(tl.float32)
            sums += tl.sum(a * x[None, :], axis=1)
        tl.store(low_ptr + (row * SLICES + s) * MAX_RANK + k, sums * scale, mask=k < MAX_RANK)


@triton.jit
def lora_token_kernel(
    token_ids_ptr,
    a_ptr,
    scales_ptr,
    ranks_ptr,
    adapters_ptr,
    low_ptr,
    VOCAB: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Computes what lora_low_kernel does, for an embedding, whose x is a token."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(adapters_ptr + row).to(tl.int64)
    if place >= 0:
        token = tl.load(token_ids_ptr + row).to(tl.int64)
        k = tl.arange(0, RANKS)
        mask = k < tl.load(ranks_ptr + place)
        a = tl.load(a_ptr + (place * VOCAB + token) * MAX_RANK + k, mask=mask, other=0.0)
        low = a.to(tl.float32) * tl.load(scales_ptr + place)
        tl.store(low_ptr + row * MAX_RANK + k, low, mask=k < MAX_RANK)


@triton.jit
def lora_add_kernel(
    y_ptr,
    low_ptr,
    b_ptr,
    ranks_ptr,
    adapters_ptr,
    indices_ptr,
    y_stride,
    begin,
    size,
    s,
    first_block,
    num_blocks,
    LORA_BLOCK: tl.constexpr,
    SLICES: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_INDEX: tl.constexpr,
):
    """y [T, .] += low B: `size` columns of slice s, from `begin` and `first_block` on."""
    row = tl.program_id(0).to(tl.int64)
    place = place_of_row(adapters_ptr, indices_ptr, row, BY_INDEX)
    if place >= 0:
        rank = tl.load(ranks_ptr + place * SLICES + s)
        if rank > 0:
            inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            mask, column = inner < size, begin + inner
            b_block = place * num_blocks + first_block + inner // LORA_BLOCK
            b_ptrs = b_ptr + b_block * (MAX_RANK * LORA_BLOCK) + inner % LORA_BLOCK
            sums = tl.zeros((BLOCK,), tl.float32)
            for k in range(rank):
                low = tl.load(low_ptr + (row * SLICES + s) * MAX_RANK + k)
                b = tl.load(b_ptrs + k * LORA_BLOCK, mask=mask, other=0.0)
                sums += low * b.to(tl.float32)
            y_ptrs = y_ptr + row * y_stride + column
            y = tl.load(y_ptrs, mask=mask, other=0.0)
            tl.store(y_ptrs, (y.to(tl.float32) + sums).to(y.dtype), mask=mask)


@register("add_lora", name="triton", predicate=is_cuda, priority=PRIORITY)
def add_lora(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    adapters: Tensor,
    indices: Tensor | None,
    slices: list[int],
) -> None:
    num_slices, max_rank, size = a.shape[1:]
    low = x.new_empty(len(x), num_slices * max_rank, dtype=torch.float32)
    ranks_at_once = min(16, triton.next_power_of_2(max_rank))
    by_index = indices is not None
    places = adapters, indices if by_index else adapters
    lora_low_kernel[len(x), num_slices, triton.cdiv(max_rank, ranks_at_once)](
        x,
        a,
        scales,
        ranks,
        *places,
        low,
        x.stride(0),
        SIZE=size,
        SLICES=num_slices,
        MAX_RANK=max_rank,
        RANKS=ranks_at_once,
        BLOCK=min(_SIZE_BLOCK, triton.next_power_of_2(size)),
        BY_INDEX=by_index,
    )
    _add(y, low, b, ranks, places, slices, by_index)


@register("add_lora_embedding", name="triton", predicate=is_cuda, priority=PRIORITY)
def add_lora_embedding(
    y: Tensor,
    token_ids: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    adapters: Tensor,
) -> None:
    max_rank = a.shape[2]
    low = y.new_empty(len(y), max_rank, dtype=torch.float32)
    lora_token_kernel[(len(y),)](
        token_ids,
        a,
        scales,
        ranks,
        adapters,
        low,
        VOCAB=a.shape[1],
        MAX_RANK=max_rank,
        RANKS=triton.next_power_of_2(max_rank),
    )
    _add(y, low, b, ranks, (adapters, adapters), [y.shape[1]], by_index=False)


def _add(
    y: Tensor,
    low: Tensor,
    b: Tensor,
    ranks: Tensor,
    places: tuple[Tensor, Tensor],
    slices: list[int],
    by_index: bool,
) -> None:
    begin, first = 0, first_blocks(slices)
    for s, size in enumerate(slices):
        block = min(_COLUMN_BLOCK, triton.next_power_of_2(size))
        lora_add_kernel[len(y), triton.cdiv(size, block)](
            y,
            low,
            b,
            ranks,
            *places,
            y.stride(0),
            begin,
            size,
            s,
            first[s],
            b.shape[1],
            LORA_BLOCK=LORA_BLOCK,
            SLICES=len(slices),
            MAX_RANK=b.shape[2],
            BLOCK=block,
            BY_INDEX=by_index,
            num_warps=max(1, block // 256),  # 16 bytes per thread
        )
        begin += size
