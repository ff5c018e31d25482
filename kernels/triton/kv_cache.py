"""Writes to the paged KV cache in Triton, and copies its blocks.

Must not know: models, requests.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.kv_cache import hadamard_size
from ..registry import register
from .device import PLAIN, PRIORITY, TILE, is_cuda, reads_cache
from .quantized import in_int8


@triton.jit
def in_type_of(cache_ptr, x):
    """x in the cache's dtype.

    The conversion to fp8 saturates; the hardware has no other.
    """
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    return x.to(tl.float32).to(dtype) if dtype == tl.float8e4nv else x


@triton.jit
def hadamard(x, P: tl.constexpr):
    """x [M, N] f32 -> each P elements of a row times the Hadamard matrix, not normalised, with the
    order of additions of reference/kv_cache.py. P is a power of two and divides N.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    stride: tl.constexpr = P // 2
    if stride:
        pairs = tl.permute(tl.reshape(x, (M, N // P, 2, stride)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        return hadamard(tl.reshape(pairs, (M, N)), stride)
    else:
        return x


@triton.jit
def store_int8(x, cache_ptr, places, scale_places, column, SIZE: tl.constexpr):
    """x [M, N] f32 -> its rows' integers from cache_ptr + places [M], its scales at scale_places
    [M], both in bytes; negative places are not written.
    """
    numbers, scales = in_int8(x)
    mask = (places >= 0)[:, None] & (column < SIZE)[None, :]
    tl.store(cache_ptr + places[:, None] + column[None, :], numbers.to(tl.int8), mask=mask)
    scale_ptrs = (cache_ptr + scale_places).to(tl.pointer_type(tl.float32))
    tl.store(scale_ptrs, scales, mask=places >= 0)


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
    P: tl.constexpr,
):
    """A program handles ROWS rows; a row is one of the `heads` heads of one token. block_stride is
    the distance between blocks of BLOCK_SIZE tokens in both caches. int8 caches: ops.py says how a
    block is laid out; P is the size of the Hadamard matrix.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64), row % heads
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token, mask=row < num_rows, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (column < SIZE)[None, :]
    key = tl.load(
        key_ptr + (token * key_stride + head * key_head_stride)[:, None] + column[None, :],
        mask=mask,
        other=0.0,
    )
    value = tl.load(
        value_ptr + (token * value_stride + head * value_head_stride)[:, None] + column[None, :],
        mask=mask,
        other=0.0,
    )
    block, offset = slot // BLOCK_SIZE * block_stride, slot % BLOCK_SIZE
    place = block + (offset * heads + head) * SIZE
    if key_cache_ptr.dtype.element_ty == tl.int8:
        place = tl.where(slot >= 0, place, -1)
        scale_place = block + BLOCK_SIZE * heads * SIZE + 4 * (head * BLOCK_SIZE + offset)
        turned = hadamard(key.to(tl.float32), P)
        store_int8(turned, key_cache_ptr, place, scale_place, column, SIZE)
        store_int8(value.to(tl.float32), value_cache_ptr, place, scale_place, column, SIZE)
    else:
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
        P=hadamard_size(size),
        **PLAIN,
    )


@triton.jit(do_not_specialize=["num_rows"])
def turn_kernel(
    query_ptr,
    out_ptr,
    num_rows,
    heads,
    stride,
    head_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    P: tl.constexpr,
):
    """A program turns ROWS rows; a row is one of the `heads` heads of one token. out is
    contiguous.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // heads).to(tl.int64), row % heads
    column = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    x_ptrs = query_ptr + (token * stride + head * head_stride)[:, None] + column[None, :]
    turned = hadamard(tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32), P) * (1.0 / P)
    places = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(out_ptr + places, turned.to(out_ptr.dtype.element_ty), mask=mask)


def turned(query: Tensor) -> Tensor:
    """query [T, NQ, D] -> [T, NQ, D], rounded to dtype: its product with the keys that an int8
    cache holds is that of `query` with the keys turned back. For the Hadamard matrix H of size P,
    q (H k) / P = (H q / P) k.
    """
    num_rows, heads, size = query.shape[0] * query.shape[1], query.shape[1], query.shape[2]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    if num_rows:
        turn_kernel[(triton.cdiv(num_rows, rows),)](
            query,
            out,
            num_rows,
            heads,
            *query.stride()[:2],
            SIZE=size,
            BLOCK=block,
            ROWS=rows,
            P=hadamard_size(size),
            **PLAIN,
        )
    return out


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
