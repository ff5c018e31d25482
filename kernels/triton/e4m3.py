"""Products with weights in e4m3 in Triton: of rows in the model's dtype, or of rows in e4m3 on the
tensor cores of sm_89 and newer. Rows are quantized here, too.

Must not know: files, models, requests, how blocks are packed.

A weight has blocks of SIZE columns in planes (blocks.py): first the numbers, [blocks, rows, SIZE],
then their scales, [blocks, rows] f32. The tensor cores add a block's products, in their own order.
Blocks are added in fp32 outside of them, since those of sm_90 keep fewer bits of products of e4m3
than fp32 has (the report on DeepSeek-V3, section 3.3). reference/gguf_linear.py states the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.gguf_linear import E4M3_GROUP, LEAST_SCALE, MOST_E4M3
from .device import PLAIN, TILE

E4M3_FACTOR = tl.constexpr(2.0**120)  # between the exponents of f32 and e4m3
MOST = tl.constexpr(MOST_E4M3)
LEAST = tl.constexpr(LEAST_SCALE)
GROUP_COLUMNS = tl.constexpr(E4M3_GROUP)
GROUPS_AT_ONCE = 4  # of a row in a program
# how a row's scale is found
OF_ROW, GIVEN, GIVEN_BY_EXPERT = (tl.constexpr(number) for number in range(3))


# ---------------------------------------------------------------- rows in e4m3


@triton.jit
def scale_for(largest):
    """f32: what numbers up to `largest` are divided by."""
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32)), LEAST)


@triton.jit
def divided(x, scale):
    """x [M, N] and scale [M] f32 -> numbers of e4m3. The conversion saturates and keeps NaN, which
    an infinity becomes, so that a row that is not finite is not hidden.
    """
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    return tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)).to(tl.float8e4nv)


@triton.jit
def quantize_groups_kernel(
    x_ptr,
    numbers_ptr,
    scales_ptr,
    x_stride,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid (T, blocks of AT_ONCE groups). x [T, SIZE] with strides -> numbers [T, SIZE] e4m3,
    scales [T, GROUPS] f32.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = group[:, None] * GROUP_COLUMNS + tl.arange(0, GROUP_COLUMNS)[None, :]
    x = tl.load(x_ptr + token * x_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    scale = scale_for(tl.max(tl.abs(x), 1))
    tl.store(numbers_ptr + token * SIZE + column, divided(x, scale), mask=column < SIZE)
    tl.store(scales_ptr + token * GROUPS + group, scale, mask=group < GROUPS)


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    numbers_ptr,
    scales_ptr,
    given_ptr,
    experts_ptr,
    x_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SOURCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows,). x [rows / TOP_K, SIZE] with strides -> numbers [rows, SIZE] e4m3, scales [rows]
    f32. The scale is found, or it is at given_ptr, or at the address there of the row's expert.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptrs = x_ptr + (row // TOP_K) * x_stride
    column = tl.arange(0, BLOCK)
    if SOURCE == OF_ROW:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, SIZE, BLOCK):
            x = tl.load(x_ptrs + start + column, mask=start + column < SIZE, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        scale = scale_for(tl.max(largest[None, :], 1))
    else:
        if SOURCE == GIVEN_BY_EXPERT:
            address = tl.load(given_ptr + tl.load(experts_ptr + row))
            given_ptr = address.to(tl.pointer_type(tl.float32))
        scale = tl.load(given_ptr + tl.arange(0, 1))
    for start in range(0, SIZE, BLOCK):
        here = start + column < SIZE
        x = tl.load(x_ptrs + start + column, mask=here, other=0.0).to(tl.float32)
        numbers = divided(x[None, :], scale)
        tl.store(numbers_ptr + row * SIZE + (start + column)[None, :], numbers, mask=here[None, :])
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)


class Rows(NamedTuple):
    """What weights in e4m3 are multiplied by."""

    numbers: Tensor  # [T, K] of the model's dtype, without scales, or of e4m3
    scales: Tensor | None = None  # [T, n] f32; n is 1, or a group has one each

    @property
    def num_scales(self) -> int:
        """0 without scales"""
        return 0 if self.scales is None else self.scales.shape[1]

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Of numbers and scales; without scales they are not read."""
        return self.numbers, self.numbers if self.scales is None else self.scales


