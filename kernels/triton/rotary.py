"""Implements rotary position embedding in Triton, alone and fused with all other steps between a
layer's projection and its attention.

Must not know: models, requests.
"""

# pyright: reportPossiblyUnboundVariable=false
# (branches on constexpr are Triton's)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..registry import register
from .device import PLAIN, PRIORITY, TILE, dependent, is_cuda, reads_cache
from .kv_cache import in_type_of, reshape_and_cache


@triton.jit
def interleaved_kernel(
    positions_ptr,
    x_ptr,
    cos_sin_ptr,
    x_stride,
    x_head_stride,
    heads,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A program rotates HEADS of the `heads` heads of a token, in pairs of neighbours."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    is_pair = pair < HALF
    mask = (head < heads)[:, None] & is_pair[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF) + pair
    cos = tl.load(angles, mask=is_pair, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(angles + HALF, mask=is_pair, other=0.0).to(dtype).to(tl.float32)
    x_ptrs = x_ptr + token * x_stride + head[:, None] * x_head_stride + 2 * pair[None, :]
    a = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptrs, (a * cos[None, :] - b * sin[None, :]).to(dtype), mask=mask)
    tl.store(x_ptrs + 1, (b * cos[None, :] + a * sin[None, :]).to(dtype), mask=mask)


@register("rotary_embedding_interleaved", name="triton", predicate=is_cuda, priority=PRIORITY)
def rotary_embedding_interleaved(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor
) -> None:
    half = cos_sin_cache.shape[1] // 2
    block = triton.next_power_of_2(half)
    at_once = max(1, TILE // block)
    for x in (query, key):
        num_tokens, heads = x.shape[:2]
        if num_tokens * heads:
            interleaved_kernel[num_tokens, triton.cdiv(heads, at_once)](
                positions,
                x,
                cos_sin_cache,
                *x.stride()[:2],
                heads,
                HALF=half,
                BLOCK=block,
                HEADS=at_once,
                **PLAIN,
            )


@triton.jit
def _weigh(x, scale, weight_ptr, column, mask):
    """x [HEADS, n] in the model's dtype, scale [HEADS] f32 -> x * scale * weight, rounded to the
    weight's dtype before the last product and to x's after it.
    """
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    normalised = (x.to(tl.float32) * scale[:, None]).to(weight.dtype).to(tl.float32)
    return (normalised * weight.to(tl.float32)[None, :]).to(x.dtype)


@triton.jit
def _rotate(
    x_ptr,
    x_head_stride,
    out_ptr,
    out_head_stride,
    head,
    is_head,
    is_stored,
    weight_ptr,
    eps,
    cos,
    sin,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    MOVE: tl.constexpr,
):
    """Reads one token's heads, `head` [HEADS] where `is_head`, from x_ptr and writes them to
    out_ptr, which may equal x_ptr.

    NORM normalises them. cos and sin [BLOCK] f32 rotate them. Elements beyond 2 * HALF are not
    rotated; they are written if NORM or MOVE is set.
    """
    column = tl.arange(0, BLOCK)
    is_column = column < HALF
    mask = is_head[:, None] & is_column[None, :]
    x_ptrs = x_ptr + head[:, None] * x_head_stride + column[None, :]
    first = tl.load(x_ptrs, mask=mask, other=0.0)
    second = tl.load(x_ptrs + HALF, mask=mask, other=0.0)
    HAS_REST: tl.constexpr = SIZE > 2 * HALF and (NORM or MOVE)
    if HAS_REST:
        rest_column = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest_mask = is_head[:, None] & (rest_column < SIZE)[None, :]
        rest = tl.load(
            x_ptr + head[:, None] * x_head_stride + rest_column[None, :], mask=rest_mask, other=0.0
        )
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if HAS_REST:
            c = rest.to(tl.float32)
            squares += tl.sum(c * c, axis=1)
        scale = tl.rsqrt(squares / SIZE + eps)
        first = _weigh(first, scale, weight_ptr, column, is_column)
        second = _weigh(second, scale, weight_ptr + HALF, column, is_column)
        if HAS_REST:
            rest = _weigh(rest, scale, weight_ptr, rest_column, rest_column < SIZE)
    a, b = first.to(tl.float32), second.to(tl.float32)
    out_ptrs = out_ptr + head[:, None] * out_head_stride + column[None, :]
    tl.store(
        out_ptrs,
        in_type_of(out_ptr, (a * cos[None, :] - b * sin[None, :]).to(first.dtype)),
        mask=mask & is_stored,
    )
    tl.store(
        out_ptrs + HALF,
        in_type_of(out_ptr, (b * cos[None, :] + a * sin[None, :]).to(first.dtype)),
        mask=mask & is_stored,
    )
    if HAS_REST:
        tl.store(
            out_ptr + head[:, None] * out_head_stride + rest_column[None, :],
            in_type_of(out_ptr, rest),
            mask=rest_mask & is_stored,
        )


@triton.jit
def rotary_kernel(
    positions_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    num_heads,
    num_kv_heads,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    CACHE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A program handles the next HEADS heads of one token: first the queries', then the keys'.

    With CACHE keys are written to the cache, and values with them. block_stride is the distance
    between blocks of BLOCK_SIZE tokens in both caches.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    angle_ptrs = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + column
    dtype = query_ptr.dtype.element_ty
    cos = tl.load(angle_ptrs, mask=column < HALF, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(angle_ptrs + HALF, mask=column < HALF, other=0.0).to(dtype).to(tl.float32)
    num_query_pieces = tl.cdiv(num_heads, HEADS)
    if piece < num_query_pieces:
        query = query_ptr + token * query_stride
        head = piece * HEADS + tl.arange(0, HEADS)
        _rotate(
            query,
            query_head_stride,
            query,
            query_head_stride,
            head,
            head < num_heads,
            True,
            query_norm_ptr,
            eps,
            cos,
            sin,
            SIZE,
            HALF,
            BLOCK,
            REST_BLOCK,
            NORM,
            False,
        )
        return
    key = key_ptr + token * key_stride
    head = (piece - num_query_pieces) * HEADS + tl.arange(0, HEADS)
    is_head = head < num_kv_heads
    if CACHE:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * num_kv_heads * SIZE
        _rotate(
            key,
            key_head_stride,
            key_cache_ptr + place,
            SIZE,
            head,
            is_head,
            slot >= 0,
            key_norm_ptr,
            eps,
            cos,
            sin,
            SIZE,
            HALF,
            BLOCK,
            REST_BLOCK,
            NORM,
            True,
        )
        WIDTH: tl.constexpr = triton.next_power_of_2(SIZE)
        column = tl.arange(0, WIDTH)
        mask = is_head[:, None] & (column < SIZE)[None, :] & (slot >= 0)
        value = tl.load(
            value_ptr + token * value_stride + head[:, None] * value_head_stride + column[None, :],
            mask=mask,
        )
        tl.store(
            value_cache_ptr + place + head[:, None] * SIZE + column[None, :],
            in_type_of(value_cache_ptr, value),
            mask=mask,
        )
    else:
        _rotate(
            key,
            key_head_stride,
            key,
            key_head_stride,
            head,
            is_head,
            True,
            key_norm_ptr,
            eps,
            cos,
            sin,
            SIZE,
            HALF,
            BLOCK,
            REST_BLOCK,
            NORM,
            False,
        )


def _launch(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    cos_sin_cache: Tensor,
    caches: tuple[Tensor | None, Tensor | None],
    slots: Tensor | None,
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
) -> None:
    num_heads = query.shape[1]
    num_kv_heads = key.shape[1]
    size = query.shape[2]
    half = cos_sin_cache.shape[1] // 2
    block = triton.next_power_of_2(half)
    # Each thread has 8 elements of both halves, or 16 bytes in bf16. More heads than exist would
    # leave threads without work.
    heads = min(max(1, TILE // block), triton.next_power_of_2(max(num_heads, num_kv_heads)))
    grid = (len(query), triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))
    value_strides = (0, 0) if value is None else (value.stride(0), value.stride(1))
    rotary_kernel[grid](
        positions,
        query,
        key,
        value,
        cos_sin_cache,
        *caches,
        slots,
        *norms,
        eps,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        *value_strides,
        num_heads,
        num_kv_heads,
        0 if caches[0] is None else caches[0].stride(0),
        BLOCK_SIZE=1 if caches[0] is None else caches[0].shape[1],
        SIZE=size,
        HALF=half,
        BLOCK=block,
        REST_BLOCK=triton.next_power_of_2(max(1, size - 2 * half)),
        HEADS=heads,
        NORM=norms[0] is not None,
        CACHE=slots is not None,
        **dependent(),
        num_warps=max(1, heads * block // 256),
        **PLAIN,
    )


@triton.jit
def by_component_kernel(
    positions_ptr,
    offsets_ptr,
    x_ptr,
    cos_sin_ptr,
    components_ptr,
    offset_stride,
    x_stride,
    x_head_stride,
    heads,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A program rotates HEADS of the `heads` heads of a token; each pair has a position."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    is_pair = pair < HALF
    mask = (head < heads)[:, None] & is_pair[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    component = tl.load(components_ptr + pair, mask=is_pair, other=0)
    offset = tl.load(offsets_ptr + component * offset_stride + token, mask=is_pair, other=0)
    position = tl.load(positions_ptr + token) + offset.to(tl.int64)
    angles = cos_sin_ptr + position * (2 * HALF) + pair
    cos = tl.load(angles, mask=is_pair, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(angles + HALF, mask=is_pair, other=0.0).to(dtype).to(tl.float32)
    x_ptrs = x_ptr + token * x_stride + head[:, None] * x_head_stride + pair[None, :]
    a = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptrs, (a * cos[None, :] - b * sin[None, :]).to(dtype), mask=mask)
    tl.store(x_ptrs + HALF, (b * cos[None, :] + a * sin[None, :]).to(dtype), mask=mask)


@register("rotary_embedding_by_component", name="triton", predicate=is_cuda, priority=PRIORITY)
def rotary_embedding_by_component(
    positions: Tensor,
    offsets: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    components: Tensor,
) -> None:
    half = cos_sin_cache.shape[1] // 2
    block = triton.next_power_of_2(half)
    at_once = max(1, TILE // block)
    for x in (query, key):
        num_tokens, heads = x.shape[:2]
        if num_tokens * heads:
            by_component_kernel[num_tokens, triton.cdiv(heads, at_once)](
                positions,
                offsets,
                x,
                cos_sin_cache,
                components,
                offsets.stride(0),
                *x.stride()[:2],
                heads,
                HALF=half,
                BLOCK=block,
                HEADS=at_once,
                **PLAIN,
            )


@register("rotary_embedding", name="triton", predicate=is_cuda, priority=PRIORITY)
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    _launch(positions, query, key, None, cos_sin_cache, (None, None), None, (None, None), 0.0)


@register(
    "fused_qk_rope_reshape_and_cache", name="triton", predicate=reads_cache, priority=PRIORITY
)
def fused_qk_rope_reshape_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    if key_cache.dtype == torch.int8:  # an integer needs the largest element of its head
        key = key.clone()
        norms = query_norm, key_norm
        _launch(positions, query, key, None, cos_sin_cache, (None, None), None, norms, eps)
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        return
    _launch(
        positions,
        query,
        key,
        value,
        cos_sin_cache,
        (key_cache, value_cache),
        slot_mapping,
        (query_norm, key_norm),
        eps,
    )
