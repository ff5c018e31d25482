"""Specifies rotary position embedding.

Must not know: speed.
"""

import torch
from torch import Tensor

from ..registry import register


@register("rotary_embedding", name="reference", priority=0)
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    # each [T, 1, R / 2]
    cos, sin = cos_sin_cache[positions].to(query.dtype).float()[:, None, :].chunk(2, dim=-1)
    half = cos.shape[-1]
    for x in (query, key):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., : 2 * half] = torch.cat(
            (first * cos - second * sin, second * cos + first * sin), dim=-1
        ).to(x.dtype)


@register("rotary_embedding_interleaved", name="reference", priority=0)
def rotary_embedding_interleaved(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor
) -> None:
    # each [T, 1, R / 2]
    cos, sin = cos_sin_cache[positions].to(query.dtype).float()[:, None, :].chunk(2, dim=-1)
    for x in (query, key):
        rotated = x[..., : 2 * cos.shape[-1]]
        first, second = rotated[..., 0::2].float(), rotated[..., 1::2].float()
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        rotated.copy_(pairs.flatten(-2))
