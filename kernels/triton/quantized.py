"""Int8 and int4 linear layers in Triton: tensor cores sum the integers of a group exactly, and the
groups are added as reference/quantized.py states. So the results have the bits of a CPU, whatever
the tiles are.

Must not know: models, requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.quantized import GROUP, LEAST, find_int4, in_groups, quantize_int8
from ..registry import register
from .device import PLAIN, PRIORITY, is_cuda

LEAST_NUMBER = tl.constexpr(LEAST)
# Adding it to a number below 2**22, and subtracting it again, rounds to nearest, ties to even.
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23
QUANTIZED_AT_ONCE = 512  # numbers of x in a program
# Products in pieces, see num_pieces.
MOST_IN_PIECES = 16  # rows: each adds 4 bytes for each group of a column, written and read again
PROGRAMS = 1056  # eight for each multiprocessor of an H100
FEW_COLUMNS = 32  # of a tile
ADDED_COLUMNS, ADDED_AT_ONCE = 32, 16
PACKED_AT_ONCE = 2**24  # weights; bounds what packing takes beside the result


@triton.jit
def in_int8(x):
    """x [M, N] f32 -> integers of each row in +-127, as f32, and their scales [M]; NaN where a row
    is not finite. reference/quantized.py states it. Callers do not contract multiply and add.
    """
    size = tl.abs(x)
    # not of NaN either
    is_finite = tl.sum((size < float("inf")).to(tl.int32), 1) == x.shape[1]
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    counts = is_finite & (largest > LEAST_NUMBER)
    divisor = tl.where(counts, largest, 1.0)
    factor = tl.where(counts, tl.div_rn(divisor * 0.0 + 127.0, divisor), 0.0)
    scale = tl.where(counts, tl.div_rn(largest, largest * 0.0 + 127.0), 0.0)
    scale = tl.where(is_finite, scale, float("nan"))
    rounded = (tl.where(is_finite[:, None], x, 0.0) * factor[:, None] + ROUNDER) - ROUNDER
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0), scale


@triton.jit
def quantize_kernel(
    x_ptr,
    numbers_ptr,
    scales_ptr,
    sums_ptr,
    x_stride,
    SIZE: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Grid (T, blocks of AT_ONCE groups). x [T, SIZE] with strides -> numbers [T, GROUPS * G] int8,
    scales [T, GROUPS] f32; with SUMS also the sums of groups times their scales, as scales.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = group[:, None] * G + tl.arange(0, G)[None, :]
    x = tl.load(x_ptr + token * x_stride + column, mask=column < SIZE, other=0.0).to(tl.float32)
    rounded, scale = in_int8(x)
    is_group = group < GROUPS
    places = numbers_ptr + token * (GROUPS * G) + column
    tl.store(places, rounded.to(tl.int8), mask=is_group[:, None])
    tl.store(scales_ptr + token * GROUPS + group, scale, mask=is_group)
    if SUMS:
        sums = tl.sum(rounded, 1) * scale
        tl.store(sums_ptr + token * GROUPS + group, sums, mask=is_group)


def quantize(x: Tensor, group: int, has_sums: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """What quantize_kernel makes of x [T, SIZE], T > 0. Without has_sums the last is void."""
    num_rows, size = x.shape
    num_groups = triton.cdiv(size, group)
    numbers = x.new_empty(num_rows, num_groups * group, dtype=torch.int8)
    scales = x.new_empty(num_rows, num_groups, dtype=torch.float32)
    sums = torch.empty_like(scales) if has_sums else scales
    at_once = min(QUANTIZED_AT_ONCE // group, triton.next_power_of_2(num_groups))
    quantize_kernel[num_rows, triton.cdiv(num_groups, at_once)](
        x,
        numbers,
        scales,
        sums,
        x.stride(0),
        SIZE=size,
        G=group,
        GROUPS=num_groups,
        AT_ONCE=at_once,
        SUMS=has_sums,
        num_warps=1,
        **PLAIN,
    )
    return numbers, scales, sums


@triton.jit
def group_sums(
    numbers_ptr,
    row,
    in_rows,
    weight_ptr,
    factors_ptr,
    column,
    in_columns,
    group,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
):
    """[ROWS, COLUMNS] int32: the sums of one group, which are exact. See group_products."""
    STORED: tl.constexpr = G * BITS // 8  # bytes of a group
    K: tl.constexpr = G // 2
    k = tl.arange(0, K)
    x_ptrs = numbers_ptr + (row * (GROUPS * G) + group * G)[:, None] + k[None, :]
    first = tl.load(x_ptrs, mask=in_rows[:, None], other=0)
    second = tl.load(x_ptrs + K, mask=in_rows[:, None], other=0)
    w_ptrs = weight_ptr + (column * (GROUPS * STORED) + group * STORED)[:, None] + k[None, :]
    low = tl.load(w_ptrs, mask=in_columns[:, None], other=0)
    if BITS == 8:
        high = tl.load(w_ptrs + K, mask=in_columns[:, None], other=0)
    else:
        factor_ptrs = factors_ptr + (column * GROUPS + group) * 2
        high = (low >> 4) * tl.load(factor_ptrs + 1, mask=in_columns, other=0)[:, None]
        low = ((low << 4) >> 4) * tl.load(factor_ptrs, mask=in_columns, other=0)[:, None]
    exact = tl.dot(first, tl.trans(low), out_dtype=tl.int32)
    return tl.dot(second, tl.trans(high), exact, out_dtype=tl.int32)


@triton.jit
def group_products(
    numbers_ptr,
    scales_ptr,
    row,
    in_rows,
    weight_ptr,
    factors_ptr,
    weight_scales_ptr,
    column,
    in_columns,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
):
    """[ROWS, COLUMNS] f32: rows of x times rows `column` of the weight; row and column are i64.

    numbers [., GROUPS * G] int8 and scales [., GROUPS] f32 of quantize_kernel; weight
    [., GROUPS * G] int8, or with 4 BITS half as many bytes: the low half of a byte is of a group's
    first half, and the high one of its second; factors [., GROUPS, 2] int8; weight_scales
    [., GROUPS] bf16.
    """
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for group in range(GROUPS):
        exact = group_sums(
            numbers_ptr,
            row,
            in_rows,
            weight_ptr,
            factors_ptr,
            column,
            in_columns,
            group,
            GROUPS,
            G,
            BITS,
        )
        scale = tl.load(scales_ptr + row * GROUPS + group, mask=in_rows, other=0.0)
        of_weight = tl.load(
            weight_scales_ptr + column * GROUPS + group, mask=in_columns, other=0.0
        ).to(tl.float32)
        total = tl.fma(exact.to(tl.float32), of_weight[None, :] * scale[:, None], total)
    return total


@triton.jit
def multiply_kernel(
    numbers_ptr,
    scales_ptr,
    weight_ptr,
    factors_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Grid (blocks of rows, blocks of columns): out [num_rows, num_columns]. See group_products."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    in_rows, in_columns = row < num_rows, column < num_columns
    total = group_products(
        numbers_ptr,
        scales_ptr,
        row,
        in_rows,
        weight_ptr,
        factors_ptr,
        weight_scales_ptr,
        column,
        in_columns,
        GROUPS,
        G,
        BITS,
    )
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)
        total += bias[None, :]
    places = row[:, None] * num_columns + column[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def group_sums_kernel(
    numbers_ptr,
    weight_ptr,
    factors_ptr,
    sums_ptr,
    num_rows,
    num_columns,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
):
    """Grid (blocks of columns, pieces of PIECE groups): sums [GROUPS, num_rows, num_columns] int32
    of group_sums, for at most ROWS rows.
    """
    row = tl.arange(0, ROWS).to(tl.int64)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    in_rows, in_columns = row < num_rows, column < num_columns
    begin = tl.program_id(1) * PIECE
    for group in range(begin, tl.minimum(begin + PIECE, GROUPS)):
        exact = group_sums(
            numbers_ptr,
            row,
            in_rows,
            weight_ptr,
            factors_ptr,
            column,
            in_columns,
            group,
            GROUPS,
            G,
            BITS,
        )
        places = (group * num_rows + row)[:, None] * num_columns + column[None, :]
        tl.store(sums_ptr + places, exact, mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def add_groups_kernel(
    sums_ptr,
    scales_ptr,
    weight_scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    GROUPS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Grid (rows, blocks of columns): out [num_rows, num_columns] from what group_sums_kernel
    makes, in the order of group_products. AT_ONCE groups are loaded before they are added.
    """
    row = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    in_columns = column < num_columns
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, GROUPS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            group = start + i
            mask = in_columns & (group < GROUPS)
            exact = tl.load(sums_ptr + (group * num_rows + row) * num_columns + column, mask, 0)
            scale = tl.load(scales_ptr + row * GROUPS + group, group < GROUPS, 0.0)
            of_weight = tl.load(weight_scales_ptr + column * GROUPS + group, mask, 0.0)
            total = tl.fma(exact.to(tl.float32), of_weight.to(tl.float32) * scale, total)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row * num_columns + column
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_columns)


