"""Multiplies one or two rows by weights on a GPU without tensor cores, together with what stands
before and after the product: an RMS norm of the input, a gate, an addition to the residual stream.

Must not know: models, requests.

A decode of few requests takes the time of reading the weights, if enough of their bytes are under
way. A program computes COLUMNS whole sums over K: no pieces, no atomics, nothing in shared memory
but the last step of a sum. It has AHEAD chunks of DEPTH elements of its columns under way, in
registers. The first of them it requests before the kernel in front of it has ended (DEPENDENT, on
sm_90): weights do not depend on that kernel, and so memory never rests between two products. So no
kernel directly in front may write weights, nor norms and biases.

    kernel N      [ its weights ][ waits for N - 1 ][ x, sums, stores ]
    kernel N + 1         [ its weights ][ waits for N                 ][ x, sums, stores ]

A row's sums have one order, whatever the number of rows. More rows are as fast with cuBLAS and a
kernel for each neighbour.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .activation import activated
from .device import dependent

# Up to how many rows a product of a weight of at most so many bytes is computed here. Of an H200's
# layers (microseconds, one and two rows; cuBLAS and a kernel for each neighbour): 0.5B 13.6 and
# 18.4 (26.8), 0.6B 15.0 and 19.6 (32.7), 7B 114 and 163 (135).
MOST_ROWS = ((20 << 20, 2), (1 << 40, 1))
DEPTH = 1024  # elements of K in a chunk: 128 threads load 16 bytes each
HELD = 16  # columns times chunks that a thread has under way: 64 registers in 16 bits
COLUMNS = (8, 4, 2)  # of a program: the first of them that makes PROGRAMS programs
PROGRAMS = 264  # two for each multiprocessor of an H100; a constant, so that bits are the same
WARPS = 4
EACH = tl.constexpr(8)  # elements of a thread, which are added first


@triton.jit
def _chunk(
    weight_ptrs, is_column, start, IN: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr
):
    """The columns' weights [COLUMNS, DEPTH] at `start` of K."""
    mask = is_column[:, None]
    if IN % (DEPTH * AHEAD) != 0:
        mask = mask & (start + tl.arange(0, DEPTH) < IN)[None, :]
    return tl.load(
        weight_ptrs + start,
        mask=mask,
        other=0.0,
        cache_modifier=".cg",
    )


@triton.jit
def _norm(norm_ptr, start, IN: tl.constexpr, HAS_NORM: tl.constexpr, DEPTH: tl.constexpr):
    """The norm's weights [DEPTH] at `start` of K; 0 without a norm."""
    if HAS_NORM:
        place = start + tl.arange(0, DEPTH)
        return tl.load(norm_ptr + place, mask=place < IN, other=0.0)
    else:
        return 0.0


