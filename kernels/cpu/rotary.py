"""Implements rotary position embedding on the CPU.

Must not know: models, requests.
"""

from torch import Tensor

from ..registry import register
from .device import PRIORITY, is_cpu


@register("rotary_embedding", name="cpu", predicate=is_cpu, priority=PRIORITY)
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    # each [T, 1, R / 2]
    cos, sin = (
        cos_sin_cache.index_select(0, positions).to(query.dtype).unsqueeze(1).chunk(2, dim=-1)
    )
    joined = _join_neighbours(query, key)
    for x in (query, key) if joined is None else (joined,):
        if x.shape[-1] > cos_sin_cache.shape[1]:
            x = x[..., : cos_sin_cache.shape[1]]
        first, second = x.chunk(2, dim=-1)
        rotated_first = (first * cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).addcmul_(first, sin)
        first.copy_(rotated_first)


def _join_neighbours(query: Tensor, key: Tensor) -> Tensor | None:
    """[T, NQ + NKV, D] over the same memory, where each row holds the key heads after the query
    heads.

    This halves the number of calls.
    """
    follows = key.storage_offset() == query.storage_offset() + query.shape[1] * query.shape[2]
    if (
        follows
        and key.stride() == query.stride()
        and key.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
    ):
        return query.as_strided(
            (query.shape[0], query.shape[1] + key.shape[1], query.shape[2]), query.stride()
        )
    return None
