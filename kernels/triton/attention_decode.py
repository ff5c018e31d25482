"""Computes attention of one query token per request over the paged cache. Contexts are split, and
the partial results are merged in the same launch or in a second one (split-KV).

Must not know: which rows of a batch are decodes, models, requests.

A program handles one KV head of one request: the rows of its matrices are the query heads that read
the KV head. A context is split into at most MAX_PIECES pieces of at least MIN_TILES tiles. The
split depends on the context's length alone. The result is always a fold over the pieces in
ascending order, while the number of programs that share the pieces is free. A row's bits therefore
depend neither on the batch nor on the GPU's size.

    pieces       0   1   2 | 3   4   5 | 6   7       8 pieces, 3 programs
    program 0    fold ---->|           |             keeps its fold in registers: stores one state
    program 1              | 3   4   5 |             stores a state for each piece
    program 2              |           | 6   7
    last to end  fold(0..2), 3, 4, 5, 6, 7 -> out

A counter per request and KV head identifies the program that ends last, which resets it to 0. The
order of memory accesses is this: a program stores its states, then passes a barrier of its threads,
then one thread does an atomic add with acquire-release semantics at GPU scope. The last program
loads the states after its own atomic add and another barrier. PTX's memory model guarantees
visibility, because a release covers the writes that its thread observed through a barrier; CUDA's
cooperative groups build their grid barrier the same way. Tests check the results in Triton's
interpreter, which runs programs one after another, and the order of barrier, atomic and loads in
the compiled code. Neither execution on a GPU nor a race detector has checked it. With
one_launch=False a second kernel merges the states without this synchronisation, and the bits are
the same.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .attention_tile import (
    NOTHING,
    capped,
    first_scale,
    in_dtype,
    merge,
    normalised,
    online_softmax,
    scaled,
    scales_of,
    slots_of,
    with_sinks,
)

MAX_PIECES = 32
# A piece has at least so many tiles. More would leave a GPU idle at batch size 1; fewer would cost
# more time in storing states than they save.
MIN_TILES = 2


@triton.jit
def _cut(
    length,
    num_programs,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """-> first visible position, first tile, number of tiles, tiles per piece, number of pieces,
    pieces per program
    """
    begin = tl.maximum(length - WINDOW, 0) if WINDOW else length * 0
    first_tile = begin // TILE
    num_tiles = tl.cdiv(length, TILE) - first_tile
    piece_tiles = tl.maximum(tl.cdiv(num_tiles, MAX_PIECES), MIN_TILES)
    num_pieces = tl.cdiv(num_tiles, piece_tiles)
    return (
        begin,
        first_tile,
        num_tiles,
        piece_tiles,
        num_pieces,
        tl.maximum(tl.cdiv(num_pieces, num_programs), 1),
    )


@triton.jit
def _fold(scalars_ptr, sums_ptr, states, in_group, first, stop, BLOCK_D: tl.constexpr):
    """Merges the stored states first <= i < stop in ascending order. states [ROWS] holds the index
    of each row's state 0.
    """
    largest = tl.full(states.shape, NOTHING, tl.float32)
    total = tl.zeros(states.shape, tl.float32)
    acc = tl.zeros((states.shape[0], BLOCK_D), tl.float32)
    columns = tl.arange(0, BLOCK_D)
    for i in tl.range(first, stop, num_stages=3):
        state = states + i
        # .cg loads from L2, where other multiprocessors' stores are visible. Copies of 4 bytes go
        # through L1, which the acquire has invalidated.
        piece_largest = tl.load(
            scalars_ptr + state * 2, mask=in_group, other=0.0, cache_modifier=".cg"
        )
        piece_total = tl.load(
            scalars_ptr + state * 2 + 1, mask=in_group, other=0.0, cache_modifier=".cg"
        )
        sums = tl.load(
            sums_ptr + state[:, None] * BLOCK_D + columns[None, :],
            mask=in_group[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        largest, total, acc = merge(largest, total, acc, piece_largest, piece_total, sums)
    return total, acc


@triton.jit
def store_state(scalars_ptr, sums_ptr, state, in_group, largest, total, acc, BLOCK_D: tl.constexpr):
    tl.store(scalars_ptr + state * 2, largest, mask=in_group)
    tl.store(scalars_ptr + state * 2 + 1, total, mask=in_group)
    tl.store(
        sums_ptr + state[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :],
        acc,
        mask=in_group[:, None],
    )


@triton.jit(do_not_specialize=["table_stride", "num_programs"])
def decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    sinks_ptr,
    tables_ptr,
    lengths_ptr,
    out_ptr,
    scalars_ptr,
    sums_ptr,
    counters_ptr,
    scale,
    value_scale,
    num_programs,
    table_stride,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ONE_LAUNCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Grid (requests, KV heads, num_programs).

    GROUP query heads read a KV head; ROWS >= GROUP and BLOCK_D >= HEAD_DIM pad to the sizes tl.dot
    requires. out [requests, NQ, HEAD_DIM] contiguous; scalars [requests, NQ, MAX_PIECES, 2] and
    sums [requests, NQ, MAX_PIECES, BLOCK_D], both f32.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    request, kv_head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + request)
    begin, first_tile, num_tiles, piece_tiles, num_pieces, share = _cut(
        length, num_programs, TILE, MIN_TILES, MAX_PIECES, WINDOW
    )
    # A request without visible keys has one program, which stores zeros.
    num_sharing = tl.maximum(tl.cdiv(num_pieces, share), 1)
    if program >= num_sharing:
        return

    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    heads, in_group, in_head = kv_head * GROUP + rows, rows < GROUP, columns < HEAD_DIM
    stored = in_group[:, None] & in_head[None, :]
    query_ptrs = (
        query_ptr
        + request.to(tl.int64) * query_stride
        + heads[:, None] * query_head_stride
        + columns[None, :]
    )
    query = tl.load(query_ptrs, mask=stored, other=0.0)
    states = (request * tl.num_programs(1) * GROUP + heads) * MAX_PIECES
    out_ptrs = (
        out_ptr
        + (request * tl.num_programs(1) * GROUP + heads).to(tl.int64)[:, None] * HEAD_DIM
        + columns[None, :]
    )
    table = tables_ptr + request.to(tl.int64) * table_stride
    key_scales_ptr = first_scale(key_ptr, kv_head, key_slot_stride, BLOCK_SIZE)
    value_scales_ptr = first_scale(value_ptr, kv_head, value_slot_stride, BLOCK_SIZE)
    key_ptr += kv_head * key_head_stride
    value_ptr += kv_head * value_head_stride

    largest = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    fold_largest, fold_total, fold_acc = largest, total, acc
    if SINKS:  # program 0 has the first state of every fold
        fold_largest, fold_total = with_sinks(sinks_ptr, heads, in_group)
    first = program * share * piece_tiles
    stop = tl.minimum(first + share * piece_tiles, num_tiles)
    for tile in range(first, stop):
        positions = (first_tile + tile) * TILE + tl.arange(0, TILE)
        seen = positions < length
        if WINDOW:
            seen = seen & (positions >= begin)
        key_slots = slots_of(
            table, positions, seen, key_block_stride, key_slot_stride, BLOCK_SIZE, TILE, True
        )
        value_slots = slots_of(
            table, positions, seen, value_block_stride, value_slot_stride, BLOCK_SIZE, TILE, True
        )
        keys = tl.load(
            key_ptr + key_slots[None, :] + columns[:, None],
            mask=seen[None, :] & in_head[:, None],
            other=0.0,
        )
        values = tl.load(
            value_ptr + value_slots[:, None] + columns[None, :],
            mask=seen[:, None] & in_head[None, :],
            other=0.0,
        )
        scores = tl.dot(query, in_dtype(keys, query), input_precision="ieee")
        if key_ptr.dtype.element_ty == tl.int8:
            key_scales = scales_of(
                key_scales_ptr, table, positions, seen, key_block_stride, BLOCK_SIZE, TILE, True
            )
            value_scales = scales_of(
                value_scales_ptr, table, positions, seen, value_block_stride, BLOCK_SIZE, TILE, True
            )
            scores *= key_scales[None, :]
            values = scaled(values, value_scales, query)
        scores, factor = capped(scores, scale, SOFTCAP)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        largest, total, acc = online_softmax(
            scores, factor, in_dtype(values, query), largest, total, acc
        )
        if ((tile + 1) % piece_tiles == 0) | (tile + 1 == stop):
            if program == 0:
                fold_largest, fold_total, fold_acc = merge(
                    fold_largest, fold_total, fold_acc, largest, total, acc
                )
            else:
                store_state(
                    scalars_ptr,
                    sums_ptr,
                    states + tile // piece_tiles,
                    in_group,
                    largest,
                    total,
                    acc,
                    BLOCK_D,
                )
            largest = tl.full((ROWS,), NOTHING, tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, BLOCK_D), tl.float32)

    if num_sharing == 1:
        tl.store(
            out_ptrs,
            normalised(fold_total, fold_acc, value_scale).to(out_ptr.dtype.element_ty),
            mask=stored,
        )
        return
    if program == 0:
        store_state(
            scalars_ptr,
            sums_ptr,
            states + share - 1,
            in_group,
            fold_largest,
            fold_total,
            fold_acc,
            BLOCK_D,
        )
    if ONE_LAUNCH:
        counter = counters_ptr + request * tl.num_programs(1) + kv_head
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_sharing - 1:
            total, acc = _fold(
                scalars_ptr, sums_ptr, states, in_group, share - 1, num_pieces, BLOCK_D
            )
            tl.store(
                out_ptrs,
                normalised(total, acc, value_scale).to(out_ptr.dtype.element_ty),
                mask=stored,
            )
            tl.store(counter, 0)


@triton.jit(do_not_specialize=["num_programs"])
def merge_kernel(
    lengths_ptr,
    out_ptr,
    scalars_ptr,
    sums_ptr,
    value_scale,
    num_programs,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Grid (requests, KV heads). Does what the last program does when decode_kernel is the only
    launch.
    """
    request, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + request)
    _, _, _, _, num_pieces, share = _cut(length, num_programs, TILE, MIN_TILES, MAX_PIECES, WINDOW)
    if num_pieces <= share:  # a single program has stored the result
        return
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    heads, in_group = (request * tl.num_programs(1) + kv_head) * GROUP + rows, rows < GROUP
    total, acc = _fold(
        scalars_ptr, sums_ptr, heads * MAX_PIECES, in_group, share - 1, num_pieces, BLOCK_D
    )
    out_ptrs = out_ptr + heads.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(
        out_ptrs,
        normalised(total, acc, value_scale).to(out_ptr.dtype.element_ty),
        mask=in_group[:, None] & (columns < HEAD_DIM)[None, :],
    )
