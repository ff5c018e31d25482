"""Specifies KV caches of other dtypes than the model's (kernels/ops.py: reshape_and_cache).

Must not know: speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantized import quantize_activations

LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def store(heads: Tensor, cache: Tensor, block: int, offset: int, is_key: bool) -> None:
    """heads [NKV, D] of a token -> its slot of a cache."""
    # Values beyond 448 are clamped to it; NaN stays NaN.
    if cache.dtype == torch.float8_e4m3fn:
        heads = heads.float().clamp(-LARGEST_FP8, LARGEST_FP8).to(cache.dtype)
    if cache.dtype != torch.int8:
        cache[block, offset] = heads
        return
    numbers, scales = parts(cache)
    whole, scales[block, :, offset] = quantize_activations(
        hadamard(heads.float()) if is_key else heads.float()
    )
    numbers[block, offset] = whole.to(torch.int8)


def load(cache: Tensor, blocks: Tensor, offsets: Tensor, is_key: bool) -> Tensor:
    """Blocks and offsets [n] i64 of slots -> their values [n, NKV, D] fp32."""
    if cache.dtype != torch.int8:
        return cache[blocks, offsets].float()
    numbers, scales = parts(cache)
    heads = numbers[blocks, offsets].float() * scales[blocks, :, offsets].unsqueeze(-1)
    return hadamard(heads) / hadamard_size(heads.shape[-1]) if is_key else heads


def parts(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Splits an int8 cache [num_blocks, block_size, NKV, D + 4] into its integers [num_blocks,
    block_size, NKV, D] and scales [num_blocks, NKV, block_size].
    """
    block_size, num_kv_heads, row = cache.shape[1:]
    numbers, scales = cache.flatten(1).split(
        (block_size * num_kv_heads * (row - 4), block_size * num_kv_heads * 4), dim=1
    )
    return numbers.unflatten(1, (block_size, num_kv_heads, row - 4)), scales.view(
        torch.float32
    ).unflatten(1, (num_kv_heads, block_size))


def hadamard_size(head_dim: int) -> int:
    """Returns the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] fp32: multiplies each block of hadamard_size(D) by that Hadamard matrix
    (Sylvester's).

    The result is not normalised. Elements are added from the widest stride down.
    """
    stride = hadamard_size(x.shape[-1]) // 2
    while stride:
        first, second = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        stride //= 2
    return x
