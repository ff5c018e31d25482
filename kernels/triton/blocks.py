"""Linear layers on GGUF's blocks and on those of int4 and FP8 checkpoints in Triton: memory keeps
as many bytes as the file has. Results have the bits that reference/gguf_linear.py states, whatever
the tiles are, as those of a CPU have. FP8 is multiplied by e4m3.py.

Must not know: files, models, requests.

A block is taken apart when it is packed. Each part is a plane, [parts, rows, bytes], so that a
tile's rows lie side by side, and all planes of a weight are one tensor:

    numbers   32 columns of a row: 32 bytes of Q8_0, eight of INT2_*, whose byte i has columns 4 i
              to 4 i + 3, else 16; byte i has columns 2 i and 2 i + 1; of FP8_* a block's columns
    high      the fifth bits of 32 columns are 4 bytes; the fifth and sixth of Q6_K 8 bytes
    scales    halves, words of INT4_*, then bytes; each of as many columns as in the file

numbers_of and scales_of are all that the products of integers know of a type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.gguf_blocks import (
    FP8_TYPES,
    block_type,
    fp8_parts,
    scales_and_leasts,
    split,
    unpack_bits,
)
from ..reference.gguf_linear import GROUP
from ..registry import register, with_forms
from .device import PLAIN, PRIORITY, is_cuda, multiplies_fp8
from .e4m3 import multiply_e4m3, rows_for
from .quantized import ADDED_AT_ONCE, ADDED_COLUMNS, FEW_COLUMNS, num_pieces, quantize

PACKED_AT_ONCE = 2**24  # bytes; bounds what packing takes beside the result
# IQ4_NL's numbers, a byte each: those of the nibbles 0 to 7, and of 8 to 15
IQ4_LOW, IQ4_HIGH = tl.constexpr(-654466911485192063), tl.constexpr(8167635493787864321)


# ---------------------------------------------------------------- a type's numbers and scales


@triton.jit
def numbers_of(base, at, count, mask, TYPE: tl.constexpr):
    """[C, 32] int8: the numbers of blocks of 32 columns. base: a weight's planes; at [C] i64: where
    the blocks are in the plane of numbers, which has `count` of them.
    """
    column = tl.arange(0, 32)
    if TYPE == "Q8_0":
        places = base + (at * 32)[:, None] + column[None, :]
        return tl.load(places, mask=mask[:, None], other=0).to(tl.int8, bitcast=True)
    if TYPE == "INT2_64" or TYPE == "INT2_128":
        return pairs_of_bits(base + at * 8, mask).to(tl.int8) - 1
    places = base + (at * 16)[:, None] + tl.arange(0, 16)[None, :]
    pairs = tl.load(places, mask=mask[:, None], other=0)
    numbers = tl.interleave(pairs & 15, pairs >> 4).to(tl.int8)
    if TYPE == "Q5_0" or TYPE == "Q5_1" or TYPE == "Q5_K":
        words = tl.load((base + count * 16 + at * 4).to(tl.pointer_type(tl.int32)), mask, 0)
        numbers |= (((words[:, None] >> column[None, :]) & 1) << 4).to(tl.int8)
    if TYPE == "Q6_K":
        numbers |= (pairs_of_bits(base + count * 16 + at * 8, mask) << 4).to(tl.int8)
        numbers -= 32
    if TYPE == "Q4_0":
        numbers -= 8
    if TYPE == "Q5_0":
        numbers -= 16
    if TYPE == "MXFP4":  # 0, 1, 2, 3, 4, 6, 8, 12 and a sign
        size = numbers & 7
        size = tl.where(size < 2, size, (2 + (size & 1)) << tl.maximum((size >> 1) - 1, 0))
        numbers = tl.where(numbers > 7, -size, size).to(tl.int8)
    if TYPE == "IQ4_NL":
        table = tl.where(numbers > 7, IQ4_HIGH, IQ4_LOW)
        numbers = (table >> (8 * (numbers & 7)).to(tl.int64)).to(tl.int8)
    return numbers


@triton.jit
def pairs_of_bits(places, mask):
    """[C, 32] int32: numbers of 2 bits, from eight bytes each."""
    column = tl.arange(0, 32)
    words = places.to(tl.pointer_type(tl.int32))
    first, last = tl.load(words, mask, 0), tl.load(words + 1, mask, 0)
    words = tl.where((column < 16)[None, :], first[:, None], last[:, None])
    return (words >> (2 * (column & 15))[None, :]) & 3


@triton.jit
def scales_of(base, block, row, num_rows, count, mask, TYPE: tl.constexpr):
    """Three of [C] f32: the scales of the first and last 16 columns of blocks, and what is added to
    each weight. block: a number; row [C] i64.
    """
    at = block.to(tl.int64) * num_rows + row
    least = tl.zeros_like(at).to(tl.float32)
    if TYPE == "MXFP4":
        exponent = tl.load(base + count * 16 + at, mask, 2).to(tl.int32)
        subnormal = tl.where(exponent == 0, 0x200000, 0x400000)
        bits = tl.where(exponent < 2, subnormal, (exponent - 1) << 23)
        scale = bits.to(tl.float32, bitcast=True)
        return scale, scale, least
    if TYPE == "INT4_32" or TYPE == "INT4_128":
        if TYPE == "INT4_128":
            at = (block // 4).to(tl.int64) * num_rows + row
        word = tl.load((base + count * 16 + at * 4).to(tl.pointer_type(tl.int32)), mask, 0)
        scale = (word & -256).to(tl.float32, bitcast=True)
        return scale, scale, -(word & 255).to(tl.float32) * scale
    if TYPE == "Q4_K" or TYPE == "Q5_K" or TYPE == "Q6_K":
        of_all = (block // 8).to(tl.int64) * num_rows + row
        planes = base + count * 16
        if TYPE == "Q5_K":
            planes = base + count * 20
        if TYPE == "Q6_K":
            planes = base + count * 24
        scale = half(planes + of_all * 2, mask)
        planes += count // 4
        if TYPE == "Q6_K":
            first = tl.load(planes + at * 2, mask, 0).to(tl.int8, bitcast=True)
            last = tl.load(planes + at * 2 + 1, mask, 0).to(tl.int8, bitcast=True)
            return scale * first.to(tl.float32), scale * last.to(tl.float32), least
        least = half(planes + of_all * 2, mask)
        low = tl.load(planes + count // 4 + at, mask, 0).to(tl.int32)
        of_two = (block // 2).to(tl.int64) * num_rows + row
        high = tl.load(planes + count // 4 + count + of_two, mask, 0).to(tl.int32)
        high = high >> (4 * (block % 2))
        scale *= (low & 15 | (high & 3) << 4).to(tl.float32)
        return scale, scale, -(least * (low >> 4 | (high & 12) << 2).to(tl.float32))
    planes = base + count * 16
    if TYPE == "Q8_0":
        planes = base + count * 32
    if TYPE == "Q5_0" or TYPE == "Q5_1":
        planes = base + count * 20
    if TYPE == "INT2_64" or TYPE == "INT2_128":
        planes = base + count * 8
        if TYPE == "INT2_64":
            at = (block // 2).to(tl.int64) * num_rows + row
        else:
            at = (block // 4).to(tl.int64) * num_rows + row
    scale = half(planes + at * 2, mask)
    if TYPE == "Q4_1" or TYPE == "Q5_1":
        least = half(planes + count * 2 + at * 2, mask)
    return scale, scale, least


@triton.jit
def half(places, mask):
    return tl.load(places.to(tl.pointer_type(tl.float16)), mask, 0.0).to(tl.float32)


# ---------------------------------------------------------------- products

WITHOUT_LEASTS = ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4", "Q6_K", "INT2_64", "INT2_128")


@triton.constexpr_function
def has_leasts(type: str) -> bool:
    """Whether scales_of says what is added to each weight."""
    return type not in WITHOUT_LEASTS


@triton.jit
def products(
    numbers_ptr,
    scales_ptr,
    sums_ptr,
    row,
    in_rows,
    base,
    column,
    in_columns,
    num_columns,
    BLOCKS: tl.constexpr,
    TYPE: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """[ROWS, COLUMNS] f32: rows of x, as quantize_kernel leaves them, times rows `column` of a
    weight with planes at base. row and column are i64. UNROLLED divides BLOCKS.
    """
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    k = tl.arange(0, 32)
    count = tl.full((), BLOCKS, tl.int64) * num_columns
    for start in range(0, BLOCKS, UNROLLED):
        for i in tl.static_range(UNROLLED):
            block = start + i
            x_places = numbers_ptr + (row * (BLOCKS * 32) + block * 32)[:, None] + k[None, :]
            x = tl.load(x_places, mask=in_rows[:, None], other=0)
            x_scale = tl.load(scales_ptr + row * BLOCKS + block, mask=in_rows, other=0.0)
            at = block.to(tl.int64) * num_columns + column
            numbers = tl.trans(numbers_of(base, at, count, in_columns, TYPE))
            scale, last, least = scales_of(
                base, block, column, num_columns, count, in_columns, TYPE
            )
            if TYPE == "Q6_K":
                exact = tl.dot(tl.where(k < 16, x, 0), numbers, out_dtype=tl.int32)
                scaled = exact.to(tl.float32) * x_scale[:, None]
                total = tl.fma(scaled, tl.broadcast_to(scale[None, :], scaled.shape), total)
                exact = tl.dot(tl.where(k < 16, 0, x), numbers, out_dtype=tl.int32)
            else:
                exact = tl.dot(x, numbers, out_dtype=tl.int32)
            scaled = exact.to(tl.float32) * x_scale[:, None]
            total = tl.fma(scaled, tl.broadcast_to(last[None, :], scaled.shape), total)
            if has_leasts(TYPE):
                sums = tl.load(sums_ptr + row * BLOCKS + block, mask=in_rows, other=0.0)
                sums = tl.broadcast_to(sums[:, None], scaled.shape)
                total = tl.fma(sums, tl.broadcast_to(least[None, :], scaled.shape), total)
    return total


@triton.jit
def multiply_kernel(
    numbers_ptr,
    scales_ptr,
    sums_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    num_rows,
    num_columns,
    BLOCKS: tl.constexpr,
    TYPE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Grid (blocks of rows, blocks of columns): out [num_rows, num_columns] with a stride."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    in_rows, in_columns = row < num_rows, column < num_columns
    total = products(
        numbers_ptr,
        scales_ptr,
        sums_ptr,
        row,
        in_rows,
        weight_ptr,
        column,
        in_columns,
        num_columns,
        BLOCKS,
        TYPE,
        UNROLLED,
    )
    if BIAS:
        total += tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    places = out_ptr + row[:, None] * out_stride + column[None, :]
    mask = in_rows[:, None] & in_columns[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def block_sums_kernel(
    numbers_ptr,
    weight_ptr,
    sums_ptr,
    num_rows,
    num_columns,
    BLOCKS: tl.constexpr,
    TYPE: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (blocks of columns, pieces of PIECE blocks): the sums of the numbers of each block,
    which are exact, of at most ROWS rows: sums [BLOCKS, num_rows, num_columns] int32; of Q6_K
    [BLOCKS, 2, num_rows, num_columns], of a block's first and last 16 columns.
    """
    row = tl.arange(0, ROWS).to(tl.int64)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    in_rows, in_columns = row < num_rows, column < num_columns
    mask, k = in_rows[:, None] & in_columns[None, :], tl.arange(0, 32)
    count = tl.full((), BLOCKS, tl.int64) * num_columns
    begin = tl.program_id(1) * PIECE
    for block in range(begin, tl.minimum(begin + PIECE, BLOCKS)):
        x_places = numbers_ptr + (row * (BLOCKS * 32) + block * 32)[:, None] + k[None, :]
        x = tl.load(x_places, mask=in_rows[:, None], other=0)
        at = tl.cast(block, tl.int64) * num_columns + column
        numbers = tl.trans(numbers_of(weight_ptr, at, count, in_columns, TYPE))
        places = (block * num_rows + row)[:, None] * num_columns + column[None, :]
        if TYPE == "Q6_K":
            places = ((2 * block) * num_rows + row)[:, None] * num_columns + column[None, :]
            exact = tl.dot(tl.where(k < 16, x, 0), numbers, out_dtype=tl.int32)
            tl.store(sums_ptr + places, exact, mask=mask)
            places += tl.cast(num_rows, tl.int64) * num_columns
            x = tl.where(k < 16, 0, x)
        tl.store(sums_ptr + places, tl.dot(x, numbers, out_dtype=tl.int32), mask=mask)


