"""Implements the operations of several streams, and of sparse activations, in Triton.

Must not know: models, requests.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PLAIN, PRIORITY, TILE, is_cuda


@triton.jit
def stack_streams_kernel(
    x_ptr,
    others_ptr,
    out_ptr,
    x_stride,
    others_stride,
    others_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [T, SIZE] and others [T, ., SIZE] with strides; out [T, ., SIZE] contiguous."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    if stream == 0:
        ptr = x_ptr + token * x_stride
    else:
        ptr = others_ptr + token * others_stride + (stream - 1) * others_head
    out = out_ptr + (token * tl.num_programs(1) + stream) * SIZE
    tl.store(out + column, tl.load(ptr + column, mask=mask), mask=mask)


@register("stack_streams", name="triton", predicate=is_cuda, priority=PRIORITY)
def stack_streams(x: Tensor, others: Tensor) -> Tensor:
    tokens, count, size = others.shape
    out = x.new_empty(tokens, 1 + count, size)
    block = min(TILE, triton.next_power_of_2(size))
    stack_streams_kernel[tokens, 1 + count, triton.cdiv(size, block)](
        x, others, out, x.stride(0), *others.stride()[:2], SIZE=size, BLOCK=block
    )
    return out


@triton.jit
def match_magnitude_kernel(
    x_ptr, like_ptr, x_stride, x_head, like_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """x [T, ., SIZE] and like [T, SIZE] with strides; x in place."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    like = tl.load(like_ptr + token * like_stride + column, mask=mask, other=0.0).to(tl.float32)
    x_ptrs = x_ptr + token * x_stride + tl.program_id(1) * x_head + column
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    wanted, own = tl.sum(like * like, axis=0) / SIZE, tl.sum(x * x, axis=0) / SIZE
    own = tl.where(own < 1e-5, 1e-5, own)
    factor = tl.sqrt(wanted) / tl.sqrt(own)
    tl.store(x_ptrs, (x * factor).to(x_ptr.dtype.element_ty), mask=mask)


@register("match_magnitude", name="triton", predicate=is_cuda, priority=PRIORITY)
def match_magnitude(x: Tensor, like: Tensor) -> None:
    tokens, count, size = x.shape
    match_magnitude_kernel[tokens, count](
        x, like, *x.stride()[:2], like.stride(0), **_whole_rows(size)
    )


@triton.jit
def _tanh(x):
    """1 - 2 / (e**(2 x) + 1), which is 1 where the power is infinite."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def altup_predict_kernel(
    streams_ptr,
    routed_ptr,
    weight_ptr,
    out_ptr,
    token_stride,
    stream_stride,
    routed_stride,
    COUNT: tl.constexpr,
    ALL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """streams [T, COUNT, SIZE] with strides, out contiguous. A program handles a block of columns
    of a token's streams. ALL: the power of two that covers COUNT.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, ALL)
    mask = column < SIZE
    routed_ptrs = routed_ptr + token * routed_stride + stream
    mixed = _tanh(tl.load(routed_ptrs, mask=stream < COUNT, other=0.0))
    both = (stream < COUNT)[:, None] & (stream < COUNT)[None, :]
    ptrs = streams_ptr + token * token_stride + column
    x = tl.load(
        ptrs[None, :] + stream[:, None] * stream_stride,
        mask=(stream < COUNT)[:, None] & mask[None, :],
        other=0.0,
    ).to(tl.float32)
    for i in tl.static_range(COUNT):
        weight_ptrs = weight_ptr + (i * COUNT + stream[:, None]) * COUNT + stream[None, :]
        weight = tl.load(weight_ptrs, mask=both, other=0.0)
        factors = tl.sum(weight * mixed[None, :], axis=1)
        own = tl.load(ptrs + i * stream_stride, mask=mask, other=0.0).to(tl.float32)
        predicted = own + tl.sum(factors[:, None] * x, axis=0)
        out_ptrs = out_ptr + (token * COUNT + i) * SIZE + column
        tl.store(out_ptrs, predicted.to(out_ptr.dtype.element_ty), mask=mask)


@register("altup_predict", name="triton", predicate=is_cuda, priority=PRIORITY)
def altup_predict(streams: Tensor, routed: Tensor, weight: Tensor) -> Tensor:
    tokens, count, size = streams.shape
    out = streams.new_empty(tokens, count, size)
    blocks, sizes = _blocks_of_streams(count, size)
    altup_predict_kernel[tokens, blocks](
        streams,
        routed,
        weight,
        out,
        *streams.stride()[:2],
        routed.stride(0),
        **sizes,
        **PLAIN,
    )
    return out


