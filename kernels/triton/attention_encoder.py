"""Attention of text encoders and image encoders in Triton: in both directions, over the keys and
values of the step itself.

Must not know: models, requests.

A program handles a block of one request's query tokens and one head. Only the last tile of keys,
and the edges of a window, are masked. A head of 72, 80 or 96 elements is computed as 64 and a rest
of 16 or 32, since a tile's width is a power of two and 128 would be up to 78 % more work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import AttentionMetadata
from ..registry import Facts, register
from .attention import MAX_HEAD_DIM, prefill_shape
from .attention_tile import LOG2_E, NOTHING, normalised, softmax_step
from .device import PRIORITY, architecture, is_cuda

LEAST = 16  # columns of a product
LEAST_WIDTH = tl.constexpr(LEAST)


@triton.jit
def _load(ptr, rows, stride, in_rows, FIRST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """-> [rows, WIDTH]: the elements from FIRST on of `rows`, zeros where not in_rows and beyond
    SIZE.
    """
    columns = FIRST + tl.arange(0, WIDTH)
    ptrs = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if FIRST + WIDTH > SIZE:
        return tl.load(ptrs, mask=in_rows[:, None] & (columns < SIZE)[None, :], other=0.0)
    return tl.load(ptrs, mask=in_rows[:, None], other=0.0)


@triton.jit
def _attend(
    query,
    query_tail,
    rows,
    tensors,
    first,
    stop,
    state,
    SIZES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds tiles first <= i < stop of a request's keys to the rows' state, which is returned: their
    largest logit in base 2, total, sums of the first WIDTH elements and of the TAIL after them.

    MASKED: some keys may be hidden from some rows.
    """
    tokens, length, scale = rows
    key_ptr, value_ptr, key_stride, value_stride, bias_ptr = tensors
    largest, total, acc, acc_tail = state
    SIZE: tl.constexpr = SIZES[0]
    WIDTH: tl.constexpr = SIZES[1]
    TAIL: tl.constexpr = SIZES[2]
    for tile in range(first, stop):
        keys = tile * TILE + tl.arange(0, TILE)
        in_request = keys < length if MASKED else keys >= 0
        scores = tl.dot(
            query,
            tl.trans(_load(key_ptr, keys, key_stride, in_request, 0, SIZE, WIDTH)),
            input_precision="ieee",
        )
        if TAIL:
            tail = _load(key_ptr, keys, key_stride, in_request, WIDTH, SIZE, TAIL)
            scores = tl.dot(query_tail, tl.trans(tail), scores, input_precision="ieee")
        factor = scale * LOG2_E
        if BIAS:
            away = tl.minimum(tl.maximum(keys[None, :] - tokens[:, None], -BIAS), BIAS)
            scores = tl.fma(scores, scale, tl.load(bias_ptr + BIAS + away))
            factor = scale * 0.0 + LOG2_E
        if MASKED:
            seen = in_request[None, :]
            if WINDOW:
                away = keys[None, :] - tokens[:, None]
                seen = seen & (away <= WINDOW) & (away >= -WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        largest, total, weights, shrink = softmax_step(scores, factor, largest, total)
        values = _load(value_ptr, keys, value_stride, in_request, 0, SIZE, WIDTH)
        weights = weights.to(values.dtype)
        acc = tl.dot(weights, values, acc * shrink[:, None], input_precision="ieee")
        if TAIL:
            tail = _load(value_ptr, keys, value_stride, in_request, WIDTH, SIZE, TAIL)
            acc_tail = tl.dot(weights, tail, acc_tail * shrink[:, None], input_precision="ieee")
    return largest, total, acc, acc_tail


@triton.jit
def encoder_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    bias_ptr,
    starts_ptr,
    work_ptr,
    out_ptr,
    scale,
    num_heads,
    query_stride,
    key_stride,
    value_stride,
    QUERY_HEAD_STRIDE: tl.constexpr,
    KEY_HEAD_STRIDE: tl.constexpr,
    VALUE_HEAD_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TAIL: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Grid (query heads, work items).

    work [items, 2] i32: a request, and the first of the ROWS tokens that the program handles. A
    head has SIZE elements: WIDTH, and with TAIL as many after them. BIAS: the largest distance that
    has a bias of its own, bias [NQ, 2 * BIAS + 1]; 0: no bias. out [T, NQ, SIZE] contiguous.
    """
    head, item = tl.program_id(0), tl.program_id(1)
    request, first_token = tl.load(work_ptr + 2 * item), tl.load(work_ptr + 2 * item + 1)
    start = tl.load(starts_ptr + request).to(tl.int64)
    length = (tl.load(starts_ptr + request + 1) - start).to(tl.int32)
    tokens = first_token + tl.arange(0, ROWS)
    in_request = tokens < length
    query_ptr += start * query_stride + head * QUERY_HEAD_STRIDE
    key_ptr += start * key_stride + (head // GROUP) * KEY_HEAD_STRIDE
    value_ptr += start * value_stride + (head // GROUP) * VALUE_HEAD_STRIDE
    bias_ptr += head * (2 * BIAS + 1)
    query = _load(query_ptr, tokens, query_stride, in_request, 0, SIZE, WIDTH)
    query_tail, acc_tail = query, tl.zeros((ROWS, LEAST_WIDTH), tl.float32)  # not read without TAIL
    if TAIL:
        query_tail = _load(query_ptr, tokens, query_stride, in_request, WIDTH, SIZE, TAIL)
        acc_tail = tl.zeros((ROWS, TAIL), tl.float32)
    rows, tensors = (
        (tokens, length, scale),
        (key_ptr, value_ptr, key_stride, value_stride, bias_ptr),
    )
    state = (
        tl.full((ROWS,), NOTHING, tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, WIDTH), tl.float32),
        acc_tail,
    )
    SIZES: tl.constexpr = (SIZE, WIDTH, TAIL)  # pyright: ignore[reportAssignmentType]
    first, stop, num_tiles = 0, length // TILE, tl.cdiv(length, TILE)
    if WINDOW:
        last_token = tl.minimum(first_token + ROWS, length) - 1
        begin = tl.maximum(first_token - WINDOW, 0) // TILE
        first = tl.cdiv(tl.maximum(last_token - WINDOW, 0), TILE)
        stop = tl.minimum(stop, (first_token + WINDOW + 1) // TILE)
        num_tiles = tl.minimum(num_tiles, (last_token + WINDOW) // TILE + 1)
        first = tl.minimum(first, num_tiles)
        state = _attend(
            query, query_tail, rows, tensors, begin, first, state, SIZES, TILE, WINDOW, BIAS, True
        )
    state = _attend(
        query, query_tail, rows, tensors, first, stop, state, SIZES, TILE, WINDOW, BIAS, False
    )
    first = tl.maximum(first, stop)
    largest, total, acc, acc_tail = _attend(
        query, query_tail, rows, tensors, first, num_tiles, state, SIZES, TILE, WINDOW, BIAS, True
    )
    out_ptr += (start * num_heads + head) * SIZE
    rows_of_out = tokens.to(tl.int64)[:, None] * (num_heads * SIZE)
    columns = tl.arange(0, WIDTH)
    tl.store(
        out_ptr + rows_of_out + columns[None, :],
        normalised(total, acc, 1.0).to(out_ptr.dtype.element_ty),
        mask=in_request[:, None] & (columns < SIZE)[None, :],
    )
    if TAIL:
        columns = WIDTH + tl.arange(0, TAIL)
        tl.store(
            out_ptr + rows_of_out + columns[None, :],
            normalised(total, acc_tail, 1.0).to(out_ptr.dtype.element_ty),
            mask=in_request[:, None] & (columns < SIZE)[None, :],
        )


def has_triton_heads(facts: Facts) -> bool:
    return is_cuda(facts) and 0 < facts.head_dim <= MAX_HEAD_DIM


@register("encoder_attention", name="triton", predicate=has_triton_heads, priority=PRIORITY)
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    out = query.new_empty(query.shape)
    if not len(query):
        return out
    num_heads, size = query.shape[1:]
    width, tail = divided(size)
    shape = prefill_shape(1, width + tail, query.dtype, architecture())
    work = _work_once(metadata, shape["ROWS"], query.device)
    encoder_kernel[num_heads, len(work)](
        query,
        key,
        value,
        query if bias is None else bias,  # without BIAS it is not read
        metadata.query_start_loc,
        work,
        out,
        scale,
        num_heads,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        QUERY_HEAD_STRIDE=query.stride(1),
        KEY_HEAD_STRIDE=key.stride(1),
        VALUE_HEAD_STRIDE=value.stride(1),
        GROUP=num_heads // key.shape[1],
        SIZE=size,
        WIDTH=width,
        TAIL=tail,
        WINDOW=window,
        BIAS=0 if bias is None else bias.shape[1] // 2,
        **shape,
        enable_fp_fusion=False,
    )
    return out


def divided(size: int) -> tuple[int, int]:
    """The widths of the two parts of a head, powers of two or 0, of at least LEAST."""
    whole = max(LEAST, triton.next_power_of_2(size))
    width = whole // 2
    tail = max(LEAST, triton.next_power_of_2(size - width)) if width < size else 0
    return (width, tail) if LEAST <= width < size and tail < width else (whole, 0)


def _work_once(metadata: AttentionMetadata, block_tokens: int, device: torch.device) -> Tensor:
    """[items, 2] i32: a request, and the first token of a block of `block_tokens` of its tokens.

    Blocks of the longest requests come first, so that the program that starts last is short.
    """
    key = ("triton encoder", block_tokens)
    if key not in metadata.scratch:
        lengths = metadata.query_lens
        requests = sorted(range(len(lengths)), key=lambda request: -lengths[request])
        items = [
            (request, first)
            for request in requests
            for first in range(0, lengths[request], block_tokens)
        ]
        work = torch.tensor(items, dtype=torch.int32, pin_memory=device.type == "cuda")
        metadata.scratch[key] = work.to(device, non_blocking=True)
    return metadata.scratch[key]
