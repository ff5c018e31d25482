"""How a KV cache holds a token's heads in types other than the model's, as specified (kernels/ops.py: reshape_and_cache).
May know: torch, the contracts.
Must not know: speed, pages."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import kv_cache_row
from .quantized import quantize_activations

LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def stored(x: Tensor, dtype: torch.dtype, is_key: bool) -> Tensor:
    """Heads x [..., D] as a cache of `dtype` has them, [..., kv_cache_row(D, dtype)]."""
    if dtype == torch.float8_e4m3fn:  # they end at 448: what lies beyond becomes that, a NaN stays one
        return x.float().clamp(-LARGEST_FP8, LARGEST_FP8).to(dtype)
    if dtype != torch.int8:
        return x
    numbers, scales = quantize_activations(hadamard(x.float()) if is_key else x.float())
    return torch.cat((numbers.to(torch.int8), scales.unsqueeze(-1).view(torch.int8)), -1)


def loaded(rows: Tensor, head_dim: int, is_key: bool) -> Tensor:
    """What `stored` keeps of heads -> [..., head_dim] fp32."""
    if rows.dtype != torch.int8:
        return rows.float()
    assert rows.shape[-1] == kv_cache_row(head_dim, rows.dtype)
    scales = rows[..., head_dim:].contiguous().view(torch.float32)
    x = rows[..., :head_dim].float() * scales
    return hadamard(x) / hadamard_size(head_dim) if is_key else x


def hadamard_size(head_dim: int) -> int:
    """The largest power of two that divides it."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """x [..., D] fp32: each block of hadamard_size(D) times that Hadamard matrix (Sylvester's), not normalised; added up from the widest stride down."""
    stride = hadamard_size(x.shape[-1]) // 2
    while stride:
        first, second = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        stride //= 2
    return x
