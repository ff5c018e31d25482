"""Multiplies by weights on a GPU in tiles whose sums have one order, whatever the number of rows.

Must not know: models, requests.

A sum over K is cut into pieces whose number depends on the weight's shape alone. The result is a
fold over the pieces in ascending order. Where there are few tiles, each piece has a program of its
own, and the program that ends last adds them (split-K in one launch); otherwise a program computes
all pieces of its tile. The order of memory accesses is that of attention_decode.

So a row's bits depend neither on the rows beside it nor on their number, as far as the tensor cores
add the products of one instruction alike in tiles of 64 and of 128 rows. Both have the same K.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cuda

# Two programs for each multiprocessor of an H100. It is a constant, so that the pieces are the same
# on all GPUs.
PROGRAMS = 264
MIN_PIECE = 256  # elements of K: shorter pieces would cost more in stored sums than they save
COLUMNS = 64  # of a tile of few rows; the pieces are counted for these tiles


@triton.jit
def add_pieces(total, sums_ptrs, piece_size, stored, counter, piece, NUM_PIECES: tl.constexpr):
    """Stores the `piece` of a tile's sums [ROWS, COLUMNS] f32. The program that ends last, as
    `counter` tells, adds all pieces in ascending order and returns (their sum, True).
    """
    tl.store(sums_ptrs + piece * piece_size, total, mask=stored)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == NUM_PIECES - 1
    if is_last:
        total = tl.zeros_like(total)
        for other in range(NUM_PIECES):
            # .cg: see attention_decode
            total += tl.load(
                sums_ptrs + other * piece_size, mask=stored, other=0.0, cache_modifier=".cg"
            )
        tl.store(counter, 0)
    return total, is_last


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sums_ptr,
    counters_ptr,
    num_rows,
    x_stride,
    weight_stride,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    PIECE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """out [num_rows, OUT] contiguous = x [num_rows, IN] times weight [OUT, IN], plus the bias. Grid
    (blocks of outputs, blocks of rows, pieces if IS_SHARED else 1). sums [pieces, num_rows, OUT]
    f32; counters: one for each tile, 0 before and after.
    """
    NUM_PIECES: tl.constexpr = (IN + PIECE - 1) // PIECE
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_row, is_column = row < num_rows, column < OUT
    stored = is_row[:, None] & is_column[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * weight_stride + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first, stop = 0, NUM_PIECES
    if IS_SHARED:
        first = tl.program_id(2)
        stop = first + 1
    for piece in range(first, stop):
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, IN), DEPTH):
            here = depth < IN - start
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & here[None, :], other=0.0)
            mask = here[:, None] & is_column[None, :]
            weight = tl.load(weight_ptrs + start, mask=mask, other=0.0)
            acc = tl.dot(x, weight, acc, input_precision="ieee")
        total += acc
    places = row.to(tl.int64)[:, None] * OUT + column[None, :]
    is_last = True
    if IS_SHARED:
        counter = counters_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        piece_size = num_rows.to(tl.int64) * OUT
        total, is_last = add_pieces(
            total, sums_ptr + places, piece_size, stored, counter, first, NUM_PIECES
        )
    if not is_last:
        return
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=stored)


def tile_shape(num_rows: int, dtype: torch.dtype) -> dict[str, int]:
    """wgmma, whose tiles have 64 rows for 4 warps, also for a single row: the time is that of
    reading the weight. In fp32 there is one shape.
    """
    if dtype == torch.float32:
        return {"ROWS": 64, "COLUMNS": COLUMNS, "DEPTH": 32, "num_warps": 4, "num_stages": 3}
    if num_rows <= 64:
        return {"ROWS": 64, "COLUMNS": COLUMNS, "DEPTH": 64, "num_warps": 4, "num_stages": 4}
    return {"ROWS": 128, "COLUMNS": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 3}


@functools.cache
def piece_of(in_features: int, out_features: int) -> int:
    """Returns the number of elements of K in a piece, a multiple of 64."""
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(out_features, COLUMNS))
    most = max(1, in_features // MIN_PIECE)
    return triton.cdiv(triton.cdiv(in_features, min(wanted, most)), 64) * 64


class FixedProduct:
    """A packed layer with the results described above."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight = weight  # [N, K]
        self.bias = bias
        self._piece = piece_of(weight.shape[1], weight.shape[0])
        self._counters = torch.zeros(PROGRAMS, dtype=torch.int32, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N] f32, without rounding to dtype"""
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        (num_rows, in_features), out_features = x.shape, len(self.weight)
        out = x.new_empty(num_rows, out_features, dtype=dtype)
        if not num_rows:
            return out
        shape = tile_shape(num_rows, x.dtype)
        blocks = triton.cdiv(out_features, shape["COLUMNS"]), triton.cdiv(num_rows, shape["ROWS"])
        num_pieces = triton.cdiv(in_features, self._piece)
        is_shared = num_pieces > 1 and blocks[0] * blocks[1] < PROGRAMS
        sums = out
        if is_shared:
            sums = x.new_empty(num_pieces, num_rows, out_features, dtype=torch.float32)
        product_kernel[(*blocks, num_pieces if is_shared else 1)](
            x,
            self.weight,
            self.weight if self.bias is None else self.bias,
            out,
            sums,
            self._counters,
            num_rows,
            x.stride(0),
            self.weight.stride(0),
            IN=in_features,
            OUT=out_features,
            PIECE=self._piece,
            HAS_BIAS=self.bias is not None,
            IS_SHARED=is_shared,
            **shape,
        )
        return out


@register("pack_linear", name="triton", predicate=is_cuda, priority=PRIORITY - 1)
def pack_linear(weight: Tensor, bias: Tensor | None) -> FixedProduct:
    return FixedProduct(weight, bias)
