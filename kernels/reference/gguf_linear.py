"""Specifies linear layers on GGUF's blocks: the integers, scales and summation order of the fast
implementations.

Must not know: files, speed.

x is quantized as for int8 weights (quantized.py), with one scale per 32 numbers, as llama.cpp does
for its types of 32. A weight is scale * number - least. Every 32 weights of a row have one or two
scales and at most one least weight; those of K-quants are products that fp32 holds exactly.

Blocks of 32 are added in ascending order with one fused multiply-add per scale: the exact sum of
products of integers, times the scale of x, which rounds, is multiplied by the scale of the weights.
Then the exact sum of the integers of x, times their scale, is multiplied by the least weight.

Blocks of FP8_* are multiplied by x itself, or by x in e4m3 if their type says so (quantize_e4m3):
sums of a block's products with e4m3 numbers are in fp32, in any order. If x has several scales, the
sum is multiplied by that of the row and group. Blocks are added as above, with one scale of the
weights, and the whole sum is multiplied by the only scale of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..registry import register
from .gguf_blocks import (
    FP8_TYPES,
    block_type,
    dequantize,
    fifth_bits,
    fp4_numbers,
    fp8_parts,
    half,
    iq4_numbers,
    mxfp4_scales,
    scale_and_zero,
    scales_and_leasts,
    split,
    unpack_bits,
)
from .quantized import fused, in_groups, quantize_activations

GROUP = 32  # numbers of x under one scale
E4M3_GROUP = 128  # of FP8_*_GROUP
MOST_E4M3 = 448.0
LEAST_SCALE = 1 / (MOST_E4M3 * 512)  # as in vLLM: smaller rows are of zeros and subnormal numbers


class Parts(NamedTuple):
    """What a weight consists of, by blocks of 32."""

    numbers: Tensor  # [rows, blocks, scales, 32 / scales], whole
    scales: Tensor  # [rows, blocks, scales] f32
    leasts: Tensor | None  # [rows, blocks] f32, negated: they are added


class GgufLinear:
    def __init__(
        self,
        parts: Sequence[Tensor],
        types: Sequence[str],
        bias: Tensor | None,
        dtype: torch.dtype,
    ):
        self.blocks = [(part, type) for part, type in zip(parts, types, strict=True)]
        self.bias, self.dtype = bias, dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self.logits(x).to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        out = torch.cat([_product(x, *part) for part in self.blocks], 1)
        return out if self.bias is None else out + self.bias.float()

    def embedding(self, token_ids: Tensor) -> Tensor:
        [(blocks, type)] = self.blocks
        return dequantize(blocks[token_ids.long()], type).to(self.dtype)


@register("pack_gguf_linear", name="reference", priority=0)
def pack_gguf_linear(
    parts: list[Tensor], types: list[str], bias: Tensor | None, dtype: torch.dtype
) -> GgufLinear:
    return GgufLinear(parts, types, bias, dtype)


def _product(x: Tensor, blocks: Tensor, type: str) -> Tensor:
    return (
        _multiply_fp8(x, blocks, type)
        if type in FP8_TYPES
        else _multiply(x, take_apart(blocks, type))
    )


def _multiply_fp8(x: Tensor, blocks: Tensor, type: str) -> Tensor:
    size = block_type(type).columns
    scales, numbers, given = fp8_parts(blocks.reshape(-1, block_type(type).num_bytes))
    scales, numbers = scales.view(len(blocks), -1), numbers.view(len(blocks), -1, size)
    x, x_scales = quantize_e4m3(x.float(), type, None if given is None else given[0])
    total = torch.zeros(len(x), len(blocks))
    for block, of_x in enumerate(x.split(size, 1)):
        product = of_x @ numbers[:, block].T
        if x_scales.shape[1] > 1:
            product *= x_scales[:, block * size // E4M3_GROUP, None]
        total = fused(product, scales[:, block], total)
    return total * x_scales if x_scales.shape[1] == 1 else total


def quantize_e4m3(x: Tensor, type: str, given: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [T, K] f32 -> numbers [T, K], which e4m3 has, and scales [T, n], as blocks of `type` want
    them: n is 0 if x stays as it is. given [1]: the scale of FP8_*_STATIC.

    A dynamic scale makes the largest number 448, the largest of e4m3. It is at least LEAST_SCALE.
    Numbers are rounded to nearest, ties to even; those beyond 448 become 448, infinities NaN.
    """
    if type.endswith("_GROUP"):
        groups = in_groups(x, E4M3_GROUP)
        scales = (groups.abs().amax(2) / MOST_E4M3).clamp(LEAST_SCALE)
    elif type.endswith("_TOKEN"):
        scales = (x.abs().amax(1, keepdim=True) / MOST_E4M3).clamp(LEAST_SCALE)
    elif given is not None:
        scales = given.expand(len(x), 1)
    else:
        return x, x.new_empty(len(x), 0)
    by_column = scales.repeat_interleave(E4M3_GROUP, 1)[:, : x.shape[1]]
    if scales.shape[1] == 1:
        by_column = scales
    numbers = (x / by_column).masked_fill(x.isinf(), torch.nan).clamp(-MOST_E4M3, MOST_E4M3)
    return numbers.to(torch.float8_e4m3fn).float(), scales


