"""Writes to the paged KV cache in Triton, and copies its blocks.

Must not know: models, requests.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, TILE, is_cuda, reads_cache


@triton.jit
def in_type_of(cache_ptr, x):
    """x in the cache's dtype.

    The conversion to fp8 saturates; the hardware has no other.
    """
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    return x.to(tl.float32).to(dtype) if dtype == tl.float8e4nv else x


@triton.jit(do_not_specialize=["num_rows"])
def reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    num_rows,
    heads,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program handles ROWS rows; a row is one of the `heads` heads of one token. block_stride is
    the distance between blocks of BLOCK_SIZE tokens in both caches.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64), row % heads
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token, mask=row < num_rows, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (column < SIZE)[None, :]
    key = tl.load(
        key_ptr + (token * key_stride + head * key_head_stride)[:, None] + column[None, :],
        mask=mask,
    )
    value = tl.load(
        value_ptr + (token * value_stride + head * value_head_stride)[:, None] + column[None, :],
        mask=mask,
    )
    place = slot // BLOCK_SIZE * block_stride + (slot % BLOCK_SIZE * heads + head) * SIZE
    place = place[:, None] + column[None, :]
    tl.store(key_cache_ptr + place, in_type_of(key_cache_ptr, key), mask=mask)
    tl.store(value_cache_ptr + place, in_type_of(value_cache_ptr, value), mask=mask)


@register("reshape_and_cache", name="triton", predicate=reads_cache, priority=PRIORITY)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    num_rows, heads, size = key.shape[0] * key.shape[1], key.shape[1], key.shape[2]
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    reshape_and_cache_kernel[(triton.cdiv(num_rows, rows),)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_rows,
        heads,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        BLOCK_SIZE=key_cache.shape[1],
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
    )


@triton.jit
def copy_blocks_kernel(
    addresses_ptr,
    pairs_ptr,
    num_words,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """addresses [N, 2] i64, of a source and its destination; pairs [P, 2] i64.

    Grid (P, N, parts of a block).
    """
    pair, cache = tl.program_id(0), tl.program_id(1)
    source = tl.load(addresses_ptr + 2 * cache).to(tl.pointer_type(WORD))
    destination = tl.load(addresses_ptr + 2 * cache + 1).to(tl.pointer_type(WORD))
    source, destination = tl.multiple_of(source, ALIGNMENT), tl.multiple_of(destination, ALIGNMENT)
    from_block, to_block = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = word < num_words
    tl.store(
        destination + to_block * num_words + word,
        tl.load(source + from_block * num_words + word, mask=mask),
        mask=mask,
    )


WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@register("copy_blocks", name="triton", predicate=is_cuda, priority=PRIORITY)
def copy_blocks(sources: list[Tensor], destinations: list[Tensor], pairs: Tensor) -> None:
    """Launches one kernel for all layers.

    The kernel itself reads and writes host memory over the bus.
    """
    if not len(pairs):
        return
    tensors = [
        tensor
        for source_and_destination in zip(sources, destinations, strict=True)
        for tensor in source_and_destination
    ]
    addresses = [tensor.data_ptr() for tensor in tensors]
    table = torch.cat((torch.tensor(addresses), pairs.flatten()))
    # It is None in the interpreter.
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is not None:
        if not all(tensor.is_cuda or tensor.is_pinned() for tensor in tensors):
            raise ValueError(
                "sources and destinations in host memory must be pinned: the GPU itself reads and "
                "writes them"
            )
        table = table.pin_memory().to(device, non_blocking=True)
    block_bytes = sources[0][0].nbytes
    alignment = math.gcd(16, block_bytes, *addresses)
    word_bytes = min(8, alignment)
    num_words = block_bytes // word_bytes
    # A block has up to 16 KiB, because few programs saturate the bus.
    block = min(2 * TILE, triton.next_power_of_2(num_words))
    grid = (len(pairs), len(sources), triton.cdiv(num_words, block))
    copy_blocks_kernel[grid](
        table,
        table[len(addresses) :],
        num_words,
        WORD=WORDS[word_bytes],
        ALIGNMENT=alignment,
        BLOCK=block,
    )