@triton.jit
def add_blocks_kernel(
    sums_ptr,
    scales_ptr,
    x_sums_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    out_stride,
    num_rows,
    num_columns,
    BLOCKS: tl.constexpr,
    TYPE: tl.constexpr,
    BIAS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (rows, blocks of columns): out [num_rows, num_columns] with a stride, from what
    block_sums_kernel makes, in the order of `products`. AT_ONCE blocks are loaded before they are
    added.
    """
    row = tl.program_id(0).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    in_columns = column < num_columns
    total = tl.zeros((COLUMNS,), tl.float32)
    count = tl.full((), BLOCKS, tl.int64) * num_columns
    for start in range(0, BLOCKS, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            block = start + i
            is_block = block < BLOCKS
            mask = in_columns & is_block
            x_scale = tl.load(scales_ptr + row * BLOCKS + block, is_block, 0.0)
            scale, last, least = scales_of(
                weight_ptr, block, column, num_columns, count, mask, TYPE
            )
            places = (block * num_rows + row) * num_columns + column
            if TYPE == "Q6_K":
                places = (2 * block * num_rows + row) * num_columns + column
                exact = tl.load(sums_ptr + places, mask, 0)
                total = tl.fma(exact.to(tl.float32) * x_scale, scale, total)
                places += tl.cast(num_rows, tl.int64) * num_columns
            exact = tl.load(sums_ptr + places, mask, 0)
            total = tl.fma(exact.to(tl.float32) * x_scale, last, total)
            if has_leasts(TYPE):
                sums = tl.load(x_sums_ptr + row * BLOCKS + block, is_block, 0.0)
                total = tl.fma(tl.broadcast_to(sums, (COLUMNS,)), least, total)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row * out_stride + column
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_columns)


@triton.jit
def look_up_kernel(
    ids_ptr,
    weight_ptr,
    out_ptr,
    num_ids,
    num_rows,
    BLOCKS: tl.constexpr,
    TYPE: tl.constexpr,
    IDS: tl.constexpr,
):
    """Grid (blocks of ids, blocks of 32 columns): out [num_ids, BLOCKS * 32]."""
    i, block = tl.program_id(0) * IDS + tl.arange(0, IDS), tl.program_id(1)
    mask, k = i < num_ids, tl.arange(0, 32)
    row = tl.load(ids_ptr + i, mask=mask, other=0).to(tl.int64)
    count = num_rows.to(tl.int64) * BLOCKS
    at = block.to(tl.int64) * num_rows + row
    numbers = numbers_of(weight_ptr, at, count, mask, TYPE).to(tl.float32)
    first, last, least = scales_of(weight_ptr, block, row, num_rows, count, mask, TYPE)
    scales = tl.where((k < 16)[None, :], first[:, None], last[:, None])
    values = numbers * scales + least[:, None]
    places = out_ptr + i.to(tl.int64)[:, None] * (BLOCKS * 32) + block * 32 + k[None, :]
    tl.store(places, values.to(out_ptr.dtype.element_ty), mask=mask[:, None])


# ---------------------------------------------------------------- packing


def _nibbles(numbers: Tensor) -> Tensor:
    """[blocks, columns] of 4 bits -> [blocks, columns / 32, 16]"""
    low, high = numbers.unflatten(1, (-1, 16, 2)).unbind(3)
    return low | high << 4


def _bits(numbers: Tensor, width: int) -> Tensor:
    """[blocks, columns] of `width` bits -> [blocks, columns / 32, 4 * width], little-endian"""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=numbers.device)
    shifted = numbers.unflatten(1, (-1, 4 * width, 8 // width)) << shifts
    return shifted.sum(3, dtype=torch.uint8)


def _four_bits(blocks: Tensor, *scales: int) -> list[Tensor]:
    *parts, numbers = split(blocks, *scales, blocks.shape[1] - sum(scales))
    return [_nibbles(unpack_bits(numbers, 4, 16)), *(part.unsqueeze(1) for part in parts)]


def _two_bits(blocks: Tensor) -> list[Tensor]:
    scale, numbers = split(blocks, 2, blocks.shape[1] - 2)
    return [_bits(unpack_bits(numbers, 2, 8), 2), scale.unsqueeze(1)]


def _five_bits(blocks: Tensor, *scales: int) -> list[Tensor]:
    *parts, high, numbers = split(blocks, *scales, 4, 16)
    planes = [_nibbles(unpack_bits(numbers, 4, 16)), high.unsqueeze(1)]
    return planes + [part.unsqueeze(1) for part in parts]


def _q8_0(blocks: Tensor) -> list[Tensor]:
    scale, numbers = split(blocks, 2, 32)
    return [numbers.unsqueeze(1), scale.unsqueeze(1)]


def _with_leasts(blocks: Tensor, high: int) -> list[Tensor]:
    """Q4_K, and with 32 bytes of `high` bits Q5_K. A scale and a least number of 6 bits have a byte
    for their low halves, and half a byte for the rest.
    """
    scale, least, packed, fifth, numbers = split(blocks, 2, 2, 12, high, 128)
    scales, leasts = (part.to(torch.uint8) for part in scales_and_leasts(packed))
    rest = scales >> 4 | leasts >> 4 << 2
    planes = [_nibbles(unpack_bits(numbers, 4, 32))]
    if high:
        planes.append(_bits(unpack_bits(fifth, 1, 32), 1))
    planes += [scale.unsqueeze(1), least.unsqueeze(1)]
    planes.append((scales & 15 | leasts << 4).unsqueeze(2))
    return [*planes, (rest[:, ::2] | rest[:, 1::2] << 4).unsqueeze(2)]


def _q6_k(blocks: Tensor) -> list[Tensor]:
    low, high, scales, scale = split(blocks, 128, 64, 16, 2)
    planes = [_nibbles(unpack_bits(low, 4, 64)), _bits(unpack_bits(high, 2, 32), 2)]
    return [*planes, scale.unsqueeze(1), scales.unflatten(1, (8, 2))]


def _fp8(blocks: Tensor) -> list[Tensor]:
    """A block with a number that is NaN gets that as its scale."""
    scale, numbers, _ = fp8_parts(blocks)
    scales = scale.masked_fill(numbers.isnan().any(1, keepdim=True), torch.nan)
    bits = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    return [bits.unsqueeze(1), scales.view(torch.uint8).unsqueeze(1)]


# The planes of one block per row, [blocks, parts, bytes] each.
_PLANES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "Q8_0": _q8_0,
    "Q4_0": lambda blocks: _four_bits(blocks, 2),
    "Q4_1": lambda blocks: _four_bits(blocks, 2, 2),
    "Q5_0": lambda blocks: _five_bits(blocks, 2),
    "Q5_1": lambda blocks: _five_bits(blocks, 2, 2),
    "IQ4_NL": lambda blocks: _four_bits(blocks, 2),
    "MXFP4": lambda blocks: _four_bits(blocks, 1),
    "INT4_32": lambda blocks: _four_bits(blocks, 4),
    "INT4_128": lambda blocks: _four_bits(blocks, 4),
    "INT2_64": _two_bits,
    "INT2_128": _two_bits,
    "Q4_K": lambda blocks: _with_leasts(blocks, 0),
    "Q5_K": lambda blocks: _with_leasts(blocks, 32),
    "Q6_K": _q6_k,
} | dict.fromkeys(FP8_TYPES, _fp8)


class Planes(NamedTuple):
    data: Tensor  # [bytes] uint8
    type: str
    num_rows: int
    x_scale: Tensor | None = None  # [1] f32, of FP8_*_STATIC


def pack_planes(blocks: Tensor, type: str) -> Planes:
    """blocks [rows, bytes] uint8, on the device; those of FP8_*_STATIC have one scale of x."""
    size = block_type(type).num_bytes
    step = max(1, PACKED_AT_ONCE // blocks.shape[1])
    pieces = []
    for piece in blocks.split(step):
        planes = _PLANES[type](piece.reshape(-1, size))
        # [rows, parts of a row, bytes] -> [parts of a row, rows, bytes]
        pieces.append([p.reshape(len(piece), -1, p.shape[2]).transpose(0, 1) for p in planes])
    joined = [torch.cat(plane, 1).flatten() for plane in zip(*pieces, strict=True)]
    x_scale = x_scale_of(blocks, type)
    return Planes(torch.cat(joined), type, len(blocks), x_scale)


def x_scale_of(blocks: Tensor, type: str) -> Tensor | None:
    """[1] f32: that of the first block of FP8_*_STATIC; None for other types."""
    if not type.endswith("_STATIC"):
        return None
    _, _, scales = fp8_parts(blocks[:1, : block_type(type).num_bytes])
    assert scales is not None
    return scales[0]


class BlockLinear:
    """Keeps blocks: one part for each run of rows of one type (and one scale of x, if it is
    static), and one launch.
    """

    def __init__(
        self, parts: Sequence[Tensor], types: Sequence[str], bias: Tensor | None, dtype: torch.dtype
    ):
        self.bias, self.dtype = bias, dtype
        self.num_blocks = (
            parts[0].shape[1] // block_type(types[0]).num_bytes * block_type(types[0]).columns
        ) // GROUP

        def kind(part: tuple[Tensor, str]) -> tuple[str, float | None]:
            scale = x_scale_of(*part)
            return part[1], None if scale is None else float(scale)

        runs = groupby(zip(parts, types, strict=True), kind)
        self.parts = [pack_planes(torch.cat([p for p, _ in run]), type) for (type, _), run in runs]
        self.out_features = sum(part.num_rows for part in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        return self._multiply(x, torch.float32)

    def _multiply(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        num_rows = len(x)
        out = x.new_empty(num_rows, self.out_features, dtype=dtype)
        if not num_rows:
            return out
        of_x = None
        first = 0
        for part in self.parts:
            bias = None if self.bias is None else self.bias[first:]
            places = out[:, first:]
            first += part.num_rows
            if part.type in FP8_TYPES:
                rows = rows_for(x, part.type, part.x_scale)
                size = block_type(part.type).columns
                multiply_e4m3(rows, part.data, size, part.num_rows, bias, places)
                continue
            of_x = of_x or quantize(x, GROUP)
            if num_pieces(num_rows, part.num_rows, self.num_blocks) > 1:
                self._multiply_in_pieces(of_x, part, bias, places)
                continue
            shape = multiply_shape(num_rows, self.num_blocks, part.type)
            grid = (
                triton.cdiv(num_rows, shape["ROWS"]),
                triton.cdiv(part.num_rows, shape["COLUMNS"]),
            )
            multiply_kernel[grid](
                *of_x,
                part.data,
                out if bias is None else bias,  # without BIAS it is not read
                places,
                out.stride(0),
                num_rows,
                part.num_rows,
                BLOCKS=self.num_blocks,
                TYPE=part.type,
                BIAS=bias is not None,
                **shape,
                **PLAIN,
            )
        return out

    def _multiply_in_pieces(
        self,
        of_x: tuple[Tensor, Tensor, Tensor],
        part: Planes,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """A product of few rows in two launches, the first of which has enough programs."""
        numbers, scales, x_sums = of_x
        num_rows, num_blocks, num_columns = len(out), self.num_blocks, part.num_rows
        pieces = num_pieces(num_rows, num_columns, num_blocks)
        per_block = 2 if part.type == "Q6_K" else 1
        sums = out.new_empty(num_blocks * per_block, num_rows, num_columns, dtype=torch.int32)
        block_sums_kernel[triton.cdiv(num_columns, FEW_COLUMNS), pieces](
            numbers,
            part.data,
            sums,
            num_rows,
            num_columns,
            BLOCKS=num_blocks,
            TYPE=part.type,
            PIECE=triton.cdiv(num_blocks, pieces),
            ROWS=16,
            COLUMNS=FEW_COLUMNS,
            num_warps=1,
            num_stages=4,
            **PLAIN,
        )
        add_blocks_kernel[num_rows, triton.cdiv(num_columns, ADDED_COLUMNS)](
            sums,
            scales,
            x_sums,
            part.data,
            out if bias is None else bias,  # without BIAS it is not read
            out,
            out.stride(0),
            num_rows,
            num_columns,
            BLOCKS=num_blocks,
            TYPE=part.type,
            BIAS=bias is not None,
            AT_ONCE=min(ADDED_AT_ONCE, triton.next_power_of_2(num_blocks)),
            COLUMNS=ADDED_COLUMNS,
            num_warps=1,
            **PLAIN,
        )

    def embedding(self, token_ids: Tensor) -> Tensor:
        [part] = self.parts
        if part.type in FP8_TYPES:
            return _look_up_floats(part, token_ids.long()).to(self.dtype)
        out = part.data.new_empty(len(token_ids), self.num_blocks * GROUP, dtype=self.dtype)
        if len(token_ids):
            look_up_kernel[triton.cdiv(len(token_ids), 16), self.num_blocks](
                token_ids.contiguous(),
                part.data,
                out,
                len(token_ids),
                part.num_rows,
                BLOCKS=self.num_blocks,
                TYPE=part.type,
                IDS=16,
                **PLAIN,
            )
        return out


def _look_up_floats(part: Planes, ids: Tensor) -> Tensor:
    """[T] i64 -> [T, columns] f32"""
    size = block_type(part.type).columns
    end = len(part.data) // (size + 4) * size
    numbers, scales = part.data[:end].view(-1, part.num_rows, size), part.data[end:]
    scales = scales.view(torch.float32).view(-1, part.num_rows)
    values = numbers[:, ids].view(torch.float8_e4m3fn).float() * scales[:, ids, None]
    return values.transpose(0, 1).flatten(1)


def multiply_shape(num_rows: int, num_blocks: int, type: str) -> dict[str, int]:
    """For decodes narrow tiles and several blocks at once, so that many loads are in flight. The
    bits of a result do not depend on the shape.
    """
    # two of INT2_*: four spill registers on sm_80
    most = 1 if type == "Q6_K" else 4 if num_rows <= 16 and not type.startswith("INT2") else 2
    unrolled = next(n for n in (most, 2, 1) if num_blocks % n == 0)
    if num_rows <= 16:
        return {"ROWS": 16, "COLUMNS": 32, "UNROLLED": unrolled, "num_warps": 1, "num_stages": 4}
    return {"ROWS": 64, "COLUMNS": 64, "UNROLLED": unrolled, "num_warps": 4, "num_stages": 3}


@register("pack_gguf_linear", name="triton", predicate=is_cuda, priority=PRIORITY)
@with_forms(takes_fp8=True)
def pack_gguf_linear(
    parts: list[Tensor], types: list[str], bias: Tensor | None, dtype: torch.dtype
) -> BlockLinear:
    return BlockLinear(parts, types, bias, dtype)


@register("pack_gguf_linear", name="triton_fp8", predicate=multiplies_fp8, priority=PRIORITY + 1)
@with_forms(takes_fp8=True, quantizes_to_fp8=True)
def pack_gguf_linear_in_fp8(
    parts: list[Tensor], types: list[str], bias: Tensor | None, dtype: torch.dtype
) -> BlockLinear:
    return BlockLinear(parts, types, bias, dtype)
