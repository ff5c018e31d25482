"""Computes attention of one query token per request over the paged cache, as attention_decode.py
does, with contexts cut and divided by attention_pieces.py: by position, and by work.

Must not know: which rows of a batch are decodes, models, requests.

A program handles a range of pieces of all requests, and one KV head. The result is always a fold
over a request's pieces in ascending order, while the programs that share them are free. A row's
bits therefore depend neither on the batch nor on the GPU's size, and they are those of the token in
a prompt (attention_prefill.py with PIECES).

A program that has all pieces of a request keeps the fold in registers. Otherwise the programs store
a state for each piece, and the one that ends last folds them: a counter per request and KV head
counts pieces, and is reset to 0 by that program. attention_decode.py describes the order of memory
accesses.
"""

import triton
import triton.language as tl

from .attention_decode import store_state
from .attention_pieces import begin_of, begins_piece, piece_of
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


@triton.jit
def _fold(
    scalars_ptr, sums_ptr, states, in_group, first, stop, largest, total, BLOCK_D: tl.constexpr
):
    """Merges the stored states first <= i < stop in ascending order into largest and total [ROWS],
    which have seen no key. states [ROWS] holds the index of each row's state 0.
    """
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


@triton.jit(do_not_specialize=["table_stride"])
def divided_decode_kernel(
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
    plan_ptr,
    scale,
    value_scale,
    max_pieces,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Grid (programs, KV heads).

    GROUP query heads read a KV head; ROWS >= GROUP and BLOCK_D >= HEAD_DIM pad to the sizes tl.dot
    requires. out [requests, NQ, HEAD_DIM] contiguous; scalars [requests, NQ, max_pieces, 2] and
    sums [requests, NQ, max_pieces, BLOCK_D], both f32; counters [requests, KV heads] i32, 0 before
    and after; plan: as plan_kernel leaves it.
    """
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    plan_ptr += 2 * tl.program_id(0)
    first_request, from_piece = tl.load(plan_ptr), tl.load(plan_ptr + 1)
    last_request, to_piece = tl.load(plan_ptr + 2), tl.load(plan_ptr + 3)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    heads, in_group, in_head = kv_head * GROUP + rows, rows < GROUP, columns < HEAD_DIM
    stored = in_group[:, None] & in_head[None, :]
    key_scales_ptr = first_scale(key_ptr, kv_head, key_slot_stride, BLOCK_SIZE)
    value_scales_ptr = first_scale(value_ptr, kv_head, value_slot_stride, BLOCK_SIZE)
    key_ptr += kv_head * key_head_stride
    value_ptr += kv_head * value_head_stride

    stop_request = last_request + (to_piece > 0).to(tl.int32)
    for i in range(stop_request - first_request):
        request = first_request + i
        length = tl.load(lengths_ptr + request)
        begin = tl.maximum(length - WINDOW, 0) if WINDOW else length * 0
        first_piece, stop_piece = piece_of(begin), piece_of(tl.maximum(length - 1, 0)) + 1
        from_here = tl.where(request == first_request, from_piece, 0)
        first = tl.maximum(from_here, first_piece)
        stop = tl.where(request == last_request, tl.minimum(to_piece, stop_piece), stop_piece)
        is_whole = (first == first_piece) & (stop == stop_piece)

        query_ptrs = (
            query_ptr
            + request.to(tl.int64) * query_stride
            + heads[:, None] * query_head_stride
            + columns[None, :]
        )
        query = tl.load(query_ptrs, mask=stored, other=0.0)
        row = (request * num_kv_heads * GROUP + heads).to(tl.int64)
        states = row * max_pieces
        table = tables_ptr + request.to(tl.int64) * table_stride
        largest = tl.full((ROWS,), NOTHING, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        fold_largest, fold_total, fold_acc = largest, total, acc
        if SINKS:
            fold_largest, fold_total = with_sinks(sinks_ptr, heads, in_group)
        empty_largest, empty_total = fold_largest, fold_total
        first_tile = tl.maximum(begin_of(first), begin) // TILE
        stop_tile = tl.cdiv(tl.minimum(begin_of(stop), length), TILE)
        for j in range(stop_tile - first_tile):
            tile = first_tile + j
            positions = tile * TILE + tl.arange(0, TILE)
            seen = positions < length
            if WINDOW:
                seen = seen & (positions >= begin)
            key_slots = slots_of(
                table, positions, seen, key_block_stride, key_slot_stride, BLOCK_SIZE, TILE, True
            )
            value_slots = slots_of(
                table,
                positions,
                seen,
                value_block_stride,
                value_slot_stride,
                BLOCK_SIZE,
                TILE,
                True,
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
                    value_scales_ptr,
                    table,
                    positions,
                    seen,
                    value_block_stride,
                    BLOCK_SIZE,
                    TILE,
                    True,
                )
                scores *= key_scales[None, :]
                values = scaled(values, value_scales, query)
            scores, factor = capped(scores, scale, SOFTCAP)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            largest, total, acc = online_softmax(
                scores, factor, in_dtype(values, query), largest, total, acc
            )
            if begins_piece((tile + 1) * TILE) | (tile + 1 == stop_tile):
                if is_whole:
                    fold_largest, fold_total, fold_acc = merge(
                        fold_largest, fold_total, fold_acc, largest, total, acc
                    )
                else:
                    state = states + piece_of(tile * TILE)
                    store_state(
                        scalars_ptr, sums_ptr, state, in_group, largest, total, acc, BLOCK_D
                    )
                largest = tl.full((ROWS,), NOTHING, tl.float32)
                total = tl.zeros((ROWS,), tl.float32)
                acc = tl.zeros((ROWS, BLOCK_D), tl.float32)

        is_last = is_whole
        if not is_whole:
            counter = counters_ptr + request * num_kv_heads + kv_head
            tl.debug_barrier()
            others = tl.atomic_add(counter, stop - first, sem="acq_rel", scope="gpu")
            is_last = others + stop - first == stop_piece - first_piece
            if is_last:
                fold_total, fold_acc = _fold(
                    scalars_ptr,
                    sums_ptr,
                    states,
                    in_group,
                    first_piece,
                    stop_piece,
                    empty_largest,
                    empty_total,
                    BLOCK_D,
                )
                tl.store(counter, 0)
        if is_last:
            out_ptrs = out_ptr + row[:, None] * HEAD_DIM + columns[None, :]
            tl.store(
                out_ptrs,
                normalised(fold_total, fold_acc, value_scale).to(out_ptr.dtype.element_ty),
                mask=stored,
            )
