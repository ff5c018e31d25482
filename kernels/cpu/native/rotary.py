"""Rotary position embedding and KV-cache writes of the native library. fusion.py fuses the two.

Must not know: models, requests.
"""

from __future__ import annotations

from torch import Tensor

from ...registry import register
from .calls import Op, Rotary, Step, WriteKv
from .program import num_rows, submit
from .tensors import CACHE_DTYPES, DTYPES, PRIORITY, has_native_cache, is_native


@register("rotary_embedding", name="native", predicate=is_native, priority=PRIORITY)
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    call = Rotary(
        Op.ROTARY,
        DTYPES[query.dtype],
        num_rows(query),
        query.data_ptr(),
        key.data_ptr(),
        cos_sin_cache.data_ptr(),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        query.shape[1],
        key.shape[1],
        cos_sin_cache.shape[1],
    )
    submit(call, Step(num_tokens=query.shape[0], positions=positions.data_ptr()))


@register("reshape_and_cache", name="native", predicate=has_native_cache, priority=PRIORITY)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    call = WriteKv(
        Op.WRITE_KV,
        DTYPES[key.dtype],
        num_rows(key),
        key.data_ptr(),
        value.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *key.shape[1:],
        key_cache.shape[1],
        CACHE_DTYPES[key_cache.dtype],
    )
    submit(call, Step(num_tokens=key.shape[0], slot_mapping=slot_mapping.data_ptr()))
