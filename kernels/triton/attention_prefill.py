"""Computes attention of several query tokens per request, a prompt or a chunk of one, over the
paged cache.

Must not know: which rows of a batch are prefills, models, requests.

A program handles a block of one request's query tokens and one KV head: the rows of its matrices
are the tokens times the query heads that read the KV head. Hopper's wgmma needs at least 64 rows.
Keys visible to all tokens of a block are not masked; the diagonal and the left edge of a sliding
window are.

With PIECES, a row's result is a fold over the pieces of its context (attention_pieces.py), as a
decode's is: a row's state of a piece that it does not see is empty, and folding that changes no
bit.
"""

import triton
import triton.language as tl

from .attention_pieces import begins_piece
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
def _attend(
    rows,
    cache,
    first,
    stop,
    state,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PIECES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds tiles first <= i < stop to the rows' state, which is returned: their largest score,
    total and sums, and the same of the fold over earlier pieces. rows and cache: as in
    prefill_kernel.

    MASKED: some keys may be hidden from some rows.
    """
    query, row_positions, row_lasts, scale = rows
    key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table, length, strides = cache
    key_block_stride, key_slot_stride, value_block_stride, value_slot_stride = strides
    largest, total, acc, fold = state
    columns = tl.arange(0, BLOCK_D)
    for tile in range(first, stop):
        positions = tile * TILE + tl.arange(0, TILE)
        in_context = positions < length
        if MASKED and WINDOW:  # keys before all windows may be another request's
            in_context = in_context & (positions > tl.min(row_positions, 0) - WINDOW)
        key_slots = slots_of(
            table,
            positions,
            in_context,
            key_block_stride,
            key_slot_stride,
            BLOCK_SIZE,
            TILE,
            MASKED,
        )
        value_slots = slots_of(
            table,
            positions,
            in_context,
            value_block_stride,
            value_slot_stride,
            BLOCK_SIZE,
            TILE,
            MASKED,
        )
        key_ptrs = key_ptr + key_slots[None, :] + columns[:, None]
        value_ptrs = value_ptr + value_slots[:, None] + columns[None, :]
        if MASKED:
            in_head = columns < HEAD_DIM
            keys = tl.load(key_ptrs, mask=in_context[None, :] & in_head[:, None], other=0.0)
            values = tl.load(value_ptrs, mask=in_context[:, None] & in_head[None, :], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            keys = tl.load(key_ptrs, mask=(columns < HEAD_DIM)[:, None], other=0.0)
            values = tl.load(value_ptrs, mask=(columns < HEAD_DIM)[None, :], other=0.0)
        else:
            keys, values = tl.load(key_ptrs), tl.load(value_ptrs)
        scores = tl.dot(query, in_dtype(keys, query), input_precision="ieee")
        if key_ptr.dtype.element_ty == tl.int8:
            key_scales = scales_of(
                key_scales_ptr,
                table,
                positions,
                in_context,
                key_block_stride,
                BLOCK_SIZE,
                TILE,
                MASKED,
            )
            value_scales = scales_of(
                value_scales_ptr,
                table,
                positions,
                in_context,
                value_block_stride,
                BLOCK_SIZE,
                TILE,
                MASKED,
            )
            scores *= key_scales[None, :]
            values = scaled(values, value_scales, query)
        scores, factor = capped(scores, scale, SOFTCAP)
        if MASKED:
            seen = positions[None, :] <= row_lasts[:, None]
            if WINDOW:
                seen = seen & (positions[None, :] > row_positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        largest, total, acc = online_softmax(
            scores, factor, in_dtype(values, query), largest, total, acc
        )
        if PIECES:
            if begins_piece((tile + 1) * TILE):
                fold_largest, fold_total, fold_acc = fold
                fold = merge(fold_largest, fold_total, fold_acc, largest, total, acc)
                largest = tl.full(largest.shape, NOTHING, tl.float32)
                total, acc = tl.zeros_like(total), tl.zeros_like(acc)
    return largest, total, acc, fold


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    sinks_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    work_ptr,
    later_ptr,
    out_ptr,
    scale,
    value_scale,
    num_heads,
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
    PIECES: tl.constexpr,
    LATER: tl.constexpr,
):
    """Grid (KV heads, work items).

    work [items, 2] i32: a request, and the first of the ROWS // GROUP query tokens that the program
    handles. out [T, NQ, HEAD_DIM] contiguous.
    """
    kv_head, item = tl.program_id(0), tl.program_id(1)
    request, first_token = tl.load(work_ptr + 2 * item), tl.load(work_ptr + 2 * item + 1)
    start = tl.load(starts_ptr + request)
    end = tl.load(starts_ptr + request + 1)
    length = tl.load(lengths_ptr + request)

    BLOCK_TOKENS: tl.constexpr = ROWS // GROUP
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    tokens, heads = first_token + rows // GROUP, kv_head * GROUP + rows % GROUP
    in_block = (rows < BLOCK_TOKENS * GROUP) & (tokens < end - start)
    stored = in_block[:, None] & (columns < HEAD_DIM)[None, :]
    query_ptrs = (
        query_ptr
        + (start + tokens).to(tl.int64)[:, None] * query_stride
        + heads[:, None] * query_head_stride
        + columns[None, :]
    )
    query = tl.load(query_ptrs, mask=stored, other=0.0)
    table = tables_ptr + request.to(tl.int64) * table_stride
    key_scales_ptr = first_scale(key_ptr, kv_head, key_slot_stride, BLOCK_SIZE)
    value_scales_ptr = first_scale(value_ptr, kv_head, value_slot_stride, BLOCK_SIZE)
    key_ptr += kv_head * key_head_stride
    value_ptr += kv_head * value_head_stride

    row_positions = length - (end - start) + tokens
    first_position = length - (end - start) + first_token
    last_position = tl.minimum(first_position + BLOCK_TOKENS, length) - 1
    row_lasts, stop_position = row_positions, last_position
    if LATER:  # rows see more keys, and the window begins where it does without them
        later = tl.load(later_ptr + start + tokens, mask=in_block, other=0)
        row_lasts = tl.minimum(row_positions + later, length - 1)
        stop_position = tl.maximum(tl.max(tl.where(in_block, row_lasts, 0), 0), last_position)
    largest = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    if SINKS:
        largest, total = with_sinks(sinks_ptr, heads, in_block)
    full_first, full_stop, stop = 0, (first_position + 1) // TILE, stop_position // TILE + 1
    of_rows = query, row_positions, row_lasts, scale
    strides = key_block_stride, key_slot_stride, value_block_stride, value_slot_stride
    cache = key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, table, length, strides
    state = largest, total, acc, ()
    if PIECES:  # the fold begins with the sinks, and each piece with nothing
        empty = tl.full((ROWS,), NOTHING, tl.float32)
        state = empty, tl.zeros((ROWS,), tl.float32), acc, (largest, total, acc)
    if WINDOW:
        full_first = tl.cdiv(tl.maximum(last_position + 1 - WINDOW, 0), TILE)
        first = tl.maximum(first_position + 1 - WINDOW, 0) // TILE
        state = _attend(
            of_rows,
            cache,
            first,
            full_first,
            state,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_SIZE,
            TILE,
            WINDOW,
            SOFTCAP,
            PIECES,
            True,
        )
    state = _attend(
        of_rows,
        cache,
        full_first,
        full_stop,
        state,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        TILE,
        WINDOW,
        SOFTCAP,
        PIECES,
        False,
    )
    first = tl.maximum(full_first, full_stop)
    state = _attend(
        of_rows,
        cache,
        first,
        stop,
        state,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_SIZE,
        TILE,
        WINDOW,
        SOFTCAP,
        PIECES,
        True,
    )
    largest, total, acc, fold = state
    if PIECES:
        fold_largest, fold_total, fold_acc = fold
        largest, total, acc = merge(fold_largest, fold_total, fold_acc, largest, total, acc)
    out_ptrs = (
        out_ptr
        + ((start + tokens).to(tl.int64) * num_heads + heads)[:, None] * HEAD_DIM
        + columns[None, :]
    )
    tl.store(
        out_ptrs, normalised(total, acc, value_scale).to(out_ptr.dtype.element_ty), mask=stored
    )