@triton.jit
def altup_correct_kernel(
    streams_ptr,
    activated_ptr,
    routed_ptr,
    weight_ptr,
    token_stride,
    stream_stride,
    activated_stride,
    routed_stride,
    active,
    COUNT: tl.constexpr,
    ALL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """streams [T, COUNT, SIZE] and activated [T, SIZE] with strides; the streams in place."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, ALL)
    mask = column < SIZE
    routed_ptrs = routed_ptr + token * routed_stride + stream
    mixed = _tanh(tl.load(routed_ptrs, mask=stream < COUNT, other=0.0))
    both = (stream < COUNT)[:, None] & (stream < COUNT)[None, :]
    weight_ptrs = weight_ptr + stream[:, None] * COUNT + stream[None, :]
    factors = 1.0 + tl.sum(tl.load(weight_ptrs, mask=both, other=0.0) * mixed[None, :], axis=1)
    ptrs = streams_ptr + token * token_stride + column
    before = tl.load(ptrs + active * stream_stride, mask=mask, other=0.0).to(tl.float32)
    activated_ptrs = activated_ptr + token * activated_stride + column
    change = tl.load(activated_ptrs, mask=mask, other=0.0).to(tl.float32) - before
    all_ptrs = ptrs[None, :] + stream[:, None] * stream_stride
    masks = (stream < COUNT)[:, None] & mask[None, :]
    x = tl.load(all_ptrs, mask=masks, other=0.0).to(tl.float32)
    corrected = x + factors[:, None] * change[None, :]
    # every thread has read the active stream before one writes to it
    tl.debug_barrier()
    tl.store(all_ptrs, corrected.to(streams_ptr.dtype.element_ty), mask=masks)


@register("altup_correct", name="triton", predicate=is_cuda, priority=PRIORITY)
def altup_correct(
    streams: Tensor, activated: Tensor, routed: Tensor, weight: Tensor, active: int
) -> None:
    tokens, count, size = streams.shape
    blocks, sizes = _blocks_of_streams(count, size)
    altup_correct_kernel[tokens, blocks](
        streams,
        activated,
        routed,
        weight,
        *streams.stride()[:2],
        activated.stride(0),
        routed.stride(0),
        active,
        **sizes,
        **PLAIN,
    )


@triton.jit(do_not_specialize=["deviations"])
def gaussian_top_k_kernel(
    x_ptr, deviations, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr
):
    """x [T, SIZE] with strides, in place. A program reads its row in blocks, three times. ROW: the
    blocks of a row.
    """
    ptr = x_ptr + tl.program_id(0).to(tl.int64) * token_stride
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(ROW):
        at = i * BLOCK + column
        total += tl.load(ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / SIZE
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range(ROW):
        at = i * BLOCK + column
        x = tl.load(ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
        centred = tl.where(at < SIZE, x - mean, 0.0)
        squares += centred * centred
    cut = mean + deviations * tl.sqrt(tl.sum(squares, axis=0) / SIZE)
    for i in range(ROW):
        at = i * BLOCK + column
        x = tl.load(ptr + at, mask=at < SIZE, other=0.0).to(tl.float32) - cut
        kept = tl.where(x < 0.0, 0.0, x)  # NaN stays
        tl.store(ptr + at, kept.to(x_ptr.dtype.element_ty), mask=at < SIZE)


@register("gaussian_top_k", name="triton", predicate=is_cuda, priority=PRIORITY)
def gaussian_top_k(x: Tensor, deviations: float) -> None:
    size = x.shape[1]
    block = min(2 * TILE, triton.next_power_of_2(size))
    gaussian_top_k_kernel[(len(x),)](
        x,
        deviations,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        ROW=triton.cdiv(size, block),
        **PLAIN,
    )


def _whole_rows(size: int) -> dict[str, int | bool]:
    """Sizes and warps of a program that holds a row."""
    block = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": 8 if block > 2 * TILE else 4, **PLAIN}


def _blocks_of_streams(count: int, size: int) -> tuple[int, dict[str, int]]:
    """The blocks of columns of a row's streams, and the sizes that they are compiled for."""
    of_all = triton.next_power_of_2(count)
    block = min(max(TILE // of_all, 32), triton.next_power_of_2(size))
    return triton.cdiv(size, block), {"COUNT": count, "ALL": of_all, "SIZE": size, "BLOCK": block}
