"""Implements rotary position embedding and KV-cache writes by the native library. fusion.py fuses
the two.

Must not know: models, requests.
"""

from __future__ import annotations

from torch import Tensor

from ...registry import register
from .calls import Op, Rotary, Step, WriteKv
from .program import run_call
from .tensors import CACHE_DTYPES, PRIORITY, has_native_cache, is_native


@register("rotary_embedding", name="native", predicate=is_native, priority=PRIORITY)
def rotary_embedding(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    rotate(Op.ROTARY, _step(positions), query, key, cos_sin_cache)


@register("rotary_embedding_interleaved", name="native", predicate=is_native, priority=PRIORITY)
def rotary_embedding_interleaved(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor
) -> None:
    rotate(Op.ROTARY_INTERLEAVED, _step(positions), query, key, cos_sin_cache)


def _step(positions: Tensor) -> Step:
    return Step(num_tokens=positions.shape[0], positions=positions.data_ptr())


def rotate(
    op: Op,
    step: Step,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    components: Tensor | None = None,
) -> None:
    """Rotates in place; the arguments are those of the struct Rotary."""
    run_call(
        Rotary,
        op,
        query,
        step,
        query=query,
        key=key,
        cos_sin=cos_sin_cache,
        components=components,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        rotary_dim=cos_sin_cache.shape[1],
    )


@register("reshape_and_cache", name="native", predicate=has_native_cache, priority=PRIORITY)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    run_call(
        WriteKv,
        Op.WRITE_KV,
        key,
        Step(num_tokens=key.shape[0], slot_mapping=slot_mapping.data_ptr()),
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        kv_heads=key.shape[1],
        head_dim=key.shape[2],
        block_size=key_cache.shape[1],
        cache_block=key_cache.stride(0),
        cache_dtype=CACHE_DTYPES[key_cache.dtype],
        group=0,  # that the slots are of; the recorder knows others
    )
