"""Computes attention for one tile of keys: its slots, its scores, its step of the online softmax
(Milakov & Gimelshein 2018).

Must not know: which positions a program visits and why; how results are stored.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # the hardware's exponential has base 2
# This is the maximum of an empty set of logits. It is finite, so that subtracting it from itself
# gives 0.
NOTHING = tl.constexpr(-1e30)


@triton.jit
def slots_of(
    table,
    positions,
    in_context,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """positions [TILE], ascending from a multiple of TILE -> offsets of their slots in a cache,
    i64.

    table points to the request's block table. If tiles never straddle blocks, one scalar look-up
    serves the tile, and at least one position must be in context. Otherwise the entries of
    positions outside in_context are not read.
    """
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + tl.min(positions, 0) // BLOCK_SIZE).to(tl.int64)
    elif MASKED:
        block = tl.load(table + positions // BLOCK_SIZE, mask=in_context, other=0).to(tl.int64)
    else:
        block = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
    return block * stride_block + (positions % BLOCK_SIZE) * stride_slot


@triton.jit
def in_dtype(cached, query):
    """Converts keys or values of an fp8 cache to the query's dtype for the tensor cores. The
    conversion is exact. Other dtypes are returned unchanged.
    """
    return cached if cached.dtype == query.dtype else cached.to(query.dtype)


@triton.jit
def first_scale(cache_ptr, head, stride_slot, BLOCK_SIZE: tl.constexpr):
    """-> the place in block 0 of an int8 cache where this KV head's scales begin, in bytes. Of
    other caches nobody reads it.
    """
    return cache_ptr + BLOCK_SIZE * stride_slot + head * (4 * BLOCK_SIZE)


@triton.jit
def scales_of(
    scales_ptr,
    table,
    positions,
    in_context,
    stride_block,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """first_scale's result -> scales [TILE] f32 of positions, which slots_of describes."""
    places = slots_of(table, positions, in_context, stride_block, 4, BLOCK_SIZE, TILE, MASKED)
    scale_ptrs = (scales_ptr + places).to(tl.pointer_type(tl.float32))
    return tl.load(scale_ptrs, mask=in_context, other=0.0)


@triton.jit
def scaled(values, scales, query):
    """Values [TILE, D] of an int8 cache times their scales [TILE], in the query's dtype."""
    return (values.to(tl.float32) * scales[:, None]).to(query.dtype)


@triton.jit
def capped(scores, scale, SOFTCAP: tl.constexpr):
    """-> (scores, factor), whose product is the logits in base 2.

    A soft-cap c replaces a logit x by c tanh(x / c). tanh is computed as 1 - 2 / (exp(2 x / c) +
    1), which is exact at both ends and within 1e-7 c in between.
    """
    if SOFTCAP == 0.0:
        factor = scale * LOG2_E
    else:
        scores = SOFTCAP - 2.0 * SOFTCAP / (
            tl.exp2(scores * (scale * (2.0 * LOG2_E / SOFTCAP))) + 1.0
        )
        factor = scale * 0.0 + LOG2_E
    return scores, factor


@triton.jit
def with_sinks(sinks_ptr, heads, is_row):
    """-> (largest, total) of rows of these heads [M] that have seen nothing but their sinks.

    is_row [M]: the others' results are arbitrary.
    """
    sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0) * LOG2_E
    return tl.maximum(sinks, NOTHING), tl.full(heads.shape, 1.0, tl.float32)


@triton.jit
def softmax_step(scores, factor, largest, total):
    """Adds a tile's logits, scores [M, TILE] times factor > 0, -inf where masked, to their rows'
    largest logit in base 2 [M] and total [M].

    -> both, the weights of the tile's values [M, TILE], and the factor of sums so far [M].
    """
    new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
    shrink = tl.exp2(largest - new_largest)
    weights = tl.exp2(tl.fma(scores, factor, -new_largest[:, None]))
    return new_largest, tl.fma(total, shrink, tl.sum(weights, 1)), weights, shrink


@triton.jit
def online_softmax(scores, factor, values, largest, total, acc):
    """Adds a tile to its rows' state.

    The state is largest [M], the largest logit in base 2, and total [M] and acc [M, D], the sums of
    exp2(logit - largest) and of that times the values. The logits are those of softmax_step; values
    [TILE, D].
    """
    largest, total, weights, shrink = softmax_step(scores, factor, largest, total)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return largest, total, acc


@triton.jit
def merge(largest, total, acc, later_largest, later_total, later_acc):
    """Merges the states of the same rows over some keys and over later ones.

    Fused multiply-adds are explicit, so that the bits are the same in every kernel that inlines
    this.
    """
    new_largest = tl.maximum(largest, later_largest)
    shrink, later_shrink = tl.exp2(largest - new_largest), tl.exp2(later_largest - new_largest)
    total = tl.fma(total, shrink, later_total * later_shrink)
    acc = tl.fma(acc, shrink[:, None], later_acc * later_shrink[:, None])
    return new_largest, total, acc


@triton.jit
def normalised(total, acc, value_scale):
    """The state of rows -> their attention; zeros for a row without keys."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