def rows_for(
    x: Tensor,
    type: str,
    given: Tensor | None = None,
    experts: Tensor | None = None,
    top_k: int = 1,
) -> Rows:
    """x [T, K], T > 0, as blocks of `type` want it.

    FP8_*_STATIC: given [1] f32 is the scale. With experts [T * top_k] i32, given [E] i64 has the
    addresses of the experts' scales, and the result a row for each of `experts`.
    """
    num_rows, size = x.shape
    if type.endswith("_GROUP"):
        num_groups = triton.cdiv(size, E4M3_GROUP)
        numbers = x.new_empty(num_rows, size, dtype=torch.float8_e4m3fn)
        scales = x.new_empty(num_rows, num_groups, dtype=torch.float32)
        at_once = min(GROUPS_AT_ONCE, triton.next_power_of_2(num_groups))
        quantize_groups_kernel[num_rows, triton.cdiv(num_groups, at_once)](
            x,
            numbers,
            scales,
            x.stride(0),
            SIZE=size,
            GROUPS=num_groups,
            AT_ONCE=at_once,
            num_warps=1,
            **PLAIN,
        )
        return Rows(numbers, scales)
    if not type.endswith(("_TOKEN", "_STATIC")):
        return Rows(x)
    source = OF_ROW if given is None else GIVEN if experts is None else GIVEN_BY_EXPERT
    if experts is not None:
        num_rows *= top_k
    numbers = x.new_empty(num_rows, size, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(num_rows, 1, dtype=torch.float32)
    quantize_rows_kernel[num_rows,](
        x,
        numbers,
        scales,
        scales if given is None else given,
        scales if experts is None else experts,
        x.stride(0),
        SIZE=size,
        TOP_K=1 if experts is None else top_k,
        SOURCE=source,
        BLOCK=min(4 * TILE, triton.next_power_of_2(size)),
        **PLAIN,
    )
    return Rows(numbers, scales)


# ---------------------------------------------------------------- products


@triton.jit
def from_e4m3(bits, DTYPE: tl.constexpr):
    """[...] uint8 -> numbers of DTYPE, which has all of them. Not every GPU converts e4m3. NaN does
    not occur: it is packed as a scale.
    """
    bits = bits.to(tl.int32)
    shifted = ((bits & 127) << 20) | ((bits & 128) << 24)
    return (shifted.to(tl.float32, bitcast=True) * E4M3_FACTOR).to(DTYPE)


@triton.jit
def e4m3_products(
    x_ptr,
    x_scales_ptr,
    x_stride,
    row,
    in_rows,
    base,
    column,
    in_columns,
    num_columns,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    SCALES: tl.constexpr,
):
    """[ROWS, COLUMNS] f32: rows of x times rows `column` of a weight with planes of SIZE at base.
    row and column are i64. SCALES is how many a row of x has, 0 for x in the model's dtype.
    """
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    k = tl.arange(0, SIZE)
    scales = base + tl.full((), BLOCKS * SIZE, tl.int64) * num_columns
    for block in range(BLOCKS):
        x_places = x_ptr + (row * x_stride + block * SIZE)[:, None] + k[None, :]
        x = tl.load(x_places, mask=in_rows[:, None], other=0.0)
        at = tl.cast(block, tl.int64) * num_columns + column
        bits = tl.load(base + (at * SIZE)[:, None] + k[None, :], in_columns[:, None], 0)
        scale_places = (scales + at * 4).to(tl.pointer_type(tl.float32))
        scale = tl.load(scale_places, mask=in_columns, other=0.0)
        if SCALES > 0:
            weight = tl.trans(bits.to(tl.float8e4nv, bitcast=True))
        else:
            weight = tl.trans(from_e4m3(bits, x.dtype))
        product = tl.dot(x, weight, out_dtype=tl.float32, input_precision="ieee")
        if SCALES > 1:
            group = block * SIZE // GROUP_COLUMNS
            x_scale = tl.load(x_scales_ptr + row * SCALES + group, mask=in_rows, other=0.0)
            product *= x_scale[:, None]
        total = tl.fma(product, tl.broadcast_to(scale[None, :], product.shape), total)
    if SCALES == 1:
        total *= tl.load(x_scales_ptr + row, mask=in_rows, other=0.0)[:, None]
    return total


@triton.jit
def e4m3_multiply_kernel(
    x_ptr,
    x_scales_ptr,
    x_stride,
    weight_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    num_rows,
    num_columns,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    SCALES: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (blocks of rows, blocks of columns): out [num_rows, num_columns] with a stride."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    in_rows, in_columns = row < num_rows, column < num_columns
    total = e4m3_products(
        x_ptr,
        x_scales_ptr,
        x_stride,
        row,
        in_rows,
        weight_ptr,
        column,
        in_columns,
        num_columns,
        BLOCKS,
        SIZE,
        SCALES,
    )
    if BIAS:
        total += tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    places = out_ptr + row[:, None] * out_stride + column[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=mask)


def multiply_e4m3(
    rows: Rows, weight: Tensor, size: int, num_columns: int, bias: Tensor | None, out: Tensor
) -> None:
    """out [T, num_columns] with a stride = rows times a weight with planes of `size`, plus bias."""
    x = rows.numbers
    shape = tile_shape(len(x), rows.scales is not None)
    grid = triton.cdiv(len(x), shape["ROWS"]), triton.cdiv(num_columns, shape["COLUMNS"])
    e4m3_multiply_kernel[grid](
        *rows.places,
        x.stride(0),
        weight,
        out if bias is None else bias,  # without BIAS it is not read
        out,
        out.stride(0),
        len(x),
        num_columns,
        BLOCKS=x.shape[1] // size,
        SIZE=size,
        SCALES=rows.num_scales,
        BIAS=bias is not None,
        **shape,
        **PLAIN,
    )


def tile_shape(num_rows: int, is_e4m3: bool) -> dict[str, int]:
    """For decodes narrow tiles, so that there are enough programs to keep loads in flight."""
    if num_rows <= 16:
        return {"ROWS": 16, "COLUMNS": 32, "num_warps": 4, "num_stages": 4}
    if is_e4m3 and num_rows > 64:
        return {"ROWS": 128, "COLUMNS": 128, "num_warps": 8, "num_stages": 3}
    return {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
