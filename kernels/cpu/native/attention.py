"""Attention by the native library, over the paged KV cache and of text encoders.

Must not know: models, requests.
"""

from torch import Tensor

from ...ops import AttentionMetadata
from ...registry import Facts, register
from .calls import Attention, EncoderAttention, Op, Step
from .program import empty, num_rows, submit
from .tensors import CACHE_DTYPES, DTYPES, MAX_HEAD_DIM, PRIORITY, has_native_cache, is_native


def has_native_head_dim(facts: Facts) -> bool:
    return is_native(facts) and 0 < facts.head_dim <= MAX_HEAD_DIM and facts.head_dim % 8 == 0


def has_native_heads(facts: Facts) -> bool:
    return has_native_cache(facts) and has_native_head_dim(facts)


@register("paged_attention", name="native", predicate=has_native_heads, priority=PRIORITY)
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    block_size, num_kv_heads = key_cache.shape[1:3]
    out = empty(*query.shape, dtype=query.dtype)
    call = Attention(
        Op.ATTENTION,
        DTYPES[query.dtype],
        num_rows(query),
        query.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        out.data_ptr(),
        query.stride(0),
        query.stride(1),
        query.shape[1],
        num_kv_heads,
        query.shape[2],
        block_size,
        sliding_window,
        CACHE_DTYPES[key_cache.dtype],
        0,  # the group that `metadata` is of; the recorder sets it
        scale,
        softcap,
        None if sinks is None else sinks.data_ptr(),
    )
    step = Step(
        num_tokens=query.shape[0],
        num_requests=metadata.seq_lens.shape[0],
        query_start_loc=metadata.query_start_loc.data_ptr(),
        seq_lens=metadata.seq_lens.data_ptr(),
        block_tables=metadata.block_tables.data_ptr(),
        block_table_row=metadata.block_tables.stride(0),
    )
    submit(call, step)
    return out


@register("encoder_attention", name="native", predicate=has_native_head_dim, priority=PRIORITY)
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    out = empty(*query.shape, dtype=query.dtype)
    call = EncoderAttention(
        Op.ENCODER_ATTENTION,
        DTYPES[query.dtype],
        num_rows(query),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        query.shape[1],
        key.shape[1],
        query.shape[2],
        window,
        0 if bias is None else bias.shape[1] // 2,
        scale,
    )
    step = Step(
        num_tokens=query.shape[0],
        num_requests=metadata.seq_lens.shape[0],
        query_start_loc=metadata.query_start_loc.data_ptr(),
    )
    submit(call, step)
    return out
