"""Specifies block types, that is, the weights that packed blocks stand for. Those of GGUF files are
GGML's; INT4_* hold the int4 weights of other quantized checkpoints, INT2_* ternary ones.

Must not know: files, speed.

A row is a sequence of blocks. A block of INT2_n is a scale in fp16 and n numbers of 2 bits, which
are stored plus one: byte i of the eight of 32 numbers has numbers i, i + 8, i + 16 and i + 24. A
block of INT4_n is a little-endian word and n numbers as Q4_0 has them. The word is a scale in fp32,
whose lowest byte holds an integer zero point in place of its own bits.

Every formula multiplies, adds and rounds in the order of GGML's own code, so that the results are
its results bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .gguf_bits import half, in_groups, split, unpack_bits
from .gguf_codebook_blocks import CODEBOOK_TYPES, FP4, Parts

# So many weights are dequantized at a time. Temporary values then stay in the cache, and torch
# computes tensors below 2**15 in the calling thread; with larger ones, its threads mostly wait for
# one another.
PIECE = 2**15 - 1

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class BlockType(NamedTuple):
    """How one block is stored."""

    columns: int
    num_bytes: int
    weights: Callable[[Tensor], Tensor]  # [blocks, num_bytes] uint8 -> [blocks, columns] f32


def row_bytes(columns: int, type: str) -> int:
    """Returns the number of bytes of a row. Raises ValueError for an unknown type and for a part of
    a block.
    """
    block = block_type(type)
    if columns % block.columns:
        raise ValueError(
            f"a row of {columns} weights is not a whole number of {type} blocks of {block.columns}"
        )
    return columns // block.columns * block.num_bytes


def block_type(type: str) -> BlockType:
    found = TYPES.get(type) or INT_TYPES.get(type) or FP8_TYPES.get(type)
    if found is None:
        raise ValueError(f"type {type:.20} is not supported; supported: {', '.join(TYPES)}")
    return found


def dequantize(blocks: Tensor, type: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, bytes] uint8 -> [rows, columns], rounded from f32 to `dtype`.

    Raises ValueError for an unknown type, and for rows that end within a block.
    """
    block = block_type(type)
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % block.num_bytes:
        raise ValueError(
            f"{type} needs rows of bytes in blocks of {block.num_bytes}, not {blocks.dtype} "
            f"{list(blocks.shape)}"
        )
    rows, columns = len(blocks), blocks.shape[1] // block.num_bytes * block.columns
    out = torch.empty(rows, columns, dtype=dtype)
    for start in range(0, rows, step := max(1, PIECE // max(columns, 1))):
        piece = blocks[start : start + step].reshape(-1, block.num_bytes)
        out[start : start + step] = block.weights(piece).view(-1, columns)
    return out


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q1_0(blocks: Tensor) -> Tensor:
    scale, bits = split(blocks, 2, 16)
    return half(scale) * (unpack_bits(bits, 1, 1).float() * 2 - 1)


def _q2_0(blocks: Tensor) -> Tensor:
    scale, numbers = split(blocks, 2, 16)
    return half(scale) * (unpack_bits(numbers, 2, 1).float() - 1)


def _q4_0(blocks: Tensor) -> Tensor:
    scale, numbers = split(blocks, 2, 16)
    return half(scale) * (unpack_bits(numbers, 4, 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least, numbers = split(blocks, 2, 2, 16)
    return half(scale) * unpack_bits(numbers, 4, 16).float() + half(least)


def fifth_bits(high: Tensor) -> Tensor:
    """[blocks, 4] -> [blocks, 32]: bit i of the little-endian word, times 16"""
    return unpack_bits(high, 1, 1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    scale, high, numbers = split(blocks, 2, 4, 16)
    return half(scale) * ((unpack_bits(numbers, 4, 16) | fifth_bits(high)).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least, high, numbers = split(blocks, 2, 2, 4, 16)
    return half(scale) * (unpack_bits(numbers, 4, 16) | fifth_bits(high)).float() + half(least)


def _q8_0(blocks: Tensor) -> Tensor:
    scale, numbers = split(blocks, 2, 32)
    return half(scale) * numbers.view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    both, numbers, scale, least = split(blocks, 16, 64, 2, 2)
    scales, leasts = half(scale) * (both & 15).float(), half(least) * (both >> 4).float()
    x = in_groups(unpack_bits(numbers, 2, 32), scales)
    return (scales.unsqueeze(-1) * x - leasts.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    high, numbers, packed, scale = split(blocks, 32, 64, 12, 2)
    scales = half(scale) * q3_k_scales(packed)
    # The third bit is stored for x + 4.
    x = in_groups(unpack_bits(numbers, 2, 32) | unpack_bits(high, 1, 32) << 2, scales) - 4
    return (scales.unsqueeze(-1) * x).flatten(1)


def q3_k_scales(packed: Tensor) -> Tensor:
    """[blocks, 12] -> [blocks, 16] whole, from -32 to 31"""
    low, high = split(packed, 8, 4)
    return (unpack_bits(low, 4, 8) | unpack_bits(high, 2, 4) << 4).float() - 32


def scales_and_leasts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, 12] -> eight scales and eight minima of 6 bits, [blocks, 8] each"""
    scales, leasts, rest = split(packed, 4, 4, 4)
    return (
        torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), 1).float(),
        torch.cat((leasts & 63, rest >> 4 | leasts >> 2 & 48), 1).float(),
    )


def _with_leasts(scale: Tensor, least: Tensor, packed: Tensor, numbers: Tensor) -> Tensor:
    scales, leasts = scales_and_leasts(packed)
    scales, leasts = half(scale) * scales, half(least) * leasts
    x = in_groups(numbers, scales)
    return (scales.unsqueeze(-1) * x - leasts.unsqueeze(-1)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    scale, least, packed, numbers = split(blocks, 2, 2, 12, 128)
    return _with_leasts(scale, least, packed, unpack_bits(numbers, 4, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    scale, least, packed, high, numbers = split(blocks, 2, 2, 12, 32, 128)
    return _with_leasts(
        scale, least, packed, unpack_bits(numbers, 4, 32) | unpack_bits(high, 1, 32) << 4
    )


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, scale = split(blocks, 128, 64, 16, 2)
    scales = half(scale) * scales.contiguous().view(torch.int8).float()
    x = in_groups(unpack_bits(low, 4, 64) | unpack_bits(high, 2, 32) << 4, scales) - 32
    return (scales.unsqueeze(-1) * x).flatten(1)


def _look_up(values: Sequence[int], numbers: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[numbers.int()]


def iq4_numbers(numbers: Tensor) -> Tensor:
    """Returns the values that the nibbles of IQ4_NL and IQ4_XS stand for, f32"""
    return _look_up(_IQ4, numbers)


def _iq4_nl(blocks: Tensor) -> Tensor:
    scale, numbers = split(blocks, 2, 16)
    return half(scale) * iq4_numbers(unpack_bits(numbers, 4, 16))


def _iq4_xs(blocks: Tensor) -> Tensor:
    scale, packed, numbers = split(blocks, 2, 6, 128)
    scales = half(scale) * iq4_xs_scales(packed)
    x = in_groups(iq4_numbers(unpack_bits(numbers, 4, 16)), scales)
    return (scales.unsqueeze(-1) * x).flatten(1)


def iq4_xs_scales(packed: Tensor) -> Tensor:
    """[blocks, 6] -> [blocks, 8] whole, from -32 to 31"""
    high, low = split(packed, 2, 4)
    return (unpack_bits(low, 4, 1) | unpack_bits(high, 2, 1) << 4).float() - 32


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent, numbers = split(blocks, 1, 16)
    return mxfp4_scales(exponent) * fp4_numbers(unpack_bits(numbers, 4, 16))


def mxfp4_scales(exponent: Tensor) -> Tensor:
    """2**(exponent - 128); the least two are subnormal numbers"""
    exponent = exponent.int()
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), exponent - 1 << 23)
    return bits.view(torch.float32)


def fp4_numbers(numbers: Tensor) -> Tensor:
    """Returns the values that the nibbles of MXFP4 stand for, doubled, f32"""
    return _look_up(FP4, numbers)


def _tq1_0(blocks: Tensor) -> Tensor:
    """A byte holds five ternary digits, the first in the highest place; the last four bytes hold
    four.
    """
    runs, scale = blocks.split((52, 2), dim=1)
    numbers = []
    for run, num_digits in zip(runs.split((32, 16, 4), dim=1), (5, 5, 4), strict=True):
        powers = torch.tensor((1, 3, 9, 27, 81)[:num_digits], dtype=torch.uint8).view(-1, 1)
        shifted = run.unsqueeze(1) * powers  # modulo 256: the digits before are gone
        numbers.append((shifted.int() * 3 >> 8).flatten(1))
    return half(scale) * (torch.cat(numbers, 1).float() - 1)


def _tq2_0(blocks: Tensor) -> Tensor:
    numbers, scale = split(blocks, 64, 2)
    return half(scale) * (unpack_bits(numbers, 2, 32).float() - 1)


def scale_and_zero(words: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, 4] bytes of INT4_* -> scales and zeros [blocks, 1] f32"""
    bits = words.contiguous().view(torch.int32)
    return (bits & ~ZERO_BITS).view(torch.float32), (bits & ZERO_BITS).float()


def _int4(blocks: Tensor) -> Tensor:
    words, numbers = split(blocks, 4, blocks.shape[1] - 4)
    scale, zero = scale_and_zero(words)
    return scale * (unpack_bits(numbers, 4, 16).float() - zero)


def _int2(blocks: Tensor) -> Tensor:
    scale, numbers = split(blocks, 2, blocks.shape[1] - 2)
    return half(scale) * (unpack_bits(numbers, 2, 8).float() - 1)


def fp8_parts(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Blocks of FP8_* -> scales [blocks, 1], e4m3 numbers [blocks, columns] and, of FP8_*_STATIC,
    the scales of x [blocks, 1], all f32.
    """
    num_scales = blocks.shape[1] % 32 // 4
    *scales, numbers = split(blocks, *[4] * num_scales, blocks.shape[1] - 4 * num_scales)
    scale, *of_x = (part.contiguous().view(torch.float32) for part in scales)
    numbers = numbers.contiguous().view(torch.float8_e4m3fn)
    return scale, numbers.float(), of_x[0] if of_x else None


def _fp8(blocks: Tensor) -> Tensor:
    scale, numbers, _ = fp8_parts(blocks)
    return scale * numbers


def _product(parts: Callable[[Tensor], Parts]) -> Callable[[Tensor], Tensor]:
    def weights(blocks: Tensor) -> Tensor:
        scale, factors, numbers = parts(blocks)
        scales = scale * factors
        return (scales.unsqueeze(-1) * in_groups(numbers, scales)).flatten(1)

    return weights


ZERO_BITS = 255  # of the word of a block of INT4_*
INT_TYPES = {f"INT4_{size}": BlockType(size, 4 + size // 2, _int4) for size in (32, 128)} | {
    f"INT2_{size}": BlockType(size, 2 + size // 4, _int2) for size in (64, 128)
}
# How x is quantized to FP8, by what a type ends with: it is not; with a scale for each row and 128
# columns; for each row; with one scale, which is in the blocks.
FP8_SCHEMES = ("", "_GROUP", "_TOKEN", "_STATIC")
FP8_TYPES = {
    f"FP8_{size}{scheme}": BlockType(size, (8 if scheme == "_STATIC" else 4) + size, _fp8)
    for size in (32, 128)
    for scheme in FP8_SCHEMES
}
TYPES = {
    "F32": BlockType(1, 4, _f32),
    "F16": BlockType(1, 2, half),
    "BF16": BlockType(1, 2, _bf16),
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q2_K": BlockType(256, 84, _q2_k),
    "Q3_K": BlockType(256, 110, _q3_k),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
    "IQ4_NL": BlockType(32, 18, _iq4_nl),
    "IQ4_XS": BlockType(256, 136, _iq4_xs),
    "MXFP4": BlockType(32, 17, _mxfp4),
    "TQ1_0": BlockType(256, 54, _tq1_0),
    "TQ2_0": BlockType(256, 66, _tq2_0),
    "Q1_0": BlockType(128, 18, _q1_0),
    "Q2_0": BlockType(64, 18, _q2_0),
} | {
    type: BlockType(columns, num_bytes, _product(parts))
    for type, (columns, num_bytes, parts) in CODEBOOK_TYPES.items()
}
