"""Multiplies up to sixteen rows by weights on a GPU, together with what stands before and after the
product: an RMS norm of the input, a gate, an addition to the residual stream.

Must not know: models, requests.

A decode of few requests takes the time of reading the weights, if enough of their bytes are under
way. An H100 reads 3.3 TB/s and answers a load after about 0.8 us under load, so 2.6 MB must be
under way, 20 KB per multiprocessor. A program of 16-bit weights keeps STAGES - 1 = 3 tiles of 16 or
32 columns x 128 numbers under way, 12 or 24 KB, by loads of 16 bytes. There are at least PROGRAMS
of them, four per multiprocessor, where the weight is large enough: 48 KB or more.

Where there are fewer columns, the sum over K is cut into pieces by the weight's shape alone, and
the last program to end adds them in ascending order, as in product.py. All numbers of rows have one
tile, whose unused rows are zero.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import gemv
from .activation import activated
from .device import dependent
from .product import add_pieces

ROWS = 16  # of a tensor core's instruction
PROGRAMS = 528  # four for each multiprocessor of an H100; a constant, as in product.py
MIN_PIECE = 256  # elements of K, see product.py
COLUMNS = (32, 16)  # of a tile: the first of them that makes PROGRAMS programs
STAGES = 4
WARPS = 4
GEMV_ROWS = gemv.ROWS  # up to so many rows, gemv.py computes
PREFETCH = 8  # cache lines of each column
CHUNK = 512  # elements of K that are squared at once

# Up to how many rows a product of a weight of at most so many bytes is computed here, and up to how
# many with the norm of its input, which every program computes again: it reads rows * K numbers
# besides its own part of the weight. Beyond, cuBLAS and a kernel for each neighbour run. These
# limits are by the arithmetic above, and have not been measured on a GPU.
MOST_ROWS: tuple[tuple[int, int, int], ...] = (
    # bytes of the weight, rows, rows with a norm
    (4 << 20, 16, 2),
    (1 << 40, 16, 4),
)


@triton.jit(do_not_specialize=["num_rows", "eps"])
def few_rows_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    num_rows,
    x_stride,
    weight_stride,
    out_stride,
    eps,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PIECE: tl.constexpr,
    NORM_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PREFETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """y = x [num_rows, IN] times weight [OUT, IN], plus the bias; NORM_ROWS: x is normalised first,
    with the weight norm [IN], and has at most so many rows; 0: it is not. Grid (tiles, pieces).

    GATE: "" or an activation: out [num_rows, OUT / 2] is that of y's first half times the second.
    ADDS: y is added to out. sums [pieces, num_rows, OUT] f32; counters: one for each tile, 0 before
    and after.
    """
    NUM_PIECES: tl.constexpr = (IN + PIECE - 1) // PIECE
    if DEPENDENT:
        gdc_launch_dependents()
    row, depth = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    place = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = place
    if GATE != "":  # the columns of a gate and of its factor alternate
        column = place // 2 + (place % 2) * (OUT // 2)
    is_row, is_column = row < num_rows, place < OUT
    stored = is_row[:, None] & is_column[None, :]
    piece = tl.program_id(1)
    if DEPENDENT:
        if PREFETCH > 0:  # the first weights come as far as the L2 cache meanwhile
            LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
            line = tl.arange(0, PREFETCH) * LINE
            lines = column.to(tl.int64)[:, None] * weight_stride + piece * PIECE + line[None, :]
            lines = tl.where(is_column[:, None] & (line < IN - piece * PIECE)[None, :], lines, 0)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [(weight_ptr + lines).to(tl.int64)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        gdc_wait()
    if NORM_ROWS > 0:
        few = tl.arange(0, NORM_ROWS)
        squares = tl.zeros([NORM_ROWS, CHUNK], tl.float32)
        for start in tl.static_range(0, IN, CHUNK):
            at = start + tl.arange(0, CHUNK)
            is_here = (few < num_rows)[:, None] & (at < IN)[None, :]
            some = tl.load(x_ptr + few[:, None] * x_stride + at[None, :], mask=is_here, other=0.0)
            squares += some.to(tl.float32) * some.to(tl.float32)
        factor = tl.rsqrt(tl.sum(squares, axis=1) / IN + eps)
        factor = tl.broadcast_to(factor[None, :], [ROWS // NORM_ROWS, NORM_ROWS])
        factor = tl.reshape(factor, [ROWS])  # of row i % NORM_ROWS
    x_ptrs = x_ptr + row[:, None] * x_stride + depth[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * weight_stride + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, IN), DEPTH):
        here = depth < IN - start
        x = tl.load(x_ptrs + start, mask=is_row[:, None] & here[None, :], other=0.0)
        if NORM_ROWS > 0:
            norm = tl.load(norm_ptr + start + depth, mask=here, other=0.0)
            normal = x.to(tl.float32) * factor[:, None]  # pyright: ignore
            normal = normal.to(norm.dtype).to(tl.float32)
            x = (normal * norm.to(tl.float32)[None, :]).to(x.dtype)
        mask = here[:, None] & is_column[None, :]
        weight = tl.load(weight_ptrs + start, mask=mask, other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    is_last = True
    if NUM_PIECES > 1:
        sums_ptrs = sums_ptr + row[:, None] * OUT + place[None, :]
        counter = counters_ptr + tl.program_id(0)
        total, is_last = add_pieces(
            total, sums_ptrs, num_rows * OUT, stored, counter, piece, NUM_PIECES
        )
    if not is_last:
        return
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    dtype = out_ptr.dtype.element_ty
    y = total.to(dtype).to(tl.float32)
    out_rows = out_ptr + row.to(tl.int64)[:, None] * out_stride
    if GATE != "":
        gate, factors = tl.split(tl.reshape(y, [ROWS, COLUMNS // 2, 2]))
        y = activated(gate, GATE).to(dtype).to(tl.float32) * factors
        half = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        is_half = is_row[:, None] & (half < OUT // 2)[None, :]
        tl.store(out_rows + half[None, :], y.to(dtype), mask=is_half)
    else:
        out_ptrs = out_rows + place[None, :]
        if ADDS:
            y += tl.load(out_ptrs, mask=stored, other=0.0).to(tl.float32)
        tl.store(out_ptrs, y.to(dtype), mask=stored)


def is_for_few_rows(num_rows: int, weight: Tensor, has_norm: bool) -> bool:
    """Whether `multiply` computes so many rows; the one place where this is chosen."""
    for most_bytes, rows, rows_with_norm in MOST_ROWS:
        if weight.nbytes <= most_bytes:
            return 0 < num_rows <= (rows_with_norm if has_norm else rows)
    return False


@functools.cache
def _tile(in_features: int, out_features: int, itemsize: int) -> dict[str, int]:
    """The sizes of tiles and pieces, by the weight's shape alone."""
    numbers = [n for n in COLUMNS if triton.cdiv(out_features, n) >= PROGRAMS] or [COLUMNS[-1]]
    depth = 256 // itemsize if itemsize < 4 else 32
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(out_features, numbers[0]))
    most = max(1, in_features // MIN_PIECE)
    piece = triton.cdiv(triton.cdiv(in_features, min(wanted, most)), depth) * depth
    return {"COLUMNS": numbers[0], "DEPTH": depth, "PIECE": piece}


def make_counters(weight: Tensor) -> Tensor:
    """What `multiply` needs besides a weight: a number for each tile whose sums are in pieces."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=weight.device)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor,
    norm: tuple[Tensor, float] | None = None,
    gate: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """The linear layer of x [R, K], R at most 16, with weight [N, K] and bias [N] -> [R, N].

    norm: the weight [K] and eps of `rms_norm` of x. gate: "silu", "gelu" or "gelu_tanh": the result
    is that of the operation with this name and `_and_mul`, [R, N / 2]. residual [R, N]: the result
    is added to it in place, as `add` does, and it is what is returned. Each is rounded as these
    operations one after the other.
    """
    if len(x) <= GEMV_ROWS:
        return gemv.multiply(x, weight, bias, norm, gate, residual)
    return multiply_tiles(x, weight, bias, counters, norm, gate, residual)


def multiply_tiles(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    counters: Tensor,
    norm: tuple[Tensor, float] | None = None,
    gate: str = "",
    residual: Tensor | None = None,
) -> Tensor:
    """`multiply` on tensor cores, for all numbers of rows."""
    num_rows, (out_features, in_features) = len(x), weight.shape
    tile = _tile(in_features, out_features, x.element_size())
    num_pieces = triton.cdiv(in_features, tile["PIECE"])
    out = residual
    if out is None:
        out = x.new_empty(num_rows, out_features // 2 if gate else out_features)
    sums: Any = out
    if num_pieces > 1:
        sums = x.new_empty(num_pieces, num_rows, out_features, dtype=torch.float32)
    norm_weight, eps = (weight, 0.0) if norm is None else norm
    few_rows_kernel[triton.cdiv(out_features, tile["COLUMNS"]), num_pieces](
        x,
        norm_weight,
        weight,
        weight if bias is None else bias,
        out,
        sums,
        counters,
        num_rows,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        eps,
        IN=in_features,
        OUT=out_features,
        **tile,
        NORM_ROWS=0 if norm is None else triton.next_power_of_2(num_rows),
        HAS_BIAS=bias is not None,
        GATE=gate,
        ADDS=residual is not None,
        ROWS=ROWS,
        CHUNK=CHUNK,
        PREFETCH=PREFETCH,
        **dependent(),
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=False,
    )
    return out