def _multiply(x: Tensor, parts: Parts) -> Tensor:
    numbers, x_scales = quantize_activations(in_groups(x.float(), GROUP))
    total = torch.zeros(len(x), len(parts.scales))
    for block in range(x_scales.shape[1]):
        x_scale = x_scales[:, block, None]
        of_x = numbers[:, block].double().unflatten(1, (parts.scales.shape[2], -1))
        for i in range(parts.scales.shape[2]):
            exact = (of_x[:, i] @ parts.numbers[:, block, i].double().T).float()
            total = fused(exact * x_scale, parts.scales[:, block, i], total)
        if parts.leasts is not None:
            sums = of_x.sum((1, 2)).float()[:, None]
            total = fused(sums * x_scale, parts.leasts[:, block], total)
    return total


def take_apart(blocks: Tensor, type: str) -> Parts:
    """[rows, bytes] -> the parts of its weights. Raises ValueError for a type without kernels."""
    if type not in _PARTS:
        raise ValueError(f"type {type:.20} has no kernels; there are: {', '.join(_PARTS)}")
    numbers, scales, leasts = _PARTS[type](blocks.reshape(-1, block_type(type).num_bytes))
    num_scales = max(1, GROUP * scales.shape[1] // numbers.shape[1])
    scales = scales.reshape(len(blocks), -1, num_scales)
    return Parts(
        numbers.float().reshape(*scales.shape, -1),
        scales,
        None if leasts is None else leasts.reshape(len(blocks), -1),
    )


# A function takes one block per row and returns the blocks' numbers, scales and least weights.
_Pieces = tuple[Tensor, Tensor, Tensor | None]


def _q8_0(blocks: Tensor) -> _Pieces:
    scale, numbers = split(blocks, 2, 32)
    return numbers.contiguous().view(torch.int8), half(scale), None


def _q4_0(blocks: Tensor) -> _Pieces:
    scale, numbers = split(blocks, 2, 16)
    return unpack_bits(numbers, 4, 16).float() - 8, half(scale), None


def _q4_1(blocks: Tensor) -> _Pieces:
    scale, least, numbers = split(blocks, 2, 2, 16)
    return unpack_bits(numbers, 4, 16), half(scale), half(least)


def _q5_0(blocks: Tensor) -> _Pieces:
    scale, high, numbers = split(blocks, 2, 4, 16)
    return (unpack_bits(numbers, 4, 16) | fifth_bits(high)).float() - 16, half(scale), None


def _q5_1(blocks: Tensor) -> _Pieces:
    scale, least, high, numbers = split(blocks, 2, 2, 4, 16)
    return unpack_bits(numbers, 4, 16) | fifth_bits(high), half(scale), half(least)


def _iq4_nl(blocks: Tensor) -> _Pieces:
    scale, numbers = split(blocks, 2, 16)
    return iq4_numbers(unpack_bits(numbers, 4, 16)), half(scale), None


def _mxfp4(blocks: Tensor) -> _Pieces:
    exponent, numbers = split(blocks, 1, 16)
    return fp4_numbers(unpack_bits(numbers, 4, 16)), mxfp4_scales(exponent), None


def _with_leasts(scale: Tensor, least: Tensor, packed: Tensor, numbers: Tensor) -> _Pieces:
    scales, leasts = scales_and_leasts(packed)
    return numbers, half(scale) * scales, -(half(least) * leasts)


def _q4_k(blocks: Tensor) -> _Pieces:
    scale, least, packed, numbers = split(blocks, 2, 2, 12, 128)
    return _with_leasts(scale, least, packed, unpack_bits(numbers, 4, 32))


def _q5_k(blocks: Tensor) -> _Pieces:
    scale, least, packed, high, numbers = split(blocks, 2, 2, 12, 32, 128)
    numbers = unpack_bits(numbers, 4, 32) | unpack_bits(high, 1, 32) << 4
    return _with_leasts(scale, least, packed, numbers)


def _q6_k(blocks: Tensor) -> _Pieces:
    low, high, scales, scale = split(blocks, 128, 64, 16, 2)
    numbers = (unpack_bits(low, 4, 64) | unpack_bits(high, 2, 32) << 4).float() - 32
    return numbers, half(scale) * scales.contiguous().view(torch.int8).float(), None


def _int4(blocks: Tensor) -> _Pieces:
    words, numbers = split(blocks, 4, blocks.shape[1] - 4)
    scale, zero = scale_and_zero(words)
    parts = numbers.shape[1] // 16  # of 32 numbers
    return unpack_bits(numbers, 4, 16), scale.expand(-1, parts), (-zero * scale).expand(-1, parts)


def _int2(blocks: Tensor) -> _Pieces:
    scale, numbers = split(blocks, 2, blocks.shape[1] - 2)
    parts = numbers.shape[1] // 8  # of 32 numbers
    return unpack_bits(numbers, 2, 8).float() - 1, half(scale).expand(-1, parts), None


_PARTS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "INT4_32": _int4,
    "INT4_128": _int4,
    "INT2_64": _int2,
    "INT2_128": _int2,
}
TYPES = tuple(_PARTS)