class QuantizedLinear:
    """Keeps integers of 8 or 4 bits. Scales are numbers of bfloat16, as the packing makes them."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int):
        self.bias, self.bits, self.dtype = bias, bits, weight.dtype
        self.num_columns, self.in_features = weight.shape
        self.group = GROUP[bits]
        self.num_groups = triton.cdiv(self.in_features, self.group)
        rows_at_once = max(1, PACKED_AT_ONCE // self.in_features)
        parts = [self._pack(rows) for rows in weight.split(rows_at_once)]
        self.numbers, self.factors, self.scales = (torch.cat(part) for part in zip(*parts))

    def _pack(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See group_products, whose factors are empty with 8 bits."""
        grouped = in_groups(rows.float(), self.group)
        if self.bits == 8:
            numbers, scales = quantize_int8(grouped)
            factors = numbers.new_empty(len(rows), 0)
        else:
            numbers, factors, scales = find_int4(grouped)
            numbers = numbers[:, :, 1] * 16 + numbers[:, :, 0].remainder(16)
        return numbers.to(torch.int8).flatten(1), factors.to(torch.int8), scales.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows, num_groups = len(x), self.num_groups
        out = x.new_empty(num_rows, self.num_columns, dtype=dtype)
        if not num_rows:
            return out
        numbers, scales, _ = quantize(x, self.group, has_sums=False)
        if num_pieces(num_rows, self.num_columns, num_groups) > 1:
            self._multiply_in_pieces(numbers, scales, out)
            return out
        shape = multiply_shape(num_rows)
        grid = triton.cdiv(num_rows, shape["ROWS"]), triton.cdiv(self.num_columns, shape["COLUMNS"])
        multiply_kernel[grid](
            numbers,
            scales,
            self.numbers,
            self.factors,
            self.scales,
            out if self.bias is None else self.bias,  # without BIAS it is not read
            out,
            num_rows,
            self.num_columns,
            GROUPS=num_groups,
            G=self.group,
            **shape,
            BITS=self.bits,
            BIAS=self.bias is not None,
            **PLAIN,
        )
        return out

    def _multiply_in_pieces(self, numbers: Tensor, scales: Tensor, out: Tensor) -> None:
        """A product of few rows in two launches, the first of which has enough programs."""
        num_rows, num_groups = len(out), self.num_groups
        pieces = num_pieces(num_rows, self.num_columns, num_groups)
        sums = out.new_empty(num_groups, num_rows, self.num_columns, dtype=torch.int32)
        group_sums_kernel[triton.cdiv(self.num_columns, FEW_COLUMNS), pieces](
            numbers,
            self.numbers,
            self.factors,
            sums,
            num_rows,
            self.num_columns,
            GROUPS=num_groups,
            G=self.group,
            PIECE=triton.cdiv(num_groups, pieces),
            ROWS=16,
            COLUMNS=FEW_COLUMNS,
            BITS=self.bits,
            num_warps=2,
            num_stages=3,
            **PLAIN,
        )
        add_groups_kernel[num_rows, triton.cdiv(self.num_columns, ADDED_COLUMNS)](
            sums,
            scales,
            self.scales,
            out if self.bias is None else self.bias,  # without BIAS it is not read
            out,
            num_rows,
            self.num_columns,
            GROUPS=num_groups,
            AT_ONCE=min(ADDED_AT_ONCE, triton.next_power_of_2(num_groups)),
            COLUMNS=ADDED_COLUMNS,
            BIAS=self.bias is not None,
            num_warps=1,
            **PLAIN,
        )

    def embedding(self, token_ids: Tensor) -> Tensor:
        ids = token_ids.long()
        numbers = self.numbers[ids].view(len(ids), self.num_groups, -1)
        if self.bits == 4:
            halves = torch.stack(((numbers << 4) >> 4, numbers >> 4), 2)
            numbers = (halves * self.factors[ids].unsqueeze(-1)).flatten(2)
        rows = numbers.float() * self.scales[ids].float().unsqueeze(-1)
        return rows.flatten(1)[:, : self.in_features].to(self.dtype)


def num_pieces(num_rows: int, num_columns: int, num_groups: int) -> int:
    """Into how many pieces the groups of a product are divided. One group after the other, few
    programs wait for memory most of the time: each group's scales come after its numbers. Sums of
    pieces are exact, so their scales can be applied in order afterwards.
    """
    if num_rows > MOST_IN_PIECES:
        return 1
    tiles = triton.cdiv(num_columns, FEW_COLUMNS)
    pieces = min(num_groups, triton.cdiv(PROGRAMS, tiles))
    return triton.cdiv(num_groups, triton.cdiv(num_groups, pieces))  # none is empty


def multiply_shape(num_rows: int) -> dict[str, int]:
    """For decodes narrow tiles, so that there are enough programs to keep loads in flight. The bits
    of a result do not depend on the shape.
    """
    if num_rows <= 16:
        return {"ROWS": 16, "COLUMNS": 32, "num_warps": 4, "num_stages": 4}
    return {"ROWS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}


@register("pack_quantized_linear", name="triton", predicate=is_cuda, priority=PRIORITY)
def pack_quantized_linear(weight: Tensor, bias: Tensor | None, bits: int) -> QuantizedLinear:
    return QuantizedLinear(weight, bias, bits)
