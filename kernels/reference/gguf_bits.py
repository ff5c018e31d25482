"""Takes blocks apart into fields of bytes, numbers of some bits, and halves.

Must not know: types of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split(blocks: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    return blocks.split(sizes, dim=1)


def half(x: Tensor) -> Tensor:
    """[blocks, 2] bytes -> [blocks, 1] f32"""
    return x.contiguous().view(torch.float16).float()


def words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[blocks, bytes] -> [blocks, little-endian words of 16 or 32 bits] i32"""
    found = x.clone(memory_format=torch.contiguous_format).view(dtype).int()  # aligned
    return found & 0xFFFF if dtype == torch.int16 else found


def unpack_bits(x: Tensor, width: int, run: int) -> Tensor:
    """[blocks, bytes] -> [blocks, weights] of `width` bits.

    `run` bytes hold the lowest bits of `run` weights, then the next bits of the next `run`.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=x.device).view(-1, 1)
    return ((x.unflatten(1, (-1, 1, run)) >> shifts) & (1 << width) - 1).flatten(1)


def in_groups(x: Tensor, scales: Tensor) -> Tensor:
    """[blocks, columns] -> [blocks, groups, columns of a group] f32, one group for each scale"""
    return x.float().unflatten(1, (scales.shape[1], -1))
