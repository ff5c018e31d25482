"""Takes blocks of GGML's types with codebooks, and of NVFP4, apart into a scale for the block, a
factor for each group of weights, and numbers.

Must not know: files, speed, how the three are multiplied.

A number is that of a codebook with a sign of its own, or, in IQ1_*, with an eighth added or
subtracted. The functions return (scale [blocks, 1], factors [blocks, groups], numbers [blocks,
columns]) in fp32; a weight is their product, of which scale and factor are multiplied first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .gguf_bits import half, split, unpack_bits, words
from .gguf_codebooks import codebook

Parts = tuple[Tensor, Tensor, Tensor]
EIGHTH = 0.125  # IQ1_*: what is added to the numbers of a code
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled


def _look_up(name: str, codes: Tensor) -> Tensor:
    """[blocks, codes] -> [blocks, numbers] f32"""
    return codebook(name)[codes.long()].flatten(1)


def _signs(bits: Tensor) -> Tensor:
    """[blocks, bytes] -> [blocks, 8 * bytes] f32: -1 where a bit is set, the lowest first"""
    return 1 - 2 * unpack_bits(bits, 1, 1).float()


def _even_signs(seven: Tensor) -> Tensor:
    """[blocks, n] of 7 bits -> [blocks, 8 * n] f32: the eighth makes the number of signs even"""
    parity = (seven.unsqueeze(-1) >> torch.arange(7)).bitwise_and(1).sum(-1) % 2
    return _signs((seven | parity << 7).to(torch.uint8))


def _signs_and_factors(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, 32] bytes: words of four times 7 bits of signs and 4 bits of a factor"""
    found = words(packed, torch.int32).long()
    seven = (found.unsqueeze(-1) >> torch.tensor([0, 7, 14, 21])) & 127
    return _even_signs(seven.flatten(1)), (found >> 28 & 15).float() + 0.5


def iq2_xxs(blocks: Tensor) -> Parts:
    scale, packed = split(blocks, 2, 64)
    codes, rest = packed.unflatten(1, (8, 2, 4)).unbind(2)  # of 32 weights
    signs, factors = _signs_and_factors(rest.flatten(1))
    return half(scale), factors * 0.25, _look_up("IQ2_XXS", codes.flatten(1)) * signs


def iq2_xs(blocks: Tensor) -> Parts:
    scale, packed, factors = split(blocks, 2, 64, 8)
    found = words(packed, torch.int16)
    numbers = _look_up("IQ2_XS", found & 511) * _even_signs(found >> 9)
    return half(scale), (unpack_bits(factors, 4, 1).float() + 0.5) * 0.25, numbers


def iq2_s(blocks: Tensor) -> Parts:
    scale, low, signs, high, factors = split(blocks, 2, 32, 32, 8, 8)
    numbers = _look_up("IQ2_S", low.int() | unpack_bits(high, 2, 1).int() << 8) * _signs(signs)
    return half(scale), (unpack_bits(factors, 4, 1).float() + 0.5) * 0.25, numbers


def iq3_xxs(blocks: Tensor) -> Parts:
    scale, codes, packed = split(blocks, 2, 64, 32)
    signs, factors = _signs_and_factors(packed)
    return half(scale), factors * 0.5, _look_up("IQ3_XXS", codes) * signs


def iq3_s(blocks: Tensor) -> Parts:
    scale, low, high, signs, factors = split(blocks, 2, 64, 8, 32, 4)
    numbers = _look_up("IQ3_S", low.int() | unpack_bits(high, 1, 1).int() << 8) * _signs(signs)
    return half(scale), unpack_bits(factors, 4, 1).float() * 2 + 1, numbers


def _with_eighths(codes: Tensor, is_less: Tensor) -> Tensor:
    """codes [blocks, 32], is_less [blocks, n]: whether an eighth is subtracted"""
    eighths = torch.where(is_less, -EIGHTH, EIGHTH).repeat_interleave(256 // is_less.shape[1], 1)
    return _look_up("IQ1", codes) + eighths


def iq1_s(blocks: Tensor) -> Parts:
    scale, low, packed = split(blocks, 2, 32, 16)
    found = words(packed, torch.int16)
    high = (found.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9])) & 7
    numbers = _with_eighths(low.int() | high.flatten(1) << 8, found >> 15 == 1)
    return half(scale), ((found >> 12) & 7).float() * 2 + 1, numbers


def iq1_m(blocks: Tensor) -> Parts:
    """Each of four words has four bits of the scale above four factors of 3 bits."""
    low, packed, rest = split(blocks, 32, 16, 8)
    found = words(rest, torch.int16)
    scale = (found >> 12 << torch.tensor([0, 4, 8, 12])).sum(1, keepdim=True)
    factors = (found.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9])) & 7
    high = unpack_bits(packed, 4, 1).int()
    numbers = _with_eighths(low.int() | (high & 7) << 8, high >> 3 == 1)
    scale = scale.to(torch.int16).view(torch.float16).float()
    return scale, factors.flatten(1).float() * 2 + 1, numbers


def nvfp4(blocks: Tensor) -> Parts:
    """16 numbers of 4 bits (e2m1, doubled) have a factor of 8 (e4m3 without a sign, halved)."""
    packed, numbers = split(blocks, 4, 32)
    exponent, mantissa = (packed >> 3 & 15).float(), (packed & 7).float()
    normal = (1 + mantissa / 8) * torch.exp2(exponent - 8)
    factors = torch.where(exponent == 0, mantissa * 2**-10, normal)
    factors = torch.where((packed == 0) | (packed == 127), 0.0, factors)
    numbers = torch.tensor(FP4, dtype=torch.float32)[unpack_bits(numbers, 4, 8).int()]
    return torch.ones(len(blocks), 1), factors, numbers


# A type maps to (columns of a block, its bytes, its parts).
CODEBOOK_TYPES: dict[str, tuple[int, int, Callable[[Tensor], Parts]]] = {
    "IQ2_XXS": (256, 66, iq2_xxs),
    "IQ2_XS": (256, 74, iq2_xs),
    "IQ2_S": (256, 82, iq2_s),
    "IQ3_XXS": (256, 98, iq3_xxs),
    "IQ3_S": (256, 110, iq3_s),
    "IQ1_S": (256, 50, iq1_s),
    "IQ1_M": (256, 56, iq1_m),
    "NVFP4": (64, 36, nvfp4),
}