@triton.jit
def _add_chunk(
    totals,
    weight,
    norm,
    x_ptr,
    x_stride,
    factors,
    start,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Returns the totals of the rows, each with a chunk's products added."""
    place = start + tl.arange(0, DEPTH)
    here = place < IN
    added = ()
    for row in tl.static_range(0, ROWS):
        x = tl.load(x_ptr + row * x_stride + place, mask=here, other=0.0)
        if HAS_NORM:
            normal = (x.to(tl.float32) * factors[row]).to(norm.dtype).to(tl.float32)
            x = (normal * norm.to(tl.float32)).to(x.dtype)
        products = weight.to(tl.float32) * x.to(tl.float32)[None, :]
        products = tl.reshape(products, [COLUMNS, DEPTH // EACH, EACH])
        added = added + (totals[row] + tl.sum(products, axis=2),)
    return added


@triton.jit(do_not_specialize=["eps"])
def few_rows_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    weight_stride,
    out_stride,
    eps,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y = x [ROWS, IN] times weight [OUT, IN], plus the bias; HAS_NORM: x is normalised first, with
    the weight norm [IN]. Grid (programs of COLUMNS columns).

    GATE: "" or an activation: out [ROWS, OUT / 2] is that of y's first half times the second.
    ADDS: y is added to out.
    """
    CHUNKS: tl.constexpr = (IN + DEPTH - 1) // DEPTH
    if DEPENDENT:
        gdc_launch_dependents()
    depth = tl.arange(0, DEPTH)
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = place
    if GATE != "":  # the columns of a gate and of its factor alternate
        column = place // 2 + (place % 2) * (OUT // 2)
    is_column = place < OUT
    weight_ptrs = weight_ptr + column.to(tl.int64)[:, None] * weight_stride + depth[None, :]
    held = ()
    norms = ()
    for i in tl.static_range(0, AHEAD):
        held = held + (_chunk(weight_ptrs, is_column, i * DEPTH, IN, DEPTH, AHEAD),)
        norms = norms + (_norm(norm_ptr, i * DEPTH, IN, HAS_NORM, DEPTH),)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    else:
        bias = 0.0
    if DEPENDENT:
        gdc_wait()
    factors = ()
    if HAS_NORM:
        for row in tl.static_range(0, ROWS):
            squares = tl.zeros([DEPTH], tl.float32)
            for at in range(0, CHUNKS * DEPTH, DEPTH):
                some = tl.load(
                    x_ptr + row * x_stride + at + depth,
                    mask=at + depth < IN,
                    other=0.0,
                ).to(tl.float32)
                squares += some * some
            factors = factors + (tl.rsqrt(tl.sum(squares, axis=0) / IN + eps),)
    totals = ()
    for _ in tl.static_range(0, ROWS):
        totals = totals + (tl.zeros([COLUMNS, DEPTH // EACH], tl.float32),)
    for first in range(0, (CHUNKS - 1) // AHEAD * AHEAD, AHEAD):
        loaded = ()
        loaded_norms = ()
        for number in tl.static_range(0, AHEAD):
            start = (first + number) * DEPTH
            totals = _add_chunk(
                totals,
                held[number],
                norms[number],
                x_ptr,
                x_stride,
                factors,
                start,
                IN,
                ROWS,
                HAS_NORM,
                COLUMNS,
                DEPTH,
            )
            loaded = loaded + (
                _chunk(weight_ptrs, is_column, start + AHEAD * DEPTH, IN, DEPTH, AHEAD),
            )
            loaded_norms = loaded_norms + (
                _norm(norm_ptr, start + AHEAD * DEPTH, IN, HAS_NORM, DEPTH),
            )
        held, norms = loaded, loaded_norms
    LAST: tl.constexpr = (CHUNKS - 1) // AHEAD * AHEAD
    for i in tl.static_range(0, CHUNKS - LAST):
        totals = _add_chunk(
            totals,
            held[i],
            norms[i],
            x_ptr,
            x_stride,
            factors,
            (LAST + i) * DEPTH,
            IN,
            ROWS,
            HAS_NORM,
            COLUMNS,
            DEPTH,
        )
    dtype = out_ptr.dtype.element_ty
    for row in tl.static_range(0, ROWS):
        total = tl.sum(totals[row], axis=1)
        if HAS_BIAS:
            total += bias
        y = total.to(dtype).to(tl.float32)
        if GATE != "":
            gate, factor = tl.split(tl.reshape(y, [COLUMNS // 2, 2]))
            y = activated(gate, GATE).to(dtype).to(tl.float32) * factor
            half = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            tl.store(out_ptr + row * out_stride + half, y.to(dtype), mask=half < OUT // 2)
        else:
            out_ptrs = out_ptr + row * out_stride + place
            if ADDS:
                y += tl.load(out_ptrs, mask=is_column, other=0.0).to(tl.float32)
            tl.store(out_ptrs, y.to(dtype), mask=is_column)


def is_for_few_rows(num_rows: int, weight: Tensor) -> bool:
    """Whether `multiply` computes so many rows; the one place where this is chosen."""
    for most_bytes, rows in MOST_ROWS:
        if weight.nbytes <= most_bytes:
            return 0 < num_rows <= rows
    return False


@functools.cache
def tile(in_features: int, out_features: int) -> dict[str, int]:
    """The sizes of tiles, by the weight's shape alone."""
    columns = next((n for n in COLUMNS if out_features >= n * PROGRAMS), COLUMNS[-1])
    ahead = max(1, min(triton.cdiv(in_features, DEPTH), HELD // columns))
    return {"COLUMNS": columns, "DEPTH": DEPTH, "AHEAD": ahead, "num_warps": WARPS}


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None = None,
    gate: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """The linear layer of x [R, K], R 1 or 2, with weight [N, K] and bias [N] -> [R, N].

    norm: the weight [K] and eps of `rms_norm` of x. gate: "silu", "gelu" or "gelu_tanh": the result
    is that of the operation with this name and `_and_mul`, [R, N / 2]. residual [R, N]: the result
    is added to it in place, as `add` does, and it is what is returned. Each is rounded as these
    operations one after the other.
    """
    num_rows, (out_features, in_features) = len(x), weight.shape
    out = residual
    if out is None:
        out = x.new_empty(num_rows, out_features // 2 if gate else out_features)
    norm_weight, eps = (weight, 0.0) if norm is None else norm
    shape = tile(in_features, out_features)
    few_rows_kernel[(triton.cdiv(out_features, shape["COLUMNS"]),)](
        x,
        norm_weight,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        eps,
        IN=in_features,
        OUT=out_features,
        ROWS=num_rows,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        GATE=gate,
        ADDS=residual is not None,
        **shape,
        **dependent(),
        enable_fp_fusion=False,
    )
    return out
