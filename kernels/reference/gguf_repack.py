"""Converts blocks of GGUF's types without kernels to blocks of types that have them
(gguf_linear.py).

Must not know: files, speed.

The conversions of Q3_K and IQ3_S to Q6_K, of TQ1_0, TQ2_0 and Q1_0 to INT2_128 and of Q2_0 to
INT2_64 are exact, and so are those of IQ1_S and IQ1_M to Q6_K where the scales are fp16 after a
division by eight. IQ4_XS, IQ2_XXS and IQ3_XXS keep their numbers as Q8_0, and the scale of each 32
is rounded to fp16, by at most 2**-11 of it. Q2_K, IQ2_XS, IQ2_S and NVFP4 become Q8_0, and every
weight is rounded by at most 1/253 of the largest of its 32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .gguf_bits import half, split, unpack_bits
from .gguf_blocks import (
    block_type,
    dequantize,
    iq4_numbers,
    iq4_xs_scales,
    q3_k_scales,
)
from .gguf_codebook_blocks import CODEBOOK_TYPES

_LOWEST_BITS = 0x0303030303030303  # two of each byte
_NUMBERS_AT_ONCE = 2**20  # enough for torch's operations to take longer than their calls


def repack(blocks: Tensor, type: str) -> Tensor:
    """[rows, bytes] uint8 of `type` -> [rows, bytes] of TYPES[type]"""
    source, (target, function) = block_type(type), _REPACKED[type]
    rows, num_blocks = len(blocks), blocks.shape[1] // source.num_bytes
    columns = num_blocks * source.columns
    out = torch.empty(
        rows,
        columns // block_type(target).columns * block_type(target).num_bytes,
        dtype=torch.uint8,
    )
    for start in range(0, rows, step := max(1, _NUMBERS_AT_ONCE // columns)):
        piece = blocks[start : start + step].reshape(-1, source.num_bytes)
        out[start : start + step] = function(piece).reshape(-1, out.shape[1])
    return out


def _bytes_of_halves(scales: Tensor) -> Tensor:
    """[blocks, n] f32 -> [blocks, n, 2]: as fp16"""
    return scales.half().unsqueeze(-1).contiguous().view(torch.uint8)


def _as_q8_0(scales: Tensor, numbers: Tensor) -> Tensor:
    """scales [blocks, n] f32, numbers [blocks, 32 * n] within +-127"""
    numbers = numbers.to(torch.int8).view(torch.uint8).unflatten(1, (-1, 32))
    return torch.cat((_bytes_of_halves(scales), numbers), 2)


def _rounded(type: str) -> Callable[[Tensor], Tensor]:
    def repacked(blocks: Tensor) -> Tensor:
        weights = dequantize(blocks, type).unflatten(1, (-1, 32))
        scales = (weights.abs().amax(-1) / 127).half().float()
        factors = torch.where(scales == 0, 0.0, 1 / scales)
        numbers = (weights * factors.unsqueeze(-1)).round().clamp(-127, 127)
        return _as_q8_0(scales, numbers.flatten(1))

    return repacked


def _q3_k(blocks: Tensor) -> Tensor:
    """The scales of 16 stay the same. The numbers are from -4 to 3; Q6_K stores them plus 32."""
    high, numbers, packed, scale = split(blocks, 32, 64, 12, 2)
    stored = (unpack_bits(numbers, 2, 32) | unpack_bits(high, 1, 32) << 2) + 28
    return _as_q6_k(stored, q3_k_scales(packed), scale)


def _as_q6_k(stored: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """stored [blocks, 256] uint8: numbers plus 32; scales [blocks, 16], integers; scale [blocks,
    2]: bytes of fp16
    """
    halves = stored.unflatten(1, (2, 4, 32))  # of 128: four runs of 32
    low, upper = halves & 15, halves >> 4
    low = (low[:, :, :2] | low[:, :, 2:] << 4).flatten(1)
    upper = (upper << torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)).sum(2).to(torch.uint8)
    return torch.cat((low, upper.flatten(1), scales.to(torch.int8).view(torch.uint8), scale), 1)


def _whole(type: str, scale_at: int) -> Callable[[Tensor], Tensor]:
    """Converts to INT2_64 or INT2_128 types with numbers from -1 to 2 and one scale, two bytes from
    `scale_at`.
    """
    place = slice(scale_at, scale_at + 2)

    def repacked(blocks: Tensor) -> Tensor:
        """Two blocks may have the same scale."""
        unscaled = blocks.clone()
        unscaled[:, place] = torch.tensor([1.0]).half().view(torch.uint8)
        stored = (dequantize(unscaled, type) + 1).to(torch.uint8)
        return as_int2(stored, blocks[:, place], min(stored.shape[1], 128))

    return repacked


def as_int2(stored: Tensor, scales: Tensor, columns: int) -> Tensor:
    """stored [rows, n * columns] uint8: numbers plus 1, from 0 to 3; scales [rows, 2]: bytes of
    fp16 -> blocks of INT2_`columns`, [rows, n, bytes]
    """
    stored = stored.unflatten(1, (-1, columns // 32, 4, 8))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(-1, 1)
    numbers = (stored << shifts).sum(3, dtype=torch.uint8).flatten(2)
    return torch.cat((scales.unsqueeze(1).expand(-1, numbers.shape[1], 2), numbers), 2)


def from_i2_s(data: Tensor, rows: int) -> Tensor:
    """The bytes of a tensor of bitnet.cpp's I2_S -> [rows, bytes] of INT2_128.

    Of 128 numbers, plus 1, byte i has the i-th of each 32, the first in the highest bits. After all
    numbers follow 32 bytes that begin with the scale in fp32, which is rounded to fp16.
    """
    exact = data[-32:-28].clone().view(torch.float32)
    rounded = exact.half().float()
    if not (rounded.isfinite().all() and torch.allclose(rounded, exact, rtol=2**-10, atol=0)):
        raise ValueError(f"its scale {float(exact)} is beyond fp16")
    numbers = _numbers_of_128(data[:-32], (6, 4, 2, 0)).view(rows, -1, 32)
    scales = _bytes_of_halves(exact).expand(*numbers.shape[:2], 2)
    return torch.cat((scales, numbers), 2).flatten(1)


def _tq2_0(blocks: Tensor) -> Tensor:
    """Of 128 numbers, plus 1, byte i has the i-th of each 32, the first in the lowest bits."""
    numbers = _numbers_of_128(blocks[:, :64].flatten(), (0, 2, 4, 6)).view(-1, 2, 32)
    return torch.cat((blocks[:, 64:].unsqueeze(1).expand(-1, 2, 2), numbers), 2)


def _numbers_of_128(data: Tensor, shifts: Sequence[int]) -> Tensor:
    """Of 32 bytes with 128 numbers, byte i has the i-th of each 32, of which the j-th is above
    shifts[j] bits -> [n, 32], as blocks of INT2_128 have them. Computes eight bytes at once.
    """
    eighths = data.view(torch.int64).view(-1, 4).unbind(1)
    out = torch.empty(len(eighths[0]), 4, dtype=torch.int64)
    for i, shift in enumerate(shifts):
        out[:, i] = sum(
            (eight >> shift & _LOWEST_BITS) << 2 * place for place, eight in enumerate(eighths)
        )
    return out.view(torch.uint8)


def _iq4_xs(blocks: Tensor) -> Tensor:
    scale, packed, numbers = split(blocks, 2, 6, 128)
    return _as_q8_0(half(scale) * iq4_xs_scales(packed), iq4_numbers(unpack_bits(numbers, 4, 16)))


def _codes(type: str) -> Callable[[Tensor], Tensor]:
    """Converts to Q8_0. The numbers stay as they are."""
    parts = CODEBOOK_TYPES[type][2]

    def repacked(blocks: Tensor) -> Tensor:
        scale, factors, numbers = parts(blocks)
        return _as_q8_0(scale * factors, numbers)

    return repacked


def _small_codes(type: str, multiple: int) -> Callable[[Tensor], Tensor]:
    """Converts to Q6_K. The numbers are integers after a multiplication, and the scale is divided
    by the same factor.
    """
    parts = CODEBOOK_TYPES[type][2]

    def repacked(blocks: Tensor) -> Tensor:
        scale, factors, numbers = parts(blocks)
        stored = (numbers * multiple + 32).to(torch.uint8)
        factors = factors.repeat_interleave(16 // factors.shape[1], 1)
        return _as_q6_k(stored, factors, _bytes_of_halves(scale / multiple).flatten(1))

    return repacked


_REPACKED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "Q2_K": ("Q8_0", _rounded("Q2_K")),
    "Q3_K": ("Q6_K", _q3_k),
    "IQ4_XS": ("Q8_0", _iq4_xs),
    "TQ1_0": ("INT2_128", _whole("TQ1_0", 52)),
    "TQ2_0": ("INT2_128", _tq2_0),
    "Q1_0": ("INT2_128", _whole("Q1_0", 0)),
    "Q2_0": ("INT2_64", _whole("Q2_0", 0)),
    "IQ2_XXS": ("Q8_0", _codes("IQ2_XXS")),
    "IQ2_XS": ("Q8_0", _rounded("IQ2_XS")),
    "IQ2_S": ("Q8_0", _rounded("IQ2_S")),
    "IQ3_XXS": ("Q8_0", _codes("IQ3_XXS")),
    "IQ3_S": ("Q6_K", _small_codes("IQ3_S", 1)),
    "IQ1_S": ("Q6_K", _small_codes("IQ1_S", 8)),
    "IQ1_M": ("Q6_K", _small_codes("IQ1_M", 8)),
    "NVFP4": ("Q8_0", _rounded("NVFP4")),
}
TYPES = {type: target for type, (target, _) in _REPACKED.items()}
