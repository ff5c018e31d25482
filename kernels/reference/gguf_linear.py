"""Specification of linear layers on GGUF's blocks: the integers, scales and summation order of the
fast implementations.

Must not know: files, speed.

x is quantized in groups of 256, as for int8 weights (quantized.py). A block of 32 or a super-block
of 256 has an exact sum of products of integers. In a super-block, whole scales of its parts count
as factors of the integers. Blocks of a group are added in ascending order, each sum times its
scale and then the sum of x times its minimum; the group, times the scale of x, is added last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..registry import register
from .gguf_blocks import block_type, dequantize, half, scales_and_leasts, split, unpack_bits
from .quantized import fused, in_groups, quantize_activations

GROUP = 256  # numbers of x under one scale


class Parts(NamedTuple):
    """What the blocks of a weight consist of: weight = scale * number - least * least_number."""

    scales: Tensor  # [rows, blocks] f32
    numbers: Tensor  # [rows, blocks, columns of a block], whole; times the whole scales of parts
    leasts: Tensor | None  # [rows, blocks] f32, negated: it is added
    least_numbers: Tensor | None  # [rows, blocks, columns of a block], whole


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
        out = torch.cat([_multiply(x, take_apart(*part)) for part in self.blocks], 1)
        return out if self.bias is None else out + self.bias.float()

    def embedding(self, token_ids: Tensor) -> Tensor:
        [(blocks, type)] = self.blocks
        return dequantize(blocks[token_ids.long()], type).to(self.dtype)


@register("pack_gguf_linear", name="reference", priority=0)
def pack_gguf_linear(
    parts: list[Tensor], types: list[str], bias: Tensor | None, dtype: torch.dtype
) -> GgufLinear:
    return GgufLinear(parts, types, bias, dtype)


def _multiply(x: Tensor, parts: Parts) -> Tensor:
    numbers, scales = quantize_activations(in_groups(x.float(), GROUP))
    columns = parts.numbers.shape[-1]
    at_once = GROUP // columns  # blocks of a group
    total = torch.zeros(len(x), len(parts.scales))
    for group in range(scales.shape[1]):
        of_group = torch.zeros_like(total)
        for i in range(at_once):
            if (block := group * at_once + i) == parts.scales.shape[1]:
                break
            x_numbers = numbers[:, group, i * columns : (i + 1) * columns].double()
            exact = (x_numbers @ parts.numbers[:, block].double().T).float()
            of_group = fused(exact, parts.scales[:, block], of_group)
            if parts.leasts is not None and parts.least_numbers is not None:
                exact = (x_numbers @ parts.least_numbers[:, block].double().T).float()
                of_group = fused(exact, parts.leasts[:, block], of_group)
        total = fused(of_group, scales[:, group, None].expand_as(total), total)
    return total


def take_apart(blocks: Tensor, type: str) -> Parts:
    """[rows, bytes] -> the parts of its blocks. Raises ValueError for a type without kernels."""
    if type not in _PARTS:
        raise ValueError(f"type {type:.20} has no kernels; there are: {', '.join(_PARTS)}")
    num_bytes = block_type(type).num_bytes
    parts = _PARTS[type](blocks.reshape(-1, num_bytes))
    num_blocks = blocks.shape[1] // num_bytes
    return Parts(*(None if p is None else _by_row(p, len(blocks), num_blocks) for p in parts))


def _by_row(x: Tensor, rows: int, blocks: int) -> Tensor:
    x = x.view(rows, blocks, -1)
    return x.squeeze(-1) if x.shape[-1] == 1 else x


def _q8_0(blocks: Tensor) -> Parts:
    scale, numbers = split(blocks, 2, 32)
    return Parts(half(scale), numbers.contiguous().view(torch.int8).float(), None, None)


def _q4_0(blocks: Tensor) -> Parts:
    scale, numbers = split(blocks, 2, 16)
    return Parts(half(scale), unpack_bits(numbers, 4, 16).float() - 8, None, None)


def _q4_1(blocks: Tensor) -> Parts:
    scale, least, numbers = split(blocks, 2, 2, 16)
    numbers = unpack_bits(numbers, 4, 16).float()
    return Parts(half(scale), numbers, half(least), torch.ones_like(numbers))


def _with_leasts(scale: Tensor, least: Tensor, packed: Tensor, numbers: Tensor) -> Parts:
    scales, leasts = (x.repeat_interleave(32, 1) for x in scales_and_leasts(packed))
    return Parts(half(scale), numbers.float() * scales, -half(least), leasts)


def _q4_k(blocks: Tensor) -> Parts:
    scale, least, packed, numbers = split(blocks, 2, 2, 12, 128)
    return _with_leasts(scale, least, packed, unpack_bits(numbers, 4, 32))


def _q5_k(blocks: Tensor) -> Parts:
    scale, least, packed, high, numbers = split(blocks, 2, 2, 12, 32, 128)
    numbers = unpack_bits(numbers, 4, 32) | unpack_bits(high, 1, 32) << 4
    return _with_leasts(scale, least, packed, numbers)


def _q6_k(blocks: Tensor) -> Parts:
    low, high, scales, scale = split(blocks, 128, 64, 16, 2)
    numbers = (unpack_bits(low, 4, 64) | unpack_bits(high, 2, 32) << 4).float() - 32
    scales = scales.contiguous().view(torch.int8).float().repeat_interleave(16, 1)
    return Parts(half(scale), numbers * scales, None, None)


_PARTS = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
TYPES = tuple(_PARTS)
